//! Products with a right-hand side that is packed once: weights.

use core::cell::Cell;
use core::fmt;
use core::ops::Range;

use super::THREADED_PACKED;
use crate::element::AnySlice;
use crate::kernel::matrix::gemm::{PackPanel, Terms, Tiled};
use crate::kernel::matrix::terms;
use crate::kernel::packed::{BLOCK_COLUMNS, BLOCK_ROWS, Block, Left};
use crate::view::{AnyRowBlocks, Layout};
use crate::workspace::{Buffer, grow};
use crate::{Element, Error, Level, Matrix, MatrixMut, Precision, Result, parallel};

/// Bytes of a cache line, at which panels begin.
const LINE: usize = 64;
/// Rows and columns of a block on matrix tiles, at most: terms of A, packed once a block, and a panel of B share L2 (k 1024, three
/// terms: 768 KiB and 192 KiB). Not measured yet.
const TILED_BLOCK: [usize; 2] = [128, 1024];
/// A product of few rows is bound by reading B, and takes as long as one of about this many.
const BOUND_BY_B: usize = 4;

/// Weights packed for the kernels of a level, once: the right-hand side B (k, n) of [`gemm_packed`].
///
/// Elements keep their type (`bf16` weights take half the memory of `f32`, and half the time to read) and their bits. Columns
/// are padded to whole panels, two vectors of the level; besides that there are `k * n` elements.
///
/// ```
/// use polyhead::{Matrix, gemm::PackedMatrix};
/// // A PyTorch weight is (out_features, in_features): B is its transpose.
/// let weight = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
/// let b = PackedMatrix::new(&Matrix::contiguous(&weight, [2, 3])?.permute([1, 0])?, None)?;
/// assert_eq!(b.shape(), [3, 2]);
/// assert_eq!(b.to_vec(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub struct PackedMatrix<T = f32> {
    /// Panels `[k][panel]` from `first` on, which is at a cache line; zeros where the last has no columns.
    data: Vec<T>,
    first: usize,
    shape: [usize; 2],
    level: Level,
    tiles: Option<Box<Tiles>>,
}

/// The same matrix in terms of bf16 for matrix tiles.
#[derive(Clone)]
struct Tiles {
    precision: Precision,
    terms: usize,
    /// Panels as [`Terms`] has them.
    data: Buffer,
    flagged: Vec<bool>,
}

impl<T: Element> PackedMatrix<T> {
    /// Packs B (k, n), of any strides, for a level: the one given, or the best.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`] if the machine lacks the level, [`Error::Memory`] if the copy cannot be allocated.
    pub fn new(b: &Matrix<'_, T>, level: Option<Level>) -> Result<Self> {
        let level = Level::resolve(level)?;
        let [k, n] = b.shape();
        let panel = panel(level);
        let columns = if k == 0 { Some(0) } else { n.checked_next_multiple_of(panel) };
        let len = columns.and_then(|columns| columns.checked_mul(k));
        let (mut data, first) = aligned::<T>(len.ok_or(Error::Memory { bytes: usize::MAX })?)?;
        if k > 0 {
            let Layout { strides: [down, across], .. } = b.layout();
            for (panel_index, out) in data[first..].chunks_exact_mut(k * panel).enumerate() {
                let columns = panel_index * panel..n.min((panel_index + 1) * panel);
                let source = &b.data()[columns.start * across..];
                for (row, out) in out.chunks_exact_mut(panel).enumerate() {
                    let source = &source[row * down..];
                    if across == 1 {
                        out[..columns.len()].copy_from_slice(&source[..columns.len()]);
                    } else {
                        out[..columns.len()].iter_mut().enumerate().for_each(|(j, x)| *x = source[j * across]);
                    }
                }
            }
        }
        Ok(Self { data, first, shape: [k, n], level, tiles: None })
    }

