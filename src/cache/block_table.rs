//! Some sequences of a paged cache as the batch of one attention call.

use super::paged::Sequence;
use super::pool::Pool;
use super::store::Store;
use crate::{Element, Error, HeadsMut, Options, Outputs, Paged, Result, Sequences, multi_head_with};

/// Memory for the table of a batch, reused from call to call: for each sequence the pages that it lies in.
///
/// ```
/// use polyhead::cache::BlockTable;
/// // Nothing is allocated for batches of up to 8 sequences in up to 100 pages each.
/// let table = BlockTable::with_capacity(8, 100)?;
/// # let _ = table;
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    pages: Vec<u32>,
    lengths: Vec<usize>,
}

impl BlockTable {
    /// An empty table, which grows as needed.
    pub fn new() -> Self {
        Self::default()
    }

    /// A table with room for a batch of sequences of up to so many pages each.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is not enough.
    pub fn with_capacity(batch: usize, pages_per_sequence: usize) -> Result<Self> {
        let mut table = Self::new();
        table.reserve(batch, pages_per_sequence)?;
        Ok(table)
    }

    fn reserve(&mut self, batch: usize, entries: usize) -> Result<()> {
        let all = batch.checked_mul(entries).ok_or(Error::Memory { bytes: usize::MAX })?;
        extend(&mut self.pages, all)?;
        extend(&mut self.lengths, batch)
    }

    /// Lists the pages of sequences, and keys and values in them.
    pub(super) fn fill<'a, T: Element>(
        &'a mut self,
        store: &'a Store<T>,
        pool: &Pool,
        sequences: impl ExactSizeIterator<Item = Sequence> + Clone,
    ) -> Result<PagedBatch<'a, T>> {
        let pages = |sequence: Sequence| sequence.len.div_ceil(store.page_len());
        let batch = sequences.len();
        let entries = sequences.clone().map(pages).max().unwrap_or(0);
        self.reserve(batch, entries)?;
        for (i, sequence) in sequences.enumerate() {
            self.lengths[i] = sequence.len;
            let mut page = sequence.last;
            for entry in self.pages[i * entries..][..pages(sequence)].iter_mut().rev() {
                *entry = page;
                page = pool.previous(page);
            }
        }
        let [keys, values] = store.paged(&self.pages[..batch * entries], &self.lengths[..batch]);
        Ok(PagedBatch { keys, values })
    }
}

/// Makes a vector `len` long, if it is shorter; it grows by doubling.
fn extend<T: Clone + Default>(vec: &mut Vec<T>, len: usize) -> Result<()> {
    if vec.len() < len {
        let bytes = len.saturating_mul(size_of::<T>());
        vec.try_reserve(len - vec.len()).map_err(|_| Error::Memory { bytes })?;
        vec.resize(len, T::default());
    }
    Ok(())
}

/// Sequences of a [`PagedCache`](super::PagedCache), in the order in which [`batch`](super::PagedCache::batch) was
/// given their ids. The cache cannot change while it is there.
///
/// ```
/// use polyhead::cache::{BlockTable, KvShape, PagedCache};
/// use polyhead::{Heads, HeadsMut, Options, multi_head};
/// let mut cache = PagedCache::<f32>::new(KvShape { num_kv_heads: 1, head_dim: 4, head_dim_v: 4 }, 8, 16)?;
/// let sequence = cache.create()?;
/// let (rows, mut out, mut same) = ([0.5f32; 3 * 4], [0.0f32; 4], [0.0f32; 4]);
/// let tokens = Heads::bhsd(&rows, [1, 1, 3, 4])?;
/// cache.append(sequence, &tokens, &tokens)?;
/// let mut table = BlockTable::new();
/// let batch = cache.batch(&[sequence], &mut table)?;
/// let q = Heads::bhsd(&rows[..4], [1, 1, 1, 4])?;
/// batch.attend(&q, HeadsMut::bhsd(&mut out, [1, 1, 1, 4])?, &Options::new())?;
/// let out_view = HeadsMut::bhsd(&mut same, [1, 1, 1, 4])?;
/// multi_head(&q, &batch.keys(), &batch.values(), out_view, &Options::new())?;
/// assert_eq!(out, same);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PagedBatch<'a, T> {
    keys: Paged<'a, T>,
    values: Paged<'a, T>,
}

impl<'a, T: Element> PagedBatch<'a, T> {
    /// The keys, as an operand of (sequences, num_kv_heads, longest length, head_dim).
    pub fn keys(&self) -> Paged<'a, T> {
        self.keys
    }

    /// The values, as an operand of (sequences, num_kv_heads, longest length, head_dim_v).
    pub fn values(&self) -> Paged<'a, T> {
        self.values
    }

    /// Attention of queries (sequences, num_heads, seqlen_q, head_dim), or [`Ragged`](crate::Ragged) ones, over all
    /// tokens of each sequence.
    ///
    /// # Errors
    /// As [`multi_head`](crate::multi_head).
    pub fn attend<O: Element>(&self, q: &impl Sequences, out: HeadsMut<'_, O>, options: &Options<'_>) -> Result<()> {
        self.attend_with(q, Outputs::new(out), options)
    }

    /// As [`attend`](Self::attend), with LSE or weights besides.
    ///
    /// # Errors
    /// As [`multi_head_with`].
    pub fn attend_with<O: Element>(
        &self,
        q: &impl Sequences,
        outputs: Outputs<'_, O>,
        options: &Options<'_>,
    ) -> Result<()> {
        let [batch, ..] = self.keys.shape();
        super::check_batch("q", q, batch)?;
        multi_head_with(q, &self.keys, &self.values, outputs, options)
    }
}
