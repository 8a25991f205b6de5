//! `gemm_packed` against the naive product in `f64`, and the promises of its documentation one by one, on every level.

mod support;

use half::{bf16, f16};
use polyhead::gemm::{PackedMatrix, gemm_packed};
use polyhead::{Error, Level, Matrix, MatrixMut, Precision, reference};
use proptest::prelude::*;
use support::{
    Arrangement, Bits, Edges, Memory, PoisonedInput, PoisonedOutput, Rng, assert_same_bits, cases_of_256, levels,
};

/// Where a matrix may lie: by rows, by columns, with foreign elements between rows or between elements.
const LIES: [Arrangement; 5] =
    [Arrangement::Bhsd, Arrangement::Bhds, Arrangement::PackedQkv, Arrangement::RowGaps(3), Arrangement::DimStride(2)];

/// Around the rows of tiles (6, 12) and of blocks (72), the columns of panels (8, 16, 32) and of blocks (128), the pieces of k (256).
const ROWS: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 71, 72, 73, 145];
const COLUMNS: &[usize] = &[0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65, 127, 128, 129, 257];
const DEPTHS: &[usize] = &[0, 1, 2, 3, 8, 64, 255, 256, 257, 513];

fn matrix<T: Bits>(shape: [usize; 2], lies: Arrangement, rng: &mut Rng) -> PoisonedInput<T> {
    let values = rng.normals::<T>(shape[0] * shape[1], 1.0);
    PoisonedInput::within(edges(shape), &values, [1, 1, shape[0], shape[1]], lies)
}

/// In turn, as the sizes go.
fn edges(shape: [usize; 2]) -> Edges {
    Edges::turn(shape[0] + shape[1])
}

fn packed<T: Bits>(b: &Matrix<'_, T>, level: Level) -> PackedMatrix<T> {
    PackedMatrix::new(b, Some(level)).expect("an available level")
}

/// Without matrix tiles, and with them where the level has them.
fn packings<T: Bits>(b: &Matrix<'_, T>, level: Level) -> Vec<PackedMatrix<T>> {
    let plain = packed(b, level);
    if level != Level::Amx {
        return vec![plain];
    }
    let tiled = plain.clone().with_tiles(Precision::Highest).expect("memory for it");
    vec![plain, tiled]
}

/// The product, checked to have written all of the view and nothing else.
fn product<A: Bits, T: Bits, O: Bits>(
    a: &Matrix<'_, A>,
    b: &PackedMatrix<T>,
    bias: Option<&[f32]>,
    lies: Arrangement,
) -> Vec<O> {
    let ([m, _], [_, n]) = (a.shape(), b.shape());
    let mut out = PoisonedOutput::<O>::within(edges([m, n]), [1, 1, m, n], lies);
    let bias = bias.map(|bias| Memory::from(edges([m, n]), bias, f32::INPUT));
    gemm_packed(a, b, bias.as_ref().map(Memory::inner), &mut out.matrix()).expect("the shapes fit");
    out.packed(format!("{m} x {n} on {}", b.level().name()))
}

/// The unit roundoff (numbers have 11 bits, and 8), and half of the smallest number.
fn rounding<T: Bits>() -> [f64; 2] {
    match T::NAME {
        "f16" => [2f64.powi(-11), 2f64.powi(-25)],
        "bf16" => [2f64.powi(-8), 0.0],
        _ => [0.0; 2],
    }
}

#[derive(Clone, Debug)]
struct Case {
    size: [usize; 3],
    lies: [Arrangement; 3],
    bias: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let size = (prop::sample::select(ROWS), prop::sample::select(COLUMNS), prop::sample::select(DEPTHS));
    let lies = [(); 3].map(|()| prop::sample::select(&LIES[..]));
    // The reference is slow.
    let size = size.prop_map(|(m, n, k)| if m * n * k > 2_000_000 { [m, n, k.min(64)] } else { [m, n, k] });
    (size, lies, any::<bool>(), any::<u64>()).prop_map(|(size, lies, bias, seed)| Case { size, lies, bias, seed })
}

