use polyhead::attention::{sdpa, sdpa_with_lse};
use polyhead::{Diagonal, Element, Error, Matrix, MatrixMut, Options, Shape};

use crate::oracle::{BiasTable, Call, Dtype, MaskTable, Opts, Results, TYPES, Wanted, shape};
use crate::support::{Rng, assert_same_bits, levels};

/// Calls large enough for several threads, of several kinds: prefill, causal with heads that share K and V, few queries of
/// many keys, many small heads.
#[cfg(feature = "rayon")]
fn large_calls() -> Vec<Call> {
    let mut rng = Rng::new(131);
    let lengths = vec![300, 177];
    let masked = Opts { mask: Some(MaskTable::plane(150, 300, |i, j| (i * j) % 7 != 3)), ..Opts::default() };
    let causal = Opts { causal: Some(Diagonal::BottomRight), key_lengths: Some(lengths), ..Opts::default() };
    let capped = Opts { softcap: Some(10.0), sinks: Some(vec![0.5; 8]), ..Opts::default() };
    let cases = [
        ([1, 2, 2, 257, 257, 32, 32], Opts::default()),
        ([2, 4, 2, 150, 300, 16, 24], causal),
        ([1, 8, 2, 3, 4097, 8, 8], capped),
        ([1, 1, 1, 1, 33_000, 16, 16], Opts::default()),
        ([2, 2, 1, 150, 300, 16, 8], masked),
        ([8, 8, 8, 20, 20, 32, 32], Opts::default()),
    ];
    let call = |(at, (sizes, options))| Call::random(shape(sizes), TYPES[at], &mut rng).options(options);
    cases.into_iter().enumerate().map(call).collect()
}

/// A67: pools of 1, 2, 3, 4 and 7 threads, the global one from outside, and 20 repeats.
#[cfg(feature = "rayon")]
#[test]
fn bits_do_not_depend_on_threads_batch_or_heads() {
    let pools = [1, 2, 3, 4, 7].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("threads"));
    for call in large_calls() {
        for &level in levels() {
            let run = || call.run(level, Wanted::Lse);
            let first = pools[0].install(run);
            for pool in &pools {
                let context = format!("{} threads on {} {:?}", pool.current_num_threads(), level.name(), call.shape);
                pool.install(run).assert_same_bits(&first, &context);
            }
            run().assert_same_bits(&first, format_args!("outside of any pool on {}", level.name()));
            let weights = |pool: &rayon::ThreadPool, wanted| pool.install(|| call.run(level, wanted));
            if call.shape.seqlen_k < 1000 {
                for wanted in [Wanted::Weights, Wanted::Averaged] {
                    let (one, three) = (weights(&pools[0], wanted), weights(&pools[2], wanted));
                    three.assert_same_bits(&one, format_args!("{wanted:?} on {}", level.name()));
                }
            }
        }
    }
    let call = &large_calls()[1];
    for &level in levels() {
        let first = call.run(level, Wanted::Lse);
        for repeat in 0..20 {
            let again = pools[repeat % 5].install(|| call.run(level, Wanted::Lse));
            again.assert_same_bits(&first, format_args!("repeat {repeat} on {}", level.name()));
        }
    }
}

/// The part of a call that is one batch item and some KV heads of it. No option of the call depends on item or head.
fn part(call: &Call, item: usize, kv_heads: core::ops::Range<usize>) -> Call {
    let s = call.shape;
    let group = s.num_heads / s.num_kv_heads;
    let cut = |data: &[f32], heads: usize, first: usize, count: usize, width: usize| {
        data[(item * heads + first) * width..][..count * width].to_vec()
    };
    let (first, count) = (kv_heads.start, kv_heads.len());
    let shape = Shape { batch: 1, num_heads: count * group, num_kv_heads: count, ..s };
    Call {
        shape,
        q: cut(&call.q, s.num_heads, first * group, count * group, s.seqlen_q * s.head_dim),
        k: cut(&call.k, s.num_kv_heads, first, count, s.seqlen_k * s.head_dim),
        v: cut(&call.v, s.num_kv_heads, first, count, s.seqlen_k * s.head_dim_v),
        ..call.clone()
    }
}

