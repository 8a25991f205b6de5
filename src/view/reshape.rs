//! Views of the same elements with other axes.

use core::ops::Range;

use super::{Heads, Layout, Matrices, MatricesMut, Matrix, MatrixMut, View, ViewMut};
use crate::{Error, Result};

impl<'a, T: Copy, const N: usize> View<'a, T, N> {
    /// The same elements, or some of them, under other axes.
    pub(crate) fn reshaped<const M: usize>(self, shape: [usize; M], strides: [usize; M]) -> View<'a, T, M> {
        View { data: self.data, layout: Layout { shape, strides } }
    }
}

impl<'a, T: Copy, const N: usize> ViewMut<'a, T, N> {
    /// The same elements, or some of them, under other axes, of which no two indices name one element.
    pub(crate) fn reshaped<const M: usize>(self, shape: [usize; M], strides: [usize; M]) -> ViewMut<'a, T, M> {
        ViewMut { data: self.data, layout: Layout { shape, strides } }
    }
}

impl<'a, T: Copy> Matrices<'a, T> {
    /// Packed (seq, batch, dim), PyTorch's layout without `batch_first`: `shape` is in that order, the view is (batch, seq, dim).
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    ///
    /// ```
    /// use polyhead::Matrices;
    /// let x = Matrices::sequence_first(&[0.0f32; 5 * 2 * 8], [5, 2, 8])?;
    /// assert_eq!(x.shape(), [2, 5, 8]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn sequence_first(data: &'a [T], shape: [usize; 3]) -> Result<Self> {
        Self::contiguous(data, shape)?.permute([1, 0, 2])
    }

    /// A mask or bias (batch * num_heads, seqlen_q, seqlen_k), PyTorch's 3-D `attn_mask`, as (batch, num_heads, seqlen_q, seqlen_k).
    ///
    /// # Errors
    /// [`Error::Shape`] if `num_heads` does not divide the first axis.
    ///
    /// ```
    /// use polyhead::{Mask, Matrices};
    /// let hidden = [false; 2 * 4 * 3 * 5];
    /// let mask = Mask::ignore(Matrices::contiguous(&hidden, [2 * 4, 3, 5])?.per_head(4)?)?;
    /// assert_eq!(mask.shape(), [2, 4, 3, 5]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn per_head(self, num_heads: usize) -> Result<Heads<'a, T>> {
        let ([planes, rows, columns], [plane, down, across]) = (self.shape(), self.strides());
        let batch = planes.checked_div(num_heads).unwrap_or(0);
        if batch.checked_mul(num_heads) != Some(planes) {
            let expected = batch.saturating_add(1).saturating_mul(num_heads);
            return Err(Error::Shape { operand: "mask", axis: "batch * heads", expected, actual: planes });
        }
        let strides = [plane.saturating_mul(num_heads), plane, down, across];
        View::with_strides(self.data, [batch, num_heads, rows, columns], strides)
    }

    /// One matrix, which there must be.
    pub(crate) fn item(self, index: usize) -> Matrix<'a, T> {
        let ([_, rows, columns], [item, down, across]) = (self.shape(), self.strides());
        let data = if self.layout.shape.contains(&0) { &[] } else { &self.data[index * item..] };
        View { data, layout: Layout { shape: [rows, columns], strides: [down, across] } }
    }
}

impl<'a, T: Copy> MatricesMut<'a, T> {
    /// Packed (seq, batch, dim): `shape` is in that order, the view is (batch, seq, dim).
    ///
    /// # Errors
    /// [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn sequence_first(data: &'a mut [T], shape: [usize; 3]) -> Result<Self> {
        Self::contiguous(data, shape)?.permute([1, 0, 2])
    }

    /// One matrix, which there must be.
    pub(crate) fn item_mut(&mut self, index: usize) -> MatrixMut<'_, T> {
        let ([_, rows, columns], [item, down, across]) = (self.shape(), self.strides());
        let data = if self.layout.shape.contains(&0) { &mut [] } else { &mut self.data[index * item..] };
        ViewMut { data, layout: Layout { shape: [rows, columns], strides: [down, across] } }
    }
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// Some of the rows, which there must be.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        let ([count, columns], [down, _]) = (self.shape(), self.strides());
        assert!(rows.start <= rows.end && rows.end <= count);
        let data = if rows.is_empty() || columns == 0 { &[] } else { &self.data[rows.start * down..] };
        View { data, layout: Layout { shape: [rows.len(), columns], ..self.layout } }
    }
}

impl<T: Copy> MatrixMut<'_, T> {
    /// As [`Matrix::rows`].
    pub(crate) fn rows_mut(&mut self, rows: Range<usize>) -> MatrixMut<'_, T> {
        let ([count, columns], [down, _]) = (self.shape(), self.strides());
        assert!(rows.start <= rows.end && rows.end <= count);
        let data = if rows.is_empty() || columns == 0 { &mut [] } else { &mut self.data[rows.start * down..] };
        ViewMut { data, layout: Layout { shape: [rows.len(), columns], ..self.layout } }
    }
}
