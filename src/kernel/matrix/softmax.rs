//! Softmax of a tile whose probabilities go into tiles of columns.

use super::super::exp::{exp2_nonpositive, exp2_nonpositive_coarse};
use super::super::lanes::{Lanes, Op};
use super::super::online::{RowState, block_max, finite_or_zero};
use super::super::tile::unroll;
use super::pack::{store_terms, with_terms};
use super::{SIDE, STEP, TILE};

/// As [`Softmax`](super::super::online::Softmax), but probabilities become bf16 terms.
pub(super) struct SoftmaxTerms<'a> {
    /// `[keys][lanes]`; a hidden key has -inf.
    pub(super) s: &'a mut [f32],
    pub(super) lanes: usize,
    pub(super) c: f32,
    pub(super) state: RowState<'a>,
    pub(super) alpha: &'a mut [f32],
    pub(super) terms: usize,
    /// `[terms][steps of keys][lanes / 16]` tiles, whose pairs are keys `i` and `i + 16` of a step; 0 behind the last key.
    pub(super) p: &'a mut [f32],
    pub(super) term: usize,
    /// Whether to leave probabilities in place of the scores, too.
    pub(super) keep: bool,
}

impl Op for SoftmaxTerms<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        for lane in (0..self.lanes).step_by(L::LANES) {
            let old = l.load(&self.state.max[lane..]);
            let max = l.max(block_max(l, self.s, self.lanes, lane), old);
            let (shift, c) = (finite_or_zero(l, max), l.splat(self.c));
            let alpha = exp2_nonpositive(l, l.mul(l.sub(old, shift), c));
            let sum = with_terms!(self.terms, TERMS => self.column::<L, TERMS>(l, lane, shift, c));
            l.store(max, &mut self.state.max[lane..]);
            l.store(alpha, &mut self.alpha[lane..]);
            let sum = l.fma(l.load(&self.state.sum[lane..]), alpha, sum);
            l.store(sum, &mut self.state.sum[lane..]);
        }
    }
}

impl SoftmaxTerms<'_> {
    /// One vector of rows: returns the sum of their probabilities.
    #[inline(always)]
    fn column<L: Lanes, const TERMS: usize>(&mut self, l: L, lane: usize, shift: L::V, c: L::V) -> L::V {
        let (lanes, keep, term) = (self.lanes, self.keep, self.term);
        let tile = |step: usize| (step * lanes / SIDE + lane / SIDE) * TILE + lane % SIDE;
        let mut sum = [l.splat(0.0); 4];
        let whole = self.s.len() / (STEP * lanes);
        let mut steps = self.s.chunks_exact_mut(STEP * lanes);
        for (step, s) in steps.by_ref().enumerate() {
            let p = &mut self.p[tile(step)..];
            let (low, high) = s.split_at_mut(SIDE * lanes);
            let rows = low.chunks_exact_mut(2 * lanes).zip(high.chunks_exact_mut(2 * lanes));
            for (i, (low, high)) in rows.enumerate() {
                unroll!(J < 2 => {
                    let (low, high) = (&mut low[J * lanes + lane..], &mut high[J * lanes + lane..]);
                    let low = probability::<L, TERMS>(l, low, shift, c, keep);
                    let pair = [low, probability::<L, TERMS>(l, high, shift, c, keep)];
                    sum[2 * J] = l.add(sum[2 * J], pair[0]);
                    sum[2 * J + 1] = l.add(sum[2 * J + 1], pair[1]);
                    store_terms::<L, TERMS>(l, pair, &mut p[(2 * i + J) * SIDE..], term);
                });
            }
        }
        // Of the last step, the keys that there are.
        let s = steps.into_remainder();
        let rows = if s.is_empty() { 0 } else { SIDE };
        for i in 0..rows {
            let mut pair = [l.splat(0.0); 2];
            for (half, p) in pair.iter_mut().enumerate() {
                let Some(s) = s.get_mut((i + half * SIDE) * lanes..).filter(|s| !s.is_empty()) else { continue };
                *p = probability::<L, TERMS>(l, &mut s[lane..], shift, c, keep);
                sum[i % 2 * 2 + half] = l.add(sum[i % 2 * 2 + half], *p);
            }
            store_terms::<L, TERMS>(l, pair, &mut self.p[tile(whole) + i * SIDE..], term);
        }
        l.add(l.add(sum[0], sum[1]), l.add(sum[2], sum[3]))
    }
}

/// Of one vector of scores, in whose place it is left if `keep` is set.
#[inline(always)]
fn probability<L: Lanes, const TERMS: usize>(l: L, s: &mut [f32], shift: L::V, c: L::V, keep: bool) -> L::V {
    let t = l.mul(l.sub(l.load(s), shift), c);
    // A bf16 has 8 bits.
    let p = if TERMS == 1 { exp2_nonpositive_coarse(l, t) } else { exp2_nonpositive(l, t) };
    if keep {
        l.store(p, s);
    }
    p
}
