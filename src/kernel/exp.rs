//! `2^t`, `e^x` and `tanh` on vectors.

use super::lanes::Lanes;

/// `2^r` for r in [-0.5, 0.5]: minimax in relative error, 2^-28.9, found by linear programming with the constant fixed at 1, so
/// that `2^0` is exactly 1. Evaluated by Horner's rule with FMA: at most 0.89 ulp (without FMA 1.5). Swept over every `f32` by
/// `tests::exp_over_every_float`.
const EXP2: [f32; 7] = [1.0, 0.693_147_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_69];

/// Below this power the result is subnormal.
const MIN_EXPONENT: f32 = -126.0;

#[inline(always)]
fn exp2_reduced<L: Lanes>(l: L, r: L::V) -> L::V {
    let mut p = l.splat(EXP2[6]);
    p = l.fma(p, r, l.splat(EXP2[5]));
    p = l.fma(p, r, l.splat(EXP2[4]));
    p = l.fma(p, r, l.splat(EXP2[3]));
    p = l.fma(p, r, l.splat(EXP2[2]));
    p = l.fma(p, r, l.splat(EXP2[1]));
    l.fma(p, r, l.splat(EXP2[0]))
}

/// `2^t` for t <= 0 (or NaN, which stays), flushed to 0 below 2^-126: a probability relative to the largest of its row.
#[inline(always)]
pub(crate) fn exp2_nonpositive<L: Lanes>(l: L, t: L::V) -> L::V {
    let floor = l.splat(MIN_EXPONENT);
    let normal = l.not_lt(t, floor);
    // max keeps its second operand where the first is not larger, so NaN passes.
    let t = l.max(floor, t);
    let n = l.round(t);
    let p = l.scale_by_exp2(exp2_reduced(l, l.sub(t, n)), n);
    l.select(normal, p, l.splat(0.0))
}

const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has 15 significant bits, so that its product with any exponent is exact.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;

/// `e^x` over the whole range: NaN stays NaN, +inf and what exceeds `f32::MAX` give +inf, -inf gives 0, and results below
/// `f32::MIN_POSITIVE` lose bits gradually (subnormals), down to 0.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(l: L, x: L::V) -> L::V {
    // Outside of this range the result is 0 or +inf for any rounding; within it both exponents below fit.
    let (low, high) = (l.splat(-104.0), l.splat(89.0));
    let clamped = l.max(low, x);
    let clamped = l.select(l.lt(high, clamped), high, clamped);
    let n = l.round(l.mul(clamped, l.splat(LOG2_E)));
    let r = l.fma(n, l.splat(-LN_2_HIGH), clamped);
    let r = l.fma(n, l.splat(-LN_2_LOW), r);
    let p = exp2_reduced(l, l.mul(r, l.splat(LOG2_E)));
    // 2^n in two factors: n reaches -150 and 128, and the second product rounds once, into the subnormals too.
    let half = l.round(l.mul(n, l.splat(0.5)));
    let one = l.splat(1.0);
    l.mul(l.scale_by_exp2(p, half), l.scale_by_exp2(one, l.sub(n, half)))
}

/// `tanh(x)`: NaN stays NaN, +-inf give +-1.
///
/// Below 0.625 an odd polynomial (Cephes' tanhf, Moshier 1989), above it `1 - 2 / (e^2|x| + 1)`; at most 3 ulp.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(l: L, x: L::V) -> L::V {
    const SMALL: [f32; 5] = [-5.704_988_7e-3, 2.063_908_9e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328_2e-1];
    let magnitude = l.abs(x);
    let x2 = l.mul(x, x);
    let mut p = l.splat(SMALL[0]);
    for c in &SMALL[1..] {
        p = l.fma(p, x2, l.splat(*c));
    }
    let small = l.fma(l.mul(p, x2), x, x);
    let one = l.splat(1.0);
    let e = exp(l, l.add(magnitude, magnitude));
    let large = l.sub(one, l.div(l.splat(2.0), l.add(e, one)));
    let signed = l.select(l.lt(x, l.splat(0.0)), l.sub(l.splat(0.0), large), large);
    l.select(l.lt(magnitude, l.splat(0.625)), small, signed)
}
