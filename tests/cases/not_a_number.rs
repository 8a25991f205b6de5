//! A06 to A09: NaN and infinities, seen and hidden.

use polyhead::{Diagonal, Options, Shape};

use crate::operands::{Operands, attend, bias, on_every_level, shape, table};
use crate::support::{Bits, assert_same_bits};

/// Asserts that those rows of the output are NaN, and that the others have the bits of `clean`.
#[track_caller]
fn assert_nan_rows(out: &[f32], clean: &[f32], width: usize, nan: impl Fn(usize) -> bool, context: &str) {
    for (row, (x, y)) in out.chunks(width).zip(clean.chunks(width)).enumerate() {
        if nan(row) {
            assert!(x.iter().all(|x| x.is_nan()), "{context}: row {row} is {x:?}");
        } else {
            assert_same_bits(x, y, format_args!("{context}: row {row}"));
        }
    }
}

#[test]
fn a06_nan_queries_stay_nan() {
    for (seqlen_q, seqlen_k) in [(16, 16), (1, 16), (33, 130), (129, 1)] {
        let operands = Operands::<f32>::random(shape(2, (4, 4), (seqlen_q, seqlen_k), (8, 8)), 6);
        let mut nan = operands.clone();
        nan.q.fill(f32::NAN);
        let expected = nan.check(&Options::new(), "all queries NaN");
        assert!(expected.out.iter().all(|x| x.is_nan()));
        // One element of one row of each head.
        let row = 3.min(seqlen_q - 1);
        let mut one = operands.clone();
        one.q.chunks_exact_mut(8).skip(row).step_by(seqlen_q).for_each(|q| q[5] = f32::NAN);
        one.check(&Options::new(), "one row NaN");
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let (out, clean) = (one.run(&options, name), operands.run(&options, name));
            assert_nan_rows(&out.out, &clean.out, 8, |at| at % seqlen_q == row, name);
            assert_nan_rows(&out.lse, &clean.lse, 1, |at| at % seqlen_q == row, name);
        });
    }
}

/// A row whose only permitted key has a NaN score is not a row that sees nothing.
#[test]
fn a06_only_permitted_key_is_nan() {
    for seqlen_k in [16, 129, 300] {
        let (row, key) = (3, seqlen_k - 2);
        let operands = Operands::<f32>::random(shape(1, (2, 1), (16, seqlen_k), (8, 8)), 7);
        let mut nan = operands.clone();
        nan.k[key * 8] = f32::NAN;
        let mask = table(16, seqlen_k, |i, j| (i == row) == (j == key));
        let options = Options::new().mask(attend(&mask, [16, seqlen_k]));
        let expected = nan.check(&options, "one NaN key");
        assert!(expected.lse[row].is_nan());
        on_every_level(|level, name| {
            let options = options.level(level);
            let (out, clean) = (nan.run(&options, name), operands.run(&options, name));
            assert_nan_rows(&out.out, &clean.out, 8, |at| at % 16 == row, name);
        });
    }
}

/// Infinite scores, whose softmax IEEE arithmetic makes NaN, and a NaN bias.
#[test]
fn a06_infinite_scores_and_nan_bias() {
    let operands = Operands::<f32>::random(shape(1, (1, 1), (9, 130), (4, 4)), 8);
    for (row, value) in [(0, f32::INFINITY), (4, f32::NEG_INFINITY), (8, f32::INFINITY)] {
        let mut infinite = operands.clone();
        infinite.q[row * 4..][..4].fill(0.0);
        infinite.q[row * 4] = value;
        infinite.check(&Options::new(), format_args!("query {row} of {value}"));
    }
    let floats = table(9, 130, |i, j| if (i, j) == (2, 129) { f32::NAN } else { 0.5 });
    let expected = operands.check(&Options::new().bias(bias(&floats, [9, 130])), "NaN bias");
    assert!(expected.out.chunks(4).enumerate().all(|(i, out)| out.iter().all(|x| x.is_nan()) == (i == 2)));
}

/// A cache with less in it than it holds: what is behind changes no bit.
fn unused_tail<T: Bits + Into<f64>>(seqlen_q: usize, lengths: &[usize], capacity: usize) {
    let shape = shape(lengths.len(), (4, 2), (seqlen_q, capacity), (16, 8));
    let clean = Operands::<T>::random(shape, 9);
    let fill = |value: f32| {
        let mut filled = clean.clone();
        for (data, width) in [(&mut filled.k, 16), (&mut filled.v, 8)] {
            for (row, elements) in data.chunks_exact_mut(width).enumerate() {
                if row % capacity >= lengths[row / capacity / 2] {
                    elements.fill(T::from_f32_nearest(value));
                }
            }
        }
        filled
    };
    let context = |name: &str| format!("{} {seqlen_q} queries, {capacity} keys, {name}", T::NAME);
    let options = Options::new().key_lengths(lengths);
    fill(f32::NAN).check(&options, context("NaN"));
    on_every_level(|level, name| {
        let options = options.level(level);
        let expected = fill(0.0).run(&options, name);
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            fill(value).run(&options, name).assert_same_bits(&expected, context(name));
        }
        clean.run(&options, name).assert_same_bits(&expected, context(name));
    });
}

