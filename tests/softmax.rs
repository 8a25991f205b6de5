//! Softmax, log-softmax and log-sum-exp against the reference: every level, type, layout and mask, and the cases A46 to A54.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use half::{bf16, f16};
use polyhead::softmax::{SoftmaxOptions, log_softmax, log_softmax_in_place, log_sum_exp, softmax, softmax_in_place};
use polyhead::{Error, Level, Mask, Matrix, MatrixMut, reference};
use proptest::prelude::*;
use support::{Bits, Edges, Memory, PoisonedList, Rng, assert_same_bits, cases_of_256, levels};

const NI: f32 = f32::NEG_INFINITY;
const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// Half a unit in the last place of 1.
const U: f64 = 1.0 / 16_777_216.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Softmax,
    LogSoftmax,
    LogSumExp,
}

const FORMS: [Form; 3] = [Form::Softmax, Form::LogSoftmax, Form::LogSumExp];

/// Strides of a matrix: packed, with gaps, by columns, by columns with gaps, every other element.
fn layouts([rows, columns]: [usize; 2]) -> [[usize; 2]; 5] {
    [[columns, 1], [columns + 3, 1], [1, rows], [1, rows + 2], [2 * columns + 1, 2]]
}

/// A matrix in some layout, with NaN between its elements that nothing else makes, and edges in turn as the sizes go.
struct Poisoned<T> {
    data: Memory<T>,
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<T: Bits> Poisoned<T> {
    fn new(values: &[T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        assert_eq!(values.len(), shape[0] * shape[1]);
        let last: usize = shape.iter().zip(strides).map(|(n, stride)| n.saturating_sub(1) * stride).sum();
        let len = if values.is_empty() { 0 } else { last + 1 };
        let edges = Edges::turn(shape[0] + shape[1] + strides[0]);
        let mut poisoned = Self { data: Memory::new(edges, len, T::OUTPUT), shape, strides };
        for (i, &x) in values.iter().enumerate() {
            let at = poisoned.at(i);
            poisoned.data[at] = x;
        }
        poisoned
    }

    /// Nothing written yet.
    fn blank(shape: [usize; 2], strides: [usize; 2]) -> Self {
        Self::new(&vec![T::OUTPUT; shape[0] * shape[1]], shape, strides)
    }

    fn at(&self, i: usize) -> usize {
        i / self.shape[1] * self.strides[0] + i % self.shape[1] * self.strides[1]
    }

    fn view(&self) -> Matrix<'_, T> {
        Matrix::with_strides(&self.data, self.shape, self.strides).unwrap()
    }

    fn view_mut(&mut self) -> MatrixMut<'_, T> {
        MatrixMut::with_strides(&mut self.data, self.shape, self.strides).unwrap()
    }

    /// The elements; asserts that they were written and nothing else was.
    #[track_caller]
    fn packed(mut self) -> Vec<T> {
        let places: Vec<usize> = (0..self.shape[0] * self.shape[1]).map(|i| self.at(i)).collect();
        let packed: Vec<T> = places.iter().map(|&at| core::mem::replace(&mut self.data[at], T::OUTPUT)).collect();
        assert!(packed.iter().all(|x| x.bits() != T::OUTPUT.bits()), "an element was not written");
        assert!(self.data.all().iter().all(|x| x.bits() == T::OUTPUT.bits()), "something outside the view was written");
        packed
    }
}

/// The result of a form, packed, from packed values.
fn apply<T: Bits, U: Bits>(form: Form, x: &[T], shape: [usize; 2], options: &SoftmaxOptions<'_>) -> Vec<U> {
    apply_strided(form, x, shape, [layouts(shape)[0]; 2], options)
}

fn apply_strided<T: Bits, U: Bits>(
    form: Form,
    x: &[T],
    shape: [usize; 2],
    [from, to]: [[usize; 2]; 2],
    options: &SoftmaxOptions<'_>,
) -> Vec<U> {
    let x = Poisoned::new(x, shape, from);
    let mut out = Poisoned::<U>::blank(shape, to);
    match form {
        Form::Softmax => softmax(&x.view(), out.view_mut(), options).unwrap(),
        Form::LogSoftmax => log_softmax(&x.view(), out.view_mut(), options).unwrap(),
        Form::LogSumExp => {
            let mut lse = PoisonedList::<f32>::new(Edges::turn(shape[0] + shape[1]), shape[0]);
            log_sum_exp(&x.view(), lse.slice(), options).unwrap();
            return lse.packed("lse").into_iter().map(U::from_f32_nearest).collect();
        }
    }
    out.packed()
}