    /// For products of many rows: where the level has matrix tiles ([`Level::Amx`]), packs B for them, too, and products go there.
    /// On other levels nothing changes. An `f32`, of A or B, becomes as many bf16 as the precision asks for (three, two, one), an
    /// `f16` becomes two, a `bf16` is one. Those of B take two bytes each besides what B takes.
    ///
    /// Products of a few rows read B in terms, too, so that bits do not depend on their number; that is slower than without tiles for
    /// `f32`, whose terms are larger.
    ///
    /// # Errors
    /// [`Error::Memory`] if the terms cannot be allocated.
    ///
    /// ```
    /// use polyhead::{Matrix, MatrixMut, Precision, gemm::{PackedMatrix, gemm_packed}};
    /// let b = PackedMatrix::new(&Matrix::contiguous(&[1.0f32, 2.0, 3.0, 4.0], [2, 2])?, None)?.with_tiles(Precision::Highest)?;
    /// let a = [1.0f32, 10.0];
    /// let mut out = [0.0f32; 2];
    /// gemm_packed(&Matrix::contiguous(&a, [1, 2])?, &b, None, &mut MatrixMut::contiguous(&mut out, [1, 2])?)?;
    /// assert_eq!(out, [31.0, 42.0]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn with_tiles(mut self, precision: Precision) -> Result<Self> {
        let ([k, n], panel, too_large) = (self.shape, panel(self.level), Error::Memory { bytes: usize::MAX });
        if self.level != Level::Amx || k == 0 || n == 0 {
            return Ok(self);
        }
        let terms = terms(T::erase(&[]), precision);
        let len = Terms::panel_len(k, panel, terms).ok_or(too_large.clone())?;
        let panels = n.div_ceil(panel);
        let mut tiles = Tiles { precision, terms, data: Buffer::default(), flagged: Vec::new() };
        tiles.data.reserve(len.checked_mul(panels).ok_or(too_large)?)?;
        grow(&mut tiles.flagged, panels, bool::default)?;
        let mut widened = Vec::new();
        grow(&mut widened, k * panel, f32::default)?;
        let data = tiles.data.as_mut_slice().chunks_exact_mut(len).zip(&mut tiles.flagged);
        for (from, (dst, flagged)) in self.panels().chunks_exact(k * panel).zip(data) {
            widened.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
            *flagged = self.level.dispatch(PackPanel { panel: &widened, columns: panel, terms, dst });
        }
        self.tiles = Some(Box::new(tiles));
        Ok(self)
    }

    /// Rows (k) and columns (n).
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// The level whose kernels it is packed for.
    pub fn level(&self) -> Level {
        self.level
    }

    /// A row-major copy (k, n) of exactly the values given.
    pub fn to_vec(&self) -> Vec<T> {
        let ([k, n], panel) = (self.shape, panel(self.level));
        let mut copy = Vec::with_capacity(if k == 0 { 0 } else { k * n });
        for row in 0..if n == 0 { 0 } else { k } {
            for panels in self.panels().chunks_exact(k * panel) {
                copy.extend_from_slice(&panels[row * panel..][..panel.min((row + 1) * n - copy.len())]);
            }
        }
        copy
    }

    fn panels(&self) -> &[T] {
        &self.data[self.first..]
    }
}

impl<T: Element> Clone for PackedMatrix<T> {
    fn clone(&self) -> Self {
        let mut data = Vec::with_capacity(self.data.capacity());
        let first = to_line(&data);
        data.resize(first, T::default());
        data.extend_from_slice(self.panels());
        Self { data, first, tiles: self.tiles.clone(), ..*self }
    }
}

/// Shape and level; not the elements, which are many.
impl<T: Element> fmt::Debug for PackedMatrix<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut debug, element) = (f.debug_struct("PackedMatrix"), T::NAME);
        debug.field("shape", &self.shape).field("element", &element).field("level", &self.level).finish_non_exhaustive()
    }
}

/// Columns of a panel: two vectors.
fn panel(level: Level) -> usize {
    2 * level.lanes()
}

/// Elements from the start of a vector's memory to a cache line.
fn to_line<T>(data: &[T]) -> usize {
    data.as_ptr().align_offset(LINE).min(LINE / size_of::<T>() - 1)
}

