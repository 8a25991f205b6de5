//! Element types as vectors of `f32`.

use half::{bf16, f16};

use super::lanes::{Lanes, MAX_LANES};

/// A type that a level loads as `f32` lanes.
pub(crate) trait Operand: Copy {
    const ZERO: Self;
    /// Whether every element is a bf16.
    const IS_BF16: bool = false;

    /// The first `LANES` elements. Panics if there are fewer.
    fn load<L: Lanes>(l: L, src: &[Self]) -> L::V;

    /// The slice itself, if its elements are `f32`.
    #[inline(always)]
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// Up to `LANES` elements, zeros behind them.
    #[inline(always)]
    fn load_partial<L: Lanes>(l: L, src: &[Self]) -> L::V {
        if src.len() >= L::LANES {
            return Self::load(l, src);
        }
        let mut lanes = [Self::ZERO; MAX_LANES];
        lanes[..src.len()].copy_from_slice(src);
        Self::load(l, &lanes)
    }
}

impl Operand for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn as_f32(slice: &[Self]) -> Option<&[f32]> {
        Some(slice)
    }
    #[inline(always)]
    fn load<L: Lanes>(l: L, src: &[Self]) -> L::V {
        l.load(src)
    }
}

impl Operand for f16 {
    const ZERO: Self = f16::ZERO;
    #[inline(always)]
    fn load<L: Lanes>(l: L, src: &[Self]) -> L::V {
        l.load_f16(src)
    }
}

impl Operand for bf16 {
    const ZERO: Self = bf16::ZERO;
    const IS_BF16: bool = true;
    #[inline(always)]
    fn load<L: Lanes>(l: L, src: &[Self]) -> L::V {
        l.load_bf16(src)
    }
}
