//! A fixed batch of sequences under a sliding window: old tokens are overwritten, a page at a time.
//!
//! Position `p` of a sequence is always slot `p % page_len` of page `p / page_len`. The first pages, those with a token
//! to keep, stay; the others go round. So the pages that are held, one after the other, are the sequence without a
//! piece of whole pages, and every token behind that piece is as far from the end as it was.

use super::store::{Chunk, KvShape, Store, runs};
use super::{check_batch, check_item};
use crate::workspace::grow;
use crate::{Diagonal, Element, Error, HeadsMut, Options, Outputs, Paged, Result, Sequences, Window, multi_head_with};

/// What a ring cache holds of a sequence.
///
/// ```
/// use polyhead::cache::Ring;
/// // Mistral's window, four attention sinks, prompts in chunks of up to 512 tokens.
/// let ring = Ring { window: 4096, keep_first: 4, max_chunk: 512, page_len: 64 };
/// # let _ = ring;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Tokens that a query sees, its own among them.
    pub window: usize,
    /// Tokens at the start of a sequence that every later query sees: the attention sinks of StreamingLLM. May be 0.
    pub keep_first: usize,
    /// Tokens appended at once, at the most.
    pub max_chunk: usize,
    /// Tokens that are overwritten together. A small page wastes less, a large one is read faster; 16 to 256 are usual.
    pub page_len: usize,
}

/// Keys and values of `batch` sequences of any length, of which a sliding window and the first few tokens are held: at
/// least the last `window + max_chunk - 1` tokens (less what a truncation took), so that each query of a chunk has its
/// whole window.
///
/// Attention gives what it gives over the whole history with the options `window(Window { left: Some(window - 1),
/// right: Some(0), diagonal: BottomRight })` and `keep_first`. Items advance by themselves, as their prompts have
/// lengths of their own; positions that other options speak of (a mask's keys, ALiBi's distances to the tokens kept
/// first) are those among the tokens held.
///
/// ```
/// use polyhead::cache::{KvShape, Ring, RingCache};
/// use polyhead::{Heads, HeadsMut, Options};
/// let shape = KvShape { num_kv_heads: 1, head_dim: 4, head_dim_v: 1 };
/// let mut cache = RingCache::<f32>::new(shape, 1, Ring { window: 3, keep_first: 1, max_chunk: 1, page_len: 2 })?;
/// let (q, mut out) = ([0.0f32; 4], [0.0f32]);
/// let q = Heads::bhsd(&q, [1, 1, 1, 4])?;
/// for token in 0..100 {
///     let v = [token as f32];
///     cache.append_all(&q, &Heads::bhsd(&v, [1, 1, 1, 1])?)?;
///     cache.attend(&q, HeadsMut::bhsd(&mut out, [1, 1, 1, 1])?, &Options::new())?;
/// }
/// // Each query averages what it sees: the first token and the last three.
/// assert_eq!(out, [(0.0 + 97.0 + 98.0 + 99.0) / 4.0]);
/// assert_eq!((cache.lengths(), cache.held()), (&[100][..], &[6][..]));
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct RingCache<T> {
    store: Store<T>,
    ring: Ring,
    /// Pages of an item that stay, and those that go round behind them.
    kept_pages: usize,
    ring_pages: usize,
    /// Of each item: the pages of the store in the order of their tokens.
    table: Vec<u32>,
    /// The first page of the sequence that is in the ring; `kept_pages` as long as nothing has been overwritten.
    first: Vec<usize>,
    lengths: Vec<usize>,
    held: Vec<usize>,
}

