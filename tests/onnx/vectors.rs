//! The 93 backend tests of `onnx` 1.23.2, as `tests/data/generate_onnx.py` wrote them down, at their own tolerances.

use std::collections::BTreeMap;

use half::{bf16, f16};
use polyhead::Level;
use polyhead::onnx::{Attention, AttnMask, Inputs, Outputs, Tensor, TensorMut};
use safetensors::Dtype;
use serde_json::Value;

use crate::support::{self, Bits, Golden, is_close, levels};

/// Backend tests of each opset.
const COUNTS: [(i64, usize); 3] = [(23, 69), (24, 13), (25, 11)];

/// An element type of Q, K and V, and how far from the expected a result may be: numpy's `assert_allclose` with the suite's `rtol`
/// and `atol`. Of bfloat16 the suite's runner allows two units in the last place (`backend/test/runner`).
trait Type: Bits {
    const RTOL: f64 = 1e-3;
    fn read(golden: &Golden, key: &str) -> support::Tensor<Self>;
}
const ATOL: f64 = 1e-7;

impl Type for f32 {
    fn read(golden: &Golden, key: &str) -> support::Tensor<Self> {
        golden.f32(key)
    }
}
impl Type for f16 {
    fn read(golden: &Golden, key: &str) -> support::Tensor<Self> {
        golden.f16(key)
    }
}
impl Type for bf16 {
    const RTOL: f64 = 1.0 / 64.0;
    fn read(golden: &Golden, key: &str) -> support::Tensor<Self> {
        golden.bf16(key)
    }
}

fn tensor<T: Copy>(tensor: &support::Tensor<T>) -> Tensor<'_, T> {
    Tensor::new(&tensor.data, &tensor.shape).expect("a packed tensor")
}

/// A mask of any type.
enum Mask {
    Bool(support::Tensor<bool>),
    F32(support::Tensor<f32>),
    F16(support::Tensor<f16>),
    Bf16(support::Tensor<bf16>),
}

impl Mask {
    fn read(golden: &Golden, key: &str) -> Option<Self> {
        golden.dtype(key).map(|dtype| match dtype {
            Dtype::U8 => Self::Bool(golden.bool(key)),
            Dtype::F32 => Self::F32(golden.f32(key)),
            Dtype::F16 => Self::F16(golden.f16(key)),
            Dtype::BF16 => Self::Bf16(golden.bf16(key)),
            other => panic!("{key} is {other:?}"),
        })
    }

    fn as_attn_mask(&self) -> AttnMask<'_> {
        match self {
            Self::Bool(mask) => tensor(mask).into(),
            Self::F32(mask) => tensor(mask).into(),
            Self::F16(mask) => tensor(mask).into(),
            Self::Bf16(mask) => tensor(mask).into(),
        }
    }
}

fn attention(case: &Value) -> Attention {
    let mut attention = Attention::new().opset(case["opset"].as_i64().expect("an opset"));
    for (name, value) in case["attributes"].as_object().expect("attributes") {
        let integer = || value.as_i64().unwrap_or_else(|| panic!("{name} is {value}"));
        let float = || value.as_f64().unwrap_or_else(|| panic!("{name} is {value}")) as f32;
        attention = match name.as_str() {
            "is_causal" => attention.is_causal(integer() != 0),
            "scale" => attention.scale(float()),
            "softcap" => attention.softcap(float()),
            "q_num_heads" => attention.q_num_heads(integer()),
            "kv_num_heads" => attention.kv_num_heads(integer()),
            "softmax_precision" => attention.softmax_precision(integer()),
            "qk_matmul_output_mode" => attention.qk_matmul_output_mode(integer()),
            "left_window_size" => attention.left_window_size(integer()),
            "right_window_size" => attention.right_window_size(integer()),
            other => panic!("attribute {other}"),
        };
    }
    attention
}

/// An output of the node: memory that nothing has been written to, and what should be written.
struct Output<T> {
    name: &'static str,
    data: Vec<T>,
    expected: support::Tensor<T>,
}

