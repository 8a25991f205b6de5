//! Every error of a node, with its fields; outputs are untouched by it.

use polyhead::Error;
use polyhead::onnx::{Attention, AttnMask, Inputs, Outputs, Tensor, TensorMut};

const POISON: f32 = -77.0;

/// A node of shapes, all of it right: 6 query heads on 2 KV heads, 3 queries, 4 keys behind 5.
#[derive(Clone)]
struct Node {
    attention: Attention,
    q: Vec<usize>,
    k: Vec<usize>,
    v: Vec<usize>,
    mask: Option<Vec<usize>>,
    past: [Option<Vec<usize>>; 2],
    lengths: Option<Vec<i64>>,
    y: Vec<usize>,
    present: [Option<Vec<usize>>; 2],
    qk: Option<Vec<usize>>,
}

fn node() -> Node {
    Node {
        attention: Attention::new(),
        q: vec![2, 6, 3, 8],
        k: vec![2, 2, 4, 8],
        v: vec![2, 2, 4, 10],
        mask: Some(vec![3, 9]),
        past: [Some(vec![2, 2, 5, 8]), Some(vec![2, 2, 5, 10])],
        lengths: None,
        y: vec![2, 6, 3, 10],
        present: [Some(vec![2, 2, 9, 8]), Some(vec![2, 2, 9, 10])],
        qk: Some(vec![2, 6, 3, 9]),
    }
}

/// The same with three axes.
fn flat() -> Node {
    let attention = Attention::new().q_num_heads(6).kv_num_heads(2);
    Node { attention, q: vec![2, 3, 48], k: vec![2, 4, 16], v: vec![2, 4, 20], y: vec![2, 3, 60], ..node() }
}

/// With a cache outside of the operator.
fn cached() -> Node {
    Node {
        mask: Some(vec![3, 4]),
        past: [None, None],
        present: [None, None],
        qk: None,
        lengths: Some(vec![4, 2]),
        ..node()
    }
}

fn len(shape: &[usize]) -> usize {
    shape.iter().product()
}

impl Node {
    /// Runs it; asserts that an error leaves the outputs as they were.
    fn run(&self) -> Result<(), Error> {
        let data = vec![0.5f32; 4096];
        let tensor = |shape: &[usize]| Tensor::new(&data[..len(shape)], shape).expect("a packed tensor");
        let mut inputs = Inputs::new(tensor(&self.q), tensor(&self.k), tensor(&self.v));
        inputs.attn_mask = self.mask.as_deref().map(|mask| tensor(mask).into());
        [inputs.past_key, inputs.past_value] = self.past.each_ref().map(|past| past.as_deref().map(tensor));
        inputs.nonpad_kv_seqlen = self.lengths.as_deref();
        let buffer = |shape: &Option<Vec<usize>>| vec![POISON; shape.as_deref().map_or(0, len)];
        let mut y = vec![POISON; len(&self.y)];
        let ([mut key, mut value], mut qk) = (self.present.each_ref().map(buffer), buffer(&self.qk));
        let mut outputs = Outputs::new(TensorMut::new(&mut y, &self.y).expect("a packed tensor"));
        fn wanted<'a>(data: &'a mut [f32], shape: &Option<Vec<usize>>) -> Option<TensorMut<'a, f32>> {
            shape.as_ref().map(|shape| TensorMut::new(data, shape).expect("a packed tensor"))
        }
        outputs.present_key = wanted(&mut key, &self.present[0]);
        outputs.present_value = wanted(&mut value, &self.present[1]);
        outputs.qk_matmul_output = wanted(&mut qk, &self.qk);
        let result = self.attention.run(&inputs, outputs);
        for (name, data) in [("y", &y), ("present_key", &key), ("present_value", &value), ("qk", &qk)] {
            let written = data.iter().filter(|&&x| x != POISON).count();
            assert_eq!(written, if result.is_ok() { data.len() } else { 0 }, "{name} after {result:?}");
        }
        result
    }

    #[track_caller]
    fn fails(self, expected: Error) {
        assert_eq!(self.run(), Err(expected.clone()));
        assert!(!expected.to_string().is_empty());
    }
}

