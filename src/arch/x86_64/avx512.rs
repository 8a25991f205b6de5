//! AVX-512: sixteen lanes.
#![allow(unsafe_code, reason = "calls of intrinsics, whose features the token proves")]

use core::arch::x86_64::*;

use half::{bf16, f16};

use super::Amx;
use crate::kernel::{Lanes, Op};

/// Proof that the processor has AVX-512 F, BW, DQ and VL, and AVX2, FMA and F16C: only `new` makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512 {
    /// AMX, on the level of that name.
    amx: Option<Amx>,
}

impl Avx512 {
    pub(crate) fn new() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self { amx: None })
    }

    /// Beside AMX.
    #[cfg(not(polyhead_emulated_matrix))]
    pub(crate) fn with_matrix() -> Option<Self> {
        let amx = Some(Amx::new()?);
        Self::new().map(|_| Self { amx })
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn with_features<O: Op>(lanes: Avx512, op: O) -> O::Output {
    op.run(lanes)
}

/// Wraps an expression of intrinsics.
macro_rules! avx512 {
    ($e:expr) => {
        // SAFETY: `self` exists, so `Avx512::new` has found the features that these intrinsics need.
        unsafe { $e }
    };
}

impl Lanes for Avx512 {
    type V = __m512;
    type M = __mmask16;
    const LANES: usize = 16;
    // 24 accumulators, two operands, a broadcast: 27 of 32 registers. 14 rows take 31.
    const MR: usize = 12;
    type Matrix = Amx;

    #[inline(always)]
    fn matrix(self) -> Option<Amx> {
        self.amx
    }

    #[inline(always)]
    fn vectorize<O: Op>(self, op: O) -> O::Output {
        avx512!(with_features(self, op))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, src: &[f32]) -> __m512 {
        let src = &src[..Self::LANES];
        // SAFETY: features as above; the slice has 16 elements, and the load needs no alignment.
        unsafe { _mm512_loadu_ps(src.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m512, dst: &mut [f32]) {
        let dst = &mut dst[..Self::LANES];
        // SAFETY: features as above; the slice has 16 elements, and the store needs no alignment.
        unsafe { _mm512_storeu_ps(dst.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load_partial(self, src: &[f32], fill: f32) -> __m512 {
        // SAFETY: features as above; the mask has the lanes that the slice has elements for, and no others are read.
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(src.len()), src.as_ptr()) }
    }

    #[inline(always)]
    fn store_partial(self, x: __m512, dst: &mut [f32]) {
        // SAFETY: features as above; the mask has the lanes that the slice has elements for, and no others are written.
        unsafe { _mm512_mask_storeu_ps(dst.as_mut_ptr(), first_lanes(dst.len()), x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        avx512!(_mm512_abs_ps(a))
    }

    #[inline(always)]
    fn lt(self, a: __m512, b: __m512) -> __mmask16 {
        avx512!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    fn not_lt(self, a: __m512, b: __m512) -> __mmask16 {
        avx512!(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, b))
    }

    #[inline(always)]
    fn select(self, mask: __mmask16, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn all(self, mask: __mmask16) -> bool {
        mask == __mmask16::MAX
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        avx512!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn scale_by_exp2(self, p: __m512, n: __m512) -> __m512 {
        avx512!(_mm512_scalef_ps(p, n))
    }

    /// In one instruction, as VSCALEFPS takes the floor itself.
    #[inline(always)]
    fn split_floor(self, t: __m512) -> (__m512, __m512) {
        (avx512!(_mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(t)), t)
    }

    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> __m512 {
        let src = &src[..Self::LANES];
        // SAFETY: features as above; the slice has 16 elements, 32 bytes, and the load needs no alignment.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(src.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> __m512 {
        let src = &src[..Self::LANES];
        // SAFETY: features as above; the slice has 16 elements, 32 bytes, and the load needs no alignment.
        let halves = unsafe { _mm256_loadu_si256(src.as_ptr().cast()) };
        avx512!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))))
    }

    #[inline(always)]
    fn round_bf16(self, x: __m512) -> __m512 {
        avx512!(_mm512_castsi512_ps(_mm512_and_si512(
            _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)),
            _mm512_set1_epi32(!0xffff)
        )))
    }

    #[inline(always)]
    fn truncate_bf16(self, x: __m512) -> __m512 {
        avx512!(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(!0xffff))))
    }

    #[inline(always)]
    fn pair_bf16(self, low: __m512, high: __m512) -> __m512 {
        /// `a & b | c`.
        const SELECT: i32 = 0b1110_1010;
        avx512!(_mm512_castsi512_ps(_mm512_ternarylogic_epi32::<SELECT>(
            _mm512_set1_epi32(!0xffff),
            _mm512_castps_si512(high),
            _mm512_srli_epi32::<16>(_mm512_castps_si512(low))
        )))
    }

    #[inline(always)]
    fn sum4(self, x: [__m512; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        // SAFETY: features as above, AVX2 among them; `sums` has room for four floats, and the store needs no alignment.
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(x[0]), _mm512_extractf32x8_ps::<1>(x[0]));
            let b = _mm256_add_ps(_mm512_castps512_ps256(x[1]), _mm512_extractf32x8_ps::<1>(x[1]));
            let c = _mm256_add_ps(_mm512_castps512_ps256(x[2]), _mm512_extractf32x8_ps::<1>(x[2]));
            let d = _mm256_add_ps(_mm512_castps512_ps256(x[3]), _mm512_extractf32x8_ps::<1>(x[3]));
            // Each half has its part of the four sums.
            let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let four = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            _mm_storeu_ps(sums.as_mut_ptr(), four);
        }
        sums
    }

    #[inline(always)]
    fn prefetch<T>(self, src: &[T]) {
        super::avx2::prefetch(src);
    }

    #[inline(always)]
    fn transpose(self, src: &[f32], src_stride: usize, rows: usize, dst: &mut [f32], dst_stride: usize) {
        let mut r = [self.splat(0.0); Self::LANES];
        for (i, row) in r.iter_mut().enumerate() {
            *row = self.load(&src[i.min(rows - 1) * src_stride..]);
        }
        let columns = avx512!(transpose16(r));
        for (i, column) in columns.into_iter().enumerate() {
            self.store(column, &mut dst[i * dst_stride..]);
        }
    }
}

