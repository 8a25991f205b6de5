//! Random nodes against the reference, which is given what ONNX's rules come to, key by key: one bias for every score.

use half::{bf16, f16};
use polyhead::onnx::{Attention, AttnMask, Inputs, Outputs, Tensor, TensorMut};
use polyhead::{Element, Level, Shape};
use proptest::prelude::*;

use crate::oracle::{self, BiasTable, Call, Dtype, Expected, Results};
use crate::support::{Arrangement, Bits, PoisonedInput, PoisonedOutput, Rng, assert_same_bits, is_close, levels};

const HIDDEN: f32 = f32::NEG_INFINITY;

/// A random mask, as it lies in memory and as ONNX reads it.
#[derive(Clone, Debug)]
struct Mask {
    dtype: Option<Dtype>,
    rank: usize,
    /// Of four axes, the first of them 1 where there are fewer.
    shape: [usize; 4],
    /// Of rows with gaps between them; 0 for axes of one element.
    strides: [usize; 4],
    /// 0 or -inf of a boolean mask.
    storage: Vec<f32>,
    /// Keys behind these are hidden.
    covers: usize,
}

impl Mask {
    fn random(scores: [usize; 4], opset: i64, least: usize, rng: &mut Rng) -> Self {
        let dtype = rng.pick(&[None, Some(Dtype::F32), Some(Dtype::F16), Some(Dtype::Bf16)]);
        let rank = 1 + rng.below(4);
        let (mut shape, mut own) = ([1; 4], [1; 4]);
        for axis in 4 - rank..4 {
            (shape[axis], own[axis]) = match rng.below(4) {
                // Of size 1, unless that would hide keys that are in use.
                0 if axis < 3 || opset < 24 || (least <= 1 && scores[3] > 0) => (1, 1),
                // Of stride 0.
                1 => (scores[axis], scores[axis].min(1)),
                2 if axis == 3 && opset >= 24 => {
                    let size = least + rng.below(scores[3] - least + 1);
                    (size, size)
                }
                _ => (scores[axis], scores[axis]),
            };
        }
        let row = own[3] + 2;
        let steps = [own[1] * own[2] * row, own[2] * row, row, 1];
        let strides = core::array::from_fn(|axis| if own[axis] <= 1 { 0 } else { steps[axis] });
        let hidden = f64::from(rng.uniform(0.0, 0.7));
        let value = |_| match dtype {
            _ if rng.chance(hidden) => HIDDEN,
            None => 0.0,
            Some(dtype) => dtype.round(2.0 * rng.normal()),
        };
        let storage = (0..own[0] * own[1] * own[2] * row).map(value).collect();
        let covers = if opset < 24 { scores[3] } else { shape[3] };
        Self { dtype, rank, shape, strides, storage, covers }
    }

    fn at(&self, index: [usize; 4]) -> f32 {
        let at = index.iter().zip(self.strides).map(|(i, stride)| i * stride).sum::<usize>();
        if index[3] < self.covers { self.storage[at] } else { HIDDEN }
    }

    /// Calls `f` with the mask in its own type.
    fn with<R>(&self, f: impl FnOnce(AttnMask<'_>) -> R) -> R {
        fn tensor<'a, T: Copy>(mask: &Mask, storage: &'a [T]) -> Tensor<'a, T> {
            let axes = 4 - mask.rank..;
            Tensor::with_strides(storage, &mask.shape[axes.clone()], &mask.strides[axes]).expect("the storage holds it")
        }
        match self.dtype {
            None => f(tensor(self, &self.storage.iter().map(|&x| x == 0.0).collect::<Vec<bool>>()).into()),
            Some(Dtype::F32) => f(tensor(self, &self.storage).into()),
            Some(Dtype::F16) => f(tensor(self, &rounded::<f16>(&self.storage)).into()),
            Some(Dtype::Bf16) => f(tensor(self, &rounded::<bf16>(&self.storage)).into()),
        }
    }
}

