//! The data: tests/data/minilm_heads, embedded.

use std::error::Error;

use safetensors::{Dtype, SafeTensors};

const TENSORS: &[u8] = include_bytes!("../../tests/data/minilm_heads.safetensors");
const ABOUT: &str = include_str!("../../tests/data/minilm_heads.json");

/// One attention layer of all-MiniLM-L6-v2 at work on a batch of padded sentences.
pub(crate) struct MiniLm {
    pub(crate) layer: u64,
    pub(crate) sentences: Vec<String>,
    /// Word pieces of each sentence, as many as its length.
    pub(crate) tokens: Vec<Vec<String>>,
    pub(crate) lengths: Vec<usize>,
    pub(crate) batch: usize,
    pub(crate) seqlen: usize,
    pub(crate) num_heads: usize,
    /// All heads of a token together.
    pub(crate) width: usize,
    /// Queries, keys, values and PyTorch's output, (batch, seqlen, width).
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) expected: Vec<f32>,
}

impl MiniLm {
    pub(crate) fn load() -> Result<Self, Box<dyn Error>> {
        let tensors = SafeTensors::deserialize(TENSORS)?;
        let about: serde_json::Value = serde_json::from_str(ABOUT)?;
        let &[batch, num_heads, seqlen, head_dim] = tensors.tensor("q")?.shape() else {
            return Err("q has not four axes".into());
        };
        let width = num_heads * head_dim;
        let read = |name: &str| -> Result<Vec<f32>, Box<dyn Error>> {
            let packed = numbers(&tensors, name, Dtype::F32, f32::from_le_bytes)?;
            Ok(tokens_first(&packed, [batch, num_heads, seqlen, head_dim]))
        };
        let lengths = numbers(&tensors, "lengths", Dtype::I32, i32::from_le_bytes)?;
        Ok(Self {
            layer: about["layer"].as_u64().ok_or("no layer")?,
            sentences: serde_json::from_value(about["sentences"].clone())?,
            tokens: serde_json::from_value(about["tokens"].clone())?,
            lengths: lengths.into_iter().map(usize::try_from).collect::<Result<_, _>>()?,
            batch,
            seqlen,
            num_heads,
            width,
            q: read("q")?,
            k: read("k")?,
            v: read("v")?,
            expected: read("output")?,
        })
    }
}

/// Elements of a tensor of this type.
pub(crate) fn numbers<T>(
    tensors: &SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    convert: impl Fn([u8; 4]) -> T,
) -> Result<Vec<T>, Box<dyn Error>> {
    let tensor = tensors.tensor(name)?;
    if tensor.dtype() != dtype {
        return Err(format!("{name} is {:?}, not {dtype:?}", tensor.dtype()).into());
    }
    let (elements, _) = tensor.data().as_chunks::<4>();
    Ok(elements.iter().map(|&bytes| convert(bytes)).collect())
}

/// From (batch, heads, seq, dim) to (batch, seq, heads, dim), the order in which a projection gives them.
fn tokens_first(packed: &[f32], [batch, heads, seq, dim]: [usize; 4]) -> Vec<f32> {
    let mut tokens_first = Vec::with_capacity(packed.len());
    for row in 0..batch * seq * heads {
        let (item, token, head) = (row / heads / seq, row / heads % seq, row % heads);
        tokens_first.extend_from_slice(&packed[((item * heads + head) * seq + token) * dim..][..dim]);
    }
    tokens_first
}