fn check<A: Bits + Into<f64>, T: Bits + Into<f64>, O: Bits + Into<f64>>(case: &Case) {
    let [m, n, k] = case.size;
    let mut rng = Rng::new(case.seed);
    let a = matrix::<A>([m, k], case.lies[0], &mut rng);
    let b = matrix::<T>([k, n], case.lies[1], &mut rng);
    let bias = case.bias.then(|| rng.normals::<f32>(n, 10.0));
    let (x, y) = (a.packed(), b.packed());
    let (x, y) = (|i: usize, p: usize| x[i * k + p].into(), |p: usize, j: usize| y[p * n + j].into());
    let z = |_: usize, j: usize| bias.as_ref().map_or(0.0, |bias| f64::from(bias[j]));
    let want = reference::gemm(m, n, k, 1.0, x, y, 1.0, z);
    let size = reference::gemm(m, n, k, 1.0, |i, p| x(i, p).abs(), |p, j| y(p, j).abs(), 0.0, z);
    // On tiles the smallest product of two terms each is left out.
    let dropped = if [A::NAME, T::NAME] == ["f16"; 2] { 2f64.powi(-17) } else { 0.0 };
    for b in levels().iter().flat_map(|&level| packings(&b.matrix(), level)) {
        let level = b.level();
        assert_same_bits(&b.to_vec(), &b.clone().to_vec(), "a clone");
        let got = product::<A, T, O>(&a.matrix(), &b, bias.as_deref(), case.lies[2]);
        for (at, &got) in got.iter().enumerate() {
            let (got, want, [half_ulp, least]): (f64, f64, _) = (got.into(), want[at], rounding::<O>());
            let epsilon = f64::from(f32::EPSILON);
            let dropped = if level == Level::Amx { dropped } else { 0.0 };
            let bound =
                ((k + 2) as f64 * epsilon + dropped) * size[at] + (half_ulp * 1.01 + epsilon) * want.abs() + least;
            let [i, j] = [at / n, at % n];
            assert!((got - want).abs() <= bound, "[{i}, {j}] on {}: {got}, not {want} +- {bound:e}", level.name());
        }
    }
}

proptest! {
    #![proptest_config(cases_of_256(60))]

    #[test]
    fn equals_the_reference_f32(case in cases()) {
        check::<f32, f32, f32>(&case);
    }

    #[test]
    fn equals_the_reference_bf16(case in cases()) {
        check::<bf16, bf16, bf16>(&case);
    }

    #[test]
    fn equals_the_reference_f16(case in cases()) {
        check::<f16, f16, f16>(&case);
    }

    #[test]
    fn equals_the_reference_of_mixed_types(case in cases()) {
        check::<f32, bf16, f32>(&case);
        check::<bf16, f16, f32>(&case);
        check::<f16, f32, bf16>(&case);
        check::<f32, f32, f16>(&case);
    }
}

/// All edges of blocks at once, at sizes that threads share.
#[test]
fn large_products() {
    for lies in [[Arrangement::Bhsd; 3], [Arrangement::Bhds; 3]] {
        check::<f32, f32, f32>(&Case { size: [145, 257, 513], lies, bias: true, seed: 1 });
        check::<bf16, f16, bf16>(&Case { size: [145, 257, 513], lies, bias: true, seed: 2 });
    }
    check::<f32, bf16, f32>(&Case { size: [1, 1000, 3001], lies: [Arrangement::Bhsd; 3], bias: true, seed: 3 });
}

