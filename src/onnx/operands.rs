//! The tensors of a node.

use super::{AttnMask, Tensor, TensorMut};

/// Inputs of the operator. `T1` is the element type of queries and keys, `T2` that of values.
///
/// Operands are (batch, heads, seq, dim) or (batch, seq, heads * dim), all three alike.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Inputs<'a, T1, T2 = T1> {
    /// Queries.
    pub q: Tensor<'a, T1>,
    /// Keys.
    pub k: Tensor<'a, T1>,
    /// Values.
    pub v: Tensor<'a, T2>,
    /// Broadcast to (batch, heads, seqlen_q, total length of the keys); a last axis that is shorter hides the keys behind it.
    pub attn_mask: Option<AttnMask<'a>>,
    /// Keys before `k`: (batch, KV heads, past length, dim). With `past_value`.
    pub past_key: Option<Tensor<'a, T1>>,
    /// Values before `v`: (batch, KV heads, past length, dim of the values). With `past_key`.
    pub past_value: Option<Tensor<'a, T2>>,
    /// Keys in use of each batch item: `k` and `v` are a whole cache. Without past and present.
    pub nonpad_kv_seqlen: Option<&'a [i64]>,
}

impl<'a, T1, T2> Inputs<'a, T1, T2> {
    /// Only the inputs that there must be.
    pub fn new(q: Tensor<'a, T1>, k: Tensor<'a, T1>, v: Tensor<'a, T2>) -> Self {
        Self { q, k, v, attn_mask: None, past_key: None, past_value: None, nonpad_kv_seqlen: None }
    }
}

/// Outputs of the operator, of the shapes that [`Attention::output_shapes`](super::Attention::output_shapes) gives.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outputs<'a, T1, T2 = T1> {
    /// The output, with as many axes as the operands.
    pub y: TensorMut<'a, T1>,
    /// Past and new keys. With `present_value`.
    pub present_key: Option<TensorMut<'a, T1>>,
    /// Past and new values. With `present_key`.
    pub present_value: Option<TensorMut<'a, T2>>,
    /// Scores or probabilities, as `qk_matmul_output_mode` says.
    pub qk_matmul_output: Option<TensorMut<'a, T1>>,
}

impl<'a, T1, T2> Outputs<'a, T1, T2> {
    /// Only the output that there must be.
    pub fn new(y: TensorMut<'a, T1>) -> Self {
        Self { y, present_key: None, present_value: None, qk_matmul_output: None }
    }
}

/// Shapes of the outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutputShapes {
    /// (batch, heads, seqlen_q, dim of the values) or (batch, seqlen_q, heads * dim of the values).
    pub y: Vec<usize>,
    /// (batch, KV heads, past and new length, dim).
    pub present_key: [usize; 4],
    /// (batch, KV heads, past and new length, dim of the values).
    pub present_value: [usize; 4],
    /// (batch, heads, seqlen_q, past and new length).
    pub qk_matmul_output: [usize; 4],
}
