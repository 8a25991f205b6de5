//! `errors_not_panics`: every error with its fields, outputs untouched by it, and no panic for any sizes, strides and options.

#[path = "oracle/mod.rs"]
mod oracle;
mod support;

use half::{bf16, f16};
use polyhead::{
    Bias, Diagonal, Error, Explanation, Heads, HeadsMut, Level, Mask, Matrices, MatricesMut, Matrix, MatrixMut,
    MultiHead, Options, Outputs, Precision, Shape, View, ViewMut, Window, multi_head, multi_head_with, reference,
};
use proptest::prelude::*;
use support::{Arrangement, PoisonedInput, PoisonedOutput, levels};

const MAX: usize = usize::MAX;
const Q: [usize; 4] = [2, 6, 3, 4];
const K: [usize; 4] = [2, 2, 5, 4];
const V: [usize; 4] = [2, 2, 5, 7];
const OUT: [usize; 4] = [2, 6, 3, 7];
const WEIGHTS: [usize; 4] = [2, 6, 3, 5];

fn plus_one(mut shape: [usize; 4], axis: usize) -> [usize; 4] {
    shape[axis] += 1;
    shape
}

fn input(shape: [usize; 4]) -> PoisonedInput<f32> {
    PoisonedInput::new(&vec![0.5; shape.iter().product()], shape, Arrangement::RowGaps(2))
}

/// Shapes of a call's operands, and how long its LSE is.
#[derive(Clone, Copy)]
struct Shapes {
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    out: [usize; 4],
    weights: [usize; 4],
    lse: usize,
}

const FITTING: Shapes = Shapes { q: Q, k: K, v: V, out: OUT, weights: WEIGHTS, lse: 36 };

/// The error of a call in all its forms, after asserting that no output was written to.
#[track_caller]
fn error_of(shapes: Shapes, averaged: bool, options: &Options<'_>) -> Error {
    let (q, k, v) = (input(shapes.q), input(shapes.k), input(shapes.v));
    let (poison, mut error) = (f32::from_bits(0x7fd0_0bad), None);
    for &level in levels() {
        let mut out = PoisonedOutput::<f16>::new(shapes.out, Arrangement::RowGaps(1));
        let mut weights = PoisonedOutput::<f32>::new(shapes.weights, Arrangement::Bhsd);
        let mut lse = vec![poison; shapes.lse];
        let outputs = Outputs::new(out.view()).lse(&mut lse);
        let outputs = if averaged { outputs.averaged_weights(weights.view()) } else { outputs.weights(weights.view()) };
        let result = multi_head_with(&q.view(), &k.view(), &v.view(), outputs, &options.level(level));
        out.assert_untouched(format_args!("out {result:?}"));
        weights.assert_untouched(format_args!("weights {result:?}"));
        assert!(lse.iter().all(|x| x.to_bits() == poison.to_bits()), "lse {result:?}");
        let found = result.expect_err("a call that cannot work");
        assert!(!found.to_string().is_empty());
        error = Some(found);
    }
    error.expect("a level")
}

