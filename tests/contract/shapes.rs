use polyhead::{Diagonal, Error, Heads, HeadsMut, Options, multi_head};

use crate::EDGES;
use crate::oracle::{ALL_F32, BiasTable, Call, MaskTable, Opts, Places, TYPES, Wanted, shape, table_shape};
use crate::support::{Arrangement, PoisonedInput, PoisonedOutput, Rng, assert_all_close, assert_same_bits, levels};

#[test]
fn grouped_heads() {
    // A31: V is the number of its KV head.
    for (heads, kv_heads) in [(4, 2), (6, 2), (8, 1), (3, 3), (1, 1), (12, 4), (10, 2)] {
        for l in [1, 7, 70, 129] {
            let mut call = Call::ramp(shape([2, heads, kv_heads, l, 5, 3, 2]));
            for (at, x) in call.v.iter_mut().enumerate() {
                *x = (at / (5 * 2)) as f32;
            }
            let of_row = |[b, h, _]: [usize; 3]| [(b * kv_heads + h * kv_heads / heads) as f32; 2];
            let expected: Vec<f32> = call.rows().flat_map(of_row).collect();
            for &level in levels() {
                let out = call.run(level, Wanted::Out).out;
                assert_all_close(&out, &expected, 1e-6, 1e-6, format_args!("{heads}/{kv_heads} {}", level.name()));
            }
        }
    }
}

/// As native heads whose K and V are copies, or one KV head seen by stride 0, under options that differ by head.
#[test]
fn grouped_heads_equal_expanded_ones() {
    let mut rng = Rng::new(81);
    for (heads, kv_heads, l) in [(8, 1, 1), (6, 2, 5), (6, 3, 33), (9, 3, 60), (5, 1, 130), (140, 1, 1)] {
        let s = 70;
        let mut grouped = Call::random(shape([2, heads, kv_heads, l, s, 8, 5]), TYPES[heads % TYPES.len()], &mut rng);
        grouped.options = Opts {
            causal: Some(Diagonal::BottomRight),
            bias: Some(BiasTable::random(table_shape(&grouped.shape, 1), 0.1, &mut rng)),
            alibi: Some(((0..heads).map(|h| 0.01 * h as f32).collect(), Diagonal::BottomRight)),
            sinks: Some((0..heads).map(|h| 0.3 * h as f32 - 1.0).collect()),
            ..Opts::default()
        };
        let mut expanded = grouped.clone();
        expanded.shape.num_kv_heads = heads;
        let repeat = |data: &[f32], width: usize| -> Vec<f32> {
            let head =
                |at: usize| &data[(at / heads * kv_heads + at % heads * kv_heads / heads) * s * width..][..s * width];
            (0..2 * heads).flat_map(|at| head(at).to_vec()).collect()
        };
        expanded.k = repeat(&grouped.k, 8);
        expanded.v = repeat(&grouped.v, 5);
        let expected = expanded.expected();
        for &level in levels() {
            let context = format!("{heads}/{kv_heads}");
            grouped.check(level, &expected, &context);
            expanded.check(level, &expected, &context);
            if kv_heads == 1 {
                let places = Places { k: Arrangement::BroadcastHeads, v: Arrangement::BroadcastHeads, ..Places::GAPS };
                expanded.clone().places(places).check(level, &expected, &context);
            }
        }
    }
}

#[test]
fn grouped_heads_must_divide() {
    let (q, kv) = (vec![0.0f32; 5 * 2], vec![0.0f32; 2 * 2]);
    let mut out = PoisonedOutput::<f32>::new([1, 5, 2, 1], Arrangement::Bhsd);
    let (q, kv) = (Heads::bhsd(&q, [1, 5, 2, 1]).unwrap(), Heads::bhsd(&kv, [1, 2, 2, 1]).unwrap());
    let error = multi_head(&q, &kv, &kv, out.view(), &Options::new()).unwrap_err();
    assert_eq!(error, Error::HeadGroups { num_heads: 5, num_kv_heads: 2 });
    assert!(error.to_string().contains('5') && error.to_string().contains('2'), "{error}");
    out.assert_untouched("an error");
}

/// Both lengths around every block, in all combinations; the widths go through theirs.
#[test]
fn any_size() {
    const WIDTHS: [usize; 10] = [1, 2, 3, 5, 7, 17, 33, 65, 8, 12];
    let mut rng = Rng::new(101);
    for (row, &l) in EDGES.iter().enumerate() {
        for (column, &s) in EDGES.iter().enumerate() {
            let at = row * EDGES.len() + column;
            // The longest ones are slow in the reference: narrow.
            let narrow = l * s > 20_000;
            let (d, dv) = if narrow { (4, 3) } else { (WIDTHS[at % 10], WIDTHS[at / 3 % 10]) };
            let (heads, kv_heads) = if l * s > 5_000 { (1, 1) } else { [(1, 1), (2, 1), (3, 3), (4, 2)][at % 4] };
            let causal = [None, Some(Diagonal::TopLeft), Some(Diagonal::BottomRight)][at % 3];
            let options = Opts { causal, ..Opts::default() };
            let call = Call::random(shape([1, heads, kv_heads, l, s, d, dv]), TYPES[at % 7], &mut rng).options(options);
            let expected = call.expected();
            for &level in levels() {
                call.check(level, &expected, "any size");
            }
        }
    }
}