fn apply_in_place<T: Bits>(form: Form, x: &[T], [shape, to]: [[usize; 2]; 2], options: &SoftmaxOptions<'_>) -> Vec<T> {
    let mut out = Poisoned::new(x, shape, to);
    match form {
        Form::Softmax => softmax_in_place(out.view_mut(), options).unwrap(),
        Form::LogSoftmax => log_softmax_in_place(out.view_mut(), options).unwrap(),
        Form::LogSumExp => unreachable!("not in place"),
    }
    out.packed()
}

/// One row of `f32`, on one level.
fn row(form: Form, level: Level, x: &[f32]) -> Vec<f32> {
    apply(form, x, [1, x.len()], &SoftmaxOptions::new().level(level))
}

/// Asserts one row of results, `seen` the mask. `rounding` is that of the output's type: relative, and absolute near 0.
///
/// In units of 2^-24, relative to a probability: `x - max` is rounded by its own size, the exponential by 2.4, a sum of
/// positive numbers by at most 22 (chains of 16, 2 and 4 additions, in `f64` from there), the reciprocal and the product by 1
/// each. Terms of the sum are off by their distance from the maximum, ln(n) + 1 on average at the most. A logarithm has
/// such errors absolutely, and those of two subtractions.
#[track_caller]
fn assert_row<T: Bits>(form: Form, x: &[f64], seen: Option<&[bool]>, actual: &[T], rounding: (f64, f64), what: &str) {
    let expected = match form {
        Form::Softmax => reference::softmax(x, seen),
        Form::LogSoftmax => reference::log_softmax(x, seen),
        Form::LogSumExp => vec![reference::log_sum_exp(x, seen)],
    };
    let lse = reference::log_sum_exp(x, seen);
    let of_sum = 30.0 + (x.len() as f64 + 1.0).ln();
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
        let distance = if form == Form::LogSumExp { lse.abs() } else { (lse - x[i]).abs() + (x.len() as f64).ln() };
        let units = (of_sum + 3.0 * distance) * U;
        let (rtol, atol) = match form {
            Form::Softmax => (units, f64::from(f32::MIN_POSITIVE)),
            _ => (0.0, units),
        };
        let tolerance = (if *e == 0.0 { atol } else { atol + rtol * e.abs() }) + rounding.0 * e.abs() + rounding.1;
        // The expected value may be too large for the type.
        let nearest = f64::from(T::from_f32_nearest(*e as f32).to_f32());
        let a = f64::from(a.to_f32());
        let close = a == nearest || (a.is_nan() && e.is_nan()) || (a - e).abs() <= tolerance;
        assert!(close, "{what} {form:?} {x:?} {seen:?}: [{i}] is {a:e} instead of {e:e}, allowed {tolerance:e}");
    }
}

fn assert_rows_f32(x: &[f32]) {
    let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
    for &level in levels() {
        FORMS.iter().for_each(|&form| assert_row(form, &wide, None, &row(form, level, x), (0.0, 0.0), level.name()));
    }
}

#[test]
fn a46_values_that_exp_got_wrong() {
    for &level in levels() {
        for x in [NAN, INF, 800.0, NI, 0.0, -0.0] {
            let lse = row(Form::LogSumExp, level, &[x])[0];
            assert!(lse == x || (lse.is_nan() && x.is_nan()), "{} {x}: {lse}", level.name());
        }
        assert_eq!(row(Form::Softmax, level, &[800.0, NI, 0.0, -0.0]), [1.0, 0.0, 0.0, 0.0]);
        assert_eq!(row(Form::Softmax, level, &[NI, 0.0, -0.0]), [0.0, 0.5, 0.5]);
        assert_eq!(row(Form::LogSoftmax, level, &[800.0, NI, 0.0]), [0.0, NI, -800.0]);
    }
}