fn shape(operand: &'static str, axis: &'static str, expected: usize, actual: usize) -> Error {
    Error::Shape { operand, axis, expected, actual }
}

#[test]
fn the_nodes_that_errors_are_made_of_run() {
    for node in [node(), flat(), cached()] {
        node.run().expect("a valid node");
        Node { mask: None, ..node.clone() }.run().expect("a valid node without a mask");
        // Past without present, present without past, and neither.
        if node.lengths.is_none() {
            Node { present: [None, None], ..node.clone() }.run().expect("a past that goes nowhere");
            let (qk, mask) = (Some(vec![2, 6, 3, 4]), None);
            let present = [Some(vec![2, 2, 4, 8]), Some(vec![2, 2, 4, 10])];
            let first = Node { past: [None, None], present, qk, mask, ..node };
            first.run().expect("a first step");
            Node { present: [None, None], ..first }.run().expect("no cache at all");
        }
    }
    // Before opset 25 the numbers of heads may be given with four axes.
    let attention = Attention::new().opset(24).q_num_heads(6).kv_num_heads(2);
    Node { attention, ..node() }.run().expect("heads that agree");
    // Opset 23 broadcasts a last axis of 1, later ones pad it.
    Node { mask: Some(vec![3, 1]), attention: Attention::new().opset(23), ..node() }.run().expect("a broadcast mask");
    Node { mask: Some(vec![3, 1]), ..node() }.run().expect("a padded mask");
}

#[test]
fn attributes() {
    let value = |option, expected, actual: f64| Error::Value { option, expected, actual };
    let with = |attention: Attention, error: Error| Node { attention, ..node() }.fails(error);
    with(Attention::new().opset(22), value("opset", "23 or more", 22.0));
    with(Attention::new().left_window_size(-2), value("left_window_size", "-1 or more", -2.0));
    with(Attention::new().right_window_size(i64::MIN), value("right_window_size", "-1 or more", i64::MIN as f64));
    with(Attention::new().qk_matmul_output_mode(4), value("qk_matmul_output_mode", "0 to 3", 4.0));
    with(Attention::new().qk_matmul_output_mode(-1), value("qk_matmul_output_mode", "0 to 3", -1.0));
    let types = "1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16)";
    with(Attention::new().softmax_precision(6), value("softmax_precision", types, 6.0));
    for bad in [-0.1, f32::INFINITY] {
        with(Attention::new().scale(bad), value("scale", "finite and not negative", bad.into()));
        with(Attention::new().softcap(bad), value("softcap", "finite and not negative", bad.into()));
    }
    for heads in [0, -3] {
        let attention = flat().attention;
        let error = value("q_num_heads", "positive", heads as f64);
        Node { attention: attention.clone().q_num_heads(heads), ..flat() }.fails(error);
        let error = value("kv_num_heads", "positive", heads as f64);
        Node { attention: attention.kv_num_heads(heads), ..flat() }.fails(error);
    }
    let nan = Node { attention: Attention::new().scale(f32::NAN), ..node() }.run();
    assert!(matches!(nan, Err(Error::Value { option: "scale", actual, .. }) if actual.is_nan()), "{nan:?}");
    // No head_size, no default.
    let none = |node: Node| Node { q: vec![2, 6, 3, 0], k: vec![2, 2, 4, 0], past: [None, None], ..node };
    none(Node { mask: None, present: [None, None], qk: None, ..node() }).fails(Error::NoDefaultScale);
}

