//! Outputs cut into blocks of rows that different threads write at the same time.
#![allow(
    unsafe_code,
    reason = "threads write disjoint rows of one slice, which borrows alone cannot express for strided views"
)]

use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};

use super::{HeadsMut, Layout};
use crate::Element;

/// A writable view that several threads hold; rows of it are handed out by [`OutputBlocks`] alone.
struct Shared<'a, T> {
    data: *mut T,
    layout: Layout<4>,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is only written through, by `Shared::segment`, whose callers hold distinct rows (`OutputBlocks::take`).
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as a `&mut [T]`, which is `Send` if `T` is.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    fn new(view: HeadsMut<'a, T>) -> Self {
        Self { data: view.data.as_mut_ptr(), layout: view.layout, borrow: PhantomData }
    }

    /// Hands columns `first..first + len` of a row to `write`, in pieces `(elements, index of the first in 0..len)`: all at once
    /// if they are contiguous, else one by one.
    ///
    /// # Safety
    /// No other thread may touch the row meanwhile.
    #[inline(always)]
    unsafe fn segment(&self, row: [usize; 3], first: usize, len: usize, mut write: impl FnMut(&mut [T], usize)) {
        let shape = self.layout.shape;
        assert!(row[0] < shape[0] && row[1] < shape[1] && row[2] < shape[2]);
        assert!(first <= shape[3] && len <= shape[3] - first);
        let start = self.layout.offset([row[0], row[1], row[2], 0]);
        let stride = self.layout.strides[3];
        if stride == 1 && len > 0 {
            // SAFETY: every index inside the shape lies inside the slice that `data` came from (`Layout::check`), and inside of
            // the shape it is by the assertions; nobody else touches the row (the caller).
            write(unsafe { core::slice::from_raw_parts_mut(self.data.add(start + first), len) }, 0);
        } else {
            for i in 0..len {
                // SAFETY: as above.
                write(unsafe { core::slice::from_raw_parts_mut(self.data.add(start + (first + i) * stride), 1) }, i);
            }
        }
    }
}

/// How an output is cut into blocks of rows: of one batch item, of `heads` heads, which do not cross a multiple of `group`, and
/// of `queries` queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid<'a> {
    pub(crate) batch: usize,
    pub(crate) num_heads: usize,
    /// Of every item, unless `starts` says otherwise.
    pub(crate) seqlen_q: usize,
    /// Item `i` has the rows `starts[i]..starts[i + 1]` of a batch of one.
    pub(crate) starts: Option<&'a [usize]>,
    pub(crate) group: usize,
    pub(crate) heads: usize,
    pub(crate) queries: usize,
}

impl Grid<'_> {
    fn blocks_per_group(&self) -> usize {
        self.group.div_ceil(self.heads)
    }

    /// Blocks along the heads.
    pub(crate) fn head_blocks(&self) -> usize {
        self.num_heads / self.group.max(1) * self.blocks_per_group()
    }

    fn query_length(&self, batch: usize) -> usize {
        self.starts.map_or(self.seqlen_q, |starts| starts[batch + 1] - starts[batch])
    }

    /// Blocks along the queries of an item.
    pub(crate) fn query_blocks(&self, batch: usize) -> usize {
        self.query_length(batch).div_ceil(self.queries)
    }

    /// Slots, of which an item has one for each of its query blocks, from `first_slot` on.
    fn slots(&self) -> usize {
        match self.starts {
            None => self.batch.saturating_mul(self.seqlen_q.div_ceil(self.queries)),
            Some(starts) => starts.last().map_or(0, |rows| rows / self.queries).saturating_add(self.batch),
        }
    }

    /// `a.div_ceil(q) <= (s + a) / q - s / q + 1`: slots of ragged items, which begin at `s / q + item`, do not meet.
    fn first_slot(&self, batch: usize) -> usize {
        match self.starts {
            None => batch * self.seqlen_q.div_ceil(self.queries),
            Some(starts) => starts[batch] / self.queries + batch,
        }
    }

    /// Length of the index space of blocks, in which there may be gaps. Saturates: no list of that length can be made.
    pub(crate) fn len(&self) -> usize {
        self.head_blocks().saturating_mul(self.slots())
    }

    /// Index of a block.
    pub(crate) fn index(&self, batch: usize, head_block: usize, query_block: usize) -> usize {
        head_block * self.slots() + self.first_slot(batch) + query_block
    }

    /// Batch item, heads and queries of a block; `None` at a gap.
    pub(crate) fn block(&self, index: usize) -> Option<(usize, Range<usize>, Range<usize>)> {
        let (head_block, slot) = (index / self.slots(), index % self.slots());
        let batch = match self.starts {
            None => slot / self.seqlen_q.div_ceil(self.queries),
            Some(_) => {
                let (mut low, mut high) = (0, self.batch);
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    if self.first_slot(middle) <= slot { low = middle } else { high = middle }
                }
                low
            }
        };
        let queries = self.queries_of(batch, slot - self.first_slot(batch));
        let (group, part) = (head_block / self.blocks_per_group(), head_block % self.blocks_per_group());
        let (first, end) = (group * self.group, (group + 1) * self.group);
        let heads = first + part * self.heads..(first + (part + 1) * self.heads).min(end);
        (!queries.is_empty()).then_some((batch, heads, queries))
    }

    /// Queries of one of the query blocks of an item; none, if it has not so many.
    pub(crate) fn queries_of(&self, batch: usize, query_block: usize) -> Range<usize> {
        let first = query_block * self.queries;
        first..(first + self.queries).min(self.query_length(batch))
    }

    /// Index of a row of the output views.
    fn row(&self, batch: usize, head: usize, query: usize) -> [usize; 3] {
        self.starts.map_or([batch, head, query], |starts| [0, head, starts[batch] + query])
    }
}

