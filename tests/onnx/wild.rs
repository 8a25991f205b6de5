//! No shapes, strides, lengths and attributes make a node panic.

use polyhead::Element;
use polyhead::onnx::{Attention, Inputs, Outputs, Tensor, TensorMut};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const MAX: usize = usize::MAX;

fn wild_size() -> impl Strategy<Value = usize> {
    prop_oneof![16 => 0..4usize, 1 => prop::sample::select(vec![MAX, MAX - 1, MAX / 2, MAX / 4 + 1, MAX / 16 + 2])]
}

fn wild_integer() -> impl Strategy<Value = i64> {
    prop_oneof![12 => -1..4i64, 1 => prop::sample::select(vec![i64::MIN, i64::MAX, -2, 1 << 32, 1 << 62])]
}

fn wild_float() -> impl Strategy<Value = f32> {
    prop_oneof![4 => 0.0f32..3.0, 1 => prop::sample::select(vec![-1.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-45])]
}

type Geometry = (Vec<usize>, Vec<usize>);

fn wild_geometry() -> impl Strategy<Value = Geometry> {
    let stride = prop_oneof![8 => 0..20usize, 1 => prop::sample::select(vec![MAX, MAX / 2, MAX / 4 + 1, 1 << (usize::BITS / 2)])];
    (prop::collection::vec(wild_size(), 0..6), prop::collection::vec(stride, 0..6))
}

#[derive(Clone, Debug)]
struct Wild {
    /// batch, KV heads, group, queries, past, new keys, widths.
    sizes: [usize; 8],
    rank: usize,
    /// Replace those of `sizes`: of q, k, v, mask, past_key, past_value, y, present_key, present_value, qk_matmul_output.
    odd: Vec<(usize, Geometry)>,
    /// A bit for each optional tensor.
    there: u8,
    lengths: Option<Vec<i64>>,
    heads: [Option<i64>; 2],
    /// opset, windows, mode, precision.
    integers: [i64; 5],
    floats: [Option<f32>; 2],
    causal: bool,
}

fn wild() -> impl Strategy<Value = Wild> {
    (
        prop::array::uniform8(wild_size()),
        3..5usize,
        prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec((0..10usize, wild_geometry()), 1..3)],
        any::<u8>(),
        prop::option::weighted(0.2, prop::collection::vec(wild_integer(), 0..4)),
        prop::array::uniform2(prop::option::of(wild_integer())),
        (
            prop_oneof![8 => 23..26i64, 1 => wild_integer()],
            (wild_integer(), wild_integer()),
            prop_oneof![8 => 0..4i64, 1 => wild_integer()],
            prop_oneof![8 => prop::sample::select(vec![1, 10, 11, 16]), 1 => wild_integer()],
        ),
        prop::array::uniform2(prop::option::weighted(0.3, wild_float())),
        any::<bool>(),
    )
        .prop_map(|(sizes, rank, odd, there, lengths, heads, integers, floats, causal)| {
            let (opset, (left, right), mode, precision) = integers;
            Wild {
                sizes,
                rank,
                odd,
                there,
                lengths,
                heads,
                integers: [opset, left, right, mode, precision],
                floats,
                causal,
            }
        })
}

impl Wild {
    fn geometry(&self, operand: usize) -> Geometry {
        if let Some((_, geometry)) = self.odd.iter().find(|(which, _)| *which == operand) {
            return geometry.clone();
        }
        let [b, kv, group, l, past, new, d, dv] = self.sizes;
        let (h, total) = (kv.saturating_mul(group), past.saturating_add(new));
        let four = [
            [b, h, l, d],
            [b, kv, new, d],
            [b, kv, new, dv],
            [1, h, l, total],
            [b, kv, past, d],
            [b, kv, past, dv],
            [b, h, l, dv],
            [b, kv, total, d],
            [b, kv, total, dv],
            [b, h, l, total],
        ][operand];
        let shape = match four {
            [b, h, s, d] if self.rank == 3 && [0, 1, 2, 6].contains(&operand) => vec![b, s, h.saturating_mul(d)],
            four => four.to_vec(),
        };
        let (mut step, mut strides) = (1usize, vec![0; shape.len()]);
        for axis in (0..shape.len()).rev().filter(|&axis| shape[axis] < 1 << 20) {
            (strides[axis], step) = (step, step.saturating_mul(shape[axis].max(1)));
        }
        (shape, strides)
    }