/// Asserts that the rows of `part` are those of the whole.
#[track_caller]
fn assert_part(whole: (&Call, &Results), part: (&Call, &Results), item: usize, first_head: usize, context: &str) {
    for [_, h, i] in part.0.rows() {
        let (a, b) = (part.1.row(&part.0.shape, [0, h, i]), whole.1.row(&whole.0.shape, [item, first_head + h, i]));
        let bits = |row: (&[f32], &[f32], &[f32])| {
            [row.0, row.1, row.2].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert!(
            bits(a) == bits(b),
            "{context}: item {item}, head {first_head} + {h}, query {i}: {a:?} instead of {b:?}"
        );
    }
}

/// A68: the same item alone and as item 0, 1 and 26 of 27; the same heads alone and among others.
#[test]
fn bits_do_not_depend_on_batch_position_or_number_of_heads() {
    let mut rng = Rng::new(132);
    for (at, [heads, kv_heads, l, s]) in
        [[5, 5, 9, 40], [4, 2, 33, 17], [8, 2, 1, 200], [3, 3, 70, 70], [6, 2, 140, 30]].into_iter().enumerate()
    {
        let options = Opts {
            causal: (at % 2 == 0).then_some(Diagonal::BottomRight),
            mask: Some(MaskTable::plane(l, s, |i, j| (i + j) % 6 != 5)),
            bias: (at == 1).then(|| BiasTable::plane(l, s, |i, j| (i as f32 - j as f32) * 0.1)),
            softcap: (at == 3).then_some(3.0),
            ..Opts::default()
        };
        let whole = Call::random(shape([27, heads, kv_heads, l, s, 7, 12]), TYPES[at], &mut rng).options(options);
        let group = heads / kv_heads;
        for &level in levels() {
            let results = whole.run(level, Wanted::Weights);
            for item in [0, 1, 26] {
                for kv in [0..kv_heads, 0..1, kv_heads - 1..kv_heads] {
                    let part = part(&whole, item, kv.clone());
                    let own = part.run(level, Wanted::Weights);
                    assert_part((&whole, &results), (&part, &own), item, kv.start * group, level.name());
                }
            }
        }
    }
}

/// Rows that are equal in everything come out equal, whichever lane, tile or block they fall into.
#[test]
fn bits_do_not_depend_on_the_place_of_a_row() {
    for (l, s) in [(1, 5), (40, 33), (300, 130)] {
        let mut call = Call::random(shape([2, 3, 1, l, s, 10, 6]), TYPES[0], &mut Rng::new(133));
        let query = call.q[..10].to_vec();
        call.q.chunks_mut(10).for_each(|row| row.copy_from_slice(&query));
        let kv = call.shape.seqlen_k;
        call.k.copy_within(..kv * 10, kv * 10);
        call.v.copy_within(..kv * 6, kv * 6);
        for &level in levels() {
            let results = call.run(level, Wanted::Weights);
            let (out, lse, weights) = results.row(&call.shape, [0, 0, 0]);
            for row in call.rows() {
                let (o, e, w) = results.row(&call.shape, row);
                assert!(o == out && e == lse && w == weights, "{} row {row:?}: {o:?} instead of {out:?}", level.name());
            }
        }
    }
}

/// The functions of one head are `multi_head` of one, strided matrices included, and give its errors.
#[test]
fn bits_of_one_head_are_those_of_multi_head() {
    fn run<T: Element>(call: &Call) {
        let Shape { seqlen_q, seqlen_k, head_dim, head_dim_v, .. } = call.shape;
        let typed = |data: &[f32]| data.iter().map(|&x| T::from_f32_nearest(x)).collect::<Vec<T>>();
        let (q, k, v) = (typed(&call.q), typed(&call.k), typed(&call.v));
        // Keys column by column, values and output with gaps.
        let turned: Vec<T> = (0..head_dim * seqlen_k).map(|at| k[at % seqlen_k * head_dim + at / seqlen_k]).collect();
        let gaps: Vec<T> =
            v.chunks(head_dim_v).flat_map(|row| [row, &[T::from_f32_nearest(f32::NAN)]].concat()).collect();
        let q = Matrix::contiguous(&q, [seqlen_q, head_dim]).expect("packed");
        let k = Matrix::with_strides(&turned, [seqlen_k, head_dim], [1, seqlen_k]).expect("packed");
        let v = Matrix::with_strides(&gaps, [seqlen_k, head_dim_v], [head_dim_v + 1, 1]).expect("with gaps");
        for &level in levels() {
            let expected = call.run(level, Wanted::Lse);
            call.options.with(|options| {
                let options = options.level(level);
                let (mut out, mut lse) = (vec![7.0f32; seqlen_q * (head_dim_v + 2)], vec![7.0f32; seqlen_q]);
                let mut check = |lse: Option<&mut [f32]>| {
                    out.fill(7.0);
                    let view = MatrixMut::with_strides(&mut out, [seqlen_q, head_dim_v], [head_dim_v + 2, 1]);
                    match lse {
                        Some(lse) => sdpa_with_lse(&q, &k, &v, view.expect("disjoint"), lse, &options),
                        None => sdpa(&q, &k, &v, view.expect("disjoint"), &options),
                    }
                    .expect("a valid call");
                    let (rows, gaps): (Vec<_>, Vec<_>) =
                        out.chunks(head_dim_v + 2).map(|row| row.split_at(head_dim_v)).unzip();
                    assert_same_bits(&rows.concat(), &expected.out, level.name());
                    assert!(gaps.concat().iter().all(|&x| x == 7.0), "{}: written between rows", level.name());
                };
                check(None);
                check(Some(&mut lse));
                assert_same_bits(&lse, &expected.lse, level.name());
            });
            let mut out = vec![0.0f32; seqlen_q * head_dim_v];
            let view = MatrixMut::contiguous(&mut out, [seqlen_q, head_dim_v]).expect("packed");
            let error = sdpa_with_lse(&q, &k, &v, view, &mut [0.0], &Options::new().level(level)).unwrap_err();
            assert_eq!(error, Error::Length { operand: "lse", expected: seqlen_q, actual: 1 });
        }
    }
    let options = Opts { causal: Some(Diagonal::BottomRight), softcap: Some(5.0), ..Opts::default() };
    // Operands of one type, f32 out.
    for (types, l, s) in [(TYPES[0], 37, 150), (TYPES[8], 5, 40), (TYPES[7], 20, 300)] {
        let call = Call::random(shape([1, 1, 1, l, s, 24, 9]), types, &mut Rng::new(137)).options(options.clone());
        match types[0] {
            Dtype::F32 => run::<f32>(&call),
            Dtype::F16 => run::<half::f16>(&call),
            Dtype::Bf16 => run::<half::bf16>(&call),
        }
    }
}
