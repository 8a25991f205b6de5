//! Softmax over keys that arrive block by block: the running state of each row, a lane of the tile.
//!
//! Milakov and Gimelshein 2018, algorithm 3, with the exponential in base 2. The maximum is exact after every block (no lazy
//! threshold: in `f32` it would cost bits of the dominant probabilities).

use super::exp::exp2_nonpositive;
use super::lanes::{Lanes, MAX_LANES, Op};

/// Running state of the rows of one tile.
pub(crate) struct RowState<'a> {
    /// Largest score yet, -inf before the first.
    pub(crate) max: &'a mut [f32],
    /// Sum of `2^((score - max) * c)`.
    pub(crate) sum: &'a mut [f32],
    /// Factor of the finished output.
    pub(crate) norm: &'a mut [f32],
}

impl RowState<'_> {
    pub(crate) fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.norm.fill(0.0);
    }
}

/// Takes a block of scores into the state and leaves their probabilities, relative to the new maximum, in their place.
pub(crate) struct Softmax<'a> {
    /// `[keys][lanes]`; a hidden key has -inf.
    pub(crate) s: &'a mut [f32],
    pub(crate) vectors: usize,
    /// Probabilities are `2^((score - max) * c)`.
    pub(crate) c: f32,
    pub(crate) state: RowState<'a>,
    /// Factors that bring the outputs of older blocks to the new maximum.
    pub(crate) alpha: &'a mut [f32],
}

impl Op for Softmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let stride = self.vectors * L::LANES;
        for j in (0..stride).step_by(L::LANES) {
            let old = l.load(&self.state.max[j..]);
            let max = l.max(block_max(l, self.s, stride, j), old);
            let shift = finite_or_zero(l, max);
            let c = l.splat(self.c);
            let alpha = exp2_nonpositive(l, l.mul(l.sub(old, shift), c));
            let sum = exp_block(l, self.s, stride, j, shift, c);
            l.store(max, &mut self.state.max[j..]);
            l.store(alpha, &mut self.alpha[j..]);
            let sum = l.fma(l.load(&self.state.sum[j..]), alpha, sum);
            l.store(sum, &mut self.state.sum[j..]);
        }
    }
}

/// What scores are taken relative to. Rows that have seen nothing yet: -inf - 0 is -inf, where -inf - -inf would be NaN.
#[inline(always)]
pub(super) fn finite_or_zero<L: Lanes>(l: L, max: L::V) -> L::V {
    l.select(l.lt(l.splat(f32::NEG_INFINITY), max), max, l.splat(0.0))
}

/// Keys in flight at once, each with its own partial maximum and sum.
const CHAINS: usize = 4;

/// A tile's keys begin at a multiple of this, so that a key is always in the same partial sum.
pub(crate) const KEY_ALIGN: usize = CHAINS;

/// Largest score of each lane of column `j`; NaN counts only where it is all there is.
#[inline(always)]
pub(super) fn block_max<L: Lanes>(l: L, s: &[f32], stride: usize, j: usize) -> L::V {
    /// Four cycles of latency, two a cycle.
    const CHAINS: usize = 8;
    let mut max = [l.splat(f32::NEG_INFINITY); CHAINS];
    let groups = s.chunks_exact(CHAINS * stride);
    for (i, row) in groups.remainder().chunks_exact(stride).enumerate() {
        max[i] = l.max(l.load(&row[j..]), max[i]);
    }
    for group in groups {
        for i in 0..CHAINS {
            max[i] = l.max(l.load(&group[i * stride + j..]), max[i]);
        }
    }
    let [a, b, c, d, e, f, g, h] = max;
    l.max(l.max(l.max(a, b), l.max(c, d)), l.max(l.max(e, f), l.max(g, h)))
}

/// Replaces scores by probabilities and returns their sum.
#[inline(always)]
fn exp_block<L: Lanes>(l: L, s: &mut [f32], stride: usize, j: usize, shift: L::V, c: L::V) -> L::V {
    let mut sum = [l.splat(0.0); CHAINS];
    let mut groups = s.chunks_exact_mut(CHAINS * stride);
    for group in &mut groups {
        for i in 0..CHAINS {
            let score = &mut group[i * stride + j..];
            let p = exp2_nonpositive(l, l.mul(l.sub(l.load(score), shift), c));
            sum[i] = l.add(sum[i], p);
            l.store(p, score);
        }
    }
    for (i, row) in groups.into_remainder().chunks_exact_mut(stride).enumerate() {
        let score = &mut row[j..];
        let p = exp2_nonpositive(l, l.mul(l.sub(l.load(score), shift), c));
        sum[i] = l.add(sum[i], p);
        l.store(p, score);
    }
    l.add(l.add(sum[0], sum[1]), l.add(sum[2], sum[3]))
}

/// Turns scores into the probabilities of a finished state, for a second pass that writes attention weights.
pub(crate) struct Probabilities<'a> {
    /// `[keys][lanes]` in whole vectors.
    pub(crate) s: &'a mut [f32],
    pub(crate) lanes: usize,
    pub(crate) c: f32,
    pub(crate) max: &'a [f32],
    /// Factor of each lane: the reciprocal of its sum.
    pub(crate) norm: &'a [f32],
}

impl Op for Probabilities<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let stride = self.lanes.max(L::LANES);
        for j in (0..stride).step_by(L::LANES) {
            // Numbers of the rows, repeated where they are less than a vector.
            let (mut max, mut norm) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
            for i in 0..L::LANES {
                (max[i], norm[i]) = (self.max[j + i % self.lanes], self.norm[j + i % self.lanes]);
            }
            let shift = finite_or_zero(l, l.load(&max));
            let (c, norm) = (l.splat(self.c), l.load(&norm));
            for row in self.s.chunks_exact_mut(stride) {
                let score = &mut row[j..];
                let p = exp2_nonpositive(l, l.mul(l.sub(l.load(score), shift), c));
                l.store(l.mul(p, norm), score);
            }
        }
    }
}

/// Multiplies each of the rows `[norm.len()][width]`, `width` a multiple of `LANES`, by its factor. Says whether all results are
/// finite.
pub(crate) struct Normalize<'a> {
    pub(crate) o: &'a mut [f32],
    pub(crate) width: usize,
    pub(crate) norm: &'a [f32],
}

impl Op for Normalize<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        let zero = l.splat(0.0);
        // x * 0 is 0 for a finite x, else NaN, which stays in the sum.
        let mut check = [zero; CHAINS];
        for (row, norm) in self.o.chunks_exact_mut(self.width.max(1)).zip(self.norm) {
            let norm = l.splat(*norm);
            let mut groups = row.chunks_exact_mut(CHAINS * L::LANES);
            for x in &mut groups {
                for i in 0..CHAINS {
                    let x = &mut x[i * L::LANES..];
                    // Adding 0 makes +0 of -0: which of them a sum that underflows has come to can depend on hidden values.
                    let y = l.fma(l.load(x), norm, zero);
                    check[i] = l.fma(y, zero, check[i]);
                    l.store(y, x);
                }
            }
            for x in groups.into_remainder().chunks_exact_mut(L::LANES) {
                let y = l.fma(l.load(x), norm, zero);
                check[0] = l.fma(y, zero, check[0]);
                l.store(y, x);
            }
        }
        l.sum(l.add(l.add(check[0], check[1]), l.add(check[2], check[3]))) == 0.0
    }
}
