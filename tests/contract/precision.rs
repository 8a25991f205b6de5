use half::bf16;
use polyhead::{Diagonal, Heads, HeadsMut, Options, Precision, Shape, multi_head};

use crate::oracle::{ALL_F32, Call, Dtype, Opts, TYPES, Wanted, shape};
use crate::support::{Rng, assert_same_bits, levels};

/// Attention as one writes it at first, in `f32` throughout: dot products in order, softmax in two passes, values in order.
/// Knows scale, causality from the top left, and softcap.
fn naive(call: &Call, round_p: impl Fn(f32) -> f32) -> Vec<f32> {
    let Shape { seqlen_k: s, head_dim: d, head_dim_v: dv, .. } = call.shape;
    let scale = call.options.softmax_scale(&call.shape) as f32;
    let mut out = Vec::new();
    for (at, [b, h, i]) in call.rows().enumerate() {
        let q = &call.q[at * d..][..d];
        let first = call.key_row(b, h, 0);
        let seen = if call.options.causal.is_some() { s.min(i + 1) } else { s };
        let score = |j: usize| {
            let dot = q.iter().zip(&call.k[(first + j) * d..]).fold(0.0f32, |sum, (x, y)| sum + x * y);
            call.options.softcap.map_or(scale * dot, |cap| cap * (scale * dot / cap).tanh())
        };
        let scores: Vec<f32> = (0..seen).map(score).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let p: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f32 = p.iter().sum();
        for x in 0..dv {
            let dot = p.iter().enumerate().fold(0.0f32, |sum, (j, &p)| sum + round_p(p) * call.v[(first + j) * dv + x]);
            out.push(dot / sum);
        }
    }
    out
}

/// Largest error, and root of the mean of the squares.
fn errors(actual: &[f32], expected: &[f64]) -> (f64, f64) {
    let error = |(&a, &e): (&f32, &f64)| (f64::from(a) - e).abs();
    let all = || actual.iter().zip(expected).map(error);
    (all().fold(0.0, f64::max), (all().map(|x| x * x).sum::<f64>() / actual.len() as f64).sqrt())
}

fn scaled(sizes: [usize; 7], types: [Dtype; 4], size: f32, options: Opts) -> Call {
    let mut call = Call::random(shape(sizes), types, &mut Rng::new(161));
    call.q.iter_mut().for_each(|x| *x = types[0].round(*x * size));
    call.options(options)
}

/// The error against f64 is at most twice that of a naive `f32` kernel, for small and large scores, short and long rows; for
/// half types too (with `P` in bf16 where AMX multiplies bf16).
#[test]
fn precision_is_asked_for() {
    let causal = Opts { causal: Some(Diagonal::TopLeft), ..Opts::default() };
    let capped = Opts { softcap: Some(5.0), ..Opts::default() };
    for types in [ALL_F32, TYPES[7], TYPES[8]] {
        for (sizes, options) in [
            ([1, 2, 2, 64, 64, 64, 64], &Opts::default()),
            ([1, 1, 1, 40, 700, 32, 32], &Opts::default()),
            ([1, 2, 1, 150, 150, 128, 16], &causal),
            ([1, 2, 1, 33, 200, 64, 20], &capped),
            ([1, 1, 1, 1, 3000, 16, 64], &Opts::default()),
        ] {
            for size in [0.1, 1.0, 30.0] {
                let call = scaled(sizes, types, size, options.clone());
                let expected = call.reference().out;
                for &level in levels() {
                    let amx = level.name() == "amx";
                    if amx && types[0] == Dtype::F16 {
                        // Judged by `Expected` elsewhere: its products are a class of their own.
                        continue;
                    }
                    let bf16_p = |p: f32| if amx && types[0] == Dtype::Bf16 { bf16::from_f32(p).to_f32() } else { p };
                    let (max, rms) = errors(&call.run(level, Wanted::Out).out, &expected);
                    let (naive_max, naive_rms) = errors(&naive(&call, bf16_p), &expected);
                    let say = format!(
                        "{} {types:?} {sizes:?} q x {size}: {max:e} ({rms:e}), naive {naive_max:e} ({naive_rms:e})",
                        level.name()
                    );
                    assert!(naive_rms > 0.0 && max <= 2.0 * naive_max && rms <= 2.0 * naive_rms, "{say}");
                }
            }
        }
    }
}