#[test]
fn a47_exponentials_near_the_ends_of_the_range() {
    for &level in levels() {
        for x in [-87.0f32, -88.1, -90.0, -95.0, -100.0, -104.0] {
            let p = row(Form::Softmax, level, &[0.0, x])[1];
            let exact = if x < -87.33 { 0.0 } else { f64::from(x).exp() };
            assert!((f64::from(p) - exact).abs() <= 1e-6 * exact, "{} {x}: {p:e}", level.name());
            assert_eq!(row(Form::LogSoftmax, level, &[0.0, x]), [0.0, x]);
        }
        for x in [88.0f32, 88.72, 88.7229] {
            assert_eq!(row(Form::LogSumExp, level, &[x, NI]), [x]);
            assert_eq!(row(Form::Softmax, level, &[x, -x])[0], 1.0);
        }
    }
}

#[test]
fn a48_rows_of_negative_infinity_are_zero() {
    for &level in levels() {
        for len in 1..=70 {
            let x = vec![NI; len];
            assert_same_bits(&row(Form::Softmax, level, &x), &vec![0.0; len], level.name());
            assert_same_bits(&row(Form::LogSoftmax, level, &x), &x, level.name());
            assert_same_bits(&row(Form::LogSumExp, level, &x), &[NI], level.name());
        }
    }
}

#[test]
fn a49_infinity_makes_the_row_nan() {
    let mut rows = vec![vec![INF, 1.0, 2.0], vec![INF, 1.0, INF], vec![INF], vec![INF, NI]];
    for (len, at) in [(40, 0), (40, 39), (19, 18), (33, 32), (5, 4), (64, 63), (1030, 1029)] {
        rows.push((0..len).map(|i| if i == at { INF } else { 1.0 }).collect());
    }
    for x in rows {
        for &level in levels() {
            assert!(row(Form::Softmax, level, &x).iter().all(|p| p.is_nan()), "{x:?}");
            assert!(row(Form::LogSoftmax, level, &x).iter().all(|p| p.is_nan()), "{x:?}");
            assert_eq!(row(Form::LogSumExp, level, &x), [INF], "{x:?}");
        }
    }
}

#[test]
fn a50_one_nan_makes_the_row_nan() {
    let mut rows = vec![vec![3.0, NAN], vec![NAN, 3.0], vec![INF, NAN], vec![NI, NAN], vec![NAN, INF]];
    for len in (2..=40).chain([16, 1030]) {
        for at in (0..len).step_by(1 + len / 64) {
            rows.push((0..len).map(|i| if i == at { NAN } else { -1.0 }).collect());
        }
    }
    for x in rows {
        for &level in levels() {
            for form in FORMS {
                assert!(row(form, level, &x).iter().all(|p| p.is_nan()), "{} {form:?} {x:?}", level.name());
            }
        }
    }
    // max(0, -0) in both orders.
    assert_rows_f32(&[0.0, -0.0]);
    assert_rows_f32(&[-0.0, 0.0]);
}

#[test]
fn a51_rows_shorter_than_a_vector() {
    let mut rng = Rng::new(51);
    for len in 1..=65 {
        let mut x = rng.normals::<f32>(len, 3.0);
        assert_rows_f32(&x);
        for &level in levels() {
            let sum: f64 = row(Form::Softmax, level, &x).into_iter().map(f64::from).sum();
            assert!((sum - 1.0).abs() < 1e-6, "{} {len}: {sum}", level.name());
        }
        x.iter_mut().filter(|_| rng.chance(0.5)).for_each(|x| *x = NI);
        assert_rows_f32(&x);
    }
}

fn equal_logits_sum_to_one(log2_len: u32) {
    let share = (-f64::from(log2_len)).exp2();
    for &level in levels() {
        let mut x = vec![1.5f32; 1 << log2_len];
        let shape = [1, x.len()];
        softmax_in_place(MatrixMut::contiguous(&mut x, shape).unwrap(), &SoftmaxOptions::new().level(level)).unwrap();
        assert!(x.iter().all(|&p| f64::from(p) == share), "{}: {:e} instead of {share:e}", level.name(), x[0]);
    }
}

