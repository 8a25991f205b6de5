//! A36, A40, A41, A43 to A45: what options mean.

use polyhead::{Diagonal, Error, HeadsMut, Mask, Options, View, alibi_slopes, multi_head};

use crate::operands::{Operands, attend, bias, ignore, on_every_level, shape, table};
use crate::support::{Rng, assert_all_close, assert_same_bits, max_abs};

/// Whether `true` is seen or hidden is in the constructor's name.
#[test]
fn a36_polarity_is_in_the_name() {
    let operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (4, 4), (4, 4)));
    let upper = table(4, 4, |i, j| j >= i);
    operands.assert_rows(&Options::new().mask(attend(&upper, [4, 4])), &[2.5, 3.0, 3.5, 4.0], "true is seen");
    operands.assert_rows(&Options::new().mask(ignore(&upper, [4, 4])), &[0.0, 1.0, 1.5, 2.0], "true is hidden");
    let long = Operands::<f32>::random(shape(1, (2, 2), (33, 130), (4, 4)), 36);
    let mask = Rng::new(36).bools(33 * 130, 0.5);
    let inverse: Vec<bool> = mask.iter().map(|x| !x).collect();
    let expected = long.check(&Options::new().mask(attend(&mask, [33, 130])), "attend");
    assert_eq!(long.check(&Options::new().mask(ignore(&inverse, [33, 130])), "ignore"), expected);
}

/// The default scale is 1 / sqrt(head_dim); a scale of 0 is a scale of 0.
#[test]
fn a40_default_scale_is_not_zero() {
    let operands = Operands {
        shape: shape(1, (1, 1), (3, 3), (2, 2)),
        q: vec![0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6],
        k: vec![0.7, 0.8, 0.9, 1.0, 1.1, 1.2],
        v: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    };
    let causal = Options::new().causal(Diagonal::TopLeft);
    let expected = operands.check(&causal, "default scale");
    assert_all_close(&expected.out, &[1.0, 2.0, 2.049457, 3.049457, 3.206586, 4.206586], 1e-6, 0.0, "default scale");
    let flat = operands.check(&causal.softmax_scale(0.0), "scale 0");
    assert_all_close(&flat.out, &[1.0, 2.0, 2.0, 3.0, 3.0, 4.0], 1e-12, 0.0, "scale 0");
    let default = operands.reference(&causal.softmax_scale(0.5f32.sqrt()));
    assert_all_close(&expected.out, &default.out, 1e-6, 0.0, "1 / sqrt(2)");
    for head_dim in [1, 3, 64, 100] {
        let operands = Operands::<f32>::random(shape(1, (2, 2), (9, 130), (head_dim, 3)), 40);
        operands.check(&Options::new(), head_dim);
        operands.check(&Options::new().softmax_scale(0.0), head_dim);
    }
}

#[test]
fn a41_alibi_slopes() {
    let eight = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625];
    assert_eq!(alibi_slopes(8), eight);
    assert_eq!(alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    let twelve = alibi_slopes(12);
    assert_eq!(twelve[..8], eight);
    assert_all_close(&twelve[8..], &[-0.5, -1.5, -2.5, -3.5].map(f64::exp2), 1e-6, 0.0, "12 heads");
    for heads in 0..=70 {
        let slopes = alibi_slopes(heads);
        assert_eq!(slopes.len(), heads);
        assert!(slopes.iter().all(|&slope| 0.0 < slope && slope < 1.0), "{heads} heads: {slopes:?}");
    }
}

/// ALiBi is the bias that it stands for, per head, around the diagonal that is named.
#[test]
fn a41_alibi_is_a_bias_of_distance() {
    for (heads, seqlen_q, seqlen_k) in [(6, 5, 7), (12, 33, 130), (8, 1, 300)] {
        let operands = Operands::<f32>::random(shape(1, (heads, heads), (seqlen_q, seqlen_k), (4, 4)), 41);
        let slopes = alibi_slopes(heads);
        let last = seqlen_k as isize - seqlen_q as isize;
        for (diagonal, offset) in [(Diagonal::TopLeft, 0), (Diagonal::BottomRight, last), (Diagonal::Offset(-3), -3)] {
            let plane = seqlen_q * seqlen_k;
            let distance = |at: usize| (at / seqlen_k) as isize + offset - (at % seqlen_k) as isize;
            let floats: Vec<f32> =
                (0..heads * plane).map(|at| -slopes[at / plane] * distance(at % plane).unsigned_abs() as f32).collect();
            let context = format!("{heads} heads, {seqlen_q} queries, {seqlen_k} keys, {diagonal:?}");
            let expected = operands.check(&Options::new().alibi(&slopes, diagonal), &context);
            let biased = operands.check(&Options::new().bias(bias(&floats, [heads, seqlen_q, seqlen_k])), &context);
            assert_all_close(&biased.out, &expected.out, 1e-5 * max_abs(&operands.v), 0.0, context);
        }
    }
}

