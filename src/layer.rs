//! Multi-head attention as a layer of a model: projections, attention, output projection, with weights from PyTorch and Keras.
//!
//! `out = concat(heads) W_o^T + b_o`, each head [`multi_head`](crate::multi_head) of `x W_q^T + b_q`, `x W_k^T + b_k` and
//! `x W_v^T + b_v` (Vaswani et al. 2017, section 3.2.2). [`MultiHeadAttention`] is PyTorch's `nn.MultiheadAttention` in
//! evaluation mode and Keras' `MultiHeadAttention` and `GroupQueryAttention`; [`Config`] has what they do not: heads in groups,
//! free widths, sliding windows, softcap, sinks, rotary embedding. [`Options`](crate::Options) of a call combine as they do in
//! [`multi_head`](crate::multi_head), masks with their polarity in the constructor's name.
//!
//! | PyTorch | here |
//! |---|---|
//! | `batch_first=True`, (N, L, E) | [`Matrices::contiguous`](crate::Matrices::contiguous)`(&x, [n, l, e])` |
//! | `batch_first=False`, (L, N, E) | [`Matrices::sequence_first`](crate::Matrices::sequence_first)`(&x, [l, n, e])` |
//! | unbatched, (L, E) | [`Matrices::contiguous`](crate::Matrices::contiguous)`(&x, [1, l, e])` |
//! | `key_padding_mask` (N, S), bool | [`Mask::ignore_keys`](crate::Mask::ignore_keys) |
//! | `key_padding_mask` (N, S), float | [`Bias::of_keys`](crate::Bias::of_keys) |
//! | `attn_mask` (L, S), bool / float | [`Mask::ignore`](crate::Mask::ignore) / [`Bias::new`](crate::Bias::new) |
//! | `attn_mask` (N * num_heads, L, S) | the same of [`per_head`](crate::Matrices::per_head)`(num_heads)` |
//! | `is_causal=True` | [`Options::causal`](crate::Options::causal)`(Diagonal::TopLeft)`, with or without masks |
//! | `need_weights`, `average_attn_weights` | [`Outputs::weights`], [`Outputs::averaged_weights`] |
//!
//! A query that may see no key gets an attention output of 0, so its row is the output projection's bias (PyTorch gives that or
//! NaN, depending on its path). There is no dropout. Rows have the bits that they have alone, whatever else is in the batch.
//!
//! Weights are packed for the kernels once, at construction. A call allocates nothing but what it returns: intermediate results
//! lie in a [`Workspace`], 4 bytes each, (tokens x widths); nothing of L x S is stored.

mod config;
mod decode;
mod extra_keys;
mod forward;
mod inputs;
mod keras;
mod projections;
mod rotary;
mod rows;
mod state_dict;
mod torch;
mod weights;
mod workspace;

pub use config::{Config, Sizes};
pub use forward::Outputs;
pub use inputs::Inputs;
pub use rotary::{Rotary, RotaryStyle};
pub use state_dict::{StateDict, Tensor};
pub use weights::Weights;
pub use workspace::Workspace;

use crate::gemm::PackedMatrix;
use crate::{Element, Level, Matrix, Result};
use projections::Projections;

/// A multi-head attention layer with weights of type `T`. See the [module](self).
///
/// ```
/// use polyhead::layer::{Config, Inputs, MultiHeadAttention, Weights};
/// use polyhead::{Diagonal, Matrices, Matrix, Options};
/// // embed_dim 8 and 2 heads, as `nn.MultiheadAttention(8, 2)`; every weight is (outputs, inputs).
/// let identity: Vec<f32> = (0..64).map(|i| if i % 9 == 0 { 1.0 } else { 0.0 }).collect();
/// let w = Matrix::contiguous(&identity, [8, 8])?;
/// let layer = MultiHeadAttention::new(Config::new(8, 2), &Weights::new(w, w, w, w))?;
/// let x = [0.5f32; 3 * 5 * 8]; // three sequences of five tokens
/// let inputs = Inputs::self_attention(Matrices::contiguous(&x, [3, 5, 8])?);
/// let out = layer.forward(&inputs, &Options::new().causal(Diagonal::TopLeft))?;
/// assert_eq!(out, x);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MultiHeadAttention<T: Element = f32> {
    config: Config,
    sizes: Sizes,
    projections: Projections<T>,
    output: PackedMatrix<T>,
    output_bias: Option<Vec<f32>>,
    /// The additional key and value of `add_bias_kv`.
    bias_kv: Option<[Vec<f32>; 2]>,
    sinks: Option<Vec<f32>>,
}

impl<T: Element> MultiHeadAttention<T> {
    /// A layer with these weights, packed for the best level there is, or for the [`Config`]'s.
    ///
    /// # Errors
    /// Those of [`Config::sizes`]; [`Error::Shape`](crate::Error::Shape) or [`Error::Length`](crate::Error::Length) for a weight
    /// that does not fit; [`Error::LevelUnavailable`](crate::Error::LevelUnavailable).
    pub fn new(config: Config, weights: &Weights<'_, T>) -> Result<Self> {
        let sizes = config.sizes()?;
        weights.check(&sizes)?;
        let widened = |from: &[T]| from.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let pack = |weight: Matrix<'_, T>| {
            PackedMatrix::new(&weight.permute([1, 0])?, config.wanted_level())?.with_tiles(config.wanted_precision())
        };
        Ok(Self {
            config,
            sizes,
            projections: Projections::new(&sizes, weights, pack)?,
            output: pack(weights.output)?,
            output_bias: weights.biases[3].map(widened),
            bias_kv: weights.bias_kv.map(|kv| kv.map(widened)),
            sinks: weights.sinks.map(widened),
        })
    }

    /// The sizes and rules it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The level that its weights are packed for, and that it runs on.
    pub fn level(&self) -> Level {
        self.output.level()
    }

    /// Keys that every sequence has besides its own: those of `add_bias_kv` and `add_zero_attn`. Attention weights have a column
    /// for each of them, behind the others.
    pub fn extra_keys(&self) -> usize {
        usize::from(self.bias_kv.is_some()) + usize::from(self.config.zero_attn())
    }
}
