//! A vector of `f32` as every level has it: what `exp`, softmax and the register tiles are written in.

use half::{bf16, f16};

use super::matrix::Matrix;
use crate::element::widen_bf16;

/// A level whose registers have lanes. A value of an implementing type is proof that the processor has what its methods use.
///
/// Methods are for use inside [`Lanes::vectorize`]: elsewhere they work, but as calls.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// `LANES` floats.
    type V: Copy;
    /// One bit a lane.
    type M: Copy;
    const LANES: usize;
    /// Rows of a register tile of two vectors: `2 * MR` accumulators, two operands and a broadcast fit the registers.
    const MR: usize;
    /// Matrix tiles beside the lanes; [`NoMatrix`](super::matrix::NoMatrix) where there are none.
    type Matrix: Matrix;

    /// The matrix tiles, if the processor has them and the level is one that uses them.
    #[inline(always)]
    fn matrix(self) -> Option<Self::Matrix> {
        None
    }

    /// Runs `op` compiled for this level's instructions.
    fn vectorize<O: Op>(self, op: O) -> O::Output;

    fn splat(self, x: f32) -> Self::V;
    /// The first `LANES` elements. Panics if there are fewer.
    fn load(self, src: &[f32]) -> Self::V;
    /// To the first `LANES` elements. Panics if there are fewer.
    fn store(self, x: Self::V, dst: &mut [f32]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the level has it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger lane; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// `a < b`, false for NaN.
    fn lt(self, a: Self::V, b: Self::V) -> Self::M;
    /// `!(a < b)`, true for NaN.
    fn not_lt(self, a: Self::V, b: Self::V) -> Self::M;
    /// `a` where the mask is set, else `b`.
    fn select(self, mask: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// Whether the mask is set in all lanes.
    #[inline(always)]
    fn all(self, mask: Self::M) -> bool {
        self.sum(self.select(mask, self.splat(0.0), self.splat(1.0))) == 0.0
    }
    /// Nearest integer, ties to even, for |x| < 2^22; NaN stays NaN.
    fn round(self, x: Self::V) -> Self::V;
    /// `p * 2^n` for integral `n` in -126..=127 and `p` in 0.5..2.
    fn scale_by_exp2(self, p: Self::V, n: Self::V) -> Self::V;

    /// `r` and `n`, where `t = floor(t) + r`, and `scale_by_exp2(p, n)` is `p * 2^floor(t)`. Of |t| > 126 any two.
    #[inline(always)]
    fn split_floor(self, t: Self::V) -> (Self::V, Self::V) {
        // Where half of an even number is cut off, r is 1 instead of 0.
        let n = self.round(self.sub(t, self.splat(0.5)));
        (self.sub(t, n), n)
    }

    /// Transposes a block: `dst[column * dst_stride + row] = src[row * src_stride + column]` for `LANES` rows and columns. Of
    /// `rows` rows (at least 1) the last stands in for those that are missing.
    fn transpose(self, src: &[f32], src_stride: usize, rows: usize, dst: &mut [f32], dst_stride: usize);

    /// Asks for memory that will be read soon; a hint.
    #[inline(always)]
    fn prefetch<T>(self, _src: &[T]) {}

    /// The first `LANES` elements. Panics if there are fewer.
    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> Self::V {
        let mut lanes = [0.0; MAX_LANES];
        for (x, from) in lanes.iter_mut().zip(&src[..Self::LANES]) {
            // The exponent's bias differs by 112, which a product corrects for subnormals too; infinities and NaN have the
            // largest exponent in either type. Without a branch, so that it is vectorised.
            let bits = u32::from(from.to_bits());
            let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
            let special = if bits & 0x7c00 == 0x7c00 { 0xff << 23 } else { 0 };
            *x = f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16);
        }
        self.load(&lanes)
    }

    /// The first `LANES` elements. Panics if there are fewer.
    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> Self::V {
        let mut lanes = [0.0; MAX_LANES];
        widen_bf16(&src[..Self::LANES], &mut lanes);
        self.load(&lanes)
    }

    /// The sums of the lanes of four vectors, each in an order that depends on the level alone.
    #[inline(always)]
    fn sum4(self, x: [Self::V; 4]) -> [f32; 4] {
        [self.sum(x[0]), self.sum(x[1]), self.sum(x[2]), self.sum(x[3])]
    }

    /// The nearest bf16 in each lane, ties away from zero, for |x| < 2^127.
    #[inline(always)]
    fn round_bf16(self, x: Self::V) -> Self::V {
        let mut lanes = [0.0; MAX_LANES];
        self.store(x, &mut lanes);
        self.load(&lanes.map(|x: f32| f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000)))
    }

    /// The next bf16 towards zero in each lane.
    #[inline(always)]
    fn truncate_bf16(self, x: Self::V) -> Self::V {
        let mut lanes = [0.0; MAX_LANES];
        self.store(x, &mut lanes);
        self.load(&lanes.map(|x: f32| f32::from_bits(x.to_bits() & 0xffff_0000)))
    }

    /// Two bf16, truncated, in each lane: those of `low` in the lower halves of the bits.
    #[inline(always)]
    fn pair_bf16(self, low: Self::V, high: Self::V) -> Self::V {
        let (mut pairs, mut lanes) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
        self.store(low, &mut pairs);
        self.store(high, &mut lanes);
        for (pair, high) in pairs.iter_mut().zip(lanes) {
            *pair = f32::from_bits(pair.to_bits() >> 16 | high.to_bits() & 0xffff_0000);
        }
        self.load(&pairs)
    }

    /// Sum of the lanes, in an order that depends on the level alone.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        let mut lanes = [0.0; MAX_LANES];
        self.store(x, &mut lanes);
        let mut n = Self::LANES;
        while n > 1 {
            n /= 2;
            for i in 0..n {
                lanes[i] += lanes[i + n];
            }
        }
        lanes[0]
    }

    /// The first elements of `src`, the other lanes `fill`.
    #[inline(always)]
    fn load_partial(self, src: &[f32], fill: f32) -> Self::V {
        if src.len() >= Self::LANES {
            return self.load(src);
        }
        let mut lanes = [fill; MAX_LANES];
        lanes[..src.len()].copy_from_slice(src);
        self.load(&lanes)
    }

    /// As many lanes as `dst` takes.
    #[inline(always)]
    fn store_partial(self, x: Self::V, dst: &mut [f32]) {
        if dst.len() >= Self::LANES {
            return self.store(x, dst);
        }
        let mut lanes = [0.0; MAX_LANES];
        self.store(x, &mut lanes);
        dst.copy_from_slice(&lanes[..dst.len()]);
    }
}

/// The widest vector of any level.
pub(crate) const MAX_LANES: usize = 16;

/// Work that is compiled once for every level. Implement `run` as `#[inline(always)]`, so that it takes on the instruction set
/// of the function it is called from.
pub(crate) trait Op {
    type Output;
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}
