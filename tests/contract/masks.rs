use polyhead::{Bias, Diagonal, Mask, Matrix, Options, Shape, View, Window};

use crate::oracle::{ALL_F32, BiasTable, Call, MaskTable, Opts, Places, Results, TYPES, Wanted, shape, table_shape};
use crate::support::{Rng, assert_all_close, assert_same_bits, levels};

/// Some of the five things that hide keys, by the bits of `set`.
fn hiding(set: usize, s: &Shape, diagonal: Diagonal, rng: &mut Rng) -> Opts {
    let mut options = Opts::default();
    if set & 1 != 0 {
        options.causal = Some(diagonal);
    }
    if set & 2 != 0 {
        // As wide as the difference of the lengths, so that most rows see something at any corner.
        let left = Some(s.seqlen_q.abs_diff(s.seqlen_k) / 2 + 40);
        options.window = Some(Window { left, right: Some(5), diagonal: Diagonal::BottomRight });
    }
    if set & 4 != 0 {
        options.key_lengths = Some((0..s.batch).map(|b| s.seqlen_k.saturating_sub(b * 9 + 3)).collect());
    }
    if set & 8 != 0 {
        options.mask = Some(MaskTable::random(table_shape(s, set), 0.7, set & 1 == 0, rng));
    }
    if set & 16 != 0 {
        options.bias = Some(BiasTable::random(table_shape(s, set >> 1), 0.3, rng));
    }
    options
}

#[test]
fn masks_combine_by_and() {
    let mut rng = Rng::new(11);
    let diagonals = [Diagonal::TopLeft, Diagonal::BottomRight, Diagonal::Offset(17)];
    for set in 0..32 {
        for (l, s, heads, kv_heads) in [(37, 150, 4, 2), (150, 37, 2, 2), (9, 33, 6, 2)] {
            let shape = shape([2, heads, kv_heads, l, s, 9, 5]);
            let options = hiding(set, &shape, diagonals[(set + l) % 3], &mut rng);
            let types = TYPES[(set + s) % TYPES.len()];
            let call = Call::random(shape, types, &mut rng).options(options);
            let expected = call.expected();
            for &level in levels() {
                call.check(level, &expected, format_args!("combination {set:05b}"));
            }
        }
    }
}

/// The same rule asked for in three ways gives the same numbers, and a second mask that hides nothing more changes no bit (A09).
#[test]
fn masks_combine_by_and_whichever_says_it() {
    let mut rng = Rng::new(12);
    for (l, s) in [(1, 1), (33, 33), (70, 62), (62, 70), (129, 257), (257, 129)] {
        let bare = Call::random(shape([1, 2, 1, l, s, 8, 8]), ALL_F32, &mut rng);
        let sees = |i: usize, j: usize| j <= i && j + 50 >= i;
        let window = Window { left: Some(50), right: None, diagonal: Diagonal::TopLeft };
        let by_rule = Opts { causal: Some(Diagonal::TopLeft), window: Some(window), ..Opts::default() };
        let by_mask = Opts { mask: Some(MaskTable::plane(l, s, sees)), ..Opts::default() };
        let table = BiasTable::plane(l, s, |i, j| if sees(i, j) { 0.0 } else { f32::NEG_INFINITY });
        let by_bias = Opts { bias: Some(table), ..Opts::default() };
        let by_rule_and_mask = Opts { mask: by_mask.mask.clone(), ..by_rule.clone() };
        let expected = bare.clone().options(by_rule.clone()).expected();
        for &level in levels() {
            let run = |options: &Opts| bare.clone().options(options.clone()).check(level, &expected, "one rule");
            let first = run(&by_rule);
            first.assert_same_bits(&run(&by_rule_and_mask), "rule and mask");
            run(&by_mask);
            run(&by_bias);
        }
    }
}

/// What the rows that see nothing must hold, and the LSE's -inf among what the others must not.
fn assert_zero_rows(call: &Call, results: &Results, nothing: impl Fn([usize; 3]) -> bool) {
    let mut zeros = 0;
    for row in call.rows() {
        let (out, lse, weights) = results.row(&call.shape, row);
        let is_zero = out.iter().chain(weights).all(|&x| x == 0.0) && lse[0] == f32::NEG_INFINITY;
        if nothing(row) {
            assert!(is_zero, "row {row:?} sees nothing: {out:?} {lse:?} {:?}", call.options);
            zeros += 1;
        } else {
            assert!(lse[0].is_finite(), "row {row:?} sees something: {lse:?} {:?}", call.options);
        }
    }
    assert_ne!(zeros, 0, "a test without an empty row");
}

