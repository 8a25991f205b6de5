//! Whole calls on one and two threads, in FLOP/s of what is visible: the shapes that users compare, the speed cases of public
//! bug reports (`cases/a69...`), and the threshold below which a call stays on its thread.
#![allow(missing_docs, reason = "criterion_group! generates an undocumented function")]

mod common;

use common::{Data, Sizes, group, noise, pool};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use polyhead::{Bias, Diagonal, Heads, HeadsMut, Level, Mask, Matrix, Options, Window, multi_head};

fn shapes(c: &mut Criterion) {
    let mut group = group(c, "multi_head");
    let level = Level::detect().name();
    let grouped = Sizes { kv_heads: 2, ..Sizes::of(1, 8, 1024, 64) };
    let cross = Sizes { seqlen_q: 32, seqlen_k: 1500, ..Sizes::of(1, 8, 0, 64) };
    let all = [
        Sizes::of(1, 8, 512, 64),
        Sizes::of(1, 8, 2048, 64),
        Sizes::of(1, 8, 2048, 128),
        Sizes::of(8, 12, 128, 64),
        Sizes::of(4, 12, 197, 64),
        Sizes::of(32, 8, 10, 64),
        grouped,
        cross,
    ];
    for sizes in all {
        let mut data = Data::<f32>::new(sizes);
        data.run(&Options::new());
        data.assert_rows(1e-5, |_, _| 0.0);
        for threads in [1, 2] {
            let pool = pool(threads);
            let id = format!("{level}/f32/{}/t{threads}", sizes.id());
            group.throughput(Throughput::Elements(sizes.flops(1.0)));
            group.bench_function(&id, |b| pool.install(|| b.iter(|| data.run(&Options::new()))));
            if sizes.seqlen_q == sizes.seqlen_k && sizes.seqlen_q >= 512 {
                let causal = Options::new().causal(Diagonal::TopLeft);
                group.throughput(Throughput::Elements(sizes.flops(0.5)));
                group.bench_function(id + "_causal", |b| pool.install(|| b.iter(|| data.run(&causal))));
            }
        }
    }
    group.finish();
}

/// A69: masked attention against plain and unfused; bounds in tests/README.md.
fn a69_masked_is_not_slower(c: &mut Criterion) {
    let mut group = group(c, "cases/a69_masked");
    let (sizes, pool) = (Sizes::of(1, 4, 512, 32), pool(1));
    let mut data = Data::<f32>::new(sizes);
    let bias: Vec<f32> = noise(512 * 512, 4);
    let seen: Vec<bool> = bias.iter().map(|&x| x > -1.5).collect();
    let keys: Vec<bool> = (0..512).map(|i| i < 400).collect();
    let float = Bias::new(Matrix::contiguous(&bias, [512, 512]).expect("fits")).expect("two axes");
    let full = Mask::attend(Matrix::contiguous(&seen, [512, 512]).expect("fits")).expect("two axes");
    let key = Mask::attend(Matrix::contiguous(&keys, [1, 512]).expect("fits")).expect("two axes");
    let plain = Options::new();
    group.throughput(Throughput::Elements(sizes.flops(1.0)));
    for (name, options) in [
        ("none", plain),
        ("key_bool", plain.mask(key)),
        ("full_float", plain.bias(float)),
        ("full_bool", plain.mask(full)),
    ] {
        data.run(&options);
        assert!(data.out.iter().all(|x| x.is_finite()));
        group.bench_function(name, |b| pool.install(|| b.iter(|| data.run(&options))));
    }
    let mut scores = vec![0.0; 4 * 512 * 512];
    let level = Level::detect();
    data.run_unfused(&mut scores, level, Some(&bias));
    data.assert_rows(1e-5, |i, j| bias[i * 512 + j].into());
    let mut unfused = |bias: Option<&[f32]>| data.run_unfused(&mut scores, level, bias);
    group.bench_function("unfused_none", |b| pool.install(|| b.iter(|| unfused(None))));
    group.bench_function("unfused_full_float", |b| pool.install(|| b.iter(|| unfused(Some(&bias)))));
    group.finish();
}

