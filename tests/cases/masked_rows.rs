//! A01 to A05: rows that see little or nothing.

use polyhead::{Diagonal, HeadsMut, Options, Outputs, Window, multi_head_with};

use crate::operands::{EDGES_K, EDGES_Q, Operands, attend, bias, ignore, on_every_level, shape, table};
use crate::support::{Rng, assert_all_close, assert_same_bits, max_abs};

const NI: f32 = f32::NEG_INFINITY;

/// A row of which nothing is permitted gives zeros; not NaN, and not the mean of V (5.5 in the report).
#[test]
fn a01_all_false_bool_row() {
    let operands = Operands::<f32>::uni_ramp(shape(1, (2, 2), (6, 10), (8, 8)));
    let mask = table(6, 10, |i, j| i < 5 && j <= i);
    let options = Options::new().softmax_scale(0.125).mask(attend(&mask, [6, 10]));
    operands.assert_rows(&options, &[1.0, 1.5, 2.0, 2.5, 3.0, 0.0], "reported");
    let one = Operands::<f32>::random(shape(1, (1, 1), (1, 1), (8, 8)), 1);
    one.assert_rows(&Options::new().mask(attend(&[false], [1, 1])), &[0.0], "one key");
}

#[test]
fn a01_empty_rows_at_every_edge() {
    let mut rng = Rng::new(1);
    for seqlen_q in EDGES_Q {
        for seqlen_k in EDGES_K {
            let operands = Operands::<f32>::random(shape(1, (2, 1), (seqlen_q, seqlen_k), (5, 3)), 1);
            // The first, the last, and every third row; sparse enough that others are empty in some blocks.
            let empty = |i: usize| i == 0 || i + 1 == seqlen_q || i % 3 == 1;
            let noise = rng.bools(seqlen_q * seqlen_k, 0.2);
            let mask = table(seqlen_q, seqlen_k, |i, j| !empty(i) && noise[i * seqlen_k + j]);
            let context = format!("{seqlen_q} queries, {seqlen_k} keys");
            operands.check(&Options::new().mask(attend(&mask, [seqlen_q, seqlen_k])), &context);
            let hidden: Vec<bool> = mask.iter().map(|seen| !seen).collect();
            operands.check(&Options::new().mask(ignore(&hidden, [seqlen_q, seqlen_k])), &context);
            let floats: Vec<f32> = mask.iter().map(|&seen| if seen { 0.0 } else { NI }).collect();
            operands.check(&Options::new().bias(bias(&floats, [seqlen_q, seqlen_k])), &context);
        }
    }
}

#[test]
fn a01_nothing_seen_by_any_option() {
    let operands = Operands::<f32>::random(shape(2, (4, 2), (33, 130), (9, 9)), 2);
    let (none, lengths) = ([false], [0, 0]);
    let window = Window { left: Some(3), right: Some(3), diagonal: Diagonal::Offset(-100) };
    for (name, options) in [
        ("mask", Options::new().mask(attend(&none, [1, 1]))),
        ("lengths", Options::new().key_lengths(&lengths)),
        ("window", Options::new().window(window)),
        ("causal", Options::new().causal(Diagonal::Offset(-33))),
        ("bias", Options::new().bias(bias(&[NI], [1, 1]))),
    ] {
        operands.assert_rows(&options, &[0.0; 33], name);
        operands.assert_rows(&options.softcap(5.0).sinks(&[1.0, 2.0, NI, 0.0]), &[0.0; 33], name);
    }
}

