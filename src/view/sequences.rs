//! Sequences of an operand, however they lie: side by side in a view, packed without padding, or in pages.

use core::iter::zip;

use super::{Heads, Layout};
use crate::element::AnySlice;
use crate::{Element, Error, Result};

mod sealed {
    pub trait Sealed {}
}

/// An operand of attention: queries, keys or values, one sequence for each batch item.
///
/// | type | its sequences |
/// |---|---|
/// | [`Heads`] | are of one length, in a strided view (batch, heads, seq, dim) |
/// | [`Ragged`] | have lengths of their own and lie behind one another, without padding |
/// | [`Paged`] | have lengths of their own and lie in pages, which they may share |
///
/// Keys and values must agree on lengths; queries are [`Heads`] or [`Ragged`].
pub trait Sequences: sealed::Sealed {
    /// (batch, heads, length of the longest sequence, dim).
    fn shape(&self) -> [usize; 4];
    #[doc(hidden)]
    fn erase(&self) -> AnyHeads<'_>;
}

/// Sequences packed behind one another, as FlashAttention's `cu_seqlens` describe them: sequence `i` has the rows
/// `starts[i]..starts[i + 1]`.
///
/// ```
/// use polyhead::{Diagonal, Heads, HeadsMut, Options, Ragged, multi_head};
/// // Sequences of 2, 0 and 3 tokens: 5 rows of 4 heads x 8.
/// let (starts, data) = ([0, 2, 2, 5], [0.5f32; 5 * 4 * 8]);
/// let tokens = Ragged::packed(&data, [5, 4, 8], &starts)?;
/// let mut out = [0.0f32; 5 * 4 * 8];
/// let out_rows = HeadsMut::bshd(&mut out, [1, 5, 4, 8])?;
/// multi_head(&tokens, &tokens, &tokens, out_rows, &Options::new().causal(Diagonal::TopLeft))?;
/// assert_eq!(out, [0.5; 5 * 4 * 8]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Ragged<'a, T> {
    rows: Heads<'a, T>,
    starts: &'a [usize],
}

impl<'a, T: Element> Ragged<'a, T> {
    /// The rows of a view (1, heads, rows, dim), cut at `starts`: from 0, never falling, up to the number of rows.
    ///
    /// # Errors
    /// [`Error::Shape`] if the view has more than one batch item, [`Error::Value`] if `starts` is not as described.
    pub fn new(rows: Heads<'a, T>, starts: &'a [usize]) -> Result<Self> {
        let [batch, _, total, _] = rows.shape();
        if batch != 1 {
            return Err(Error::Shape { operand: "ragged", axis: "batch", expected: 1, actual: batch });
        }
        check_starts(total, starts)?;
        Ok(Self { rows, starts })
    }

    /// Packed (rows, heads, dim), FlashAttention's layout.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn packed(data: &'a [T], [rows, heads, dim]: [usize; 3], starts: &'a [usize]) -> Result<Self> {
        Self::new(Heads::bshd(data, [1, rows, heads, dim])?, starts)
    }
}

/// That sequences of `total` rows begin at `starts`.
pub(crate) fn check_starts(total: usize, starts: &[usize]) -> Result<()> {
    let wrong = |expected, actual: usize| Err(Error::Value { option: "starts", expected, actual: actual as f64 });
    match (starts.first(), starts.last()) {
        (Some(0), Some(&last)) if last == total => {}
        (Some(0), Some(&last)) => return wrong("the number of rows at the end", last),
        (first, _) => return wrong("0 at the beginning", first.copied().unwrap_or(0)),
    }
    match starts.windows(2).find(|pair| pair[0] > pair[1]) {
        Some(pair) => wrong("no smaller than the one before", pair[1]),
        None => Ok(()),
    }
}

impl<T> sealed::Sealed for Ragged<'_, T> {}

impl<T: Element> Sequences for Ragged<'_, T> {
    fn shape(&self) -> [usize; 4] {
        let [_, heads, _, dim] = self.rows.shape();
        let longest = self.starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        [self.starts.len() - 1, heads, longest, dim]
    }

    fn erase(&self) -> AnyHeads<'_> {
        AnyHeads { map: Map::Ragged(self.starts), ..self.rows.erase() }
    }
}

/// Sequences in pages of a common store: position `p` of sequence `i` is row `p % page_len` of page
/// `table[i * n + p / page_len]`, where `n` is the number of table entries of a sequence. Sequences may share pages.
///
/// ```
/// use polyhead::{Heads, HeadsMut, Options, Paged, multi_head};
/// // Four pages of 2 tokens of 1 head x 4; sequence 0 has 3 tokens in pages 3 and 0, sequence 1 two tokens in page 3.
/// let store = [0.25f32; 4 * 2 * 4];
/// let (table, lengths) = ([3, 0, 3, 0], [3, 2]);
/// let kv = Paged::new(Heads::bhsd(&store, [4, 1, 2, 4])?, &table, &lengths)?;
/// let (q, mut out) = ([1.0f32; 2 * 4], [0.0f32; 2 * 4]);
/// multi_head(&Heads::bhsd(&q, [2, 1, 1, 4])?, &kv, &kv, HeadsMut::bhsd(&mut out, [2, 1, 1, 4])?, &Options::new())?;
/// assert_eq!(out, [0.25; 8]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Paged<'a, T> {
    pages: Heads<'a, T>,
    table: &'a [u32],
    /// Table entries of a sequence.
    entries: usize,
    lengths: &'a [usize],
}

