//! The element types of operands: `f32`, `f16` and `bf16`.

use half::{bf16, f16, slice::HalfFloatSliceExt};

mod sealed {
    pub trait Sealed {}
}

/// A type that operands can hold: `f32`, [`half::f16`] or [`half::bf16`]. All arithmetic is in `f32`.
///
/// ```
/// use polyhead::Element;
/// assert_eq!(half::bf16::from_f32_nearest(1.0 + 1.0 / 1024.0).to_f32(), 1.0);
/// assert_eq!(f32::NAME, "f32");
/// ```
pub trait Element: Copy + Default + Send + Sync + core::fmt::Debug + PartialEq + sealed::Sealed + 'static {
    /// The type's name as used in bench ids: `f32`, `f16`, `bf16`.
    const NAME: &'static str;
    /// Exact value as `f32`.
    fn to_f32(self) -> f32;
    /// Nearest value, ties to even; overflow gives infinity, NaN stays NaN.
    fn from_f32_nearest(x: f32) -> Self;
    /// Nearest values of a slice, into one of the same length.
    #[doc(hidden)]
    fn store_nearest(from: &[f32], to: &mut [Self]);
    /// The slice itself, if its elements are `f32`.
    #[doc(hidden)]
    fn as_f32_mut(slice: &mut [Self]) -> Option<&mut [f32]>;
    #[doc(hidden)]
    fn erase(slice: &[Self]) -> AnySlice<'_>;
    #[doc(hidden)]
    fn erase_mut(slice: &mut [Self]) -> AnySliceMut<'_>;
}

/// A slice of any element type: the fused kernels are compiled once, not once a type.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum AnySlice<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// As [`AnySlice`], to be written.
#[doc(hidden)]
#[derive(Debug)]
pub enum AnySliceMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

macro_rules! element {
    ($t:ty, $name:literal, $variant:ident, $to:expr, $from:expr, $store:expr, $as_f32_mut:expr) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const NAME: &'static str = $name;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            fn from_f32_nearest(x: f32) -> Self {
                $from(x)
            }
            #[inline(always)]
            fn store_nearest(from: &[f32], to: &mut [Self]) {
                $store(from, to)
            }
            #[inline(always)]
            fn as_f32_mut(slice: &mut [Self]) -> Option<&mut [f32]> {
                $as_f32_mut(slice)
            }
            fn erase(slice: &[Self]) -> AnySlice<'_> {
                AnySlice::$variant(slice)
            }
            fn erase_mut(slice: &mut [Self]) -> AnySliceMut<'_> {
                AnySliceMut::$variant(slice)
            }
        }
    };
}
element!(f32, "f32", F32, |x| x, |x| x, |from: &[f32], to: &mut [f32]| to.copy_from_slice(from), Some);
element!(f16, "f16", F16, f16::to_f32, f16::from_f32, narrow_f16, |_| None);
element!(bf16, "bf16", Bf16, bf16::to_f32, bf16::from_f32, narrow_bf16, |_| None);

#[inline(always)]
fn narrow_f16(from: &[f32], to: &mut [f16]) {
    to.convert_from_f32_slice(from);
}

/// As `bf16::from_f32`, without its branches and inlined, so that it is vectorised for the level of its caller: softmax of
/// `bf16` rows of 1024 takes 0.6 of the time on AVX-512.
#[inline(always)]
fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    assert_eq!(from.len(), to.len());
    for (x, to) in from.iter().zip(to) {
        let bits = x.to_bits();
        let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        *to = bf16::from_bits(if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { nearest });
    }
}

/// A bf16 is the upper half of an `f32`. (`half` converts one at a time, with a branch for NaN.)
#[inline(always)]
pub(crate) fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    for (x, y) in from.iter().zip(to) {
        *y = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_are_narrowed_as_half_does_it() {
        let from: Vec<f32> = (0..=u32::MAX).step_by(9973).map(f32::from_bits).collect();
        let mut to = vec![bf16::ZERO; from.len()];
        narrow_bf16(&from, &mut to);
        assert!(from.iter().zip(to).all(|(&x, y)| y.to_bits() == bf16::from_f32(x).to_bits()));
    }
}