#[test]
fn errors_not_panics() {
    let none = Options::new();
    let shape = |operand, axis, expected, actual| Error::Shape { operand, axis, expected, actual };
    let axes = ["batch", "heads", "seq", "dim"];
    for (axis, name) in [(0, "batch"), (3, "dim")] {
        let error = error_of(Shapes { k: plus_one(K, axis), ..FITTING }, false, &none);
        assert_eq!(error, shape("k", name, K[axis], K[axis] + 1));
    }
    for (axis, name) in [(0, "batch"), (1, "heads"), (2, "seq")] {
        let error = error_of(Shapes { v: plus_one(V, axis), ..FITTING }, false, &none);
        assert_eq!(error, shape("v", name, V[axis], V[axis] + 1));
    }
    for axis in 0..4 {
        let error = error_of(Shapes { out: plus_one(OUT, axis), ..FITTING }, false, &none);
        assert_eq!(error, shape("out", axes[axis], OUT[axis], OUT[axis] + 1));
        let names = ["batch", "heads", "seqlen_q", "seqlen_k"];
        let error = error_of(Shapes { weights: plus_one(WEIGHTS, axis), ..FITTING }, false, &none);
        assert_eq!(error, shape("weights", names[axis], WEIGHTS[axis], WEIGHTS[axis] + 1));
    }
    // Averaged weights have one plane.
    assert_eq!(error_of(FITTING, true, &none), shape("weights", "heads", 1, 6));
    for actual in [0, 35, 37] {
        let error = error_of(Shapes { lse: actual, ..FITTING }, false, &none);
        assert_eq!(error, Error::Length { operand: "lse", expected: 36, actual });
    }
    for num_heads in [5, 1] {
        let error = error_of(Shapes { q: [2, num_heads, 3, 4], ..FITTING }, false, &none);
        assert_eq!(error, Error::HeadGroups { num_heads, num_kv_heads: 2 });
    }
    let error = error_of(Shapes { k: [2, 0, 5, 4], v: [2, 0, 5, 7], ..FITTING }, false, &none);
    assert_eq!(error, Error::HeadGroups { num_heads: 6, num_kv_heads: 0 });
    let error = error_of(Shapes { q: [2, 6, 3, 0], k: [2, 2, 5, 0], ..FITTING }, false, &none);
    assert_eq!(error, Error::NoDefaultScale);
}

#[test]
fn errors_not_panics_for_options() {
    let none = Options::new();
    let fails = |options: Options<'_>| error_of(FITTING, false, &options);
    let value = |options: Options<'_>, name: &str, bad: f64| match fails(options) {
        Error::Value { option, expected, actual } => {
            assert_eq!((option, actual.to_bits()), (name, bad.to_bits()), "expected {expected}");
            assert!(!expected.is_empty());
        }
        other => panic!("{name} {bad}: {other:?}"),
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        value(none.softmax_scale(bad), "softmax_scale", bad.into());
        value(none.softcap(bad), "softcap", bad.into());
        value(none.alibi(&[0.0, 0.0, bad, 0.0, 0.0, 0.0], Diagonal::TopLeft), "alibi", bad.into());
    }
    for bad in [0.0, -0.0, -1.0, f32::MIN] {
        value(none.softcap(bad), "softcap", bad.into());
    }
    for bad in [f32::NAN, f32::INFINITY] {
        value(none.sinks(&[0.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0, bad]), "sinks", bad.into());
    }
    value(none.key_lengths(&[5, 6]), "key_lengths", 6.0);
    value(none.key_lengths(&[MAX, 5]), "key_lengths", MAX as f64);
    let length = |operand, expected, actual| Error::Length { operand, expected, actual };
    for actual in [0, 5, 7] {
        assert_eq!(fails(none.alibi(&vec![0.0; actual], Diagonal::TopLeft)), length("alibi", 6, actual));
        assert_eq!(fails(none.sinks(&vec![0.0; actual])), length("sinks", 6, actual));
        assert_eq!(fails(none.key_lengths(&vec![1; actual])), length("key_lengths", 2, actual));
    }
}

/// A24: a transposed mask; and each axis that is neither right nor 1.
#[test]
fn errors_not_panics_for_masks_and_biases() {
    let (bools, floats) = (vec![true; 4000], vec![0.0f32; 4000]);
    let names = ["batch", "heads", "seqlen_q", "seqlen_k"];
    for axis in 0..4 {
        for actual in [0, 4, 7] {
            let mut shape = [1; 4];
            shape[axis] = actual;
            let expected = |operand| Error::Shape { operand, axis: names[axis], expected: WEIGHTS[axis], actual };
            let mask = Mask::attend(View::with_strides(&bools, shape, [9, 9, 9, 1]).unwrap()).unwrap();
            assert_eq!(error_of(FITTING, false, &Options::new().mask(mask)), expected("mask"));
            let mask = Mask::ignore(View::with_strides(&bools, shape, [9, 9, 9, 1]).unwrap()).unwrap();
            assert_eq!(error_of(FITTING, false, &Options::new().mask(mask)), expected("mask"));
            let bias = Bias::new(View::with_strides(&floats, shape, [9, 9, 9, 1]).unwrap()).unwrap();
            assert_eq!(error_of(FITTING, false, &Options::new().bias(bias)), expected("bias"));
        }
    }
    let transposed = Mask::attend(Matrix::contiguous(&bools[..15], [5, 3]).unwrap()).unwrap();
    let expected = Error::Shape { operand: "mask", axis: "seqlen_q", expected: 3, actual: 5 };
    assert_eq!(error_of(FITTING, false, &Options::new().mask(transposed)), expected);
    let five = View::<bool, 5>::with_strides(&bools, [1; 5], [0; 5]).unwrap();
    for result in [Mask::attend(five).map(drop), Mask::ignore(five).map(drop)] {
        assert!(matches!(result, Err(Error::Unsupported { what }) if what.contains("four")), "{result:?}");
    }
    let five = View::<f32, 5>::with_strides(&floats, [1; 5], [0; 5]).unwrap();
    assert!(matches!(Bias::new(five), Err(Error::Unsupported { .. })));
}

