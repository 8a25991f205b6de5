//! `polyhead::gemm` against the naive product in `f64`, and the promises of its documentation one by one.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, in its helpers too")]

use polyhead::gemm::{gemm, gemm_batched};
use polyhead::{Error, Matrices, MatricesMut, Matrix, MatrixMut};
use proptest::prelude::*;

mod support;

#[path = "support/products.rs"]
mod products;

use products::*;
use support::cases_of_256;

#[derive(Clone, Debug)]
struct Case {
    size: [usize; 4],
    lies: [Lies; 3],
    one: [bool; 2],
    alpha: f64,
    beta: f64,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    const EDGES: &[usize] = &[0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130];
    const DEPTHS: &[usize] = &[0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 520];
    let size = (0usize..4, prop::sample::select(EDGES), prop::sample::select(EDGES))
        .prop_flat_map(|(batch, m, n)| (Just(batch), Just(m), Just(n), prop::sample::select(DEPTHS)))
        // The reference is slow.
        .prop_map(|(batch, m, n, k)| [if m * n * k > 100_000 { 1 } else { batch }, m, n, k]);
    let scalars = prop::sample::select(&[0.0, 1.0, -1.0, 2.5][..]);
    let inputs = prop::sample::select(&ALL[..]);
    (
        (size, inputs.clone(), inputs, prop::sample::select(&DISTINCT[..])),
        (any::<[bool; 2]>(), scalars.clone(), scalars, any::<u64>()),
    )
        .prop_map(|((size, a, b, c), (one, alpha, beta, seed))| Case {
            size,
            lies: [a, b, c],
            one,
            alpha,
            beta,
            seed,
        })
}

fn run_case<T: Float>(case: &Case) {
    let [batch, m, n, k] = case.size;
    let mut noise = Noise(case.seed);
    let batch_of = |one| if one { 1 } else { batch };
    let a = Stored::<T>::new([batch_of(case.one[0]), m, k], case.lies[0], || noise.next());
    let b = Stored::<T>::new([batch_of(case.one[1]), k, n], case.lies[1], || noise.next());
    let before =
        Stored::<T>::new([batch, m, n], case.lies[2], || if case.beta == 0.0 { f64::NAN } else { noise.next() });
    let (alpha, beta, mut c) = (T::of(case.alpha), T::of(case.beta), before.clone());
    gemm_batched(alpha, &a.view(), &b.view(), beta, &mut c.view_mut()).unwrap();
    check(alpha, &a, &b, beta, &before, &c);
    // One item by itself: the same bits.
    if batch > 0 {
        let mut alone = before.clone();
        gemm(alpha, &a.matrix(), &b.matrix(), beta, &mut alone.matrix_mut()).unwrap();
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let at = c.at([0, i, j]);
            assert_eq!(alone.data[at].bits(), c.data[at].bits());
        }
    }
}

proptest! {
    #![proptest_config(cases_of_256(400))]

    #[test]
    fn equals_the_reference_f32(case in cases()) {
        run_case::<f32>(&case);
    }

    #[test]
    fn equals_the_reference_f64(case in cases()) {
        run_case::<f64>(&case);
    }
}

#[test]
fn long_sums_and_many_outputs() {
    // Past the pieces of 4096 terms and the blocks of 1024 outputs of the skinny path, and across its strided copies.
    for lies in [Lies::Packed, Lies::Transposed, Lies::EveryOther] {
        for (m, n, k) in [(5, 3, 9001), (1100, 1, 70), (1, 2100, 33), (1030, 6, 64), (2, 1, 4097)] {
            let mut noise = Noise(9);
            let a = Stored::<f32>::new([1, m, k], lies, || noise.next());
            let b = Stored::<f32>::new([1, k, n], lies, || noise.next());
            let c = Stored::<f32>::new([1, m, n], lies, || noise.next());
            run(1.5, &a, &b, -1.0, &c);
        }
    }
}

