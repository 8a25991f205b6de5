//! Memory of a cache: pages of keys and pages of values, and the tokens that are written to them.

use core::any::Any;
use core::fmt;
use core::iter::zip;
use core::ops::Range;

use half::{bf16, f16};

use crate::element::AnySlice;
use crate::view::AnyHeads;
use crate::workspace::grow;
use crate::{Element, Error, Heads, Paged, Result, Sequences};

/// What one token leaves in a cache: a key of `head_dim` and a value of `head_dim_v` elements for each KV head.
///
/// ```
/// use polyhead::cache::{KvShape, PagedCache};
/// let shape = KvShape { num_kv_heads: 8, head_dim: 128, head_dim_v: 128 };
/// let cache = PagedCache::<half::f16>::new(shape, 4, 16)?;
/// assert!(cache.bytes() >= 4 * 16 * 8 * (128 + 128) * 2);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of keys.
    pub head_dim: usize,
    /// Width of values.
    pub head_dim_v: usize,
}

/// New tokens, whose sizes are those of the cache.
#[derive(Clone, Copy)]
pub(super) struct Chunk<'a> {
    k: AnyHeads<'a>,
    v: AnyHeads<'a>,
}

impl<'a> Chunk<'a> {
    /// Keys and values of `batch` items.
    pub(super) fn new(k: &'a dyn Sequences, v: &'a dyn Sequences, batch: usize, shape: KvShape) -> Result<Self> {
        let KvShape { num_kv_heads, head_dim, head_dim_v } = shape;
        for (operand, sequences, dim) in [("k", k, head_dim), ("v", v, head_dim_v)] {
            super::check_batch(operand, sequences, batch)?;
            let [_, heads, _, width] = sequences.shape();
            for (axis, expected, actual) in [("heads", num_kv_heads, heads), ("dim", dim, width)] {
                if expected != actual {
                    return Err(Error::Shape { operand, axis, expected, actual });
                }
            }
        }
        let chunk = Self { k: k.erase(), v: v.erase() };
        for item in 0..batch {
            let (expected, actual) = (chunk.len(item), chunk.v.lengths().get(item));
            if expected != actual {
                return Err(Error::Shape { operand: "v", axis: "seq", expected, actual });
            }
        }
        Ok(chunk)
    }

    /// Tokens of an item.
    pub(super) fn len(&self, item: usize) -> usize {
        self.k.lengths().get(item)
    }
}

/// Keys and values of all pages.
#[derive(Debug)]
pub(super) struct Store<T> {
    shape: KvShape,
    page_len: usize,
    k: Pages<T>,
    v: Pages<T>,
}

impl<T: Element> Store<T> {
    pub(super) fn new(shape: KvShape, pages: usize, page_len: usize) -> Result<Self> {
        // What a table can name, but for the number that names no page.
        if pages >= u32::MAX as usize {
            return Err(Error::Value { option: "pages", expected: "less than 2^32 - 1", actual: pages as f64 });
        }
        let KvShape { num_kv_heads, head_dim, head_dim_v } = shape;
        let pages = |dim| Pages::new([pages, num_kv_heads, page_len, dim]);
        Ok(Self { shape, page_len, k: pages(head_dim)?, v: pages(head_dim_v)? })
    }

    pub(super) fn shape(&self) -> KvShape {
        self.shape
    }

    pub(super) fn page_len(&self) -> usize {
        self.page_len
    }

    pub(super) fn bytes(&self) -> usize {
        self.k.bytes().saturating_add(self.v.bytes())
    }

    /// Keys and values of sequences, through a table of pages that this store has.
    pub(super) fn paged<'a>(&'a self, table: &'a [u32], lengths: &'a [usize]) -> [Paged<'a, T>; 2] {
        [&self.k, &self.v].map(|pages| {
            let view = Heads::bhsd(&pages.data[pages.used.clone()], pages.shape)
                .expect("a store is as long as its shape says");
            Paged::new(view, table, lengths).expect("tables of a cache name its pages and cover its lengths")
        })
    }

    /// Writes tokens `tokens` of an item to the slots of a page from `slot` on.
    pub(super) fn write(&mut self, page: u32, slot: usize, chunk: &Chunk<'_>, item: usize, tokens: Range<usize>) {
        self.k.write(page, slot, &chunk.k, item, tokens.clone());
        self.v.write(page, slot, &chunk.v, item, tokens);
    }

    /// Copies the first `count` tokens of a page to another.
    pub(super) fn copy(&mut self, from: u32, to: u32, count: usize) {
        self.k.copy(from, to, count);
        self.v.copy(from, to, count);
    }
}

