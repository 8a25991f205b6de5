use polyhead::{Diagonal, Heads, HeadsMut, Level, Mask, Matrix, Options, multi_head};

use crate::oracle::{ALL_F32, BiasTable, Call, MaskTable, Opts, Results, TYPES, Wanted, shape};
use crate::support::{Rng, assert_same_bits, levels};

/// Everything of a row that ought to be NaN.
#[track_caller]
fn assert_nan_row(call: &Call, results: &Results, row: [usize; 3], context: &str) {
    let (out, lse, weights) = results.row(&call.shape, row);
    assert!(out.iter().chain(lse).all(|x| x.is_nan()), "{context}: row {row:?} is {out:?}, lse {lse:?}");
    for (j, &w) in weights.iter().enumerate() {
        let seen = call.sees([row[0], row[1], row[2], j]);
        let right = if seen { w.is_nan() } else { w == 0.0 };
        assert!(right, "{context}: weight of key {j} (seen: {seen}) in NaN row {row:?} is {w:e}");
    }
}

/// Rows that `nan` names are NaN, the others have the bits of `clean`.
fn assert_nan_rows(call: &Call, level: Level, clean: &Results, nan: impl Fn([usize; 3]) -> bool, context: &str) {
    let results = call.run(level, Wanted::Weights);
    let context = format!("{context} on {} {:?}", level.name(), call.types);
    for row in call.rows() {
        if nan(row) {
            assert_nan_row(call, &results, row, &context);
        } else {
            results.assert_same_row(clean, &call.shape, row, &context);
        }
    }
}

/// Calls with keys hidden in part: causal over several tiles and blocks, by mask, by bias.
fn partly_hidden() -> Vec<Call> {
    let mut rng = Rng::new(41);
    let (l, s) = (45, 150);
    let mask = MaskTable::plane(l, s, |i, j| (i * 7 + j * 3) % 5 != 0);
    let bias = BiasTable::plane(l, s, |i, j| if (i + 2 * j) % 3 == 0 { f32::NEG_INFINITY } else { 0.25 });
    let options = [
        Opts::default(),
        Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() },
        Opts { mask: Some(mask), key_lengths: Some(vec![140, 33]), ..Opts::default() },
        Opts { bias: Some(bias), causal: Some(Diagonal::Offset(64)), ..Opts::default() },
        Opts { softcap: Some(5.0), causal: Some(Diagonal::Offset(100)), ..Opts::default() },
    ];
    let call =
        |(at, options): (usize, Opts)| Call::random(shape([2, 4, 2, l, s, 9, 6]), TYPES[at], &mut rng).options(options);
    options.into_iter().enumerate().map(call).collect()
}

#[test]
fn live_nan_shows() {
    for call in partly_hidden() {
        let (d, l, s) = (call.shape.head_dim, call.shape.seqlen_q, call.shape.seqlen_k);
        for &level in levels() {
            let clean = call.run(level, Wanted::Weights);
            let sees_any = |[b, h, i]: [usize; 3]| (0..s).any(|j| call.sees([b, h, i, j]));
            // A06: one element of one query; then all queries.
            for (query, x) in [(0, 0), (3, d - 1), (l - 1, 4)] {
                let mut call = call.clone();
                call.q[((4 + 2) * l + query) * d + x] = f32::NAN;
                let hit = |row| row == [1, 2, query] && sees_any(row);
                assert_nan_rows(&call, level, &clean, hit, "NaN in q");
            }
            let mut all = call.clone();
            all.q.fill(f32::NAN);
            assert_nan_rows(&all, level, &clean, sees_any, "q all NaN");
            // One element of one key: the rows of its group that see it.
            for (key, x) in [(0, 0), (17, d - 1), (127, 3), (128, 0), (s - 1, 1)] {
                let mut call = call.clone();
                call.k[(s + key) * d + x] = f32::NAN;
                let hit = |[b, h, i]: [usize; 3]| b == 0 && h / 2 == 1 && call.sees([b, h, i, key]);
                assert_nan_rows(&call, level, &clean, hit, &format!("NaN in key {key}"));
            }
        }
    }
}

