//! Softmax of a tile whose probabilities go into tiles of columns.

use super::super::exp::{exp2_nonpositive, exp2_nonpositive_for};
use super::super::lanes::{Lanes, Op};
use super::super::online::{RowState, block_max, finite_or_zero};
use super::super::tile::unroll;
use super::pack::{store_terms, with_terms};
use super::product::Beside;
use super::{Multiply, SIDE, STEP, TILE};

/// As [`Softmax`](super::super::online::Softmax), but probabilities become bf16 terms. `state.norm` is the sum of those that are
/// rounded to a single one.
pub(super) struct SoftmaxTerms<'a, 'b, M: Multiply> {
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
    /// What goes on at the same time.
    pub(super) beside: &'a mut Beside<'b, M>,
}

/// Powers of two by which scores may exceed the maximum that they are taken relative to, where probabilities become bf16: their
/// errors are relative, and output need not be rescaled for every new maximum (lazy rescaling of FlashAttention-4).
const LAZY: f32 = 8.0;

impl<M: Multiply> Op for SoftmaxTerms<'_, '_, M> {
    /// Whether the maximum of a row has changed.
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) -> bool {
        // Ticks come after so many vectors that each of them finds about as much to hide behind.
        let maxima = 2 * STEP * self.lanes;
        let ticks = self.s.len() / (STEP * self.lanes) * (SIDE / 2) + self.s.len().div_ceil(maxima);
        self.beside.spread(self.lanes / L::LANES * ticks);
        let mut moved = l.splat(0.0);
        for lane in (0..self.lanes).step_by(L::LANES) {
            let old = l.load(&self.state.max[lane..]);
            let mut found = l.splat(f32::NEG_INFINITY);
            for s in self.s.chunks(maxima) {
                found = l.max(block_max(l, s, self.lanes, lane), found);
                self.beside.tick();
            }
            let c = l.splat(self.c);
            let mut max = l.max(found, old);
            if self.terms == 1 {
                // False for NaN: of infinities, or of scores without a scale.
                let near = l.lt(l.mul(l.sub(found, old), c), l.splat(LAZY));
                max = l.select(near, old, max);
            }
            let shift = finite_or_zero(l, max);
            let alpha = exp2_nonpositive(l, l.mul(l.sub(old, shift), c));
            let sums = with_terms!(self.terms, TERMS => self.column::<L, TERMS>(l, lane, shift, c));
            l.store(max, &mut self.state.max[lane..]);
            l.store(alpha, &mut self.alpha[lane..]);
            moved = l.add(moved, l.sub(l.splat(1.0), alpha));
            for (sum, state) in sums.into_iter().zip([&mut self.state.sum, &mut self.state.norm]) {
                l.store(l.fma(l.load(&state[lane..]), alpha, sum), &mut state[lane..]);
            }
        }
        l.sum(moved) != 0.0
    }
}

impl<M: Multiply> SoftmaxTerms<'_, '_, M> {
    /// One vector of rows: returns the sum of their probabilities, and that of what these become in tiles, if it is another one: of a
    /// single term, whose roundings may all be in one direction where scores are nearly equal.
    #[inline(always)]
    fn column<L: Lanes, const TERMS: usize>(&mut self, l: L, lane: usize, shift: L::V, c: L::V) -> [L::V; 2] {
        let (lanes, whole) = (self.lanes, self.s.len() / (STEP * self.lanes));
        let tile = |step: usize| (step * lanes / SIDE + lane / SIDE) * TILE + lane % SIDE;
        let mut op = Column::<L, TERMS> { shift, c, sums: [[l.splat(0.0); 4]; 2], keep: self.keep, term: self.term };
        let mut steps = self.s.chunks_exact_mut(STEP * lanes);
        for (step, s) in steps.by_ref().enumerate() {
            let p = &mut self.p[tile(step)..];
            let (low, high) = s.split_at_mut(SIDE * lanes);
            let rows = low.chunks_exact_mut(2 * lanes).zip(high.chunks_exact_mut(2 * lanes));
            for (i, (low, high)) in rows.enumerate() {
                unroll!(J < 2 => {
                    let (low, high) = (&mut low[J * lanes + lane..], &mut high[J * lanes + lane..]);
                    let low = op.probability(l, low);
                    op.take::<J>(l, [low, op.probability(l, high)], &mut p[(2 * i + J) * SIDE..]);
                });
                self.beside.tick();
            }
        }
        // Of the last step, the keys that there are.
        let s = steps.into_remainder();
        let rows = if s.is_empty() { 0 } else { SIDE };
        for i in 0..rows {
            let mut pair = [l.splat(0.0); 2];
            for (half, p) in pair.iter_mut().enumerate() {
                let Some(s) = s.get_mut((i + half * SIDE) * lanes..).filter(|s| !s.is_empty()) else { continue };
                *p = op.probability(l, &mut s[lane..]);
            }
            let p = &mut self.p[tile(whole) + i * SIDE..];
            match i % 2 {
                0 => op.take::<0>(l, pair, p),
                _ => op.take::<1>(l, pair, p),
            }
        }
        let [exact, rounded] = op.sums;
        let total = |sum: [L::V; 4]| l.add(l.add(sum[0], sum[1]), l.add(sum[2], sum[3]));
        [total(exact), if TERMS == 1 { total(rounded) } else { l.splat(0.0) }]
    }
}

struct Column<L: Lanes, const TERMS: usize> {
    shift: L::V,
    c: L::V,
    /// Of probabilities, and of what they become.
    sums: [[L::V; 4]; 2],
    keep: bool,
    term: usize,
}

impl<L: Lanes, const TERMS: usize> Column<L, TERMS> {
    /// Of one vector of scores, in whose place it is left if `keep` is set.
    #[inline(always)]
    fn probability(&self, l: L, s: &mut [f32]) -> L::V {
        let t = l.mul(l.sub(l.load(s), self.shift), self.c);
        let p = exp2_nonpositive_for::<L, TERMS>(l, t);
        if self.keep {
            l.store(p, s);
        }
        p
    }

    /// Adds two vectors to sums `2 * J` and `2 * J + 1`, and writes their terms.
    #[inline(always)]
    fn take<const J: usize>(&mut self, l: L, pair: [L::V; 2], dst: &mut [f32]) {
        let [exact, rounded] = &mut self.sums;
        exact[2 * J] = l.add(exact[2 * J], pair[0]);
        exact[2 * J + 1] = l.add(exact[2 * J + 1], pair[1]);
        if TERMS > 1 {
            return store_terms::<L, TERMS>(l, false, pair, dst, self.term);
        }
        let pair = [l.round_bf16(pair[0]), l.round_bf16(pair[1])];
        rounded[2 * J] = l.add(rounded[2 * J], pair[0]);
        rounded[2 * J + 1] = l.add(rounded[2 * J + 1], pair[1]);
        l.store(l.pair_bf16(pair[0], pair[1]), dst);
    }
}