#[test]
fn no_visible_key_gives_zeros() {
    let mut rng = Rng::new(21);
    let (l, s) = (70, 140);
    let (all, odd) = (|_: usize| true, |i: usize| i % 2 == 1);
    // Whole tiles of every width, and more than a block of rows.
    let (ends, all_but_one) = (|i: usize| i < 33 || i == 69, |i: usize| i != 40);
    let rules: [&dyn Fn(usize) -> bool; 4] = [&all, &odd, &ends, &all_but_one];
    for (at, &empty) in rules.iter().enumerate() {
        let mask = MaskTable::plane(l, s, |i, j| !empty(i) && (i + j) % 3 != 0);
        let bias = BiasTable::plane(l, s, |i, j| if !empty(i) && (i + j) % 3 != 0 { 0.5 } else { f32::NEG_INFINITY });
        let (mask, bias) = (Opts { mask: Some(mask), ..Opts::default() }, Opts { bias: Some(bias), ..Opts::default() });
        for (options, sinks) in [(&mask, false), (&bias, false), (&mask, true), (&bias, true)] {
            let sinks = sinks.then(|| vec![2.0, f32::NEG_INFINITY, -300.0]);
            let options = Opts { sinks, alibi: Some((vec![0.25; 3], Diagonal::TopLeft)), ..options.clone() };
            let call = Call::random(shape([1, 3, 1, l, s, 7, 17]), TYPES[at], &mut rng).options(options);
            let expected = call.expected();
            for &level in levels() {
                let results = call.check(level, &expected, "empty rows");
                assert_zero_rows(&call, &results, |[_, _, i]| empty(i));
            }
        }
    }
}

#[test]
fn no_visible_key_gives_zeros_by_every_rule() {
    let window = |left, right, offset| Some(Window { left, right, diagonal: Diagonal::Offset(offset) });
    let none = Opts::default();
    let rules = [
        Opts { key_lengths: Some(vec![0, 0]), ..none.clone() },
        Opts { causal: Some(Diagonal::Offset(-20)), ..none.clone() },
        Opts { causal: Some(Diagonal::Offset(isize::MIN)), ..none.clone() },
        Opts { window: window(Some(3), None, 100), ..none.clone() },
        Opts { window: window(None, Some(3), -100), ..none.clone() },
        Opts { window: window(Some(0), Some(0), isize::MAX), ..none.clone() },
        // Each of the two leaves something.
        Opts { causal: Some(Diagonal::TopLeft), window: window(Some(2), None, 25), ..none.clone() },
        Opts { mask: Some(MaskTable { values: vec![false], shape: [1; 4], attend: true }), ..none.clone() },
        Opts { mask: Some(MaskTable { values: vec![true], shape: [1; 4], attend: false }), ..none.clone() },
        Opts { bias: Some(BiasTable { values: vec![f32::NEG_INFINITY], shape: [1; 4] }), ..none },
    ];
    let mut rng = Rng::new(22);
    for (l, s) in [(1, 1), (19, 33), (20, 3)] {
        for (rule, options) in rules.iter().enumerate() {
            for sinks in [None, Some(vec![0.0, 5.0])] {
                let types = TYPES[rule % TYPES.len()];
                let options = Opts { sinks, ..options.clone() };
                let call = Call::random(shape([2, 2, 2, l, s, 5, 3]), types, &mut rng).options(options);
                let expected = call.expected();
                for &level in levels() {
                    let results = call.check(level, &expected, format_args!("rule {rule}"));
                    assert_zero_rows(&call, &results, |_| true);
                }
            }
        }
    }
}

/// The means of what each query of a `ramp` sees, on a level.
#[track_caller]
fn assert_ramp(l: usize, s: usize, options: Opts, expected: &[f64]) {
    let call = Call::ramp(shape([1, 2, 1, l, s, 3, 1])).options(options);
    let both_heads = [expected, expected].concat();
    for &level in levels() {
        let out = call.run(level, Wanted::Out).out;
        assert_all_close(&out, &both_heads, 1e-6, 1e-6, format_args!("{} ({l}, {s}) {:?}", level.name(), call.options));
    }
}