#[test]
fn errors_not_panics_for_views() {
    let data = [0.0f32; 24];
    let length = |expected, actual| Error::Length { operand: "view", expected, actual };
    assert_eq!(Heads::bhsd(&data, [1, 2, 3, 5]).unwrap_err(), length(30, 24));
    assert_eq!(Heads::bhsd(&data, [1, 2, 3, 3]).unwrap_err(), length(18, 24));
    assert_eq!(Heads::bshd(&data[..23], [1, 2, 3, 4]).unwrap_err(), length(24, 23));
    assert_eq!(Heads::bhsd(&data, [1, 0, 3, MAX]).unwrap_err(), length(0, 24));
    assert_eq!(Heads::with_strides(&data, [1, 2, 3, 4], [0, 12, 4, 2]).unwrap_err(), length(27, 24));
    assert!(Heads::with_strides(&data, [1, 2, 3, 4], [0, 12, 4, 1]).is_ok());
    let overflow = |axis, size, stride| Error::Overflow { operand: "view", axis, size, stride };
    for stride in [1 << 62, MAX, MAX / 2 + 2] {
        assert_eq!(
            Heads::with_strides(&data, [1, 1, 2, 4], [0, 0, stride, 1]).unwrap_err(),
            overflow("seq", 2, stride)
        );
        assert_eq!(Matrix::with_strides(&data, [2, 4], [stride, 1]).unwrap_err(), overflow("row", 2, stride));
        assert_eq!(
            Matrices::with_strides(&data, [4, 2, 2], [1, 1, stride]).unwrap_err(),
            overflow("column", 2, stride)
        );
    }
    // A35: no wrap-around into the slice, by a product or by a sum.
    assert_eq!(Heads::with_strides(&data, [1, 1, 2, 4], [0, 0, 1 << 31, 1]).unwrap_err(), length((1 << 31) + 4, 24));
    assert_eq!(
        Heads::with_strides(&data, [1 << 32, 1, 1, 1], [1 << 32, 0, 0, 0]).unwrap_err(),
        overflow("batch", 1 << 32, 1 << 32)
    );
    // Two of them fit, three do not.
    let third = MAX / 20;
    assert_eq!(Heads::with_strides(&data, [2, 2, 2, 2], [third; 4]).unwrap_err(), overflow("seq", 2, third));
    assert_eq!(Heads::contiguous(&data, [MAX, MAX, MAX, MAX]).unwrap_err(), overflow("batch", MAX, MAX));
    // Elements of two bytes reach twice as far, and of none at all nowhere: nothing wraps either.
    assert!(matches!(
        View::<(), 2>::with_strides(&[(); 3], [MAX, 2], [MAX, 1]),
        Err(Error::Overflow { axis: "row", .. })
    ));
    for axes in [[0, 1, 2, 4], [0, 0, 1, 2], [3, 2, 1, 1], [MAX, 0, 1, 2]] {
        let view = Heads::bhsd(&data, [1, 2, 3, 4]).unwrap();
        assert!(matches!(view.permute(axes), Err(Error::Value { option: "axes", .. })), "{axes:?}");
    }
    assert_eq!(Heads::bhsd(&data, [1, 2, 3, 4]).unwrap().get([0, 2, 0, 0]), None);
    assert_eq!(Heads::bhsd(&data, [1, 2, 3, 4]).unwrap().get([0, MAX, MAX, MAX]), None);
}

