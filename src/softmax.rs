//! Softmax, log-softmax and log-sum-exp over the rows of matrices.
//!
//! The rows are those of a strided [`Matrix`] (row, column); for another axis, permute or stride the view so that it is the
//! last. Any layout is accepted for inputs, outputs and masks, and has no influence on the results: the same numbers give the
//! same bits, wherever they lie, in place or not, on any number of threads. They do depend, within rounding, on the level.
//!
//! | row | [`softmax()`] | [`log_softmax()`] | [`log_sum_exp()`] |
//! |---|---|---|---|
//! | finite and -inf | `e^(x - max) / sum` | `x - max - ln(sum)` | `max + ln(sum)` |
//! | nothing seen, or only -inf (`torch.softmax`: NaN) | 0 | -inf | -inf |
//! | +inf seen | NaN | NaN | +inf |
//! | NaN seen | NaN | NaN | NaN |
//! | a hidden entry, whatever it and the row hold | 0 | -inf | not counted |
//!
//! Arithmetic is in `f32` for every element type, with a result rounded once to the output's. Exponentials are exact to 1.2 ulp
//! of the rounded difference `x - max`, as in any `f32` softmax; those below 2^-126 count as 0 (no subnormal is an exponential,
//! though a quotient may be one). Sums add up no more than 64 numbers in a row in `f32`, and the rest in `f64`: their error
//! does not grow with the length of the row.
//!
//! Nothing is allocated. Where output rows are `f32` side by side they are the working memory; otherwise it is 16 KiB of stack,
//! and rows of more than 4096 elements are read three times and exponentiated twice. Large matrices are spread by rows over the
//! rayon pool that the caller is in; a single row stays on one thread.
//!
//! Three passes, the maximum exact before the first exponential (as in Milakov and Gimelshein 2018, "Online normalizer
//! calculation for softmax", algorithm 2); the online form of the same paper is for attention, where scores are not stored.

use crate::kernel::row_softmax::{Job, Kind, Rows};
use crate::view::RowBlocks;
use crate::{Element, Error, Level, Mask, Matrix, MatrixMut, Result, parallel};

/// Options of the functions of this module.
///
/// ```
/// use polyhead::{Mask, Matrix, MatrixMut, softmax};
/// let seen = [true, true, false];
/// // One mask for all rows, as its row axis has size 1.
/// let options = softmax::SoftmaxOptions::new().mask(Mask::attend(Matrix::contiguous(&seen, [1, 3])?)?);
/// let mut x = [1.0, 1.0, f32::NAN, 0.0, 0.0, 5.0];
/// softmax::softmax_in_place(MatrixMut::contiguous(&mut x, [2, 3])?, &options)?;
/// assert_eq!(x, [0.5, 0.5, 0.0, 0.5, 0.5, 0.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SoftmaxOptions<'a> {
    mask: Option<Mask<'a>>,
    level: Option<Level>,
}

impl<'a> SoftmaxOptions<'a> {
    /// No mask, the best level.
    pub fn new() -> Self {
        Self::default()
    }

    /// Hides entries, of (row, column) shape; an axis of size 1 is broadcast. What is hidden cannot change any bit of the result.
    pub fn mask(mut self, mask: Mask<'a>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Runs on this level instead of the best one.
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }
}

/// Softmax of every row of `x`, into `out` of the same shape. See the [module](self) for what becomes of infinities and NaN.
///
/// # Errors
/// [`Error::Shape`] for an `out` or `mask` of another shape, [`Error::LevelUnavailable`]; `out` is then untouched.
///
/// ```
/// use polyhead::{Matrix, MatrixMut, softmax::{SoftmaxOptions, softmax}};
/// let x = [0.0f32, 0.0, f32::NEG_INFINITY, 1000.0];
/// // Along the columns: axis 0 becomes the last one.
/// let columns = Matrix::contiguous(&x, [2, 2])?.permute([1, 0])?;
/// let mut out = [0.0f32; 4];
/// softmax(&columns, MatrixMut::contiguous(&mut out, [2, 2])?.permute([1, 0])?, &SoftmaxOptions::new())?;
/// assert_eq!(out, [1.0, 0.0, 0.0, 1.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn softmax<T: Element, U: Element>(
    x: &Matrix<'_, T>,
    out: MatrixMut<'_, U>,
    options: &SoftmaxOptions<'_>,
) -> Result<()> {
    run(Kind::Softmax, Some(x), out, options)
}

/// [`softmax()`] in place of its input.
///
/// # Errors
/// As [`softmax()`].
///
/// ```
/// use polyhead::{MatrixMut, softmax::{SoftmaxOptions, softmax_in_place}};
/// let mut x = [7.0f32; 8];
/// softmax_in_place(MatrixMut::contiguous(&mut x, [2, 4])?, &SoftmaxOptions::new())?;
/// assert_eq!(x, [0.25; 8]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn softmax_in_place<T: Element>(x: MatrixMut<'_, T>, options: &SoftmaxOptions<'_>) -> Result<()> {
    run(Kind::Softmax, None::<&Matrix<'_, T>>, x, options)
}

