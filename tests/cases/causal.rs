//! A10 to A13, A17, A18: causality, and the corner it hangs on.

use polyhead::{Diagonal, HeadsMut, Options, Outputs, Window, multi_head, multi_head_with};

use crate::operands::{EDGES_Q, Operands, on_every_level, shape, tolerance};
use crate::support::{Arrangement, Bits, PoisonedInput, PoisonedOutput, assert_all_close, assert_same_bits, max_abs};

/// What each query of `uni_ramp` gives if it sees the keys up to its own position.
fn triangle(seqlen_q: usize, seqlen_k: usize, offset: isize) -> Vec<f64> {
    let seen = |i: usize| (i as isize + offset + 1).clamp(0, seqlen_k as isize) as f64;
    // The mean of 1 to n.
    (0..seqlen_q).map(|i| if seen(i) == 0.0 { 0.0 } else { (seen(i) + 1.0) / 2.0 }).collect()
}

#[test]
fn a10_causal_names_its_corner() {
    let rows: [(usize, usize, &[f64], &[f64]); 3] = [
        (2, 5, &[1.0, 1.5], &[2.5, 3.0]),
        (5, 2, &[1.0, 1.5, 1.5, 1.5, 1.5], &[0.0, 0.0, 0.0, 1.0, 1.5]),
        (1, 16, &[1.0], &[8.5]),
    ];
    for (seqlen_q, seqlen_k, top_left, bottom_right) in rows {
        let offset = seqlen_k as isize - seqlen_q as isize;
        let operands = Operands::<f32>::uni_ramp(shape(1, (2, 1), (seqlen_q, seqlen_k), (4, 4)));
        assert_eq!(triangle(seqlen_q, seqlen_k, 0), top_left);
        assert_eq!(triangle(seqlen_q, seqlen_k, offset), bottom_right);
        operands.assert_rows(&Options::new().causal(Diagonal::TopLeft), top_left, "top left");
        operands.assert_rows(&Options::new().causal(Diagonal::BottomRight), bottom_right, "bottom right");
    }
}

#[test]
fn a10_every_corner_at_every_edge() {
    for seqlen_q in EDGES_Q {
        for seqlen_k in [1, 2, 127, 129, 257] {
            let operands = Operands::<f32>::uni_ramp(shape(1, (2, 1), (seqlen_q, seqlen_k), (2, 1)));
            let last = seqlen_k as isize - seqlen_q as isize;
            for (diagonal, offset) in [
                (Diagonal::TopLeft, 0),
                (Diagonal::BottomRight, last),
                (Diagonal::Offset(last), last),
                (Diagonal::Offset(-3), -3),
                (Diagonal::Offset(130), 130),
            ] {
                let rows = triangle(seqlen_q, seqlen_k, offset);
                let context = format!("{seqlen_q} queries, {seqlen_k} keys, {diagonal:?}");
                operands.assert_rows(&Options::new().causal(diagonal), &rows, context);
            }
        }
    }
}

/// More queries than keys: the rows before the corner see nothing and are zero, whole tiles of them too.
#[test]
fn a11_bottom_right_more_queries_than_keys() {
    for (seqlen_q, seqlen_k) in [(70, 3), (4, 3), (33, 32), (129, 1), (300, 130), (257, 256)] {
        let operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen_q, seqlen_k), (8, 8)), 11);
        let options = Options::new().causal(Diagonal::BottomRight);
        let expected = operands.check(&options, format_args!("{seqlen_q} queries, {seqlen_k} keys"));
        let empty = expected.lse.iter().filter(|&&lse| lse == f64::NEG_INFINITY).count();
        assert_eq!(empty, 2 * (seqlen_q - seqlen_k));
    }
}

