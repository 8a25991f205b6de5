//! What PyTorch refuses, and what it should: every error is typed, says both values, and leaves the outputs alone.

use polyhead::layer::{Config, Inputs, MultiHeadAttention, Outputs, Rotary, StateDict, Tensor, Weights, Workspace};
use polyhead::{Bias, Diagonal, Error, HeadsMut, Level, Mask, Matrices, MatricesMut, Matrix, Options, View};

use crate::naive::{Naive, Tokens, self_attention};
use crate::support::{Rng, levels};

fn shape(operand: &'static str, axis: &'static str, expected: usize, actual: usize) -> Error {
    Error::Shape { operand, axis, expected, actual }
}

fn layer() -> MultiHeadAttention<f32> {
    Naive::random([8, 6, 4, 8], [2, 2], [4, 4], &mut Rng::new(1)).layer(levels()[0])
}

fn tokens(batch: usize, seq: usize, width: usize) -> Tokens {
    Tokens { shape: [batch, seq, width], data: vec![0.5; batch * seq * width] }
}

#[test]
fn configs_that_mean_nothing() {
    let value = |option, expected, actual| Error::Value { option, expected, actual };
    // "embed_dim must be divisible by num_heads"
    let expected = "a multiple of num_heads, or head_dim given";
    assert_eq!(Config::new(10, 4).sizes(), Err(value("embed_dim", expected, 10.0)));
    assert!(Config::new(10, 4).head_dim(3).sizes().is_ok());
    // "embed_dim and num_heads must be greater than 0"
    assert_eq!(Config::new(0, 3).sizes(), Err(value("embed_dim", "at least 1", 0.0)));
    assert_eq!(Config::new(8, 0).sizes(), Err(value("num_heads", "at least 1", 0.0)));
    let groups = |num_kv_heads| Err(Error::HeadGroups { num_heads: 6, num_kv_heads });
    assert_eq!(Config::new(12, 6).num_kv_heads(4).sizes(), groups(4));
    assert_eq!(Config::new(12, 6).num_kv_heads(0).sizes(), groups(0));
    let rotary = |dim, base| Config::new(12, 2).rotary(Rotary::interleaved(dim, base)).sizes();
    assert_eq!(rotary(8, 1e4), Err(value("rotary dim", "even, at most head_dim", 8.0)));
    assert_eq!(rotary(5, 1e4), Err(value("rotary dim", "even, at most head_dim", 5.0)));
    assert_eq!(rotary(6, 0.0), Err(value("rotary base", "positive and finite", 0.0)));
    assert!(rotary(6, 1e4).is_ok());
    let huge = Config::new(12, 2).head_dim(usize::MAX / 2).sizes();
    assert!(matches!(huge, Err(Error::Overflow { operand: "heads", .. })), "{huge:?}");
}

