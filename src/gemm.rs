//! Matrix products over strided views, `C = alpha A B + beta C`, in `f32` and `f64`.
//!
//! A safe front of the packing GEMM of the `matrixmultiply` crate, with threads, batches, and paths of its own for products
//! with a few rows or columns. What it promises:
//!
//! - **Any layout**: operands are strided views; a transpose is [`View::permute`](crate::View::permute), a broadcast a
//!   stride of 0. Strides are not negative: a reversed axis needs a copy. Memory between rows is neither read nor written.
//! - **Any size**: every axis may be 0. With `k == 0` the result is `beta C`.
//! - **`beta == 0` does not read C**: it may hold NaN or anything else before.
//! - **`alpha == 0` does not read A and B**, as the reference BLAS: NaN in them does not reach C.
//! - **NaN and infinity** are otherwise carried as IEEE arithmetic does: `0 * NaN` in a sum is NaN.
//! - **Bits**: the result does not depend on the number of threads, on the pool, or on the other items of a batch. It may
//!   differ between processors, and between layouts of the same values.
//! - **Accuracy**: the error of an element is at most about `k * EPSILON * sum |alpha a b|`, plus the rounding of `beta c`.
//!   Equal rows of A give results that are equal within that bound, not always bitwise: edges are rounded otherwise.
//! - **Errors**: shapes are checked before anything is written.
//! - **Overlap**: that C overlaps A or B cannot be written in safe code:
//!
//! ```compile_fail,E0502
//! use polyhead::{Matrix, MatrixMut, gemm::gemm};
//! let mut a = [1.0f32; 81];
//! let left = Matrix::contiguous(&a, [9, 9]).unwrap();
//! let mut out = MatrixMut::contiguous(&mut a, [9, 9]).unwrap();
//! gemm(1.0, &left, &left, 0.0, &mut out).unwrap();
//! ```
//!
//! What a product with few columns or rows depends on is how fast the other matrix is read: it is not packed but read in
//! place, fastest if contiguous along one axis.
//!
//! Weights that serve many products are packed once: [`PackedMatrix`] and [`gemm_packed`], the kernels of this crate for `f32`, `f16`
//! and `bf16`, with promises of their own.
//!
//! Small products stay on the caller's thread; others are spread over the rayon pool that the caller is in.

#![allow(
    unsafe_code,
    reason = "calls matrixmultiply, which takes pointers, and writes disjoint parts of C from several threads"
)]

mod element;
mod packed;
mod skinny;

pub use element::GemmElement;
pub(crate) use packed::gemm_packed_columns;
pub use packed::{PackedMatrix, gemm_packed};

use crate::view::Layout;
use crate::{Error, Matrices, MatricesMut, Matrix, MatrixMut, Result, parallel};
use core::ops::Range;
use element::{Source, Target};
use skinny::Skinny;

/// Rows of C that are never divided: a multiple of every tile of matrixmultiply (16 at most) and of every group of rows of
/// [`skinny`], so that a cut between strips leaves each element in the same place of the same tile, and its arithmetic as is.
/// The grid of strips depends on the shape alone. How many strips a task takes in one call also depends on the threads, since
/// every call packs B again.
const STRIP: usize = 32;
/// Strips per task from which on a thread gets two tasks, for balance. GFLOP/s of two threads with two / four tasks: 164 / 148
/// for 128 x 1024 x 1024, 202 / 195 for 1024 x 1024 x 1024.
const TASK_STRIPS: usize = 8;
/// Multiplications from which on several threads pay. One thread / two that spin / two that sleep: 2.1e6 45 / 26 / 52 us, 1.2e6
/// 26 / 15 / 34 us, 5e5 13 / 8 / 18 us (f32, two cores of an AMD EPYC (Zen 4), 2026-11-30).
const THREADED_PACKED: usize = 1 << 21;
/// The same for products with few columns, in elements of the matrix: 1.0e6 58 / 32 / 86 us, 5.9e5 31 / 16 / 53 us, 2.6e5
/// 13 / 7 / 33 us.
const THREADED_SKINNY: usize = 1 << 19;

/// `C = alpha A B + beta C` with A (m, k), B (k, n) and C (m, n).
///
/// See the [module](self) for what is promised.
///
/// # Errors
/// [`Error::Shape`] if B's rows are not A's columns (k), or C's shape is not A's rows by B's columns. C is then unchanged.
///
/// ```
/// use polyhead::{Matrix, MatrixMut, gemm::gemm};
/// let a = Matrix::contiguous(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
/// let b = a.permute([1, 0])?; // A times its transpose
/// let mut out = [f32::NAN; 4];
/// gemm(1.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut out, [2, 2])?)?;
/// assert_eq!(out, [14.0, 32.0, 32.0, 77.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn gemm<T: GemmElement>(
    alpha: T,
    a: &Matrix<'_, T>,
    b: &Matrix<'_, T>,
    beta: T,
    c: &mut MatrixMut<'_, T>,
) -> Result<()> {
    let (a, b) = (Operand::single(a.data(), a.layout()), Operand::single(b.data(), b.layout()));
    let layout = single(c.layout());
    let size = Size::check(a.layout.shape, b.layout.shape, layout.shape)?;
    Product { alpha, a, b, beta, c: Output::new(c.data_mut(), layout), size }.run();
    Ok(())
}