/// A vector with `len` zeros from an index on that is at a cache line.
fn aligned<T: Element>(len: usize) -> Result<(Vec<T>, usize)> {
    let mut data = Vec::new();
    let capacity = len.saturating_add(LINE / size_of::<T>() - 1);
    let bytes = capacity.saturating_mul(size_of::<T>());
    data.try_reserve_exact(capacity).map_err(|_| Error::Memory { bytes })?;
    let first = to_line(&data);
    data.resize(first + len, T::default());
    Ok((data, first))
}

/// `out = A B + bias` with A (m, k), B (k, n) packed, `bias` (n) and `out` (m, n), on the level of B.
///
/// Element types are free; arithmetic is in `f32`, and a result is rounded once to that of `out`.
///
/// - **Any layout** of A and `out`; memory between rows is neither read nor written. A is read in place if it is `f32` with rows
///   side by side, else copied in pieces.
/// - **Any size**: every axis may be 0. With `k == 0` each row is the bias, or 0.
/// - **NaN and infinity** are carried as IEEE arithmetic does: `0 * NaN` in a sum is NaN.
/// - **Bits**: without [tiles](PackedMatrix::with_tiles) an element is a sum of chains of fused multiply-adds (on [`Level::Portable`]: what the build's target has) over pieces
///   of k of one length, in ascending order, to which the bias is added. A row of `out` depends on that row of A, on B, bias and
///   level only: neither on m, nor on the rows beside it, nor on strides, threads or pool.
/// - **Accuracy**: the error of an element is at most about `min(k, 256 + k / 256) * EPSILON * sum |a b|`, plus the rounding of the
///   bias and of `out`.
///   With tiles that holds for the precision `Highest`, and for bf16; `f16` by `f16` adds `2^-17 * sum |a b|`. A row of A, or some
///   columns of B side by side, of which an element is not 0 and outside of 2^-90..2^50, is computed without them.
/// - **Memory**: with tiles the calling thread keeps scratch for the next call, up to 128 rows of A in terms for each thread of the
///   pool; else nothing is allocated. Working memory is on the stack: up to 150 KiB of it if A is copied, else 10 KiB, or 42 KiB
///   with B in `f16` or `bf16`.
/// - **Threads**: large products are spread over the rayon pool that the caller is in, in one region.
///
/// # Errors
/// [`Error::Shape`] if A has not as many columns as B has rows, or `out` not A's rows and B's columns; [`Error::Length`] if the bias
/// has not as many elements as B has columns. `out` is then unchanged.
///
/// ```
/// use polyhead::{Matrix, MatrixMut, gemm::{PackedMatrix, gemm_packed}};
/// let weight = [1.0, 0.5, -2.0, 0.25, 0.0, 4.0].map(half::bf16::from_f32);
/// let b = PackedMatrix::new(&Matrix::contiguous(&weight, [3, 2])?, None)?;
/// let a = Matrix::contiguous(&[1.0f32, 2.0, 3.0], [1, 3])?;
/// let mut out = [0.0f32; 2];
/// gemm_packed(&a, &b, Some(&[10.0, 20.0]), &mut MatrixMut::contiguous(&mut out, [1, 2])?)?;
/// assert_eq!(out, [7.0, 33.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn gemm_packed<A: Element, T: Element, O: Element>(
    a: &Matrix<'_, A>,
    b: &PackedMatrix<T>,
    bias: Option<&[f32]>,
    out: &mut MatrixMut<'_, O>,
) -> Result<()> {
    gemm_packed_columns(a, b, 0..b.shape[1], true, bias, out)
}