#[test]
fn errors_not_panics_for_outputs_that_overlap() {
    let mut data = [0.0f32; 24];
    let overlap = |axis, expected, actual| Error::Overlap { operand: "view", axis, expected, actual };
    assert_eq!(HeadsMut::with_strides(&mut data, [1, 2, 3, 4], [0, 0, 4, 1]).unwrap_err(), overlap("heads", 1, 0));
    assert_eq!(HeadsMut::with_strides(&mut data, [1, 2, 3, 4], [0, 12, 3, 1]).unwrap_err(), overlap("seq", 4, 3));
    assert_eq!(HeadsMut::with_strides(&mut data, [1, 2, 3, 4], [0, 11, 4, 1]).unwrap_err(), overlap("heads", 12, 11));
    assert_eq!(HeadsMut::with_strides(&mut data, [2, 1, 1, 2], [0, 7, 7, 0]).unwrap_err(), overlap("batch", 1, 0));
    assert_eq!(MatrixMut::with_strides(&mut data, [3, 3], [1, 1]).unwrap_err(), overlap("column", 3, 1));
    assert_eq!(MatricesMut::with_strides(&mut data, [3, 2, 2], [1, 2, 3]).unwrap_err(), overlap("row", 3, 2));
    // Transposed, interleaved, of one row, of nothing: fine.
    assert!(HeadsMut::with_strides(&mut data, [1, 2, 3, 4], [0, 1, 8, 2]).is_ok());
    assert!(HeadsMut::with_strides(&mut data, [1, 1, 1, 24], [0, 0, 0, 1]).is_ok());
    assert!(HeadsMut::with_strides(&mut data, [MAX, MAX, 0, MAX], [0; 4]).is_ok());
    let error = HeadsMut::with_strides(&mut data, [MAX, 1, 1, 1], [0; 4]).unwrap_err();
    assert_eq!(error, overlap("batch", 1, 0));
}

#[test]
fn errors_not_panics_for_levels_and_plans() {
    let every = ["portable", "avx2", "avx512"].map(|name| Level::from_name(name).expect("a level's name"));
    for level in every.into_iter().filter(|level| !Level::available().contains(level)) {
        let expected = Error::LevelUnavailable { requested: level.name(), best: Level::detect().name() };
        let shape = oracle::shape([1; 7]);
        assert_eq!(MultiHead::new(shape, &Options::new().level(level)).unwrap_err(), expected);
    }
    assert_eq!(Level::from_name("none"), None);
    // A plan is for its shape.
    let shape = oracle::shape([2, 6, 2, 3, 5, 4, 7]);
    let mut plan = MultiHead::new(shape, &Options::new()).unwrap();
    for (operand, expected) in [("q", Q), ("k", K), ("v", V)] {
        for (axis, name) in ["batch", "heads", "seq", "dim"].into_iter().enumerate() {
            let pick = |this, shape| input(if this == operand { plus_one(shape, axis) } else { shape });
            let (q, k, v) = (pick("q", Q), pick("k", K), pick("v", V));
            let mut out = PoisonedOutput::<bf16>::new(OUT, Arrangement::Bshd);
            let error = plan.run(&q.view(), &k.view(), &v.view(), out.view()).unwrap_err();
            let (expected, actual) = (expected[axis], expected[axis] + 1);
            assert_eq!(error, Error::Shape { operand, axis: name, expected, actual });
            out.assert_untouched(operand);
        }
    }
    let mut out = PoisonedOutput::<bf16>::new(plus_one(OUT, 2), Arrangement::Bshd);
    let error = plan.run(&input(Q).view(), &input(K).view(), &input(V).view(), out.view()).unwrap_err();
    assert_eq!(error, Error::Shape { operand: "out", axis: "seq", expected: 3, actual: 4 });
    // No memory for it: of tasks, of tiles, of numbers that do not exist.
    for (axis, sizes) in [MAX, MAX / 2, 1 << 61].into_iter().flat_map(|size| (0..7).map(move |axis| (axis, size))) {
        let mut all = [1usize; 7];
        all[axis] = sizes;
        let result = MultiHead::new(oracle::shape(all), &Options::new());
        match axis {
            // One query head on many KV heads.
            2 => assert_eq!(result.unwrap_err(), Error::HeadGroups { num_heads: 1, num_kv_heads: sizes }),
            // Keys cost nothing.
            4 => assert!(result.is_ok()),
            _ => assert!(matches!(result, Err(Error::Memory { bytes }) if bytes > 1 << 40), "axis {axis}: {result:?}"),
        }
    }
}

