//! Softmax over contiguous rows on every level against plain scalar Rust, in one group a shape: compare within a group.
//!
//! `cargo bench --bench softmax [-- f32/r512_n1024]`. On one thread; `threads` has the serial threshold's two sides.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use polyhead::softmax::{SoftmaxOptions, log_softmax, log_sum_exp, softmax};
use polyhead::{Element, Level, Matrix, MatrixMut, reference};

/// What one writes without this crate: three passes, `f32::exp`.
fn scalar<T: Element>(x: &[T], out: &mut [T], columns: usize) {
    for (x, out) in x.chunks_exact(columns).zip(out.chunks_exact_mut(columns)) {
        let max = x.iter().map(|x| x.to_f32()).fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = x.iter().map(|x| (x.to_f32() - max).exp()).sum();
        for (out, x) in out.iter_mut().zip(x) {
            *out = T::from_f32_nearest((x.to_f32() - max).exp() / sum);
        }
    }
}

/// As [`scalar`] with the exponentials kept, for `f32`.
fn scalar_f32(x: &[f32], out: &mut [f32], columns: usize) {
    for (x, out) in x.chunks_exact(columns).zip(out.chunks_exact_mut(columns)) {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for (out, x) in out.iter_mut().zip(x) {
            *out = (x - max).exp();
            sum += *out;
        }
        out.iter_mut().for_each(|p| *p /= sum);
    }
}

/// Numbers in -8..8, the same on every machine.
fn numbers<T: Element>(len: usize) -> Vec<T> {
    let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761).rotate_left(15).wrapping_mul(2_246_822_519);
    (0..len).map(|i| T::from_f32_nearest(hash(i) as f32 / 268_435_456.0 - 8.0)).collect()
}

/// Panics unless the first row is close to the reference.
fn check<T: Element>(x: &[T], out: &[T], columns: usize, tolerance: f64) {
    let row: Vec<f64> = x[..columns].iter().map(|x| x.to_f32().into()).collect();
    for (i, (p, out)) in reference::softmax(&row, None).into_iter().zip(out).enumerate() {
        assert!((f64::from(out.to_f32()) - p).abs() <= tolerance * p + 1e-7, "{i}: {out:?} instead of {p}");
    }
}

const SHAPES: [[usize; 2]; 4] = [[16384, 16], [2048, 100], [512, 1024], [8, 65536]];

fn shapes<T: Element>(c: &mut Criterion, tolerance: f64, baseline: fn(&[T], &mut [T], usize)) {
    let mut group = c.benchmark_group("softmax");
    for [rows, columns] in SHAPES {
        let (x, mut out) = (numbers::<T>(rows * columns), vec![T::default(); rows * columns]);
        let view = Matrix::contiguous(&x, [rows, columns]).expect("packed");
        group.throughput(Throughput::Elements((rows * columns) as u64));
        let id = |name: &str| BenchmarkId::from_parameter(format!("{name}/{}/r{rows}_n{columns}", T::NAME));
        for &level in Level::available() {
            let options = SoftmaxOptions::new().level(level);
            let run = |out: &mut [T]| {
                softmax(&view, MatrixMut::contiguous(out, [rows, columns]).expect("packed"), &options)
                    .expect("a level");
            };
            run(&mut out);
            check(&x, &out, columns, tolerance);
            group.bench_function(id(level.name()), |b| b.iter(|| run(black_box(&mut out))));
        }
        baseline(&x, &mut out, columns);
        check(&x, &out, columns, tolerance.max(1e-5));
        group.bench_function(id("scalar"), |b| b.iter(|| baseline(black_box(&x), black_box(&mut out), columns)));
    }
}

/// The other functions and layouts on the best level, at 512 rows of 1024.
fn forms(c: &mut Criterion) {
    let mut group = c.benchmark_group("forms");
    let (shape, options) = ([512, 1024], SoftmaxOptions::new());
    let x = numbers::<f32>(shape[0] * shape[1]);
    let (mut out, mut lse) = (x.clone(), vec![0.0; shape[0]]);
    let view = Matrix::contiguous(&x, shape).expect("packed");
    let columns = Matrix::contiguous(&x, [shape[1], shape[0]]).and_then(|x| x.permute([1, 0])).expect("packed");
    group.throughput(Throughput::Elements(x.len() as u64));
    let mut packed = |f: &mut dyn FnMut(MatrixMut<'_, f32>)| f(MatrixMut::contiguous(&mut out, shape).expect("packed"));
    group.bench_function("softmax", |b| b.iter(|| packed(&mut |out| softmax(&view, out, &options).expect("fits"))));
    group.bench_function("log_softmax", |b| {
        b.iter(|| packed(&mut |out| log_softmax(&view, out, &options).expect("fits")));
    });
    group.bench_function("columns", |b| b.iter(|| packed(&mut |out| softmax(&columns, out, &options).expect("fits"))));
    group.bench_function("columns_to_columns", |b| {
        b.iter(|| {
            let out = MatrixMut::contiguous(&mut out, [shape[1], shape[0]]).and_then(|out| out.permute([1, 0]));
            softmax(&columns, out.expect("packed"), &options).expect("fits");
        });
    });
    group
        .bench_function("log_sum_exp", |b| b.iter(|| log_sum_exp(&view, black_box(&mut lse), &options).expect("fits")));
}

/// One thread against all, around the size where more than one take part.
fn threads(c: &mut Criterion) {
    let mut group = c.benchmark_group("threads");
    for rows in [32, 64, 128, 512] {
        let x = numbers::<f32>(rows * 1024);
        let mut out = x.clone();
        let view = Matrix::contiguous(&x, [rows, 1024]).expect("packed");
        for threads in [1, std::thread::available_parallelism().map_or(1, usize::from)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            group.bench_function(format!("t{threads}/r{rows}_n1024"), |b| {
                b.iter(|| {
                    pool.install(|| {
                        let out = MatrixMut::contiguous(&mut out, [rows, 1024]).expect("packed");
                        softmax(&view, out, &SoftmaxOptions::new()).expect("fits");
                    });
                });
            });
        }
    }
}

fn rows(c: &mut Criterion) {
    // For calls from outside of any pool.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("the first pool");
    shapes::<f32>(c, 2e-6, scalar_f32);
    shapes::<f16>(c, 1e-3, scalar);
    shapes::<bf16>(c, 1e-2, scalar);
    forms(c);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
    targets = rows, threads
}
criterion_main!(benches);