/// [`gemm`] for every item of a batch: A (batch, m, k), B (batch, k, n), C (batch, m, n).
///
/// The batch of A or of B may be 1: that matrix then serves every item. An item's bits do not depend on the others; for a
/// packed A and one B, a single [`gemm`] of (batch * m, k) is faster, and gives other bits.
///
/// # Errors
/// [`Error::Shape`] as [`gemm`], and if the batch of A or B is neither 1 nor C's.
///
/// ```
/// use polyhead::{Matrices, MatricesMut, gemm::gemm_batched};
/// let a = Matrices::contiguous(&[1.0f64, 2.0, 3.0, 4.0], [2, 1, 2])?;
/// let b = Matrices::contiguous(&[10.0, 1.0], [1, 2, 1])?; // the same column for both
/// let mut out = [1.0, 1.0];
/// gemm_batched(1.0, &a, &b, 0.5, &mut MatricesMut::contiguous(&mut out, [2, 1, 1])?)?;
/// assert_eq!(out, [12.5, 34.5]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn gemm_batched<T: GemmElement>(
    alpha: T,
    a: &Matrices<'_, T>,
    b: &Matrices<'_, T>,
    beta: T,
    c: &mut MatricesMut<'_, T>,
) -> Result<()> {
    let (a, b) = (Operand { data: a.data(), layout: a.layout() }, Operand { data: b.data(), layout: b.layout() });
    let layout = c.layout();
    let size = Size::check(a.layout.shape, b.layout.shape, layout.shape)?;
    Product { alpha, a, b, beta, c: Output::new(c.data_mut(), layout), size }.run();
    Ok(())
}

/// A matrix as a batch of one.
fn single(Layout { shape: [rows, columns], strides: [down, across] }: Layout<2>) -> Layout<3> {
    Layout { shape: [1, rows, columns], strides: [0, down, across] }
}

#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl Size {
    /// Sizes of the product from the shapes (batch, row, column) of A, B and C.
    fn check(a: [usize; 3], b: [usize; 3], c: [usize; 3]) -> Result<Self> {
        let size = Self { batch: c[0], m: a[1], n: b[2], k: a[2] };
        let equal = |operand, axis, expected, actual| {
            if expected == actual { Ok(()) } else { Err(Error::Shape { operand, axis, expected, actual }) }
        };
        equal("b", "row", size.k, b[1])?;
        equal("c", "row", size.m, c[1])?;
        equal("c", "column", size.n, c[2])?;
        for (operand, batch) in [("a", a[0]), ("b", b[0])] {
            if batch != 1 {
                equal(operand, "batch", size.batch, batch)?;
            }
        }
        Ok(size)
    }
}

/// An input. Its layout lies inside `data`: the view it comes from has checked that.
#[derive(Clone, Copy)]
struct Operand<'a, T> {
    data: &'a [T],
    layout: Layout<3>,
}

impl<'a, T> Operand<'a, T> {
    fn single(data: &'a [T], layout: Layout<2>) -> Self {
        Self { data, layout: single(layout) }
    }

    /// The slice from a row of an item on; empty if the matrix is.
    fn from(&self, item: usize, row: usize) -> &'a [T] {
        if self.layout.shape.contains(&0) {
            return &[];
        }
        let item = if self.layout.shape[0] == 1 { 0 } else { item };
        &self.data[self.layout.offset([item, row, 0])..]
    }

    /// Strides from row to row and from column to column.
    fn strides(&self) -> [usize; 2] {
        [self.layout.strides[1], self.layout.strides[2]]
    }

    fn source(&self, item: usize, row: usize) -> Source<T> {
        Source(self.from(item, row).as_ptr(), self.strides().map(|stride| stride as isize))
    }

    fn transposed(&self) -> Self {
        Self { data: self.data, layout: transposed(self.layout) }
    }
}

fn transposed(Layout { shape: [b, r, c], strides: [sb, sr, sc] }: Layout<3>) -> Layout<3> {
    Layout { shape: [b, c, r], strides: [sb, sc, sr] }
}

/// C, as several threads write to it.
struct Output<'a, T> {
    first: *mut T,
    layout: Layout<3>,
    borrow: core::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for the `&mut [T]` it was made from; the threads of a `Product` write disjoint parts of it.
unsafe impl<T: Send> Sync for Output<'_, T> {}

impl<'a, T: GemmElement> Output<'a, T> {
    /// `layout` is that of a `ViewMut` over `data`: inside it, and no two indices name one element.
    fn new(data: &'a mut [T], layout: Layout<3>) -> Self {
        Self { first: data.as_mut_ptr(), layout, borrow: core::marker::PhantomData }
    }

    fn transposed(&self) -> Self {
        Self { first: self.first, layout: transposed(self.layout), borrow: self.borrow }
    }