#[test]
fn causality_names_its_corner() {
    let causal = |diagonal| Opts { causal: Some(diagonal), ..Opts::default() };
    // A10.
    assert_ramp(2, 5, causal(Diagonal::TopLeft), &[1.0, 1.5]);
    assert_ramp(5, 2, causal(Diagonal::TopLeft), &[1.0, 1.5, 1.5, 1.5, 1.5]);
    assert_ramp(1, 16, causal(Diagonal::TopLeft), &[1.0]);
    assert_ramp(2, 5, causal(Diagonal::BottomRight), &[2.5, 3.0]);
    assert_ramp(5, 2, causal(Diagonal::BottomRight), &[0.0, 0.0, 0.0, 1.0, 1.5]);
    assert_ramp(1, 16, causal(Diagonal::BottomRight), &[8.5]);
    assert_ramp(2, 5, causal(Diagonal::Offset(2)), &[2.0, 2.5]);
    assert_ramp(3, 5, causal(Diagonal::Offset(-1)), &[0.0, 1.0, 1.5]);
    assert_ramp(2, 2, causal(Diagonal::Offset(isize::MIN)), &[0.0, 0.0]);
    assert_ramp(2, 2, causal(Diagonal::Offset(isize::MAX)), &[1.5, 1.5]);
    // A12: S - L below zero.
    assert_ramp(4, 1, causal(Diagonal::BottomRight), &[0.0, 0.0, 0.0, 1.0]);
    // A11: whole empty tiles before the triangle.
    let mut triangle = vec![0.0; 67];
    triangle.extend([1.0, 1.5, 2.0]);
    assert_ramp(70, 3, causal(Diagonal::BottomRight), &triangle);
    assert_ramp(4, 3, causal(Diagonal::BottomRight), &[0.0, 1.0, 1.5, 2.0]);
    // A16: not causal unless asked.
    assert_ramp(9, 9, Opts::default(), &[5.0; 9]);
    // Over several blocks of keys and rows, at each corner.
    for (l, s) in [(257, 300), (300, 257)] {
        let mean = |offset: isize| {
            move |i: usize| match (i as isize + offset + 1).clamp(0, s as isize) {
                0 => 0.0,
                seen => (seen + 1) as f64 / 2.0,
            }
        };
        for (diagonal, offset) in [
            (Diagonal::TopLeft, 0),
            (Diagonal::BottomRight, s as isize - l as isize),
            (Diagonal::Offset(-130), -130),
            (Diagonal::Offset(129), 129),
        ] {
            assert_ramp(l, s, causal(diagonal), &(0..l).map(mean(offset)).collect::<Vec<f64>>());
        }
    }
}

