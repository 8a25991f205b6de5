//! PyTorch's `nn.MultiheadAttention` in 34 cases and its documentation's example; Keras' layers in 11. Outputs and weights to
//! 1e-5 of the largest.

use polyhead::layer::{Config, Inputs, MultiHeadAttention, StateDict, Tensor as Weight};
use polyhead::{Bias, Diagonal, Mask, Matrices, Options, View};
use safetensors::Dtype;
use serde_json::Value;

use crate::support::{Golden, Tensor, assert_all_close, levels, max_abs};

const TOLERANCE: f64 = 1e-5;

fn size(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap_or_else(|| panic!("{key} is a size")).try_into().expect("64 bits")
}

fn flag(case: &Value, key: &str) -> bool {
    case[key].as_bool().unwrap_or_else(|| panic!("{key} is a flag"))
}

/// The tensors of a case under a prefix, without it.
fn state(golden: &Golden, case: &Value, prefix: &str) -> StateDict<f32> {
    let mut state = StateDict::new();
    for name in case["tensors"].as_object().expect("tensors").keys() {
        if let Some(short) = name.strip_prefix(prefix) {
            let Tensor { shape, data } = golden.f32(&format!("{}/{name}", case["name"].as_str().expect("a name")));
            state.insert(short, Weight { shape, data });
        }
    }
    state
}

/// A mask of two or three axes (the first of them batch * heads), or of keys.
enum Masking {
    Bool(Tensor<bool>),
    Float(Tensor<f32>),
}

impl Masking {
    fn load(golden: &Golden, key: &str) -> Option<Self> {
        match golden.dtype(key)? {
            Dtype::U8 => Some(Self::Bool(golden.bool(key))),
            Dtype::F32 => Some(Self::Float(golden.f32(key))),
            other => panic!("{key} is {other:?}"),
        }
    }

    fn attention<'a>(&'a self, options: Options<'a>, num_heads: usize) -> Options<'a> {
        fn view<T: Copy>(tensor: &Tensor<T>, num_heads: usize) -> View<'_, T, 4> {
            let [planes, rows, columns] = tensor.shape();
            let planes = Matrices::contiguous(&tensor.data, [planes, rows, columns]).expect("packed");
            planes.per_head(if tensor.shape.len() == 2 { 1 } else { num_heads }).expect("batch * heads")
        }
        match self {
            Self::Bool(mask) => options.mask(Mask::ignore(view(mask, num_heads)).expect("four axes")),
            Self::Float(bias) => options.bias(Bias::new(view(bias, num_heads)).expect("four axes")),
        }
    }

    fn keys<'a>(&'a self, options: Options<'a>) -> Options<'a> {
        match self {
            Self::Bool(mask) => {
                options.and_mask(Mask::ignore_keys(View::contiguous(&mask.data, mask.shape()).expect("packed")))
            }
            Self::Float(bias) => {
                options.and_bias(Bias::of_keys(View::contiguous(&bias.data, bias.shape()).expect("packed")))
            }
        }
    }
}

/// Tokens in the layout of the case, as (batch, seq, dim).
fn tokens<'a>(tensor: &'a Tensor<f32>, case: &Value) -> Matrices<'a, f32> {
    let batched = !case["batch"].is_null();
    if batched && !flag(case, "batch_first") {
        Matrices::sequence_first(&tensor.data, tensor.shape()).expect("packed")
    } else {
        Matrices::contiguous(&tensor.data, tensor.shape()).expect("packed")
    }
}

fn elements(view: Matrices<'_, f32>) -> Vec<f32> {
    let [batch, seq, dim] = view.shape();
    let index = |i: usize| [i / dim / seq, i / dim % seq, i % dim];
    (0..batch * seq * dim).map(|i| view.get(index(i)).expect("inside")).collect()
}

