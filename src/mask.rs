//! What a query may see: masks, biases, and the two diagonals that causality and windows hang on.

use crate::view::{Layout, View};
use crate::{Error, Result};

/// Which query stands beside which key, when there are not as many of one as of the other.
///
/// Query `i` stands at key `i + offset`; a causal query sees the keys up to its own position. For 2 queries and 5 keys, and
/// for 5 queries and 2 keys (`x` is seen):
///
/// ```text
///  TopLeft (offset 0)   BottomRight (offset seqlen_k - seqlen_q)
///  x . . . .            x x x x .
///  x x . . .            x x x x x
///
///  x .                  . .
///  x x                  . .
///  x x                  . .
///  x x                  x .
///  x x                  x x
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Diagonal {
    /// The first query stands at the first key (PyTorch's `is_causal`, Keras, JAX).
    TopLeft,
    /// The last query stands at the last key (FlashAttention, ONNX with a past); with key lengths, at the last key of its
    /// sequence.
    BottomRight,
    /// The first query stands at this key, which may lie before the first.
    Offset(isize),
}

impl Diagonal {
    /// Position of query 0 among keys, for a sequence of `len` keys.
    pub(crate) fn offset(self, seqlen_q: usize, len: usize) -> isize {
        match self {
            Self::TopLeft => 0,
            // Sizes of axes fit isize, as the views they come from do (an axis of stride 0 may be longer: saturate).
            Self::BottomRight => saturate(len).saturating_sub(saturate(seqlen_q)),
            Self::Offset(offset) => offset,
        }
    }
}

pub(crate) fn saturate(n: usize) -> isize {
    isize::try_from(n).unwrap_or(isize::MAX)
}

/// A sliding window around a diagonal: how many keys besides its own position a query sees on either side.
///
/// ```
/// use polyhead::{Diagonal, Window};
/// // Mistral's window of 4096 tokens, the query's own among them.
/// let window = Window { left: Some(4095), right: Some(0), diagonal: Diagonal::BottomRight };
/// # let _ = window;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Keys before the query's position, or all of them.
    pub left: Option<usize>,
    /// Keys after the query's position, or all of them.
    pub right: Option<usize>,
    /// Where a query's position is.
    pub diagonal: Diagonal,
}

/// A boolean mask of up to four axes (batch, heads, seqlen_q, seqlen_k), aligned at the right; axes of size 1 are broadcast.
/// Its polarity is in the constructor's name.
///
/// ```
/// use polyhead::{Mask, Matrix};
/// let seen = [true, true, false];
/// // Keys 0 and 1 of 3, for every query of every head of every batch.
/// let mask = Mask::attend(Matrix::contiguous(&seen, [1, 3])?)?;
/// assert_eq!(mask.shape(), [1, 1, 1, 3]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    view: View<'a, bool, 4>,
    /// The value that lets a key be seen.
    attend: bool,
}

impl<'a> Mask<'a> {
    /// `true` is seen: the meaning of PyTorch's `scaled_dot_product_attention`, ONNX, JAX and Keras.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a view of more than four axes.
    pub fn attend<const N: usize>(view: View<'a, bool, N>) -> Result<Self> {
        Ok(Self { view: right_aligned(view)?, attend: true })
    }

    /// `true` is hidden: the meaning of PyTorch's `nn.MultiheadAttention`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a view of more than four axes.
    pub fn ignore<const N: usize>(view: View<'a, bool, N>) -> Result<Self> {
        Ok(Self { view: right_aligned(view)?, attend: false })
    }

    /// A mask of keys, (batch, seqlen_k), for every head and query; `true` is seen.
    pub fn attend_keys(view: View<'a, bool, 2>) -> Self {
        Self { view: of_keys(view), attend: true }
    }

    /// A mask of keys, (batch, seqlen_k), for every head and query; `true` is hidden: PyTorch's `key_padding_mask`.
    ///
    /// ```
    /// use polyhead::{Mask, Matrix};
    /// let padding = [false, false, true, false, true, true];
    /// assert_eq!(Mask::ignore_keys(Matrix::contiguous(&padding, [2, 3])?).shape(), [2, 1, 1, 3]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn ignore_keys(view: View<'a, bool, 2>) -> Self {
        Self { view: of_keys(view), attend: false }
    }

    /// Sizes of the four axes (batch, heads, seqlen_q, seqlen_k).
    pub fn shape(&self) -> [usize; 4] {
        self.view.shape()
    }

    /// Checked against, and broadcast to, the shape of the scores.
    pub(crate) fn broadcast(&self, scores: [usize; 4]) -> Result<Broadcast<'a, bool>> {
        Broadcast::new("mask", self.view, scores)
    }

    /// The same rule over another view, which `change` makes of this one and the value that lets a key be seen.
    pub(crate) fn with_view<'b>(
        self,
        change: impl FnOnce(View<'a, bool, 4>, bool) -> Result<View<'b, bool, 4>>,
    ) -> Result<Mask<'b>> {
        Ok(Mask { view: change(self.view, self.attend)?, attend: self.attend })
    }

    /// The value that lets a key be seen.
    pub(crate) fn attend_value(&self) -> bool {
        self.attend
    }
}

