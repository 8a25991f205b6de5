//! A22 to A25: stride 0, and masks that are smaller than the scores.

use polyhead::{Bias, Diagonal, Error, Heads, HeadsMut, Mask, Options, Shape, View, multi_head};

use crate::operands::{Operands, Results, attend, on_every_level, shape, table};
use crate::support::{Rng, max_abs};

/// One KV head seen as four, and one item seen as three, by strides of 0.
#[test]
fn a22_stride_zero_keys_and_values() {
    for seqlen_k in [32, 33, 64, 65, 97, 129] {
        let (batch, heads, seqlen_q, dim) = (3, 4, 5, 8);
        let native = Operands::<f32>::random(shape(batch, (heads, 1), (seqlen_q, seqlen_k), (dim, dim)), 22);
        let item = seqlen_k * dim;
        let mask = Rng::new(22).bools(seqlen_q * seqlen_k, 0.6);
        let options = Options::new().mask(attend(&mask, [seqlen_q, seqlen_k]));
        // What the broadcasts mean, written out: item 0 for all items, head 0 for all heads.
        let expand = |data: &[f32], copies: usize| data[..item].repeat(copies);
        let expanded = Operands {
            shape: Shape { num_kv_heads: heads, ..native.shape },
            q: native.q.clone(),
            k: expand(&native.k, batch * heads),
            v: expand(&native.v, batch * heads),
        };
        expanded.check(&options, format_args!("{seqlen_k} keys"));
        let grouped = Operands { k: expand(&native.k, batch), v: expand(&native.v, batch), ..native.clone() };
        on_every_level(|level, name| {
            let (options, context) = (options.level(level), format!("{seqlen_k} keys on {name}"));
            let view = |data, kv_heads| {
                Heads::with_strides(data, [batch, kv_heads, seqlen_k, dim], [0, 0, dim, 1]).expect("inside")
            };
            let [q, _, _] = native.views();
            let expected = expanded.run(&options, &context);
            let broadcast = Results::of(&q, &view(&native.k, heads), &view(&native.v, heads), &options, &context);
            broadcast.assert_same_bits(&expected, &context);
            let one = Results::of(&q, &view(&native.k, 1), &view(&native.v, 1), &options, &context);
            one.assert_same_bits(&grouped.run(&options, &context), &context);
            // Groups may be cut into tiles in another way.
            let close = crate::support::assert_all_close;
            close(&one.out, &expected.out, 1e-5 * max_abs(&native.v), 0.0, format_args!("{context}: grouped"));
        });
    }
}

/// Masks with one value for all keys, whose last axis has size 1 and whatever stride.
#[test]
fn a23_masks_of_one_key() {
    let (batch, seqlen_q, seqlen_k) = (2, 5, 67);
    let operands = Operands::<f32>::random(shape(batch, (2, 2), (seqlen_q, seqlen_k), (8, 8)), 23);
    let plain = operands.reference(&Options::new());
    let rows = batch * seqlen_q;
    // Just as long as needed: a read of the next key would be out of bounds.
    let bools: Vec<bool> = (0..rows).map(|i| i % 3 != 1).collect();
    let floats: Vec<f32> = (0..rows).map(|i| [0.0, -7.5, 1e4][i % 3]).collect();
    for stride in [0, 1, 77, usize::MAX] {
        let (two, four) = ([1, stride], [seqlen_q, usize::MAX, 1, stride]);
        let mask = |rank: usize| match rank {
            2 => Mask::attend(View::with_strides(&bools[..seqlen_q], [seqlen_q, 1], two).expect("inside")),
            _ => Mask::attend(View::with_strides(&bools, [batch, 1, seqlen_q, 1], four).expect("inside")),
        };
        let bias = |rank: usize| match rank {
            2 => Bias::new(View::with_strides(&floats[..seqlen_q], [seqlen_q, 1], two).expect("inside")),
            _ => Bias::new(View::with_strides(&floats, [batch, 1, seqlen_q, 1], four).expect("inside")),
        };
        for rank in [2, 4] {
            let context = format!("rank {rank}, stride {stride}");
            let expected = operands.check(&Options::new().mask(mask(rank).expect("up to four axes")), &context);
            let hidden = |row: usize| {
                let (item, query) = (row / seqlen_q / 2, row % seqlen_q);
                !bools[if rank == 2 { query } else { item * seqlen_q + query }]
            };
            for (row, (x, y)) in expected.out.chunks(8).zip(plain.out.chunks(8)).enumerate() {
                assert_eq!(x, if hidden(row) { &[0.0; 8] } else { y }, "{context}: row {row}");
            }
            let biased = Options::new().bias(bias(rank).expect("up to four axes"));
            // A constant for each row changes no weight; f32 loses 1e4 * 2^-24 of a score.
            on_every_level(|level, name| {
                let out = operands.run(&biased.level(level), name).out;
                crate::support::assert_all_close(&out, &plain.out, 2e-3, 0.0, format_args!("{context} on {name}"));
            });
        }
    }
}

/// A mask of keys holds for all queries; a transposed one is an error, not a broadcast.
#[test]
fn a24_key_mask_broadcasts_over_queries() {
    // q 3x2x4x7x16, with the two leading axes taken as one.
    let operands = Operands::<f32>::random(shape(6, (4, 4), (7, 5), (16, 32)), 24);
    let keys = [false, false, true, true, true];
    let options = Options::new().mask(attend(&keys, [1, 1, 5]));
    let expected = operands.check(&options, "reported");
    assert_eq!(expected.out.len(), 3 * 2 * 4 * 7 * 32);
    for row in expected.weights.chunks(5) {
        assert!(row[..2] == [0.0; 2] && row[2..].iter().all(|&p| p > 0.0));
    }
    for rank in 1..=4 {
        let mask = match rank {
            1 => attend(&keys, [5]),
            2 => attend(&keys, [1, 5]),
            3 => attend(&keys, [1, 1, 5]),
            _ => attend(&keys, [1, 1, 1, 5]),
        };
        assert_eq!(operands.reference(&Options::new().mask(mask)), expected, "rank {rank}");
    }
}