impl<T: Type> Output<T> {
    fn new(golden: &Golden, case: &str, name: &'static str) -> Option<Self> {
        let key = format!("{case}/{name}");
        golden.dtype(&key)?;
        let expected = T::read(golden, &key);
        Some(Self { name, data: vec![T::OUTPUT; expected.data.len()], expected })
    }

    fn view(&mut self) -> TensorMut<'_, T> {
        TensorMut::new(&mut self.data, &self.expected.shape).expect("a packed tensor")
    }

    fn check(&self) -> Result<(), String> {
        for (i, (&is, &expected)) in self.data.iter().zip(&self.expected.data).enumerate() {
            if !is_close(is.to_f32(), expected.to_f32(), ATOL, T::RTOL) {
                return Err(format!("{}[{i}] is {is:?} instead of {expected:?}", self.name));
            }
        }
        Ok(())
    }
}

fn run<T: Type>(golden: &Golden, case: &Value, level: Level) -> Result<(), String> {
    let name = case["name"].as_str().expect("a name");
    let optional = |input: &str| {
        let key = format!("{name}/{input}");
        golden.dtype(&key).map(|_| T::read(golden, &key))
    };
    let [q, k, v] = ["Q", "K", "V"].map(|input| optional(input).expect("an input"));
    let [past_key, past_value] = ["past_key", "past_value"].map(optional);
    let mask = Mask::read(golden, &format!("{name}/attn_mask"));
    let lengths = format!("{name}/nonpad_kv_seqlen");
    let lengths = golden.dtype(&lengths).map(|_| golden.i64(&lengths));

    let mut inputs = Inputs::new(tensor(&q), tensor(&k), tensor(&v));
    inputs.attn_mask = mask.as_ref().map(Mask::as_attn_mask);
    inputs.past_key = past_key.as_ref().map(tensor);
    inputs.past_value = past_value.as_ref().map(tensor);
    inputs.nonpad_kv_seqlen = lengths.as_ref().map(|lengths| &lengths.data[..]);

    let attention = attention(case).level(level);
    let shapes = attention.output_shapes(&inputs).map_err(|error| error.to_string())?;
    let mut y = Output::<T>::new(golden, name, "Y").expect("an output");
    let [mut present_key, mut present_value, mut qk] =
        ["present_key", "present_value", "qk_matmul_output"].map(|output| Output::<T>::new(golden, name, output));
    assert_eq!(y.expected.shape, shapes.y, "{name}");
    let mut outputs = Outputs::new(y.view());
    outputs.present_key = present_key.as_mut().map(Output::view);
    outputs.present_value = present_value.as_mut().map(Output::view);
    outputs.qk_matmul_output = qk.as_mut().map(Output::view);
    attention.run(&inputs, outputs).map_err(|error| error.to_string())?;
    for output in [Some(y), present_key, present_value, qk].iter().flatten() {
        output.check()?;
    }
    Ok(())
}

#[test]
fn all_93_backend_tests_pass() {
    let golden = Golden::load("onnx_attention");
    assert_eq!(golden.json["onnx"], "1.23.2");
    for &level in levels() {
        let (mut passed, mut failed, mut names) = (BTreeMap::<i64, usize>::new(), Vec::new(), BTreeMap::new());
        for case in golden.cases() {
            let name = case["name"].as_str().expect("a name");
            assert_eq!(names.insert(name, ()), None, "{name} is there twice");
            let result = match golden.dtype(&format!("{name}/Q")) {
                Some(Dtype::F32) => run::<f32>(&golden, case, level),
                Some(Dtype::F16) => run::<f16>(&golden, case, level),
                Some(Dtype::BF16) => run::<bf16>(&golden, case, level),
                other => panic!("{name}: Q is {other:?}"),
            };
            match result {
                Ok(()) => *passed.entry(case["opset"].as_i64().expect("an opset")).or_default() += 1,
                Err(why) => failed.push(format!("{name}: {why}")),
            }
        }
        println!("{}: {passed:?} of {COUNTS:?} pass", level.name());
        assert!(failed.is_empty(), "{} of 93 fail on {}:\n{}", failed.len(), level.name(), failed.join("\n"));
        assert_eq!(passed.into_iter().collect::<Vec<_>>(), COUNTS);
    }
}
