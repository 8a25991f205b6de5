//! Strided views over slices: where bounds are checked, once, so that nothing behind needs to.

mod blocks;
mod reshape;
mod rows;
mod sequences;

pub(crate) use blocks::{Grid, OutputBlocks, RowSink, WeightsOut};
pub(crate) use rows::{AnyRowBlock, AnyRowBlocks, RowBlock, RowBlocks};
pub(crate) use sequences::{AnyHeads, Lengths, check_starts};
pub use sequences::{Paged, Ragged, Sequences};

use crate::{Error, Result};

/// Shape and strides whose every element is known to lie inside a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout<const N: usize> {
    pub(crate) shape: [usize; N],
    /// In elements; 0 for axes of size 0 or 1, whose stride is never used.
    pub(crate) strides: [usize; N],
}

/// Names of the axes of an `N`-dimensional view, for errors.
fn axis_name<const N: usize>(axis: usize) -> &'static str {
    let names: &[&'static str] = match N {
        4 => &["batch", "heads", "seq", "dim"],
        3 => &["batch", "row", "column"],
        2 => &["row", "column"],
        _ => &[],
    };
    names.get(axis).copied().unwrap_or("axis")
}

impl<const N: usize> Layout<N> {
    /// Row-major strides of `shape`; exact only if `check` accepts them.
    fn contiguous(shape: [usize; N]) -> [usize; N] {
        let mut strides = [0; N];
        let mut step = 1usize;
        for axis in (0..N).rev() {
            strides[axis] = step;
            step = step.saturating_mul(shape[axis]);
        }
        strides
    }

    /// Elements a slice must have for this shape and these strides, with arithmetic that cannot wrap.
    fn required<T>(operand: &'static str, shape: &[usize; N], strides: &[usize; N]) -> Result<usize> {
        let limit = isize::MAX as usize / size_of::<T>().max(1);
        if shape.contains(&0) {
            return Ok(0);
        }
        let mut last = 0usize;
        for axis in 0..N {
            let (size, stride) = (shape[axis], strides[axis]);
            last = (size - 1)
                .checked_mul(stride)
                .and_then(|reach| last.checked_add(reach))
                .filter(|&last| last < limit)
                .ok_or(Error::Overflow { operand, axis: axis_name::<N>(axis), size, stride })?;
        }
        Ok(last + 1)
    }

    fn check<T>(operand: &'static str, len: usize, shape: [usize; N], mut strides: [usize; N]) -> Result<Self> {
        for axis in 0..N {
            if shape[axis] <= 1 {
                strides[axis] = 0;
            }
        }
        let expected = Self::required::<T>(operand, &shape, &strides)?;
        if expected > len {
            return Err(Error::Length { operand, expected, actual: len });
        }
        Ok(Self { shape, strides })
    }

    /// As `check`, for the row-major view that uses the whole slice.
    fn check_contiguous<T>(operand: &'static str, len: usize, shape: [usize; N]) -> Result<Self> {
        let layout = Self::check::<T>(operand, len, shape, Self::contiguous(shape))?;
        let expected = if shape.contains(&0) { 0 } else { shape.iter().product() };
        if expected != len {
            return Err(Error::Length { operand, expected, actual: len });
        }
        Ok(layout)
    }

    /// That no two indices name one element. Sufficient, not necessary: with the axes sorted by stride, each must step over
    /// everything that the smaller ones reach. Every transposition, slice or interleaving of a packed array passes.
    fn check_disjoint(&self, operand: &'static str) -> Result<()> {
        if self.shape.contains(&0) {
            return Ok(());
        }
        let mut axes: [usize; N] = core::array::from_fn(|axis| axis);
        axes.sort_unstable_by_key(|&axis| self.strides[axis]);
        let mut reach = 0;
        for axis in axes {
            if self.shape[axis] <= 1 {
                continue;
            }
            if self.strides[axis] <= reach {
                let (axis, actual) = (axis_name::<N>(axis), self.strides[axis]);
                return Err(Error::Overlap { operand, axis, expected: reach + 1, actual });
            }
            reach += (self.shape[axis] - 1) * self.strides[axis];
        }
        Ok(())
    }

    /// Position of an element; in bounds of the slice if every index is in bounds of the shape.
    #[inline(always)]
    pub(crate) fn offset(&self, index: [usize; N]) -> usize {
        let mut offset = 0;
        for axis in 0..N {
            debug_assert!(index[axis] < self.shape[axis].max(1), "index {index:?} of {:?}", self.shape);
            offset += index[axis] * self.strides[axis];
        }
        offset
    }

