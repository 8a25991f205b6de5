//! `polyhead::gemm`: square, skinny, transposed and batched products, in FLOP/s, on the threads of the global pool.
//!
//! Skinny ids ending in `_loop` are the plain loop that the crate should beat; square ones ending in `_matrixmultiply` are one
//! call of matrixmultiply, on one thread. `gemm/packed` has projections: `_plain` with the weights as they are, the others packed,
//! in the element type of the id. `RAYON_NUM_THREADS=1 cargo bench --bench gemm` compares like with like.
#![allow(missing_docs, reason = "criterion_group! generates an undocumented function")]

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use polyhead::gemm::{GemmElement, PackedMatrix, gemm, gemm_batched, gemm_packed};
use polyhead::{Element, Matrices, MatricesMut, Matrix, MatrixMut, reference};
use std::hint::black_box;
use std::time::Duration;

fn noise<T: From<f32>>(len: usize, mut state: u64) -> Vec<T> {
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        T::from((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

/// Sizes and layout of a product. A transposed operand is stored by columns.
#[derive(Clone, Copy)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    transposed: [bool; 2],
}

impl Product {
    fn new(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, transposed: [false; 2] }
    }

    fn id(&self) -> String {
        let Self { m, n, k, .. } = self;
        let suffix = match self.transposed {
            [false, false] => "",
            [true, false] => "_at",
            [false, true] => "_bt",
            [true, true] => "_at_bt",
        };
        format!("m{m}_n{n}_k{k}{suffix}")
    }

    fn view<'a, T: Copy>(data: &'a [T], [rows, columns]: [usize; 2], transposed: bool) -> Matrix<'a, T> {
        let strides = if transposed { [1, rows] } else { [columns, 1] };
        Matrix::with_strides(data, [rows, columns], strides).expect("the data fit the shape")
    }
}

/// Compares a few elements with the reference.
fn assert_some<T: GemmElement + Into<f64>>(a: &Matrix<'_, T>, b: &Matrix<'_, T>, c: &[T]) {
    let ([m, k], n) = (a.shape(), b.shape()[1]);
    let at = |x: &Matrix<'_, T>, i, j| x.get([i, j]).map_or(f64::NAN, Into::into);
    for (i, j) in [(0, 0), (m - 1, n - 1), (m / 2, n / 3), (m / 3, n - 1)] {
        let want = reference::gemm(1, 1, k, 1.0, |_, p| at(a, i, p), |p, _| at(b, p, j), 0.0, |_, _| 0.0)[0];
        let got: f64 = c[i * n + j].into();
        assert!((got - want).abs() < 1e-6 * k as f64, "[{i}, {j}]: {got}, expected {want}");
    }
}

/// A matrix times a vector as one would write it by hand, its lines along `k`.
fn dot_loop<T: GemmElement>(lines: &[T], x: &[T], y: &mut [T]) {
    for (y, line) in y.iter_mut().zip(lines.chunks_exact(x.len())) {
        let mut sums = [T::ZERO; 32];
        let (pieces, xs) = (line.chunks_exact(32), x.chunks_exact(32));
        let rest = pieces.remainder().iter().zip(xs.remainder()).fold(T::ZERO, |sum, (&a, &x)| sum + a * x);
        for (a, x) in pieces.zip(xs) {
            for l in 0..32 {
                sums[l] = sums[l] + a[l] * x[l];
            }
        }
        *y = sums.iter().fold(rest, |sum, &s| sum + s);
    }
}

/// The same, the lines along the outputs.
fn axpy_loop<T: GemmElement>(lines: &[T], x: &[T], y: &mut [T]) {
    y.fill(T::ZERO);
    for (line, &x) in lines.chunks_exact(y.len()).zip(x) {
        for (y, &a) in y.iter_mut().zip(line) {
            *y = *y + a * x;
        }
    }
}

