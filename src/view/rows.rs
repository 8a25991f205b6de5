//! A matrix whose rows different threads rewrite at the same time.
#![allow(
    unsafe_code,
    reason = "threads write disjoint rows of one slice, which borrows alone cannot express for strided views"
)]

use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::{Layout, MatrixMut};
use crate::Element;
use crate::element::AnySliceMut;

/// A writable matrix in blocks of rows, or of a part of the columns of rows, each of which is handed out once.
pub(crate) struct RowBlocks<'a, T> {
    data: *mut T,
    layout: Layout<2>,
    rows_per_block: usize,
    columns_per_block: usize,
    next: AtomicUsize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is only used by `RowMut`, of which no two share an element: `RowBlocks::take` gives each block to one caller.
unsafe impl<T: Send> Sync for RowBlocks<'_, T> {}
// SAFETY: as a `&mut [T]`, which is `Send` if `T` is.
unsafe impl<T: Send> Send for RowBlocks<'_, T> {}

impl<'a, T> RowBlocks<'a, T> {
    pub(crate) fn new(view: MatrixMut<'a, T>, rows_per_block: usize) -> Self {
        Self::grid(view, [rows_per_block, usize::MAX])
    }

    /// Blocks of `size` rows and columns, those of the same rows one after the other.
    pub(crate) fn grid(view: MatrixMut<'a, T>, size: [usize; 2]) -> Self {
        let (data, layout) = (view.data.as_mut_ptr(), view.layout);
        let [rows_per_block, columns_per_block] = size.map(|size| size.max(1));
        Self { data, layout, rows_per_block, columns_per_block, next: AtomicUsize::new(0), borrow: PhantomData }
    }

    /// Blocks in a row of them: at least one, which may have no columns.
    fn across(&self) -> usize {
        self.layout.shape[1].div_ceil(self.columns_per_block).max(1)
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.shape[0].div_ceil(self.rows_per_block).saturating_mul(self.across())
    }

    /// The next block that nobody has had.
    pub(crate) fn take(&self) -> Option<RowBlock<'_, T>> {
        // Counts no further than the end, so that it never wraps. Relaxed: what the rows hold is not read by anybody else until
        // the parallel region has ended.
        let step = |block| (block < self.len()).then(|| block + 1);
        let block = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).ok()?;
        let range = |block: usize, size: usize, end: usize| block * size..end.min((block * size).saturating_add(size));
        let [rows, columns] = self.layout.shape;
        let (rows, columns) = (
            range(block / self.across(), self.rows_per_block, rows),
            range(block % self.across(), self.columns_per_block, columns),
        );
        Some(RowBlock { blocks: self, rows, columns })
    }
}

/// One block: no other value has any of its elements.
pub(crate) struct RowBlock<'b, T> {
    blocks: &'b RowBlocks<'b, T>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<T> RowBlock<'_, T> {
    /// Counted from the first of the matrix.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Counted from the first of the matrix.
    pub(crate) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Some of its rows and columns, for as long as nobody else asks for the block.
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> RowBlock<'_, T> {
        let within = |part: &Range<usize>, all: &Range<usize>| all.start <= part.start && part.end <= all.end;
        assert!(within(&rows, &self.rows) && within(&columns, &self.columns), "a part of a block lies within it");
        RowBlock { blocks: self.blocks, rows, columns }
    }

    /// Whether `RowMut::into_slice` has slices.
    #[inline(always)]
    pub(crate) fn has_slices(&self) -> bool {
        self.blocks.layout.strides[1] == 1 || self.columns.len() <= 1
    }

    /// The block's columns of a row.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> RowMut<'_, T> {
        assert!(self.rows.contains(&row), "row {row} of block {:?}", self.rows);
        let ([_, stride], len) = (self.blocks.layout.strides, self.columns.len());
        let data = match len {
            0 => self.blocks.data,
            // SAFETY: row and column are inside the shape, so the element is inside the slice that `data` came from (`Layout::check`).
            _ => unsafe { self.blocks.data.add(self.blocks.layout.offset([row, self.columns.start])) },
        };
        RowMut { data, stride, len, borrow: PhantomData }
    }
}

/// One row of a block, with nobody else.
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
        // SAFETY: `len` elements from `data` on are this block's part of the row, inside the slice that the view was made from (`Layout::check`), and
        // no other value has them (`RowBlocks::take`; `RowBlock::row` borrows its block).
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