/// Rows alone, a few, or among others; wherever and as whatever type they lie: the same bits.
#[test]
fn bits_of_a_row_depend_on_that_row_alone() {
    fn check<T: Bits>(level: Level) {
        let mut rng = Rng::new(7);
        let b = matrix::<T>([600, 161], Arrangement::Bhds, &mut rng);
        packings(&b.matrix(), level).iter().for_each(|b| check_packed(b, &mut rng));
    }
    fn check_packed<T: Bits>(b: &PackedMatrix<T>, rng: &mut Rng) {
        let ([m, n, k], level) = ([145, 161, 600], b.level());
        let a = matrix::<bf16>([m, k], Arrangement::Bhsd, rng);
        let bias = rng.normals::<f32>(n, 1.0);
        let all = product::<bf16, T, f32>(&a.matrix(), b, Some(&bias), Arrangement::Bhsd);
        let wide: Vec<f32> = a.packed().iter().map(|x| x.to_f32()).collect();
        for lies in LIES {
            let a = PoisonedInput::new(&wide, [1, 1, m, k], lies);
            let again = product::<f32, T, f32>(&a.matrix(), b, Some(&bias), Arrangement::DimStride(2));
            assert_same_bits(&again, &all, format!("{lies:?} on {}", level.name()));
        }
        for count in [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 72, 73] {
            for first in [0, 1, m - count] {
                let rows = Matrix::contiguous(&wide[first * k..][..count * k], [count, k]).expect("a valid view");
                let some = product::<f32, T, f32>(&rows, b, Some(&bias), Arrangement::Bhsd);
                let context = format!("{count} rows from {first} on, {}", level.name());
                assert_same_bits(&some, &all[first * n..][..count * n], context);
                let rows = &a.packed()[first * k..][..count * k];
                let rows = Matrix::contiguous(rows, [count, k]).expect("a valid view");
                let some = product::<bf16, T, f32>(&rows, b, Some(&bias), Arrangement::Bhsd);
                let context = format!("{count} copied rows from {first} on, {}", level.name());
                assert_same_bits(&some, &all[first * n..][..count * n], context);
            }
        }
    }
    for &level in levels() {
        check::<f32>(level);
        check::<bf16>(level);
        check::<f16>(level);
    }
}

/// An element is the sum of chains of FMAs that the documentation says, or of products and sums where the build has no FMA.
#[test]
fn bits_are_those_of_a_sum_of_chains() {
    for &level in levels() {
        let ([m, n, k], mut rng) = ([13, 40, 600], Rng::new(8));
        let (a, b) = (rng.normals::<f32>(m * k, 1.0), rng.normals::<f32>(k * n, 1.0));
        let bias = rng.normals::<f32>(n, 1.0);
        let packed = packed(&Matrix::contiguous(&b, [k, n]).expect("a valid view"), level);
        let a_view = Matrix::contiguous(&a, [m, k]).expect("a valid view");
        let got = product::<f32, f32, f32>(&a_view, &packed, Some(&bias), Arrangement::Bhsd);
        let fused = level > Level::Portable || cfg!(any(target_feature = "fma", target_arch = "aarch64"));
        let step = |sum: f32, a: f32, b: f32| if fused { a.mul_add(b, sum) } else { sum + a * b };
        let chain = |i: usize, j: usize, from: usize, to: usize| {
            (from..to).fold(0.0, |sum, p| step(sum, a[i * k + p], b[p * n + j]))
        };
        let sum = |i: usize, j: usize| {
            let pieces = (0..k).step_by(256).map(|from| chain(i, j, from, k.min(from + 256)));
            pieces.reduce(|sum, piece| sum + piece).unwrap_or(0.0) + bias[j]
        };
        let want: Vec<f32> = (0..m * n).map(|at| sum(at / n, at % n)).collect();
        assert_same_bits(&got, &want, level.name());
    }
}

#[cfg(feature = "rayon")]
#[test]
fn bits_do_not_depend_on_threads() {
    for &level in levels() {
        for [m, n, k] in [[1, 2100, 513], [3, 1030, 600], [12, 700, 300], [160, 300, 100]] {
            let mut rng = Rng::new(9);
            let a = matrix::<f32>([m, k], Arrangement::Bhsd, &mut rng);
            let copied = PoisonedInput::new(&a.packed(), [1, 1, m, k], Arrangement::DimStride(2));
            let b = packings(&matrix::<bf16>([k, n], Arrangement::Bhsd, &mut rng).matrix(), level);
            let on = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                let products = |b: &PackedMatrix<bf16>| {
                    [&a, &copied].map(|a| product::<f32, bf16, f32>(&a.matrix(), b, None, Arrangement::RowGaps(1)))
                };
                pool.install(|| b.iter().flat_map(products).collect::<Vec<_>>())
            };
            let one = on(1);
            for threads in [2, 3, 7] {
                for (got, want) in on(threads).iter().zip(&one) {
                    assert_same_bits(got, want, format!("{threads} threads, {m} x {n} x {k}, {}", level.name()));
                }
            }
        }
    }
}