/// Fewer keys than queries, down to none, underflows nowhere; nor do offsets at the ends of their type.
#[test]
fn a12_fewer_keys_than_queries() {
    for (seqlen_q, seqlen_k) in [(4, 1), (1, 0), (4, 0), (129, 5), (1, 1)] {
        let operands = Operands::<f32>::uni_ramp(shape(1, (2, 1), (seqlen_q, seqlen_k), (4, 4)));
        let offset = seqlen_k as isize - seqlen_q as isize;
        let rows = triangle(seqlen_q, seqlen_k, offset);
        for diagonal in [Diagonal::BottomRight, Diagonal::Offset(offset)] {
            operands.assert_rows(&Options::new().causal(diagonal), &rows, format_args!("{seqlen_q} {seqlen_k}"));
        }
        for (far, rows) in [(isize::MIN, vec![0.0; seqlen_q]), (isize::MAX, triangle(seqlen_q, seqlen_k, 1000))] {
            let diagonal = Diagonal::Offset(far);
            operands.assert_rows(&Options::new().causal(diagonal), &rows, format_args!("offset {far}"));
            let window = Window { left: Some(usize::MAX), right: Some(usize::MAX), diagonal };
            let context = format!("window at offset {far}");
            operands.check(&Options::new().window(window), &context);
            operands.check(&Options::new().causal(diagonal).window(Window { left: Some(2), ..window }), &context);
        }
    }
}

#[test]
fn a12_lengths_shorter_than_queries() {
    let operands = Operands::<f32>::random(shape(4, (2, 2), (4, 130), (4, 4)), 12);
    let lengths = [0, 1, 3, 129];
    let options = Options::new().key_lengths(&lengths);
    let expected = operands.check(&options.causal(Diagonal::BottomRight), "bottom right of each length");
    let seen: Vec<bool> = expected.lse.iter().map(|&lse| lse > f64::NEG_INFINITY).collect();
    let item = |b: usize| seen[b * 8..b * 8 + 4].to_vec();
    assert_eq!(item(0), [false; 4]);
    assert_eq!(item(1), [false, false, false, true]);
    assert_eq!(item(2), [false, true, true, true]);
    operands.check(&options.causal(Diagonal::TopLeft), "top left");
}

/// A prompt in one call or in pieces, each told where it stands. (Appending at the end of a cache comes with the
/// caches.)
fn chunked_prefill<T: Bits + Into<f64>>(seqlen: usize, chunks: &[usize]) {
    let (heads, dim) = (2, 16);
    let all = Operands::<T>::random(shape(1, (heads, heads), (seqlen, seqlen), (dim, dim)), 13);
    on_every_level(|level, name| {
        let options = Options::new().level(level);
        let whole = all.run(&options.causal(Diagonal::TopLeft), name).out;
        for &chunk in chunks {
            let mut joined = vec![T::OUTPUT; whole.len()];
            for first in (0..seqlen).step_by(chunk) {
                let (count, keys) = (chunk.min(seqlen - first), (first + chunk).min(seqlen));
                // As in a cache: there is room for all keys, and NaN where none is yet.
                let mut cache = all.clone();
                cache.fill_keys(|key| key >= keys, f32::NAN);
                let [_, k, v] = cache.views();
                let strides = [0, seqlen * dim, dim, 1];
                let (q, out) = (&all.q[first * dim..], &mut joined[first * dim..]);
                let q = polyhead::Heads::with_strides(q, [1, heads, count, dim], strides).expect("inside");
                let out = HeadsMut::with_strides(out, [1, heads, count, dim], strides).expect("inside");
                let causal = options.causal(Diagonal::Offset(first as isize));
                multi_head(&q, &k, &v, out, &causal).expect("a valid call");
            }
            let tolerance = 2.0 * tolerance::<T>().min(1e-3) * max_abs(&all.v);
            let context = format!("{} in chunks of {chunk} on {name}", T::NAME);
            assert_all_close(&joined, &whole, tolerance, 0.0, context);
        }
    });
}

#[test]
fn a13_chunked_prefill_with_offset() {
    chunked_prefill::<f32>(300, &[1, 7, 64, 65, 128, 129]);
    chunked_prefill::<half::f16>(130, &[7, 64]);
}