/// Axes of stride 0 that are longer than any memory, in inputs and in outputs without elements.
#[test]
fn errors_not_panics_for_axes_longer_than_memory() {
    let one = [1.0f32];
    for &level in levels() {
        let options = Options::new().level(level);
        let wide = |shape| Heads::with_strides(&one, shape, [0; 4]).unwrap();
        // All heads, items and queries of nothing.
        for q in [[MAX, 1, 1, 1], [1, MAX, 1, 1], [1, 1, MAX, 1], [MAX; 4]] {
            let kv = [q[0], 1, 1, q[3]];
            let v = Heads::<f32>::with_strides(&[], [q[0], 1, 1, 0], [0; 4]).unwrap();
            let out = HeadsMut::<f32>::with_strides(&mut [], [q[0], q[1], q[2], 0], [0; 4]).unwrap();
            assert_eq!(multi_head(&wide(q), &wide(kv), &v, out, &options), Ok(()));
            let out = HeadsMut::<f32>::with_strides(&mut [], [q[0], q[1], q[2], 0], [0; 4]).unwrap();
            let error = multi_head_with(&wide(q), &wide(kv), &v, Outputs::new(out).lse(&mut []), &options).unwrap_err();
            assert!(matches!(error, Error::Overflow { operand: "lse", .. }), "{error:?}");
        }
        // A query that sees one of very many keys.
        let mut out = [f32::NAN];
        let out = HeadsMut::bhsd(&mut out, [1; 4]).unwrap();
        let keys = wide([1, 1, MAX, 1]);
        assert_eq!(multi_head(&wide([1; 4]), &keys, &keys, out, &options.causal(Diagonal::TopLeft)), Ok(()));
        // A width that no scratch holds.
        let mut out = [f32::NAN];
        let wider = wide([1, 1, 1, MAX]);
        let result = multi_head(&wider, &wider, &wide([1; 4]), HeadsMut::bhsd(&mut out, [1; 4]).unwrap(), &options);
        assert!(matches!(result, Err(Error::Memory { .. })), "{result:?}");
        assert!(out[0].is_nan());
    }
}

/// Sizes that are small, at the edges of arithmetic, or around what fits nowhere; none that would merely take long.
fn wild_size() -> impl Strategy<Value = usize> {
    prop_oneof![
        12 => 0..4usize,
        1 => prop::sample::select(vec![MAX, MAX - 1, MAX / 2, MAX / 2 + 1, 1 << 62, 1 << 61, (1 << 60) + 1]),
    ]
}

fn wild_stride() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => 0..20usize,
        1 => prop::sample::select(vec![MAX, MAX / 2, 1 << 31, 1 << 62, 1 << 63, 1 << 32, 1 << 16, MAX / 3]),
    ]
}

fn wild_float() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -2.0f32..2.0,
        1 => prop::num::f32::ANY,
        1 => prop::sample::select(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-45]),
    ]
}

fn wild_diagonal() -> impl Strategy<Value = Diagonal> {
    prop_oneof![
        Just(Diagonal::TopLeft),
        Just(Diagonal::BottomRight),
        (-4isize..5).prop_map(Diagonal::Offset),
        prop::sample::select(vec![isize::MIN, isize::MIN + 1, isize::MAX]).prop_map(Diagonal::Offset),
    ]
}

type Geometry = ([usize; 4], [usize; 4]);

/// Everything about a call that may be wrong.
#[derive(Clone, Debug)]
struct Wild {
    sizes: [usize; 7],
    /// Shapes and strides that replace those of `sizes`, of q, k, v, out, weights, mask and bias.
    odd: Vec<(usize, Geometry)>,
    lists: (Option<Vec<usize>>, Option<Vec<f32>>, Option<Vec<f32>>),
    scale: Option<f32>,
    softcap: Option<f32>,
    causal: Option<Diagonal>,
    window: Option<(Option<usize>, Option<usize>, Diagonal)>,
    data: usize,
    wanted: usize,
}

