//! The level that every machine has: four lanes of the crate `wide`, with the instructions the build's target allows.

use wide::{bytemuck, f32x4, i32x4};

use crate::kernel::{Lanes, NoMatrix, Op};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

impl Lanes for Portable {
    type V = f32x4;
    type M = f32x4;
    const LANES: usize = 4;
    // 12 accumulators, two operands, a broadcast and its product: the 16 registers of SSE2.
    const MR: usize = 6;
    type Matrix = NoMatrix;

    #[inline(always)]
    fn vectorize<O: Op>(self, op: O) -> O::Output {
        op.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> f32x4 {
        f32x4::splat(x)
    }

    #[inline(always)]
    fn load(self, src: &[f32]) -> f32x4 {
        f32x4::new([src[0], src[1], src[2], src[3]])
    }

    #[inline(always)]
    fn store(self, x: f32x4, dst: &mut [f32]) {
        dst[..4].copy_from_slice(x.as_array());
    }

    #[inline(always)]
    fn load_partial(self, src: &[f32], fill: f32) -> f32x4 {
        let at = |i: usize| src.get(i).copied().unwrap_or(fill);
        f32x4::new([at(0), at(1), at(2), at(3)])
    }

    #[inline(always)]
    fn store_partial(self, x: f32x4, dst: &mut [f32]) {
        dst.iter_mut().zip(x.to_array()).for_each(|(to, x)| *to = x);
    }

    #[inline(always)]
    fn add(self, a: f32x4, b: f32x4) -> f32x4 {
        a + b
    }

    #[inline(always)]
    fn sub(self, a: f32x4, b: f32x4) -> f32x4 {
        a - b
    }

    #[inline(always)]
    fn mul(self, a: f32x4, b: f32x4) -> f32x4 {
        a * b
    }

    #[inline(always)]
    fn div(self, a: f32x4, b: f32x4) -> f32x4 {
        a / b
    }

    #[inline(always)]
    fn fma(self, a: f32x4, b: f32x4, c: f32x4) -> f32x4 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn max(self, a: f32x4, b: f32x4) -> f32x4 {
        // One instruction where it has the semantics that the trait asks for (wasm's pmax returns the other operand).
        if cfg!(target_arch = "x86_64") { a.fast_max(b) } else { self.select(a.simd_gt(b), a, b) }
    }

    #[inline(always)]
    fn abs(self, a: f32x4) -> f32x4 {
        a.abs()
    }

    #[inline(always)]
    fn lt(self, a: f32x4, b: f32x4) -> f32x4 {
        a.simd_lt(b)
    }

    #[inline(always)]
    fn not_lt(self, a: f32x4, b: f32x4) -> f32x4 {
        !a.simd_lt(b)
    }

    #[inline(always)]
    fn select(self, mask: f32x4, a: f32x4, b: f32x4) -> f32x4 {
        (mask & a) | (!mask & b)
    }

    #[inline(always)]
    fn round(self, x: f32x4) -> f32x4 {
        (x + f32x4::splat(ROUND)) - f32x4::splat(ROUND)
    }

    #[inline(always)]
    fn scale_by_exp2(self, p: f32x4, n: f32x4) -> f32x4 {
        let exponent: i32x4 = bytemuck::cast(n + f32x4::splat(ROUND + 127.0));
        p * bytemuck::cast::<i32x4, f32x4>(exponent << 23)
    }

    #[inline(always)]
    fn transpose(self, src: &[f32], src_stride: usize, rows: usize, dst: &mut [f32], dst_stride: usize) {
        let mut r = [self.splat(0.0); Self::LANES];
        for (i, row) in r.iter_mut().enumerate() {
            *row = self.load(&src[i.min(rows - 1) * src_stride..]);
        }
        for (i, column) in f32x4::transpose(r).into_iter().enumerate() {
            self.store(column, &mut dst[i * dst_stride..]);
        }
    }
}