#[test]
fn rows_may_be_one_row() {
    let (row, b) = ([0.5f32, -2.0, 3.0], matrix::<f32>([3, 50], Arrangement::Bhsd, &mut Rng::new(10)));
    for b in levels().iter().flat_map(|&level| packings(&b.matrix(), level)) {
        let level = b.level();
        let one = Matrix::contiguous(&row, [1, 3]).expect("a valid view");
        let one = product::<f32, f32, f32>(&one, &b, None, Arrangement::Bhsd);
        let same = Matrix::with_strides(&row, [100, 3], [0, 1]).expect("a valid view");
        for got in product::<f32, f32, f32>(&same, &b, None, Arrangement::Bhds).chunks(50) {
            assert_same_bits(got, &one, level.name());
        }
        // One element is all of A.
        let same = Matrix::with_strides(&row, [20, 3], [0, 0]).expect("a valid view");
        let ones = product::<f32, f32, f32>(&same, &b, None, Arrangement::Bhsd);
        let want: Vec<f32> = (0..50).map(|j| (0..3).map(|p| 0.5 * b.to_vec()[p * 50 + j]).sum()).collect();
        support::assert_all_close(&ones[..50], &want, 1e-6, 1e-6, level.name());
        assert_same_bits(&ones[19 * 50..], &ones[..50], level.name());
    }
}

#[test]
fn without_depth_there_is_the_bias() {
    let empty: [f32; 0] = [];
    for &level in levels() {
        for (m, n) in [(1, 1), (3, 70), (100, 130)] {
            let a = Matrix::with_strides(&empty, [m, 0], [usize::MAX; 2]).expect("a valid view");
            let b = packings(&Matrix::with_strides(&empty, [0, n], [usize::MAX; 2]).expect("a valid view"), level);
            let bias = Rng::new(11).normals::<f32>(n, 1.0);
            for b in b {
                assert!(b.to_vec().is_empty());
                for got in product::<f32, f32, f32>(&a, &b, Some(&bias), Arrangement::RowGaps(3)).chunks(n) {
                    assert_same_bits(got, &bias, level.name());
                }
                assert!(product::<f32, f32, f16>(&a, &b, None, Arrangement::Bhds).iter().all(|x| x.to_bits() == 0));
            }
        }
        // Rows or columns without end, none of which exists.
        let endless = Matrix::with_strides(&empty, [0, usize::MAX], [1; 2]).expect("a valid view");
        let b = packed(&endless, level);
        assert_eq!((b.shape(), b.to_vec().len()), ([0, usize::MAX], 0));
        let mut none: [f32; 0] = [];
        let a = Matrix::with_strides(&empty, [usize::MAX, 0], [1; 2]).expect("a valid view");
        let no_columns = packed(&Matrix::with_strides(&empty, [0, 0], [1; 2]).expect("a valid view"), level);
        let mut out = MatrixMut::with_strides(&mut none, [usize::MAX, 0], [1; 2]).expect("a valid view");
        gemm_packed(&a, &no_columns, Some(&[]), &mut out).expect("the shapes fit");
        let a = Matrix::with_strides(&empty, [0, 0], [1; 2]).expect("a valid view");
        let mut out = MatrixMut::with_strides(&mut none, [0, usize::MAX], [1; 2]).expect("a valid view");
        gemm_packed(&a, &b, None, &mut out).expect("the shapes fit");
    }
}