impl<T: Element> RingCache<T> {
    /// An empty cache of `batch` items. All its memory is taken here, zeroed.
    ///
    /// # Errors
    /// [`Error::Value`] if `window`, `max_chunk` or `page_len` is 0, or for 2^32 - 1 pages or more; [`Error::Memory`]
    /// if there is not enough.
    pub fn new(shape: KvShape, batch: usize, ring: Ring) -> Result<Self> {
        let Ring { window, keep_first, max_chunk, page_len } = ring;
        for (option, value) in [("window", window), ("max_chunk", max_chunk), ("page_len", page_len)] {
            if value == 0 {
                return Err(Error::Value { option, expected: "at least 1", actual: 0.0 });
            }
        }
        let too_large = Error::Memory { bytes: usize::MAX };
        let span = (window - 1).checked_add(max_chunk).ok_or(too_large.clone())?;
        // Tokens in a row touch as many pages as this, wherever they begin.
        let ring_pages = (span - 1).div_ceil(page_len).saturating_add(1);
        let kept_pages = keep_first.div_ceil(page_len);
        let row = kept_pages.checked_add(ring_pages).filter(|row| row.checked_mul(page_len).is_some());
        let pages = row.and_then(|row| row.checked_mul(batch)).ok_or(too_large)?;
        let store = Store::new(shape, pages, page_len)?;
        let mut cache = Self {
            store,
            ring,
            kept_pages,
            ring_pages,
            table: Vec::new(),
            first: Vec::new(),
            lengths: Vec::new(),
            held: Vec::new(),
        };
        let mut next = 0..;
        grow(&mut cache.table, pages, || next.next().unwrap_or_default())?;
        grow(&mut cache.first, batch, || kept_pages)?;
        grow(&mut cache.lengths, batch, usize::default)?;
        grow(&mut cache.held, batch, usize::default)?;
        Ok(cache)
    }

    /// Appends tokens to one item: `k` (1, num_kv_heads, n, head_dim), `v` (1, num_kv_heads, n, head_dim_v).
    ///
    /// # Errors
    /// [`Error::Full`] if `n` is more than `max_chunk`, [`Error::Shape`] for other sizes, [`Error::Value`] for an item
    /// that is not there.
    pub fn append(&mut self, item: usize, k: &impl Sequences, v: &impl Sequences) -> Result<()> {
        check_item(item, self.batch())?;
        self.append_from(item, Chunk::new(k, v, 1, self.shape())?, 1)
    }

    /// Appends tokens to all items: `k` (batch, num_kv_heads, n, head_dim), `v` (batch, num_kv_heads, n, head_dim_v),
    /// or as many for each item as [`Ragged`](crate::Ragged) sequences have.
    ///
    /// # Errors
    /// As [`append`](Self::append); no item has then changed.
    pub fn append_all(&mut self, k: &impl Sequences, v: &impl Sequences) -> Result<()> {
        let batch = self.batch();
        self.append_from(0, Chunk::new(k, v, batch, self.shape())?, batch)
    }

    /// Appends to the items from `first` on.
    fn append_from(&mut self, first: usize, chunk: Chunk<'_>, count: usize) -> Result<()> {
        for i in 0..count {
            let (capacity, needed) = (self.ring.max_chunk, chunk.len(i));
            if needed > capacity {
                return Err(Error::Full { what: "tokens of a chunk", capacity, needed });
            }
            if self.lengths[first + i].checked_add(needed).is_none() {
                return Err(Error::Full { what: "tokens", capacity: usize::MAX, needed: usize::MAX });
            }
        }
        for i in 0..count {
            let (item, page_len) = (first + i, self.ring.page_len);
            let start = self.lengths[item];
            let end = start + chunk.len(i);
            let oldest = end.div_ceil(page_len).saturating_sub(self.ring_pages).max(self.first[item]);
            self.set(item, end, oldest);
            for (at, tokens) in runs(start, chunk.len(i), page_len) {
                self.store.write(self.page(item, at / page_len), at % page_len, &chunk, i, tokens);
            }
        }
        Ok(())
    }

    /// Where a page of a sequence lies.
    fn page(&self, item: usize, page: usize) -> u32 {
        let place = match page.checked_sub(self.kept_pages) {
            None => page,
            Some(behind) => self.kept_pages + behind % self.ring_pages,
        };
        // There are less pages than a u32 can number.
        (item * (self.kept_pages + self.ring_pages) + place) as u32
    }

    /// Makes an item `len` tokens long, with `first` for the first page in its ring.
    fn set(&mut self, item: usize, len: usize, first: usize) {
        if self.first[item] != first {
            self.first[item] = first;
            let row = item * (self.kept_pages + self.ring_pages) + self.kept_pages;
            for i in 0..self.ring_pages {
                self.table[row + i] = self.page(item, first + i);
            }
        }
        self.lengths[item] = len;
        self.held[item] = len - (first - self.kept_pages) * self.ring.page_len;
    }