#[test]
fn wrong_shapes_are_errors_that_write_nothing() {
    let data = [1.0f32; 60];
    let mut out = [f32::NAN; 60];
    let mut try_shapes = |a: [usize; 3], b: [usize; 3], c: [usize; 3]| {
        let view =
            |shape: [usize; 3]| Matrices::with_strides(&data, shape, [shape[1] * shape[2], shape[2], 1]).unwrap();
        let mut c = MatricesMut::with_strides(&mut out, c, [c[1] * c[2], c[2], 1]).unwrap();
        let error = gemm_batched(1.0, &view(a), &view(b), 0.0, &mut c).unwrap_err();
        assert!(out.iter().all(|x| x.is_nan()));
        error
    };
    let shape = |operand, axis, expected, actual| Error::Shape { operand, axis, expected, actual };
    assert_eq!(try_shapes([1, 2, 3], [1, 4, 5], [1, 2, 5]), shape("b", "row", 3, 4));
    assert_eq!(try_shapes([1, 2, 3], [1, 3, 5], [1, 3, 5]), shape("c", "row", 2, 3));
    assert_eq!(try_shapes([1, 2, 3], [1, 3, 5], [1, 2, 4]), shape("c", "column", 5, 4));
    assert_eq!(try_shapes([2, 2, 3], [1, 3, 5], [3, 2, 5]), shape("a", "batch", 3, 2));
    assert_eq!(try_shapes([3, 2, 3], [0, 3, 5], [3, 2, 5]), shape("b", "batch", 3, 0));
    assert_eq!(try_shapes([1, 2, 0], [1, 1, 5], [1, 2, 5]), shape("b", "row", 0, 1));
    let (a, mut c) = (Matrix::contiguous(&data[..6], [2, 3]).unwrap(), [f32::NAN; 4]);
    let error = gemm(1.0, &a, &a, 0.0, &mut MatrixMut::contiguous(&mut c, [2, 2]).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "b: axis row has size 2, expected 3");
    assert!(c.iter().all(|x| x.is_nan()));
}

#[test]
fn extreme_empty_shapes() {
    // Sizes and strides that exist only because another axis is empty.
    let huge = usize::MAX;
    let empty: [f32; 0] = [];
    let a = Matrix::with_strides(&empty, [3, 0], [huge, huge]).unwrap();
    let b = Matrix::with_strides(&empty, [0, 70], [huge, huge]).unwrap();
    let mut c = [2.0f32; 210];
    gemm(1.0, &a, &b, 0.5, &mut MatrixMut::contiguous(&mut c, [3, 70]).unwrap()).unwrap();
    assert_eq!(c, [1.0; 210]);
    let (a, b) = (
        Matrix::with_strides(&empty, [0, huge], [1, 1]).unwrap(),
        Matrix::with_strides(&c, [huge, 3], [0, 1]).unwrap(),
    );
    let mut none: [f32; 0] = [];
    gemm(1.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut none, [0, 3]).unwrap()).unwrap();
    // A k that never ends, of which alpha = 0 reads nothing.
    let one = [f32::NAN];
    let (a, b) = (
        Matrix::with_strides(&one, [2, huge], [0, 0]).unwrap(),
        Matrix::with_strides(&one, [huge, 2], [0, 0]).unwrap(),
    );
    let mut four = [f32::NAN; 4];
    gemm(0.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut four, [2, 2]).unwrap()).unwrap();
    assert_eq!(four, [0.0; 4]);
}

#[test]
fn nan_and_infinity_reach_only_what_they_meet() {
    for (m, n) in [(1, 1), (1, 40), (40, 1), (6, 40), (40, 40)] {
        for (k, at) in [(1, 0), (37, 36), (37, 3), (64, 20)] {
            for value in [f64::NAN, f64::INFINITY] {
                let (mut a, mut b, mut c) = operands::<f32>(m, n, k);
                b.data.iter_mut().for_each(|x| *x = x.abs() + 0.5);
                a.data[(m - 1) * k + at] = value as f32;
                gemm(1.0, &a.matrix(), &b.matrix(), 0.0, &mut c.matrix_mut()).unwrap();
                for (i, row) in c.packed().chunks(n).enumerate() {
                    let special = |x: &f32| if value.is_nan() { x.is_nan() } else { *x == f32::INFINITY };
                    let ok = if i == m - 1 { row.iter().all(special) } else { row.iter().all(|x| x.is_finite()) };
                    assert!(ok, "{m} x {n} x {k}, row {i}: {row:?}");
                }
            }
        }
    }
}