#[test]
fn a24_transposed_mask_is_an_error() {
    let operands = Operands::<f32>::random(shape(1, (2, 2), (7, 5), (4, 4)), 24);
    let [q, k, v] = operands.views();
    let (bools, floats) = ([true; 35], [0.0f32; 35]);
    let table = crate::operands::bias(&floats, [5, 7]);
    let mut out = vec![9.0f32; 2 * 7 * 4];
    for (operand, options) in
        [("mask", Options::new().mask(attend(&bools, [5, 7]))), ("bias", Options::new().bias(table))]
    {
        let view = HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed");
        let error = multi_head(&q, &k, &v, view, &options).expect_err("transposed");
        // Either axis would do.
        match error {
            Error::Shape { operand: named, axis: "seqlen_q", expected: 7, actual: 5 }
            | Error::Shape { operand: named, axis: "seqlen_k", expected: 5, actual: 7 } => assert_eq!(named, operand),
            other => panic!("{operand}: {other:?}"),
        }
    }
    assert!(out.iter().all(|&x| x == 9.0));
}

/// A mask stored (keys, queries) and viewed the other way round, and bits that lie apart: the strides count.
#[test]
fn a24_strided_masks() {
    let (seqlen_q, seqlen_k) = (40, 141);
    let operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen_q, seqlen_k), (4, 4)), 24);
    let packed = Rng::new(24).bools(seqlen_q * seqlen_k, 0.5);
    let expected = operands.reference(&Options::new().mask(attend(&packed, [seqlen_q, seqlen_k])));
    let float = |seen: bool| if seen { 0.0 } else { f32::NEG_INFINITY };
    // One row for each key; three bools for each; rows with a gap.
    for strides in [[1, seqlen_q], [3 * seqlen_k, 3], [seqlen_k + 9, 1]] {
        let mut bools = vec![true; 1 + (seqlen_q - 1) * strides[0] + (seqlen_k - 1) * strides[1]];
        let mut floats = vec![f32::NAN; bools.len()];
        for (at, &seen) in packed.iter().enumerate() {
            let place = at / seqlen_k * strides[0] + at % seqlen_k * strides[1];
            (bools[place], floats[place]) = (seen, float(seen));
        }
        let mask = View::with_strides(&bools, [seqlen_q, seqlen_k], strides).expect("inside");
        let bias = View::with_strides(&floats, [seqlen_q, seqlen_k], strides).expect("inside");
        let (mask, bias) = (Mask::attend(mask).expect("two axes"), Bias::new(bias).expect("two axes"));
        for options in [Options::new().mask(mask), Options::new().bias(bias), Options::new().mask(mask).bias(bias)] {
            assert_eq!(operands.check(&options, format_args!("{strides:?}")), expected);
        }
    }
}

/// Every axis of a mask and of a bias either full or of size 1, for heads that share tiles.
#[test]
fn a24_every_broadcast() {
    let sizes = [2, 6, 5, 133];
    let operands = Operands::<f32>::random(shape(2, (6, 2), (5, 133), (4, 4)), 24);
    let mut rng = Rng::new(24);
    for which in 0..16 {
        let full = |bit: usize| core::array::from_fn(|axis| if bit >> axis & 1 == 1 { sizes[axis] } else { 1 });
        let (of_mask, of_bias): ([usize; 4], [usize; 4]) = (full(which), full(15 - which));
        let bools = rng.bools(of_mask.iter().product(), 0.8);
        let floats: Vec<f32> = rng.normals(of_bias.iter().product(), 2.0);
        let mask = Options::new().mask(attend(&bools, of_mask));
        operands.check(&mask, format_args!("mask of {of_mask:?}"));
        let both = mask.bias(crate::operands::bias(&floats, of_bias));
        operands.check(&both, format_args!("mask of {of_mask:?}, bias of {of_bias:?}"));
    }
}

/// Padding is of keys: as a length it cannot end up on the queries' axis, as a mask it can.
#[test]
fn a25_padding_is_on_the_key_axis() {
    let operands = Operands::<f32>::random(shape(1, (2, 2), (4, 4), (8, 8)), 25);
    let causal = Options::new().causal(Diagonal::TopLeft);
    let lengths = [2];
    let right = operands.check(&causal.key_lengths(&lengths), "lengths");
    assert!(right.lse.iter().all(|lse| lse.is_finite()));
    let keys = [true, true, false, false];
    assert_eq!(operands.reference(&causal.mask(attend(&keys, [1, 4]))), right);
    // The mistake: rows 2 and 3 are empty, and others see padding.
    let wrong = operands.check(&causal.mask(attend(&keys, [4, 1])), "the mistake");
    let empty: Vec<bool> = wrong.lse.iter().map(|&lse| lse == f64::NEG_INFINITY).collect();
    assert_eq!(empty, [false, false, true, true].repeat(2));
    for len in [0, 1, 127, 128, 129, 300] {
        let long = Operands::<f32>::random(shape(1, (1, 1), (33, 300), (4, 4)), 25);
        let mask = table(1, 300, |_, j| j < len);
        let lengths = [len];
        let expected = long.check(&causal.key_lengths(&lengths), len);
        assert_eq!(long.check(&causal.mask(attend(&mask, [1, 300])), len), expected);
    }
}
