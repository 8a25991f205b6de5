//! One head of attention on one thread: each level, element type and option, in FLOP/s of what is visible. Ids say
//! `level/type/shape_option`; `unfused` is this crate's GEMM, softmax and GEMM with the scores in memory.
#![allow(missing_docs, reason = "criterion_group! generates an undocumented function")]

mod common;

use common::{Data, Sizes, group, noise, pool};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use polyhead::{Bias, Diagonal, Element, Level, Mask, Matrix, Options, Window};

/// Tolerance of a checked row: values have unit variance.
fn tolerance<T: Element>() -> f64 {
    if T::NAME == "bf16" {
        1e-2
    } else if T::NAME == "f16" {
        2e-3
    } else {
        1e-5
    }
}

fn levels<T: Element>(c: &mut Criterion) {
    let mut group = group(c, "attention");
    let pool = pool(1);
    for &level in Level::available() {
        for (seqlen, dim) in [(512, 64), (2048, 64), (2048, 128)] {
            let sizes = Sizes::of(1, 1, seqlen, dim);
            let mut data = Data::<T>::new(sizes);
            let options = Options::new().level(level);
            data.run(&options);
            data.assert_rows(tolerance::<T>(), |_, _| 0.0);
            group.throughput(Throughput::Elements(sizes.flops(1.0)));
            let id = format!("{}/{}/{}", level.name(), T::NAME, sizes.id());
            group.bench_function(&id, |b| pool.install(|| b.iter(|| data.run(&options))));
            let causal = options.causal(Diagonal::TopLeft);
            data.run(&causal);
            data.assert_rows(tolerance::<T>(), |i, j| if j <= i { 0.0 } else { f64::NEG_INFINITY });
            group.throughput(Throughput::Elements(sizes.flops((seqlen + 1) as f64 / (2 * seqlen) as f64)));
            group.bench_function(id + "_causal", |b| pool.install(|| b.iter(|| data.run(&causal))));
        }
    }
    group.finish();
}

fn unfused(c: &mut Criterion) {
    let mut group = group(c, "attention");
    let pool = pool(1);
    for &level in Level::available() {
        for (seqlen, dim) in [(512, 64), (2048, 64), (2048, 128)] {
            let sizes = Sizes::of(1, 1, seqlen, dim);
            let mut data = Data::<f32>::new(sizes);
            let mut scores = vec![0.0; seqlen * seqlen];
            pool.install(|| data.run_unfused(&mut scores, level, None));
            data.assert_rows(1e-5, |_, _| 0.0);
            group.throughput(Throughput::Elements(sizes.flops(1.0)));
            let id = format!("{}/f32/{}_unfused", level.name(), sizes.id());
            group.bench_function(id, |b| pool.install(|| b.iter(|| data.run_unfused(&mut scores, level, None))));
        }
    }
    group.finish();
}

/// What each option costs, on the best level; throughput counts visible pairs.
fn options(c: &mut Criterion) {
    let mut group = group(c, "attention_options");
    let (seqlen, pool) = (2048, pool(1));
    let sizes = Sizes::of(1, 1, seqlen, 64);
    let mut data = Data::<f32>::new(sizes);
    let bias: Vec<f32> = noise(seqlen * seqlen, 4);
    let seen: Vec<bool> = bias.iter().map(|&x| x > -1.5).collect();
    let padded: Vec<bool> = (0..seqlen).map(|i| i < seqlen - 100).collect();
    let full = |data| Matrix::contiguous(data, [seqlen, seqlen]).expect("fits");
    let float = Bias::new(Matrix::contiguous(&bias, [seqlen, seqlen]).expect("fits")).expect("two axes");
    let bool_mask = Mask::attend(full(&seen)).expect("two axes");
    let key_mask = Mask::attend(Matrix::contiguous(&padded, [1, seqlen]).expect("fits")).expect("two axes");
    let plain = Options::new();
    let window = |left| Window { left: Some(left), right: Some(0), diagonal: Diagonal::TopLeft };
    let cases = [
        ("none", plain, 1.0),
        ("causal", plain.causal(Diagonal::TopLeft), 0.5),
        ("window16", plain.window(window(15)), 16.0 / seqlen as f64),
        ("float_mask", plain.bias(float), 1.0),
        ("bool_mask", plain.mask(bool_mask), 1.0),
        ("key_mask", plain.mask(key_mask), 1.0),
        ("softcap", plain.softcap(30.0), 1.0),
        ("alibi", plain.alibi(&[0.01], Diagonal::TopLeft), 1.0),
    ];
    for (name, options, visible) in cases {
        data.run(&options);
        match name {
            "none" => data.assert_rows(1e-5, |_, _| 0.0),
            "float_mask" => data.assert_rows(1e-5, |i, j| bias[i * seqlen + j].into()),
            "bool_mask" => data.assert_rows(1e-5, |i, j| if seen[i * seqlen + j] { 0.0 } else { f64::NEG_INFINITY }),
            "alibi" => data.assert_rows(1e-5, |i, j| -0.01 * i.abs_diff(j) as f64),
            _ => assert!(data.out.iter().all(|x| x.is_finite())),
        }
        group.throughput(Throughput::Elements(sizes.flops(visible)));
        let id = format!("{}/f32/{}_{name}", Level::detect().name(), sizes.id());
        group.bench_function(id, |b| pool.install(|| b.iter(|| data.run(&options))));
    }
    group.finish();
}

criterion_group!(benches, levels::<f32>, levels::<f16>, levels::<bf16>, unfused, options);
criterion_main!(benches);
