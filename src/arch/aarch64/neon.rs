//! NEON: four lanes, 32 registers.
#![allow(unsafe_code, reason = "calls of intrinsics, whose feature the build's target has")]

use core::arch::aarch64::*;
use core::arch::asm;

use half::{bf16, f16};

use crate::kernel::{Lanes, NoMatrix, Op};

/// This file is compiled only where the build's target has NEON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon;

/// Wraps an expression of intrinsics.
macro_rules! neon {
    ($e:expr) => {
        // SAFETY: the build's target has NEON, or this file would not be compiled (`arch/mod.rs`).
        unsafe { $e }
    };
}

impl Lanes for Neon {
    type V = float32x4_t;
    type M = uint32x4_t;
    const LANES: usize = 4;
    // 24 accumulators, two operands, a broadcast: 27 of 32 registers.
    const MR: usize = 12;
    type Matrix = NoMatrix;

    #[inline(always)]
    fn vectorize<O: Op>(self, op: O) -> O::Output {
        op.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        neon!(vdupq_n_f32(x))
    }

    #[inline(always)]
    fn load(self, src: &[f32]) -> float32x4_t {
        let src = &src[..Self::LANES];
        // SAFETY: NEON as above; the slice has four elements, and the load needs no alignment.
        unsafe { vld1q_f32(src.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: float32x4_t, dst: &mut [f32]) {
        let dst = &mut dst[..Self::LANES];
        // SAFETY: NEON as above; the slice has four elements, and the store needs no alignment.
        unsafe { vst1q_f32(dst.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vdivq_f32(a, b))
    }

    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        neon!(vfmaq_f32(c, a, b))
    }

    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // Not `fmax`, which gives NaN where either is.
        neon!(vbslq_f32(vcgtq_f32(a, b), a, b))
    }

    #[inline(always)]
    fn abs(self, a: float32x4_t) -> float32x4_t {
        neon!(vabsq_f32(a))
    }

    #[inline(always)]
    fn lt(self, a: float32x4_t, b: float32x4_t) -> uint32x4_t {
        neon!(vcltq_f32(a, b))
    }

    #[inline(always)]
    fn not_lt(self, a: float32x4_t, b: float32x4_t) -> uint32x4_t {
        neon!(vmvnq_u32(vcltq_f32(a, b)))
    }

    #[inline(always)]
    fn select(self, mask: uint32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vbslq_f32(mask, a, b))
    }

    #[inline(always)]
    fn round(self, x: float32x4_t) -> float32x4_t {
        neon!(vrndnq_f32(x))
    }

    #[inline(always)]
    fn scale_by_exp2(self, p: float32x4_t, n: float32x4_t) -> float32x4_t {
        let exponent = neon!(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)));
        self.mul(p, neon!(vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))))
    }

    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> float32x4_t {
        let src = &src[..Self::LANES];
        let wide: float32x4_t;
        // SAFETY: NEON as above, of which `fcvtl` is a part that touches registers alone; the slice has four elements, 8 bytes, and the
        // load needs no alignment. (The intrinsic of this conversion asks for a newer compiler.)
        unsafe {
            let halves = vld1_u16(src.as_ptr().cast());
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
        }
        wide
    }

    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> float32x4_t {
        let src = &src[..Self::LANES];
        // SAFETY: NEON as above; the slice has four elements, 8 bytes, and the load needs no alignment.
        let halves = unsafe { vld1_u16(src.as_ptr().cast()) };
        neon!(vreinterpretq_f32_u32(vshll_n_u16::<16>(halves)))
    }

    #[inline(always)]
    fn sum(self, x: float32x4_t) -> f32 {
        neon!(vaddvq_f32(x))
    }

    #[inline(always)]
    fn sum4(self, x: [float32x4_t; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        self.store(neon!(vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]))), &mut sums);
        sums
    }

    #[inline(always)]
    fn transpose(self, src: &[f32], src_stride: usize, rows: usize, dst: &mut [f32], dst_stride: usize) {
        let mut r = [self.splat(0.0); Self::LANES];
        for (i, row) in r.iter_mut().enumerate() {
            *row = self.load(&src[i.min(rows - 1) * src_stride..]);
        }
        let [r0, r1, r2, r3] = r;
        let pairs = neon!([vtrn1q_f32(r0, r1), vtrn2q_f32(r0, r1), vtrn1q_f32(r2, r3), vtrn2q_f32(r2, r3)]);
        let [a, b, c, d] = pairs.map(|pair| neon!(vreinterpretq_f64_f32(pair)));
        let columns = neon!([vtrn1q_f64(a, c), vtrn1q_f64(b, d), vtrn2q_f64(a, c), vtrn2q_f64(b, d)]);
        for (i, column) in columns.into_iter().enumerate() {
            self.store(neon!(vreinterpretq_f32_f64(column)), &mut dst[i * dst_stride..]);
        }
    }
}