#[test]
fn a55_k_is_zero() {
    for (m, n) in [(8, 1), (1024, 1000), (1, 8), (3, 3)] {
        let (a, b, c) = operands::<f32>(m, n, 0);
        assert_eq!(bits(&run(1.0, &a, &b, 1.0, &c).data), bits(&c.data), "beta 1 leaves C as it is");
        let nan = Stored::<f32>::new([1, m, n], Lies::Packed, || f64::NAN);
        assert!(run(1.0, &a, &b, 0.0, &nan).packed().iter().all(|x| x.to_bits() == 0), "beta 0 gives zeros");
        run(1.0, &a, &b, -3.0, &c);
    }
}

#[test]
fn a56_beta_zero_does_not_read_c() {
    for m in 0..=17 {
        for n in 0..=17 {
            for k in 0..=17 {
                let (a, b, _) = operands::<f32>(m, n, k);
                let c = Stored::<f32>::new([1, m, n], Lies::Gaps, || if k % 2 == 0 { f64::NAN } else { f64::INFINITY });
                run(1.0, &a, &b, 0.0, &c);
            }
        }
    }
    // Threaded and skinny paths.
    for (m, n, k) in [(192, 160, 80), (1100, 1, 500), (2, 1100, 500)] {
        let (a, b, _) = operands::<f64>(m, n, k);
        run(1.0, &a, &b, 0.0, &Stored::new([1, m, n], Lies::Packed, || f64::NAN));
    }
}

#[test]
fn a57_alpha_zero_reads_neither_a_nor_b() {
    for (m, n, k) in [(1, 1, 1), (1, 50, 9), (50, 1, 9), (6, 50, 100), (33, 34, 35), (192, 160, 80), (1100, 1, 500)] {
        let (mut a, mut b, c) = operands::<f32>(m, n, k);
        a.data.fill(f32::NAN);
        b.data.fill(f32::INFINITY);
        for beta in [0.0f32, 1.0, 2.0] {
            let out = run(0.0, &a, &b, f64::from(beta), &c);
            assert!(out.packed().iter().zip(c.packed()).all(|(&x, c)| x == beta * c));
            let mut batched = c.clone();
            gemm_batched(-0.0, &a.view(), &b.view(), beta, &mut batched.view_mut()).unwrap();
            assert_eq!(batched.packed(), out.packed());
        }
    }
}

#[test]
fn a58_vectors_honour_alpha_and_beta() {
    for alpha in [0.0, 1.0, 2.5] {
        for beta in [0.0, 1.0, -3.0] {
            for (m, n, k) in [(1, 1, 7), (1, 37, 19), (37, 1, 19), (1, 300, 300), (3, 100, 41), (100, 7, 70)] {
                for lies in DISTINCT {
                    let mut noise = Noise(58);
                    let a = Stored::<f32>::new([1, m, k], lies, || noise.next());
                    let b = Stored::<f32>::new([1, k, n], lies, || noise.next());
                    run(alpha, &a, &b, beta, &Stored::new([1, m, n], lies, || noise.next()));
                }
            }
        }
    }
}

#[test]
fn a59_one_by_one() {
    for k in (1..=40).chain([9]) {
        let (a, b, c) = operands::<f32>(1, 1, k);
        run(1.0, &a, &b, 1.5, &c);
        let (a, b, c) = operands::<f64>(1, 1, k);
        run(1.0, &a, &b, 1.5, &c);
    }
}