fn check_torch(golden: &Golden, case: &Value) {
    let name = case["name"].as_str().expect("a name");
    let key = |tensor: &str| format!("{name}/{tensor}");
    let num_heads = size(case, "num_heads");
    let config = Config::new(size(case, "embed_dim"), num_heads).kdim(size(case, "kdim")).vdim(size(case, "vdim"));
    let config = config.add_zero_attn(flag(case, "add_zero_attn"));
    let state = state(golden, case, "state.");
    let query = golden.f32(&key("query"));
    let others = (!flag(case, "self_attention")).then(|| [golden.f32(&key("key")), golden.f32(&key("value"))]);
    let inputs = match &others {
        None => Inputs::self_attention(tokens(&query, case)),
        Some([k, v]) => Inputs::new(tokens(&query, case), tokens(k, case), tokens(v, case)),
    };
    let masks = [Masking::load(golden, &key("attn_mask")), Masking::load(golden, &key("key_padding_mask"))];
    let mut options = Options::new();
    if let Some(mask) = &masks[0] {
        options = mask.attention(options, num_heads);
    }
    if let Some(mask) = &masks[1] {
        options = mask.keys(options);
    }
    if flag(case, "is_causal") {
        options = options.causal(Diagonal::TopLeft);
    }
    let output = golden.f32(&key("output"));
    let expected = elements(tokens(&output, case));
    for &level in levels() {
        let context = format!("{name} on {}", level.name());
        let layer = MultiHeadAttention::from_state_dict(config.level(level), &state, "").expect(name);
        assert_eq!(layer.to_state_dict(""), state, "{context}");
        let out = layer.forward(&inputs, &options).expect(name);
        let close = |actual: &[f32], expected: &[f32], what: &str| {
            assert_all_close(actual, expected, TOLERANCE * max_abs(expected), 0.0, format_args!("{context}: {what}"));
        };
        close(&out, &expected, "output");
        let average = flag(case, "average_attn_weights");
        let (again, weights) = layer.forward_with_weights(&inputs, average, &options).expect(name);
        close(&again, &expected, "output with weights");
        if golden.dtype(&key("weights")).is_some() {
            close(&weights, &golden.f32(&key("weights")).data, "weights");
        } else {
            assert!(flag(case, "weights_path_is_nan"), "{context}");
            assert!(weights.iter().all(|weight| weight.is_finite()), "{context}: weights of rows without a key are 0");
        }
    }
}

#[test]
fn torch_mha_34_cases() {
    let golden = Golden::load("torch_mha");
    assert_eq!(golden.cases().len(), 34);
    golden.cases().iter().for_each(|case| check_torch(&golden, case));
}

#[test]
fn torch_documentation_example() {
    let golden = Golden::load("torch_mha_512x8");
    assert_eq!(golden.cases().len(), 1);
    check_torch(&golden, &golden.cases()[0]);
}

#[test]
fn keras_mha_11_cases() {
    let golden = Golden::load("keras_mha");
    assert_eq!(golden.cases().len(), 11);
    for case in golden.cases() {
        let name = case["name"].as_str().expect("a name");
        let key = |tensor: &str| format!("{name}/{tensor}");
        let [query, k, v, output, scores] =
            ["query", "key", "value", "output", "attention_scores"].map(|tensor| golden.f32(&key(tensor)));
        let batch_first = |tensor| {
            let Tensor { data, .. }: &Tensor<f32> = tensor;
            Matrices::contiguous(data, tensor.shape()).expect("packed")
        };
        let inputs = Inputs::new(batch_first(&query), batch_first(&k), batch_first(&v));
        let mask = golden.dtype(&key("attention_mask")).map(|_| golden.bool(&key("attention_mask")));
        let mut options = Options::new();
        if let Some(mask) = &mask {
            let [batch, rows, columns] = mask.shape();
            let view = View::contiguous(&mask.data, [batch, 1, rows, columns]).expect("packed");
            options = options.mask(Mask::attend(view).expect("four axes"));
        }
        if flag(case, "use_causal_mask") {
            options = options.causal(Diagonal::TopLeft);
        }
        let state = state(&golden, case, "weights.");
        for &level in levels() {
            let context = format!("{name} on {}", level.name());
            let layer = MultiHeadAttention::from_keras(&state, "", |config| config.level(level)).expect(name);
            let (out, weights) = layer.forward_with_weights(&inputs, false, &options).expect(name);
            let tolerance = |expected: &[f32]| TOLERANCE * max_abs(expected);
            assert_all_close(&out, &output.data, tolerance(&output.data), 0.0, format_args!("{context}: output"));
            assert_all_close(&weights, &scores.data, tolerance(&scores.data), 0.0, format_args!("{context}: scores"));
        }
    }
}
