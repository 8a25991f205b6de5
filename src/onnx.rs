//! ONNX's operator `Attention`, opsets 23 to 25, for runtimes: attributes, inputs and outputs by ONNX's names, the work done by
//! [`multi_head_with`](crate::multi_head_with). Needs the feature `onnx`.
//!
//! [`Attention`] has the attributes, [`Inputs`] and [`Outputs`] the tensors of a node, three or four axes each, with any strides.
//! All 93 backend tests of `onnx` 1.23.2 pass, at their own tolerances: `tests/onnx`.
//!
//! ```
//! use polyhead::onnx::{Attention, Inputs, Outputs, Tensor, TensorMut};
//! // (batch, seq, heads * dim): a step of decoding with 4 query heads on 2 KV heads of 8, behind 3 cached tokens.
//! let (q, k, v) = ([0.1f32; 4 * 8], [0.2f32; 2 * 8], [0.3f32; 2 * 8]);
//! let (past_key, past_value) = ([0.2f32; 2 * 3 * 8], [0.3f32; 2 * 3 * 8]);
//! let mut inputs = Inputs::new(
//!     Tensor::new(&q, &[1, 1, 32])?,
//!     Tensor::new(&k, &[1, 1, 16])?,
//!     Tensor::new(&v, &[1, 1, 16])?,
//! );
//! inputs.past_key = Some(Tensor::new(&past_key, &[1, 2, 3, 8])?);
//! inputs.past_value = Some(Tensor::new(&past_value, &[1, 2, 3, 8])?);
//!
//! let attention = Attention::new().is_causal(true).q_num_heads(4).kv_num_heads(2);
//! let shapes = attention.output_shapes(&inputs)?;
//! assert_eq!((&shapes.y[..], shapes.present_key), (&[1, 1, 32][..], [1, 2, 4, 8]));
//! let (mut y, mut present_key, mut present_value) = ([0.0; 32], [0.0; 64], [0.0; 64]);
//! let mut outputs = Outputs::new(TensorMut::new(&mut y, &shapes.y)?);
//! outputs.present_key = Some(TensorMut::new(&mut present_key, &shapes.present_key)?);
//! outputs.present_value = Some(TensorMut::new(&mut present_value, &shapes.present_value)?);
//! attention.run(&inputs, outputs)?;
//! assert!(y.iter().all(|y| (y - 0.3).abs() < 1e-6));
//! assert_eq!((present_key, present_value), ([0.2; 64], [0.3; 64]));
//! # Ok::<(), polyhead::Error>(())
//! ```
//!
//! # What is computed, and in which precision
//!
//! Scores, softmax and sums are in `f32` for every element type, products of 16-bit operands exact, and a result is rounded once to
//! its type. That is at least what `softmax_precision` of FLOAT, FLOAT16 or BFLOAT16 asks for; DOUBLE is computed so too. `scale` is
//! applied to the product, except for `qk_matmul_output` in the modes 0 to 2: there Q and K are scaled by its root and
//! rounded, as ONNX has it. `f64` tensors are not supported.
//!
//! A query that may see no key gives zeros in `Y` and in mode 3. What K and V hold at hidden keys, NaN included, has no effect; where a key
//! is hidden, mode 2 gives -inf and mode 3 gives 0.
//!
//! # What is copied
//!
//! Nothing but this: keys and values into `present_key` and `present_value` (with a past, the attention then reads them there; with a past
//! and no present outputs, into memory of the call's own); the elements of an f16 or bf16 mask, not broadcast, to `f32`;
//! and, if `qk_matmul_output` is asked for, the scores of one KV head (modes 0 to 2) or all probabilities (mode 3) in `f32`.
//! A cache that is not copied in every step is one outside of the operator, with `nonpad_kv_seqlen`.

mod check;
mod mask;
mod operands;
mod run;
mod scores;
mod tensor;

pub use operands::{Inputs, OutputShapes, Outputs};
pub use tensor::{AttnMask, Tensor, TensorMut};

use crate::{Element, Level, Result};
use check::Call;

/// The operator's attributes, with ONNX's names, meanings and defaults. What they may be is checked by [`run`](Self::run).
///
/// ```
/// use polyhead::onnx::{Attention, AttnMask, Inputs, Outputs, Tensor, TensorMut};
/// let (q, kv) = ([1.0f32; 2 * 3 * 4], [0.5f32; 5 * 4]);
/// let kv = Tensor::new(&kv, &[1, 1, 5, 4])?;
/// let mut inputs = Inputs::new(Tensor::new(&q, &[1, 2, 3, 4])?, kv, kv);
/// let mask = [true, true, false, true, true];
/// inputs.attn_mask = Some(Tensor::new(&mask, &[1, 5])?.into());
/// let mut y = [0.0f32; 2 * 3 * 4];
/// let attention = Attention::new().left_window_size(1).right_window_size(1).softcap(30.0);
/// attention.run(&inputs, Outputs::new(TensorMut::new(&mut y, &[1, 2, 3, 4])?))?;
/// assert_eq!(y, [0.5; 24]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    opset: i64,
    is_causal: bool,
    scale: Option<f32>,
    q_num_heads: Option<i64>,
    kv_num_heads: Option<i64>,
    softcap: f32,
    softmax_precision: Option<i64>,
    qk_matmul_output_mode: i64,
    left_window_size: i64,
    right_window_size: i64,
    level: Option<Level>,
}

