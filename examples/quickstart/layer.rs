//! The example of PyTorch's documentation, `nn.MultiheadAttention(embed_dim=512, num_heads=8)` on (10, 32, 512): with PyTorch's
//! weights, against PyTorch's output. tests/data/torch_mha_512x8, embedded.

use std::error::Error;
use std::time::{Duration, Instant};

use polyhead::layer::{Config, Inputs, MultiHeadAttention, Outputs, StateDict, Tensor, Workspace};
use polyhead::{Matrices, MatricesMut, Options};
use safetensors::{Dtype, SafeTensors};

use crate::minilm::numbers;
use crate::{check, median};

const TENSORS: &[u8] = include_bytes!("../../tests/data/torch_mha_512x8.safetensors");
const PREFIX: &str = "documentation_example/";
const REPEATS: usize = 50;

pub(crate) fn show() -> Result<(), Box<dyn Error>> {
    let tensors = SafeTensors::deserialize(TENSORS)?;
    let read = |name: &str| numbers(&tensors, name, Dtype::F32, f32::from_le_bytes);
    let mut state = StateDict::new();
    let prefix = format!("{PREFIX}state.");
    for name in tensors.names().into_iter().filter(|name| name.starts_with(&prefix)) {
        state.insert(name, Tensor { shape: tensors.tensor(name)?.shape().to_vec(), data: read(name)? });
    }
    let layer = MultiHeadAttention::from_state_dict(Config::new(512, 8), &state, &prefix)?;

    // Without `batch_first`, as in the documentation: (sequence, batch, embedding).
    let shape = [10, 32, 512];
    let [query, key, value, expected] =
        ["query", "key", "value", "output"].map(|name| read(&format!("{PREFIX}{name}")));
    let (query, key, value, expected) = (query?, key?, value?, expected?);
    let tokens = |data| Matrices::sequence_first(data, shape);
    let inputs = Inputs::new(tokens(&query)?, tokens(&key)?, tokens(&value)?);
    let mut out = vec![0.0f32; expected.len()];
    let mut workspace = Workspace::new();
    let mut times = [Duration::ZERO; REPEATS];
    for time in &mut times {
        let start = Instant::now();
        let outputs = Outputs::new(MatricesMut::sequence_first(&mut out, shape)?);
        layer.forward_into(&inputs, outputs, &Options::new(), &mut workspace)?;
        *time = start.elapsed();
    }
    println!("nn.MultiheadAttention(512, 8) on (10, 32, 512), with PyTorch's weights");
    check(&out, &expected)?;
    println!(
        "layer: {:.0} us (median of {REPEATS}) on {}\n",
        median(&mut times).as_secs_f64() * 1e6,
        layer.level().name()
    );
    Ok(())
}