/// Asking for weights changes nothing about what is seen.
#[test]
fn a17_causal_with_weights() {
    for (batch, seqlen) in [(4, 3), (1, 33), (1, 130)] {
        let operands = Operands::<f32>::random(shape(batch, (2, 2), (seqlen, seqlen), (4, 4)), 17);
        let lengths = vec![seqlen - 1; batch];
        let window = Window { left: Some(1), right: Some(0), diagonal: Diagonal::TopLeft };
        let causal = Options::new().causal(Diagonal::TopLeft);
        for (name, options) in [
            ("causal", causal),
            ("window", Options::new().window(window)),
            ("causal and lengths", causal.key_lengths(&lengths)),
            ("causal, sink, cap, ALiBi", {
                causal.sinks(&[0.5, -0.5]).softcap(3.0).alibi(&[0.5, 0.25], Diagonal::TopLeft)
            }),
        ] {
            // `check` compares the output with and without weights.
            let expected = operands.check(&options, format_args!("{name}, {seqlen}"));
            let above = |at: usize| at % seqlen > at / seqlen % seqlen;
            on_every_level(|level, level_name| {
                let weights = operands.run(&options.level(level), level_name).weights;
                let hidden = weights.iter().enumerate().filter(|&(at, _)| above(at));
                assert!(hidden.into_iter().all(|(_, &p)| p == 0.0), "{name} on {level_name}");
            });
            averaged_weights(&operands, &options, &expected.averaged_weights(), name);
        }
    }
}

fn averaged_weights(operands: &Operands, options: &Options<'_>, expected: &[f64], context: &str) {
    let [batch, _, seqlen, _] = operands.out_shape();
    on_every_level(|level, name| {
        let options = options.level(level);
        let plain = operands.run(&options, name);
        let mut out = PoisonedOutput::<f32>::new(operands.out_shape(), Arrangement::Bshd);
        let mut weights = PoisonedOutput::<f32>::new([batch, 1, seqlen, seqlen], Arrangement::RowGaps(3));
        let [q, k, v] = operands.views();
        let outputs = Outputs::new(out.view()).averaged_weights(weights.view());
        multi_head_with(&q, &k, &v, outputs, &options).expect("a valid call");
        assert_all_close(&weights.packed(name), expected, 1e-6, 0.0, format_args!("{context} on {name}: averaged"));
        assert_same_bits(&out.packed(name), &plain.out, format_args!("{context} on {name}"));
    });
}

/// A partial tile of queries must not make the loop over keys run past the last one, where NaN lies in the same memory.
#[test]
fn a18_no_read_past_the_last_key() {
    for (seqlen_q, seqlen_k, dim) in
        [(6, 382, 64), (1, 382, 64), (31, 383, 8), (33, 127, 9), (40, 129, 64), (17, 17, 1)]
    {
        let operands = Operands::<f32>::random(shape(1, (2, 2), (seqlen_q, seqlen_k), (dim, dim)), 18);
        let options = Options::new().causal(Diagonal::BottomRight);
        let expected = operands.check(&options, "packed");
        assert!(expected.out.iter().all(|x| x.is_finite()));
        let [q_shape, k_shape, v_shape] = crate::operands::shapes(&operands.shape);
        for arrangement in [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::RowGaps(3), Arrangement::Bhds] {
            let q = PoisonedInput::new(&operands.q, q_shape, Arrangement::Bhsd);
            let k = PoisonedInput::new(&operands.k, k_shape, arrangement);
            let v = PoisonedInput::new(&operands.v, v_shape, arrangement);
            on_every_level(|level, name| {
                let context = format!("{seqlen_q} queries, {seqlen_k} keys, {arrangement:?} on {name}");
                let options = options.level(level);
                let strided = crate::operands::Results::of(&q.view(), &k.view(), &v.view(), &options, &context);
                strided.assert_same_bits(&operands.run(&options, &context), &context);
            });
        }
    }
}