#[test]
fn numbers_of_heads() {
    let missing = |argument| Error::Missing { argument, needed_by: "an operand of three axes" };
    Node { attention: Attention::new().kv_num_heads(2), ..flat() }.fails(missing("q_num_heads"));
    Node { attention: Attention::new().q_num_heads(6), ..flat() }.fails(missing("kv_num_heads"));
    let divisor =
        |option, actual: f64| Error::Value { option, expected: "a divisor of the last axis, of three", actual };
    Node { attention: flat().attention.q_num_heads(5), ..flat() }.fails(divisor("q_num_heads", 5.0));
    Node { attention: flat().attention.kv_num_heads(3), ..flat() }.fails(divisor("kv_num_heads", 3.0));
    // K has 16 = 8 * 2, V has 20 = 10 * 2, Q has 48 = 8 * 6.
    let groups = Error::HeadGroups { num_heads: 6, num_kv_heads: 4 };
    let (q, k, v) = (vec![2, 3, 48], vec![2, 4, 32], vec![2, 4, 40]);
    Node { attention: flat().attention.kv_num_heads(4), q, k, v, ..flat() }.fails(groups);
    let conflict = |argument| Error::Conflict { argument, with: "operands of four axes" };
    Node { attention: Attention::new().q_num_heads(6), ..node() }.fails(conflict("q_num_heads"));
    Node { attention: Attention::new().kv_num_heads(2), ..node() }.fails(conflict("kv_num_heads"));
    let attention = Attention::new().opset(24).q_num_heads(3);
    Node { attention, ..node() }.fails(shape("q", "heads", 3, 6));
    let attention = Attention::new().opset(23).kv_num_heads(1);
    Node { attention, ..node() }.fails(shape("k", "heads", 1, 2));
}

#[test]
fn axes() {
    let rank = |operand, expected, actual| Error::Rank { operand, expected, actual };
    Node { q: vec![6, 8], ..node() }.fails(rank("q", "3 or 4", 2));
    Node { k: flat().k, ..node() }.fails(rank("k", "4, as q", 3));
    Node { v: flat().v, ..node() }.fails(rank("v", "4, as q", 3));
    Node { k: node().k, ..flat() }.fails(rank("k", "3, as q", 4));
    Node { v: vec![4, 20], ..flat() }.fails(rank("v", "3, as q", 2));
    Node { past: [Some(vec![2, 5, 16]), node().past[1].clone()], ..flat() }.fails(rank("past_key", "4", 3));
    Node { past: [node().past[0].clone(), Some(vec![2, 5, 20])], ..flat() }.fails(rank("past_value", "4", 3));
    Node { y: node().y, ..flat() }.fails(rank("y", "3, as q", 4));
    Node { y: flat().y, ..node() }.fails(rank("y", "4, as q", 3));
    Node { present: [Some(vec![2, 18, 8]), node().present[1].clone()], ..node() }.fails(rank("present_key", "4", 3));
    Node { present: [node().present[0].clone(), Some(vec![180, 2])], ..node() }.fails(rank("present_value", "4", 2));
    Node { qk: Some(vec![12, 3, 9]), ..node() }.fails(rank("qk_matmul_output", "4", 3));
    let tensor = |shape: &[usize]| Tensor::new(&[1.0f32], shape).map(|_| ());
    assert_eq!(tensor(&[]), Err(rank("tensor", "1 to 4", 0)));
    assert_eq!(tensor(&[1; 5]), Err(rank("tensor", "1 to 4", 5)));
    let strides = Tensor::with_strides(&[1.0f32], &[1, 1], &[1]).map(|_| ());
    assert_eq!(strides, Err(Error::Length { operand: "strides", expected: 2, actual: 1 }));
    let longer = TensorMut::new(&mut [1.0f32; 3], &[2, 2]).map(|_| ());
    assert_eq!(longer, Err(Error::Length { operand: "view", expected: 4, actual: 3 }));
    let overlap = TensorMut::with_strides(&mut [1.0f32; 3], &[2, 2], &[1, 1]).map(|_| ());
    assert_eq!(overlap, Err(Error::Overlap { operand: "view", axis: "dim", expected: 2, actual: 1 }));
}