    /// That no token is overwritten which queries of an item see, the first of them at `position`.
    fn check_window(&self, item: usize, position: usize) -> Result<()> {
        let (page_len, first) = (self.ring.page_len, self.first[item]);
        let oldest = first * page_len;
        let needed = position.saturating_sub(self.ring.window - 1).max(self.kept_pages * page_len);
        if first == self.kept_pages || needed >= oldest { Ok(()) } else { Err(Error::Overwritten { needed, oldest }) }
    }

    /// Keeps the first `len` tokens of an item; all of them, if it has no more. What the last `append` brought can
    /// always be taken back, so can the last `max_chunk` tokens if nothing has been taken back among them, and so can
    /// all tokens.
    ///
    /// # Errors
    /// [`Error::Overwritten`] if the next token's window would miss tokens; [`Error::Value`] for an item that is not
    /// there.
    pub fn truncate(&mut self, item: usize, len: usize) -> Result<()> {
        check_item(item, self.batch())?;
        if len >= self.lengths[item] {
            return Ok(());
        }
        if len <= self.kept_pages * self.ring.page_len {
            self.set(item, len, self.kept_pages);
            return Ok(());
        }
        self.check_window(item, len)?;
        self.set(item, len, self.first[item]);
        Ok(())
    }

    /// Forgets all tokens; the memory stays.
    pub fn clear(&mut self) {
        for item in 0..self.batch() {
            self.set(item, 0, self.kept_pages);
        }
    }

    /// Items.
    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Tokens that each item has seen: the position of its next one.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Tokens of each item that are held, and so keys of an attention call.
    pub fn held(&self) -> &[usize] {
        &self.held
    }

    /// What is held of a sequence.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Heads and widths.
    pub fn shape(&self) -> KvShape {
        self.store.shape()
    }

    /// Bytes of keys and values on the heap.
    pub fn bytes(&self) -> usize {
        self.store.bytes()
    }

    /// The window that makes attention over the tokens held the same as over all; it goes with
    /// [`keep_first`](Options::keep_first).
    pub fn window(&self) -> Window {
        Window { left: Some(self.ring.window - 1), right: Some(0), diagonal: Diagonal::BottomRight }
    }

    /// The keys held, as an operand of (batch, num_kv_heads, longest, head_dim).
    pub fn keys(&self) -> Paged<'_, T> {
        self.store.paged(&self.table, &self.held)[0]
    }

    /// The values held, as an operand of (batch, num_kv_heads, longest, head_dim_v).
    pub fn values(&self) -> Paged<'_, T> {
        self.store.paged(&self.table, &self.held)[1]
    }

    /// Attention of the last tokens' queries (batch, num_heads, seqlen_q, head_dim), with the cache's window and kept
    /// tokens besides the options.
    ///
    /// # Errors
    /// [`Error::Overwritten`] if there are so many queries (more than were appended last) that the first of them misses
    /// keys; [`Error::Unsupported`] for options with another window, or with key lengths; and as
    /// [`multi_head`](crate::multi_head).
    pub fn attend<O: Element>(&self, q: &impl Sequences, out: HeadsMut<'_, O>, options: &Options<'_>) -> Result<()> {
        self.attend_with(q, Outputs::new(out), options)
    }

    /// As [`attend`](Self::attend), with LSE or weights (over the keys held) besides.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub fn attend_with<O: Element>(
        &self,
        q: &impl Sequences,
        outputs: Outputs<'_, O>,
        options: &Options<'_>,
    ) -> Result<()> {
        check_batch("q", q, self.batch())?;
        if options.window.is_some_and(|window| window != self.window()) {
            return Err(Error::Unsupported { what: "a window other than the ring cache's" });
        }
        if options.key_lengths.is_some() {
            return Err(Error::Unsupported { what: "key_lengths with a ring cache" });
        }
        let lengths = q.erase().lengths();
        for item in 0..self.batch() {
            if lengths.get(item) > 0 {
                self.check_window(item, self.lengths[item].saturating_sub(lengths.get(item)))?;
            }
        }
        let options = options.window(self.window()).keep_first(self.ring.keep_first);
        let [k, v] = self.store.paged(&self.table, &self.held);
        multi_head_with(q, &k, &v, outputs, &options)
    }
}