    fn permute(&self, axes: [usize; N]) -> Self {
        Self { shape: axes.map(|axis| self.shape[axis]), strides: axes.map(|axis| self.strides[axis]) }
    }

    fn get(&self, index: [usize; N]) -> Option<usize> {
        (0..N).all(|axis| index[axis] < self.shape[axis]).then(|| self.offset(index))
    }
}

/// A strided, read-only view of `N` axes over a slice. Axes may have stride 0 (a broadcast) or any other; what lies between
/// rows is never read.
///
/// ```
/// use polyhead::Matrix;
/// let data = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
/// let m = Matrix::contiguous(&data, [2, 3])?;
/// let transposed = Matrix::with_strides(&data, [3, 2], [1, 3])?;
/// assert_eq!(m.get([1, 0]), transposed.get([0, 1]));
/// assert!(Matrix::with_strides(&data, [3, 2], [usize::MAX, 1]).is_err());
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T, const N: usize> {
    data: &'a [T],
    layout: Layout<N>,
}

/// A strided, writable view whose indices name distinct elements. Only those are written.
///
/// ```
/// use polyhead::MatrixMut;
/// let mut data = [0.0f32; 6];
/// assert!(MatrixMut::with_strides(&mut data, [2, 2], [0, 1]).is_err()); // two rows in one place
/// let mut m = MatrixMut::with_strides(&mut data, [2, 2], [3, 1])?;
/// assert_eq!(m.shape(), [2, 2]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct ViewMut<'a, T, const N: usize> {
    data: &'a mut [T],
    layout: Layout<N>,
}

/// Queries, keys or values: a view of (batch, heads, seq, dim).
pub type Heads<'a, T> = View<'a, T, 4>;
/// An output of (batch, heads, seq, dim).
pub type HeadsMut<'a, T> = ViewMut<'a, T, 4>;
/// A view of (row, column).
pub type Matrix<'a, T> = View<'a, T, 2>;
/// An output of (row, column).
pub type MatrixMut<'a, T> = ViewMut<'a, T, 2>;
/// A view of (batch, row, column).
pub type Matrices<'a, T> = View<'a, T, 3>;
/// An output of (batch, row, column).
pub type MatricesMut<'a, T> = ViewMut<'a, T, 3>;

impl<'a, T: Copy, const N: usize> View<'a, T, N> {
    /// A view with the given strides, in elements, starting at the slice's first element.
    ///
    /// # Errors
    /// [`Error::Overflow`] if the arithmetic overflows, [`Error::Length`] if the view reaches past the slice. Strides of axes
    /// of size 0 or 1 are ignored.
    pub fn with_strides(data: &'a [T], shape: [usize; N], strides: [usize; N]) -> Result<Self> {
        Ok(Self { layout: Layout::check::<T>("view", data.len(), shape, strides)?, data })
    }

    /// A packed, row-major view of the whole slice.
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn contiguous(data: &'a [T], shape: [usize; N]) -> Result<Self> {
        Ok(Self { layout: Layout::check_contiguous::<T>("view", data.len(), shape)?, data })
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> [usize; N] {
        self.layout.shape
    }

    /// Strides in elements; 0 for axes of size 0 or 1.
    pub fn strides(&self) -> [usize; N] {
        self.layout.strides
    }

    /// The element at `index`, or `None` outside the shape.
    pub fn get(&self, index: [usize; N]) -> Option<T> {
        self.layout.get(index).map(|offset| self.data[offset])
    }

    /// The same elements with the axes in another order: axis `i` of the result is axis `axes[i]` of this view.
    ///
    /// # Errors
    /// [`Error::Value`] if `axes` is not a permutation of `0..N`.
    pub fn permute(&self, axes: [usize; N]) -> Result<Self> {
        check_permutation(axes)?;
        Ok(Self { data: self.data, layout: self.layout.permute(axes) })
    }

    pub(crate) fn layout(&self) -> Layout<N> {
        self.layout
    }

    pub(crate) fn data(&self) -> &'a [T] {
        self.data
    }
}

fn check_permutation<const N: usize>(axes: [usize; N]) -> Result<()> {
    match axes.iter().enumerate().find(|&(i, &axis)| axis >= N || axes[..i].contains(&axis)) {
        None => Ok(()),
        Some((_, &axis)) => {
            Err(Error::Value { option: "axes", expected: "each axis exactly once", actual: axis as f64 })
        }
    }
}

