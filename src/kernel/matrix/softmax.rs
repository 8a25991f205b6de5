//! Softmax of a tile whose probabilities go into tiles of columns.

use super::super::exp::{exp2_nonpositive, exp2_nonpositive_coarse};
use super::super::lanes::{Lanes, Op};
use super::super::online::{RowState, block_max, finite_or_zero};
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
        let (lanes, keep) = (self.lanes, self.keep);
        let mut sum = [l.splat(0.0); 4];
        for (step, s) in self.s.chunks_mut(STEP * lanes).enumerate() {
            let tile = (step * lanes / SIDE + lane / SIDE) * TILE + lane % SIDE;
            for i in 0..SIDE {
                let mut pair = [l.splat(0.0); 2];
                for (half, p) in pair.iter_mut().enumerate() {
                    // Behind the last key there is nothing: 0.
                    let Some(s) = s.get_mut((i + half * SIDE) * lanes..).filter(|s| !s.is_empty()) else { continue };
                    let t = l.mul(l.sub(l.load(&s[lane..]), shift), c);
                    // A bf16 has 8 bits.
                    *p = if TERMS == 1 { exp2_nonpositive_coarse(l, t) } else { exp2_nonpositive(l, t) };
                    sum[i % 2 * 2 + half] = l.add(sum[i % 2 * 2 + half], *p);
                    if keep {
                        l.store(*p, &mut s[lane..]);
                    }
                }
                store_terms::<L, TERMS>(l, pair, &mut self.p[tile + i * SIDE..], self.term);
            }
        }
        l.add(l.add(sum[0], sum[1]), l.add(sum[2], sum[3]))
    }
}