/// Attention weights as an output.
pub(crate) struct WeightsOut<'a> {
    pub(crate) view: HeadsMut<'a, f32>,
    /// One plane for all heads, their mean; else one a head.
    pub(crate) averaged: bool,
}

/// All outputs of an attention call, cut by a grid.
pub(crate) struct OutputBlocks<'a, T> {
    out: Shared<'a, T>,
    lse: Option<Shared<'a, f32>>,
    weights: Option<(Shared<'a, f32>, bool)>,
    grid: Grid<'a>,
    taken: &'a [AtomicBool],
}

impl<'a, T: Element> OutputBlocks<'a, T> {
    /// `taken` has a `false` for every block.
    pub(crate) fn new(
        grid: Grid<'a>,
        out: HeadsMut<'a, T>,
        lse: Option<HeadsMut<'a, f32>>,
        weights: Option<WeightsOut<'a>>,
        taken: &'a [AtomicBool],
    ) -> Self {
        let averaged = weights.as_ref().is_some_and(|weights| weights.averaged);
        assert!(!averaged || grid.head_blocks() <= 1, "averaged weights belong to blocks of all heads");
        assert!(weights.is_none() || grid.starts.is_none(), "weights of ragged queries have no shape");
        let weights = weights.map(|weights| (Shared::new(weights.view), averaged));
        Self { out: Shared::new(out), lse: lse.map(Shared::new), weights, grid, taken }
    }

    /// The block, once; after that `None`.
    pub(crate) fn take(&self, index: usize) -> Option<OutputBlock<'_, T>> {
        // The flag alone decides; what the block's rows hold is not read by anybody until the parallel region has ended.
        if self.taken.get(index)?.swap(true, Ordering::Relaxed) {
            return None;
        }
        let (batch, heads, queries) = self.grid.block(index)?;
        Some(OutputBlock { outputs: self, batch, heads, queries })
    }
}

/// The rows of one block. There is at most one for each index, and different indices have different rows: blocks of an item do
/// not meet, nor do ragged items, whose starts never fall (`Ragged::new`).
pub(crate) struct OutputBlock<'b, T> {
    outputs: &'b OutputBlocks<'b, T>,
    pub(crate) batch: usize,
    pub(crate) heads: Range<usize>,
    pub(crate) queries: Range<usize>,
}

/// Where a kernel puts finished rows; `head` and `query` count from the first of the whole output.
pub(crate) trait RowSink {
    fn out(&mut self, head: usize, query: usize, row: &[f32]);
    fn lse(&mut self, head: usize, query: usize, lse: f32);
    /// Weights of keys `first_key..`. With averaged weights the heads add up, in the order of the calls, from head 0 on.
    fn weights(&mut self, head: usize, query: usize, first_key: usize, row: &[f32]);
    fn wants_lse(&self) -> bool;
    fn wants_weights(&self) -> bool;
}

