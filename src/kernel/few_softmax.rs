//! Softmax of a few rows, whose scores lie key by key: a vector has as many keys as it has room for, `[keys][rows]`.
//!
//! With rows in lanes alone, one query would cost an exponential of a whole vector for each key: of some 215 instructions a key at
//! (1, 8, 1, 128, 64) on AVX2, 40, where this has 4. Whatever the number of rows, a
//! key adds to the partial sum of its number modulo `LANES`, and partial sums are added as a tree: what a row comes to does not
//! depend on how many rows lie beside it.

use super::exp::exp2_nonpositive;
use super::lanes::{Lanes, MAX_LANES, Op};
use super::online::{RowState, finite_or_zero};

/// As [`Softmax`](super::online::Softmax).
pub(super) struct FewSoftmax<'a> {
    /// `[keys][rows]`, a multiple of `LANES` keys; a hidden key has -inf.
    pub(super) s: &'a mut [f32],
    /// A power of two, at most two vectors.
    pub(super) rows: usize,
    pub(super) c: f32,
    pub(super) state: RowState<'a>,
    pub(super) alpha: &'a mut [f32],
}

impl Op for FewSoftmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match self.rows {
            1 => softmax::<L, 1>(l, self),
            2 => softmax::<L, 2>(l, self),
            4 => softmax::<L, 4>(l, self),
            8 => softmax::<L, 8>(l, self),
            16 => softmax::<L, 16>(l, self),
            _ => softmax::<L, 32>(l, self),
        }
    }
}

#[inline(always)]
fn softmax<L: Lanes, const NR: usize>(l: L, op: FewSoftmax<'_>) {
    let FewSoftmax { s, c, state, alpha, .. } = op;
    let c = l.splat(c);
    let mut max = [l.splat(f32::NEG_INFINITY); NR];
    // `LANES` keys of `NR` rows are `NR` vectors: each has its partial maximum and sum.
    for keys in s.chunks_exact(NR * L::LANES) {
        for i in 0..NR {
            max[i] = l.max(l.load(&keys[i * L::LANES..]), max[i]);
        }
    }
    let max = fold(l, max, |a, b| if b > a { b } else { a });
    // Numbers of the rows, repeated so that they fill a vector.
    let mut shift = [0.0; 2 * MAX_LANES];
    for row in (0..NR).step_by(L::LANES) {
        let old = l.load(&state.max[row..]);
        let new = l.max(l.load(&max.as_flattened()[row..]), old);
        let finite = finite_or_zero(l, new);
        l.store(new, &mut state.max[row..]);
        l.store(exp2_nonpositive(l, l.mul(l.sub(old, finite), c)), &mut alpha[row..]);
        l.store(finite, &mut shift[row..]);
    }
    for i in NR..L::LANES {
        shift[i] = shift[i - NR];
    }
    let shift = [l.load(&shift), l.load(&shift[L::LANES..])];
    let mut sum = [l.splat(0.0); NR];
    for keys in s.chunks_exact_mut(NR * L::LANES) {
        for i in 0..NR {
            let score = &mut keys[i * L::LANES..];
            let shift = shift[if NR > L::LANES { i % 2 } else { 0 }];
            let p = exp2_nonpositive(l, l.mul(l.sub(l.load(score), shift), c));
            sum[i] = l.add(sum[i], p);
            l.store(p, score);
        }
    }
    let sum = fold(l, sum, |a, b| a + b);
    for row in (0..NR).step_by(L::LANES) {
        let (old, sum) = (l.load(&state.sum[row..]), l.load(&sum.as_flattened()[row..]));
        l.store(l.fma(old, l.load(&alpha[row..]), sum), &mut state.sum[row..]);
    }
}

/// Of partial results `[LANES][NR]` in vectors, the `NR` results, at the front.
#[inline(always)]
fn fold<L: Lanes, const NR: usize>(l: L, parts: [L::V; NR], f: impl Fn(f32, f32) -> f32) -> [[f32; MAX_LANES]; NR] {
    let mut results = [[0.0; MAX_LANES]; NR];
    let flat = results.as_flattened_mut();
    for i in 0..NR {
        l.store(parts[i], &mut flat[i * L::LANES..]);
    }
    let mut n = L::LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n * NR {
            flat[i] = f(flat[i], flat[i + n * NR]);
        }
    }
    results
}