#[test]
fn a07_nan_in_unused_cache() {
    unused_tail::<f32>(1, &[32, 64, 96, 48], 128);
    unused_tail::<half::f16>(1, &[32, 64, 96, 48], 128);
    unused_tail::<half::bf16>(1, &[32, 64, 96, 48], 128);
    unused_tail::<f32>(5, &[0, 1, 127, 128, 129, 299, 300], 300);
    unused_tail::<half::f16>(33, &[1, 255, 257], 300);
}

/// The cache of A07 cut to its length, as slices.
#[test]
fn a07_equals_cut_cache() {
    let (capacity, lengths) = (128, [32, 64, 96, 48]);
    let all = Operands::<f32>::random(shape(4, (2, 2), (1, capacity), (16, 16)), 10);
    on_every_level(|level, name| {
        let options = Options::new().level(level);
        let whole = all.run(&options.key_lengths(&lengths), name);
        for (item, len) in lengths.into_iter().enumerate() {
            let cut = |data: &[f32]| -> Vec<f32> {
                let item = &data[item * 2 * capacity * 16..][..2 * capacity * 16];
                item.chunks(capacity * 16).flat_map(|head| &head[..len * 16]).copied().collect()
            };
            let one = Operands {
                shape: Shape { batch: 1, seqlen_k: len, ..all.shape },
                q: all.q[item * 32..][..32].to_vec(),
                k: cut(&all.k),
                v: cut(&all.v),
            };
            let (actual, expected) = (&whole.out[item * 32..][..32], one.run(&options, name).out);
            crate::support::assert_all_close(actual, &expected, 1e-6, 0.0, format_args!("{name}: item {item}"));
        }
    });
}

/// What a masked key holds cannot matter: the output is `v[0]`, five times.
#[test]
fn a08_hidden_key_is_unread() {
    let numbers: Vec<f32> = (0..8u8).map(f32::from).collect();
    let clean =
        Operands { shape: shape(1, (1, 1), (2, 2), (4, 4)), q: numbers.clone(), k: numbers.clone(), v: numbers };
    let mask = [true, false];
    let options = Options::new().mask(attend(&mask, [1, 2]));
    on_every_level(|level, name| {
        for value in [1.0, 1e10, f32::NAN, f32::INFINITY] {
            let mut changed = clean.clone();
            changed.k[4..].fill(value);
            assert_eq!(changed.run(&options.level(level), name).out, [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);
            changed.v[4..].fill(f32::NAN);
            assert_eq!(changed.run(&options.level(level), name).out, [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);
        }
    });
}

/// A08 in all ways to hide a key, at block edges.
#[test]
fn a08_hidden_by_any_option() {
    for (seqlen_q, seqlen_k) in [(2, 3), (17, 129), (40, 300)] {
        let clean = Operands::<f32>::random(shape(1, (2, 1), (seqlen_q, seqlen_k), (5, 7)), 11);
        // Keys that nobody sees: the last, and for masks every other.
        let (last, odd) = (seqlen_k - 1, |j: usize| j % 2 == 1);
        let (lengths, mask) = ([last], table(1, seqlen_k, |_, j| !odd(j)));
        let floats = table(1, seqlen_k, |_, j| if odd(j) { f32::NEG_INFINITY } else { 0.25 });
        let before_last = Diagonal::Offset(seqlen_k as isize - seqlen_q as isize - 1);
        let hidden = [
            ("lengths", Options::new().key_lengths(&lengths), false),
            ("causal", Options::new().causal(before_last), false),
            ("mask", Options::new().mask(attend(&mask, [1, seqlen_k])), true),
            ("bias", Options::new().bias(bias(&floats, [1, seqlen_k])), true),
        ];
        for (how, options, every_other) in hidden {
            let keys = |j: usize| if every_other { odd(j) } else { j == last };
            on_every_level(|level, name| {
                let options = options.level(level);
                let expected = clean.run(&options, name);
                for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
                    let mut poisoned = clean.clone();
                    poisoned.fill_keys(keys, value);
                    let context = format!("{how} on {name}: {value}");
                    poisoned.run(&options, &context).assert_same_bits(&expected, &context);
                }
            });
        }
    }
}

/// Causality asked for twice, as the flag and as a mask, is causality.
#[test]
fn a09_causal_flag_and_causal_mask() {
    for seqlen_k in 1..=200usize {
        for seqlen_q in [seqlen_k, seqlen_k.saturating_sub(8)] {
            let operands = Operands::<f32>::random(shape(1, (1, 1), (seqlen_q, seqlen_k), (4, 2)), 12);
            let mask = table(seqlen_q, seqlen_k, |i, j| j + seqlen_q <= i + seqlen_k);
            let (mask, flag) = (attend(&mask, [seqlen_q, seqlen_k]), Diagonal::BottomRight);
            let context = format!("{seqlen_q} queries, {seqlen_k} keys");
            let expected = operands.check(&Options::new().mask(mask).causal(flag), &context);
            assert!(expected.out.iter().all(|x| x.is_finite()));
            for options in [Options::new().mask(mask), Options::new().causal(flag)] {
                assert_eq!(operands.reference(&options), expected, "{context}");
                on_every_level(|level, name| {
                    operands.run(&options.level(level), name).assert_close(&expected, 5.0, &context);
                });
            }
        }
    }
}
