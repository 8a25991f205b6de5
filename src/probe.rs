//! Loops that find what a level can do at most, the limits that kernels are held against (`examples/roofline`), and the functions
//! that the kernels are made of, for their errors (`examples/accuracy`).
//!
//! Not part of the stable API: anything here may change in any release. A level that is not in [`Level::available`] runs as
//! [`Level::Portable`].

use crate::Level;
use crate::kernel::matrix::{Matrix, MatrixOp, Multiply, Plan, Product, SIDE, STEP, TILE};
use crate::kernel::{self, Lanes, Op, exp_nonpositive, exp2_nonpositive};
use core::hint::black_box;

/// Chains of FMAs that do not wait for each other. Two units with a latency of 4 need 8; a multiplication and an addition of
/// 4 each, where the level has no FMA, 8 pairs; four units of aarch64 16. With the two operands they fill the 16 registers of
/// x86-64 below AVX-512.
const CHAINS: usize = if cfg!(target_arch = "aarch64") { 24 } else { 14 };

/// Runs `rounds` rounds of independent `a * b + c` in registers; the floating-point operations done, two for each, and a number
/// made of all results.
pub fn fma(level: Level, rounds: u64) -> (u64, f32) {
    level.dispatch(Vectorized(Fma { rounds }))
}

/// Runs `rounds` products of 32 x 128 by 128 x 32 bf16 on the level's matrix tiles, operands in L1; the floating-point operations done,
/// and the sum of the last product's elements, which are all 128. `None` if the level has none.
pub fn tiles(level: Level, rounds: u64) -> Option<(u64, f32)> {
    level.dispatch(Tiles { rounds })
}

/// `out = e^x` for x <= 0, as the fused kernel computes its probabilities (2^(x log2(e)), 0 below 2^-126).
///
/// # Panics
/// If the slices differ in length.
pub fn exp(level: Level, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "one result for each element");
    level.dispatch(Vectorized(Exp { x, out }));
}

/// A function that kernels compute in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// `e^x` of any x.
    Exp,
    /// `e^x` for x <= 0, 0 below 2^-126: softmax.
    ExpNonpositive,
    /// `2^x` for x <= 0, 0 below 2^-126.
    Exp2Nonpositive,
    /// Softcap.
    Tanh,
}

/// `out = function(x)`.
///
/// # Panics
/// If the slices differ in length.
pub fn apply(level: Level, function: Function, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "one result for each element");
    level.dispatch(Vectorized(Apply { function, x, out }));
}

/// Sum of the elements, read once from the first to the last, with enough partial sums that loads are all there is to wait for.
pub fn sum(level: Level, data: &[f32]) -> f32 {
    level.dispatch(Vectorized(Sum { data }))
}

/// Compiles an operation for the level it is dispatched to.
struct Vectorized<O>(O);

impl<O: Op> Op for Vectorized<O> {
    type Output = O::Output;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> O::Output {
        l.vectorize(self.0)
    }
}

struct Fma {
    rounds: u64,
}

impl Op for Fma {
    type Output = (u64, f32);
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> (u64, f32) {
        // Towards c / (1 - a) = 1 from starts that differ: equal chains would be computed once.
        let (a, c) = (l.splat(black_box(0.5)), l.splat(black_box(0.5)));
        let mut acc = [c; CHAINS];
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc = l.splat(black_box(i as f32));
        }
        for _ in 0..self.rounds {
            for acc in &mut acc {
                *acc = l.fma(*acc, a, c);
            }
        }
        let total = acc.into_iter().fold(l.splat(0.0), |total, acc| l.add(total, acc));
        (self.rounds * (2 * CHAINS * L::LANES) as u64, l.sum(total))
    }
}

#[derive(Clone, Copy)]
struct Tiles {
    rounds: u64,
}

impl Op for Tiles {
    type Output = Option<(u64, f32)>;
    fn run<L: Lanes>(self, l: L) -> Self::Output {
        l.matrix().map(|matrix| matrix.run(self))
    }
}

impl MatrixOp for Tiles {
    type Output = (u64, f32);
    fn run<M: Multiply>(self, matrix: M) -> (u64, f32) {
        const DEPTH: usize = 4;
        const SIDES: usize = 2 * SIDE;
        #[repr(align(64))]
        struct Aligned<const N: usize>([f32; N]);
        // Two ones.
        let ones = Aligned([f32::from_bits(0x3f80_3f80); DEPTH * 2 * TILE]);
        let (ones, mut c) = (&black_box(&ones).0, Aligned([0.0; SIDES * SIDES]));
        let (plan, configured) = (Plan::new([1, 1], [0, 0]), matrix.configure());
        for _ in 0..self.rounds {
            let (a, b, c) = (&ones[..], &ones[..], &mut c.0[..]);
            let op = Product { plan: &plan, depth: DEPTH, columns: SIDES, a, a_block: 0, b, c, more: false };
            op.run(matrix, &configured);
        }
        (self.rounds * (2 * SIDES * SIDES * DEPTH * STEP) as u64, c.0.iter().sum())
    }
}

