//! Partial results over pieces of the keys, and how they become one: the same arithmetic in the same order whether one thread
//! takes all pieces or several share them.

use super::exp::exp2_nonpositive;
use super::fused::Pass;
use super::lanes::{Lanes, MAX_LANES, Op};
use super::online::finite_or_zero;
use super::scratch::{Tile, Work};

/// Rows of outputs not yet normalised, their maxima and their sums.
struct Partial<'a> {
    o: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
}

impl Partial<'_> {
    fn copy_from(&mut self, from: &Partial<'_>) {
        self.o.copy_from_slice(from.o);
        self.max.copy_from_slice(from.max);
        self.sum.copy_from_slice(from.sum);
    }
}

/// Adds `other` to `acc`: rows of `width` floats, a multiple of `LANES`.
struct Merge<'a> {
    acc: Partial<'a>,
    other: Partial<'a>,
    width: usize,
    c: f32,
}

impl Op for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { acc, other, width, c } = self;
        let c = l.splat(c);
        for first in (0..acc.max.len()).step_by(L::LANES) {
            let (a, b) = (l.load(&acc.max[first..]), l.load(&other.max[first..]));
            let max = l.max(a, b);
            let shift = finite_or_zero(l, max);
            let alpha = exp2_nonpositive(l, l.mul(l.sub(a, shift), c));
            let beta = exp2_nonpositive(l, l.mul(l.sub(b, shift), c));
            let sum = l.fma(l.load(&other.sum[first..]), beta, l.mul(l.load(&acc.sum[first..]), alpha));
            l.store(max, &mut acc.max[first..]);
            l.store(sum, &mut acc.sum[first..]);
            let mut factors = [[0.0; MAX_LANES]; 2];
            l.store(alpha, &mut factors[0]);
            l.store(beta, &mut factors[1]);
            let rows = acc.o.chunks_exact_mut(width.max(1)).zip(other.o.chunks_exact(width.max(1))).skip(first);
            for (i, (o, other)) in rows.take(L::LANES).enumerate() {
                let (alpha, beta) = (l.splat(factors[0][i]), l.splat(factors[1][i]));
                for (x, y) in o.chunks_exact_mut(L::LANES).zip(other.chunks_exact(L::LANES)) {
                    l.store(l.fma(l.load(y), beta, l.mul(l.load(x), alpha)), x);
                }
            }
        }
    }
}

impl<L: Lanes> Pass<'_, L> {
    /// The part of a buffer of partial results that is a tile's.
    fn partial<'p>(&self, tile: &Tile, buffer: &'p mut [f32]) -> Partial<'p> {
        let (size, width) = (self.job.blocking.tile(), self.job.blocking.head_dim_v_padded);
        let part = &mut buffer[tile.index * size * (width + 2)..];
        let (o, rest) = part.split_at_mut(size * width);
        let (max, rest) = rest.split_at_mut(size);
        let lanes = tile.vectors * L::LANES;
        Partial { o: &mut o[..tile.rows * width], max: &mut max[..lanes], sum: &mut rest[..lanes] }
    }

    /// What the tile itself has come to; nothing, if no block was taken into it.
    fn current<'p>(&self, tile: &Tile, work: &'p mut Work<'_>) -> Partial<'p> {
        let width = self.job.blocking.head_dim_v_padded;
        let o = &mut self.area_of(tile, work.o, width)[..tile.rows * width];
        if !tile.started {
            o.fill(0.0);
        }
        let state = self.state(tile, work.states);
        Partial { o, max: state.max, sum: state.sum }
    }

    /// Saves a tile, as the first of the results to merge.
    pub(super) fn save(&self, tile: &Tile, work: &mut Work<'_>, buffer: &mut [f32]) {
        self.partial(tile, buffer).copy_from(&self.current(tile, work));
    }

    /// Merges a tile into what was saved.
    pub(super) fn merge_tile(&self, tile: &Tile, work: &mut Work<'_>, acc: &mut [f32]) {
        self.merge(self.partial(tile, acc), self.current(tile, work));
    }

    /// Merges one saved result into another.
    pub(super) fn merge_saved(&self, tile: &Tile, acc: &mut [f32], other: &mut [f32]) {
        self.merge(self.partial(tile, acc), self.partial(tile, other));
    }

    fn merge(&self, acc: Partial<'_>, other: Partial<'_>) {
        self.l.vectorize(Merge { acc, other, width: self.job.blocking.head_dim_v_padded, c: self.scale.c });
    }

    /// Makes a saved result what the tile has come to.
    pub(super) fn restore(&self, tile: &mut Tile, work: &mut Work<'_>, buffer: &mut [f32]) {
        tile.started = true;
        self.current(tile, work).copy_from(&self.partial(tile, buffer));
    }
}
