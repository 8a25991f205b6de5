//! A37 to A39, A42: softcap, scale, and sinks.

use polyhead::{Diagonal, Error, HeadsMut, MultiHead, Options, multi_head};

use crate::operands::{Operands, attend, bias, on_every_level, shape, table};
use crate::support::{Bits, assert_all_close, is_close};

const NI: f32 = f32::NEG_INFINITY;

/// Softcap comes before the mask: a hidden key has no weight, where the wrong order gives it e^-1 of the other.
#[test]
fn a37_softcap_before_mask() {
    let mut operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (1, 2), (1, 1)));
    operands.v = vec![1.0, 1000.0];
    let (floats, mask) = ([0.0, NI], [true, false]);
    operands.assert_rows(&Options::new().softcap(1.0).bias(bias(&floats, [1, 2])), &[1.0], "bias");
    operands.assert_rows(&Options::new().softcap(1.0).mask(attend(&mask, [1, 2])), &[1.0], "mask");
    on_every_level(|level, name| {
        let options = Options::new().softcap(1.0).bias(bias(&floats, [1, 2])).level(level);
        assert_eq!(operands.run(&options, name).out, [1.0], "{name}");
    });
}

/// Scale, cap, bias, visibility, softmax, in this order, with everything at once.
#[test]
fn a37_order_of_the_score() {
    for (seqlen_q, seqlen_k) in [(3, 5), (33, 130), (1, 257)] {
        let operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen_q, seqlen_k), (8, 8)), 37);
        // A bias beyond the cap: capped after it, it would be lost.
        let floats = table(seqlen_q, seqlen_k, |i, j| if (i + j) % 7 == 0 { NI } else { (j % 5) as f32 * 3.0 });
        let options = Options::new().softmax_scale(2.0).softcap(1.5).bias(bias(&floats, [seqlen_q, seqlen_k]));
        operands.check(&options, "cap and bias");
        operands.check(&options.causal(Diagonal::BottomRight), "cap, bias, causal");
        operands.check(&options.alibi(&[0.5, 2.0], Diagonal::TopLeft).sinks(&[1.0, NI]), "cap, bias, ALiBi, sink");
    }
}

/// The LSE of a single key is its capped score.
#[test]
fn a38_softcap_of_large_scores() {
    let right = [
        (1.0, 0.999867),
        (100.0, 48.201379),
        (1000.0, 50.0),
        (4400.0, 50.0),
        (5000.0, 50.0),
        (-10000.0, -50.0),
        (0.0, 0.0),
        (1e-30, 1e-30),
        (3e38, 50.0),
        (f32::MIN, -50.0),
    ];
    for (score, capped) in right {
        let operands = Operands { shape: shape(1, (1, 1), (1, 1), (1, 1)), q: vec![score], k: vec![1.0], v: vec![2.0] };
        let expected = operands.check(&Options::new().softcap(50.0), score);
        assert!(is_close(expected.lse[0], capped, 1e-6, 1e-6), "{score}: {}", expected.lse[0]);
        on_every_level(|level, name| {
            let lse = operands.run(&Options::new().softcap(50.0).level(level), name).lse[0];
            assert!(is_close(lse, capped, 1e-6, 1e-6), "{score} on {name}: {lse}");
        });
    }
}

/// A cap makes infinite scores finite: +-cap. NaN stays.
#[test]
fn a38_softcap_of_infinite_scores() {
    for (value, capped) in [(f32::INFINITY, 50.0), (NI, -50.0), (f32::NAN, f64::NAN)] {
        let operands =
            Operands { shape: shape(1, (1, 1), (1, 2), (1, 1)), q: vec![1.0], k: vec![value; 2], v: vec![2.0, 4.0] };
        let expected = operands.check(&Options::new().softcap(50.0), value);
        assert!(is_close(expected.lse[0], capped + 2f64.ln(), 1e-12, 0.0), "{value}: {}", expected.lse[0]);
    }
    let mut large = Operands::<f32>::random(shape(1, (2, 2), (33, 130), (8, 8)), 38);
    large.q.iter_mut().for_each(|q| *q *= 1e4);
    for cap in [1e-3, 1.0, 50.0, 1e6, f32::MIN_POSITIVE, f32::MAX] {
        let expected = large.reference(&Options::new().softcap(cap));
        on_every_level(|level, name| {
            let results = large.run(&Options::new().softcap(cap).level(level), name);
            assert!(results.out.iter().all(|x| x.is_finite()), "cap {cap} on {name}");
            // Scores of 1e4 and more have errors of 1e-3 in f32, which caps of 1 and less forget.
            if cap <= 1.0 {
                assert_all_close(&results.out, &expected.out, 1e-4, 0.0, format_args!("cap {cap} on {name}"));
            }
        });
    }
}

#[test]
fn a39_negative_and_zero_scale() {
    let operands = Operands {
        shape: shape(1, (1, 1), (1, 3), (1, 1)),
        q: vec![1.0f32],
        k: vec![0.0, 1.0, 2.0],
        v: vec![10.0, 20.0, 30.0],
    };
    let causal = |options: Options<'static>| [options, options.causal(Diagonal::BottomRight)];
    for options in causal(Options::new().softmax_scale(-1.0)) {
        operands.assert_rows(&options, &[14.247896], "scale -1");
    }
    for options in
        causal(Options::new().softmax_scale(0.0)).into_iter().chain(causal(Options::new().softmax_scale(-0.0)))
    {
        operands.assert_rows(&options, &[20.0], "scale 0");
    }
    for (seqlen_q, seqlen_k) in [(9, 9), (33, 130)] {
        let operands = Operands::<f32>::random(shape(1, (2, 1), (seqlen_q, seqlen_k), (8, 8)), 39);
        // 2^-70 and 2^70 are beyond where the kernel may leave the scale to the exponent.
        for scale in [-1.0, -0.125, 0.0, -3.5, 2f32.powi(-70), -2f32.powi(-70), f32::MIN_POSITIVE] {
            for options in causal(Options::new().softmax_scale(scale)) {
                operands.check(&options, format_args!("scale {scale:e}"));
                operands.check(&options.softcap(2.0), format_args!("scale {scale:e}, capped"));
                operands.check(&options.sinks(&[0.5, -0.5]), format_args!("scale {scale:e}, sinks"));
            }
        }
    }
}