impl<T: Element> RowSink for OutputBlock<'_, T> {
    fn out(&mut self, head: usize, query: usize, row: &[f32]) {
        assert!(self.heads.contains(&head) && self.queries.contains(&query));
        let write = |to: &mut [T], i: usize| T::store_nearest(&row[i..i + to.len()], to);
        // SAFETY: the row is of this block, as just asserted, and `OutputBlocks::take` gave the block to nobody else; the output
        // view's rows are disjoint in memory (`Layout::check_disjoint`).
        unsafe { self.outputs.out.segment(self.outputs.grid.row(self.batch, head, query), 0, row.len(), write) }
    }

    fn lse(&mut self, head: usize, query: usize, lse: f32) {
        assert!(self.heads.contains(&head) && self.queries.contains(&query));
        if let Some(shared) = &self.outputs.lse {
            // SAFETY: as in `out`.
            unsafe { shared.segment(self.outputs.grid.row(self.batch, head, query), 0, 1, |to, _| to[0] = lse) }
        }
    }

    fn weights(&mut self, head: usize, query: usize, first_key: usize, row: &[f32]) {
        assert!(self.heads.contains(&head) && self.queries.contains(&query));
        let Some((shared, averaged)) = &self.outputs.weights else { return };
        if *averaged {
            let share = 1.0 / self.outputs.grid.num_heads as f32;
            let add = |to: &mut [f32], i: usize| {
                for (x, p) in to.iter_mut().zip(&row[i..]) {
                    *x = if head == 0 { 0.0 } else { *x } + p * share;
                }
            };
            // SAFETY: as in `out`; the block has all heads (asserted in `new`), so the plane that they share is of this block.
            unsafe { shared.segment([self.batch, 0, query], first_key, row.len(), add) }
        } else {
            let write = |to: &mut [f32], i: usize| to.copy_from_slice(&row[i..i + to.len()]);
            // SAFETY: as in `out`.
            unsafe { shared.segment([self.batch, head, query], first_key, row.len(), write) }
        }
    }

    fn wants_lse(&self) -> bool {
        self.outputs.lse.is_some()
    }

    fn wants_weights(&self) -> bool {
        self.outputs.weights.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_row_once() {
        let ragged: [&[usize]; 5] = [&[0], &[0, 0], &[0, 7, 7, 8, 20], &[0, 0, 3, 6, 6, 9], &[0, 1, 2, 3, 11]];
        for (num_heads, group, heads) in [(6, 3, 2), (6, 3, 3), (4, 1, 1), (5, 5, 4), (1, 1, 1), (6, 6, 6)] {
            for (seqlen_q, queries) in [(7, 3), (6, 3), (1, 4), (0, 4)] {
                check(&Grid { batch: 2, num_heads, seqlen_q, starts: None, group, heads, queries });
                for starts in ragged {
                    let (batch, starts) = (starts.len() - 1, Some(starts));
                    check(&Grid { batch, num_heads, seqlen_q, starts, group, heads, queries });
                }
            }
        }
    }

    fn check(grid: &Grid<'_>) {
        let rows = grid.starts.map_or(grid.seqlen_q, |starts| *starts.last().unwrap());
        let items = if grid.starts.is_some() { 1 } else { grid.batch };
        let mut seen = vec![0; items * grid.num_heads * rows];
        for index in 0..grid.len() {
            let Some((batch, heads, queries)) = grid.block(index) else { continue };
            assert_eq!(heads.start / grid.group, (heads.end - 1) / grid.group, "a block lies within one group");
            for head in heads {
                for query in queries.clone() {
                    let [item, head, row] = grid.row(batch, head, query);
                    seen[(item * grid.num_heads + head) * rows + row] += 1;
                }
            }
        }
        assert!(seen.iter().all(|&n| n == 1), "{grid:?}: {seen:?}");
        let blocks = (0..grid.batch).map(|batch| grid.query_blocks(batch)).sum::<usize>() * grid.head_blocks();
        assert_eq!((0..grid.len()).filter(|&index| grid.block(index).is_some()).count(), blocks);
        for batch in 0..grid.batch {
            for (head, query) in
                (0..grid.head_blocks()).flat_map(|h| (0..grid.query_blocks(batch)).map(move |q| (h, q)))
            {
                let (item, _, queries) = grid.block(grid.index(batch, head, query)).expect("a block");
                assert_eq!((item, queries.start), (batch, query * grid.queries));
            }
        }
    }

    #[test]
    fn a_block_is_taken_once() {
        let mut data = [0.0f32; 4];
        let grid = Grid { batch: 1, num_heads: 2, seqlen_q: 2, starts: None, group: 1, heads: 1, queries: 2 };
        let taken = [const { AtomicBool::new(false) }; 2];
        let out = HeadsMut::bhsd(&mut data, [1, 2, 2, 1]).unwrap();
        let blocks = OutputBlocks::new(grid, out, None, None, &taken);
        assert!(blocks.take(0).is_some() && blocks.take(0).is_none() && blocks.take(1).is_some());
        assert!(blocks.take(2).is_none());
    }
}