#[test]
fn causality_names_its_corner_and_windows_count_besides_the_own_key() {
    let run = |left, right, diagonal, causal, lengths: Option<usize>| Opts {
        window: Some(Window { left, right, diagonal }),
        causal,
        key_lengths: lengths.map(|len| vec![len]),
        ..Opts::default()
    };
    let (top, bottom) = (Diagonal::TopLeft, Diagonal::BottomRight);
    // A14, D6.
    assert_ramp(8, 8, run(Some(1), None, top, Some(top), None), &[1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]);
    assert_ramp(8, 8, run(Some(2), Some(0), top, None, None), &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_ramp(8, 8, run(Some(0), Some(0), top, None, None), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    assert_ramp(3, 3, run(Some(usize::MAX), Some(usize::MAX), top, None, None), &[2.0; 3]);
    assert_ramp(3, 3, run(Some(0), Some(usize::MAX), Diagonal::Offset(isize::MIN), None, None), &[2.0; 3]);
    // Causal and window at different corners: queries 0 and 1 of 2 stand at keys 0, 1 and at keys 3, 4.
    assert_ramp(2, 5, run(Some(2), Some(0), bottom, Some(top), None), &[0.0, 0.0]);
    assert_ramp(2, 5, run(Some(3), Some(0), bottom, Some(top), None), &[1.0, 2.0]);
    // The bottom right of three keys in use.
    assert_ramp(2, 5, run(Some(0), Some(1), bottom, None, Some(3)), &[2.5, 3.0]);
    // A15, A04: over blocks.
    let means: Vec<f64> =
        (0..300usize).map(|i| (i.saturating_sub(64) + (i + 64).min(299)) as f64 / 2.0 + 1.0).collect();
    assert_ramp(300, 300, run(Some(64), Some(64), top, None, None), &means);
    let means: Vec<f64> = (0..640usize).map(|i| (i.saturating_sub(9) + i) as f64 / 2.0 + 1.0).collect();
    assert_eq!([0, 5, 10, 512, 639].map(|i| means[i]), [1.0, 3.5, 6.5, 508.5, 635.5]);
    assert_ramp(640, 640, run(Some(9), Some(0), top, None, None), &means);
    let mask = MaskTable::plane(1, 700, |_, j| (515..=575).contains(&j));
    assert_ramp(1, 700, Opts { mask: Some(mask), ..Opts::default() }, &[546.0]);
}

/// Each item of a batch has its own bottom right corner.
#[test]
fn causality_names_its_corner_per_sequence() {
    let mut rng = Rng::new(71);
    let lengths = vec![40, 0, 7, 33];
    for diagonal in [Diagonal::TopLeft, Diagonal::BottomRight] {
        let window = Some(Window { left: Some(11), right: Some(2), diagonal });
        for window in [None, window] {
            let alibi = Some((vec![0.5, 0.125], diagonal));
            let options =
                Opts { causal: Some(diagonal), window, alibi, key_lengths: Some(lengths.clone()), ..Opts::default() };
            let call = Call::random(shape([4, 2, 2, 21, 40, 8, 8]), ALL_F32, &mut rng).options(options);
            let call = call.places(Places::PACKED);
            let expected = call.expected();
            for &level in levels() {
                call.check(level, &expected, "lengths");
            }
        }
    }
}

/// Two masks and two biases are what one of each says that was joined by hand: -inf hides whatever the other bias holds, and two
/// finite biases never hide, however negative their sum (A03).
#[test]
fn masks_combine_by_and_two_of_each() {
    let (b, h, l, s) = (2, 2, 21, 150);
    let mut rng = Rng::new(13);
    let call = Call::random(shape([b, h, 1, l, s, 8, 8]), ALL_F32, &mut rng);
    let [plane, keys] = [l * s, b * s].map(|n| rng.bools(n, 0.8));
    let mut bias = |n: usize| -> Vec<f32> {
        let special = [f32::NEG_INFINITY, f32::MIN, 3.0];
        (0..n).map(|i| if rng.chance(0.3) { special[i % 3] } else { rng.normal() }).collect()
    };
    let [plane_bias, key_bias] = [l * s, b * s].map(&mut bias);
    let joined: Vec<bool> = (0..b * l * s).map(|x| plane[x % (l * s)] && !keys[x / s / l * s + x % s]).collect();
    let sum = |x: f32, y: f32| if x.min(y) == f32::NEG_INFINITY { x.min(y) } else { (x + y).max(f32::MIN) };
    let joined_bias: Vec<f32> =
        (0..b * l * s).map(|x| sum(plane_bias[x % (l * s)], key_bias[x / s / l * s + x % s])).collect();

    let plane = Mask::attend(Matrix::contiguous(&plane, [l, s]).unwrap()).unwrap();
    let keys = Mask::ignore_keys(Matrix::contiguous(&keys, [b, s]).unwrap());
    let plane_bias = Bias::new(Matrix::contiguous(&plane_bias, [l, s]).unwrap()).unwrap();
    let key_bias = Bias::of_keys(Matrix::contiguous(&key_bias, [b, s]).unwrap());
    let joined = Mask::attend(View::contiguous(&joined, [b, 1, l, s]).unwrap()).unwrap();
    let joined_bias = Bias::new(View::contiguous(&joined_bias, [b, 1, l, s]).unwrap()).unwrap();
    let none = Options::new();
    let cases = [
        (none.mask(plane).and_mask(keys), none.mask(joined)),
        (none.and_mask(keys).mask(plane), none.and_mask(joined)),
        (none.bias(plane_bias).and_bias(key_bias), none.bias(joined_bias)),
        (none.mask(plane).and_mask(keys).bias(plane_bias).and_bias(key_bias), none.mask(joined).bias(joined_bias)),
        (none.and_mask(keys).and_bias(key_bias).bias(plane_bias).mask(plane), none.and_bias(joined_bias).mask(joined)),
    ];
    for (at, (two, one)) in cases.iter().enumerate() {
        let [by_two, by_one] = [two, one].map(|options| call.reference_output(options));
        assert_all_close(&by_two, &by_one, 1e-6, 1e-6, format_args!("case {at} by the reference"));
        for &level in levels() {
            let run = |options: &Options<'_>| call.output(&options.level(level));
            let by_level = run(two);
            let context = format!("case {at} on {}", level.name());
            assert_same_bits(&by_level, &run(one), &context);
            assert_all_close(&by_level, &by_two, 1e-5, 1e-5, &context);
        }
    }
}