/// [`gemm_packed`] with some columns of B alone, which begin with a panel, and on tiles only if `tiles` allows it.
pub(crate) fn gemm_packed_columns<A: Element, T: Element, O: Element>(
    a: &Matrix<'_, A>,
    b: &PackedMatrix<T>,
    columns: Range<usize>,
    tiles: bool,
    bias: Option<&[f32]>,
    out: &mut MatrixMut<'_, O>,
) -> Result<()> {
    debug_assert!(columns.end <= b.shape[1] && columns.start.is_multiple_of(panel(b.level)));
    let ([m, k], n) = (a.shape(), columns.len());
    let equal = |operand, axis, expected, actual| {
        if expected == actual { Ok(()) } else { Err(Error::Shape { operand, axis, expected, actual }) }
    };
    equal("a", "column", b.shape[0], k)?;
    equal("out", "row", m, out.shape()[0])?;
    equal("out", "column", n, out.shape()[1])?;
    if let Some(bias) = bias.filter(|bias| bias.len() != n) {
        return Err(Error::Length { operand: "bias", expected: n, actual: bias.len() });
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    let left = Left { data: A::erase(a.data()), layout: a.layout() };
    let panels = T::erase(&b.panels()[columns.start * k..]);
    let tiles = b.tiles.as_deref().filter(|_| tiles);
    let [rows, width] = if tiles.is_some() { TILED_BLOCK } else { [BLOCK_ROWS, BLOCK_COLUMNS] };
    // As equal as can be: a last block of a few rows would read B for little.
    let height = m.div_ceil(m.div_ceil(rows));
    let blocks = AnyRowBlocks::grid(out.reborrow(), [height, width]);
    let Some(tiles) = tiles else {
        run(b.level, left, panels, bias, &blocks);
        return Ok(());
    };
    let first = columns.start / panel(b.level);
    let data = &tiles.data.as_slice()[first * (tiles.data.as_slice().len() / tiles.flagged.len())..];
    let right = Terms { terms: tiles.terms, data, flagged: &tiles.flagged[first..] };
    run_tiled(b.level, (left, height, terms(left.data, tiles.precision)), (panels, right), bias, &blocks)
}

/// As [`run`], on matrix tiles.
fn run_tiled(
    level: Level,
    (a, height, terms): (Left<'_>, usize, usize),
    (b, right): (AnySlice<'_>, Terms<'_>),
    bias: Option<&[f32]>,
    blocks: &AnyRowBlocks<'_>,
) -> Result<()> {
    thread_local! {
        /// Scratch of the last call, of each of its threads.
        static SPARE: Cell<Vec<Buffer>> = const { Cell::new(Vec::new()) };
    }
    let [m, k] = a.layout.shape;
    let work = m.saturating_mul(k).saturating_mul(blocks.columns());
    let threads = if work < THREADED_PACKED { 1 } else { parallel::current_threads().min(blocks.len()) };
    let len = Tiled::scratch_len(height, k, terms).ok_or(Error::Memory { bytes: usize::MAX })?;
    let mut scratch = SPARE.try_with(Cell::take).unwrap_or_default();
    grow(&mut scratch, threads, Buffer::default)?;
    scratch[..threads].iter_mut().try_for_each(|scratch| scratch.reserve(len))?;
    parallel::for_each_task(blocks.len(), &mut scratch[..threads], |_, scratch| {
        if let Some(out) = blocks.take() {
            let (block, scratch) = (Block { a, b, bias, out }, scratch.as_mut_slice());
            level.dispatch(Tiled { block, b: right, terms, scratch });
        }
    });
    // A thread that ends has no use for it.
    let _ = SPARE.try_with(|spare| spare.set(scratch));
    Ok(())
}

/// Not generic, so that kernels are compiled with this crate and not once more with every crate that calls it.
fn run(level: Level, a: Left<'_>, b: AnySlice<'_>, bias: Option<&[f32]>, blocks: &AnyRowBlocks<'_>) {
    let [m, k] = a.layout.shape;
    let work = m.max(BOUND_BY_B).saturating_mul(k.max(1)).saturating_mul(blocks.columns());
    let threads = if work < THREADED_PACKED { 1 } else { parallel::current_threads().min(blocks.len()) };
    parallel::for_each_task(blocks.len(), &mut vec![(); threads], |_, ()| {
        if let Some(out) = blocks.take() {
            level.dispatch(Block { a, b, bias, out });
        }
    });
}
