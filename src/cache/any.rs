//! What the caches have in common: a batch of sequences that grow and are attended to.

use super::{BlockTable, KvCache, KvShape, PagedCache, RingCache, SequenceId};
use crate::{Element, Heads, HeadsMut, Options, Result};

mod sealed {
    pub trait Sealed {}
}

/// A batch of sequences in a cache, as a layer decodes with it: [`KvCache`], [`RingCache`], or [`PagedSequences`] of a
/// [`PagedCache`].
///
/// ```
/// use polyhead::cache::{Cache, KvCache, KvShape};
/// fn oldest(cache: &impl Cache) -> polyhead::Result<usize> {
///     (0..cache.items()).map(|item| cache.position(item)).try_fold(0, |most, len| Ok(most.max(len?)))
/// }
/// let shape = KvShape { num_kv_heads: 1, head_dim: 4, head_dim_v: 4 };
/// assert_eq!(oldest(&KvCache::<f32>::new(shape, 3, 16)?)?, 0);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub trait Cache: sealed::Sealed {
    /// Sequences.
    fn items(&self) -> usize;
    /// Heads and widths.
    fn kv_shape(&self) -> KvShape;
    /// Tokens that a sequence has had: the position of its next one.
    ///
    /// # Errors
    /// [`Error`](crate::Error) if there is no such item, or its sequence is gone.
    fn position(&self, item: usize) -> Result<usize>;
    #[doc(hidden)]
    fn append_heads(&mut self, k: &Heads<'_, f32>, v: &Heads<'_, f32>) -> Result<()>;
    #[doc(hidden)]
    fn truncate_item(&mut self, item: usize, len: usize) -> Result<()>;
    #[doc(hidden)]
    fn attend_heads(&mut self, q: &Heads<'_, f32>, out: HeadsMut<'_, f32>, options: &Options<'_>) -> Result<()>;
}

macro_rules! batch_cache {
    ($($cache:ident)*) => {$(
        impl<T> sealed::Sealed for $cache<T> {}
        impl<T: Element> Cache for $cache<T> {
            fn items(&self) -> usize {
                self.batch()
            }
            fn kv_shape(&self) -> KvShape {
                self.shape()
            }
            fn position(&self, item: usize) -> Result<usize> {
                super::check_item(item, self.batch())?;
                Ok(self.lengths()[item])
            }
            fn append_heads(&mut self, k: &Heads<'_, f32>, v: &Heads<'_, f32>) -> Result<()> {
                self.append_all(k, v)
            }
            fn truncate_item(&mut self, item: usize, len: usize) -> Result<()> {
                self.truncate(item, len)
            }
            fn attend_heads(&mut self, q: &Heads<'_, f32>, out: HeadsMut<'_, f32>, options: &Options<'_>) -> Result<()> {
                self.attend(q, out, options)
            }
        }
    )*};
}
batch_cache!(KvCache RingCache);

/// Some sequences of a [`PagedCache`] as a batch.
///
/// ```
/// use polyhead::cache::{BlockTable, Cache, KvShape, PagedCache, PagedSequences};
/// let mut cache = PagedCache::<f32>::new(KvShape { num_kv_heads: 1, head_dim: 4, head_dim_v: 4 }, 8, 16)?;
/// let ids = [cache.create()?, cache.create()?];
/// let mut table = BlockTable::new();
/// assert_eq!(PagedSequences::new(&mut cache, &ids, &mut table).items(), 2);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct PagedSequences<'a, T> {
    cache: &'a mut PagedCache<T>,
    ids: &'a [SequenceId],
    table: &'a mut BlockTable,
}

impl<'a, T> PagedSequences<'a, T> {
    /// The sequences with these ids, one for each batch item. The table's memory is reused from step to step.
    pub fn new(cache: &'a mut PagedCache<T>, ids: &'a [SequenceId], table: &'a mut BlockTable) -> Self {
        Self { cache, ids, table }
    }

    fn id(&self, item: usize) -> Result<SequenceId> {
        super::check_item(item, self.ids.len())?;
        Ok(self.ids[item])
    }
}

impl<T> sealed::Sealed for PagedSequences<'_, T> {}

impl<T: Element> Cache for PagedSequences<'_, T> {
    fn items(&self) -> usize {
        self.ids.len()
    }

    fn kv_shape(&self) -> KvShape {
        self.cache.shape()
    }

    fn position(&self, item: usize) -> Result<usize> {
        self.cache.len(self.id(item)?)
    }

    fn append_heads(&mut self, k: &Heads<'_, f32>, v: &Heads<'_, f32>) -> Result<()> {
        self.cache.append_all(self.ids, k, v)
    }

    fn truncate_item(&mut self, item: usize, len: usize) -> Result<()> {
        self.cache.truncate(self.id(item)?, len)
    }

    fn attend_heads(&mut self, q: &Heads<'_, f32>, out: HeadsMut<'_, f32>, options: &Options<'_>) -> Result<()> {
        self.cache.batch(self.ids, self.table)?.attend(q, out, options)
    }
}
