//! AVX2 with FMA: eight lanes.
#![allow(unsafe_code, reason = "calls of intrinsics, whose features the token proves")]

use core::arch::x86_64::*;

use half::{bf16, f16};

#[cfg(polyhead_emulated_matrix)]
use crate::arch::Emulated as Tiles;
#[cfg(not(polyhead_emulated_matrix))]
use crate::kernel::NoMatrix as Tiles;
use crate::kernel::{Lanes, Op};

/// Proof that the processor has AVX2, FMA and F16C: only `new` makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2 {
    matrix: Option<Tiles>,
}

impl Avx2 {
    pub(crate) fn new() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Self { matrix: None })
    }

    /// Beside matrix tiles that plain code imitates.
    #[cfg(polyhead_emulated_matrix)]
    pub(crate) fn with_matrix() -> Option<Self> {
        Self::new().map(|_| Self { matrix: Some(Tiles) })
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn with_features<O: Op>(lanes: Avx2, op: O) -> O::Output {
    op.run(lanes)
}

/// Wraps an expression of intrinsics.
macro_rules! avx2 {
    ($e:expr) => {
        // SAFETY: `self` exists, so `Avx2::new` has found the features that these intrinsics need.
        unsafe { $e }
    };
}

impl Lanes for Avx2 {
    type V = __m256;
    type M = __m256;
    const LANES: usize = 8;
    // 12 accumulators, two operands, a broadcast: 15 of 16 registers.
    const MR: usize = 6;
    type Matrix = Tiles;

    #[inline(always)]
    fn matrix(self) -> Option<Tiles> {
        self.matrix
    }

    #[inline(always)]
    fn vectorize<O: Op>(self, op: O) -> O::Output {
        avx2!(with_features(self, op))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        avx2!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, src: &[f32]) -> __m256 {
        let src = &src[..Self::LANES];
        // SAFETY: features as above; the slice has 8 elements, and the load needs no alignment.
        unsafe { _mm256_loadu_ps(src.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m256, dst: &mut [f32]) {
        let dst = &mut dst[..Self::LANES];
        // SAFETY: features as above; the slice has 8 elements, and the store needs no alignment.
        unsafe { _mm256_storeu_ps(dst.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load_partial(self, src: &[f32], fill: f32) -> __m256 {
        // SAFETY: features as above; the mask has the lanes that the slice has elements for, and no others are read.
        unsafe {
            let mask = first_lanes(src.len());
            let loaded = _mm256_maskload_ps(src.as_ptr(), mask);
            _mm256_blendv_ps(_mm256_set1_ps(fill), loaded, _mm256_castsi256_ps(mask))
        }
    }

    #[inline(always)]
    fn store_partial(self, x: __m256, dst: &mut [f32]) {
        // SAFETY: features as above; the mask has the lanes that the slice has elements for, and no others are written.
        unsafe { _mm256_maskstore_ps(dst.as_mut_ptr(), first_lanes(dst.len()), x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        avx2!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        avx2!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }

    #[inline(always)]
    fn lt(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }

    #[inline(always)]
    fn not_lt(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_cmp_ps::<_CMP_NLT_UQ>(a, b))
    }

    #[inline(always)]
    fn select(self, mask: __m256, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_blendv_ps(b, a, mask))
    }

    #[inline(always)]
    fn round(self, x: __m256) -> __m256 {
        avx2!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn scale_by_exp2(self, p: __m256, n: __m256) -> __m256 {
        let exponent = avx2!(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
        self.mul(p, avx2!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))))
    }

    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> __m256 {
        let src = &src[..Self::LANES];
        // SAFETY: features as above; the slice has 8 elements, 16 bytes, and the load needs no alignment.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(src.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> __m256 {
        let src = &src[..Self::LANES];
        // SAFETY: features as above; the slice has 8 elements, 16 bytes, and the load needs no alignment.
        let halves = unsafe { _mm_loadu_si128(src.as_ptr().cast()) };
        avx2!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves))))
    }

    #[inline(always)]
    fn sum4(self, x: [__m256; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        // SAFETY: features as above; `sums` has room for four floats, and the store needs no alignment.
        unsafe {
            // Each half has its part of the four sums.
            let halves = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
            let four = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            _mm_storeu_ps(sums.as_mut_ptr(), four);
        }
        sums
    }

    #[inline(always)]
    fn prefetch<T>(self, src: &[T]) {
        prefetch(src);
    }

    #[inline(always)]
    fn transpose(self, src: &[f32], src_stride: usize, rows: usize, dst: &mut [f32], dst_stride: usize) {
        // Rows i and 4 + i side by side, columns 0..4 and 4..8.
        let mut r = [[self.splat(0.0); 4]; 2];
        for i in 0..4 {
            let low = &src[i.min(rows - 1) * src_stride..][..Self::LANES];
            let high = &src[(4 + i).min(rows - 1) * src_stride..][..Self::LANES];
            for (half, r) in r.iter_mut().enumerate() {
                let (low, high) = (low[4 * half..].as_ptr(), high[4 * half..].as_ptr());
                // SAFETY: features as above; four of the eight elements of each slice are left, and the loads need no alignment.
                r[i] =
                    unsafe { _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high)) };
            }
        }
        for (half, r) in r.into_iter().enumerate() {
            let columns = avx2!(transpose4(r));
            for (i, column) in columns.into_iter().enumerate() {
                self.store(column, &mut dst[(4 * half + i) * dst_stride..]);
            }
        }
    }
}

/// A mask of the first `n` lanes, or all of them.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn first_lanes(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(Avx2::LANES) as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// The 4 x 4 blocks within the halves.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose4([r0, r1, r2, r3]: [__m256; 4]) -> [__m256; 4] {
    let (low01, high01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
    let (low23, high23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
    [
        _mm256_shuffle_ps::<0x44>(low01, low23),
        _mm256_shuffle_ps::<0xee>(low01, low23),
        _mm256_shuffle_ps::<0x44>(high01, high23),
        _mm256_shuffle_ps::<0xee>(high01, high23),
    ]
}

/// Asks for all lines of a slice.
#[inline(always)]
pub(super) fn prefetch<T>(src: &[T]) {
    let (first, bytes) = (src.as_ptr().cast::<i8>(), size_of_val(src));
    let mut byte = 0;
    // SAFETY: SSE is part of x86-64, and a prefetch reads nothing that the program can see.
    unsafe {
        while byte + 256 <= bytes {
            _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(byte));
            _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(byte + 64));
            _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(byte + 128));
            _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(byte + 192));
            byte += 256;
        }
        while byte < bytes {
            _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(byte));
            byte += 64;
        }
    }
}