#[test]
fn a52_long_rows_sum_to_one() {
    equal_logits_sum_to_one(22);
    // 128 MB, half a second a level.
    equal_logits_sum_to_one(25);
    for &level in levels() {
        let x = vec![f16::from_f32(-3.0); 4096];
        let p: Vec<f16> = apply(Form::Softmax, &x, [1, 4096], &SoftmaxOptions::new().level(level));
        assert!(p.iter().all(|p| p.to_f32() == 1.0 / 4096.0), "{}: {}", level.name(), p[0]);
    }
}

/// Rows of a million unequal elements, to the tolerance of short ones; and the same through 16 KiB of scratch.
#[test]
fn sums_do_not_lose_bits_with_length() {
    let mut rng = Rng::new(52);
    for (len, deviation) in [(1 << 20, 0.01), (300_000, 3.0), (4097, 1.0)] {
        let x = rng.normals::<f32>(len, deviation);
        let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        for &level in levels() {
            let options = SoftmaxOptions::new().level(level);
            for form in FORMS {
                let packed: Vec<f32> = apply(form, &x, [1, len], &options);
                assert_row(form, &wide, None, &packed, (0.0, 0.0), level.name());
                let strided: Vec<f32> = apply_strided(form, &x, [1, len], [[0, 1], [0, 2]], &options);
                assert_same_bits(&strided, &packed, level.name());
            }
        }
    }
}

#[test]
fn a53_the_maximum_is_subtracted() {
    let x = [-249.87, -424.13, -460.29, 378.10, -292.61];
    for &level in levels() {
        assert_eq!(row(Form::Softmax, level, &x), [0.0, 0.0, 0.0, 1.0, 0.0]);
        // Any finite input gives finite output.
        assert_eq!(row(Form::Softmax, level, &[f32::MAX, f32::MIN, f32::MAX]), [0.5, 0.0, 0.5]);
        assert_eq!(row(Form::Softmax, level, &[f32::MIN; 4]), [0.25; 4]);
        assert_eq!(row(Form::LogSumExp, level, &[f32::MIN; 4]), [f32::MIN]);
    }
}

#[test]
fn a54_softmax_over_axis_0_into_an_output_with_gaps() {
    let x = [1.0f32, 2.0, 3.0, 3.0, 2.0, 1.0];
    let columns = Matrix::contiguous(&x, [2, 3]).unwrap().permute([1, 0]).unwrap();
    for &level in levels() {
        let mut data = [-7.0f32; 10];
        let out = MatrixMut::with_strides(&mut data, [2, 3], [5, 1]).unwrap().permute([1, 0]).unwrap();
        softmax(&columns, out, &SoftmaxOptions::new().level(level)).unwrap();
        let (low, high) = (0.119_202_92, 0.880_797_1);
        for (i, e) in [low, 0.5, high, -7.0, -7.0, high, 0.5, low, -7.0, -7.0].into_iter().enumerate() {
            assert!((data[i] - e).abs() < 1e-6, "{}: {data:?}", level.name());
        }
    }
}

/// What a property draws.
#[derive(Clone, Debug)]
struct Drawn {
    shape: [usize; 2],
    layouts: [usize; 2],
    seed: u64,
    special: bool,
    /// Axes of the mask that have size 1, and its polarity.
    mask: Option<([bool; 2], bool)>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let columns = prop_oneof![8 => 0..70usize, 2 => 70..300usize, 1 => Just(1024usize), 1 => 4090..4200usize];
    let mask = proptest::option::of((any::<[bool; 2]>(), any::<bool>()));
    (0..20usize, columns, [0..5usize, 0..5usize], any::<u64>(), any::<bool>(), mask).prop_map(
        |(rows, columns, layouts, seed, special, mask)| {
            let rows = if columns > 1000 { rows.min(2) } else { rows };
            Drawn { shape: [rows, columns], layouts, seed, special, mask }
        },
    )
}