fn rounded<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&x| T::from_f32_nearest(x)).collect()
}

/// A node, its operands (past and new keys together) in a call whose options say the same.
#[derive(Clone, Debug)]
struct Node {
    call: Call,
    attention: Attention,
    rank: usize,
    past: Option<usize>,
    lengths: Option<Vec<i64>>,
    mask: Option<Mask>,
    mode: Option<i64>,
    wants_present: bool,
    places: [Arrangement; 4],
}

/// Sizes of a node; the rest comes from the seed.
#[derive(Clone, Debug)]
struct Recipe {
    heads: [usize; 3],
    queries: usize,
    past: Option<usize>,
    new: usize,
    widths: [usize; 2],
    types: [Dtype; 2],
    rank: usize,
    seed: u64,
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let dtype = || prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let keys = || prop_oneof![6 => 0..14usize, 1 => 120..140usize];
    let width = || prop_oneof![8 => 1..20usize, 1 => Just(0), 1 => Just(64)];
    (
        (0..3usize, 1..4usize, 1..4usize),
        prop_oneof![6 => 0..12usize, 1 => 30..40usize],
        prop::option::of(keys()),
        keys(),
        (width(), width()),
        (dtype(), dtype()),
        3..5usize,
        any::<u64>(),
    )
        .prop_map(|((batch, kv, group), queries, past, new, (d, dv), (t1, t2), rank, seed)| Recipe {
            heads: [batch, kv, group],
            queries,
            past,
            new,
            widths: [d, dv],
            types: [t1, t2],
            rank,
            seed,
        })
}

impl Recipe {
    fn node(&self) -> Node {
        let rng = &mut Rng::new(self.seed);
        let Self { heads: [batch, kv, group], queries, new, widths: [d, dv], types: [t1, t2], rank, .. } = *self;
        let total = self.past.unwrap_or(0) + new;
        let shape = oracle::shape([batch, kv * group, kv, queries, total, d, dv]);
        let mut call = Call::random(shape, [t1, t1, t2, t1], rng);
        let opset = rng.pick(&[23, 24, 25]);
        let mut attention = Attention::new().opset(opset);
        if rank == 3 || (opset < 25 && rng.chance(0.3)) {
            attention = attention.q_num_heads((kv * group) as i64).kv_num_heads(kv as i64);
        }
        if d == 0 || rng.chance(0.3) {
            let scale = rng.pick(&[0.0, 0.01, 0.3, 1.0, 2.0]);
            (attention, call.options.scale) = (attention.scale(scale), Some(scale));
        }
        if rng.chance(0.3) {
            let cap = rng.pick(&[0.3, 2.0, 20.0]);
            (attention, call.options.softcap) = (attention.softcap(cap), Some(cap));
        }
        if rng.chance(0.3) {
            attention = attention.softmax_precision(rng.pick(&[1, 10, 11, 16]));
        }
        let causal = rng.chance(0.5);
        let mut side = || if rng.chance(0.6) { -1 } else { rng.below(total.max(queries) + 2) as i64 };
        let (left, right) = (side(), side());
        attention = attention.is_causal(causal).left_window_size(left).right_window_size(right);

        let has_lengths = self.past.is_none() && rng.chance(0.5);
        let lengths = has_lengths.then(|| (0..batch).map(|_| rng.below(total + 1) as i64).collect::<Vec<i64>>());
        let least = lengths.iter().flatten().max().map_or(0, |&longest| longest as usize);
        let mask = rng.chance(0.7).then(|| Mask::random([batch, kv * group, queries, total], opset, least, rng));
        let mode = rng.chance(0.6).then(|| rng.below(4) as i64);
        attention = attention.qk_matmul_output_mode(mode.unwrap_or(0));

        let places = [0; 4].map(|_| match rank {
            3 => rng.pick(&[Arrangement::Bshd, Arrangement::PackedQkv]),
            _ => rng.pick(&Arrangement::DISTINCT),
        });
        let wants_present = lengths.is_none() && rng.chance(0.6);
        let past = self.past;
        let mut node = Node { call, attention, rank, past, lengths, mask, mode, wants_present, places };
        node.set_bias(causal, [left, right]);
        if rng.chance(0.5) {
            node.poison_padding();
        }
        node
    }
}