#[test]
fn a60_strides_that_repeat_or_reverse() {
    let mut noise = Noise(60);
    let b = Stored::<f32>::new([1, 5, 4], Lies::Packed, || noise.next());
    let c = Stored::<f32>::new([1, 3, 4], Lies::Packed, || noise.next());
    for lies in ALL {
        let a = Stored::<f32>::new([1, 3, 5], lies, || noise.next());
        let copy = a.packed();
        let mut at = copy.iter();
        let packed = Stored::<f32>::new([1, 3, 5], Lies::Packed, || f64::from(*at.next().unwrap()));
        let (x, y) = (run(1.0, &a, &b, 1.0, &c), run(1.0, &packed, &b, 1.0, &c));
        for (x, y) in x.packed().iter().zip(y.packed()) {
            assert!((x - y).abs() <= 8.0 * f32::EPSILON, "{lies:?}");
        }
    }
    // Strides have no sign: a reversed axis is an error, not a read out of bounds.
    let data = [1.0f32; 15];
    let reversed_rows = Matrix::with_strides(&data[10..], [3, 5], [5usize.wrapping_neg(), 1]);
    assert!(matches!(reversed_rows, Err(Error::Overflow { axis: "row", .. })));
    let reversed_columns = Matrix::with_strides(&data[4..], [3, 5], [5, 1usize.wrapping_neg()]);
    assert!(matches!(reversed_columns, Err(Error::Overflow { axis: "column", .. })));
    let mut out = [0.0f32; 15];
    assert!(matches!(MatrixMut::with_strides(&mut out, [3, 5], [0, 1]), Err(Error::Overlap { .. })));
    for (m, n, k) in [(0, 4, 5), (3, 0, 5), (0, 0, 0), (3, 4, 0)] {
        let (a, b, c) = operands::<f32>(m, n, k);
        run(1.0, &a, &b, 1.0, &c);
    }
}

// a61, an output that overlaps an input, cannot be written: the `compile_fail` example in the documentation of
// `polyhead::gemm` shows that the borrow checker refuses it.

#[test]
fn a62_equal_rows_and_columns() {
    let mut noise = Noise(62);
    let a = Stored::<f32>::new([1, 20, 300], Lies::SameRows, || noise.next());
    for n in 1..=33 {
        let b = Stored::<f32>::new([1, 300, n], Lies::SameColumns, || noise.next());
        let c = run(1.0, &a, &b, 0.0, &Stored::new([1, 20, n], Lies::Packed, || f64::NAN)).packed();
        let size: f64 = (0..300).map(|p| (a.get(0, 0, p) * b.get(0, p, 0)).abs()).sum();
        for x in &c {
            let difference = f64::from((x - c[0]).abs());
            assert!(difference <= 300.0 * f64::from(f32::EPSILON) * size, "n = {n}: {x} and {}", c[0]);
        }
    }
}

#[test]
fn a63_unaligned_slices() {
    let (identity, ones, mut out) = ([1.0f32, 0.0, 0.0, 1.0], [1.0f32; 6], [f32::NAN; 6]);
    let (a, b) = (Matrix::contiguous(&identity, [2, 2]).unwrap(), Matrix::contiguous(&ones, [2, 3]).unwrap());
    gemm(1.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut out, [2, 3]).unwrap()).unwrap();
    assert_eq!(out, [1.0; 6]);
    /// A copy four bytes past a multiple of 64.
    fn shifted(data: &[f32]) -> (Vec<f32>, usize) {
        let mut copy = vec![f32::NAN; data.len() + 32];
        let start = (0..17).find(|&i| copy[i..].as_ptr() as usize % 64 == 4).unwrap();
        copy[start..][..data.len()].copy_from_slice(data);
        (copy, start)
    }
    for (m, n, k) in [(40, 40, 40), (1, 50, 50), (50, 1, 50), (50, 3, 65)] {
        let (a, b, c) = operands::<f32>(m, n, k);
        let expected = run(1.0, &a, &b, 0.5, &c).packed();
        let ((a, at_a), (b, at_b), (mut c, at_c)) = (shifted(&a.packed()), shifted(&b.packed()), shifted(&c.packed()));
        let a = Matrix::contiguous(&a[at_a..][..m * k], [m, k]).unwrap();
        let b = Matrix::contiguous(&b[at_b..][..k * n], [k, n]).unwrap();
        let out = &mut c[at_c..][..m * n];
        gemm(1.0, &a, &b, 0.5, &mut MatrixMut::contiguous(out, [m, n]).unwrap()).unwrap();
        assert_eq!(bits(out), bits(&expected));
    }
}

/// Sizes past the threshold of threads, on every path, and beta so that edges of tiles are rounded otherwise.
const THREADED: [(usize, usize, usize, usize); 9] = [
    (1, 300, 70, 200),
    (1, 70, 300, 257),
    (1, 161, 161, 161),
    (1, 2000, 1, 700),
    (1, 1, 2001, 700),
    (1, 1501, 3, 513),
    (1, 7, 1501, 513),
    (6, 65, 65, 128),
    (40, 130, 2, 130),
];