impl Default for Attention {
    fn default() -> Self {
        Self {
            opset: 25,
            is_causal: false,
            scale: None,
            q_num_heads: None,
            kv_num_heads: None,
            softcap: 0.0,
            softmax_precision: None,
            qk_matmul_output_mode: 0,
            left_window_size: -1,
            right_window_size: -1,
            level: None,
        }
    }
}

impl Attention {
    /// All attributes at their defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The model's opset, 23 or more; by default 25. It makes two differences: opset 23 broadcasts a mask whose last axis is 1, later
    /// ones pad every mask that is shorter than the keys; and from 25 on the numbers of heads must not be given with four axes.
    pub fn opset(mut self, opset: i64) -> Self {
        self.opset = opset;
        self
    }

    /// A query sees no key after its own position, which is its index plus the number of cached tokens (`past_key`, or
    /// `nonpad_kv_seqlen` less the queries).
    pub fn is_causal(mut self, is_causal: bool) -> Self {
        self.is_causal = is_causal;
        self
    }

    /// Factor of the scores, finite and not negative; by default `1 / sqrt(head_size)`.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Heads of Q, which three axes do not tell.
    pub fn q_num_heads(mut self, heads: i64) -> Self {
        self.q_num_heads = Some(heads);
        self
    }

    /// Heads of K and V, which three axes do not tell; divides `q_num_heads`.
    pub fn kv_num_heads(mut self, heads: i64) -> Self {
        self.kv_num_heads = Some(heads);
        self
    }

    /// Scores become `softcap * tanh(score / softcap)`, before the mask; 0 is none.
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = softcap;
        self
    }

    /// A `TensorProto.DataType`: 1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16). Checked, and without effect: see the
    /// [module](self).
    pub fn softmax_precision(mut self, data_type: i64) -> Self {
        self.softmax_precision = Some(data_type);
        self
    }

    /// What `qk_matmul_output` is: 0 the scaled products, 1 after the softcap, 2 after mask, causality and windows, 3 after softmax.
    pub fn qk_matmul_output_mode(mut self, mode: i64) -> Self {
        self.qk_matmul_output_mode = mode;
        self
    }

    /// Keys before a query's own position that it sees, or -1 for all.
    pub fn left_window_size(mut self, size: i64) -> Self {
        self.left_window_size = size;
        self
    }

    /// Keys after a query's own position that it sees, or -1 for all.
    pub fn right_window_size(mut self, size: i64) -> Self {
        self.right_window_size = size;
        self
    }

    /// Runs on this level instead of the best one. (Not an attribute of ONNX.)
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// Shapes of all outputs: those that are wanted must have them.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn output_shapes<T1: Element, T2: Element>(&self, inputs: &Inputs<'_, T1, T2>) -> Result<OutputShapes> {
        Call::check(self, inputs)?.output_shapes()
    }

    /// Computes the outputs, on the rayon pool the caller is in.
    ///
    /// # Errors
    /// Before anything is written: [`Error::Value`](crate::Error::Value) for an attribute, a number of heads or an element of
    /// `nonpad_kv_seqlen` that is not allowed; [`Error::Rank`](crate::Error::Rank), [`Error::Shape`](crate::Error::Shape) and
    /// [`Error::HeadGroups`](crate::Error::HeadGroups) for tensors that do not fit each other, among them a mask that is longer than the
    /// keys or shorter than an element of `nonpad_kv_seqlen`; [`Error::Missing`](crate::Error::Missing) for one of two that go
    /// together, [`Error::Conflict`](crate::Error::Conflict) for two that do not; the other errors of
    /// [`multi_head`](crate::multi_head). Only [`Error::Memory`](crate::Error::Memory) may come when the present outputs are written.
    pub fn run<T1: Element, T2: Element>(
        &self,
        inputs: &Inputs<'_, T1, T2>,
        outputs: Outputs<'_, T1, T2>,
    ) -> Result<()> {
        let call = Call::check(self, inputs)?;
        call.check_outputs(&outputs)?;
        run::run(self, &call, inputs, outputs)
    }
}