    /// # Safety
    /// `index` must be inside the shape.
    unsafe fn target(&self, index: [usize; 3]) -> Target<T> {
        let [_, down, across] = self.layout.strides;
        // SAFETY: the caller's index is inside the shape, whose every element is inside the slice (`new`).
        Target(unsafe { self.first.add(self.layout.offset(index)) }, [down as isize, across as isize])
    }

    /// `c = alpha sum + beta c` for the elements of a column from `index` on; they are not read if `beta` is 0.
    ///
    /// # Safety
    /// The elements must be inside the shape, and used by no other thread.
    unsafe fn update_column(&self, index: [usize; 3], alpha: T, sums: &[T], beta: T) {
        // SAFETY: the first element is inside the shape, by the caller's word.
        let Target(first, [down, _]) = unsafe { self.target(index) };
        for (i, &sum) in (0..).zip(sums) {
            // SAFETY: inside the shape, so inside the slice (`new`), and nobody else's, by the caller's word.
            unsafe {
                let c = first.offset(i * down);
                *c = if beta == T::ZERO { alpha * sum } else { alpha * sum + *c * beta };
            }
        }
    }
}

struct Product<'a, T> {
    alpha: T,
    a: Operand<'a, T>,
    b: Operand<'a, T>,
    beta: T,
    c: Output<'a, T>,
    size: Size,
}

impl<T: GemmElement> Product<'_, T> {
    fn run(mut self) {
        if self.alpha == T::ZERO {
            self.size.k = 0; // Neither A nor B is read: what is left is beta C.
        }
        let Size { batch, m, n, k } = self.size;
        if batch == 0 || m == 0 || n == 0 || (k == 0 && self.beta == T::ONE) {
            return;
        }
        if m < n { self.transposed().run_tall() } else { self.run_tall() }
    }

    /// The same as `C^T = alpha B^T A^T + beta C^T`, so that C is never wider than tall.
    fn transposed(self) -> Self {
        let Size { batch, m, n, k } = self.size;
        let size = Size { batch, m: n, n: m, k };
        Self { a: self.b.transposed(), b: self.a.transposed(), c: self.c.transposed(), size, ..self }
    }

    /// Whether the columns are few. Decided, as is everything that rounding depends on, by size and strides alone.
    fn is_skinny(&self) -> bool {
        self.size.k > 0 && skinny::suits(self.size.n, self.size.k)
    }

    /// Cuts the rows of all items in strips and gives every task a run of them.
    fn run_tall(&self) {
        let Size { batch, m, .. } = self.size;
        let strips = m.div_ceil(STRIP);
        let total = batch * strips;
        let threads = self.threads().min(total);
        let tasks = if threads == 1 { 1 } else { (total / TASK_STRIPS).clamp(threads, 2 * threads).min(total) };
        let start = |task: usize| task * (total / tasks) + task.min(total % tasks);
        parallel::for_each_task(tasks, &mut vec![(); threads], |task, ()| {
            let (mut strip, end) = (start(task), start(task + 1));
            while strip < end {
                let (item, first) = (strip / strips, strip % strips);
                let last = strips.min(first + (end - strip));
                // SAFETY: the tasks' runs of strips do not overlap, so no other task has these rows of this item.
                unsafe { self.rows(item, first * STRIP..m.min(last * STRIP)) };
                strip += last - first;
            }
        });
    }

    /// Threads worth waking.
    fn threads(&self) -> usize {
        let Size { batch, m, n, k } = self.size;
        let read = batch.saturating_mul(m).saturating_mul(k.max(1));
        let small = match self.is_skinny() {
            true => read < THREADED_SKINNY,
            false => read.saturating_mul(n) < THREADED_PACKED,
        };
        if small { 1 } else { parallel::current_threads() }
    }

    /// Computes some rows of an item.
    ///
    /// # Safety
    /// No other thread may use these rows of C.
    unsafe fn rows(&self, item: usize, rows: Range<usize>) {
        let Size { n, k, .. } = self.size;
        if self.is_skinny() {
            let work = Skinny {
                matrix: self.a.from(item, 0),
                matrix_strides: self.a.strides(),
                vectors: self.b.from(item, 0),
                vector_strides: self.b.strides(),
                count: n,
                k,
            };
            return T::skinny(work, rows, &mut |column, row, sums| {
                // SAFETY: `skinny` gives rows of `rows` and columns below `n`; the rows are ours, by the caller's word.
                unsafe { self.c.update_column([item, row, column], self.alpha, sums, self.beta) };
            });
        }
        let (size, a, b) = ([rows.len(), n, k], self.a.source(item, rows.start), self.b.source(item, 0));
        // SAFETY: the blocks lie inside the views, so inside the slices (checked when the views were made); C's elements are
        // distinct (checked by `ViewMut`) and ours, by the caller's word.
        unsafe {
            let c = self.c.target([item, rows.start, 0]);
            T::packed(size, self.alpha, a, b, self.beta, c);
        }
    }
}