#[test]
fn live_nan_shows_in_one_column_of_values() {
    for call in partly_hidden() {
        let (s, dv) = (call.shape.seqlen_k, call.shape.head_dim_v);
        for (key, x) in [(0, 0), (17, 5), (127, 3), (128, 1), (s - 1, 2)] {
            let mut bad = call.clone();
            bad.v[key * dv + x] = f32::NAN;
            let expected = bad.expected();
            for &level in levels() {
                let context = format!("NaN in column {x} of value {key} on {}", level.name());
                let (clean, results) = (call.run(level, Wanted::Weights), bad.run(level, Wanted::Weights));
                // Scores know nothing of it.
                assert_same_bits(&results.lse, &clean.lse, &context);
                assert_same_bits(&results.weights, &clean.weights, &context);
                // The rows that see it have the other columns right; those that do not have their bits.
                expected.check(&bad, level, &results, &context);
                for [b, h, i] in call.rows() {
                    if b == 0 && h / 2 == 0 && call.sees([b, h, i, key]) {
                        assert!(results.row(&call.shape, [b, h, i]).0[x].is_nan(), "{context}: head {h} row {i}");
                    } else {
                        results.assert_same_row(&clean, &call.shape, [b, h, i], &context);
                    }
                }
            }
        }
    }
}

#[test]
fn live_nan_shows_in_the_bias_and_infinities_follow_ieee() {
    let (l, s) = (20, 40);
    for (bad, at) in [(f32::NAN, 0), (f32::NAN, 33), (f32::INFINITY, 5), (f32::INFINITY, 39)] {
        let table = |bad: f32| BiasTable::plane(l, s, |i, j| if (i, j) == (7, at) { bad } else { 0.5 });
        for causal in [None, Some(Diagonal::BottomRight), Some(Diagonal::TopLeft)] {
            let opts = |bad| Opts { bias: Some(table(bad)), causal, ..Opts::default() };
            let call = Call::random(shape([1, 2, 1, l, s, 5, 5]), ALL_F32, &mut Rng::new(42));
            let (clean, bad) = (call.clone().options(opts(0.5)), call.options(opts(bad)));
            for &level in levels() {
                let hit = |[b, h, i]: [usize; 3]| i == 7 && clean.sees([b, h, i, at]);
                assert_nan_rows(&bad, level, &clean.run(level, Wanted::Weights), hit, "bias");
            }
        }
    }
    // An infinite key: +inf scores are NaN, -inf scores have weight 0.
    let mut call = Call::random(shape([1, 2, 1, 50, 140, 3, 5]), ALL_F32, &mut Rng::new(43));
    call.k[130 * 3] = f32::INFINITY;
    let expected = call.expected();
    assert!(expected.attention.out.iter().any(|x| x.is_nan()) && expected.attention.out.iter().any(|x| x.is_finite()));
    // An infinite value among equal weights.
    let mut infinite = Call::ramp(shape([1, 2, 1, 50, 140, 3, 1]));
    infinite.v[139] = f32::INFINITY;
    infinite.options.causal = Some(Diagonal::Offset(100));
    let infinite_expected = infinite.expected();
    for &level in levels() {
        call.check(level, &expected, "infinite key");
        infinite.check(level, &infinite_expected, "infinite value");
    }
}

/// Finite, and within the range of what V holds.
fn assert_inside(call: &Call, level: Level, context: &str) {
    let results = call.run(level, Wanted::Weights);
    let largest = call.v.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    for row in call.rows() {
        let (out, lse, weights) = results.row(&call.shape, row);
        let inside = out.iter().all(|x| x.abs() <= largest * 1.0001);
        let say = || format!("{context} on {} row {row:?}: out {out:?} lse {lse:?} {:?}", level.name(), call.options);
        assert!(inside && lse[0].is_finite(), "{}", say());
        let sum: f64 = weights.iter().map(|&w| f64::from(w)).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{}: weights sum to {sum}", say());
    }
}

#[test]
fn finite_is_finite() {
    let (l, s) = (19, 145);
    let min = f32::MIN;
    let tables: [&dyn Fn(usize, usize) -> f32; 6] = [
        &|_, _| min,
        &|i, _| if i == 0 { min } else { 1.0 },
        &|i, j| if (i + j) % 2 == 0 { min } else { f32::NEG_INFINITY },
        &|_, j| if j < 130 { min } else { 0.0 },
        &|_, j| if j == 3 { f32::MAX } else { min },
        &|i, j| if (i * j) % 3 == 0 { -1e38 } else { 1e38 },
    ];
    for types in TYPES {
        let mut call = Call::random(shape([1, 2, 2, l, s, 6, 5]), types, &mut Rng::new(51));
        for (at, table) in tables.iter().enumerate() {
            let bias = Some(BiasTable::plane(l, s, table));
            for softcap in [None, Some(20.0)] {
                call.options = Opts { bias: bias.clone(), softcap, ..Opts::default() };
                for &level in levels() {
                    assert_inside(&call, level, &format!("bias {at}"));
                }
            }
        }
    }
    // A03: the caller added two masks of f32::MIN.
    let table = |i: usize, j: usize| {
        if j < 3 {
            f32::NEG_INFINITY
        } else if j > i {
            min
        } else {
            0.0
        }
    };
    let mut call = Call::ramp(shape([1, 1, 1, 5, 5, 1, 1]));
    call.options.bias = Some(BiasTable::plane(5, 5, table));
    for &level in levels() {
        assert_inside(&call, level, "A03");
        let out = call.run(level, Wanted::Out).out;
        assert_eq!(out, [4.5, 4.5, 4.5, 4.0, 4.5], "{}", level.name());
    }
}

