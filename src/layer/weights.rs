//! Weights as slices.

use crate::problem::check_shape;
use crate::{Element, Error, Matrix, Result};

use super::config::Sizes;

/// The weights of a layer, as views. A projection's weight is (outputs, inputs), PyTorch's layout; for the transpose (Keras'
/// kernels) give [`permute([1, 0])`](crate::View::permute).
///
/// ```
/// use polyhead::layer::{Config, MultiHeadAttention, Weights};
/// use polyhead::Matrix;
/// // Two heads of 4 on inputs of width 6.
/// let (w, out, bias) = ([0.1f32; 8 * 6], [0.2f32; 6 * 8], [0.0f32; 8]);
/// let (w, out) = (Matrix::contiguous(&w, [8, 6])?, Matrix::contiguous(&out, [6, 8])?);
/// let weights = Weights::new(w, w, w, out).biases(Some(&bias), Some(&bias), Some(&bias), None);
/// let layer = MultiHeadAttention::new(Config::new(6, 2).head_dim(4), &weights)?;
/// # let _ = layer;
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, T> {
    /// (num_heads * head_dim, embed_dim).
    pub(super) query: Matrix<'a, T>,
    /// (num_kv_heads * head_dim, kdim).
    pub(super) key: Matrix<'a, T>,
    /// (num_kv_heads * head_dim_v, vdim).
    pub(super) value: Matrix<'a, T>,
    /// (output_dim, num_heads * head_dim_v).
    pub(super) output: Matrix<'a, T>,
    /// Of query, key, value, output.
    pub(super) biases: [Option<&'a [T]>; 4],
    pub(super) bias_kv: Option<[&'a [T]; 2]>,
    pub(super) sinks: Option<&'a [T]>,
}

impl<'a, T: Element> Weights<'a, T> {
    /// Projections without biases: `query` (num_heads * head_dim, embed_dim), `key` (num_kv_heads * head_dim, kdim), `value`
    /// (num_kv_heads * head_dim_v, vdim), `output` (output_dim, num_heads * head_dim_v).
    pub fn new(query: Matrix<'a, T>, key: Matrix<'a, T>, value: Matrix<'a, T>, output: Matrix<'a, T>) -> Self {
        Self { query, key, value, output, biases: [None; 4], bias_kv: None, sinks: None }
    }

    /// Biases of the four projections, each as long as its weight has rows.
    pub fn biases(
        mut self,
        query: Option<&'a [T]>,
        key: Option<&'a [T]>,
        value: Option<&'a [T]>,
        output: Option<&'a [T]>,
    ) -> Self {
        self.biases = [query, key, value, output];
        self
    }

    /// PyTorch's `bias_k` and `bias_v` (`add_bias_kv`): one more key and value of every sequence, which every query sees. As long
    /// as a projected key, and a projected value.
    pub fn bias_kv(mut self, key: &'a [T], value: &'a [T]) -> Self {
        self.bias_kv = Some([key, value]);
        self
    }

    /// A learned sink logit for each query head, as [`Options::sinks`](crate::Options::sinks).
    pub fn sinks(mut self, sinks: &'a [T]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    pub(super) fn check(&self, sizes: &Sizes) -> Result<()> {
        let ([q, k, v], concat) = (sizes.widths(), sizes.concat());
        let matrices = [
            ("query weight", self.query, [q, sizes.embed_dim]),
            ("key weight", self.key, [k, sizes.kdim]),
            ("value weight", self.value, [v, sizes.vdim]),
            ("output weight", self.output, [sizes.output_dim, concat]),
        ];
        for (operand, matrix, shape) in matrices {
            check_shape(operand, shape, matrix.shape(), ["row", "column"])?;
        }
        let [key, value] = self.bias_kv.map_or([None; 2], |kv| kv.map(Some));
        let vectors = [
            ("query bias", self.biases[0], q),
            ("key bias", self.biases[1], k),
            ("value bias", self.biases[2], v),
            ("output bias", self.biases[3], sizes.output_dim),
            ("bias_k", key, k),
            ("bias_v", value, v),
            ("sinks", self.sinks, sizes.num_heads),
        ];
        for (operand, vector, expected) in vectors {
            if let Some(actual) = vector.map(<[T]>::len).filter(|&len| len != expected) {
                return Err(Error::Length { operand, expected, actual });
            }
        }
        Ok(())
    }
}