#[test]
fn weights_that_do_not_fit() {
    let data = [0.0f32; 64];
    let matrix = |shape: [usize; 2]| Matrix::contiguous(&data[..shape[0] * shape[1]], shape).unwrap();
    let good = [matrix([8, 8]); 4];
    let new =
        |w: [Matrix<'_, f32>; 4]| MultiHeadAttention::new(Config::new(8, 2), &Weights::new(w[0], w[1], w[2], w[3]));
    assert!(new(good).is_ok());
    for (i, operand) in ["query weight", "key weight", "value weight", "output weight"].into_iter().enumerate() {
        let mut wrong = good;
        wrong[i] = matrix([7, 8]);
        assert_eq!(new(wrong).unwrap_err(), shape(operand, "row", 8, 7));
        wrong[i] = matrix([8, 7]);
        assert_eq!(new(wrong).unwrap_err(), shape(operand, "column", 8, 7));
    }
    let weights = Weights::new(good[0], good[1], good[2], good[3]);
    let with = |weights: Weights<'_, f32>| MultiHeadAttention::new(Config::new(8, 2), &weights).unwrap_err();
    let length = |operand, expected, actual| Error::Length { operand, expected, actual };
    assert_eq!(with(weights.biases(Some(&data[..7]), None, None, None)), length("query bias", 8, 7));
    assert_eq!(with(weights.biases(None, None, None, Some(&data[..9]))), length("output bias", 8, 9));
    assert_eq!(with(weights.bias_kv(&data[..8], &data[..4])), length("bias_v", 8, 4));
    assert_eq!(with(weights.sinks(&data[..3])), length("sinks", 2, 3));
    if let Some(missing) = [Level::Avx2, Level::Avx512].into_iter().find(|level| !Level::available().contains(level)) {
        let error = MultiHeadAttention::new(Config::new(8, 2).level(missing), &weights).unwrap_err();
        assert!(matches!(error, Error::LevelUnavailable { .. }), "{error}");
    }
}

#[test]
fn inputs_that_do_not_fit() {
    let layer = layer();
    let run = |q: &Tokens, k: &Tokens, v: &Tokens| {
        layer.forward(&Inputs::new(q.view(), k.view(), v.view()), &Options::new()).unwrap_err()
    };
    let [q, k, v] = [tokens(2, 3, 8), tokens(2, 5, 6), tokens(2, 5, 4)];
    // "was expecting embedding dimension of 8, but got 7"
    assert_eq!(run(&tokens(2, 3, 7), &k, &v), shape("query", "dim", 8, 7));
    assert_eq!(run(&q, &tokens(2, 5, 8), &v), shape("key", "dim", 6, 8));
    assert_eq!(run(&q, &k, &tokens(2, 5, 6)), shape("value", "dim", 4, 6));
    // "key's sequence and batch dims do not match value's"
    assert_eq!(run(&q, &k, &tokens(2, 4, 4)), shape("value", "seq", 5, 4));
    assert_eq!(run(&q, &k, &tokens(1, 5, 4)), shape("value", "batch", 2, 1));
    // PyTorch: "shape '[3, 2, 4]' is invalid for input of size 48".
    assert_eq!(run(&q, &tokens(3, 5, 6), &tokens(3, 5, 4)), shape("key", "batch", 2, 3));
}

#[test]
fn masks_that_do_not_fit() {
    let layer = layer();
    let [q, k, v] = [tokens(2, 3, 8), tokens(2, 5, 6), tokens(2, 5, 4)];
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let bools = [false; 120];
    let floats = [0.0f32; 120];
    let run = |options: &Options<'_>| layer.forward(&inputs, options).unwrap_err();
    // "Expected key_padded_mask.shape[1] to be 5, but got 4"
    let keys = |shape: [usize; 2]| Mask::ignore_keys(View::contiguous(&bools[..shape[0] * shape[1]], shape).unwrap());
    assert_eq!(run(&Options::new().mask(keys([2, 4]))), shape("mask", "seqlen_k", 5, 4));
    assert_eq!(run(&Options::new().and_mask(keys([3, 5]))), shape("mask", "batch", 2, 3));
    // "The shape of the 2D attn_mask is torch.Size([3, 4]), but should be (3, 5)."
    let plane = |shape: [usize; 2]| View::contiguous(&floats[..shape[0] * shape[1]], shape).unwrap();
    assert_eq!(run(&Options::new().bias(Bias::new(plane([3, 4])).unwrap())), shape("bias", "seqlen_k", 5, 4));
    assert_eq!(run(&Options::new().bias(Bias::new(plane([2, 5])).unwrap())), shape("bias", "seqlen_q", 3, 2));
    // "The shape of the 3D attn_mask is ..., but should be (4, 3, 5)."
    let planes = |n: usize| View::<_, 3>::contiguous(&bools[..n * 15], [n, 3, 5]).unwrap();
    assert_eq!(planes(3).per_head(2).unwrap_err(), shape("mask", "batch * heads", 4, 3));
    let mask = Mask::ignore(planes(6).per_head(2).unwrap()).unwrap();
    assert_eq!(run(&Options::new().mask(mask)), shape("mask", "batch", 2, 3));
    assert_eq!(planes(3).per_head(0).unwrap_err(), shape("mask", "batch * heads", 0, 3));
    let lengths = [5, 6];
    assert!(matches!(run(&Options::new().key_lengths(&lengths)), Error::Value { option: "key_lengths", .. }));
    let other = levels().iter().find(|&&level| level != layer.level());
    if let Some(&other) = other {
        assert!(matches!(run(&Options::new().level(other)), Error::Unsupported { .. }));
    }
}

#[test]
fn nothing_is_written_on_an_error() {
    let layer = layer();
    let [q, k, v] = [tokens(2, 3, 8), tokens(2, 5, 6), tokens(2, 5, 4)];
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let run = |out_shape: [usize; 3], weights_shape: [usize; 4], options: &Options<'_>| {
        let mut out = vec![7.0f32; out_shape.iter().product()];
        let mut weights = vec![7.0f32; weights_shape.iter().product()];
        let outputs = Outputs::new(MatricesMut::contiguous(&mut out, out_shape).unwrap());
        let outputs = outputs.weights(HeadsMut::bhsd(&mut weights, weights_shape).unwrap());
        let result = layer.forward_into(&inputs, outputs, options, &mut Workspace::new());
        if result.is_err() {
            assert!(out.iter().chain(&weights).all(|&x| x == 7.0));
        }
        result
    };
    let (good, good_weights, none) = ([2, 3, 8], [2, 2, 3, 5], Options::new());
    assert_eq!(run(good, good_weights, &none), Ok(()));
    assert_eq!(run([2, 3, 7], good_weights, &none), Err(shape("out", "dim", 8, 7)));
    assert_eq!(run([2, 4, 8], good_weights, &none), Err(shape("out", "seq", 3, 4)));
    assert_eq!(run([1, 3, 8], good_weights, &none), Err(shape("out", "batch", 2, 1)));
    assert_eq!(run(good, [2, 2, 3, 6], &none), Err(shape("weights", "seqlen_k", 5, 6)));
    assert_eq!(run(good, [2, 1, 3, 5], &none), Err(shape("weights", "heads", 2, 1)));
    assert!(run(good, good_weights, &none.softcap(-1.0)).is_err());
}