fn check_types<T: Bits, O: Bits>(drawn: &Drawn, rounding: (f64, f64)) {
    let Drawn { shape, layouts: [from, to], seed, special, mask } = *drawn;
    let [rows, columns] = shape;
    let mut rng = Rng::new(seed);
    let mut x = rng.normals::<T>(rows * columns, [0.1, 4.0, 40.0][seed as usize % 3]);
    if special && !x.is_empty() {
        for _ in 0..=rows / 2 {
            let at = rng.below(x.len());
            x[at] = T::from_f32_nearest(rng.pick(&[NAN, INF, NI, NI, f32::MAX, f32::MIN, -1e4]));
        }
    }
    let mask_shape = mask.map_or([0; 2], |([one_row, one_column], _)| {
        [if one_row { 1 } else { rows }, if one_column { 1 } else { columns }]
    });
    let flags = rng.bools(mask_shape[0] * mask_shape[1], 0.6);
    let flags = Memory::from(Edges::turn(seed as usize % 3), &flags, true);
    let mut options = SoftmaxOptions::new();
    if let Some((_, attend)) = mask {
        let view = Matrix::contiguous(flags.inner(), mask_shape).unwrap();
        options = options.mask(if attend { Mask::attend(view) } else { Mask::ignore(view) }.unwrap());
    }
    let seen = |row: usize| -> Option<Vec<bool>> {
        let (_, attend) = mask?;
        let at = |column: usize| row % mask_shape[0].max(1) * mask_shape[1] + column % mask_shape[1].max(1);
        Some((0..columns).map(|column| flags[at(column)] == attend).collect())
    };
    let strides = [layouts(shape)[from], layouts(shape)[to]];
    for &level in levels() {
        let options = options.level(level);
        for form in FORMS {
            let out: Vec<O> = apply_strided(form, &x, shape, strides, &options);
            assert_same_bits(&out, &apply::<T, O>(form, &x, shape, &options), "strided and packed");
            if form != Form::LogSumExp {
                let same_type: Vec<T> = apply(form, &x, shape, &options);
                assert_same_bits(&apply_in_place(form, &x, [shape, strides[1]], &options), &same_type, "in place");
            }
            let width = if form == Form::LogSumExp { 1 } else { columns };
            for row in 0..rows {
                let wide: Vec<f64> = x[row * columns..][..columns].iter().map(|x| x.to_f32().into()).collect();
                let what = format!("{} {} {}", level.name(), T::NAME, O::NAME);
                assert_row(form, &wide, seen(row).as_deref(), &out[row * width..][..width], rounding, &what);
            }
        }
    }
}

proptest! {
    #![proptest_config(cases_of_256(200))]

    #[test]
    fn f32_is_close_to_the_reference(drawn in drawn()) {
        check_types::<f32, f32>(&drawn, (0.0, 0.0));
    }

    #[test]
    fn other_types_are_close_to_the_reference(drawn in drawn()) {
        // Half a unit in the last place, and of the smallest subnormal.
        let (of_f16, of_bf16) = ((f64::exp2(-11.0), f64::exp2(-25.0)), (f64::exp2(-8.0), f64::exp2(-134.0)));
        check_types::<f16, f16>(&drawn, of_f16);
        check_types::<bf16, bf16>(&drawn, of_bf16);
        check_types::<f16, f32>(&drawn, (0.0, 0.0));
    }
}