/// A row of f32::MIN is a row of numbers: finite, and a mean of V. (In exact arithmetic it would be the row without a
/// mask, but the sum absorbs the scores.)
#[test]
fn a02_all_min_float_row() {
    for seqlen in [3, 8, 33, 129, 300] {
        let operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen, seqlen), (4, 4)), 3);
        let empty = |i: usize| i.is_multiple_of(5);
        let floats = table(seqlen, seqlen, |i, _| if empty(i) { f32::MIN } else { 1.0 });
        on_every_level(|level, name| {
            let plain = Options::new().level(level);
            let context = format!("{seqlen} keys on {name}");
            let unmasked = operands.run(&plain, &context);
            let masked = operands.run(&plain.bias(bias(&floats, [seqlen, seqlen])), &context);
            for (row, (x, y)) in masked.out.chunks(4).zip(unmasked.out.chunks(4)).enumerate() {
                let head = row / seqlen;
                for column in 0..4 {
                    let (x, y) = (x[column], y[column]);
                    let v = operands.v[head * seqlen * 4..][..seqlen * 4].iter().skip(column).step_by(4);
                    let (low, high) = v.fold((f32::MAX, f32::MIN), |(low, high), &v| (low.min(v), high.max(v)));
                    let inside = low - 1e-6 <= x && x <= high + 1e-6;
                    assert!(inside && x != 0.0, "{context}: row {row}: {x} outside {low}..={high}");
                    let close = f64::from(x - y).abs() <= 1e-5 * max_abs(&operands.v);
                    assert!(empty(row % seqlen) || close, "{context}: row {row}: {x} instead of {y}");
                }
                assert!(masked.lse[row].is_finite(), "{context}: LSE of row {row}");
            }
        });
    }
}

/// Two masks of f32::MIN, added by the caller, overflow to -inf where both hide: those keys are hidden, the others are
/// not.
#[test]
fn a03_two_min_masks_added() {
    let operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (5, 5), (4, 4)));
    let mask = |hidden: bool| if hidden { f32::MIN } else { 0.0 };
    let both = table(5, 5, |i, j| mask(j > i) + mask(j < 3));
    assert_eq!(both[1], NI);
    let rows = [10.0 / 3.0, 3.0, 3.0, 4.0, 4.5];
    operands.assert_rows(&Options::new().bias(bias(&both, [5, 5])), &rows, "reported");
    let mut empty = both;
    empty[15..20].fill(NI);
    let rows = [rows[0], rows[1], rows[2], 0.0, rows[4]];
    operands.assert_rows(&Options::new().bias(bias(&empty, [5, 5])), &rows, "an empty row");
}

/// As A03 with the finite entries in another block of keys than the infinite ones, in either order.
#[test]
fn a03_min_and_infinity_in_different_blocks() {
    for seqlen_k in [129, 300] {
        let operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (40, seqlen_k), (4, 4)));
        for first_is_hidden in [true, false] {
            let floats = table(40, seqlen_k, |_, j| if (j < 128) == first_is_hidden { NI } else { f32::MIN });
            let seen = if first_is_hidden { 128..seqlen_k } else { 0..128 };
            let mean = seen.clone().map(|j| (j + 1) as f64).sum::<f64>() / seen.len() as f64;
            let options = Options::new().bias(bias(&floats, [40, seqlen_k]));
            operands.assert_rows(&options, &[mean; 40], format_args!("{seqlen_k} keys, {seen:?} seen"));
        }
    }
}

/// Blocks of keys at the front that are hidden wholly must not poison what follows.
#[test]
fn a04_leading_blocks_hidden() {
    for seqlen in [640, 600, 129, 257] {
        let mut operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (seqlen, seqlen), (4, 4)));
        operands.q.fill(1.0);
        operands.k.fill(1.0);
        // Row i sees keys i - 9 to i.
        let rows: Vec<f64> = (0..seqlen).map(|i| (i.saturating_sub(9) + i) as f64 / 2.0 + 1.0).collect();
        if seqlen == 640 {
            assert_eq!([0, 5, 10, 512, 639].map(|i| rows[i]), [1.0, 3.5, 6.5, 508.5, 635.5]);
        }
        let mask = table(seqlen, seqlen, |i, j| j <= i && i < j + 10);
        let floats: Vec<f32> = mask.iter().map(|&seen| if seen { 0.0 } else { NI }).collect();
        let window = Window { left: Some(9), right: Some(0), diagonal: Diagonal::TopLeft };
        for (name, options) in [
            ("float", Options::new().bias(bias(&floats, [seqlen, seqlen]))),
            ("bool", Options::new().mask(attend(&mask, [seqlen, seqlen]))),
            ("window", Options::new().window(window)),
            ("both", Options::new().mask(attend(&mask, [seqlen, seqlen])).bias(bias(&floats, [seqlen, seqlen]))),
        ] {
            operands.assert_rows(&options, &rows, format_args!("{seqlen} keys by {name}"));
        }
    }
}

