//! Sequences that come, go and fork, in pages of a common pool.

use super::block_table::{BlockTable, PagedBatch};
use super::pool::{NONE, Pool};
use super::store::{Chunk, KvShape, Store, runs};
use crate::{Element, Error, Result, Sequences};

/// Names a sequence of one [`PagedCache`] until it is removed; never again another one.
///
/// Caches that see the same calls in the same order hand out the same ids: one serves for a cache of each layer of a
/// model.
///
/// ```
/// use polyhead::Error;
/// use polyhead::cache::{KvShape, PagedCache};
/// let mut cache = PagedCache::<f32>::new(KvShape { num_kv_heads: 1, head_dim: 4, head_dim_v: 4 }, 8, 16)?;
/// let gone = cache.create()?;
/// cache.remove(gone)?;
/// let other = cache.create()?;
/// assert_ne!(gone, other);
/// assert_eq!(cache.len(gone), Err(Error::UnknownSequence));
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    slot: u32,
    serial: u64,
}

/// A sequence, or a free place for one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// Of its id; 0 if the place is free.
    serial: u64,
    pub(super) len: usize,
    /// Its last page, [`NONE`] if it is empty; of a free place, the next free one.
    pub(super) last: u32,
}

/// Keys and values of sequences in pages of `page_len` tokens. Forks share pages, and a page that is shared is copied
/// when one of them writes to it.
///
/// An `append` that finds too few free pages changes nothing: the caller may remove a sequence and try again. Block
/// tables that are managed elsewhere need no cache: [`Paged`](crate::Paged) takes them as they are.
///
/// ```
/// use polyhead::Heads;
/// use polyhead::cache::{KvShape, PagedCache};
/// let mut cache = PagedCache::<f32>::new(KvShape { num_kv_heads: 1, head_dim: 2, head_dim_v: 2 }, 4, 16)?;
/// let rows = [0.5f32; 20 * 2];
/// let (prompt, token) = (Heads::bhsd(&rows, [1, 1, 20, 2])?, Heads::bhsd(&rows[..2], [1, 1, 1, 2])?);
/// let a = cache.create()?;
/// cache.append(a, &prompt, &prompt)?;
/// let b = cache.fork(a)?;
/// assert_eq!((cache.len(b)?, cache.free_pages()), (20, 2));
/// // Both have the first page; the second, of four tokens, is copied before `b` gets one of its own.
/// cache.append(b, &token, &token)?;
/// assert_eq!((cache.len(a)?, cache.len(b)?, cache.free_pages()), (20, 21, 1));
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedCache<T> {
    store: Store<T>,
    pool: Pool,
    sequences: Vec<Sequence>,
    /// The first free place, or [`NONE`].
    free: u32,
    /// The last serial number given.
    serial: u64,
}

impl<T: Element> PagedCache<T> {
    /// A cache of so many pages of `page_len` tokens (16 to 256 are usual), and no sequence. All its memory is taken
    /// here, zeroed, but for a few bytes that each sequence takes.
    ///
    /// # Errors
    /// [`Error::Value`] if `page_len` is 0 or there are 2^32 - 1 pages or more; [`Error::Memory`] if there is not
    /// enough.
    pub fn new(shape: KvShape, pages: usize, page_len: usize) -> Result<Self> {
        if page_len == 0 {
            return Err(Error::Value { option: "page_len", expected: "at least 1", actual: 0.0 });
        }
        let store = Store::new(shape, pages, page_len)?;
        Ok(Self { store, pool: Pool::new(pages)?, sequences: Vec::new(), free: NONE, serial: 0 })
    }

    /// A new sequence without tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is no room to note it.
    pub fn create(&mut self) -> Result<SequenceId> {
        self.insert(0, NONE)
    }

