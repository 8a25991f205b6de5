//! Weights under the names of Keras' `MultiHeadAttention` and `GroupQueryAttention`.

use super::state_dict::Reader;
use super::{Config, MultiHeadAttention, StateDict, Weights};
use crate::{Element, Error, Matrix, Result};

impl<T: Element> MultiHeadAttention<T> {
    /// A layer with the weights of Keras' `MultiHeadAttention` or `GroupQueryAttention`, each name behind `prefix`: `query/kernel`
    /// (inputs, num_heads, key_dim), `key/kernel`, `value/kernel` (inputs, heads, value_dim), `attention_output/kernel`
    /// (num_heads, value_dim, *output), and with `use_bias` the `bias` of each. All sizes follow from the shapes; `config` may
    /// change what is left, such as `|config| config.softcap(50.0)`.
    ///
    /// Keras' masks are [`Mask::attend`](crate::Mask::attend), `use_causal_mask` is `causal(Diagonal::TopLeft)`. An output of
    /// several axes is flattened.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], or [`Error::UnexpectedTensor`] for any other tensor under the prefix; and
    /// as [`new`](Self::new).
    ///
    /// ```
    /// use polyhead::layer::{MultiHeadAttention, StateDict, Tensor};
    /// let mut state = StateDict::new();
    /// for name in ["query/kernel", "key/kernel", "value/kernel"] {
    ///     state.insert(name, Tensor { shape: vec![6, 2, 4], data: vec![0.1f32; 6 * 2 * 4] });
    /// }
    /// state.insert("attention_output/kernel", Tensor { shape: vec![2, 4, 6], data: vec![0.1; 2 * 4 * 6] });
    /// let layer = MultiHeadAttention::from_keras(&state, "", |config| config)?;
    /// assert_eq!(layer.config().sizes()?.head_dim, 4);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn from_keras(state: &StateDict<T>, prefix: &str, config: impl FnOnce(Config) -> Config) -> Result<Self> {
        let mut reader = Reader::new(state, prefix);
        let mut kernel = |name: &str| -> Result<(&[T], [usize; 3])> {
            let tensor = reader.any(name, &[])?;
            let shape = tensor.shape.as_slice().try_into().map_err(|_| Error::TensorShape {
                name: reader.name(name),
                expected: vec![0; 3],
                actual: tensor.shape.clone(),
            });
            Ok((&tensor.data, shape?))
        };
        let (query, [embed_dim, num_heads, head_dim]) = kernel("query/kernel")?;
        let (key, [kdim, num_kv_heads, _]) = kernel("key/kernel")?;
        let (value, [vdim, _, head_dim_v]) = kernel("value/kernel")?;
        reader.tensor("key/kernel", &[kdim, num_kv_heads, head_dim])?;
        reader.tensor("value/kernel", &[vdim, num_kv_heads, head_dim_v])?;
        let name = "attention_output/kernel";
        let output = reader.any(name, &[])?;
        let Some(axes) = output.shape.strip_prefix(&[num_heads, head_dim_v]) else {
            let (expected, actual) = (vec![num_heads, head_dim_v, 0], output.shape.clone());
            return Err(Error::TensorShape { name: reader.name(name), expected, actual });
        };
        let output_dim: usize = axes.iter().product();

        let shapes =
            [vec![num_heads, head_dim], vec![num_kv_heads, head_dim], vec![num_kv_heads, head_dim_v], axes.to_vec()];
        let names = ["query/bias", "key/bias", "value/bias", "attention_output/bias"];
        let mut biases = [None; 4];
        if names.iter().any(|name| reader.has(name)) {
            for (bias, (name, shape)) in biases.iter_mut().zip(names.into_iter().zip(&shapes)) {
                *bias = Some(reader.tensor(name, shape)?);
            }
        }
        reader.finish()?;

        let outputs = |data, inputs, heads, dim| Matrix::contiguous(data, [inputs, heads * dim])?.permute([1, 0]);
        let weights = Weights::new(
            outputs(query, embed_dim, num_heads, head_dim)?,
            outputs(key, kdim, num_kv_heads, head_dim)?,
            outputs(value, vdim, num_kv_heads, head_dim_v)?,
            outputs(&output.data, num_heads * head_dim_v, 1, output_dim)?,
        );
        let [query, key, value, output] = biases;
        let sizes = Config::new(embed_dim, num_heads).num_kv_heads(num_kv_heads).head_dim(head_dim);
        let sizes = sizes.head_dim_v(head_dim_v).kdim(kdim).vdim(vdim).output_dim(output_dim);
        Self::new(config(sizes), &weights.biases(query, key, value, output))
    }
}