#[test]
fn hidden_entries_are_not_read() {
    let (shape, mut rng) = ([5, 37], Rng::new(7));
    let x = rng.normals::<f32>(5 * 37, 2.0);
    let flags = rng.bools(5 * 37, 0.5);
    // A mask by columns.
    let mask = Mask::ignore(Matrix::with_strides(&flags, shape, [1, 5]).unwrap()).unwrap();
    let is_hidden = |i: usize| flags[i / 37 + i % 37 * 5];
    for &level in levels() {
        let options = SoftmaxOptions::new().mask(mask).level(level);
        for form in FORMS {
            let expected: Vec<f32> = apply(form, &x, shape, &options);
            for hidden in [NAN, INF, NI, f32::MAX] {
                let x: Vec<f32> = (0..x.len()).map(|i| if is_hidden(i) { hidden } else { x[i] }).collect();
                assert_same_bits(&apply::<f32, f32>(form, &x, shape, &options), &expected, hidden);
            }
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn bits_do_not_depend_on_threads() {
    let mut rng = Rng::new(8);
    for shape in [[1, 100_000], [3, 50_000], [200, 700], [9000, 16]] {
        let x = rng.normals::<f32>(shape[0] * shape[1], 3.0);
        let strides = [layouts(shape)[0], layouts(shape)[3]];
        let run = |form: Form, threads: usize| -> Vec<f32> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| apply_strided(form, &x, shape, strides, &SoftmaxOptions::new()))
        };
        for form in FORMS {
            let expected = run(form, 1);
            (2..=4).for_each(|threads| assert_same_bits(&run(form, threads), &expected, threads));
        }
        // A row alone has the bits that it has among others.
        let all = run(Form::Softmax, 2);
        for (x, expected) in x.chunks(shape[1]).zip(all.chunks(shape[1])).take(20) {
            let alone: Vec<f32> = apply(Form::Softmax, x, [1, shape[1]], &SoftmaxOptions::new());
            assert_same_bits(&alone, expected, "alone");
        }
    }
}

#[test]
fn empty_and_broadcast_matrices() {
    let options = SoftmaxOptions::new();
    for shape in [[0, 3], [3, 0], [0, 0]] {
        assert!(apply::<f32, f32>(Form::Softmax, &[], shape, &options).is_empty());
        assert_eq!(apply::<f32, f32>(Form::LogSumExp, &[], shape, &options), vec![NI; shape[0]]);
    }
    let nothing = Matrix::<f32>::with_strides(&[], [usize::MAX, 0], [0, 0]).unwrap();
    softmax(&nothing, MatrixMut::<f32>::with_strides(&mut [], [usize::MAX, 0], [0, 0]).unwrap(), &options).unwrap();
    let mut lse = [0.0; 2];
    let nothing = Matrix::<f32>::with_strides(&[], [2, 0], [usize::MAX, 1]).unwrap();
    let mask = Mask::attend(Matrix::with_strides(&[], [2, 0], [9, 9]).unwrap()).unwrap();
    log_sum_exp(&nothing, &mut lse, &options.mask(mask)).unwrap();
    assert_eq!(lse, [NI; 2]);
    // One row four times, and one element for all.
    let mut out = [0.0f32; 8];
    for strides in [[0, 1], [0, 0]] {
        let x = Matrix::with_strides(&[2.0f32, 2.0], [4, 2], strides).unwrap();
        softmax(&x, MatrixMut::contiguous(&mut out, [4, 2]).unwrap(), &options).unwrap();
        assert_eq!(out, [0.5; 8]);
    }
}

#[test]
fn errors_name_the_operand_and_write_nothing() {
    let (x, mut out, flags) = ([0.0f32; 6], [7.0f32; 8], [true; 8]);
    let x = Matrix::contiguous(&x, [2, 3]).unwrap();
    let plain = SoftmaxOptions::new();
    let shape = |operand, axis, expected, actual| Err(Error::Shape { operand, axis, expected, actual });
    for f in [softmax, log_softmax] {
        let mut run = |shape: [usize; 2], options: SoftmaxOptions<'_>| {
            f(&x, MatrixMut::contiguous(&mut out[..shape[0] * shape[1]], shape).unwrap(), &options)
        };
        assert_eq!(run([2, 4], plain), shape("out", "column", 3, 4));
        assert_eq!(run([1, 3], plain), shape("out", "row", 2, 1));
        let mask = |shape: [usize; 2]| {
            plain.mask(Mask::attend(Matrix::contiguous(&flags[..shape[0] * shape[1]], shape).unwrap()).unwrap())
        };
        assert_eq!(run([2, 3], mask([2, 4])), shape("mask", "column", 3, 4));
        assert_eq!(run([2, 3], mask([0, 3])), shape("mask", "row", 2, 0));
        let heads = polyhead::View::contiguous(&flags[..6], [2, 1, 3]).unwrap();
        assert_eq!(run([2, 3], plain.mask(Mask::attend(heads).unwrap())), shape("mask", "heads", 1, 2));
    }
    let wrong = log_sum_exp(&x, &mut out[..3], &plain);
    assert_eq!(wrong, Err(Error::Length { operand: "out", expected: 2, actual: 3 }));
    if let Some(&level) = [Level::Avx2, Level::Avx512].iter().find(|level| !Level::available().contains(level)) {
        let result = log_sum_exp(&x, &mut out[..2], &plain.level(level));
        assert!(matches!(result, Err(Error::LevelUnavailable { .. })), "{result:?}");
    }
    assert_eq!(out, [7.0; 8]);
}