impl<'a, T: Element> Paged<'a, T> {
    /// A store (pages, heads, page_len, dim), a table of `lengths.len()` rows, and the sequences' lengths. Entries behind the
    /// last page of a sequence are not looked at.
    ///
    /// # Errors
    /// [`Error::Length`] if the table has no whole number of entries for each sequence; [`Error::Value`] for a length that its
    /// entries do not cover, or an entry that is no page.
    pub fn new(pages: Heads<'a, T>, table: &'a [u32], lengths: &'a [usize]) -> Result<Self> {
        let [count, _, page_len, _] = pages.shape();
        let entries = table.len() / lengths.len().max(1);
        if entries * lengths.len() != table.len() {
            let expected = entries * lengths.len();
            return Err(Error::Length { operand: "table", expected, actual: table.len() });
        }
        for (&length, row) in zip(lengths, table.chunks_exact(entries.max(1)).chain(core::iter::repeat(&[][..]))) {
            if length > row.len().saturating_mul(page_len) {
                let expected = "at most the table entries of a sequence times page_len";
                return Err(Error::Value { option: "lengths", expected, actual: length as f64 });
            }
            let used = length.checked_div(page_len).unwrap_or(0) + usize::from(length % page_len.max(1) != 0);
            if let Some(&page) = row[..used].iter().find(|&&page| page as usize >= count) {
                return Err(Error::Value { option: "table", expected: "pages of the store", actual: page.into() });
            }
        }
        Ok(Self { pages, table, entries, lengths })
    }
}

impl<T> sealed::Sealed for Paged<'_, T> {}

impl<T: Element> Sequences for Paged<'_, T> {
    fn shape(&self) -> [usize; 4] {
        let [_, heads, _, dim] = self.pages.shape();
        [self.lengths.len(), heads, self.lengths.iter().copied().max().unwrap_or(0), dim]
    }

    fn erase(&self) -> AnyHeads<'_> {
        let Self { table, entries, lengths, .. } = *self;
        AnyHeads { map: Map::Paged { table, entries, lengths }, ..self.pages.erase() }
    }
}

impl<T> sealed::Sealed for Heads<'_, T> {}

impl<T: Element> Sequences for Heads<'_, T> {
    fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    fn erase(&self) -> AnyHeads<'_> {
        AnyHeads { data: T::erase(self.data), layout: self.layout, map: Map::Dense }
    }
}

/// Sequences whose element type and place are known at run time. Every position below a sequence's length is inside the slice.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct AnyHeads<'a> {
    pub(crate) data: AnySlice<'a>,
    pub(crate) layout: Layout<4>,
    map: Map<'a>,
}

/// How (batch item, position) becomes an index of the layout's first and third axis.
#[derive(Clone, Copy, Debug)]
enum Map<'a> {
    Dense,
    Ragged(&'a [usize]),
    Paged { table: &'a [u32], entries: usize, lengths: &'a [usize] },
}

impl<'a> AnyHeads<'a> {
    /// Lengths of the sequences, if they have their own.
    pub(crate) fn lengths(&self) -> Lengths<'a> {
        match self.map {
            Map::Dense => Lengths::Same(self.layout.shape[2]),
            Map::Ragged(starts) => Lengths::Starts(starts),
            Map::Paged { lengths, .. } => Lengths::Each(lengths),
        }
    }

    /// Where the sequences of ragged queries start.
    pub(crate) fn starts(&self) -> Result<Option<&'a [usize]>> {
        match self.map {
            Map::Dense => Ok(None),
            Map::Ragged(starts) => Ok(Some(starts)),
            Map::Paged { .. } => Err(Error::Unsupported { what: "a paged operand as queries" }),
        }
    }

    /// Where a row begins.
    #[inline(always)]
    pub(crate) fn offset(&self, [batch, head, seq]: [usize; 3]) -> usize {
        match self.map {
            Map::Dense => self.layout.offset([batch, head, seq, 0]),
            Map::Ragged(starts) => self.layout.offset([0, head, starts[batch] + seq, 0]),
            Map::Paged { table, entries, .. } => {
                let page_len = self.layout.shape[2];
                let page = table[batch * entries + seq / page_len] as usize;
                self.layout.offset([page, head, seq % page_len, 0])
            }
        }
    }

    /// How many of `count` rows from `seq` on lie one stride apart.
    #[inline(always)]
    pub(crate) fn run(&self, seq: usize, count: usize) -> usize {
        match self.map {
            Map::Paged { .. } => count.min(self.layout.shape[2] - seq % self.layout.shape[2]),
            _ => count,
        }
    }
}

/// Lengths of the sequences of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lengths<'a> {
    Same(usize),
    Each(&'a [usize]),
    /// Differences of neighbours.
    Starts(&'a [usize]),
}

impl Lengths<'_> {
    #[inline(always)]
    pub(crate) fn get(&self, batch: usize) -> usize {
        match self {
            Self::Same(length) => *length,
            Self::Each(lengths) => lengths[batch],
            Self::Starts(starts) => starts[batch + 1] - starts[batch],
        }
    }
}
