//! Decoding: few queries against long caches, in bytes of K and V that are read (once for all heads of a group). Pages, windows,
//! drafts of several tokens, and ragged batches, each beside what it should cost no more than.
#![allow(missing_docs, reason = "criterion_group! generates an undocumented function")]

mod common;

use std::time::Duration;

use common::{Data, Sizes, group, noise, pool};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use polyhead::{Diagonal, Element, Heads, HeadsMut, Options, Paged, Ragged, Window, multi_head};

fn sizes(heads: usize, kv_heads: usize, seqlen_q: usize, seqlen_k: usize) -> Sizes {
    Sizes { batch: 1, heads, kv_heads, seqlen_q, seqlen_k, dim: 128 }
}

fn kv_bytes<T>(sizes: &Sizes) -> u64 {
    (2 * sizes.kv().iter().product::<usize>() * size_of::<T>()) as u64
}

fn shape<T: Element>(group: &mut BenchmarkGroup<'_, WallTime>, sizes: Sizes, threads: &[usize]) {
    let mut data = Data::<T>::new(sizes);
    data.run(&Options::new());
    data.assert_rows(if T::NAME == "f32" { 1e-5 } else { 1e-2 }, |_, _| 0.0);
    group.throughput(Throughput::Bytes(kv_bytes::<T>(&sizes)));
    for &threads in threads {
        let pool = pool(threads);
        let id = format!("{}/{}/t{threads}", sizes.id(), T::NAME);
        group.bench_function(id, |b| pool.install(|| b.iter(|| data.run(&Options::new()))));
    }
}

/// One query, by length, type, heads and threads.
fn caches(c: &mut Criterion) {
    let mut group = group(c, "decode");
    for (heads, kv_heads) in [(32, 32), (32, 8)] {
        for seqlen_k in [512, 4096, 16_384] {
            let sizes = sizes(heads, kv_heads, 1, seqlen_k);
            shape::<f32>(&mut group, sizes, &[1, 2]);
            shape::<f16>(&mut group, sizes, &[1, 2]);
            shape::<bf16>(&mut group, sizes, &[1, 2]);
        }
    }
    // One head alone is shared by the threads.
    shape::<f32>(&mut group, sizes(1, 1, 1, 65_536), &[1, 2]);
    for seqlen_q in [4, 16] {
        shape::<f32>(&mut group, sizes(32, 32, seqlen_q, 4096), &[1]);
        shape::<f32>(&mut group, sizes(32, 8, seqlen_q, 4096), &[1]);
    }
    group.finish();
}

/// A window of 512 keys in 65536, beside 512 keys.
fn windows(c: &mut Criterion) {
    let mut group = group(c, "decode_window");
    let pool = pool(1);
    let window = Window { left: Some(511), right: Some(0), diagonal: Diagonal::BottomRight };
    for (id, seqlen_k, options) in
        [("512_of_65536", 65_536, Options::new().window(window)), ("512_of_512", 512, Options::new())]
    {
        let mut data = Data::<f32>::new(sizes(8, 8, 1, seqlen_k));
        data.run(&options);
        data.assert_rows(1e-5, |_, key| if key + 512 < seqlen_k { f64::NEG_INFINITY } else { 0.0 });
        group.throughput(Throughput::Bytes(kv_bytes::<f32>(&sizes(8, 8, 1, 512))));
        group.bench_function(id, |b| pool.install(|| b.iter(|| data.run(&options))));
    }
    group.finish();
}

/// Pages in random order, beside rows side by side (a page of the whole sequence).
fn pages(c: &mut Criterion) {
    let mut group = group(c, "decode_pages");
    let (pool, keys) = (pool(1), 8192);
    for (heads, kv_heads) in [(32, 32), (32, 8)] {
        let sizes = sizes(heads, kv_heads, 1, keys);
        let (q, kv) = (noise::<f32>(heads * 128, 1), noise::<f32>(kv_heads * keys * 128, 2));
        let mut out = vec![0.0f32; heads * 128];
        let mut whole = Vec::new();
        group.throughput(Throughput::Bytes(kv_bytes::<f32>(&sizes)));
        for page_len in [keys, 256, 64, 16] {
            let count = keys / page_len;
            // An odd step goes through all pages, far from one after the other.
            let table: Vec<u32> = (0..count).map(|i| (i * ((count / 2 + 1) | 1) % count) as u32).collect();
            let mut store = vec![0.0f32; kv.len()];
            for (i, &page) in table.iter().enumerate() {
                for head in 0..kv_heads {
                    let (from, to) =
                        ((head * keys + i * page_len) * 128, (page as usize * kv_heads + head) * page_len * 128);
                    store[to..][..page_len * 128].copy_from_slice(&kv[from..][..page_len * 128]);
                }
            }
            let pages = Heads::bhsd(&store, [count, kv_heads, page_len, 128]).expect("fits");
            let pages = Paged::new(pages, &table, core::slice::from_ref(&keys)).expect("fits");
            let q = Heads::bhsd(&q, [1, heads, 1, 128]).expect("fits");
            let mut run = || {
                let out = HeadsMut::bhsd(&mut out, [1, heads, 1, 128]).expect("fits");
                multi_head(&q, &pages, &pages, out, &Options::new()).expect("valid");
            };
            run();
            group.bench_function(format!("{}/pages{page_len}", sizes.id()), |b| pool.install(|| b.iter(&mut run)));
            if page_len == keys {
                whole = out.clone();
            }
            assert_eq!(out, whole, "pages of {page_len} give other bits");
        }
    }
    group.finish();
}

/// 64 sequences of 10 to 500 tokens, causal, beside the same number of visible pairs as sequences of one length.
fn ragged(c: &mut Criterion) {
    let mut group = group(c, "ragged");
    group.measurement_time(Duration::from_secs(3));
    let (heads, dim) = (8, 64);
    let lengths: Vec<usize> = (0..64).map(|i| 10 + i * 37 % 491).collect();
    let mut starts = vec![0];
    lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + length));
    let rows = starts[64];
    let data = noise::<f32>(rows * heads * dim, 1);
    let mut out = vec![0.0f32; data.len()];
    let tokens = Ragged::packed(&data, [rows, heads, dim], &starts).expect("fits");
    let causal = Options::new().causal(Diagonal::TopLeft);
    let flops = |pairs: usize| Throughput::Elements((4 * heads * dim * pairs) as u64);
    // As many pairs as this in sequences of 250.
    let mut dense = Data::<f32>::new(Sizes::of(64, heads, 250, dim));
    for threads in [1, 2] {
        let pool = pool(threads);
        group.throughput(flops(lengths.iter().map(|n| n * (n + 1) / 2).sum()));
        group.bench_function(format!("64_of_10_to_500/t{threads}"), |b| {
            pool.install(|| {
                b.iter(|| {
                    let out = HeadsMut::bshd(&mut out, [1, rows, heads, dim]).expect("fits");
                    multi_head(&tokens, &tokens, &tokens, out, &causal).expect("valid");
                });
            });
        });
        group.throughput(flops(64 * 250 * 251 / 2));
        group.bench_function(format!("64_of_250/t{threads}"), |b| pool.install(|| b.iter(|| dense.run(&causal))));
    }
    assert!(out.iter().all(|x| x.is_finite()));
    group.finish();
}

criterion_group!(benches, caches, windows, pages, ragged);
criterion_main!(benches);