impl Node {
    /// The rules of the operator, word by word.
    fn set_bias(&mut self, causal: bool, [left, right]: [i64; 2]) {
        let Shape { batch, num_heads, seqlen_q, seqlen_k, .. } = self.call.shape;
        let mut values = Vec::new();
        let scores = [batch, num_heads, seqlen_q, seqlen_k];
        for at in 0..scores.iter().product() {
            let [b, h, i, j] = index(scores, at);
            let valid = self.lengths.as_ref().map(|lengths| lengths[b]);
            let offset = match (self.past, valid) {
                (Some(past), _) => past as i64,
                (None, Some(valid)) => valid - seqlen_q as i64,
                (None, None) => 0,
            };
            let (position, key) = (i as i64 + offset, j as i64);
            let seen = (!causal || key <= position)
                && (left == -1 || key >= position - left)
                && (right == -1 || key <= position + right)
                && valid.is_none_or(|valid| key < valid);
            let mask = self.mask.as_ref().map_or(0.0, |mask| mask.at([b, h, i, j]));
            values.push(if seen { mask } else { HIDDEN });
        }
        self.call.options.bias = Some(BiasTable { values, shape: scores });
    }

    /// NaN where no query may look.
    fn poison_padding(&mut self) {
        let s = self.call.shape;
        let covers = self.mask.as_ref().map_or(s.seqlen_k, |mask| mask.covers);
        for row in 0..s.batch * s.num_kv_heads * s.seqlen_k {
            let (b, j) = (row / s.seqlen_k / s.num_kv_heads, row % s.seqlen_k);
            let valid = self.lengths.as_ref().map_or(s.seqlen_k, |lengths| lengths[b] as usize);
            if j >= valid.min(covers) {
                self.call.k[row * s.head_dim..][..s.head_dim].fill(f32::NAN);
                self.call.v[row * s.head_dim_v..][..s.head_dim_v].fill(f32::NAN);
            }
        }
    }

    /// `qk_matmul_output` in the modes 0 to 2, and how far from it a result may be.
    fn score(&self, [b, h, i, j]: [usize; 4], mode: i64) -> (f64, f64) {
        let (d, dtype) = (self.call.shape.head_dim, self.call.types[0]);
        let scale = self.call.options.softmax_scale(&self.call.shape) as f32;
        let root = dtype.round(f64::from(scale).sqrt() as f32);
        let row = |data: &'_ [f32], row: usize| -> Vec<f64> {
            data[row * d..][..d].iter().map(|&x| f64::from(dtype.round(x * root))).collect()
        };
        let q = row(&self.call.q, (b * self.call.shape.num_heads + h) * self.call.shape.seqlen_q + i);
        let k = row(&self.call.k, self.call.key_row(b, h, j));
        let products = || q.iter().zip(&k).map(|(x, y)| x * y);
        let (mut score, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
        if let (Some(cap), true) = (self.call.options.softcap.map(f64::from), mode >= 1) {
            score = cap * (score / cap).tanh();
        }
        let bias = if mode == 2 { f64::from(self.call.options.bias_at([b, h, i, j])) } else { 0.0 };
        if bias == f64::NEG_INFINITY {
            return (bias, 0.0);
        }
        // Rounding of f32 sums; of softcap and bias; and once to the type.
        let unit = 2f64.powi(-24);
        let terms = score.abs() + bias.abs();
        let (relative, absolute) = dtype.unit();
        let sum = score + bias;
        (sum, unit * ((2.0 + (d as f64).sqrt()) * size + 8.0 * terms) + relative * sum.abs() + absolute)
    }
}