/// Scores up to the largest there are, of either sign, by large operands, by the scale, and beside softcap and ALiBi.
#[test]
fn finite_is_finite_for_huge_scores() {
    let mut rng = Rng::new(52);
    for (size, scale) in
        [(1e18, 1.0), (1e18, -1.0), (1e9, 1e19), (1.0, 1e37), (1e-18, 1e38), (1e17, 1e-37), (3.0, 1e20), (1e-30, -1e30)]
    {
        let mut call = Call::random(shape([1, 2, 1, 18, 140, 4, 3]), ALL_F32, &mut rng);
        call.q.iter_mut().for_each(|x| *x = *x * size * 0.3);
        call.k.iter_mut().for_each(|x| *x = *x * size * 0.3);
        for options in [
            Opts::default(),
            Opts { softcap: Some(30.0), ..Opts::default() },
            Opts { softcap: Some(f32::MAX), ..Opts::default() },
            Opts { softcap: Some(f32::MIN_POSITIVE), ..Opts::default() },
            Opts { alibi: Some((vec![1e30, 3e38], Diagonal::TopLeft)), ..Opts::default() },
            Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() },
        ] {
            call.options = Opts { scale: Some(scale), ..options };
            for &level in levels() {
                assert_inside(&call, level, &format!("operands {size:e} scale {scale:e}"));
            }
        }
    }
}

/// Values so large that S of them do not add up in `f32`, of which the output is a mean.
#[test]
fn finite_is_finite_for_huge_values() {
    for (size, s) in [(1e30, 300), (f32::MAX, 1), (f32::MAX / 2.0, 2), (1e36, 300)] {
        let mut call = Call::random(shape([1, 1, 1, 5, s, 4, 3]), ALL_F32, &mut Rng::new(53));
        call.v.iter_mut().for_each(|x| *x = size.copysign(*x));
        for &level in levels() {
            assert_inside(&call, level, &format!("values of {size:e}"));
        }
    }
}

/// Values near the largest float: their weighted mean is finite where a sum of them is not, and other rows keep their bits.
#[test]
fn finite_is_finite_for_values_near_the_largest() {
    let (l, d) = (40, 3);
    for (s, huge) in [2, 10, 130, 300].into_iter().flat_map(|s| [(s, false), (s, true)]) {
        let k = vec![1.0f32; s * 8];
        let q = vec![0.0f32; l * 8];
        // Keys beyond the middle are huge; rows that see none of them must not notice.
        let value = |key: usize| if huge && key >= s / 2 { 3.0e38f32 } else { 1.0 };
        let v: Vec<f32> = (0..s * d).map(|i| value(i / d)).collect();
        let bound = |query: usize| if query.is_multiple_of(2) { s / 2 } else { s };
        let seen: Vec<bool> = (0..l * s).map(|i| i % s < bound(i / s)).collect();
        let mask = Mask::attend(Matrix::contiguous(&seen, [l, s]).unwrap()).unwrap();
        for &level in levels() {
            let mut out = vec![0.0f32; l * d];
            multi_head(
                &Heads::bhsd(&q, [1, 1, l, 8]).unwrap(),
                &Heads::bhsd(&k, [1, 1, s, 8]).unwrap(),
                &Heads::bhsd(&v, [1, 1, s, d]).unwrap(),
                HeadsMut::bhsd(&mut out, [1, 1, l, d]).unwrap(),
                &Options::new().level(level).mask(mask),
            )
            .unwrap();
            for (i, &x) in out.iter().enumerate() {
                let keys = bound(i / d);
                let mean = (0..keys).map(|key| f64::from(value(key))).sum::<f64>() / keys as f64;
                let context = format!("row {} of {s} keys on {}", i / d, level.name());
                assert!((f64::from(x) / mean - 1.0).abs() < 1e-5, "{context}: {x} against {mean}");
                assert!(keys == s || x == 1.0, "{context}: {x}");
            }
        }
    }
}
