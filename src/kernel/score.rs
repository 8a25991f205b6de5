//! What happens to scores between the product and softmax, in the order of the contract: scale, softcap, ALiBi, bias,
//! visibility. Each is a pass over a tile of scores in L1, run only where it is asked for.

use super::exp::tanh;
use super::lanes::{Lanes, MAX_LANES, Op};

/// Scores of one tile, `[keys][lanes]` in whole vectors, and what is to be done to them. Where `lanes` is less than a vector, it
/// divides it, and numbers of rows are repeated up to a vector.
pub(crate) struct ScorePass<'a> {
    pub(crate) s: &'a mut [f32],
    pub(crate) lanes: usize,
    pub(crate) rule: Rule<'a>,
}

/// One step.
pub(crate) enum Rule<'a> {
    /// `s * scale`.
    Scale(f32),
    /// `cap * tanh(s / cap)`.
    Softcap(f32),
    /// `s - slope * |position - key|`; positions count from the first key of the tile.
    Alibi { slopes: &'a [f32], positions: &'a [f32] },
    /// `scale * s + bias`, hidden where the bias is -inf. `[keys][lanes]`.
    Bias { bias: &'a [f32], scale: f32 },
    /// Hidden outside of `from <= key < to` and `key < keep.min(to)`, counted from the first key of the tile.
    Range { from: &'a [f32], to: &'a [f32], keep: f32 },
}

impl Op for ScorePass<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { s, lanes, rule } = self;
        match rule {
            Rule::Scale(scale) => each(l, s, lanes, |x, _, _| l.mul(x, l.splat(scale))),
            Rule::Softcap(cap) => each(l, s, lanes, |x, _, _| softcap(l, x, cap)),
            Rule::Alibi { slopes, positions } => {
                each(l, s, lanes, |x, key, j| alibi(l, x, l.load(&slopes[j..]), l.sub(l.load(&positions[j..]), key)))
            }
            Rule::Bias { bias, scale } => {
                for (x, bias) in s.chunks_exact_mut(L::LANES).zip(bias.chunks_exact(L::LANES)) {
                    l.store(biased(l, l.mul(l.load(x), l.splat(scale)), l.load(bias)), x);
                }
            }
            Rule::Range { from, to, keep } => each(l, s, lanes, |x, key, j| {
                let hidden = l.splat(f32::NEG_INFINITY);
                // A key that is kept is no smaller than 0.
                let from = l.select(l.lt(key, l.splat(keep)), l.splat(0.0), l.load(&from[j..]));
                let x = l.select(l.lt(key, from), hidden, x);
                l.select(l.lt(key, l.load(&to[j..])), x, hidden)
            }),
        }
    }
}

#[inline(always)]
fn softcap<L: Lanes>(l: L, x: L::V, cap: f32) -> L::V {
    let cap = l.splat(cap);
    l.mul(cap, tanh(l, l.div(x, cap)))
}

#[inline(always)]
fn alibi<L: Lanes>(l: L, x: L::V, slope: L::V, distance: L::V) -> L::V {
    add_finite(l, x, l.mul(l.sub(l.splat(0.0), slope), l.abs(distance)))
}

#[inline(always)]
fn biased<L: Lanes>(l: L, x: L::V, bias: L::V) -> L::V {
    l.select(l.lt(bias, l.splat(f32::MIN)), l.splat(f32::NEG_INFINITY), add_finite(l, x, bias))
}

/// `score + bias` that stays finite where the score is: a sum of two finite numbers that rounds to -inf would hide its key.
#[inline(always)]
fn add_finite<L: Lanes>(l: L, score: L::V, bias: L::V) -> L::V {
    let (lowest, sum) = (l.splat(f32::MIN), l.add(score, bias));
    l.select(l.lt(score, lowest), sum, l.max(lowest, sum))
}

/// Replaces every vector of the tile by `f(vector, its keys, lane of its first element)`.
#[inline(always)]
fn each<L: Lanes>(l: L, s: &mut [f32], lanes: usize, f: impl Fn(L::V, L::V, usize) -> L::V) {
    let mut keys = [0.0; MAX_LANES];
    for (i, key) in keys.iter_mut().enumerate() {
        *key = (i / lanes) as f32;
    }
    let (mut key, step) = (l.load(&keys), l.splat(L::LANES.div_ceil(lanes) as f32));
    for row in s.chunks_exact_mut(lanes.max(L::LANES)) {
        for (j, x) in row.chunks_exact_mut(L::LANES).enumerate() {
            l.store(f(l.load(x), key, j * L::LANES), x);
        }
        key = l.add(key, step);
    }
}
