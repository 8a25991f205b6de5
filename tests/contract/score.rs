use polyhead::{Diagonal, Level, Window};

use crate::oracle::{ALL_F32, BiasTable, Call, MaskTable, Opts, TYPES, Wanted, shape, table_shape};
use crate::support::{Rng, assert_all_close, assert_close, levels};

const NI: f32 = f32::NEG_INFINITY;

/// One query of 1 whose scores are the keys, scale 1 unless given.
fn scores(keys: &[f32], values: &[f32], options: Opts) -> Call {
    let mut call = Call::random(shape([1, 1, 1, 1, keys.len(), 1, 1]), ALL_F32, &mut Rng::new(1));
    call.q = vec![1.0];
    call.k = keys.to_vec();
    call.v = values.to_vec();
    call.options(Opts { scale: options.scale.or(Some(1.0)), ..options })
}

/// Output, LSE and weights on a level.
fn run(level: Level, keys: &[f32], values: &[f32], options: Opts) -> (f32, f32, Vec<f32>) {
    let results = scores(keys, values, options).run(level, Wanted::Weights);
    (results.out[0], results.lse[0], results.weights)
}

fn row_bias(values: &[f32]) -> Option<BiasTable> {
    Some(BiasTable { values: values.to_vec(), shape: [1, 1, 1, values.len()] })
}

#[test]
fn order_of_the_score() {
    let none = Opts::default();
    for &level in levels() {
        // A37: the cap before the mask; the other order gives 269.67.
        let options = Opts { softcap: Some(1.0), bias: row_bias(&[0.0, NI]), ..none.clone() };
        assert_eq!(run(level, &[0.0, 0.0], &[1.0, 1000.0], options).0, 1.0);
        let mask = MaskTable { values: vec![true, false], shape: [1, 1, 1, 2], attend: true };
        let options = Opts { softcap: Some(1.0), mask: Some(mask), ..none.clone() };
        assert_eq!(run(level, &[0.0, 0.0], &[1.0, 1000.0], options).0, 1.0);
        // A38: with one key the LSE is its score.
        let capped = |raw, scale, bias: f32| {
            let options = Opts { softcap: Some(50.0), scale: Some(scale), bias: row_bias(&[bias]), ..none.clone() };
            run(level, &[raw], &[7.0], options).1
        };
        for (raw, expected) in [
            (1.0, 0.999867),
            (100.0, 48.201379),
            (1000.0, 50.0),
            (4400.0, 50.0),
            (5000.0, 50.0),
            (-10000.0, -50.0),
            (f32::INFINITY, 50.0),
            (NI, -50.0),
            (0.0, 0.0),
            (f32::MAX, 50.0),
            (f32::MIN, -50.0),
        ] {
            assert_close(capped(raw, 1.0, 0.0), expected, 1e-6, 1e-6, format_args!("{} cap {raw}", level.name()));
            // Scale before the cap, bias after it.
            if raw.abs() < 1e30 {
                assert_close(
                    capped(2.0 * raw, 0.5, 3.0),
                    expected + 3.0,
                    1e-6,
                    1e-6,
                    format_args!("{} {raw}", level.name()),
                );
            }
        }
        // A39.
        let scaled =
            |scale| run(level, &[0.0, 1.0, 2.0], &[10.0, 20.0, 30.0], Opts { scale: Some(scale), ..none.clone() });
        assert_close(scaled(-1.0).0, 14.247896, 1e-5, 0.0, level.name());
        assert_close(scaled(0.0).0, 20.0, 1e-5, 0.0, level.name());
        assert_close(scaled(-0.0).0, 20.0, 1e-5, 0.0, level.name());
        // ALiBi is neither scaled nor capped.
        let options = Opts {
            alibi: Some((vec![100.0], Diagonal::Offset(2))),
            softcap: Some(1.0),
            scale: Some(0.0),
            ..none.clone()
        };
        assert_eq!(run(level, &[5.0], &[7.0], options).1, -200.0);
    }
}

/// A42: the sink is in the maximum and in the sum, once, as it is.
#[test]
fn order_of_the_score_ends_with_the_sink() {
    for &level in levels() {
        let run =
            |sink, options: Opts| run(level, &[0.0, 0.0], &[3.0, 9.0], Opts { sinks: Some(vec![sink]), ..options });
        let close = |a: f32, b: f64| assert_close(a, b, 1e-6, 1e-6, level.name());
        let third = run(0.0, Opts::default());
        close(third.0, 4.0);
        close(third.1, 3f64.ln());
        assert_all_close(&third.2, &[1.0 / 3.0, 1.0 / 3.0], 1e-6, 0.0, level.name());
        let all = run(200.0, Opts::default());
        assert_eq!((all.0, all.1), (0.0, 200.0));
        assert_eq!(run(NI, Opts::default()).0, 6.0);
        assert_eq!(run(-1e30, Opts::default()).0, 6.0);
        assert_eq!(run(f32::MAX, Opts::default()).1, f32::MAX);
        let neither = Opts { scale: Some(0.0), softcap: Some(0.01), ..Opts::default() };
        assert_eq!(run(200.0, neither).1, 200.0);
        let empty = run(1.0, Opts { key_lengths: Some(vec![0]), ..Opts::default() });
        assert_eq!(empty, (0.0, NI, vec![0.0, 0.0]));
    }
}

