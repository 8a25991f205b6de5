//! `2^t`, `e^x` and `tanh` on vectors.

use super::lanes::Lanes;

/// `2^r` for r in [-0.5, 0.5]: minimax in relative error, 2^-28.9, found by linear programming with the constant fixed at 1, so
/// that `2^0` is exactly 1. Evaluated by Horner's rule with FMA: at most 0.96 ulp (without FMA 1.23). Swept over every `f32` by
/// `tests::exp2_over_every_float`.
const EXP2: [f32; 7] =
    [1.0, core::f32::consts::LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_69];

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
    // Lanes below the limit hold anything, up to the selection.
    let normal = l.not_lt(t, l.splat(MIN_EXPONENT));
    let n = l.round(t);
    let p = l.scale_by_exp2(exp2_reduced(l, l.sub(t, n)), n);
    l.select(normal, p, l.splat(0.0))
}

/// `2^r` for r in [0, 1]: minimax in relative error with the constant fixed at 1, by Remez' exchange, then rounded. 2^-13.5, for results
/// that become a bf16, and 2^-23.3, for those that become two (`tests::short_exp2_over_every_float`).
const EXP2_OF_1: [f32; 4] = [1.0, 0.695_116_8, 0.227_645, 0.077_067_04];
const EXP2_OF_2: [f32; 6] = [1.0, 0.693_151_3, 0.240_164_44, 0.055_799_913, 0.009_017_031, 0.001_867_13];

/// As [`exp2_nonpositive`], for results that become so many terms of bf16.
#[inline(always)]
pub(crate) fn exp2_nonpositive_for<L: Lanes, const TERMS: usize>(l: L, t: L::V) -> L::V {
    match TERMS {
        1 => exp2_of_floor(l, t, &EXP2_OF_1),
        2 => exp2_of_floor(l, t, &EXP2_OF_2),
        _ => exp2_nonpositive(l, t),
    }
}

#[inline(always)]
fn exp2_of_floor<L: Lanes, const N: usize>(l: L, t: L::V, polynomial: &[f32; N]) -> L::V {
    let normal = l.not_lt(t, l.splat(MIN_EXPONENT));
    let (r, n) = l.split_floor(t);
    let mut p = l.splat(polynomial[N - 1]);
    for c in polynomial[..N - 1].iter().rev() {
        p = l.fma(p, r, l.splat(*c));
    }
    l.select(normal, l.scale_by_exp2(p, n), l.splat(0.0))
}

const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has 15 significant bits, so that its product with any exponent is exact.
const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;

/// `e^r` for |r| <= ln(2) / 2 is `1 + r + r^2 (EXP[0] + EXP[1] r + ..)`: minimax in relative error, 2^-28.2 with the
/// coefficients rounded one after the other, by Remez' exchange. Swept over every `f32` by `tests::exp_over_every_float`.
const EXP: [f32; 5] = [0.499_999_94, 0.166_665_17, 0.041_668_102, 0.008_369_192, 0.001_383_890_3];

/// `n` and `p` with `e^x = p * 2^n`, for |x| < 256; NaN stays.
#[inline(always)]
fn exp_parts<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
    let n = l.round(l.mul(x, l.splat(LOG2_E)));
    let r = l.fma(n, l.splat(-LN_2_HIGH), x);
    let r = l.fma(n, l.splat(-LN_2_LOW), r);
    let mut p = l.splat(EXP[4]);
    p = l.fma(p, r, l.splat(EXP[3]));
    p = l.fma(p, r, l.splat(EXP[2]));
    p = l.fma(p, r, l.splat(EXP[1]));
    p = l.fma(p, r, l.splat(EXP[0]));
    p = l.fma(p, r, l.splat(1.0));
    (n, l.fma(p, r, l.splat(1.0)))
}

/// The logarithm of 2^-126, rounded towards 0.
const LN_MIN_POSITIVE: f32 = -87.336_54;

/// `e^x` for x <= 0 (or NaN, which stays), flushed to 0 below 2^-126: no arithmetic on subnormals, which is slow.
#[inline(always)]
pub(crate) fn exp_nonpositive<L: Lanes>(l: L, x: L::V) -> L::V {
    // Lanes below the limit hold anything, up to here.
    let (n, p) = exp_parts(l, x);
    l.select(l.not_lt(x, l.splat(LN_MIN_POSITIVE)), l.scale_by_exp2(p, n), l.splat(0.0))
}