/// A70 and A71: one query against many keys. The decode engine comes later; these are what it will be measured against.
fn a70_a71_one_query(c: &mut Criterion) {
    let mut group = group(c, "cases/a70_a71_one_query");
    for (heads, seqlen_k) in [(32, 1000), (1, 16384), (8, 16384)] {
        let sizes = Sizes { seqlen_q: 1, seqlen_k, ..Sizes::of(1, heads, 0, 128) };
        let mut data = Data::<f32>::new(sizes);
        data.run(&Options::new());
        data.assert_rows(1e-5, |_, _| 0.0);
        group.throughput(Throughput::Elements(sizes.flops(1.0)));
        for threads in [1, 2] {
            let pool = pool(threads);
            let id = format!("{}/t{threads}", sizes.id());
            group.bench_function(id, |b| pool.install(|| b.iter(|| data.run(&Options::new()))));
        }
        let mut scores = vec![0.0; heads * seqlen_k];
        let pool = pool(1);
        let id = format!("{}/t1_unfused", sizes.id());
        group.bench_function(id, |b| pool.install(|| b.iter(|| data.run_unfused(&mut scores, Level::detect(), None))));
    }
    group.finish();
}

/// A72, and the measurement behind `SERIAL_BELOW`: small calls in pools of one and two threads, from inside and outside.
fn a72_threshold(c: &mut Criterion) {
    let mut group = group(c, "cases/a72_threshold");
    for seqlen in [16, 32, 64, 96, 128, 192] {
        let sizes = Sizes::of(1, 2, seqlen, 32);
        let mut data = Data::<f32>::new(sizes);
        data.run(&Options::new());
        data.assert_rows(1e-5, |_, _| 0.0);
        group.throughput(Throughput::Elements(sizes.flops(1.0)));
        for threads in [1, 2] {
            let pool = pool(threads);
            let id = format!("{}/t{threads}", sizes.id());
            group.bench_function(&id, |b| pool.install(|| b.iter(|| data.run(&Options::new()))));
        }
        group.bench_function(sizes.id() + "/outside", |b| b.iter(|| data.run(&Options::new())));
    }
    group.finish();
}

/// A73: rows of K and V 4096 bytes apart, which share one set of the L1 cache, against packed ones.
fn a73_rows_4096_bytes_apart(c: &mut Criterion) {
    let mut group = group(c, "cases/a73_rows_apart");
    let (seqlen, dim, pool) = (1024, 128, pool(1));
    let kv: Vec<f32> = noise(seqlen * 1024, 1);
    let q: Vec<f32> = noise(seqlen * dim, 2);
    let mut out = vec![0.0f32; seqlen * dim];
    let shape = [1, 1, seqlen, dim];
    let q = Heads::bhsd(&q, shape).expect("fits");
    for (name, stride) in [("packed", dim), ("apart", 1024)] {
        let kv = Heads::with_strides(&kv, shape, [0, 0, stride, 1]).expect("fits");
        let mut run = || {
            let out = HeadsMut::bhsd(&mut out, shape).expect("fits");
            multi_head(&q, &kv, &kv, out, &Options::new()).expect("valid");
        };
        run();
        group.throughput(Throughput::Elements(Sizes::of(1, 1, seqlen, dim).flops(1.0)));
        group.bench_function(name, |b| pool.install(|| b.iter(&mut run)));
        assert!(out.iter().all(|x| x.is_finite()));
    }
    group.finish();
}

/// A74: causality and windows save what they hide.
fn a74_visibility(c: &mut Criterion) {
    let mut group = group(c, "cases/a74_visibility");
    let pool = pool(1);
    let sizes = Sizes::of(1, 1, 2048, 64);
    let mut data = Data::<f32>::new(sizes);
    let window = Window { left: Some(15), right: Some(0), diagonal: Diagonal::TopLeft };
    let plain = Options::new();
    for (name, options) in
        [("full", plain), ("causal", plain.causal(Diagonal::TopLeft)), ("window16", plain.window(window))]
    {
        data.run(&options);
        assert!(data.out.iter().all(|x| x.is_finite()));
        group.bench_function(name, |b| pool.install(|| b.iter(|| data.run(&options))));
    }
    group.finish();
}

criterion_group!(
    benches,
    shapes,
    a69_masked_is_not_slower,
    a70_a71_one_query,
    a72_threshold,
    a73_rows_4096_bytes_apart,
    a74_visibility
);
criterion_main!(benches);
