use polyhead::{Diagonal, Shape, Window};

use crate::oracle::{ALL_F32, BiasTable, Call, Dtype, MaskTable, Opts, TYPES, Wanted, shape};
use crate::support::{Rng, levels};

/// What may lie where nobody looks.
const GARBAGE: [f32; 6] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, -0.0];

/// Fills keys, as (batch, kv head, key), of K or V or both; a garbage of several values is taken in turn.
fn fill(call: &Call, keys: &[[usize; 3]], garbage: &[f32], (in_k, in_v): (bool, bool)) -> Call {
    fn rows(data: &mut [f32], width: usize, row: usize, dtype: Dtype, garbage: &[f32]) {
        for (x, &bad) in data[row * width..][..width].iter_mut().zip(garbage.iter().cycle()) {
            *x = if bad.is_finite() { bad.clamp(-dtype.largest(), dtype.largest()) } else { bad };
        }
    }
    let mut call = call.clone();
    let Shape { num_kv_heads, seqlen_k, head_dim, head_dim_v, .. } = call.shape;
    for &[b, h, j] in keys {
        let row = (b * num_kv_heads + h) * seqlen_k + j;
        if in_k {
            rows(&mut call.k, head_dim, row, call.types[1], garbage);
        }
        if in_v {
            rows(&mut call.v, head_dim_v, row, call.types[2], garbage);
        }
    }
    call
}

/// Asserts that garbage at `keys` changes no bit of the rows that see none of them, nor of any averaged weight if all rows
/// of the query are such. How many rows that were in the items that have one of the keys.
#[track_caller]
fn assert_unread(call: &Call, keys: &[[usize; 3]], context: &str) -> usize {
    let group = call.shape.num_heads / call.shape.num_kv_heads;
    let blind: Vec<[usize; 3]> = call
        .rows()
        .filter(|&[b, h, i]| keys.iter().all(|&[kb, kh, j]| kb != b || kh != h / group || !call.sees([b, h, i, j])))
        .collect();
    let zeros = fill(call, keys, &[0.0], (true, true));
    let all = blind.len() == call.rows().count();
    for &level in levels() {
        let clean = zeros.run(level, Wanted::Weights);
        let averaged = zeros.run(level, Wanted::Averaged);
        for garbage in [&[f32::NAN][..], &[f32::INFINITY], &[f32::MAX], &GARBAGE] {
            for place in [(true, true), (true, false), (false, true)] {
                // The other one keeps its zeros.
                let bad = fill(&zeros, keys, garbage, place);
                let results = bad.run(level, Wanted::Weights);
                let context =
                    format!("{context}: {garbage:?} in (K, V) {place:?} on {} {:?}", level.name(), call.types);
                for &row in &blind {
                    results.assert_same_row(&clean, &call.shape, row, &context);
                }
                if all && garbage.len() > 1 {
                    bad.run(level, Wanted::Averaged).assert_same_bits(&averaged, &context);
                }
            }
        }
    }
    blind.iter().filter(|row| keys.iter().any(|key| key[0] == row[0])).count()
}

/// Keys that no query sees.
fn invisible(call: &Call) -> Vec<[usize; 3]> {
    let Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, .. } = call.shape;
    let group = num_heads / num_kv_heads;
    let mut keys = Vec::new();
    for at in 0..batch * num_kv_heads * seqlen_k {
        let [b, kv, j] = [at / seqlen_k / num_kv_heads, at / seqlen_k % num_kv_heads, at % seqlen_k];
        let seen = (kv * group..(kv + 1) * group).any(|h| (0..seqlen_q).any(|i| call.sees([b, h, i, j])));
        if !seen {
            keys.push([b, kv, j]);
        }
    }
    keys
}

fn call(sizes: [usize; 7], types: usize, options: Opts) -> Call {
    Call::random(shape(sizes), TYPES[types % TYPES.len()], &mut Rng::new(31)).options(options)
}

