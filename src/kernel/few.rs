//! Few rows against many keys, the shape of decoding: every element of K and V is read once, as it lies in memory and in its own
//! type, and meets all rows while it is in a register.
//!
//! With fewer rows than lanes, queries in lanes would leave most lanes idle. So here head_dim is in lanes for the scores, keys are
//! in lanes for softmax, and head_dim_v for the output. What a row comes to does not depend on how many share its tile.

use core::ops::Range;

use super::exp::exp2_nonpositive;
use super::lanes::{Lanes, MAX_LANES, Op};
use super::online::{RowState, finite_or_zero};
use super::operand::Operand;
use super::tile::{Rows, unroll};

/// Rows of a tile at the most: with eight, queries in lanes fill a vector of AVX2.
pub(crate) const MAX_ROWS: usize = 7;

/// A tile's keys begin at a multiple of this, so that a key is always in the same partial sum of softmax.
pub(crate) const KEY_ALIGN: usize = CHAINS * MAX_LANES;

/// Bytes between a row that is read and the row that is asked for: enough to cover the latency of memory, few enough to stay in L1.
const PREFETCH_BYTES: usize = 4096;

/// Rows ahead that [`PREFETCH_BYTES`] are.
fn rows_ahead<T>(stride: usize) -> usize {
    (PREFETCH_BYTES / size_of::<T>() / stride.max(1)).clamp(1, 64)
}

/// Asks for a row, if there is one.
#[inline(always)]
fn prefetch<L: Lanes, T: Copy>(l: L, rows: &Rows<'_, T>, i: usize) {
    if i < rows.count {
        l.prefetch(rows.row(i));
    }
}

/// Queries as `Dots` reads them: `[chunk of head_dim][row][lane]`, zeros behind head_dim.
pub(crate) fn pack_query(row: &[f32], index: usize, rows: usize, lanes: usize, packed: &mut [f32]) {
    for (chunk, values) in row.chunks(lanes).enumerate() {
        let to = &mut packed[(chunk * rows + index) * lanes..][..lanes];
        to[..values.len()].copy_from_slice(values);
        to[values.len()..].fill(0.0);
    }
}

/// `s[row * stride + key] = dot(keys[key], queries[row])`.
pub(crate) struct Dots<'a, T> {
    pub(crate) keys: Rows<'a, T>,
    /// As [`pack_query`] leaves them.
    pub(crate) queries: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) s: &'a mut [f32],
    pub(crate) stride: usize,
}

impl<T: Operand> Op for Dots<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        // As many sums at once as fill a vector, and enough to hide the latency of an FMA.
        let wide = L::LANES == 16;
        let step = if wide { 16 } else { 8 };
        let ahead = rows_ahead::<T>(self.keys.stride);
        // Keys outside: those of one step stay in L1 while the rows meet them. Their number falls as that of rows rises.
        for first in (0..self.keys.count).step_by(step) {
            (first..first + step).for_each(|key| prefetch(l, &self.keys, key + ahead));
            let mut row = 0;
            while row < self.rows {
                match self.rows - row {
                    1 => {
                        if wide {
                            self.dots::<L, 16, 1>(l, first, row)
                        } else {
                            self.dots::<L, 8, 1>(l, first, row)
                        }
                        row += 1;
                    }
                    2 | 3 => {
                        let keys = if wide { 8 } else { 4 };
                        for first in (first..self.keys.count.min(first + step)).step_by(keys) {
                            if wide { self.dots::<L, 8, 2>(l, first, row) } else { self.dots::<L, 4, 2>(l, first, row) }
                        }
                        row += 2;
                    }
                    _ => {
                        let keys = if wide { 4 } else { 2 };
                        for first in (first..self.keys.count.min(first + step)).step_by(keys) {
                            if wide { self.dots::<L, 4, 4>(l, first, row) } else { self.dots::<L, 2, 4>(l, first, row) }
                        }
                        row += 4;
                    }
                }
            }
        }
    }
}