fn with_precision(call: &Call, options: &Options<'_>) -> Vec<f32> {
    let Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v } = call.shape;
    let mut out = vec![f32::NAN; batch * num_heads * seqlen_q * head_dim_v];
    multi_head(
        &Heads::bhsd(&call.q, [batch, num_heads, seqlen_q, head_dim]).expect("packed"),
        &Heads::bhsd(&call.k, [batch, num_kv_heads, seqlen_k, head_dim]).expect("packed"),
        &Heads::bhsd(&call.v, [batch, num_kv_heads, seqlen_k, head_dim_v]).expect("packed"),
        HeadsMut::bhsd(&mut out, [batch, num_heads, seqlen_q, head_dim_v]).expect("packed"),
        options,
    )
    .expect("a valid call");
    out
}

#[test]
fn precision_is_asked_for_and_highest_without() {
    let call = scaled([1, 2, 1, 100, 300, 64, 64], ALL_F32, 2.0, Opts::default());
    let expected = call.reference().out;
    let naive_rms = errors(&naive(&call, |p| p), &expected).1;
    // Of operands rounded to bf16, against the exact ones.
    let mut rounded = call.clone();
    for data in [&mut rounded.q, &mut rounded.k, &mut rounded.v] {
        data.iter_mut().for_each(|x| *x = Dtype::Bf16.round(*x));
    }
    let bf16_rms = errors(&naive(&rounded, |p| bf16::from_f32(p).to_f32()), &expected).1;
    for &level in levels() {
        let run = |precision| with_precision(&call, &Options::new().level(level).precision(precision));
        let default = with_precision(&call, &Options::new().level(level));
        assert_same_bits(&run(Precision::Highest), &default, level.name());
        for (precision, allowed) in [
            (Precision::Highest, 2.0 * naive_rms),
            (Precision::High, 20.0 * naive_rms),
            (Precision::Medium, 2.0 * bf16_rms),
        ] {
            let rms = errors(&run(precision), &expected).1;
            assert!(rms <= allowed, "{} {precision:?}: {rms:e}, allowed {allowed:e}", level.name());
        }
    }
}

/// A tolerance that accepts everything would make all the other tests empty.
#[test]
#[cfg_attr(target_family = "wasm", ignore = "a panic ends the process there")]
fn precision_of_the_oracle_itself() {
    for types in TYPES {
        let call = scaled([2, 2, 1, 30, 140, 64, 8], types, 1.0, Opts::default());
        let expected = call.expected();
        for &level in levels() {
            let loosest = expected.loosest(&call, level);
            let allowed = if level.name() == "amx" { 0.2 } else { 5e-5 };
            assert!(loosest < allowed, "{} {types:?}: {loosest:e}", level.name());
            let wrong = |change: &dyn Fn(&mut Call)| {
                let mut other = call.clone();
                change(&mut other);
                let results = other.run(level, Wanted::Weights);
                let judge = || expected.check(&call, level, &results, "meant to fail");
                std::panic::catch_unwind(core::panic::AssertUnwindSafe(judge)).is_err()
            };
            assert!(!wrong(&|_| {}), "right results were refused");
            assert!(wrong(&|call| call.options.scale = Some(0.126)), "a scale of 0.126 for 0.125 was not seen");
            assert!(wrong(&|call| call.options.key_lengths = Some(vec![140, 139])), "a missing key was not seen");
            assert!(wrong(&|call| call.v[0] += 2.0), "another value was not seen");
        }
    }
}