#[test]
fn what_additional_keys_do_not_go_with() {
    let mut naive = Naive::<f32>::random([8; 4], [2, 2], [4, 4], &mut Rng::new(2));
    naive.zero_attn = true;
    let layer = naive.layer(levels()[0]);
    let x = tokens(1, 6, 8);
    let slopes = [0.5, 0.25];
    for options in [
        Options::new().alibi(&slopes, Diagonal::TopLeft),
        Options::new().causal(Diagonal::Offset(-1)),
        Options::new().causal(Diagonal::BottomRight).key_lengths(&[3]),
    ] {
        let error = layer.forward(&self_attention(&x), &options).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    let rows = Matrix::contiguous(&x.data, [6, 8]).unwrap();
    let error = layer.forward(&Inputs::packed(rows, &[0, 2, 6]), &Options::new()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn packed_tokens_that_begin_nowhere() {
    let layer = Naive::<f32>::random([8; 4], [2, 2], [4, 4], &mut Rng::new(3)).layer(levels()[0]);
    let x = tokens(1, 6, 8);
    let rows = Matrix::contiguous(&x.data, [6, 8]).unwrap();
    for starts in [&[0, 2, 5][..], &[1, 6], &[0, 4, 2, 6], &[]] {
        let error = layer.forward(&Inputs::packed(rows, starts), &Options::new()).unwrap_err();
        assert!(matches!(error, Error::Value { option: "starts", .. }), "{error}");
    }
    let error = layer.forward(&Inputs::packed_cross(rows, &[0, 6], rows, &[0, 3, 6]), &Options::new()).unwrap_err();
    assert!(matches!(error, Error::Shape { axis: "batch", .. }), "{error}");
}

#[test]
fn checkpoints_that_do_not_fit() {
    let tensor = |shape: &[usize]| Tensor { shape: shape.to_vec(), data: vec![0.0f32; shape.iter().product()] };
    let with = |changes: &[(&str, Option<&[usize]>)]| {
        let mut state = StateDict::new();
        let good: [(&str, &[usize]); 4] = [
            ("in_proj_weight", &[24, 8]),
            ("in_proj_bias", &[24]),
            ("out_proj.weight", &[8, 8]),
            ("out_proj.bias", &[8]),
        ];
        for (name, shape) in good {
            if !changes.iter().any(|(changed, _)| *changed == name) {
                state.insert(format!("a.{name}"), tensor(shape));
            }
        }
        for (name, shape) in changes {
            if let Some(shape) = shape {
                state.insert(format!("a.{name}"), tensor(shape));
            }
        }
        state.insert("b.other", tensor(&[3]));
        MultiHeadAttention::from_state_dict(Config::new(8, 2), &state, "a.")
    };
    assert!(with(&[]).is_ok());
    let wrong = |name: &str, expected: &[usize], actual: &[usize]| Error::TensorShape {
        name: name.to_owned(),
        expected: expected.to_vec(),
        actual: actual.to_vec(),
    };
    let error = with(&[("in_proj_weight", Some(&[24, 7]))]).unwrap_err();
    assert_eq!(error, wrong("a.in_proj_weight", &[24, 8], &[24, 7]));
    assert_eq!(error.to_string(), "tensor a.in_proj_weight has shape [24, 7], expected [24, 8]");
    assert_eq!(with(&[("out_proj.bias", Some(&[1, 8]))]).unwrap_err(), wrong("a.out_proj.bias", &[8], &[1, 8]));
    let error = with(&[("out_proj.weight", None)]).unwrap_err();
    assert_eq!(error, Error::MissingTensor { name: "a.out_proj.weight".to_owned(), expected: vec![8, 8] });
    let error = with(&[("bias_k", Some(&[1, 1, 8]))]).unwrap_err();
    assert_eq!(error, Error::MissingTensor { name: "a.bias_v".to_owned(), expected: vec![1, 1, 8] });
    let error = with(&[("norm.weight", Some(&[8]))]).unwrap_err();
    assert_eq!(error, Error::UnexpectedTensor { name: "a.norm.weight".to_owned(), shape: vec![8] });
    let error = with(&[("q_proj_weight", Some(&[8, 8]))]).unwrap_err();
    assert_eq!(error, Error::UnexpectedTensor { name: "a.q_proj_weight".to_owned(), shape: vec![8, 8] });
    // Separate weights of equal widths are taken, too.
    let separate: &[usize] = &[8, 8];
    let all = ["q_proj_weight", "k_proj_weight", "v_proj_weight"].map(|name| (name, Some(separate)));
    assert!(with(&[&all[..], &[("in_proj_weight", None)]].concat()).is_ok());
    // Elements that are not as many as the shape says.
    let mut state = StateDict::new();
    state.insert("in_proj_weight", Tensor { shape: vec![24, 8], data: vec![0.0f32; 5] });
    let error = MultiHeadAttention::from_state_dict(Config::new(8, 2), &state, "").unwrap_err();
    assert_eq!(error, wrong("in_proj_weight", &[24, 8], &[5]));
}

#[test]
fn keras_checkpoints_that_do_not_fit() {
    let tensor = |shape: &[usize]| Tensor { shape: shape.to_vec(), data: vec![0.0f32; shape.iter().product()] };
    let with = |name: &str, shape: Option<&[usize]>| {
        let mut state = StateDict::new();
        for kernel in ["query/kernel", "key/kernel", "value/kernel"] {
            state.insert(kernel, tensor(&[6, 2, 4]));
        }
        state.insert("attention_output/kernel", tensor(&[2, 4, 3, 5]));
        match shape {
            Some(shape) => state.insert(name, tensor(shape)),
            None => {
                let mut fewer = StateDict::new();
                state.iter().filter(|(other, _)| *other != name).for_each(|(n, t)| fewer.insert(n, t.clone()));
                state = fewer;
            }
        }
        MultiHeadAttention::from_keras(&state, "", |config| config)
    };
    assert_eq!(with("query/kernel", Some(&[6, 2, 4])).unwrap().config().sizes().unwrap().output_dim, 15);
    let error = with("value/kernel", None).unwrap_err();
    assert!(matches!(&error, Error::MissingTensor { name, .. } if name == "value/kernel"), "{error}");
    let error = with("key/kernel", Some(&[6, 2, 5])).unwrap_err();
    assert!(matches!(&error, Error::TensorShape { name, .. } if name == "key/kernel"), "{error}");
    let error = with("query/kernel", Some(&[6, 8])).unwrap_err();
    assert!(matches!(&error, Error::TensorShape { name, .. } if name == "query/kernel"), "{error}");
    let error = with("attention_output/kernel", Some(&[3, 4, 6])).unwrap_err();
    assert!(matches!(&error, Error::TensorShape { name, .. } if name == "attention_output/kernel"), "{error}");
    let error = with("query/bias", Some(&[2, 4])).unwrap_err();
    assert!(matches!(&error, Error::MissingTensor { name, .. } if name == "key/bias"), "{error}");
    let error = with("dropout/seed", Some(&[2])).unwrap_err();
    assert!(matches!(&error, Error::UnexpectedTensor { name, .. } if name == "dropout/seed"), "{error}");
    // No kernel of a size that overflows or divides by zero.
    assert!(with("query/kernel", Some(&[6, 0, 4])).is_err());
}

#[test]
fn inputs_without_elements() {
    let layer = Naive::<f32>::random([8; 4], [2, 2], [4, 4], &mut Rng::new(4)).layer(levels()[0]);
    let none = Matrices::<f32>::contiguous(&[], [0, 4, 8]).unwrap();
    assert_eq!(layer.forward(&Inputs::self_attention(none), &Options::new()), Ok(vec![]));
    let huge = Matrices::with_strides(&[1.0f32; 8], [usize::MAX / 8, usize::MAX >> 24, 8], [0, 0, 1]).unwrap();
    let error = layer.forward(&Inputs::self_attention(huge), &Options::new()).unwrap_err();
    assert!(matches!(error, Error::Memory { .. } | Error::Overflow { .. }), "{error}");
}