/// A scale that is no number is refused, and nothing is written.
#[test]
fn a39_scale_that_is_not_finite() {
    let operands = Operands::<f32>::random(shape(1, (1, 1), (2, 3), (4, 4)), 39);
    for bad in [f32::NAN, f32::INFINITY, NI] {
        let options = Options::new().softmax_scale(bad);
        let mut out = [f32::OUTPUT; 8];
        let [q, k, v] = operands.views();
        let view = HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed");
        let error = multi_head(&q, &k, &v, view, &options).expect_err("not finite");
        assert!(matches!(error, Error::Value { option: "softmax_scale", .. }), "{error:?}");
        assert!(out.iter().all(|x| x.bits() == f32::OUTPUT.bits()));
        assert!(MultiHead::new(operands.shape, &options).is_err());
    }
}

/// A sink joins the maximum once and the sum once, as it is; it has no value.
#[test]
fn a42_sink_in_maximum_and_sum() {
    // The two visible keys in one block of keys, or in different ones.
    for (first, second, seqlen_k) in [(0, 1, 2), (0, 299, 300), (127, 128, 300), (5, 140, 141)] {
        let mut operands = Operands::<f32>::uni_ramp(shape(1, (4, 4), (1, seqlen_k), (4, 1)));
        operands.each_value(|_, key, _| if key == first { 3.0 } else { 9.0 });
        let mask = table(1, seqlen_k, |_, j| j == first || j == second);
        let sinks = [0.0, 200.0, NI, -200.0];
        let options = Options::new().mask(attend(&mask, [1, seqlen_k])).sinks(&sinks);
        let expected = operands.check(&options, format_args!("keys {first} and {second}"));
        assert_all_close(&expected.out, &[4.0, 0.0, 6.0, 6.0], 1e-12, 0.0, "outputs");
        assert_all_close(&expected.lse, &[3f64.ln(), 200.0, 2f64.ln(), 2f64.ln()], 1e-12, 0.0, "LSE");
        assert!((expected.weights[first] - 1.0 / 3.0).abs() < 1e-12);
        let none = [false];
        let empty = Options::new().mask(attend(&none, [1, 1])).sinks(&[1.0; 4]);
        operands.assert_rows(&empty, &[0.0], "nothing but a sink");
    }
}

/// The sink is not scaled, capped or biased.
#[test]
fn a42_sink_is_taken_as_it_is() {
    for (seqlen_q, seqlen_k) in [(1, 300), (33, 130), (5, 1)] {
        let operands = Operands::<f32>::random(shape(2, (4, 2), (seqlen_q, seqlen_k), (8, 8)), 42);
        let sinks = [3.0, -2.0, 30.0, NI];
        let options = Options::new().sinks(&sinks);
        for (name, options) in [
            ("plain", options),
            ("scale", options.softmax_scale(-0.01)),
            ("cap", options.softcap(0.5)),
            ("bias", options.bias(bias(&[7.0], [1, 1]))),
            ("causal", options.causal(Diagonal::TopLeft)),
        ] {
            operands.check(&options, format_args!("{name}, {seqlen_q} queries, {seqlen_k} keys"));
        }
    }
    // Extremes of the sink against ordinary scores.
    let operands = Operands::<f32>::random(shape(1, (4, 4), (3, 130), (8, 8)), 42);
    operands.check(&Options::new().sinks(&[f32::MAX, f32::MIN, 88.0, -104.0]), "extreme sinks");
}

/// Split over keys: the parts without the sink, joined by their LSE with the sink as one more part.
#[test]
fn a42_sink_over_split_keys() {
    let (seqlen_k, dim) = (300, 8);
    let operands = Operands::<f32>::random(shape(1, (1, 1), (2, seqlen_k), (dim, dim)), 42);
    let sink = 0.75;
    let whole = operands.check(&Options::new().sinks(&[sink]), "whole");
    for split in [1, 128, 150, 299] {
        on_every_level(|level, name| {
            let part = |keys: core::ops::Range<usize>| {
                let rows = |data: &[f32]| data[keys.start * dim..keys.end * dim].to_vec();
                let shape = shape(1, (1, 1), (2, keys.len()), (dim, dim));
                let part = Operands { shape, q: operands.q.clone(), k: rows(&operands.k), v: rows(&operands.v) };
                part.run(&Options::new().level(level), name)
            };
            let (a, b) = (part(0..split), part(split..seqlen_k));
            for at in 0..2 * dim {
                let [x, y] = [&a, &b].map(|part| f64::from(part.lse[at / dim]).exp());
                let joined = (x * f64::from(a.out[at]) + y * f64::from(b.out[at])) / (x + y + f64::from(sink).exp());
                assert!(is_close(joined, whole.out[at], 1e-5, 0.0), "split at {split} on {name}: {joined}");
            }
        });
    }
}