impl<'a, T: Copy, const N: usize> ViewMut<'a, T, N> {
    /// A view with the given strides, in elements, starting at the slice's first element.
    ///
    /// # Errors
    /// As [`View::with_strides`], and [`Error::Overlap`] if two indices may name one element.
    pub fn with_strides(data: &'a mut [T], shape: [usize; N], strides: [usize; N]) -> Result<Self> {
        let layout = Layout::check::<T>("view", data.len(), shape, strides)?;
        layout.check_disjoint("view")?;
        Ok(Self { data, layout })
    }

    /// A packed, row-major view of the whole slice.
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn contiguous(data: &'a mut [T], shape: [usize; N]) -> Result<Self> {
        Ok(Self { layout: Layout::check_contiguous::<T>("view", data.len(), shape)?, data })
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> [usize; N] {
        self.layout.shape
    }

    /// Strides in elements; 0 for axes of size 0 or 1.
    pub fn strides(&self) -> [usize; N] {
        self.layout.strides
    }

    /// The same elements, read-only.
    pub fn as_view(&self) -> View<'_, T, N> {
        View { data: self.data, layout: self.layout }
    }

    /// The same view under a shorter borrow.
    pub fn reborrow(&mut self) -> ViewMut<'_, T, N> {
        ViewMut { data: self.data, layout: self.layout }
    }

    /// As [`View::permute`].
    ///
    /// # Errors
    /// [`Error::Value`] if `axes` is not a permutation of `0..N`.
    pub fn permute(self, axes: [usize; N]) -> Result<Self> {
        check_permutation(axes)?;
        Ok(Self { data: self.data, layout: self.layout.permute(axes) })
    }

    pub(crate) fn layout(&self) -> Layout<N> {
        self.layout
    }

    pub(crate) fn data_mut(&mut self) -> &mut [T] {
        self.data
    }
}

impl Layout<2> {
    fn as_head(&self) -> Layout<4> {
        let ([rows, columns], [row, column]) = (self.shape, self.strides);
        Layout { shape: [1, 1, rows, columns], strides: [0, 0, row, column] }
    }
}

impl<'a, T: Copy> View<'a, T, 2> {
    /// The only head of the only batch item.
    pub(crate) fn as_head(&self) -> View<'a, T, 4> {
        View { data: self.data, layout: self.layout.as_head() }
    }
}

impl<'a, T: Copy> ViewMut<'a, T, 2> {
    /// The only head of the only batch item.
    pub(crate) fn into_head(self) -> ViewMut<'a, T, 4> {
        ViewMut { layout: self.layout.as_head(), data: self.data }
    }
}

impl<'a, T: Copy> View<'a, T, 4> {
    /// Packed (batch, heads, seq, dim), the layout of PyTorch's `scaled_dot_product_attention`.
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    ///
    /// ```
    /// use polyhead::Heads;
    /// let q = Heads::bhsd(&[0.0f32; 2 * 3 * 5 * 4], [2, 3, 5, 4])?;
    /// assert_eq!(q.shape(), [2, 3, 5, 4]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn bhsd(data: &'a [T], shape: [usize; 4]) -> Result<Self> {
        Self::contiguous(data, shape)
    }

    /// Packed (batch, seq, heads, dim), what a projection gives: `shape` is in that order, the view is (batch, heads, seq, dim).
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    ///
    /// ```
    /// use polyhead::Heads;
    /// let q = Heads::bshd(&[0.0f32; 2 * 5 * 3 * 4], [2, 5, 3, 4])?;
    /// assert_eq!(q.shape(), [2, 3, 5, 4]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn bshd(data: &'a [T], shape: [usize; 4]) -> Result<Self> {
        Self::contiguous(data, shape)?.permute([0, 2, 1, 3])
    }
}

impl<'a, T: Copy> ViewMut<'a, T, 4> {
    /// Sets every element.
    pub(crate) fn fill(&mut self, value: T) {
        let [batch, heads, seq, dim] = self.layout.shape;
        for (b, h, i) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seq).map(move |i| (b, h, i)))) {
            for d in 0..dim {
                self.data[self.layout.offset([b, h, i, d])] = value;
            }
        }
    }

    /// Packed (batch, heads, seq, dim).
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn bhsd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self> {
        Self::contiguous(data, shape)
    }

    /// Packed (batch, seq, heads, dim), what an output projection reads: `shape` is in that order.
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn bshd(data: &'a mut [T], shape: [usize; 4]) -> Result<Self> {
        Self::contiguous(data, shape)?.permute([0, 2, 1, 3])
    }
}
