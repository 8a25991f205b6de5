//! A fixed batch of sequences, each with room of its own.

use super::store::{Chunk, KvShape, Store};
use super::{check_batch, check_item};
use crate::workspace::grow;
use crate::{Element, Error, HeadsMut, Options, Outputs, Paged, Result, Sequences, multi_head_with};

/// Keys and values of `batch` sequences, each with room for `capacity` tokens, appended in place. The keys of a head,
/// from the first token to the last, are one block of memory.
///
/// ```
/// use polyhead::cache::{KvCache, KvShape};
/// use polyhead::{Error, Heads, Ragged};
/// let mut cache = KvCache::<f32>::new(KvShape { num_kv_heads: 1, head_dim: 2, head_dim_v: 2 }, 2, 4)?;
/// // Three tokens for item 0 and one for item 1.
/// let (rows, starts) = ([1.0f32; 4 * 2], [0, 3, 4]);
/// let tokens = Ragged::packed(&rows, [4, 1, 2], &starts)?;
/// cache.append_all(&tokens, &tokens)?;
/// assert_eq!(cache.lengths(), [3, 1]);
/// // Two more for item 0 have no room. Nothing has changed.
/// let two = Heads::bhsd(&rows[..4], [1, 1, 2, 2])?;
/// assert_eq!(cache.append(0, &two, &two), Err(Error::Full { what: "tokens", capacity: 4, needed: 5 }));
/// cache.truncate(0, 2)?;
/// cache.append(0, &two, &two)?;
/// assert_eq!(cache.lengths(), [4, 1]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache<T> {
    /// An item's page is its whole room.
    store: Store<T>,
    /// 0, 1, 2, ...
    table: Vec<u32>,
    lengths: Vec<usize>,
}

impl<T: Element> KvCache<T> {
    /// An empty cache of `batch` items. All its memory is taken here, zeroed.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is not enough; [`Error::Value`] for 2^32 - 1 items or more.
    pub fn new(shape: KvShape, batch: usize, capacity: usize) -> Result<Self> {
        let store = Store::new(shape, batch, capacity)?;
        let (mut table, mut lengths, mut next) = (Vec::new(), Vec::new(), 0..);
        grow(&mut table, batch, || next.next().unwrap_or_default())?;
        grow(&mut lengths, batch, usize::default)?;
        Ok(Self { store, table, lengths })
    }

    /// Appends tokens to one item: `k` (1, num_kv_heads, n, head_dim), `v` (1, num_kv_heads, n, head_dim_v).
    ///
    /// # Errors
    /// [`Error::Full`] if they do not fit, [`Error::Shape`] for other sizes, [`Error::Value`] for an item that is not
    /// there.
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
        let capacity = self.capacity();
        for i in 0..count {
            let needed = self.lengths[first + i].checked_add(chunk.len(i));
            if needed.is_none_or(|needed| needed > capacity) {
                return Err(Error::Full { what: "tokens", capacity, needed: needed.unwrap_or(usize::MAX) });
            }
        }
        for i in 0..count {
            let length = &mut self.lengths[first + i];
            self.store.write(self.table[first + i], *length, &chunk, i, 0..chunk.len(i));
            *length += chunk.len(i);
        }
        Ok(())
    }

    /// Keeps the first `len` tokens of an item; all of them, if it has no more.
    ///
    /// # Errors
    /// [`Error::Value`] for an item that is not there.
    pub fn truncate(&mut self, item: usize, len: usize) -> Result<()> {
        check_item(item, self.batch())?;
        self.lengths[item] = self.lengths[item].min(len);
        Ok(())
    }

    /// Forgets all tokens; the memory stays.
    pub fn clear(&mut self) {
        self.lengths.fill(0);
    }

    /// Items.
    pub fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Tokens of each item.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Tokens for which each item has room.
    pub fn capacity(&self) -> usize {
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

    /// The keys, as an operand of (batch, num_kv_heads, longest length, head_dim).
    pub fn keys(&self) -> Paged<'_, T> {
        self.store.paged(&self.table, &self.lengths)[0]
    }

    /// The values, as an operand of (batch, num_kv_heads, longest length, head_dim_v).
    pub fn values(&self) -> Paged<'_, T> {
        self.store.paged(&self.table, &self.lengths)[1]
    }

    /// Attention of queries (batch, num_heads, seqlen_q, head_dim) over all tokens, as
    /// [`multi_head`](crate::multi_head).
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
        check_batch("q", q, self.batch())?;
        let [k, v] = self.store.paged(&self.table, &self.lengths);
        multi_head_with(q, &k, &v, outputs, options)
    }
}