/// An additive bias of up to four axes (batch, heads, seqlen_q, seqlen_k), aligned at the right; axes of size 1 are broadcast.
///
/// It is added after `softmax_scale` and `softcap`. A bias of -inf hides its key; any finite bias, however negative, does not.
///
/// ```
/// use polyhead::{Bias, Matrix};
/// let table = [0.0f32, -0.5, -1.0, f32::NEG_INFINITY];
/// let bias = Bias::new(Matrix::contiguous(&table, [2, 2])?)?;
/// assert_eq!(bias.shape(), [1, 1, 2, 2]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    view: View<'a, f32, 4>,
}

impl<'a> Bias<'a> {
    /// A bias with the view's values.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a view of more than four axes.
    pub fn new<const N: usize>(view: View<'a, f32, N>) -> Result<Self> {
        Ok(Self { view: right_aligned(view)? })
    }

    /// A bias of keys, (batch, seqlen_k), for every head and query.
    pub fn of_keys(view: View<'a, f32, 2>) -> Self {
        Self { view: of_keys(view) }
    }

    /// Sizes of the four axes (batch, heads, seqlen_q, seqlen_k).
    pub fn shape(&self) -> [usize; 4] {
        self.view.shape()
    }

    /// The values of another view, which `change` makes of this one.
    pub(crate) fn with_view<'b>(
        self,
        change: impl FnOnce(View<'a, f32, 4>) -> Result<View<'b, f32, 4>>,
    ) -> Result<Bias<'b>> {
        Ok(Bias { view: change(self.view)? })
    }

    /// Checked against, and broadcast to, the shape of the scores.
    pub(crate) fn broadcast(&self, scores: [usize; 4]) -> Result<Broadcast<'a, f32>> {
        Broadcast::new("bias", self.view, scores)
    }
}

fn of_keys<T: Copy>(view: View<'_, T, 2>) -> View<'_, T, 4> {
    let ([batch, keys], [item, key]) = (view.shape(), view.strides());
    view.reshaped([batch, 1, 1, keys], [item, 0, 0, key])
}

fn right_aligned<T: Copy, const N: usize>(view: View<'_, T, N>) -> Result<View<'_, T, 4>> {
    if N > 4 {
        return Err(Error::Unsupported { what: "a mask or bias of more than four axes" });
    }
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[4 - N..].copy_from_slice(&view.shape());
    strides[4 - N..].copy_from_slice(&view.strides());
    View::with_strides(view.data(), shape, strides)
}

/// A mask or bias at the shape of the scores: broadcast axes have stride 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Broadcast<'a, T> {
    pub(crate) data: &'a [T],
    layout: Layout<4>,
}

impl<'a, T: Copy> Broadcast<'a, T> {
    fn new(operand: &'static str, view: View<'a, T, 4>, scores: [usize; 4]) -> Result<Self> {
        const AXES: [&str; 4] = ["batch", "heads", "seqlen_q", "seqlen_k"];
        let shape = view.shape();
        for axis in 0..4 {
            if shape[axis] != scores[axis] && shape[axis] != 1 {
                let (expected, actual) = (scores[axis], shape[axis]);
                return Err(Error::Shape { operand, axis: AXES[axis], expected, actual });
            }
        }
        Ok(Self { data: view.data(), layout: Layout { shape: scores, strides: view.strides() } })
    }

    #[inline(always)]
    pub(crate) fn get(&self, index: [usize; 4]) -> T {
        self.data[self.layout.offset(index)]
    }

    /// Where key `key` of a query's row is.
    pub(crate) fn offset(&self, index: [usize; 4]) -> usize {
        self.layout.offset(index)
    }

    /// Stride from one key to the next, 0 if all keys share one value.
    pub(crate) fn key_stride(&self) -> usize {
        self.layout.strides[3]
    }

    /// Whether two rows of the scores have the same values because they are the same memory.
    pub(crate) fn same_row(&self, a: [usize; 3], b: [usize; 3]) -> bool {
        self.layout.offset([a[0], a[1], a[2], 0]) == self.layout.offset([b[0], b[1], b[2], 0])
    }
}

/// ALiBi slopes for `num_heads` heads by the rule of the paper's authors (Press et al. 2022, section 3, and its published code):
/// for a power of two, a geometric series that starts at and has the ratio `2^(-8 / num_heads)`; otherwise the series of the
/// next smaller power of two, then every other slope of the next larger one.
///
/// ```
/// assert_eq!(polyhead::alibi_slopes(8)[..3], [0.5, 0.25, 0.125]);
/// assert_eq!(polyhead::alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
/// ```
pub fn alibi_slopes(num_heads: usize) -> Vec<f32> {
    let series = |n: usize, i: usize| (-8.0 * (i + 1) as f64 / n as f64).exp2() as f32;
    let Some(power) = num_heads.checked_ilog2().map(|log| 1usize << log) else { return Vec::new() };
    let rest = (0..num_heads - power).map(|i| series(2 * power, 2 * i));
    (0..power).map(|i| series(power, i)).chain(rest).collect()
}
