//! Tensors as a runtime has them: their number of axes is known at run time.

use crate::view::View;
use crate::{Element, Error, Heads, HeadsMut, Result};
use half::{bf16, f16};

/// An input: a strided view of one to four axes.
///
/// ```
/// use polyhead::onnx::Tensor;
/// let data = [0.0f32; 24];
/// let packed = Tensor::new(&data, &[2, 3, 4])?;
/// assert_eq!(packed.shape(), [2, 3, 4]);
/// let broadcast = Tensor::with_strides(&data, &[5, 24], &[0, 1])?;
/// assert_eq!(broadcast.shape(), [5, 24]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a, T> {
    data: &'a [T],
    axes: Axes,
}

/// An output: a strided view of one to four axes whose indices name distinct elements.
///
/// ```
/// use polyhead::onnx::TensorMut;
/// let mut data = [0.0f32; 24];
/// assert_eq!(TensorMut::new(&mut data, &[2, 12])?.shape(), [2, 12]);
/// assert!(TensorMut::with_strides(&mut data, &[5, 24], &[0, 1]).is_err());
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorMut<'a, T> {
    data: &'a mut [T],
    axes: Axes,
}

/// Shape and strides, aligned at the right behind axes of size 1.
#[derive(Clone, Copy, Debug)]
struct Axes {
    rank: usize,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Axes {
    /// With row-major strides, if none are given; exact if the packed view is accepted.
    fn new(shape: &[usize], strides: Option<&[usize]>) -> Result<Self> {
        let rank = shape.len();
        if !(1..=4).contains(&rank) {
            return Err(Error::Rank { operand: "tensor", expected: "1 to 4", actual: rank });
        }
        let mut axes = Self { rank, shape: [1; 4], strides: [0; 4] };
        axes.shape[4 - rank..].copy_from_slice(shape);
        match strides {
            Some(strides) if strides.len() != rank => {
                return Err(Error::Length { operand: "strides", expected: rank, actual: strides.len() });
            }
            Some(strides) => axes.strides[4 - rank..].copy_from_slice(strides),
            None => {
                let mut step = 1usize;
                for axis in (0..4).rev() {
                    axes.strides[axis] = step;
                    step = step.saturating_mul(axes.shape[axis]);
                }
            }
        }
        Ok(axes)
    }

    fn shape(&self) -> &[usize] {
        &self.shape[4 - self.rank..]
    }

    /// Shape and strides of (batch, heads, seq, dim): as they are, or of (batch, seq, heads * dim). `num_heads` divides the last.
    fn heads(&self, num_heads: usize) -> ([usize; 4], [usize; 4]) {
        if self.rank != 3 {
            return (self.shape, self.strides);
        }
        let ([_, batch, seq, hidden], [_, by_batch, by_seq, step]) = (self.shape, self.strides);
        let dim = hidden / num_heads.max(1);
        // Overflows only where an axis of size 0 makes strides meaningless.
        ([batch, num_heads, seq, dim], [by_batch, dim.saturating_mul(step), by_seq, step])
    }
}

impl<'a, T: Copy> Tensor<'a, T> {
    /// A packed, row-major tensor that is the whole slice.
    ///
    /// # Errors
    /// [`Error::Rank`] for none or more than four axes, [`Error::Length`] if the slice's length is not the product of `shape`.
    pub fn new(data: &'a [T], shape: &[usize]) -> Result<Self> {
        let axes = Axes::new(shape, None)?;
        View::contiguous(data, axes.shape)?;
        Ok(Self { data, axes })
    }

    /// A tensor with the given strides, in elements, that starts at the slice's first element. A stride of 0 is a broadcast.
    ///
    /// # Errors
    /// [`Error::Rank`] for none or more than four axes, [`Error::Length`] if there are not as many strides as axes or the tensor
    /// reaches past the slice, [`Error::Overflow`] if the arithmetic overflows.
    pub fn with_strides(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let axes = Axes::new(shape, Some(strides))?;
        View::with_strides(data, axes.shape, axes.strides)?;
        Ok(Self { data, axes })
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        self.axes.shape()
    }

    pub(super) fn rank(&self) -> usize {
        self.axes.rank
    }

    /// As (batch, heads, seq, dim).
    pub(super) fn heads(&self, num_heads: usize) -> Result<Heads<'a, T>> {
        let (shape, strides) = self.axes.heads(num_heads);
        View::with_strides(self.data, shape, strides)
    }

    /// Aligned at the right behind axes of size 1.
    pub(super) fn view(&self) -> Result<View<'a, T, 4>> {
        View::with_strides(self.data, self.axes.shape, self.axes.strides)
    }
}

impl<'a, T: Element> TensorMut<'a, T> {
    /// A packed, row-major tensor that is the whole slice.
    ///
    /// # Errors
    /// As [`Tensor::new`].
    pub fn new(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let axes = Axes::new(shape, None)?;
        HeadsMut::contiguous(data, axes.shape)?;
        Ok(Self { data, axes })
    }

    /// A tensor with the given strides, in elements, that starts at the slice's first element.
    ///
    /// # Errors
    /// As [`Tensor::with_strides`], and [`Error::Overlap`] if two indices may name one element.
    pub fn with_strides(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let axes = Axes::new(shape, Some(strides))?;
        HeadsMut::with_strides(data, axes.shape, axes.strides)?;
        Ok(Self { data, axes })
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        self.axes.shape()
    }

    /// As (batch, heads, seq, dim).
    pub(super) fn heads(&mut self, num_heads: usize) -> Result<HeadsMut<'_, T>> {
        let (shape, strides) = self.axes.heads(num_heads);
        HeadsMut::with_strides(self.data, shape, strides)
    }
}

/// A mask of one to four axes, aligned at the right with (batch, heads, seqlen_q, total length of the keys): boolean (`true` is
/// seen) or added to the scores.
///
/// ```
/// use polyhead::onnx::{AttnMask, Tensor};
/// let mask: AttnMask<'_> = Tensor::new(&[true, true, false], &[3])?.into();
/// assert_eq!(mask.shape(), [3]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum AttnMask<'a> {
    /// `true` is seen.
    Bool(Tensor<'a, bool>),
    /// Added; -inf hides a key.
    F32(Tensor<'a, f32>),
    /// As `F32`; its elements are widened into memory of the call's own.
    F16(Tensor<'a, f16>),
    /// As `F16`.
    Bf16(Tensor<'a, bf16>),
}

impl AttnMask<'_> {
    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Bool(tensor) => tensor.shape(),
            Self::F32(tensor) => tensor.shape(),
            Self::F16(tensor) => tensor.shape(),
            Self::Bf16(tensor) => tensor.shape(),
        }
    }
}

macro_rules! from_tensor {
    ($($t:ty => $variant:ident),*) => {$(
        impl<'a> From<Tensor<'a, $t>> for AttnMask<'a> {
            fn from(tensor: Tensor<'a, $t>) -> Self {
                Self::$variant(tensor)
            }
        }
    )*};
}
from_tensor!(bool => Bool, f32 => F32, f16 => F16, bf16 => Bf16);
