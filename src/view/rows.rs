//! A matrix whose rows different threads rewrite at the same time.
#![allow(
    unsafe_code,
    reason = "threads write disjoint rows of one slice, which borrows alone cannot express for strided views"
)]

use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::{Layout, MatrixMut};

/// A writable matrix in blocks of rows, each of which is handed out once.
pub(crate) struct RowBlocks<'a, T> {
    data: *mut T,
    layout: Layout<2>,
    rows_per_block: usize,
    next: AtomicUsize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is only used by `RowMut`, of which no two have one row: `RowBlocks::take` gives each block to one caller.
unsafe impl<T: Send> Sync for RowBlocks<'_, T> {}
// SAFETY: as a `&mut [T]`, which is `Send` if `T` is.
unsafe impl<T: Send> Send for RowBlocks<'_, T> {}

impl<'a, T> RowBlocks<'a, T> {
    pub(crate) fn new(view: MatrixMut<'a, T>, rows_per_block: usize) -> Self {
        let (data, layout) = (view.data.as_mut_ptr(), view.layout);
        Self { data, layout, rows_per_block: rows_per_block.max(1), next: AtomicUsize::new(0), borrow: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.shape[0].div_ceil(self.rows_per_block)
    }

    /// The next block that nobody has had.
    pub(crate) fn take(&self) -> Option<RowBlock<'_, T>> {
        // Counts no further than the end, so that it never wraps. Relaxed: what the rows hold is not read by anybody else until
        // the parallel region has ended.
        let step = |block| (block < self.len()).then(|| block + 1);
        let block = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).ok()?;
        let first = block * self.rows_per_block;
        let end = self.layout.shape[0].min(first.saturating_add(self.rows_per_block));
        Some(RowBlock { blocks: self, rows: first..end })
    }
}

/// The rows of one block: no other value has any of them.
pub(crate) struct RowBlock<'b, T> {
    blocks: &'b RowBlocks<'b, T>,
    rows: Range<usize>,
}

impl<T> RowBlock<'_, T> {
    /// Counted from the first of the matrix.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> RowMut<'_, T> {
        assert!(self.rows.contains(&row), "row {row} of block {:?}", self.rows);
        let Layout { shape: [_, len], strides: [_, stride] } = self.blocks.layout;
        let data = match len {
            0 => self.blocks.data,
            // SAFETY: the row is inside the shape, so its first element is inside the slice that `data` came from (`Layout::check`).
            _ => unsafe { self.blocks.data.add(self.blocks.layout.offset([row, 0])) },
        };
        RowMut { data, stride, len, borrow: PhantomData }
    }
}

/// One row, with nobody else.
pub(crate) struct RowMut<'r, T> {
    data: *mut T,
    stride: usize,
    len: usize,
    borrow: PhantomData<&'r mut [T]>,
}

impl<'r, T> RowMut<'r, T> {
    /// The row, if its elements lie side by side.
    #[inline(always)]
    pub(crate) fn into_slice(self) -> Option<&'r mut [T]> {
        // SAFETY: `len` elements from `data` on are this row's, inside the slice that the view was made from (`Layout::check`), and
        // no other value has the row (`RowBlocks::take`; `RowBlock::row` borrows its block).
        let slice = || unsafe { core::slice::from_raw_parts_mut(self.data, self.len) };
        (self.stride == 1 || self.len <= 1).then(slice)
    }

    #[inline(always)]
    pub(crate) fn element(&mut self, i: usize) -> &mut T {
        assert!(i < self.len);
        // SAFETY: as in `into_slice`, with the view's stride.
        unsafe { &mut *self.data.add(i * self.stride) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_handed_out_once() {
        for (shape, strides) in
            [([5, 3], [3, 1]), ([5, 3], [1, 5]), ([5, 3], [7, 2]), ([5, 1], [1, 1]), ([5, 0], [9, 9]), ([0, 3], [3, 1])]
        {
            for rows_per_block in [0, 1, 2, 5, usize::MAX] {
                let mut data = [0u32; 40];
                let blocks =
                    RowBlocks::new(MatrixMut::with_strides(&mut data, shape, strides).unwrap(), rows_per_block);
                let mut rows = Vec::new();
                while let Some(mut block) = blocks.take() {
                    for row in block.rows() {
                        rows.push(row);
                        let mut line = block.row(row);
                        (0..shape[1]).for_each(|i| *line.element(i) += 1);
                        if let Some(slice) = line.into_slice() {
                            assert_eq!(slice, vec![1; shape[1]]);
                        }
                    }
                }
                assert!(blocks.take().is_none());
                assert_eq!(rows, (0..shape[0]).collect::<Vec<_>>());
                assert_eq!(data.iter().sum::<u32>() as usize, shape[0] * shape[1], "{shape:?} {strides:?}");
            }
        }
    }

    #[test]
    fn threads_share_the_rows() {
        let mut data = vec![0u32; 1000];
        let blocks = RowBlocks::new(MatrixMut::with_strides(&mut data, [100, 10], [1, 100]).unwrap(), 3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while let Some(mut block) = blocks.take() {
                        for row in block.rows() {
                            (0..10).for_each(|i| *block.row(row).element(i) += 1);
                        }
                    }
                });
            }
        });
        assert_eq!(data, [1; 1000]);
    }
}