    /// A new sequence with the tokens of another one, in the same pages. With [`truncate`](Self::truncate) it shares a
    /// prefix.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for an id that is not in use; [`Error::Memory`] if there is no room to note it.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let Sequence { len, last, .. } = self.get(id)?;
        let fork = self.insert(len, last)?;
        self.pool.share(last);
        Ok(fork)
    }

    fn insert(&mut self, len: usize, last: u32) -> Result<SequenceId> {
        if self.free == NONE {
            self.free = self.add_place()?;
        }
        let slot = self.free;
        let place = &mut self.sequences[slot as usize];
        self.free = place.last;
        self.serial += 1;
        *place = Sequence { serial: self.serial, len, last };
        Ok(SequenceId { slot, serial: self.serial })
    }

    /// A free place where there was none.
    fn add_place(&mut self) -> Result<u32> {
        let count = self.sequences.len();
        let memory = || Error::Memory { bytes: (count + 1).saturating_mul(size_of::<Sequence>()) };
        let slot = u32::try_from(count).ok().filter(|&slot| slot != NONE).ok_or_else(memory)?;
        self.sequences.try_reserve(1).map_err(|_| memory())?;
        self.sequences.push(Sequence { serial: 0, len: 0, last: NONE });
        Ok(slot)
    }

    fn get(&self, id: SequenceId) -> Result<Sequence> {
        let sequence = self.sequences.get(id.slot as usize).filter(|sequence| sequence.serial == id.serial);
        sequence.copied().ok_or(Error::UnknownSequence)
    }

    /// Forgets a sequence, and frees the pages that no other has.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for an id that is not in use.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        self.pool.release(self.get(id)?.last);
        self.sequences[id.slot as usize] = Sequence { serial: 0, len: 0, last: self.free };
        self.free = id.slot;
        Ok(())
    }

    /// Keeps the first `len` tokens of a sequence; all of them, if it has no more. Frees the pages that nobody has any
    /// more.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for an id that is not in use.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let Sequence { serial, len: old, mut last } = self.get(id)?;
        if len < old {
            for _ in len.div_ceil(self.page_len())..old.div_ceil(self.page_len()) {
                last = self.pool.step_back(last);
            }
            self.sequences[id.slot as usize] = Sequence { serial, len, last };
        }
        Ok(())
    }

    /// Appends tokens to a sequence: `k` (1, num_kv_heads, n, head_dim), `v` (1, num_kv_heads, n, head_dim_v).
    ///
    /// # Errors
    /// [`Error::Full`] if there are not enough free pages, [`Error::UnknownSequence`] for an id that is not in use,
    /// [`Error::Shape`] for other sizes.
    pub fn append(&mut self, id: SequenceId, k: &impl Sequences, v: &impl Sequences) -> Result<()> {
        self.append_all(&[id], k, v)
    }

    /// Appends tokens to some sequences: `k` (ids, num_kv_heads, n, head_dim), `v` (ids, num_kv_heads, n, head_dim_v),
    /// or as many for each as [`Ragged`](crate::Ragged) sequences have.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::Value`] for an id that is there twice; no sequence has then changed.
    pub fn append_all(&mut self, ids: &[SequenceId], k: &impl Sequences, v: &impl Sequences) -> Result<()> {
        for (i, &id) in ids.iter().enumerate() {
            self.get(id)?;
            if ids[..i].contains(&id) {
                return Err(Error::Value { option: "ids", expected: "each id once", actual: i as f64 });
            }
        }
        let chunk = Chunk::new(k, v, ids.len(), self.shape())?;
        let (capacity, needed) = (self.free_pages(), self.pages_needed(ids, &chunk).unwrap_or(usize::MAX));
        if needed > capacity {
            return Err(Error::Full { what: "pages", capacity, needed });
        }
        for (i, id) in ids.iter().enumerate() {
            self.append_one(id.slot, &chunk, i);
        }
        Ok(())
    }

    /// Whether `n` new tokens of a sequence begin in the middle of its last page.
    fn begins_inside(&self, sequence: Sequence, n: usize) -> bool {
        n > 0 && !sequence.len.is_multiple_of(self.page_len())
    }

    /// Pages that `append_all` takes; `None` if more than can be counted.
    fn pages_needed(&self, ids: &[SequenceId], chunk: &Chunk<'_>) -> Option<usize> {
        let at = |i: usize| self.sequences[ids[i].slot as usize];
        let mut needed = 0usize;
        for i in 0..ids.len() {
            let (sequence, n) = (at(i), chunk.len(i));
            let end = sequence.len.checked_add(n)?;
            needed = needed.checked_add(end.div_ceil(self.page_len()) - sequence.len.div_ceil(self.page_len()))?;
            if self.begins_inside(sequence, n) && self.pool.references(sequence.last) > 1 {
                // Those before it in the list that share the page will have left it for a copy.
                let leaves = |&j: &usize| at(j).last == sequence.last && self.begins_inside(at(j), chunk.len(j));
                let gone = (0..i).filter(leaves).count();
                needed = needed.checked_add(usize::from(self.pool.references(sequence.last) > 1 + gone))?;
            }
        }
        Some(needed)
    }

    /// Appends the tokens of an item of the chunk; there are enough free pages.
    fn append_one(&mut self, slot: u32, chunk: &Chunk<'_>, item: usize) {
        let Sequence { serial, len, mut last } = self.sequences[slot as usize];
        let (n, page_len) = (chunk.len(item), self.page_len());
        if self.begins_inside(self.sequences[slot as usize], n) && self.pool.references(last) > 1 {
            let previous = self.pool.previous(last);
            self.pool.share(previous);
            let copy = self.pool.take(previous);
            self.store.copy(last, copy, len % page_len);
            self.pool.release(last);
            last = copy;
        }
        for (at, tokens) in runs(len, n, page_len) {
            if at % page_len == 0 {
                last = self.pool.take(last);
            }
            self.store.write(last, at % page_len, chunk, item, tokens);
        }
        self.sequences[slot as usize] = Sequence { serial, len: len + n, last };
    }

    /// Sequences as the batch of an attention call; one may be in it more than once. The table is listed anew.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for an id that is not in use; [`Error::Memory`] if the table has no room to grow.
    pub fn batch<'a>(&'a self, ids: &[SequenceId], table: &'a mut BlockTable) -> Result<PagedBatch<'a, T>> {
        for &id in ids {
            self.get(id)?;
        }
        table.fill(&self.store, &self.pool, ids.iter().map(|id| self.sequences[id.slot as usize]))
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for an id that is not in use.
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.len)
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.pool.len()
    }

    /// Pages that no sequence has.
    pub fn free_pages(&self) -> usize {
        self.pool.free()
    }

    /// Tokens of a page.
    pub fn page_len(&self) -> usize {
        self.store.page_len()
    }

    /// Heads and widths.
    pub fn shape(&self) -> KvShape {
        self.store.shape()
    }

    /// Bytes of keys and values on the heap.
    pub fn bytes(&self) -> usize {
        self.store.bytes()
    }
}