#[test]
fn nan_and_infinity_reach_only_what_they_meet() {
    for &level in levels() {
        for (m, n, k) in [(1, 40, 300), (2, 9, 5), (13, 33, 300), (80, 130, 20)] {
            let mut rng = Rng::new(12);
            let mut a = rng.normals::<f32>(m * k, 1.0);
            let mut b: Vec<f32> = rng.normals::<f32>(k * n, 1.0).iter().map(|x| x.abs() + 0.5).collect();
            a[(m - 1) * k + k / 2] = f32::INFINITY;
            b[(k - 1) * n + n - 1] = f32::NAN;
            let packings = packings(&Matrix::contiguous(&b, [k, n]).expect("a valid view"), level);
            let a = Matrix::contiguous(&a, [m, k]).expect("a valid view");
            for b in packings {
                let out = product::<f32, f32, f32>(&a, &b, None, Arrangement::Bhsd);
                for (at, x) in out.iter().enumerate() {
                    let ok = match (at / n == m - 1, at % n == n - 1) {
                        (_, true) => x.is_nan(),
                        (true, false) => *x == f32::INFINITY,
                        (false, false) => x.is_finite(),
                    };
                    assert!(ok, "[{}, {}] is {x}, {m} x {n} x {k} on {}", at / n, at % n, level.name());
                }
                // 0 * NaN is NaN.
                let zeros = vec![0.0f32; k];
                let zeros = Matrix::contiguous(&zeros, [1, k]).expect("a valid view");
                let out = product::<f32, f32, f32>(&zeros, &b, None, Arrangement::Bhsd);
                assert!(out[n - 1].is_nan() && out[..n - 1].iter().all(|&x| x == 0.0));
            }
        }
    }
}

/// Magnitudes that terms of bf16 cannot stand for: rows of A, and panels of B, that have one give the bits that they give without
/// tiles, and all others what they give without such neighbours.
#[test]
fn what_is_out_of_the_range_of_tiles_goes_without_them() {
    let ([m, n, k], mut rng) = ([70, 100, 90], Rng::new(14));
    let (mut a, mut b) = (rng.normals::<f32>(m * k, 1.0), rng.normals::<f32>(k * n, 1.0));
    let before = (a.clone(), b.clone());
    for (row, x) in [(3, 1e-40f32), (33, f32::MAX), (50, -1e30), (69, f32::NEG_INFINITY)] {
        a[row * k + row % 7] = x;
    }
    b[5 * n + 40] = f32::MIN_POSITIVE;
    for &level in levels().iter().filter(|&&level| level == Level::Amx) {
        let run = |a: &[f32], b: &[f32], tiled: bool| {
            let b = packings(&Matrix::contiguous(b, [k, n]).expect("a valid view"), level).remove(usize::from(tiled));
            product::<f32, f32, f32>(&Matrix::contiguous(a, [m, k]).expect("a valid view"), &b, None, Arrangement::Bhsd)
        };
        let (tiled, plain, clean) = (run(&a, &b, true), run(&a, &b, false), run(&before.0, &before.1, true));
        // The panel that has column 40: two vectors, which are shorter where tiles are imitated.
        let panel = if tiled[48..64] == plain[48..64] { 32..64 } else { 32..48 };
        assert!(tiled[..32] != plain[..32], "tiles are not used");
        for (at, x) in tiled.iter().enumerate() {
            let (row, column) = (at / n, at % n);
            let special = [3, 33, 50, 69].contains(&row) || panel.contains(&column);
            let want = if special { plain[at] } else { clean[at] };
            assert!(x.to_bits() == want.to_bits() || x.is_nan() && want.is_nan(), "[{row}, {column}]: {x} for {want}");
        }
    }
}