/// A32, A33: every width, with only the last element of the keys unlike zero so that none can be forgotten.
#[test]
fn any_size_of_head() {
    let widths: Vec<usize> = (1..=20)
        .chain([23, 24, 25, 31, 32, 33, 37, 40, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 256, 320, 576])
        .collect();
    for (at, &d) in widths.iter().enumerate() {
        let dv = widths[(at * 7 + 3) % widths.len()];
        let types = TYPES[at % TYPES.len()];
        let mut call = Call::random(shape([1, 2, 1, 19, 37, d, dv]), types, &mut Rng::new(102));
        call.options.scale = Some(1.0);
        call.k.iter_mut().enumerate().filter(|(x, _)| (x + 1) % d != 0).for_each(|(_, k)| *k = 0.0);
        let expected = call.expected();
        for &level in levels() {
            call.check(level, &expected, format_args!("widths {d}, {dv}"));
        }
    }
}

/// A30: every axis 0, alone and in pairs, with every option that has one element for each of something.
#[test]
fn any_size_is_nothing_too() {
    let full = [2, 4, 2, 3, 5, 6, 7];
    for a in 0..7 {
        for b in a..7 {
            let mut sizes = full;
            (sizes[a], sizes[b]) = (0, 0);
            if sizes[2] == 0 {
                sizes[1] = 0;
            }
            let shape = shape(sizes);
            let bare = Opts { scale: Some(0.5), ..Opts::default() };
            let all = Opts {
                causal: Some(Diagonal::BottomRight),
                key_lengths: Some(vec![shape.seqlen_k; shape.batch]),
                mask: Some(MaskTable::random(table_shape(&shape, 0), 0.5, true, &mut Rng::new(1))),
                bias: Some(BiasTable::random(table_shape(&shape, 0), 0.5, &mut Rng::new(1))),
                alibi: Some((vec![0.5; shape.num_heads], Diagonal::TopLeft)),
                sinks: Some(vec![0.5; shape.num_heads]),
                ..bare.clone()
            };
            for options in [bare, all] {
                let call = Call::random(shape, TYPES[b], &mut Rng::new(103)).options(options);
                let expected = call.expected();
                for &level in levels() {
                    let results = call.run(level, Wanted::Weights);
                    expected.check(&call, level, &results, "an axis of 0");
                    if shape.seqlen_k == 0 {
                        assert!(
                            results.out.iter().all(|&x| x == 0.0)
                                && results.lse.iter().all(|&x| x == f32::NEG_INFINITY)
                        );
                    }
                }
            }
        }
    }
}

/// Averaged weights of no heads: written, and not NaN.
#[test]
fn any_size_is_nothing_too_for_averaged_weights() {
    for sizes in [
        [2, 0, 0, 3, 5, 6, 7],
        [2, 0, 2, 3, 5, 6, 7],
        [0, 4, 2, 3, 5, 6, 7],
        [2, 4, 2, 3, 5, 0, 0],
        [2, 4, 2, 3, 5, 6, 0],
    ] {
        let mut call = Call::random(shape(sizes), ALL_F32, &mut Rng::new(104));
        call.options.scale = Some(1.0);
        let expected = call.expected();
        for &level in levels() {
            expected.check_averaged(&call, level, &call.run(level, Wanted::Averaged), "an axis of 0");
        }
    }
}

/// More than 65536 keys (A35), on the path of one query and of several.
#[test]
fn any_size_beyond_16_bits() {
    for s in [65_535, 65_536, 65_537] {
        let mut rng = Rng::new(105);
        let mask = MaskTable::random([1, 1, 2, s], 0.5, true, &mut rng);
        let call = Call::random(shape([1, 1, 1, 2, s, 4, 2]), ALL_F32, &mut rng);
        let call = call.options(Opts { mask: Some(mask), ..Opts::default() });
        let expected = call.expected();
        for &level in levels() {
            expected.check(&call, level, &call.run(level, Wanted::Lse), "many keys");
        }
    }
}

/// The surroundings are poisoned, and every element starts as a NaN that no arithmetic makes: `Call::run` asserts that each
/// wanted element was written and nothing else. That the old contents have no effect is seen with others.
#[test]
fn every_output_element_written_once() {
    let mut rng = Rng::new(111);
    for (at, &place) in Arrangement::DISTINCT.iter().enumerate() {
        for (l, s, dv) in [(1, 1, 1), (1, 130, 17), (9, 4, 16), (17, 33, 15), (130, 31, 3), (33, 129, 1), (5, 0, 4)] {
            let places = Places { out: place, weights: Arrangement::DISTINCT[(at + 1) % 6], ..Places::GAPS };
            let call = Call::random(shape([2, 4, 2, l, s, 5, dv]), TYPES[(at + l) % TYPES.len()], &mut rng);
            let call = call.options(Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() }).places(places);
            let expected = call.expected();
            for &level in levels() {
                call.check(level, &expected, format_args!("output in {place:?}"));
            }
        }
    }
}

#[test]
fn every_output_element_written_once_over_any_contents() {
    let (shape, mut rng) = ([1, 3, 20, 9], Rng::new(112));
    let input = PoisonedInput::new(&rng.normals::<f32>(3 * 20 * 9, 1.0), shape, Arrangement::Bshd);
    for &level in levels() {
        let run = |contents: f32| {
            let (mut out, mut weights) = (vec![contents; 3 * 20 * 9], vec![contents; 20 * 20]);
            let mut lse = vec![contents; 3 * 20];
            let outputs = polyhead::Outputs::new(HeadsMut::bhsd(&mut out, shape).unwrap())
                .lse(&mut lse)
                .averaged_weights(HeadsMut::bhsd(&mut weights, [1, 1, 20, 20]).unwrap());
            let options = Options::new().causal(Diagonal::TopLeft).level(level);
            polyhead::multi_head_with(&input.view(), &input.view(), &input.view(), outputs, &options).unwrap();
            [out, weights, lse].concat()
        };
        let clean = run(0.0);
        for contents in [f32::NAN, f32::INFINITY, -1e30] {
            assert_same_bits(&run(contents), &clean, format_args!("over {contents} on {}", level.name()));
        }
    }
}