/// Keys that nobody sees: by a length (A07), causality, a window, a mask (A08), a bias; whole blocks and single keys.
#[test]
fn hidden_is_unread() {
    let (l, s) = (21, 290);
    let window = Window { left: Some(20), right: Some(3), diagonal: Diagonal::Offset(140) };
    let single = |_: usize, j: usize| j % 9 != 4;
    let blocks = |_: usize, j: usize| !(100..270).contains(&j);
    let mask = |seen: &dyn Fn(usize, usize) -> bool| Some(MaskTable::plane(l, s, seen));
    let bias = |seen: &dyn Fn(usize, usize) -> bool| {
        Some(BiasTable::plane(l, s, |i, j| if seen(i, j) { 0.5 } else { f32::NEG_INFINITY }))
    };
    let none = Opts::default();
    let options = [
        Opts { key_lengths: Some(vec![129, 3]), ..none.clone() },
        Opts { key_lengths: Some(vec![128, 0]), ..none.clone() },
        Opts { causal: Some(Diagonal::TopLeft), ..none.clone() },
        Opts { causal: Some(Diagonal::Offset(113)), ..none.clone() },
        Opts { window: Some(window), ..none.clone() },
        Opts { mask: mask(&single), ..none.clone() },
        Opts { mask: mask(&blocks), ..none.clone() },
        Opts { bias: bias(&single), ..none.clone() },
        Opts { bias: bias(&blocks), softcap: Some(4.0), ..none.clone() },
        Opts { mask: mask(&single), bias: bias(&blocks), key_lengths: Some(vec![280, 130]), ..none.clone() },
        Opts { mask: mask(&blocks), alibi: Some((vec![0.1; 4], Diagonal::TopLeft)), sinks: Some(vec![0.5; 4]), ..none },
    ];
    for (at, options) in options.into_iter().enumerate() {
        let call = call([2, 4, 2, l, s, 7, 10], at, options);
        let keys = invisible(&call);
        assert!(!keys.is_empty() && keys.len() < 2 * 2 * s, "{:?}", call.options);
        assert_eq!(assert_unread(&call, &keys, &format!("rule {at}")), 2 * 4 * l);
    }
}

/// Keys that some rows of a tile see and others do not.
#[test]
fn hidden_is_unread_by_the_rows_that_do_not_see_it() {
    let (l, s) = (40, 140);
    let window = Window { left: Some(6), right: Some(9), diagonal: Diagonal::BottomRight };
    let mask = MaskTable::plane(l, s, |i, j| (i + j) % 3 != 0);
    let per_head = MaskTable::random([2, 3, l, s], 0.6, false, &mut Rng::new(32));
    let table = BiasTable::plane(l, s, |i, j| if (i * j) % 4 == 1 { f32::NEG_INFINITY } else { -1.0 });
    let none = Opts::default();
    let options = [
        Opts { causal: Some(Diagonal::BottomRight), ..none.clone() },
        Opts { causal: Some(Diagonal::TopLeft), ..none.clone() },
        Opts { window: Some(window), ..none.clone() },
        Opts { mask: Some(mask.clone()), ..none.clone() },
        Opts { mask: Some(per_head), causal: Some(Diagonal::Offset(90)), ..none.clone() },
        Opts { bias: Some(table.clone()), ..none.clone() },
        Opts { bias: Some(table), mask: Some(mask), window: Some(window), sinks: Some(vec![0.0; 3]), ..none },
    ];
    for (at, options) in options.into_iter().enumerate() {
        let call = call([2, 3, 1, l, s, 5, 9], at + 1, options);
        let mut blind = 0;
        for keys in [
            vec![[0, 0, 0]],
            vec![[0, 0, 5], [1, 0, 17]],
            vec![[0, 0, 110], [0, 0, 127]],
            vec![[1, 0, 128], [1, 0, 139]],
        ] {
            blind += assert_unread(&call, &keys, &format!("rule {at}, keys {keys:?}"));
        }
        assert!(blind > 0, "rule {at}: every row sees the keys");
    }
}

