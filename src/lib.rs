//! Hand-optimised SIMD kernels for attention on CPUs.

mod element;
mod error;
mod parallel;

pub use element::Element;
pub use error::{Error, Result};
mod arch;
pub mod attention;
pub mod gemm;
mod kernel;
mod level;
mod mask;
mod multi_head;
mod options;
mod problem;
pub mod reference;
mod view;
mod workspace;

pub use level::Level;
pub use mask::{Bias, Diagonal, Mask, Window, alibi_slopes};
pub use multi_head::{Explanation, MultiHead, Outputs, Shape, multi_head, multi_head_with};
pub use options::{Options, Precision};
pub use view::{Heads, HeadsMut, Matrices, MatricesMut, Matrix, MatrixMut, View, ViewMut};