fn wild() -> impl Strategy<Value = Wild> {
    let geometry = (prop::array::uniform4(wild_size()), prop::array::uniform4(wild_stride()));
    let list = || prop::option::weighted(0.2, prop::collection::vec(wild_float(), 0..4));
    let side = || prop::option::of(wild_size());
    (
        prop::array::uniform7(wild_size()),
        prop::collection::vec((0..7usize, geometry), 0..3),
        (prop::option::weighted(0.2, prop::collection::vec(wild_size(), 0..4)), list(), list()),
        (prop::option::weighted(0.7, wild_float()), prop::option::weighted(0.2, wild_float())),
        prop::option::of(wild_diagonal()),
        prop::option::of((side(), side(), wild_diagonal())),
        0..200usize,
        0..4usize,
    )
        .prop_map(|(sizes, odd, lists, (scale, softcap), causal, window, data, wanted)| Wild {
            sizes,
            odd,
            lists,
            scale,
            softcap,
            causal,
            window,
            data,
            wanted,
        })
}

impl Wild {
    /// Shape and strides of an operand: packed as far as sizes fit, axes of stride 0 where they do not.
    fn geometry(&self, operand: usize) -> Geometry {
        if let Some((_, geometry)) = self.odd.iter().find(|(which, _)| *which == operand) {
            return *geometry;
        }
        let [b, h, kv, l, s, d, dv] = self.sizes;
        let shape = [
            [b, h, l, d],
            [b, kv, s, d],
            [b, kv, s, dv],
            [b, h, l, dv],
            [b, if self.wanted == 3 { 1 } else { h }, l, s],
            [b, 1, l, s],
            [1, h, 1, s],
        ][operand];
        let mut step = 1usize;
        let mut strides = [0; 4];
        for axis in (0..4).rev().filter(|&axis| shape[axis] < 1 << 20) {
            (strides[axis], step) = (step, step.saturating_mul(shape[axis].max(1)));
        }
        (shape, strides)
    }

    /// Whether it could run, and for longer than a test has time: keys or rows without end that are seen.
    fn is_endless(&self) -> bool {
        self.sizes.iter().chain(self.odd.iter().flat_map(|(_, (shape, _))| shape)).any(|&size| size > 1 << 20)
    }

