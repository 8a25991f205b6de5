//! Products with few columns: a matrix times a few vectors, bound by how fast the matrix is read.
//!
//! A packing GEMM copies the whole matrix to use each element a few times; here it is read where it lies, or, if it is
//! contiguous along neither axis, through a copy of a few lines at a time. Two forms, by the axis of the smaller stride:
//! along `k`, dot products of rows; along the outputs, sums of scaled columns (axpy). The order in which an element is summed
//! depends on `k` and the form alone, so a cut of the outputs changes no bit.

use super::GemmElement;
#[cfg(target_arch = "x86_64")]
use crate::Level;
use core::ops::Range;

/// Whether a product with `columns` columns and sums of `k` terms is computed here.
///
/// GFLOP/s here / in matrixmultiply 0.3.11 / in a plain loop, f32, one core of an AMD EPYC (Zen 4), 2026-11-30 (quote ratios):
///
/// | outputs x k, columns | dot form | axpy form |
/// |---|---|---|
/// | 1024 x 1024, 1 | 40 / 1.7 / 22 | 37 / 3.1 / 24 |
/// | 4096 x 4096, 1 | 11.6 / 1.6 / 8.1 | 12.8 / 2.5 / 8.9 |
/// | 1024 x 1024, 4 | 68 / 6.8 / 22 | 71 / 12 / 24 |
/// | 1024 x 1024, 8 | 54 / 14 / 22 | 68 / 24 / 24 |
/// | 4096 x 4096, 8 | 15 / 13 / 8 | 37 / 20 / 8 |
/// | 64 x 64, 8 | 26 / 21 / 7 | 33 / 36 / 24 |
/// | 4096 x 8, 8 | 6 / 15 / 6 | 18 / 23 / 22 |
///
/// A call costs about 100 ns, which a loop around 8 x 8 (26 ns) does not.
pub(super) fn suits(columns: usize, k: usize) -> bool {
    columns <= 4 || (columns <= 8 && k >= 64)
}

/// Outputs whose sums are kept at hand.
const BLOCK: usize = 1024;
/// `k` is summed in pieces of this length, which bounds the copies of strided lines.
const CHUNK: usize = 4096;
/// Columns added per pass of the axpy form: one load and store of the sums for as many products.
const COLUMNS: usize = 8;

/// `y[i][j] = sum over p of matrix[i, p] * vectors[p, j]`.
#[derive(Clone, Copy)]
pub(super) struct Skinny<'a, T> {
    pub(super) matrix: &'a [T],
    /// Strides of the matrix along the outputs and along `k`.
    pub(super) matrix_strides: [usize; 2],
    pub(super) vectors: &'a [T],
    /// Strides of the vectors along `k` and from one to the next.
    pub(super) vector_strides: [usize; 2],
    /// How many vectors.
    pub(super) count: usize,
    pub(super) k: usize,
}

/// Receives the number of a vector, the first of some outputs, and their sums.
pub(super) type Sink<'s, T> = &'s mut dyn FnMut(usize, usize, &[T]);

/// Computes the sums of `outputs`. `LANES` elements are 64 bytes.
///
/// AVX2 with FMA is asked for at run time. A 1024 x 1024 matrix times a vector, GFLOP/s with it / with the SSE2 that builds for
/// x86_64 assume / in a plain loop: 42 / 26 / 22 in the dot form, 37 / 29 / 23 in the axpy form; 64 x 64: 27 / 15 / 7 and
/// 26 / 20 / 21.
pub(super) fn run<T: GemmElement, const LANES: usize>(work: Skinny<'_, T>, outputs: Range<usize>, sink: Sink<'_, T>) {
    #[cfg(target_arch = "x86_64")]
    if Level::detect() >= Level::Avx2 {
        // SAFETY: the processor has AVX2 and FMA, as `Level::available` found.
        return unsafe { run_avx2::<T, LANES>(work, outputs, sink) };
    }
    // Where the build does not know of FMA, `mul_add` is a call into libm.
    const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));
    run_groups::<T, FUSED, LANES>(work, outputs, sink);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<T: GemmElement, const LANES: usize>(work: Skinny<'_, T>, outputs: Range<usize>, sink: Sink<'_, T>) {
    run_groups::<T, true, LANES>(work, outputs, sink);
}

