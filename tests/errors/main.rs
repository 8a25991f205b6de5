//! `errors_not_panics`: every error with its fields, outputs untouched by it, and no panic for any sizes, strides and options.

mod display;
#[path = "../oracle/mod.rs"]
mod oracle;
#[path = "../support/mod.rs"]
mod support;
mod wild;

use half::{bf16, f16};
use polyhead::{
    Bias, Diagonal, Error, Explanation, Heads, HeadsMut, Level, Mask, Matrices, MatricesMut, Matrix, MatrixMut,
    MultiHead, Options, Outputs, Precision, Shape, View, Window, multi_head, multi_head_with, reference,
};
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