#[test]
fn a04_one_query_sees_a_later_block() {
    for (seqlen_k, first, last) in [(700, 515, 575), (700, 128, 255), (700, 699, 699), (300, 127, 128), (300, 256, 256)]
    {
        let operands = Operands::<f32>::uni_ramp(shape(1, (2, 1), (1, seqlen_k), (4, 4)));
        let mask = table(1, seqlen_k, |_, j| (first..=last).contains(&j));
        let mean = (first + last) as f64 / 2.0 + 1.0;
        assert!(first != 515 || mean == 546.0);
        let context = format!("{first}..={last} of {seqlen_k}");
        operands.assert_rows(&Options::new().mask(attend(&mask, [1, seqlen_k])), &[mean], &context);
        let floats: Vec<f32> = mask.iter().map(|&seen| if seen { 0.0 } else { NI }).collect();
        operands.assert_rows(&Options::new().bias(bias(&floats, [1, seqlen_k])), &[mean], &context);
    }
}

/// A mask that excludes whole heads: zeros for them, with and without weights, and nothing changes for the others.
#[test]
fn a05_whole_heads_hidden() {
    for (seqlen_q, seqlen_k) in [(5, 5), (1, 130), (40, 129)] {
        let operands = Operands::<f32>::random(shape(1, (3, 3), (seqlen_q, seqlen_k), (1, 1)), 5);
        for excluded in [[false, false, true], [true, true, false]] {
            let plane = seqlen_q * seqlen_k;
            let mask: Vec<bool> = (0..3 * plane).map(|at| !excluded[at / plane]).collect();
            let seen = excluded.map(|hidden| !hidden);
            let full = Options::new().mask(attend(&mask, [3, seqlen_q, seqlen_k]));
            let expected = operands.check(&full, format_args!("{excluded:?}"));
            let (out, weights) = (&expected.out, &expected.weights);
            for (head, &hidden) in excluded.iter().enumerate() {
                let zero = |values: &[f64], len: usize| values[head * len..][..len].iter().all(|&x| x == 0.0);
                assert_eq!(zero(out, seqlen_q), hidden);
                assert_eq!(zero(weights, plane), hidden);
            }
            // The same mask as one value for each head.
            operands.check(&Options::new().mask(attend(&seen, [3, 1, 1])), format_args!("{excluded:?} broadcast"));
            on_every_level(|level, name| {
                let unmasked = operands.run(&Options::new().level(level), name);
                let masked = operands.run(&full.level(level), name);
                for head in (0..3).filter(|&head| !excluded[head]) {
                    let rows = head * seqlen_q..(head + 1) * seqlen_q;
                    assert_same_bits(
                        &masked.out[rows.clone()],
                        &unmasked.out[rows],
                        format_args!("{name}: head {head}"),
                    );
                }
            });
        }
    }
}

/// The averaged weights of A05 count a hidden head as zeros, with heads that share KV heads too.
#[test]
fn a05_averaged_weights() {
    for (heads, kv_heads, seqlen_q, seqlen_k) in [(3, 3, 5, 5), (8, 2, 40, 130), (6, 1, 1, 300)] {
        let operands = Operands::<f32>::random(shape(2, (heads, kv_heads), (seqlen_q, seqlen_k), (4, 1)), 6);
        let seen: Vec<bool> = (0..heads).map(|head| head != 1).collect();
        let options = Options::new().mask(attend(&seen, [heads, 1, 1]));
        let expected = operands.reference(&options).averaged_weights();
        on_every_level(|level, name| {
            let context = format!("{heads}/{kv_heads} heads on {name}");
            let mut out = vec![f32::NAN; 2 * heads * seqlen_q];
            let mut weights = vec![f32::NAN; 2 * seqlen_q * seqlen_k];
            let [q, k, v] = operands.views();
            let outputs = Outputs::new(HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed"))
                .averaged_weights(HeadsMut::bhsd(&mut weights, [2, 1, seqlen_q, seqlen_k]).expect("packed"));
            multi_head_with(&q, &k, &v, outputs, &options.level(level)).expect("a valid call");
            assert_all_close(&weights, &expected, 1e-6, 0.0, &context);
            let sum = 1.0 - 1.0 / heads as f32;
            assert!(weights.chunks(seqlen_k).all(|row| (row.iter().sum::<f32>() - sum).abs() < 1e-5), "{context}");
            assert_same_bits(&out, &operands.run(&options.level(level), &context).out, &context);
        });
    }
}