/// `e^x` over the whole range: NaN stays NaN, +inf and what exceeds `f32::MAX` give +inf, -inf gives 0, and results below
/// `f32::MIN_POSITIVE` lose bits gradually (subnormals), down to 0.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(l: L, x: L::V) -> L::V {
    // Outside of this range the result is 0 or +inf for any rounding; within it both exponents below fit.
    let (low, high) = (l.splat(-104.0), l.splat(89.0));
    let clamped = l.max(low, x);
    let (n, p) = exp_parts(l, l.select(l.lt(high, clamped), high, clamped));
    // 2^n in two factors: n reaches -150 and 128, and the second product rounds once, into the subnormals too.
    let half = l.round(l.mul(n, l.splat(0.5)));
    l.mul(l.scale_by_exp2(p, half), l.scale_by_exp2(l.splat(1.0), l.sub(n, half)))
}

/// `tanh(x)`: NaN stays NaN, +-inf give +-1.
///
/// Below 0.625 an odd polynomial (Cephes' tanhf, Moshier 1989), above it `1 - 2 / (e^2|x| + 1)`; at most 1.4 ulp
/// (`tests::tanh_over_every_float`).
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(l: L, x: L::V) -> L::V {
    const SMALL: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::kernel::Op;
    use crate::kernel::lanes::MAX_LANES;

    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        ExpNonpositive,
        Exp2Nonpositive,
        Exp2For1,
        Exp2For2,
        Tanh,
    }

    /// Values of a function at `xs`, padded with zeros.
    struct Apply<'a> {
        function: Function,
        xs: &'a mut [f32; MAX_LANES],
    }

    impl Op for Apply<'_> {
        type Output = ();
        fn run<L: Lanes>(self, l: L) {
            l.vectorize(Vectorized(self));
        }
    }

    struct Vectorized<'a>(Apply<'a>);

    impl Op for Vectorized<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            for xs in self.0.xs.chunks_exact_mut(L::LANES) {
                let x = l.load(xs);
                let y = match self.0.function {
                    Function::Exp => exp(l, x),
                    Function::ExpNonpositive => exp_nonpositive(l, x),
                    Function::Exp2Nonpositive => exp2_nonpositive(l, x),
                    Function::Exp2For1 => exp2_nonpositive_for::<L, 1>(l, x),
                    Function::Exp2For2 => exp2_nonpositive_for::<L, 2>(l, x),
                    Function::Tanh => tanh(l, x),
                };
                l.store(y, xs);
            }
        }
    }

    fn at(level: Level, function: Function, x: f32) -> f32 {
        let mut xs = [x; MAX_LANES];
        level.dispatch(Apply { function, xs: &mut xs });
        xs[0]
    }

    /// Error in units of the last place of the result as an `f32`, subnormals included; what has to be exact (NaN, an
    /// infinity) is 0 or infinity.
    fn ulps(actual: f32, exact: f64) -> f64 {
        let expected = exact as f32;
        if expected.is_nan() || expected.is_infinite() || actual.is_nan() || actual.is_infinite() {
            let same = actual == expected || (actual.is_nan() && expected.is_nan());
            return if same { 0.0 } else { f64::INFINITY };
        }
        let exponent = (expected.abs().max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127;
        (f64::from(actual) - exact).abs() / f64::from(exponent - 23).exp2()
    }

    /// The largest error over every 257th `f32`, or all of them if `POLYHEAD_FULL_SWEEP` is set, and where it is.
    fn sweep(level: Level, function: Function, exact: impl Fn(f32) -> f64, domain: impl Fn(f32) -> bool) -> (f64, f32) {
        let step = if std::env::var_os("POLYHEAD_FULL_SWEEP").is_some() { 1 } else { 257 };
        let mut worst = (0.0, 0.0);
        let mut all = (0..=u32::MAX).step_by(step).map(f32::from_bits).filter(|&x| domain(x)).peekable();
        while all.peek().is_some() {
            let mut xs = [0.0; MAX_LANES];
            let count = xs.iter_mut().zip(&mut all).map(|(to, x)| *to = x).count();
            let mut ys = xs;
            level.dispatch(Apply { function, xs: &mut ys });
            for (&x, &y) in xs.iter().zip(&ys).take(count) {
                let error = ulps(y, exact(x));
                if error > worst.0 {
                    worst = (error, x);
                }
            }
        }
        println!("{}: {:.3} ulp at {:e}, every {step}", level.name(), worst.0, worst.1);
        worst
    }

    /// Over all 2^32 both functions are off by 0.891 ulp at most with FMA, and by 1.167 without.
    #[test]
    fn exp_over_every_float() {
        for &level in Level::available() {
            let limit = if level == Level::Portable { 1.2 } else { 0.9 };
            let exact = |x: f32| f64::from(x).exp();
            let (error, x) = sweep(level, Function::Exp, exact, |_| true);
            assert!(error < limit, "{}: {error} ulp at {x:e}", level.name());
            let flushed = |x: f32| if x < LN_MIN_POSITIVE { 0.0 } else { f64::from(x).exp() };
            let (error, x) = sweep(level, Function::ExpNonpositive, flushed, |x| x <= 0.0 || x.is_nan());
            assert!(error < limit, "{}: {error} ulp at {x:e}", level.name());
        }
    }

    /// Over all 2^32: 0.952 ulp with FMA, 1.227 without.
    #[test]
    fn exp2_over_every_float() {
        for &level in Level::available() {
            let limit = if level == Level::Portable { 1.25 } else { 0.96 };
            let exact = |t: f32| if t < MIN_EXPONENT { 0.0 } else { f64::from(t).exp2() };
            let (error, t) = sweep(level, Function::Exp2Nonpositive, exact, |t| t <= 0.0 || t.is_nan());
            assert!(error < limit, "{}: {error} ulp at {t:e}", level.name());
        }
    }

    /// At most 1,437 and 3.1 ulp: just below 1, where the polynomials' errors are doubled.
    #[test]
    fn short_exp2_over_every_float() {
        for &level in Level::available() {
            let exact = |t: f32| if t < MIN_EXPONENT { 0.0 } else { f64::from(t).exp2() };
            for (function, limit) in [(Function::Exp2For1, 1500.0), (Function::Exp2For2, 4.0)] {
                let (error, t) = sweep(level, function, exact, |t| t <= 0.0 || t.is_nan());
                assert!(error < limit, "{}: {error} ulp at {t:e}", level.name());
                assert_eq!(at(level, function, 0.0), 1.0);
            }
        }
    }

    /// Over all 2^32: 1.362 ulp with FMA, 1.347 without.
    #[test]
    fn tanh_over_every_float() {
        for &level in Level::available() {
            let (error, x) = sweep(level, Function::Tanh, |x| f64::from(x).tanh(), |_| true);
            assert!(error < 1.4, "{}: {error} ulp at {x:e}", level.name());
        }
    }

    #[test]
    fn a46_values_that_exp_got_wrong() {
        for &level in Level::available() {
            let exp = |x| at(level, Function::Exp, x);
            assert!(exp(f32::NAN).is_nan() && at(level, Function::Tanh, f32::NAN).is_nan(), "{}", level.name());
            let inf = f32::INFINITY;
            assert_eq!([inf, 800.0, -inf, 0.0, -0.0].map(exp), [inf, inf, 0.0, 1.0, 1.0], "{}", level.name());
            assert_eq!([inf, -inf, 0.0].map(|x| at(level, Function::Tanh, x)), [1.0, -1.0, 0.0], "{}", level.name());
        }
    }

    #[test]
    fn a47_exponentials_near_the_ends_of_the_range() {
        let xs = [-87.0, -88.1, -90.0, -95.0, -100.0, -104.0, 88.0, 88.72, 88.7229];
        for &level in Level::available() {
            for x in xs {
                let (actual, expected) = (at(level, Function::Exp, x), f64::from(x).exp() as f32);
                // Neighbours, subnormal ones too.
                let apart = actual.to_bits().abs_diff(expected.to_bits());
                assert!(apart <= 1, "{} {x}: {actual:e} instead of {expected:e}", level.name());
            }
        }
    }
}
