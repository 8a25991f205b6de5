//! Softmax of a tile whose probabilities go into tiles of columns.

use super::super::exp::{exp2_nonpositive, exp2_nonpositive_for};
use super::super::lanes::{Lanes, Op};
use super::super::online::{RowState, block_max, finite_or_zero};
use super::super::tile::unroll;
use super::pack::{terms_of, with_terms};
use super::product::Beside;
use super::{Multiply, SIDE, STEP, TILE};

/// As [`Softmax`](super::super::online::Softmax), but probabilities become bf16 terms, and scores stay. `state.norm` is the sum of
/// those that are rounded to a single one.
pub(super) struct SoftmaxTerms<'a, 'b, M: Multiply> {
    /// `[keys][lanes]`; a hidden key has -inf.
    pub(super) s: &'a [f32],
    /// One tile of columns, or two.
    pub(super) lanes: usize,
    pub(super) c: f32,
    pub(super) state: RowState<'a>,
    pub(super) alpha: &'a mut [f32],
    pub(super) terms: usize,
    /// `[terms][steps of keys][lanes / 16]` tiles, whose pairs are keys `i` and `i + 16` of a step; 0 behind the last key.
    pub(super) p: &'a mut [f32],
    pub(super) term: usize,
    /// What goes on at the same time.
    pub(super) beside: &'a mut Beside<'b, M>,
}

/// Powers of two by which scores may exceed the maximum that they are taken relative to: errors of probabilities are relative, and
/// output need not be rescaled for every new maximum (lazy rescaling of FlashAttention-4).
const LAZY: f32 = 8.0;

impl<M: Multiply> Op for SoftmaxTerms<'_, '_, M> {
    /// Whether the maximum of a row has changed.
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        match self.lanes {
            SIDE => with_terms!(self.terms, TERMS => self.all::<L, SIDE, TERMS>(l)),
            STEP => with_terms!(self.terms, TERMS => self.all::<L, STEP, TERMS>(l)),
            lanes => unreachable!("{lanes} columns are not one tile, or two"),
        }
    }
}

/// Probability of a score relative to `shift`, the maximum of its row. Without lanes that are NaN, it is not negative.
#[inline(always)]
pub(super) fn probability<L: Lanes, const TERMS: usize>(l: L, score: L::V, shift: L::V, c: L::V) -> L::V {
    exp2_nonpositive_for::<L, TERMS>(l, l.mul(l.sub(score, shift), c))
}

impl<M: Multiply> SoftmaxTerms<'_, '_, M> {
    #[inline(always)]
    fn all<L: Lanes, const LANES: usize, const TERMS: usize>(mut self, l: L) -> bool {
        let (rows, _) = self.s.as_chunks::<LANES>();
        // Ticks come after so many vectors that each of them finds about as much to hide behind.
        let ticks = rows.len() / STEP * (SIDE / 2) + rows.len().div_ceil(2 * STEP);
        self.beside.spread(LANES / L::LANES * ticks);
        let mut moved = l.splat(0.0);
        for lane in (0..LANES).step_by(L::LANES) {
            moved = l.add(moved, self.maxima::<L, LANES>(l, rows, lane));
        }
        for lane in (0..LANES).step_by(L::LANES) {
            let sums = self.column::<L, LANES, TERMS>(l, rows, lane);
            let alpha = l.load(&self.alpha[lane..]);
            for (sum, state) in sums.into_iter().zip([&mut self.state.sum, &mut self.state.norm]) {
                l.store(l.fma(l.load(&state[lane..]), alpha, sum), &mut state[lane..]);
            }
        }
        l.sum(moved) != 0.0
    }

    /// Brings the maxima of one vector of rows up to date, and `alpha`. Not 0 where one has changed.
    #[inline(always)]
    fn maxima<L: Lanes, const LANES: usize>(&mut self, l: L, rows: &[[f32; LANES]], lane: usize) -> L::V {
        let (old, c) = (l.load(&self.state.max[lane..]), l.splat(self.c));
        let mut found = l.splat(f32::NEG_INFINITY);
        for rows in rows.chunks(2 * STEP) {
            found = l.max(block_max(l, rows.as_flattened(), LANES, lane), found);
            self.beside.tick();
        }
        // False for NaN: of infinities, or of scores without a scale.
        let near = l.lt(l.mul(l.sub(found, old), c), l.splat(LAZY));
        // Nearly always: a branch, so that what follows need not wait for the maximum.
        if l.all(near) {
            l.store(l.splat(1.0), &mut self.alpha[lane..]);
            return l.splat(0.0);
        }
        let max = l.select(near, old, l.max(found, old));
        let alpha = exp2_nonpositive(l, l.mul(l.sub(old, finite_or_zero(l, max)), c));
        l.store(max, &mut self.state.max[lane..]);
        l.store(alpha, &mut self.alpha[lane..]);
        l.sub(l.splat(1.0), alpha)
    }