fn product<T: GemmElement + From<f32> + Into<f64>>(group: &mut BenchmarkGroup<'_, WallTime>, size: Product) {
    let Product { m, n, k, transposed } = size;
    let (a, b, mut c) = (noise::<T>(m * k, 1), noise::<T>(k * n, 2), vec![T::ZERO; m * n]);
    let (av, bv) = (Product::view(&a, [m, k], transposed[0]), Product::view(&b, [k, n], transposed[1]));
    let call = |c: &mut [T]| {
        let mut c = MatrixMut::contiguous(c, [m, n]).expect("the data fit the shape");
        gemm(T::ONE, black_box(&av), black_box(&bv), T::ZERO, &mut c).expect("the shapes fit");
    };
    call(&mut c);
    assert_some(&av, &bv, &c);
    group.throughput(Throughput::Elements(2 * (m * n * k) as u64));
    group.bench_function(size.id(), |bench| bench.iter(|| call(black_box(&mut c))));
    // The matrix of a product with a vector, and whether its lines run along k.
    let skinny = match (m, n) {
        (1, _) => Some((&b, &a, transposed[1])),
        (_, 1) => Some((&a, &b, !transposed[0])),
        _ => None,
    };
    if let Some((lines, x, along_k)) = skinny {
        let run = if along_k { dot_loop::<T> } else { axpy_loop::<T> };
        run(lines, x, &mut c);
        assert_some(&av, &bv, &c);
        group.bench_function(format!("{}_loop", size.id()), |bench| {
            bench.iter(|| run(black_box(lines), black_box(x), black_box(&mut c)));
        });
    }
}

/// One call of matrixmultiply, on this thread.
#[allow(unsafe_code, reason = "the function compared with takes pointers")]
fn matrixmultiply_alone(group: &mut BenchmarkGroup<'_, WallTime>, e: usize) {
    let (a, b, mut c) = (noise::<f32>(e * e, 1), noise::<f32>(e * e, 2), vec![0.0f32; e * e]);
    group.bench_function(format!("{}_matrixmultiply", Product::new(e, e, e).id()), |bench| {
        bench.iter(|| {
            let (a, b, c) = (black_box(a.as_ptr()), black_box(b.as_ptr()), c.as_mut_ptr());
            let s = e as isize;
            // SAFETY: the three vectors hold e x e packed elements.
            unsafe { matrixmultiply::sgemm(e, e, e, 1.0, a, s, 1, b, s, 1, 0.0, c, s, 1) }
        });
    });
}

fn settings<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500));
    group
}

fn single(criterion: &mut Criterion) {
    let mut group = settings(criterion, "gemm/f32");
    for e in [64, 128, 256, 512, 1024] {
        product::<f32>(&mut group, Product::new(e, e, e));
        matrixmultiply_alone(&mut group, e);
    }
    for transposed in [[true, false], [false, true], [true, true]] {
        product::<f32>(&mut group, Product { transposed, ..Product::new(512, 512, 512) });
    }
    for (m, n, k) in [(128, 1024, 1024), (1024, 128, 1024), (16, 1024, 1024)] {
        product::<f32>(&mut group, Product::new(m, n, k));
    }
    for e in [64, 512, 4096] {
        for transposed in [[false, false], [false, true]] {
            product::<f32>(&mut group, Product { transposed, ..Product::new(1, e, e) });
        }
    }
    for (m, n, k) in [(1024, 1, 1024), (2, 1024, 1024), (4, 1024, 1024), (8, 1024, 1024), (1024, 4, 1024)] {
        product::<f32>(&mut group, Product::new(m, n, k));
    }
    group.finish();
    let mut group = settings(criterion, "gemm/f64");
    for (m, n, k) in [(256, 256, 256), (512, 512, 512), (1, 1024, 1024), (1024, 1, 1024)] {
        product::<f64>(&mut group, Product::new(m, n, k));
    }
    group.finish();
}