#[cfg(feature = "rayon")]
#[test]
fn bits_do_not_depend_on_threads() {
    fn on<T: Float>(threads: usize, (batch, m, n, k): (usize, usize, usize, usize), lies: Lies) -> Vec<u64> {
        let mut noise = Noise(62);
        let a = Stored::<T>::new([batch, m, k], lies, || noise.next());
        let b = Stored::<T>::new([1, k, n], lies, || noise.next());
        let mut c = Stored::<T>::new([batch, m, n], lies, || noise.next());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (alpha, beta) = (T::of(0.7), T::of(-1.3));
        pool.install(|| gemm_batched(alpha, &a.view(), &b.view(), beta, &mut c.view_mut())).unwrap();
        bits(&c.data)
    }
    for size in THREADED {
        for lies in [Lies::Packed, Lies::Transposed, Lies::EveryOther] {
            let (single, double) = (on::<f32>(1, size, lies), on::<f64>(1, size, lies));
            for threads in [2, 3, 4] {
                assert!(on::<f32>(threads, size, lies) == single, "{size:?} {lies:?} f32, {threads} threads");
                assert!(on::<f64>(threads, size, lies) == double, "{size:?} {lies:?} f64, {threads} threads");
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn bits_are_those_of_one_call_of_matrixmultiply() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    // As many columns as rows at most: wider results are computed as their transpose.
    for (m, n, k) in [(300, 70, 200), (161, 161, 161), (129, 128, 600), (520, 33, 300)] {
        let (a, b, mut c) = operands::<f32>(m, n, k);
        let mut whole = c.data.clone();
        pool.install(|| gemm(0.7, &a.matrix(), &b.matrix(), -1.3, &mut c.matrix_mut())).unwrap();
        let (rows, columns, depth) = (m as isize, n as isize, k as isize);
        assert!(rows >= columns);
        #[allow(unsafe_code, reason = "the function compared with takes pointers")]
        // SAFETY: the slices hold packed (m, k), (k, n) and (m, n) matrices, see `operands`.
        unsafe {
            let (a, b, c) = (a.data.as_ptr(), b.data.as_ptr(), whole.as_mut_ptr());
            matrixmultiply::sgemm(m, k, n, 0.7, a, depth, 1, b, columns, 1, -1.3, c, columns, 1);
        }
        assert!(bits(&whole) == bits(&c.data), "{m} x {n} x {k}");
    }
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    for (_, m, n, k) in THREADED {
        let (m, n) = (m.min(100), n.min(100));
        let mut noise = Noise(68);
        let a = Stored::<f32>::new([27, m, k], Lies::Packed, || noise.next());
        let b = Stored::<f32>::new([27, k, n], Lies::Packed, || noise.next());
        let before = Stored::<f32>::new([27, m, n], Lies::Packed, || noise.next());
        let mut c = before.clone();
        gemm_batched(0.7, &a.view(), &b.view(), -1.3, &mut c.view_mut()).unwrap();
        for item in [0, 1, 26] {
            let matrix = |x: &Stored<f32>| {
                let [_, rows, columns] = x.shape;
                x.data[item * rows * columns..][..rows * columns].to_vec()
            };
            let (a, b, mut alone) = (matrix(&a), matrix(&b), matrix(&before));
            let (a, b) = (Matrix::contiguous(&a, [m, k]).unwrap(), Matrix::contiguous(&b, [k, n]).unwrap());
            gemm(0.7, &a, &b, -1.3, &mut MatrixMut::contiguous(&mut alone, [m, n]).unwrap()).unwrap();
            assert!(bits(&alone) == bits(&matrix(&c)), "item {item} of {m} x {n} x {k}");
        }
    }
}

#[test]
fn twenty_runs_are_equal() {
    let (a, b, c) = operands::<f32>(300, 70, 200);
    let first = run(1.0, &a, &b, 1.0, &c);
    for _ in 0..20 {
        let mut again = c.clone();
        gemm(1.0, &a.matrix(), &b.matrix(), 1.0, &mut again.matrix_mut()).unwrap();
        assert!(bits(&again.data) == bits(&first.data));
    }
}