    /// One vector of rows: returns the sum of their probabilities, and that of what these become in tiles, if it is another one: of a
    /// single term, whose roundings may all be in one direction where scores are nearly equal.
    #[inline(always)]
    fn column<L: Lanes, const LANES: usize, const TERMS: usize>(
        &mut self,
        l: L,
        rows: &[[f32; LANES]],
        lane: usize,
    ) -> [L::V; 2] {
        // Known once, for all loads and stores.
        assert!(lane <= LANES - L::LANES && lane % SIDE <= SIDE - L::LANES);
        let shift = finite_or_zero(l, l.load(&self.state.max[lane..]));
        let mut op = Column::<L, TERMS> { shift, c: l.splat(self.c), sums: [[l.splat(0.0); 4]; 2] };
        let (steps, rest) = rows.as_chunks::<STEP>();
        for (step, rows) in steps.iter().enumerate() {
            let mut p = tiles(self.p, self.term, step * LANES / SIDE + lane / SIDE);
            for i in 0..SIDE / 2 {
                unroll!(J < 2 => {
                    let row = 2 * i + J;
                    let (low, high) = (l.load(&rows[row][lane..]), l.load(&rows[SIDE + row][lane..]));
                    let pair = [op.probability(l, low), op.probability(l, high)];
                    op.take::<J>(l, pair, &mut p, row * SIDE + lane % SIDE);
                });
                self.beside.tick();
            }
        }
        if !rest.is_empty() {
            let mut p = tiles(self.p, self.term, steps.len() * LANES / SIDE + lane / SIDE);
            for row in 0..SIDE {
                let mut pair = [l.splat(0.0); 2];
                for (half, p) in pair.iter_mut().enumerate() {
                    if let Some(s) = rest.get(half * SIDE + row) {
                        *p = op.probability(l, l.load(&s[lane..]));
                    }
                }
                match row % 2 {
                    0 => op.take::<0>(l, pair, &mut p, row * SIDE + lane % SIDE),
                    _ => op.take::<1>(l, pair, &mut p, row * SIDE + lane % SIDE),
                }
            }
        }
        let [exact, rounded] = op.sums;
        [total(l, exact), if TERMS == 1 { total(l, rounded) } else { l.splat(0.0) }]
    }
}

/// A tile of all terms.
#[inline(always)]
fn tiles<const TERMS: usize>(p: &mut [f32], term: usize, tile: usize) -> [&mut [f32; TILE]; TERMS] {
    let mut terms = p[tile * TILE..].chunks_mut(term);
    [(); TERMS].map(|()| terms.next().and_then(|p| p.first_chunk_mut()).expect("room for the probabilities of a part"))
}

#[inline(always)]
fn total<L: Lanes>(l: L, [a, b, c, d]: [L::V; 4]) -> L::V {
    l.add(l.add(a, b), l.add(c, d))
}

struct Column<L: Lanes, const TERMS: usize> {
    shift: L::V,
    c: L::V,
    /// Of probabilities, and of what they become.
    sums: [[L::V; 4]; 2],
}

impl<L: Lanes, const TERMS: usize> Column<L, TERMS> {
    #[inline(always)]
    fn probability(&self, l: L, score: L::V) -> L::V {
        probability::<L, TERMS>(l, score, self.shift, self.c)
    }

    /// Adds two vectors to sums `2 * J` and `2 * J + 1`, and writes their terms.
    #[inline(always)]
    fn take<const J: usize>(&mut self, l: L, pair: [L::V; 2], dst: &mut [&mut [f32; TILE]; TERMS], at: usize) {
        let [exact, rounded] = &mut self.sums;
        exact[2 * J] = l.add(exact[2 * J], pair[0]);
        exact[2 * J + 1] = l.add(exact[2 * J + 1], pair[1]);
        if TERMS > 1 {
            for (x, dst) in terms_of::<L, TERMS>(l, false, pair).into_iter().zip(dst) {
                l.store(x, &mut dst[at..]);
            }
            return;
        }
        let pair = [l.round_bf16(pair[0]), l.round_bf16(pair[1])];
        rounded[2 * J] = l.add(rounded[2 * J], pair[0]);
        rounded[2 * J + 1] = l.add(rounded[2 * J + 1], pair[1]);
        l.store(l.pair_bf16(pair[0], pair[1]), &mut dst[0][at..]);
    }
}