/// Takes the vectors four at a time.
#[inline(always)]
fn run_groups<T: GemmElement, const FUSED: bool, const LANES: usize>(
    work: Skinny<'_, T>,
    outputs: Range<usize>,
    sink: Sink<'_, T>,
) {
    let mut first = 0;
    while first < work.count {
        // Rows at once x vectors at once: eight sums of two 32-byte registers, or what comes near and fits sixteen.
        let left = work.count - first;
        first += match left {
            1 => run_blocks::<T, FUSED, LANES, 4, 1>(work, first, outputs.clone(), sink),
            2 => run_blocks::<T, FUSED, LANES, 2, 2>(work, first, outputs.clone(), sink),
            3 => run_blocks::<T, FUSED, LANES, 2, 3>(work, first, outputs.clone(), sink),
            _ => run_blocks::<T, FUSED, LANES, 1, 4>(work, first, outputs.clone(), sink),
        };
    }
}

/// Computes `outputs` for `COUNT` vectors from the vector `vector` on; returns `COUNT`.
#[inline(always)]
fn run_blocks<T: GemmElement, const FUSED: bool, const LANES: usize, const ROWS: usize, const COUNT: usize>(
    work: Skinny<'_, T>,
    vector: usize,
    outputs: Range<usize>,
    sink: Sink<'_, T>,
) -> usize {
    let Skinny { matrix, matrix_strides: [down, across], vectors, vector_strides: [along, next], k, .. } = work;
    let (mut vector_copy, mut line_copy) = (Vec::new(), Vec::new());
    let block = outputs.len().clamp(1, BLOCK);
    let mut sums = vec![T::ZERO; COUNT * block];
    for first in outputs.clone().step_by(block) {
        let rows = block.min(outputs.end - first);
        sums.fill(T::ZERO);
        let mut each = sums.chunks_exact_mut(block);
        let mut sums: [&mut [T]; COUNT] = core::array::from_fn(|_| &mut each.next().unwrap_or_default()[..rows]);
        for p in (0..k).step_by(CHUNK) {
            let len = CHUNK.min(k - p);
            let xs = lines(vectors, [vector * next + p * along, next, along], len, &mut vector_copy);
            let corner = first * down + p * across;
            if across <= down {
                let whole = rows - rows % ROWS;
                for i in (0..whole).step_by(ROWS) {
                    let rows = lines(matrix, [corner + i * down, down, across], len, &mut line_copy);
                    add(&mut sums, i, &dot::<T, FUSED, LANES, ROWS, COUNT>(rows, xs));
                }
                for i in whole..rows {
                    let row = lines(matrix, [corner + i * down, down, across], len, &mut line_copy);
                    add(&mut sums, i, &dot::<T, FUSED, LANES, 1, COUNT>(row, xs));
                }
            } else {
                let whole = len - len % COLUMNS;
                for q in (0..whole).step_by(COLUMNS) {
                    let columns = lines(matrix, [corner + q * across, across, down], rows, &mut line_copy);
                    axpy::<T, FUSED, LANES, COLUMNS, COUNT>(&mut sums, columns, lanes(xs, q));
                }
                for q in whole..len {
                    let column = lines(matrix, [corner + q * across, across, down], rows, &mut line_copy);
                    axpy::<T, FUSED, LANES, 1, COUNT>(&mut sums, column, lanes(xs, q));
                }
            }
        }
        for (j, sum) in sums.iter().enumerate() {
            sink(vector + j, first, sum);
        }
    }
    COUNT
}

/// `N` lines of `len` elements: where they start, from line to line, and along a line. In place if they are contiguous.
#[inline(always)]
fn lines<'s, T: GemmElement, const N: usize>(
    data: &'s [T],
    [start, next, along]: [usize; 3],
    len: usize,
    copy: &'s mut Vec<T>,
) -> [&'s [T]; N] {
    let (lines, start, next) = if along == 1 || len == 1 {
        (data, start, next)
    } else {
        gather(data, [start, next, along], [N, len], copy);
        (&**copy, 0, len)
    };
    let mut each: [&[T]; N] = [&[]; N];
    for (i, line) in each.iter_mut().enumerate() {
        *line = &lines[start + i * next..][..len];
    }
    each
}

#[inline(never)]
fn gather<T: GemmElement>(data: &[T], [start, next, along]: [usize; 3], [count, len]: [usize; 2], copy: &mut Vec<T>) {
    copy.clear();
    for i in 0..count {
        copy.extend((0..len).map(|p| data[start + i * next + p * along]));
    }
}