fn batched(criterion: &mut Criterion) {
    let mut group = settings(criterion, "gemm/f32");
    for (batch, m, n, k) in [(256, 8, 8, 8), (96, 128, 64, 128), (32, 1, 128, 512)] {
        let (a, b) = (noise::<f32>(batch * m * k, 1), noise::<f32>(batch * k * n, 2));
        let mut c = vec![0.0f32; batch * m * n];
        let av = Matrices::contiguous(&a, [batch, m, k]).expect("the data fit the shape");
        let bv = Matrices::contiguous(&b, [batch, k, n]).expect("the data fit the shape");
        let call = |c: &mut [f32]| {
            let mut c = MatricesMut::contiguous(c, [batch, m, n]).expect("the data fit the shape");
            gemm_batched(1.0, black_box(&av), black_box(&bv), 0.0, &mut c).expect("the shapes fit");
        };
        call(&mut c);
        for item in [0, batch - 1] {
            let a = Product::view(&a[item * m * k..], [m, k], false);
            assert_some(&a, &Product::view(&b[item * k * n..], [k, n], false), &c[item * m * n..]);
        }
        group.throughput(Throughput::Elements(2 * (batch * m * n * k) as u64));
        group.bench_function(format!("b{batch}_m{m}_n{n}_k{k}"), |bench| bench.iter(|| call(black_box(&mut c))));
    }
    group.finish();
}

/// A (m, k) in `f32` times weights of some type, packed, and a bias.
fn packed_as<T: Element>(group: &mut BenchmarkGroup<'_, WallTime>, a: &[f32], weights: &[f32], [m, n, k]: [usize; 3]) {
    let narrow: Vec<T> = weights.iter().map(|&x| T::from_f32_nearest(x)).collect();
    let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
    let b = PackedMatrix::new(&Product::view(&narrow, [k, n], false), None).expect("there is memory for it");
    let (a, bias, mut c) = (Product::view(a, [m, k], false), vec![0.0; n], vec![0.0f32; m * n]);
    let call = |c: &mut [f32]| {
        let mut c = MatrixMut::contiguous(c, [m, n]).expect("the data fit the shape");
        gemm_packed(black_box(&a), black_box(&b), Some(&bias), &mut c).expect("the shapes fit");
    };
    call(&mut c);
    assert_some(&a, &Product::view(&wide, [k, n], false), &c);
    let id = format!("{}_{}", Product::new(m, n, k).id(), T::NAME);
    group.bench_function(id, |bench| bench.iter(|| call(black_box(&mut c))));
}

/// Projections of attention: weights packed once against weights as they are.
fn packed(criterion: &mut Criterion) {
    let mut group = settings(criterion, "gemm/packed");
    for [m, k, n] in [
        [1, 1024, 3072],
        [4, 512, 1536],
        [10, 384, 1152],
        [32, 768, 2304],
        [128, 384, 1536],
        [320, 512, 1536],
        [1024, 768, 2304],
        [2048, 1024, 1024],
        [100, 64, 64],
    ] {
        let (a, b, mut c) = (noise::<f32>(m * k, 1), noise::<f32>(k * n, 2), vec![0.0; m * n]);
        group.throughput(Throughput::Elements(2 * (m * n * k) as u64));
        let (av, bv) = (Product::view(&a, [m, k], false), Product::view(&b, [k, n], false));
        group.bench_function(format!("{}_plain", Product::new(m, n, k).id()), |bench| {
            bench.iter(|| {
                let mut c = MatrixMut::contiguous(black_box(&mut c), [m, n]).expect("the data fit the shape");
                gemm(1.0, black_box(&av), black_box(&bv), 0.0, &mut c).expect("the shapes fit");
            });
        });
        packed_as::<f32>(&mut group, &a, &b, [m, n, k]);
        packed_as::<half::bf16>(&mut group, &a, &b, [m, n, k]);
    }
    group.finish();
}

criterion_group!(benches, single, batched, packed);
criterion_main!(benches);