impl<T: Operand> Dots<'_, T> {
    /// Products of `NK` keys and `NR` rows: 8 or 16 sums.
    #[inline(always)]
    fn dots<L: Lanes, const NK: usize, const NR: usize>(&mut self, l: L, first: usize, row: usize) {
        let width = self.keys.width;
        let mut keys: [&[T]; NK] = [&[]; NK];
        for (i, key) in keys.iter_mut().enumerate() {
            // The last key stands in for those that are missing.
            *key = self.keys.row((first + i).min(self.keys.count - 1));
        }
        let mut acc = [[l.splat(0.0); NK]; NR];
        let whole = width / L::LANES * L::LANES;
        let mut queries = self.queries.chunks_exact(self.rows * L::LANES);
        for at in (0..whole).step_by(L::LANES) {
            let Some(query) = queries.next() else { break };
            let query = &query[row * L::LANES..][..NR * L::LANES];
            let mut q = [l.splat(0.0); NR];
            unroll!(R < NR => q[R] = l.load(&query[R * L::LANES..]));
            unroll!(K < NK => {
                let k = T::load(l, &keys[K][at..]);
                unroll!(R < NR => acc[R][K] = l.fma(k, q[R], acc[R][K]));
            });
        }
        if let Some(query) = queries.next().filter(|_| whole < width) {
            unroll!(K < NK => {
                let k = T::load_partial(l, &keys[K][whole..]);
                unroll!(R < NR => acc[R][K] = l.fma(k, l.load(&query[(row + R) * L::LANES..]), acc[R][K]));
            });
        }
        let mut partial = [0.0; MAX_LANES * MAX_LANES];
        unroll!(R < NR => unroll!(K < NK => l.store(acc[R][K], &mut partial[(R * NK + K) * L::LANES..])));
        let mut sums = [0.0; MAX_LANES];
        for at in (0..NR * NK).step_by(L::LANES) {
            l.store(l.row_sums(&partial[at * L::LANES..]), &mut sums[at..]);
        }
        let count = NK.min(self.keys.count - first);
        for (r, sums) in sums.chunks_exact(NK).take(NR).enumerate() {
            let s = &mut self.s[(row + r) * self.stride + first..][..count];
            // Most are whole, and then of a length known here.
            if count == NK { s.copy_from_slice(sums) } else { s.copy_from_slice(&sums[..count]) }
        }
    }
}

/// Partial sums and maxima in flight.
const CHAINS: usize = 2;

/// As [`super::online::Softmax`], with keys in lanes: `rows` rows of `count` scores, `stride` apart, and -inf behind them up to a
/// multiple of `LANES`.
pub(crate) struct RowSoftmax<'a> {
    pub(crate) s: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) count: usize,
    pub(crate) c: f32,
    pub(crate) state: RowState<'a>,
    pub(crate) alpha: &'a mut [f32],
}

impl Op for RowSoftmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let padded = self.count.next_multiple_of(L::LANES);
        let (mut tops, mut sums) = ([f32::NEG_INFINITY; MAX_LANES], [0.0; MAX_LANES]);
        for (row, top) in self.s.chunks(self.stride).take(self.rows).zip(&mut tops) {
            *top = row_max(l, &row[..padded]);
        }
        let lanes = self.rows.next_multiple_of(L::LANES);
        for j in (0..lanes).step_by(L::LANES) {
            let old = l.load(&self.state.max[j..]);
            let max = l.max(l.load(&tops[j..]), old);
            let alpha = exp2_nonpositive(l, l.mul(l.sub(old, finite_or_zero(l, max)), l.splat(self.c)));
            l.store(max, &mut self.state.max[j..]);
            l.store(alpha, &mut self.alpha[j..]);
        }
        for ((row, sum), &max) in self.s.chunks_mut(self.stride).zip(&mut sums).zip(&self.state.max[..self.rows]) {
            let shift = finite_or_zero(l, l.splat(max));
            *sum = exp_row(l, &mut row[..padded], shift, l.splat(self.c));
        }
        for j in (0..lanes).step_by(L::LANES) {
            let sum = l.fma(l.load(&self.state.sum[j..]), l.load(&self.alpha[j..]), l.load(&sums[j..]));
            l.store(sum, &mut self.state.sum[j..]);
        }
    }
}

/// The largest of a row; NaN counts only where it is all there is.
#[inline(always)]
fn row_max<L: Lanes>(l: L, row: &[f32]) -> f32 {
    let mut max = [l.splat(f32::NEG_INFINITY); CHAINS];
    for (i, x) in row.chunks_exact(L::LANES).enumerate() {
        max[i % CHAINS] = l.max(l.load(x), max[i % CHAINS]);
    }
    let mut lanes = [0.0; MAX_LANES];
    l.store(l.max(max[0], max[1]), &mut lanes);
    lanes[..L::LANES].iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces scores by probabilities and returns their sum.
#[inline(always)]
fn exp_row<L: Lanes>(l: L, row: &mut [f32], shift: L::V, c: L::V) -> f32 {
    let mut sum = [l.splat(0.0); CHAINS];
    for (i, x) in row.chunks_exact_mut(L::LANES).enumerate() {
        let p = exp2_nonpositive(l, l.mul(l.sub(l.load(x), shift), c));
        sum[i % CHAINS] = l.add(sum[i % CHAINS], p);
        l.store(p, x);
    }
    l.sum(l.add(sum[0], sum[1]))
}

/// As [`super::online::Probabilities`], with keys in lanes.
pub(crate) struct RowProbabilities<'a> {
    pub(crate) s: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) count: usize,
    pub(crate) c: f32,
    /// Of each row.
    pub(crate) max: &'a [f32],
    pub(crate) norm: &'a [f32],
}