/// A zero key and value appended by the caller, and not masked: a row depends only on what the mask permits and on that
/// slot. (PyTorch's `add_zero_attn` itself comes with the layer.)
#[test]
fn a43_appended_zero_key() {
    for seqlen in [4, 33, 130] {
        let mut operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen, seqlen + 1), (4, 4)), 43);
        operands.fill_keys(|key| key == seqlen, 0.0);
        let mask = table(seqlen, seqlen + 1, |i, j| j <= i || j == seqlen);
        let options = Options::new().mask(attend(&mask, [seqlen, seqlen + 1]));
        operands.check(&options, format_args!("{seqlen} tokens"));
        for token in [1, seqlen / 2, seqlen - 1] {
            let mut changed = operands.clone();
            changed.fill_keys(|key| key == token, 3.0);
            on_every_level(|level, name| {
                let [before, after] = [&operands, &changed].map(|x| x.run(&options.level(level), name).out);
                for head in 0..2 {
                    let rows = head * seqlen * 4..(head * seqlen + token) * 4;
                    let context = format!("{seqlen} tokens, head {head}, token {token} on {name}");
                    assert_same_bits(&before[rows.clone()], &after[rows], &context);
                    let row = (head * seqlen + token) * 4..;
                    assert_ne!(before[row.clone()][..4], after[row][..4], "{context}");
                }
            });
        }
    }
}

/// A float mask is added, whatever its values look like.
#[test]
fn a44_float_mask_is_added() {
    for (seqlen_q, seqlen_k) in [(3, 3), (33, 130)] {
        let operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen_q, seqlen_k), (4, 4)), 44);
        let plain = operands.check(&Options::new(), "no mask");
        for constant in [0.5, 1.0, 0.0, -1.0] {
            let floats = vec![constant; seqlen_q * seqlen_k];
            let expected = operands.check(&Options::new().bias(bias(&floats, [seqlen_q, seqlen_k])), constant);
            assert_all_close(&expected.out, &plain.out, 1e-12, 0.0, constant);
        }
        let mut rng = Rng::new(44);
        let normals: Vec<f32> = rng.normals(seqlen_q * seqlen_k, 1.0);
        operands.check(&Options::new().bias(bias(&normals, [seqlen_q, seqlen_k])), "normal numbers");
        // Zeros and ones, which a coercion would take for a mask.
        let bits: Vec<f32> = (0..seqlen_q * seqlen_k).map(|_| if rng.chance(0.5) { 1.0 } else { 0.0 }).collect();
        let expected = operands.check(&Options::new().bias(bias(&bits, [seqlen_q, seqlen_k])), "zeros and ones");
        assert!(expected.weights.iter().all(|&p| p > 0.0));
    }
}

/// PyTorch's (batch * heads, queries, keys) masks: seen as four axes each head gets its own, and the bits of that head
/// alone.
#[test]
fn a45_mask_of_every_head() {
    let (batch, heads, seqlen, dim) = (8, 8, 100, 64);
    let operands = Operands::<f32>::random(shape(batch, (heads, heads), (seqlen, seqlen), (dim, dim)), 45);
    let plane = seqlen * seqlen;
    let mask = Rng::new(45).bools(batch * heads * plane, 0.7);
    let view = View::contiguous(&mask, [batch, heads, seqlen, seqlen]).expect("packed");
    let options = Options::new().mask(Mask::ignore(view).expect("four axes"));
    on_every_level(|level, name| {
        let all = operands.run(&options.level(level), name).out;
        for at in [0, 1, 8, 27, 63] {
            let rows = at * seqlen * dim..(at + 1) * seqlen * dim;
            let head = Operands {
                shape: shape(1, (1, 1), (seqlen, seqlen), (dim, dim)),
                q: operands.q[rows.clone()].to_vec(),
                k: operands.k[rows.clone()].to_vec(),
                v: operands.v[rows.clone()].to_vec(),
            };
            let options = Options::new().mask(ignore(&mask[at * plane..][..plane], [seqlen, seqlen]));
            let alone = head.run(&options.level(level), name);
            assert_same_bits(&all[rows], &alone.out, format_args!("head {at} on {name}"));
            alone.assert_close(&head.reference(&options), max_abs(&head.v), format_args!("head {at} on {name}"));
        }
    });
    // As three axes they would be (heads, queries, keys): 64 heads are not 8.
    let [q, k, v] = operands.views();
    let mut out = vec![0.0f32; operands.q.len()];
    let out = HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed");
    let options = Options::new().mask(ignore(&mask, [batch * heads, seqlen, seqlen]));
    let error = multi_head(&q, &k, &v, out, &options).expect_err("64 masks for 8 heads");
    assert_eq!(error, Error::Shape { operand: "mask", axis: "heads", expected: 8, actual: 64 });
}

/// Padding together with a mask for each head hides a column, and no row.
#[test]
fn a45_padding_touches_keys_only() {
    for (heads, seqlen) in [(1, 5), (3, 5), (2, 130)] {
        let operands = Operands::<f32>::random(shape(1, (heads, heads), (seqlen, seqlen), (4, 4)), 45);
        let causal = table(heads * seqlen, seqlen, |row, j| j > row % seqlen);
        let lengths = [seqlen - 1];
        let mask = ignore(&causal, [heads, seqlen, seqlen]);
        let expected = operands.check(&Options::new().mask(mask).key_lengths(&lengths), seqlen);
        assert!(expected.lse.iter().all(|lse| lse.is_finite()));
        for (row, weights) in expected.weights.chunks(seqlen).enumerate() {
            let seen = (row % seqlen + 1).min(seqlen - 1);
            assert!(weights[..seen].iter().all(|&p| p > 0.0) && weights[seen..].iter().all(|&p| p == 0.0));
        }
    }
}