/// Scores of -inf are numbers: weight 0 beside others, NaN by themselves, and a finite sink takes all (reference.rs).
#[test]
fn order_of_the_score_with_infinite_scores() {
    for &level in levels() {
        let values = [1.0, 2.0];
        let sinks = |sink| Opts { sinks: Some(vec![sink]), ..Opts::default() };
        assert_eq!(run(level, &[0.0, NI], &values, Opts::default()), (1.0, 0.0, vec![1.0, 0.0]));
        let alone = run(level, &[NI, NI], &values, Opts::default());
        assert!(
            alone.0.is_nan() && alone.1.is_nan() && alone.2.iter().all(|w| w.is_nan()),
            "{}: {alone:?}",
            level.name()
        );
        let no_sink = run(level, &[NI, NI], &values, sinks(NI));
        assert!(no_sink.0.is_nan() && no_sink.1.is_nan(), "{}: {no_sink:?}", level.name());
        let sink = run(level, &[NI, NI], &values, sinks(3.0));
        assert_eq!(sink, (0.0, 3.0, vec![0.0, 0.0]), "{}: all scores -inf, sink 3", level.name());
        let top = run(level, &[f32::INFINITY, 0.0], &values, sinks(3.0));
        assert!(top.0.is_nan() && top.1.is_nan(), "{}: {top:?}", level.name());
    }
}

/// A40: the default scale, and 0 as a scale like any other.
#[test]
fn order_of_the_score_begins_with_the_scale() {
    let column = |from: u32, step: f32| (0..6).map(|x| (from + x) as f32 * step).collect::<Vec<f32>>();
    for scale in [None, Some(0.0)] {
        let mut call = Call::random(shape([1, 1, 1, 3, 3, 2, 2]), ALL_F32, &mut Rng::new(1));
        (call.q, call.k, call.v) = (column(1, 0.1), column(7, 0.1), column(1, 1.0));
        let call = call.options(Opts { causal: Some(Diagonal::TopLeft), scale, ..Opts::default() });
        let expected = match scale {
            None => [1.0, 2.0, 2.049457, 3.049457, 3.206586, 4.206586],
            Some(_) => [1.0, 2.0, 2.0, 3.0, 3.0, 4.0],
        };
        for &level in levels() {
            assert_all_close(&call.run(level, Wanted::Out).out, &expected, 1e-6, 1e-6, level.name());
        }
    }
}

/// Every subset of scale, softcap, ALiBi, bias and sinks, on several blocks, with and without causality.
#[test]
fn order_of_the_score_in_every_combination() {
    let mut rng = Rng::new(61);
    for set in 0..32usize {
        let shape = shape([2, 4, 2, 35, 140, 12, 6]);
        let on = |bit: usize| set >> bit & 1 == 1;
        let diagonal = [Diagonal::TopLeft, Diagonal::BottomRight, Diagonal::Offset(-7)][set % 3];
        let options = Opts {
            scale: on(0).then(|| [-0.7, 1.5, 1e-25, 0.02][set % 4]),
            softcap: on(1).then(|| [0.5, 3.0, 50.0][set % 3]),
            alibi: on(2).then(|| (vec![0.5, 0.0, -0.01, 1.0 / 64.0], diagonal)),
            bias: on(3).then(|| BiasTable::random(table_shape(&shape, set), 0.1, &mut rng)),
            sinks: on(4).then(|| vec![1.0, f32::NEG_INFINITY, -3.0, 8.0]),
            causal: (set % 4 == 1).then_some(Diagonal::Offset(60)),
            window: (set % 8 == 6).then_some(Window { left: Some(50), right: Some(50), diagonal }),
            ..Opts::default()
        };
        let call = Call::random(shape, TYPES[set % TYPES.len()], &mut rng).options(options);
        let expected = call.expected();
        for &level in levels() {
            call.check(level, &expected, format_args!("combination {set:05b}"));
        }
    }
}

#[test]
fn order_of_the_score_weights_sum_to_one() {
    let mut rng = Rng::new(62);
    for sinks in [None, Some(vec![0.5, 1.0])] {
        let options = Opts { causal: Some(Diagonal::TopLeft), sinks, ..Opts::default() };
        let call = Call::random(shape([1, 2, 1, 150, 290, 16, 4]), ALL_F32, &mut rng).options(options);
        for &level in levels() {
            let results = call.run(level, Wanted::Weights);
            for [b, h, i] in call.rows() {
                let (out, lse, weights) = results.row(&call.shape, [b, h, i]);
                let sink = call.options.sinks.as_ref().map_or(0.0, |sinks| f64::from(sinks[h] - lse[0]).exp());
                let sum: f64 = weights.iter().map(|&w| f64::from(w)).sum();
                assert_close(sum + sink, 1.0, 2e-6, 0.0, format_args!("{} row {i}", level.name()));
                // The weights are those that the output was made with.
                for (x, &out) in out.iter().enumerate() {
                    let v = |j: usize| f64::from(call.v[call.key_row(b, h, j) * 4 + x]);
                    let again: f64 = weights.iter().enumerate().map(|(j, &w)| f64::from(w) * v(j)).sum();
                    assert_close(out, again, 5e-6, 0.0, format_args!("{} row {i} column {x}", level.name()));
                }
            }
        }
    }
}
