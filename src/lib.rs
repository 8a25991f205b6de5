//! Hand-optimised SIMD kernels for attention on CPUs.
//!
//! [`multi_head`] is fused multi-head attention in one call, [`MultiHead`] the same as a plan; [`Options`] has everything that
//! may be asked of it. [`cache`] has caches for decoding, [`attention`] is one head, [`softmax`] and [`gemm`] are the building
//! blocks, and [`mod@reference`] has all of it in plain `f64`, as an oracle for tests. With the feature `onnx` there is ONNX's operator
//! `Attention`, in the module `onnx`.
//!
//! Operands are strided views ([`Heads`], [`HeadsMut`]), packed sequences ([`Ragged`]) or pages ([`Paged`]) over slices of `f32`,
//! [`half::f16`] or [`half::bf16`]. All functions are safe; bad input gives an [`Error`] before anything is written.
//!
//! What every path promises (masks that combine, rows that see nothing, NaN that stays where it is, bits that do not depend on
//! threads) is in the README, sentence by sentence a test of the same name in `tests/contract`.
//!
//! ```
//! use polyhead::{Diagonal, Heads, HeadsMut, Options, multi_head};
//! let (q, kv) = (vec![0.1f32; 8 * 100 * 64], vec![0.2f32; 2 * 100 * 64]);
//! let mut out = vec![0.0f32; q.len()];
//! let kv = Heads::bshd(&kv, [1, 100, 2, 64])?; // (batch, seq, heads, dim) in memory, 2 KV heads for 8 query heads
//! let q = Heads::bhsd(&q, [1, 8, 100, 64])?;
//! multi_head(&q, &kv, &kv, HeadsMut::bhsd(&mut out, [1, 8, 100, 64])?, &Options::new().causal(Diagonal::TopLeft))?;
//! assert!(out.iter().all(|x| (x - 0.2).abs() < 1e-6));
//! # Ok::<(), polyhead::Error>(())
//! ```

/// The README's example, compiled and run by the doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod arch;
pub mod attention;
mod band;
pub mod cache;
mod element;
mod error;
pub mod gemm;
mod kernel;
pub mod layer;
mod level;
mod mask;
mod multi_head;
#[cfg(feature = "onnx")]
pub mod onnx;
mod options;
mod parallel;
#[doc(hidden)]
pub mod probe;
mod problem;
pub mod reference;
pub mod softmax;
mod view;
mod workspace;

pub use element::Element;
pub use error::{Error, Result};
pub use level::Level;
pub use mask::{Bias, Diagonal, Mask, Window, alibi_slopes};
pub use multi_head::{Explanation, MultiHead, Outputs, Shape, multi_head, multi_head_with};
pub use options::{Options, Precision};
pub use view::{Heads, HeadsMut, Matrices, MatricesMut, Matrix, MatrixMut, Paged, Ragged, Sequences, View, ViewMut};