/// The natural logarithm of [`softmax()`] without its underflow.
///
/// # Errors
/// As [`softmax()`].
///
/// ```
/// use polyhead::{Matrix, MatrixMut, softmax::{SoftmaxOptions, log_softmax}};
/// let mut out = [0.0f32; 2];
/// let x = Matrix::contiguous(&[0.0f32, -1000.0], [1, 2])?;
/// log_softmax(&x, MatrixMut::contiguous(&mut out, [1, 2])?, &SoftmaxOptions::new())?;
/// assert_eq!(out, [0.0, -1000.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn log_softmax<T: Element, U: Element>(
    x: &Matrix<'_, T>,
    out: MatrixMut<'_, U>,
    options: &SoftmaxOptions<'_>,
) -> Result<()> {
    run(Kind::LogSoftmax, Some(x), out, options)
}

/// [`log_softmax()`] in place of its input.
///
/// # Errors
/// As [`softmax()`].
///
/// ```
/// use polyhead::{MatrixMut, softmax::{SoftmaxOptions, log_softmax_in_place}};
/// let mut x = [f32::NEG_INFINITY, 3.0];
/// log_softmax_in_place(MatrixMut::contiguous(&mut x, [1, 2])?, &SoftmaxOptions::new())?;
/// assert_eq!(x, [f32::NEG_INFINITY, 0.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn log_softmax_in_place<T: Element>(x: MatrixMut<'_, T>, options: &SoftmaxOptions<'_>) -> Result<()> {
    run(Kind::LogSoftmax, None::<&Matrix<'_, T>>, x, options)
}

/// The natural logarithm of the sum of the exponentials of every row of `x`, one for each row, without overflow.
///
/// # Errors
/// [`Error::Length`] if `out` has not one element a row, [`Error::Shape`] for a `mask` of another shape than `x`,
/// [`Error::LevelUnavailable`]; `out` is then untouched.
///
/// ```
/// use polyhead::{Matrix, softmax::{SoftmaxOptions, log_sum_exp}};
/// let mut lse = [0.0f32; 2];
/// let x = [1000.0f32, 1000.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
/// log_sum_exp(&Matrix::contiguous(&x, [2, 2])?, &mut lse, &SoftmaxOptions::new())?;
/// assert_eq!(lse, [1000.0 + 2f32.ln(), f32::NEG_INFINITY]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn log_sum_exp<T: Element>(x: &Matrix<'_, T>, out: &mut [f32], options: &SoftmaxOptions<'_>) -> Result<()> {
    let [rows, _] = x.shape();
    if out.len() != rows {
        return Err(Error::Length { operand: "out", expected: rows, actual: out.len() });
    }
    run(Kind::LogSumExp, Some(x), MatrixMut::contiguous(out, [rows, 1])?, options)
}

/// Elements below which a call stays on the caller's thread.
///
/// One thread takes 25 to 50 us for so many (AVX-512, rows of 1024 and 64). Two took 0.54 of that when the second was awake, and
/// waking it from outside the pool costs 5 to 20 us. Measured with `cargo bench --bench softmax -- threads`.
const SERIAL_BELOW: usize = 64 * 1024;

/// Elements that a task has at least, unless there are fewer: 6 to 12 us.
const TASK: usize = 16 * 1024;

fn run<T: Element, U: Element>(
    kind: Kind,
    x: Option<&Matrix<'_, T>>,
    out: MatrixMut<'_, U>,
    options: &SoftmaxOptions<'_>,
) -> Result<()> {
    let level = Level::resolve(options.level)?;
    let shape = x.map_or(out.shape(), Matrix::shape);
    if kind != Kind::LogSumExp {
        check_shape("out", shape, out.shape(), |_| false)?;
    }
    let mask = options.mask.map(|mask| {
        let [batch, heads, rows, columns] = mask.shape();
        if let Some((axis, actual)) = [("batch", batch), ("heads", heads)].into_iter().find(|&(_, size)| size != 1) {
            return Err(Error::Shape { operand: "mask", axis, expected: 1, actual });
        }
        check_shape("mask", shape, [rows, columns], |size| size == 1)?;
        Ok((mask.broadcast([1, 1, shape[0], shape[1]])?, mask.attend_value()))
    });
    let mask = mask.transpose()?;
    if out.shape().contains(&0) {
        return Ok(());
    }
    let [rows, columns] = shape;
    let job = Job { kind, columns, input: x.map(|x| (T::erase(x.data()), x.layout())), mask };
    let blocks = RowBlocks::new(out, TASK / columns.clamp(1, TASK));
    let work = rows.saturating_mul(columns);
    let threads = if work < SERIAL_BELOW { 1 } else { parallel::current_threads().clamp(1, blocks.len()) };
    // Threads need no memory of their own: a vector of `()` allocates nothing.
    parallel::for_each_task(blocks.len(), &mut vec![(); threads], |_, ()| {
        if let Some(block) = blocks.take() {
            level.dispatch(Rows { job: &job, block });
        }
    });
    Ok(())
}

fn check_shape(
    operand: &'static str,
    expected: [usize; 2],
    actual: [usize; 2],
    also: impl Fn(usize) -> bool,
) -> Result<()> {
    match (0..2).find(|&axis| actual[axis] != expected[axis] && !also(actual[axis])) {
        None => Ok(()),
        Some(i) => Err(Error::Shape { operand, axis: ["row", "column"][i], expected: expected[i], actual: actual[i] }),
    }
}
