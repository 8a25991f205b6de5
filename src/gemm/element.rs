//! The element types of the products, and what differs between them.

use super::skinny::{self, Sink, Skinny};
use core::fmt::Debug;
use core::ops::{Add, Mul, Range};

/// A type that [`gemm`](super::gemm) multiplies: `f32` or `f64`.
///
/// ```
/// fn zeros<T: polyhead::gemm::GemmElement>(n: usize) -> Vec<T> {
///     vec![T::ZERO; n]
/// }
/// assert_eq!(zeros::<f64>(2), [0.0, 0.0]);
/// ```
#[allow(private_bounds, reason = "the bound seals the trait and keeps its functions out of the interface")]
pub trait GemmElement:
    Copy + Debug + PartialEq + Add<Output = Self> + Mul<Output = Self> + Send + Sync + Multiply + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
}

/// First element and strides of a block that is read.
pub(super) struct Source<T>(pub(super) *const T, pub(super) [isize; 2]);

/// First element and strides of a block that is written.
pub(super) struct Target<T>(pub(super) *mut T, pub(super) [isize; 2]);

/// What differs between the element types.
pub(super) trait Multiply: Sized {
    /// `self * x + y`, rounded once if `FUSED`.
    fn multiply_add<const FUSED: bool>(self, x: Self, y: Self) -> Self;

    /// Calls matrixmultiply for a product of `size` (m, n, k).
    ///
    /// # Safety
    /// Every element of `a`, `b` and `c` that `size` spans must be readable, those of `c` also writable, distinct, and used by
    /// nobody else during the call.
    unsafe fn packed(size: [usize; 3], alpha: Self, a: Source<Self>, b: Source<Self>, beta: Self, c: Target<Self>);

    /// Calls [`skinny::run`] with as many lanes as fill 64 bytes.
    fn skinny(work: Skinny<'_, Self>, outputs: Range<usize>, sink: Sink<'_, Self>);
}

macro_rules! gemm_element {
    ($t:ty, $gemm:path, $lanes:literal) => {
        impl GemmElement for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
        }
        impl Multiply for $t {
            #[inline(always)]
            fn multiply_add<const FUSED: bool>(self, x: Self, y: Self) -> Self {
                if FUSED { self.mul_add(x, y) } else { self * x + y }
            }
            unsafe fn packed(
                [m, n, k]: [usize; 3],
                alpha: Self,
                Source(a, [rsa, csa]): Source<Self>,
                Source(b, [rsb, csb]): Source<Self>,
                beta: Self,
                Target(c, [rsc, csc]): Target<Self>,
            ) {
                // SAFETY: matrixmultiply asks for what this function asks of its caller.
                unsafe { $gemm(m, k, n, alpha, a, rsa, csa, b, rsb, csb, beta, c, rsc, csc) }
            }
            fn skinny(work: Skinny<'_, Self>, outputs: Range<usize>, sink: Sink<'_, Self>) {
                skinny::run::<Self, $lanes>(work, outputs, sink);
            }
        }
    };
}
gemm_element!(f32, matrixmultiply::sgemm, 16);
gemm_element!(f64, matrixmultiply::dgemm, 8);