/// [`RowBlocks`] of any element type: kernels that write them are compiled once, not once a type.
pub(crate) enum AnyRowBlocks<'a> {
    F32(RowBlocks<'a, f32>),
    F16(RowBlocks<'a, f16>),
    Bf16(RowBlocks<'a, bf16>),
}

/// A block of [`AnyRowBlocks`].
pub(crate) enum AnyRowBlock<'b> {
    F32(RowBlock<'b, f32>),
    F16(RowBlock<'b, f16>),
    Bf16(RowBlock<'b, bf16>),
}

impl<'a> AnyRowBlocks<'a> {
    /// As [`RowBlocks::grid`].
    pub(crate) fn grid<T: Element>(view: MatrixMut<'a, T>, size: [usize; 2]) -> Self {
        let layout = view.layout;
        match T::erase_mut(view.data) {
            AnySliceMut::F32(data) => Self::F32(RowBlocks::grid(MatrixMut { data, layout }, size)),
            AnySliceMut::F16(data) => Self::F16(RowBlocks::grid(MatrixMut { data, layout }, size)),
            AnySliceMut::Bf16(data) => Self::Bf16(RowBlocks::grid(MatrixMut { data, layout }, size)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(blocks) => blocks.len(),
            Self::F16(blocks) => blocks.len(),
            Self::Bf16(blocks) => blocks.len(),
        }
    }

    /// Columns of the whole matrix.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::F32(blocks) => blocks.layout.shape[1],
            Self::F16(blocks) => blocks.layout.shape[1],
            Self::Bf16(blocks) => blocks.layout.shape[1],
        }
    }

    pub(crate) fn take(&self) -> Option<AnyRowBlock<'_>> {
        match self {
            Self::F32(blocks) => blocks.take().map(AnyRowBlock::F32),
            Self::F16(blocks) => blocks.take().map(AnyRowBlock::F16),
            Self::Bf16(blocks) => blocks.take().map(AnyRowBlock::Bf16),
        }
    }
}

impl AnyRowBlock<'_> {
    /// Rows and columns, counted from the first of the matrix.
    pub(crate) fn ranges(&self) -> [Range<usize>; 2] {
        match self {
            Self::F32(block) => [block.rows(), block.columns()],
            Self::F16(block) => [block.rows(), block.columns()],
            Self::Bf16(block) => [block.rows(), block.columns()],
        }
    }

    /// As [`RowBlock::part`].
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> AnyRowBlock<'_> {
        match self {
            Self::F32(block) => AnyRowBlock::F32(block.part(rows, columns)),
            Self::F16(block) => AnyRowBlock::F16(block.part(rows, columns)),
            Self::Bf16(block) => AnyRowBlock::Bf16(block.part(rows, columns)),
        }
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
    fn every_element_of_a_grid_is_handed_out_once() {
        for (shape, strides) in
            [([5, 7], [7, 1]), ([5, 7], [1, 5]), ([5, 7], [20, 2]), ([5, 0], [9, 9]), ([0, 7], [7, 1])]
        {
            for size in [[0, 0], [1, 1], [2, 3], [5, 7], [3, usize::MAX], [usize::MAX, 4]] {
                let mut data = [0u32; 100];
                let blocks = RowBlocks::grid(MatrixMut::with_strides(&mut data, shape, strides).unwrap(), size);
                let mut count = 0;
                while let Some(mut block) = blocks.take() {
                    count += 1;
                    let (rows, columns) = (block.rows(), block.columns());
                    for row in rows {
                        (0..columns.len()).for_each(|i| *block.row(row).element(i) += 1);
                        let slice = block.row(row).into_slice();
                        assert!(slice.is_none_or(|slice| slice == vec![1; columns.len()]));
                    }
                }
                assert_eq!(count, blocks.len());
                for (i, j) in (0..shape[0]).flat_map(|i| (0..shape[1]).map(move |j| (i, j))) {
                    assert_eq!(data[i * strides[0] + j * strides[1]], 1, "{shape:?} {strides:?} {size:?}");
                }
                assert_eq!(data.iter().sum::<u32>() as usize, shape[0] * shape[1]);
            }
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "no threads there")]
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