#[test]
fn packed_values_are_those_given() {
    fn check<T: Bits>(bits: impl Fn(usize) -> T) {
        for &level in levels() {
            for (k, n) in [(0, 0), (0, 5), (5, 0), (1, 1), (3, 7), (20, 16), (4, 33), (2, 100)] {
                let values: Vec<T> = (0..k * n).map(&bits).collect();
                for lies in LIES {
                    let b = PoisonedInput::within(edges([k, n]), &values, [1, 1, k, n], lies);
                    let packed = packed(&b.matrix(), level);
                    assert_eq!((packed.shape(), packed.level()), ([k, n], level));
                    assert_same_bits(&packed.to_vec(), &values, format!("{k} x {n} {lies:?} on {}", level.name()));
                    assert_same_bits(&packed.clone().to_vec(), &values, "a clone");
                }
            }
        }
    }
    // NaN of many kinds among them.
    check(|i| f32::from_bits((i as u32).wrapping_mul(0x9E37_79B9) | if i % 3 == 0 { 0x7f80_0000 } else { 0 }));
    check(|i| f16::from_bits((i as u16).wrapping_mul(0x9E37) | if i % 3 == 0 { 0x7c00 } else { 0 }));
    check(|i| bf16::from_bits((i as u16).wrapping_mul(0x9E37) | if i % 3 == 0 { 0x7f80 } else { 0 }));
    let b = PackedMatrix::new(&Matrix::contiguous(&[1.0f32; 6], [2, 3]).expect("a valid view"), None);
    let b = b.expect("the best level is available");
    assert_eq!(b.level(), Level::detect());
    let text = format!("{b:?}");
    assert!(text.contains("[2, 3]") && text.contains("f32"), "{text}");
}

#[test]
fn bad_calls_are_errors_that_write_nothing() {
    let ones = [1.0f32; 60];
    let view = |shape: [usize; 2]| Matrix::with_strides(&ones, shape, [shape[1], 1]).expect("a valid view");
    let b = PackedMatrix::new(&view([3, 5]), None).expect("an available level");
    let try_call = |a: [usize; 2], bias: Option<usize>, out: [usize; 2]| {
        let mut poisoned = PoisonedOutput::<bf16>::new([1, 1, out[0], out[1]], Arrangement::Bhsd);
        let error = gemm_packed(&view(a), &b, bias.map(|len| &ones[..len]), &mut poisoned.matrix()).unwrap_err();
        poisoned.assert_untouched(&error);
        error
    };
    let shape = |operand, axis, expected, actual| Error::Shape { operand, axis, expected, actual };
    assert_eq!(try_call([2, 4], None, [2, 5]), shape("a", "column", 3, 4));
    assert_eq!(try_call([2, 0], None, [2, 5]), shape("a", "column", 3, 0));
    assert_eq!(try_call([2, 3], None, [3, 5]), shape("out", "row", 2, 3));
    assert_eq!(try_call([0, 3], None, [3, 5]), shape("out", "row", 0, 3));
    assert_eq!(try_call([2, 3], Some(5), [2, 4]), shape("out", "column", 5, 4));
    let length = |actual| Error::Length { operand: "bias", expected: 5, actual };
    assert_eq!(try_call([2, 3], Some(4), [2, 5]), length(4));
    assert_eq!(try_call([2, 3], Some(6), [2, 5]), length(6));
    assert_eq!(try_call([0, 3], Some(0), [0, 5]), length(0));

    for level in [Level::Portable, Level::Avx2, Level::Avx512] {
        let result = PackedMatrix::new(&view([3, 5]), Some(level)).map(|b| b.level());
        match Level::available().contains(&level) {
            true => assert_eq!(result, Ok(level)),
            false => assert!(matches!(result, Err(Error::LevelUnavailable { .. })), "{result:?}"),
        }
    }
    for shape in [[1 << 45, 1], [1 << 40, 1 << 30], [1, usize::MAX], [usize::MAX, 1]] {
        let b = Matrix::with_strides(&ones, shape, [0, 0]).expect("a valid view");
        let error = PackedMatrix::new(&b, None).unwrap_err();
        assert!(matches!(error, Error::Memory { bytes } if bytes >= 1 << 50), "{error:?}");
    }
}

/// Copies of A are on the stack: the documentation says how much.
#[test]
fn a_small_stack_is_enough() {
    let run = || {
        for &level in levels() {
            let mut rng = Rng::new(13);
            let a = matrix::<bf16>([100, 600], Arrangement::DimStride(2), &mut rng);
            let b = packed(&matrix::<f16>([600, 200], Arrangement::Bhsd, &mut rng).matrix(), level);
            assert_eq!(product::<bf16, f16, bf16>(&a.matrix(), &b, None, Arrangement::Bhds).len(), 20_000);
        }
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(run).expect("a thread").join().expect("no panic");
}