struct Exp<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Op for Exp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        /// Vectors in flight: the polynomial is one chain, and its latency is hidden by others.
        const VECTORS: usize = 4;
        let c = l.splat(core::f32::consts::LOG2_E);
        let block = VECTORS * L::LANES;
        let (mut x, mut out) = (self.x.chunks_exact(block), self.out.chunks_exact_mut(block));
        for (x, out) in (&mut x).zip(&mut out) {
            for at in (0..block).step_by(L::LANES) {
                l.store(exp2_nonpositive(l, l.mul(l.load(&x[at..]), c)), &mut out[at..]);
            }
        }
        for (x, out) in x.remainder().chunks(L::LANES).zip(out.into_remainder().chunks_mut(L::LANES)) {
            l.store_partial(exp2_nonpositive(l, l.mul(l.load_partial(x, 0.0), c)), out);
        }
    }
}

struct Apply<'a> {
    function: Function,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Op for Apply<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for (x, out) in self.x.chunks(L::LANES).zip(self.out.chunks_mut(L::LANES)) {
            let x = l.load_partial(x, 0.0);
            let y = match self.function {
                Function::Exp => kernel::exp(l, x),
                Function::ExpNonpositive => exp_nonpositive(l, x),
                Function::Exp2Nonpositive => exp2_nonpositive(l, x),
                Function::Tanh => kernel::tanh(l, x),
            };
            l.store_partial(y, out);
        }
    }
}

struct Sum<'a> {
    data: &'a [f32],
}

impl Op for Sum<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        const SUMS: usize = 8;
        let mut sums = [l.splat(0.0); SUMS];
        let mut blocks = self.data.chunks_exact(SUMS * L::LANES);
        for block in &mut blocks {
            for (sum, x) in sums.iter_mut().zip(block.chunks_exact(L::LANES)) {
                *sum = l.add(*sum, l.load(x));
            }
        }
        for x in blocks.remainder().chunks(L::LANES) {
            sums[0] = l.add(sums[0], l.load_partial(x, 0.0));
        }
        l.sum(sums.into_iter().fold(l.splat(0.0), |total, sum| l.add(total, sum)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_those_of_the_level() {
        for &level in Level::available() {
            let expected = (level == Level::Amx).then_some((3 * 2 * 32 * 32 * 128, 128.0 * 32.0 * 32.0));
            assert_eq!(tiles(level, 3), expected, "{level:?}");
        }
    }

    #[test]
    fn counts_the_operations_it_does() {
        for &level in Level::available() {
            let (flops, value) = fma(level, 1000);
            assert_eq!(flops, 1000 * 2 * (CHAINS * level.lanes()) as u64, "{level:?}");
            // Every lane of every chain has converged to 1.
            assert_eq!(value, (CHAINS * level.lanes()) as f32, "{level:?}");
            // After one round chain i holds i / 2 + 1 / 2.
            let once: usize = (1..=CHAINS).sum();
            assert_eq!(fma(level, 1).1, (once * level.lanes()) as f32 / 2.0, "{level:?}");
        }
    }

    #[test]
    fn exp_is_the_exponential() {
        for &level in Level::available() {
            for len in [0, 1, 63, 64, 65, 1000] {
                let x: Vec<f32> = (0..len).map(|i| -0.09 * i as f32).collect();
                let mut out = vec![f32::NAN; len];
                exp(level, &x, &mut out);
                for (x, y) in x.iter().zip(&out) {
                    assert!((f64::from(*y) - f64::from(*x).exp()).abs() <= 1e-6, "{level:?}: e^{x} = {y}");
                }
            }
        }
    }

    #[test]
    fn functions_are_what_they_are_called() {
        type Exact = fn(f64) -> f64;
        let functions: [(Function, Exact); 4] = [
            (Function::Exp, f64::exp),
            (Function::ExpNonpositive, f64::exp),
            (Function::Exp2Nonpositive, f64::exp2),
            (Function::Tanh, f64::tanh),
        ];
        for &level in Level::available() {
            for len in [0, 1, 31, 100] {
                for (function, exact) in functions {
                    let x: Vec<f32> = (0..len).map(|i| -0.3 * i as f32).collect();
                    let mut out = vec![f32::NAN; len];
                    apply(level, function, &x, &mut out);
                    for (&x, y) in x.iter().zip(out) {
                        let y_exact = exact(x.into());
                        let close = (f64::from(y) - y_exact).abs() <= 2e-7 * y_exact.abs();
                        assert!(close, "{level:?} {function:?}: {y} of {x}");
                    }
                }
            }
        }
    }

    #[test]
    fn sum_counts_every_element_once() {
        for &level in Level::available() {
            for len in [0, 1, 127, 128, 129, 1000] {
                // Integers, whose sums are exact in any order.
                let data: Vec<f32> = (1..=len).map(|i| i as f32).collect();
                assert_eq!(sum(level, &data), (len * (len + 1) / 2) as f32, "{level:?}, {len}");
            }
        }
    }
}