#[inline(always)]
fn add<T: GemmElement, const ROWS: usize, const COUNT: usize>(
    sums: &mut [&mut [T]; COUNT],
    first: usize,
    dots: &[[T; COUNT]; ROWS],
) {
    for (row, dots) in dots.iter().enumerate() {
        for (sum, &dot) in sums.iter_mut().zip(dots) {
            sum[first + row] = sum[first + row] + dot;
        }
    }
}

/// Dot products of every row with every vector, each in `LANES` partial sums.
#[inline(always)]
fn dot<T: GemmElement, const FUSED: bool, const LANES: usize, const ROWS: usize, const COUNT: usize>(
    rows: [&[T]; ROWS],
    xs: [&[T]; COUNT],
) -> [[T; COUNT]; ROWS] {
    let mut sums = [[[T::ZERO; LANES]; COUNT]; ROWS];
    let len = xs[0].len();
    let (rows, xs) = (cut(rows, len), cut(xs, len));
    let whole = len - len % LANES;
    for p in (0..whole).step_by(LANES) {
        step::<T, FUSED, LANES, ROWS, COUNT>(&mut sums, lanes(rows, p), lanes(xs, p));
    }
    let mut dots = [[T::ZERO; COUNT]; ROWS];
    if whole > 0 {
        // LLVM must not know that these are the sums of the loop: seeing four totals side by side it makes vectors across them, and of
        // a loop of loads and FMAs one of shuffles, three times as slow.
        let sums = core::hint::black_box(sums);
        for (dot, &sums) in dots.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            *dot = total(sums);
        }
    }
    for p in whole..len {
        for (dots, row) in dots.iter_mut().zip(rows) {
            for (dot, x) in dots.iter_mut().zip(xs) {
                *dot = row[p].multiply_add::<FUSED>(x[p], *dot);
            }
        }
    }
    dots
}

#[inline(always)]
fn step<T: GemmElement, const FUSED: bool, const LANES: usize, const ROWS: usize, const COUNT: usize>(
    sums: &mut [[[T; LANES]; COUNT]; ROWS],
    rows: [[T; LANES]; ROWS],
    xs: [[T; LANES]; COUNT],
) {
    for r in 0..ROWS {
        for j in 0..COUNT {
            for l in 0..LANES {
                sums[r][j][l] = rows[r][l].multiply_add::<FUSED>(xs[j][l], sums[r][j][l]);
            }
        }
    }
}

/// The first `len` elements of each line.
#[inline(always)]
fn cut<T, const N: usize>(mut lines: [&[T]; N], len: usize) -> [&[T]; N] {
    for line in &mut lines {
        *line = &line[..len];
    }
    lines
}

/// The elements of each line from `at` on. (In a loop, not by `map`, whose closure is a call where a function asks for AVX2.)
#[inline(always)]
fn lanes<T: GemmElement, const LANES: usize, const N: usize>(lines: [&[T]; N], at: usize) -> [[T; LANES]; N] {
    let mut to = [[T::ZERO; LANES]; N];
    for i in 0..N {
        to[i].copy_from_slice(&lines[i][at..][..LANES]);
    }
    to
}

/// Sum of the lanes, halves added to halves.
#[inline(always)]
fn total<T: GemmElement, const LANES: usize>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = lanes[l] + lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Adds `x[c] * columns[c]`, in the order of `c`, to the sums of every vector.
#[inline(always)]
fn axpy<T: GemmElement, const FUSED: bool, const LANES: usize, const N: usize, const COUNT: usize>(
    sums: &mut [&mut [T]; COUNT],
    columns: [&[T]; N],
    xs: [[T; N]; COUNT],
) {
    let len = columns[0].len();
    let columns = cut(columns, len);
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        let mut tile = [[T::ZERO; LANES]; COUNT];
        for (tile, sum) in tile.iter_mut().zip(sums.iter()) {
            tile.copy_from_slice(&sum[i..][..LANES]);
        }
        for c in 0..N {
            let [column]: [[T; LANES]; 1] = lanes([columns[c]], i);
            for j in 0..COUNT {
                for l in 0..LANES {
                    tile[j][l] = column[l].multiply_add::<FUSED>(xs[j][c], tile[j][l]);
                }
            }
        }
        for j in 0..COUNT {
            sums[j][i..i + LANES].copy_from_slice(&tile[j]);
        }
    }
    for i in whole..len {
        for (sum, x) in sums.iter_mut().zip(&xs) {
            for c in 0..N {
                sum[i] = columns[c][i].multiply_add::<FUSED>(x[c], sum[i]);
            }
        }
    }
}