fn index(shape: [usize; 4], at: usize) -> [usize; 4] {
    let [_, h, l, s] = shape;
    [at / s / l / h, at / s / l % h, at / s % l, at % s]
}

/// Of packed (batch, heads, seq, dim) some of the sequence.
fn rows<T: Element>(data: &[f32], [_, _, seq, dim]: [usize; 4], range: core::ops::Range<usize>) -> Vec<T> {
    let heads = data.chunks((seq * dim).max(1));
    heads.flat_map(|head| rounded::<T>(&head[range.start * dim..range.end * dim])).collect()
}

/// An operand of three or four axes.
fn operand<'a, T: Bits>(input: &'a PoisonedInput<T>, [b, h, s, d]: [usize; 4], rank: usize) -> Tensor<'a, T> {
    let (data, strides) = input.parts();
    if rank == 4 {
        return Tensor::with_strides(data, &[b, h, s, d], &strides).expect("the storage holds it");
    }
    Tensor::with_strides(data, &[b, s, h * d], &[strides[0], strides[2], 1]).expect("the storage holds it")
}

/// As `operand`.
fn output<'a, T: Bits>(out: &'a mut PoisonedOutput<T>, [b, h, s, d]: [usize; 4], rank: usize) -> TensorMut<'a, T> {
    let (data, strides) = out.parts();
    if rank == 4 {
        return TensorMut::with_strides(data, &[b, h, s, d], &strides).expect("the storage holds it");
    }
    TensorMut::with_strides(data, &[b, s, h * d], &[strides[0], strides[2], 1]).expect("the storage holds it")
}

