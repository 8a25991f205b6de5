//! Weights under the names of PyTorch's `nn.MultiheadAttention`.

use super::config::Sizes;
use super::projections::transposed;
use super::state_dict::Reader;
use super::{Config, MultiHeadAttention, StateDict, Tensor, Weights};
use crate::{Element, Matrix, Result};

const PACKED: &str = "in_proj_weight";
const SEPARATE: [&str; 3] = ["q_proj_weight", "k_proj_weight", "v_proj_weight"];
const BIAS: &str = "in_proj_bias";

impl<T: Element> MultiHeadAttention<T> {
    /// A layer with the weights of a `state_dict` of PyTorch's `nn.MultiheadAttention`, each name behind `prefix`:
    /// `in_proj_weight`, or `q_proj_weight`, `k_proj_weight` and `v_proj_weight`; `out_proj.weight`; and if they are there
    /// `in_proj_bias`, `out_proj.bias`, `bias_k` and `bias_v`. (With heads in groups or of other widths, which PyTorch's layer has
    /// not, the rows of the packed tensors are still those of the queries, the keys, and the values.)
    ///
    /// # Errors
    /// [`Error::MissingTensor`](crate::Error::MissingTensor), [`Error::TensorShape`](crate::Error::TensorShape), or
    /// [`Error::UnexpectedTensor`](crate::Error::UnexpectedTensor) for any other tensor under the prefix; and as
    /// [`new`](Self::new).
    pub fn from_state_dict(config: Config, state: &StateDict<T>, prefix: &str) -> Result<Self> {
        let sizes = config.sizes()?;
        let Sizes { embed_dim, kdim, vdim, output_dim, num_heads, .. } = sizes;
        let ([q, k, v], concat) = (sizes.widths(), sizes.concat());
        let inputs = [embed_dim, kdim, vdim];
        let mut reader = Reader::new(state, prefix);
        let separate = SEPARATE.iter().any(|name| reader.has(name)) && !reader.has(PACKED);
        let rows: [&[T]; 3] = if separate || inputs != [embed_dim; 3] {
            let [query, key, value] = SEPARATE;
            [reader.tensor(query, &[q, embed_dim])?, reader.tensor(key, &[k, kdim])?, reader.tensor(value, &[v, vdim])?]
        } else {
            let packed = reader.tensor(PACKED, &[q + k + v, embed_dim])?;
            let (query, rest) = packed.split_at(q * embed_dim);
            let (key, value) = rest.split_at(k * embed_dim);
            [query, key, value]
        };
        let [query, key, value] = [(rows[0], [q, embed_dim]), (rows[1], [k, kdim]), (rows[2], [v, vdim])]
            .map(|(rows, shape)| Matrix::contiguous(rows, shape));
        let output =
            Matrix::contiguous(reader.tensor("out_proj.weight", &[output_dim, concat])?, [output_dim, concat])?;
        let mut weights = Weights::new(query?, key?, value?, output);
        let bias = if reader.has(BIAS) { Some(reader.tensor(BIAS, &[q + k + v])?) } else { None };
        let part = |from: usize, len: usize| bias.map(|bias| &bias[from..][..len]);
        let (query, key, value) = (part(0, q), part(q, k), part(q + k, v));
        let name = "out_proj.bias";
        let output = if reader.has(name) { Some(reader.tensor(name, &[output_dim])?) } else { None };
        weights = weights.biases(query, key, value, output);
        if reader.has("bias_k") || reader.has("bias_v") {
            weights = weights.bias_kv(reader.tensor("bias_k", &[1, 1, k])?, reader.tensor("bias_v", &[1, 1, v])?);
        }
        if reader.has("sinks") {
            weights = weights.sinks(reader.tensor("sinks", &[num_heads])?);
        }
        reader.finish()?;
        Self::new(config, &weights)
    }

    /// The weights as PyTorch's `state_dict` names them, behind `prefix`; exactly those that were given. (Sinks, which PyTorch's
    /// layer has not, are named `sinks`; a bias that only some of queries, keys and values have is 0 for the others.)
    pub fn to_state_dict(&self, prefix: &str) -> StateDict<T> {
        let mut state = StateDict::new();
        let mut put = |name: &str, shape: Vec<usize>, data: Vec<T>| {
            state.insert(format!("{prefix}{name}"), Tensor { shape, data });
        };
        let Sizes { embed_dim, kdim, vdim, output_dim, num_heads, .. } = self.sizes;
        let (widths, inputs) = (self.sizes.widths(), [embed_dim, kdim, vdim]);
        let parts = [0, 1, 2].map(|part| self.projections.part(part));
        let narrowed = |from: &[f32]| from.iter().map(|&x| T::from_f32_nearest(x)).collect::<Vec<T>>();
        if parts.iter().any(|(_, bias)| bias.is_some()) {
            let bias = parts
                .iter()
                .zip(widths)
                .flat_map(|((_, bias), width)| bias.clone().unwrap_or_else(|| vec![T::default(); width]));
            put(BIAS, vec![widths.iter().sum()], bias.collect());
        }
        if inputs == [embed_dim; 3] {
            let rows = parts.into_iter().flat_map(|(rows, _)| rows).collect();
            put(PACKED, vec![widths.iter().sum(), embed_dim], rows);
        } else {
            for (i, (rows, _)) in parts.into_iter().enumerate() {
                put(SEPARATE[i], vec![widths[i], inputs[i]], rows);
            }
        }
        put("out_proj.weight", vec![output_dim, self.sizes.concat()], transposed(&self.output, 0..output_dim));
        if let Some(bias) = &self.output_bias {
            put("out_proj.bias", vec![output_dim], narrowed(bias));
        }
        if let Some([key, value]) = &self.bias_kv {
            put("bias_k", vec![1, 1, key.len()], narrowed(key));
            put("bias_v", vec![1, 1, value.len()], narrowed(value));
        }
        if let Some(sinks) = &self.sinks {
            put("sinks", vec![num_heads], narrowed(sinks));
        }
        state
    }
}