impl Op for RowProbabilities<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let padded = self.count.next_multiple_of(L::LANES);
        for ((row, &max), &norm) in self.s.chunks_mut(self.stride).zip(self.max).zip(self.norm) {
            let (shift, norm) = (finite_or_zero(l, l.splat(max)), l.splat(norm));
            for x in row[..padded].chunks_exact_mut(L::LANES) {
                let p = exp2_nonpositive(l, l.mul(l.sub(l.load(x), shift), l.splat(self.c)));
                l.store(l.mul(p, norm), x);
            }
        }
    }
}

/// `o[row] = alpha[row] * o[row] + sum over keys of p[row * stride + key] * values[key]`.
pub(crate) struct RowValues<'a, T> {
    pub(crate) values: Rows<'a, T>,
    pub(crate) p: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    /// Factors of the rows, or `None` to start from zero whatever `o` holds.
    pub(crate) alpha: Option<&'a [f32]>,
    /// `[rows][width, up to a multiple of LANES]`.
    pub(crate) o: &'a mut [f32],
}

/// Values that stay in L1 while all their columns meet all rows.
const VALUE_BYTES: usize = 8192;

impl<T: Operand> Op for RowValues<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        let ahead = rows_ahead::<T>(self.values.stride);
        let step = (VALUE_BYTES / size_of::<T>() / self.values.width.max(1)).clamp(4, 64);
        for first in (0..self.values.count).step_by(step) {
            let keys = first..self.values.count.min(first + step);
            keys.clone().for_each(|key| prefetch(l, &self.values, key + ahead));
            let mut row = 0;
            while row < self.rows {
                // 8 accumulators each.
                row += match self.rows - row {
                    1 => self.panels::<L, 1>(l, &keys, row),
                    2 | 3 => self.panels::<L, 2>(l, &keys, row),
                    _ => self.panels::<L, 4>(l, &keys, row),
                };
            }
        }
    }
}

impl<T: Operand> RowValues<'_, T> {
    /// All columns of `NR` rows.
    #[inline(always)]
    fn panels<L: Lanes, const NR: usize>(&mut self, l: L, keys: &Range<usize>, row: usize) -> usize {
        let vectors = self.values.width / L::LANES;
        let mut vector = 0;
        while vector < vectors {
            let at = vector * L::LANES;
            vector += match (vectors - vector, NR) {
                (8.., 1) => self.panel::<L, NR, 8, false>(l, keys, row, at),
                (4.., 1 | 2) => self.panel::<L, NR, 4, false>(l, keys, row, at),
                (2.., _) => self.panel::<L, NR, 2, false>(l, keys, row, at),
                _ => self.panel::<L, NR, 1, false>(l, keys, row, at),
            };
        }
        if !self.values.width.is_multiple_of(L::LANES) {
            self.panel::<L, NR, 1, true>(l, keys, row, vectors * L::LANES);
        }
        NR
    }

    /// `NV` vectors of columns from `at` on, or what is left of the last one.
    #[inline(always)]
    fn panel<L: Lanes, const NR: usize, const NV: usize, const LAST: bool>(
        &mut self,
        l: L,
        keys: &Range<usize>,
        row: usize,
        at: usize,
    ) -> usize {
        let width = self.values.width.next_multiple_of(L::LANES);
        let mut acc = [[l.splat(0.0); NV]; NR];
        let fresh = keys.start == 0 && self.alpha.is_none();
        if !fresh {
            let alpha = self.alpha.filter(|_| keys.start == 0);
            unroll!(R < NR => {
                let factor = l.splat(alpha.map_or(1.0, |alpha| alpha[row + R]));
                unroll!(V < NV => acc[R][V] = l.mul(l.load(&self.o[(row + R) * width + at + V * L::LANES..]), factor));
            });
        }
        let mut p: [&[f32]; NR] = [&[]; NR];
        unroll!(R < NR => p[R] = &self.p[(row + R) * self.stride..][keys.clone()]);
        for (i, key) in keys.clone().enumerate() {
            let values = &self.values.row(key)[at..];
            let mut v = [l.splat(0.0); NV];
            match LAST {
                true => v[0] = T::load_partial(l, values),
                false => unroll!(V < NV => v[V] = T::load(l, &values[V * L::LANES..])),
            }
            unroll!(R < NR => {
                let p = l.splat(p[R][i]);
                unroll!(V < NV => acc[R][V] = l.fma(p, v[V], acc[R][V]));
            });
        }
        unroll!(R < NR => unroll!(V < NV => l.store(acc[R][V], &mut self.o[(row + R) * width + at + V * L::LANES..])));
        NV
    }
}