    fn attention(&self) -> Attention {
        let [opset, left, right, mode, precision] = self.integers;
        let mut attention = Attention::new()
            .opset(opset)
            .softmax_precision(precision)
            .is_causal(self.causal)
            .left_window_size(left)
            .right_window_size(right)
            .qk_matmul_output_mode(mode);
        let [kv, group] = [1, 2].map(|at| self.sizes[at] as i64);
        let agreed = [kv.saturating_mul(group), kv];
        let [q, k] = [0, 1].map(|at| self.heads[at].filter(|_| !self.odd.is_empty()).or(Some(agreed[at])));
        if let (Some(q), Some(k), 3) = (q, k, self.rank) {
            attention = attention.q_num_heads(q).kv_num_heads(k);
        }
        if let Some(scale) = self.floats[0] {
            attention = attention.scale(scale);
        }
        self.floats[1].map_or(attention.clone(), |cap| attention.softcap(cap))
    }

    /// Whether it could run, and for longer than a test has time.
    fn is_endless(&self) -> bool {
        let odd = self.odd.iter().flat_map(|(_, (shape, _))| shape);
        self.sizes.iter().chain(odd).any(|&size| size > 1 << 20)
    }
}

/// What came of it, or `None` if a tensor could not be made.
fn outcome<T: Element>(wild: &Wild) -> Option<bool> {
    let (floats, bools) = (vec![T::from_f32_nearest(0.5); 400], [true; 400]);
    let tensor = |operand: usize| {
        let (shape, strides) = wild.geometry(operand);
        Tensor::with_strides(&floats, &shape, &strides).ok()
    };
    let there = |bit: u8| wild.there >> bit & 1 == 1;
    let mut inputs = Inputs::new(tensor(0)?, tensor(1)?, tensor(2)?);
    if there(0) {
        let (shape, strides) = wild.geometry(3);
        inputs.attn_mask = Some(Tensor::with_strides(&bools, &shape, &strides).ok()?.into());
    }
    // Of past and present mostly both or none.
    if there(1) {
        (inputs.past_key, inputs.past_value) = (tensor(4), tensor(5).filter(|_| !there(6) || there(7)));
    }
    inputs.nonpad_kv_seqlen = wild.lengths.as_deref();
    let attention = wild.attention();
    let shapes = attention.output_shapes(&inputs);
    if shapes.is_ok() && wild.is_endless() {
        return None;
    }
    let mut buffers = [0; 4].map(|_| vec![T::default(); 400]);
    let mut views = buffers.iter_mut().zip([6, 7, 8, 9]).map(|(buffer, operand)| {
        let (shape, strides) = wild.geometry(operand);
        TensorMut::with_strides(buffer, &shape, &strides).ok()
    });
    let mut outputs = Outputs::new(views.next()??);
    let [key, value, qk] = [views.next()?, views.next()?, views.next()?];
    if there(2) {
        (outputs.present_key, outputs.present_value) = (key, value);
    }
    if there(3) {
        outputs.qk_matmul_output = qk;
    }
    let result = attention.run(&inputs, outputs);
    assert!(result.is_err() || shapes.is_ok(), "runs, but has no shapes: {shapes:?}");
    Some(result.is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8 * ProptestConfig::default().cases, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn errors_not_panics_of_any_node(wild in wild()) {
        outcome::<f32>(&wild);
        outcome::<half::f16>(&wild);
    }
}

#[test]
fn some_wild_nodes_run_and_some_do_not() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut counts = [0; 3];
    for _ in 0..2000 {
        let wild = wild().new_tree(&mut runner).expect("a value").current();
        counts[outcome::<f32>(&wild).map_or(2, usize::from)] += 1;
    }
    let [failed, ran, _] = counts;
    assert!(failed > 100 && ran > 100, "{counts:?}");
}