    /// Makes all views and, unless they are wrong or endless, the calls.
    fn run(&self, level: Level) -> Result<(), Error> {
        let data: Vec<f32> = (0..self.data).map(|x| x as f32 * 0.1 - 3.0).collect();
        let bools: Vec<bool> = (0..self.data).map(|x| x % 3 != 0).collect();
        let view = |operand| {
            let (shape, strides) = self.geometry(operand);
            Heads::with_strides(&data, shape, strides)
        };
        let mut out = data.clone();
        let mut weights = data.clone();
        let mut options = Options::new().level(level).precision(Precision::Medium);
        if let Some(scale) = self.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(cap) = self.softcap {
            options = options.softcap(cap);
        }
        if let Some(diagonal) = self.causal {
            options = options.causal(diagonal);
        }
        if let Some((left, right, diagonal)) = self.window {
            options = options.window(Window { left, right, diagonal });
        }
        let (lengths, slopes, sinks) = &self.lists;
        if let Some(lengths) = lengths {
            options = options.key_lengths(lengths);
        }
        if let Some(slopes) = slopes {
            options = options.alibi(slopes, self.causal.unwrap_or(Diagonal::TopLeft));
        }
        if let Some(sinks) = sinks {
            options = options.sinks(sinks);
        }
        let shape = oracle::shape(self.sizes);
        if let Ok(plan) = MultiHead::new(shape, &options) {
            assert!(!plan.explain().to_string().is_empty());
        }
        let (mask_shape, mask_strides) = self.geometry(5);
        let mask = Mask::attend(View::with_strides(&bools, mask_shape, mask_strides)?)?;
        let options = if self.data % 3 == 0 { options } else { options.mask(mask) };
        let options = if self.data % 2 == 0 { options } else { options.bias(Bias::new(view(6)?)?) };
        let (q, k, v) = (view(0)?, view(1)?, view(2)?);
        let ((out_shape, out_strides), (weights_shape, weights_strides)) = (self.geometry(3), self.geometry(4));
        let outputs = Outputs::new(HeadsMut::with_strides(&mut out, out_shape, out_strides)?);
        let mut lse = vec![0.0; out_shape[..3].iter().fold(1usize, |len, &size| len.saturating_mul(size)).min(1000)];
        let outputs = if self.wanted > 0 { outputs.lse(&mut lse) } else { outputs };
        let weights = HeadsMut::with_strides(&mut weights, weights_shape, weights_strides);
        let outputs = match self.wanted {
            2 => outputs.weights(weights?),
            3 => outputs.averaged_weights(weights?),
            _ => outputs,
        };
        if self.is_endless() {
            return Ok(());
        }
        let by_reference = reference::multi_head(&q, &k, &v, &options);
        let result = multi_head_with(&q, &k, &v, outputs, &options);
        if let Err(error) = by_reference {
            // As text: a NaN in it is unlike itself.
            let (ours, theirs) = (format!("{result:?}"), format!("{:?}", Err::<(), _>(error)));
            assert_eq!(ours, theirs, "the reference refuses what the kernel takes, or for another reason");
        }
        result
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2000)
    ) })]

    #[test]
    fn errors_not_panics_for_wild_calls(call in wild()) {
        for &level in levels() {
            let result = std::panic::catch_unwind(|| call.run(level));
            prop_assert!(result.is_ok(), "a panic on {}", level.name());
        }
    }

    /// Views alone, with any strides: an error, or every element inside of the slice.
    #[test]
    fn errors_not_panics_for_wild_views(
        shape in prop::array::uniform4(wild_size()), strides in prop::array::uniform4(wild_stride()), len in 0..300usize
    ) {
        let mut data = vec![0u8; len];
        let small = shape.iter().all(|&size| size < 8);
        if let Ok(view) = View::with_strides(&data, shape, strides) {
            let corner = shape.map(|size| size.saturating_sub(1));
            prop_assert_eq!(view.get(corner).is_some(), !shape.contains(&0));
            prop_assert_eq!(view.get(shape), None);
            prop_assert!(view.permute([3, 1, 0, 2]).is_ok());
        }
        if let Ok(view) = ViewMut::with_strides(&mut data, shape, strides) {
            // No two elements in one place: seen by writing a number of its own to each, through the strides.
            let strides = view.strides();
            prop_assert!(shape.contains(&0) || small || shape.iter().all(|&size| size <= len));
            let mut places = std::collections::HashSet::new();
            for at in 0..if small { shape.iter().product() } else { 0 } {
                let [_, h, s, d] = shape;
                let index = [at / d / s / h, at / d / s % h, at / d % s, at % d];
                let place: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                prop_assert!(place < len && places.insert(place), "{:?} is {}", index, place);
            }
        }
        let _ = Heads::contiguous(&data, shape);
        let _ = HeadsMut::bshd(&mut data, shape);
    }
}

/// Public types can be sent and shared as their parts can.
#[test]
fn errors_not_panics_across_threads() {
    fn both<T: Send + Sync + 'static>() -> &'static str {
        core::any::type_name::<T>()
    }
    let names = [
        both::<Error>(),
        both::<Level>(),
        both::<Shape>(),
        both::<Explanation>(),
        both::<Precision>(),
        both::<Diagonal>(),
        both::<Window>(),
        both::<Options<'static>>(),
        both::<Mask<'static>>(),
        both::<Bias<'static>>(),
        both::<Heads<'static, f32>>(),
        both::<HeadsMut<'static, f16>>(),
        both::<Matrix<'static, bf16>>(),
        both::<MultiHead<'static>>(),
        both::<Outputs<'static, f32>>(),
        both::<reference::Attention>(),
    ];
    let error: Box<dyn std::error::Error + Send + Sync> = Box::new(Error::NoDefaultScale);
    assert!(error.to_string().contains("softmax_scale") && names.iter().all(|name| name.contains("polyhead")));
}