#[test]
fn shapes() {
    for (axis, name) in [(0, "batch"), (3, "dim")] {
        let mut k = node().k;
        k[axis] += 1;
        let expected = k[axis] - 1;
        Node { k, ..node() }.fails(shape("k", name, expected, expected + 1));
    }
    for (axis, name) in [(0, "batch"), (1, "heads"), (2, "seq")] {
        let mut v = node().v;
        v[axis] += 1;
        let expected = v[axis] - 1;
        Node { v, ..node() }.fails(shape("v", name, expected, expected + 1));
    }
    let names = ["batch", "heads", "seq", "dim"];
    for (axis, name) in names.into_iter().enumerate() {
        let more = |shape: &Option<Vec<usize>>| {
            let mut shape = shape.clone().expect("a shape");
            shape[axis] += 1;
            (shape[axis] - 1, Some(shape))
        };
        let Node { past: [past_key, past_value], present: [key, value], qk, y, .. } = node();
        let (expected, wrong) = more(&past_value);
        Node { past: [past_key.clone(), wrong], ..node() }.fails(shape("past_value", name, expected, expected + 1));
        if axis != 2 {
            let (expected, wrong) = more(&past_key);
            Node { past: [wrong, past_value], ..node() }.fails(shape("past_key", name, expected, expected + 1));
        }
        let (expected, wrong) = more(&key);
        Node { present: [wrong, value.clone()], ..node() }.fails(shape("present_key", name, expected, expected + 1));
        let (expected, wrong) = more(&value);
        Node { present: [key, wrong], ..node() }.fails(shape("present_value", name, expected, expected + 1));
        let (expected, wrong) = more(&Some(y));
        Node { y: wrong.expect("a shape"), ..node() }.fails(shape("y", name, expected, expected + 1));
        let (expected, wrong) = more(&qk);
        let name = ["batch", "heads", "seqlen_q", "seqlen_k"][axis];
        Node { qk: wrong, ..node() }.fails(shape("qk_matmul_output", name, expected, expected + 1));
    }
    Node { y: vec![2, 3, 61], ..flat() }.fails(shape("y", "hidden", 60, 61));
}

#[test]
fn masks() {
    let mask = |mask: &[usize], error: Error| Node { mask: Some(mask.to_vec()), ..node() }.fails(error);
    mask(&[10], shape("attn_mask", "seqlen_k", 9, 10));
    mask(&[2, 9], shape("attn_mask", "seqlen_q", 3, 2));
    mask(&[2, 3, 9], shape("attn_mask", "heads", 6, 2));
    mask(&[3, 1, 3, 9], shape("attn_mask", "batch", 2, 3));
    let attention = Attention::new().opset(23);
    Node { attention, mask: Some(vec![3, 8]), ..node() }.fails(shape("attn_mask", "seqlen_k", 9, 8));
    // Every length must be covered.
    Node { mask: Some(vec![3, 3]), ..cached() }.fails(shape("attn_mask", "seqlen_k", 4, 3));
}

#[test]
fn what_goes_together() {
    let missing = |argument, needed_by| Error::Missing { argument, needed_by };
    let ([past_key, past_value], [key, value]) = (node().past, node().present);
    Node { past: [past_key.clone(), None], ..node() }.fails(missing("past_value", "past_key"));
    Node { past: [None, past_value.clone()], ..node() }.fails(missing("past_key", "past_value"));
    Node { present: [key, None], ..node() }.fails(missing("present_value", "present_key"));
    Node { present: [None, value], ..node() }.fails(missing("present_key", "present_value"));
    let conflict = |with| Error::Conflict { argument: "nonpad_kv_seqlen", with };
    Node { past: [past_key, past_value], mask: None, ..cached() }.fails(conflict("past_key"));
    let present = [Some(vec![2, 2, 4, 8]), Some(vec![2, 2, 4, 10])];
    Node { present, ..cached() }.fails(conflict("present_key"));
}

#[test]
fn lengths() {
    let with = |lengths: Vec<i64>, error: Error| Node { lengths: Some(lengths), mask: None, ..cached() }.fails(error);
    let value = |actual| Error::Value { option: "nonpad_kv_seqlen", expected: "0 to the length of the keys", actual };
    with(vec![4, 5], value(5.0));
    with(vec![-1, 4], value(-1.0));
    with(vec![4], Error::Length { operand: "nonpad_kv_seqlen", expected: 2, actual: 1 });
}

#[test]
fn mask_types_keep_their_shapes() {
    let half = [half::f16::ONE; 6];
    let mask: AttnMask<'_> = Tensor::new(&half, &[2, 3]).expect("a packed tensor").into();
    assert_eq!(mask.shape(), [2, 3]);
}