/// A mask of the first `n` lanes, or all of them.
#[inline(always)]
fn first_lanes(n: usize) -> __mmask16 {
    if n < Avx512::LANES { (1 << n) - 1 } else { __mmask16::MAX }
}

/// 16 x 16 in 64 shuffles: 4 x 4 blocks within the 128-bit quarters, then the quarters.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline]
fn transpose16(r: [__m512; 16]) -> [__m512; 16] {
    let mut t = r;
    // After this, quarter k of t[4a + b] is column 4k + b of rows 4a..4a + 4.
    for a in 0..4 {
        let [r0, r1, r2, r3] = [r[4 * a], r[4 * a + 1], r[4 * a + 2], r[4 * a + 3]];
        let (low01, high01) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpackhi_ps(r0, r1));
        let (low23, high23) = (_mm512_unpacklo_ps(r2, r3), _mm512_unpackhi_ps(r2, r3));
        t[4 * a] = _mm512_shuffle_ps::<0x44>(low01, low23);
        t[4 * a + 1] = _mm512_shuffle_ps::<0xee>(low01, low23);
        t[4 * a + 2] = _mm512_shuffle_ps::<0x44>(high01, high23);
        t[4 * a + 3] = _mm512_shuffle_ps::<0xee>(high01, high23);
    }
    let mut columns = t;
    for b in 0..4 {
        let [t0, t1, t2, t3] = [t[b], t[4 + b], t[8 + b], t[12 + b]];
        let (even01, odd01) = (_mm512_shuffle_f32x4::<0x88>(t0, t1), _mm512_shuffle_f32x4::<0xdd>(t0, t1));
        let (even23, odd23) = (_mm512_shuffle_f32x4::<0x88>(t2, t3), _mm512_shuffle_f32x4::<0xdd>(t2, t3));
        columns[b] = _mm512_shuffle_f32x4::<0x88>(even01, even23);
        columns[4 + b] = _mm512_shuffle_f32x4::<0x88>(odd01, odd23);
        columns[8 + b] = _mm512_shuffle_f32x4::<0xdd>(even01, even23);
        columns[12 + b] = _mm512_shuffle_f32x4::<0xdd>(odd01, odd23);
    }
    columns
}