/// Cuts `count` tokens from `position` on where pages end: (position, tokens of the chunk).
pub(super) fn runs(position: usize, count: usize, page_len: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut done = 0;
    core::iter::from_fn(move || {
        let at = position + done;
        let run = done..count.min(done.saturating_add(page_len - at % page_len));
        done = run.end;
        (!run.is_empty()).then_some((at, run))
    })
}

/// (page, head, token, dim), from the first cache line on.
struct Pages<T> {
    data: Vec<T>,
    used: Range<usize>,
    shape: [usize; 4],
}

/// Bytes of a cache line, at which rows of whole lines then begin: a large vector starts 16 bytes behind a page.
const ALIGN: usize = 64;

impl<T: Element> Pages<T> {
    fn new(shape: [usize; 4]) -> Result<Self> {
        let mut data = Vec::new();
        let too_large = Error::Memory { bytes: usize::MAX };
        let len = if shape.contains(&0) { Some(0) } else { shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x)) };
        let len = len.ok_or(too_large.clone())?;
        let padding = ALIGN / size_of::<T>();
        grow(&mut data, len.checked_add(padding).ok_or(too_large)?, T::default)?;
        // A vector that does not grow stays where it is.
        let start = data.as_ptr().align_offset(ALIGN).min(padding);
        Ok(Self { data, used: start..start + len, shape })
    }

    fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<T>()
    }

    /// Where a row is.
    fn row(&self, page: u32, head: usize, slot: usize) -> Range<usize> {
        let [_, heads, page_len, dim] = self.shape;
        let first = self.used.start + ((page as usize * heads + head) * page_len + slot) * dim;
        first..first + dim
    }

    fn write(&mut self, page: u32, slot: usize, from: &AnyHeads<'_>, item: usize, tokens: Range<usize>) {
        let [_, heads, _, dim] = self.shape;
        // There may be any number of heads without an element.
        if dim == 0 || tokens.is_empty() {
            return;
        }
        for head in 0..heads {
            for (slot, token) in zip(slot.., tokens.clone()) {
                let to = self.row(page, head, slot);
                store_row(from.data, from.offset([item, head, token]), from.layout.strides[3], &mut self.data, to);
            }
        }
    }

    fn copy(&mut self, from: u32, to: u32, count: usize) {
        let [_, heads, _, dim] = self.shape;
        for head in 0..if dim == 0 { 0 } else { heads } {
            let first = self.row(from, head, 0).start;
            let to = self.row(to, head, 0).start;
            self.data.copy_within(first..first + count * dim, to);
        }
    }
}

/// Writes a row, converted to the nearest value of its type.
#[expect(clippy::ptr_arg, reason = "a vector can be asked for its type, a slice cannot")]
fn store_row<T: Element>(from: AnySlice<'_>, offset: usize, step: usize, data: &mut Vec<T>, to: Range<usize>) {
    let width = to.len();
    if step == 1 || width == 1 {
        let source = offset..offset + width;
        match from {
            AnySlice::F32(from) => return T::store_nearest(&from[source], &mut data[to]),
            AnySlice::F16(from) => {
                if let Some(same) = (data as &mut dyn Any).downcast_mut::<Vec<f16>>() {
                    return same[to].copy_from_slice(&from[source]);
                }
            }
            AnySlice::Bf16(from) => {
                if let Some(same) = (data as &mut dyn Any).downcast_mut::<Vec<bf16>>() {
                    return same[to].copy_from_slice(&from[source]);
                }
            }
        }
    }
    match from {
        AnySlice::F32(from) => store_converted(&from[offset..], step, &mut data[to]),
        AnySlice::F16(from) => store_converted(&from[offset..], step, &mut data[to]),
        AnySlice::Bf16(from) => store_converted(&from[offset..], step, &mut data[to]),
    }
}

/// Writes elements that lie `step` apart or are of another type.
fn store_converted<S: Element, T: Element>(from: &[S], step: usize, to: &mut [T]) {
    let mut floats = [0.0; 64];
    for (part, to) in to.chunks_mut(floats.len()).enumerate() {
        let first = part * floats.len();
        let floats = &mut floats[..to.len()];
        floats.iter_mut().enumerate().for_each(|(i, x)| *x = from[(first + i) * step].to_f32());
        T::store_nearest(floats, to);
    }
}

impl<T> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Its elements are too many to read.
        f.debug_struct("Pages").field("shape", &self.shape).finish_non_exhaustive()
    }
}