/// A bias and a mask say nothing either at a key that something else hides.
#[test]
fn hidden_is_unread_in_the_bias_too() {
    let (l, s) = (20, 150);
    let rules = [
        Opts { causal: Some(Diagonal::Offset(64)), ..Opts::default() },
        Opts { key_lengths: Some(vec![77, 130]), ..Opts::default() },
        Opts { mask: Some(MaskTable::plane(l, s, |i, j| (i + j) % 4 != 0)), ..Opts::default() },
        Opts {
            window: Some(Window { left: Some(9), right: Some(9), diagonal: Diagonal::BottomRight }),
            ..Opts::default()
        },
    ];
    for (at, rule) in rules.into_iter().enumerate() {
        let call = call([2, 2, 2, l, s, 5, 5], at, rule);
        let with = |hidden: f32| {
            let mut values = Vec::new();
            for row in 0..2 * l {
                let [b, i] = [row / l, row % l];
                values.extend((0..s).map(|j| if call.sees([b, 0, i, j]) { 0.125 * (j % 7) as f32 } else { hidden }));
            }
            let bias = Some(BiasTable { values, shape: [2, 1, l, s] });
            call.clone().options(Opts { bias, ..call.options.clone() })
        };
        for &level in levels() {
            let clean = with(0.0).run(level, Wanted::Weights);
            for garbage in GARBAGE {
                let context = format!("{garbage} in the bias, rule {at}, on {}", level.name());
                with(garbage).run(level, Wanted::Weights).assert_same_bits(&clean, context);
            }
        }
    }
}

/// Outputs that round to zero: adding 0 * V of a hidden key to -0 must not turn it into +0, nor its sign show.
#[test]
fn hidden_is_unread_down_to_the_sign_of_zero() {
    for s in [3, 5, 9, 40] {
        let seen = |j: usize| j.is_multiple_of(2) && j + 1 < s.max(4);
        let mut call = Call::random(shape([1, 1, 1, 6, s, 1, 4]), ALL_F32, &mut Rng::new(33));
        // The first key has the largest score and V = 0, the others a weight below 1/2 and V = -2^-149: products that round
        // to -0.
        call.q.fill(1.0);
        call.k.iter_mut().enumerate().for_each(|(j, k)| *k = if j == 0 { 3.0 } else { 1.0 });
        call.v.iter_mut().enumerate().for_each(|(at, v)| *v = if at < 4 { 0.0 } else { -f32::from_bits(1) });
        let call = call.options(Opts { mask: Some(MaskTable::plane(6, s, |_, j| seen(j))), ..Opts::default() });
        let hidden: Vec<[usize; 3]> = (0..s).filter(|&j| !seen(j)).map(|j| [0, 0, j]).collect();
        for &level in levels() {
            let with = |v: f32| fill(&call, &hidden, &[v], (false, true)).run(level, Wanted::Weights);
            let clean = with(0.0);
            assert!(clean.out.iter().all(|&x| x == 0.0), "{}: {:?}", level.name(), clean.out);
            for v in [1.0, -1.0, f32::NAN, f32::NEG_INFINITY] {
                with(v).assert_same_bits(&clean, format_args!("V = {v} at hidden keys of {s} on {}", level.name()));
            }
        }
    }
}

/// Lengths of every edge of a block: as the call on slices cut to the length (A07), bit for bit.
#[test]
fn hidden_is_unread_as_if_the_operands_ended_there() {
    let s = 140;
    let whole = Call::random(shape([1, 2, 1, 3, s, 6, 6]), ALL_F32, &mut Rng::new(34));
    for len in [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 32, 33, 64, 127, 128, 129, 139] {
        let keys: Vec<[usize; 3]> = (len..s).map(|j| [0, 0, j]).collect();
        let long = fill(&whole, &keys, &GARBAGE, (true, true));
        let long =
            long.options(Opts { key_lengths: Some(vec![len]), causal: Some(Diagonal::BottomRight), ..Opts::default() });
        let mut short = whole.clone().options(Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() });
        short.shape.seqlen_k = len;
        short.k.truncate(len * 6);
        short.v.truncate(len * 6);
        for &level in levels() {
            let (long, short) = (long.run(level, Wanted::Lse), short.run(level, Wanted::Lse));
            long.assert_same_bits(&short, format_args!("length {len} on {}", level.name()));
        }
    }
}