fn check<T1: Bits, T2: Bits>(node: &Node, expected: &Expected, level: Level) {
    let Node { call, rank, places, .. } = node;
    let s = call.shape;
    let context = format!("{} {:?} {:?} {:?}", level.name(), node.attention, node.mask, s);
    let past = node.past.unwrap_or(0);
    let with_seq = |[b, h, _, d]: [usize; 4], seq: usize| [b, h, seq, d];
    let (q_shape, k_all, v_all) = (oracle::q_shape(&s), oracle::k_shape(&s), oracle::v_shape(&s));
    let (k_past, v_past) = (with_seq(k_all, past), with_seq(v_all, past));
    let (k_new, v_new) = (with_seq(k_all, s.seqlen_k - past), with_seq(v_all, s.seqlen_k - past));
    let edges = call.edges;
    let q = PoisonedInput::<T1>::within(edges, &rounded(&call.q), q_shape, places[0]);
    let k = PoisonedInput::<T1>::within(edges, &rows(&call.k, k_all, past..s.seqlen_k), k_new, places[1]);
    let v = PoisonedInput::<T2>::within(edges, &rows(&call.v, v_all, past..s.seqlen_k), v_new, places[2]);
    let past_key = PoisonedInput::<T1>::within(edges, &rows(&call.k, k_all, 0..past), k_past, Arrangement::RowGaps(1));
    let past_value = PoisonedInput::<T2>::within(edges, &rows(&call.v, v_all, 0..past), v_past, Arrangement::Bhsd);
    let out_shape = oracle::out_shape(&s);
    let mut y = PoisonedOutput::<T1>::within(edges, out_shape, places[3]);
    let present = if *rank == 3 { Arrangement::Bhsd } else { places[3] };
    let mut present_key = PoisonedOutput::<T1>::within(edges, k_all, present);
    let mut present_value = PoisonedOutput::<T2>::within(edges, v_all, Arrangement::Bhsd);
    let scores = [s.batch, s.num_heads, s.seqlen_q, s.seqlen_k];
    let mut qk =
        PoisonedOutput::<T1>::within(edges, scores, if *rank == 3 { Arrangement::RowGaps(3) } else { places[0] });

    let mut inputs = Inputs::new(operand(&q, q_shape, *rank), operand(&k, k_new, *rank), operand(&v, v_new, *rank));
    if node.past.is_some() {
        inputs.past_key = Some(operand(&past_key, k_past, 4));
        inputs.past_value = Some(operand(&past_value, v_past, 4));
    }
    inputs.nonpad_kv_seqlen = node.lengths.as_deref();
    let mut outputs = Outputs::new(output(&mut y, out_shape, *rank));
    if node.wants_present {
        outputs.present_key = Some(output(&mut present_key, k_all, 4));
        outputs.present_value = Some(output(&mut present_value, v_all, 4));
    }
    outputs.qk_matmul_output = node.mode.map(|_| output(&mut qk, scores, 4));
    let attention = node.attention.clone().level(level);
    let result = match &node.mask {
        Some(mask) => mask.with(|mask| {
            let mut inputs = inputs;
            inputs.attn_mask = Some(mask);
            attention.run(&inputs, outputs)
        }),
        None => attention.run(&inputs, outputs),
    };
    result.unwrap_or_else(|error| panic!("{context}: {error}"));

    let floats = |values: Vec<T1>| -> Vec<f32> { values.into_iter().map(Element::to_f32).collect() };
    let mut results = Results { out: floats(y.packed(&context)), lse: Vec::new(), weights: Vec::new() };
    if node.wants_present {
        assert_same_bits(&present_key.packed(&context), &rounded(&call.k), format_args!("{context}: present_key"));
        assert_same_bits(&present_value.packed(&context), &rounded(&call.v), format_args!("{context}: present_value"));
    } else {
        present_key.assert_untouched(&context);
        present_value.assert_untouched(&context);
    }
    match node.mode {
        None => qk.assert_untouched(&context),
        Some(3) => {
            let weights = floats(qk.packed(&context));
            if call.types[0] == Dtype::F32 {
                results.weights = weights;
            } else {
                check_weights(call, expected, level, &weights, &context);
            }
        }
        Some(mode) => {
            for (at, is) in floats(qk.packed(&context)).into_iter().enumerate() {
                let (score, tolerance) = node.score(index(scores, at), mode);
                assert!(is_close(is, score, tolerance, 0.0), "{context}: score {at} is {is} instead of {score}");
            }
        }
    }
    expected.check(call, level, &results, context);
}

/// Of 16 bits: rounded once.
fn check_weights(call: &Call, expected: &Expected, level: Level, weights: &[f32], context: &str) {
    let (relative, absolute) = call.types[0].unit();
    let tolerance = expected.loosest(call, level) + absolute;
    for (at, (&is, &weight)) in weights.iter().zip(&expected.attention.weights).enumerate() {
        assert!(is_close(is, weight, tolerance, relative), "{context}: weight {at} is {is} instead of {weight}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_nodes_are_as_the_reference(recipe in recipe()) {
        let node = recipe.node();
        let expected = node.call.expected();
        for &level in levels() {
            match recipe.types {
                [Dtype::F32, Dtype::F32] => check::<f32, f32>(&node, &expected, level),
                [Dtype::F32, Dtype::F16] => check::<f32, f16>(&node, &expected, level),
                [Dtype::F32, Dtype::Bf16] => check::<f32, bf16>(&node, &expected, level),
                [Dtype::F16, Dtype::F32] => check::<f16, f32>(&node, &expected, level),
                [Dtype::F16, Dtype::F16] => check::<f16, f16>(&node, &expected, level),
                [Dtype::F16, Dtype::Bf16] => check::<f16, bf16>(&node, &expected, level),
                [Dtype::Bf16, Dtype::F32] => check::<bf16, f32>(&node, &expected, level),
                [Dtype::Bf16, Dtype::F16] => check::<bf16, f16>(&node, &expected, level),
                [Dtype::Bf16, Dtype::Bf16] => check::<bf16, bf16>(&node, &expected, level),
            }
        }
    }
}
