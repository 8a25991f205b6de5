//! `gemm_batched` and `gemm_packed` against the naive product, on any strides: values, untouched surroundings, and errors that
//! write nothing.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use polyhead::gemm::{GemmElement, PackedMatrix, gemm_batched, gemm_packed};
use polyhead::{Level, Matrices, MatricesMut, Matrix, MatrixMut, View, reference};

/// A (batch, row, column) array: sizes come from the product unless `off` changes one.
#[derive(Arbitrary, Debug)]
struct Operand {
    /// Packed, by rows or, if `transposed`, by columns; else `strides` as they are.
    packed: bool,
    transposed: bool,
    one: bool,
    strides: [u8; 3],
    /// Rarely: an axis, and what is added to its size.
    off: (u8, u8),
}

#[derive(Arbitrary, Debug)]
struct Input {
    double: bool,
    batch: u8,
    size: [u8; 3],
    alpha: u8,
    beta: u8,
    operands: [Operand; 3],
    seed: u64,
}

const SCALARS: [f32; 6] = [0.0, 1.0, -1.0, 2.5, -0.0, 0.5];
const POISON: f32 = f32::NAN;
/// Elements of an array, at most: 3 * 40 * 40 packed, and about what strides up to 255 reach.
const LENGTH: usize = 30_000;

impl Operand {
    fn shape(&self, [batch, rows, columns]: [usize; 3], may_be_one: bool) -> [usize; 3] {
        let mut shape = [if self.one && may_be_one { 1 } else { batch }, rows, columns];
        // One in 32 has a wrong size.
        if self.off.0 < 8 {
            shape[self.off.0 as usize % 3] += self.off.1 as usize % 4;
        }
        shape
    }

    fn strides(&self, [_, rows, columns]: [usize; 3]) -> [usize; 3] {
        match (self.packed, self.transposed) {
            (true, false) => [rows * columns, columns, 1],
            (true, true) => [rows * columns, 1, rows],
            (false, _) => self.strides.map(usize::from),
        }
    }
}

fn indices([b, r, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..b).flat_map(move |i| (0..r).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
}

/// Where every element of a view lies.
fn at(index: [usize; 3], strides: [usize; 3]) -> usize {
    (0..3).map(|axis| index[axis] * strides[axis]).sum()
}

/// Values in -1..1 at the elements of the view, poison elsewhere.
fn fill<T: From<f32> + Copy>(shape: [usize; 3], strides: [usize; 3], state: &mut u64) -> Vec<T> {
    let mut data = vec![T::from(POISON); LENGTH];
    for index in indices(shape) {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if let Some(element) = data.get_mut(at(index, strides)) {
            *element = T::from((*state >> 40) as f32 / (1u64 << 23) as f32 - 1.0);
        }
    }
    data
}

fn value<T: Copy + Into<f64>>(view: &View<'_, T, 3>, item: usize, row: usize, column: usize) -> f64 {
    let item = if view.shape()[0] == 1 { 0 } else { item };
    view.get([item, row, column]).expect("inside the shape").into()
}

fn run<T: GemmElement + From<f32> + Into<f64>>(input: &Input, epsilon: f64, bits: fn(T) -> u64) {
    let batch = usize::from(input.batch % 4);
    let [m, n, k] = input.size.map(|size| usize::from(size) % 41);
    let scalar = |choice: u8| SCALARS[usize::from(choice) % SCALARS.len()];
    let (alpha, beta) = (scalar(input.alpha), scalar(input.beta));
    let [oa, ob, oc] = &input.operands;
    let shapes = [oa.shape([batch, m, k], true), ob.shape([batch, k, n], true), oc.shape([batch, m, n], false)];
    let strides = [oa.strides(shapes[0]), ob.strides(shapes[1]), oc.strides(shapes[2])];
    let mut state = input.seed;
    let [a, b, mut c]: [Vec<T>; 3] = core::array::from_fn(|i| fill(shapes[i], strides[i], &mut state));
    if beta == 0.0 {
        c.fill(T::from(POISON));
    }
    let before = c.clone();
    let (Ok(a), Ok(b)) =
        (Matrices::with_strides(&a, shapes[0], strides[0]), Matrices::with_strides(&b, shapes[1], strides[1]))
    else {
        return;
    };
    let Ok(mut view) = MatricesMut::with_strides(&mut c, shapes[2], strides[2]) else { return };
    let result = gemm_batched(T::from(alpha), &a, &b, T::from(beta), &mut view);

    let ([batch_a, m, k], [batch_b, k_b, n], [batch, m_c, n_c]) = (shapes[0], shapes[1], shapes[2]);
    let serves = |of: usize| of == 1 || of == batch;
    let fits = k == k_b && m == m_c && n == n_c && serves(batch_a) && serves(batch_b);
    assert_eq!(result.is_ok(), fits, "{result:?} for {shapes:?}");
    let mut untouched = before.iter().map(|&x| bits(x)).collect::<Vec<_>>();
    if fits {
        let old = View::<T, 3>::with_strides(&before, shapes[2], strides[2]).expect("as the output");
        let (alpha, beta) = (f64::from(alpha), f64::from(beta));
        for item in 0..batch {
            let (x, y, z) =
                (|i, p| value(&a, item, i, p), |p, j| value(&b, item, p, j), |i, j| value(&old, item, i, j));
            let want = reference::gemm(m, n, k, alpha, x, y, beta, z);
            let (ax, ay, az) = (|i, p| x(i, p).abs(), |p, j| y(p, j).abs(), |i, j| z(i, j).abs());
            let size = reference::gemm(m, n, k, alpha.abs(), ax, ay, beta.abs(), az);
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let position = at([item, i, j], strides[2]);
                let (got, want, size): (f64, _, _) = (c[position].into(), want[i * n + j], size[i * n + j]);
                let bound = (k + 4) as f64 * epsilon * size;
                assert!((got - want).abs() <= bound, "[{item}, {i}, {j}]: {got}, expected {want} within {bound:e}");
                untouched[position] = bits(c[position]);
            }
        }
    }
    assert!(c.iter().map(|&x| bits(x)).eq(untouched), "wrote outside of the view, or after an error");
}

/// The first item with B packed for some level, and a bias.
fn run_packed(input: &Input) {
    let [m, n, k] = input.size.map(|size| usize::from(size) % 41);
    let [oa, ob, oc] = &input.operands;
    let shapes = [oa.shape([1, m, k], false), ob.shape([1, k, n], false), oc.shape([1, m, n], false)];
    let strides = [oa.strides(shapes[0]), ob.strides(shapes[1]), oc.strides(shapes[2])];
    let mut state = input.seed;
    let [a, b, bias]: [Vec<f32>; 3] = core::array::from_fn(|i| fill(shapes[i], strides[i], &mut state));
    let plane = |[_, x, y]: [usize; 3]| [x, y];
    let view = |data, i: usize| Matrix::<f32>::with_strides(data, plane(shapes[i]), plane(strides[i]));
    let (Ok(a), Ok(b)) = (view(&a, 0), view(&b, 1)) else { return };
    let level = Level::available()[usize::from(input.batch) % Level::available().len()];
    let packed = PackedMatrix::new(&b, Some(level)).expect("an available level");
    let mut c = vec![POISON; LENGTH];
    let Ok(mut out) = MatrixMut::with_strides(&mut c, plane(shapes[2]), plane(strides[2])) else { return };
    // What lies outside of C's elements is NaN in `bias`, so a few of its own.
    let bias: Vec<f32> = bias.iter().take(shapes[2][2]).map(|x| if x.is_nan() { 0.5 } else { *x }).collect();
    let result = gemm_packed(&a, &packed, Some(&bias), &mut out);

    let ([m, k], [k_b, n]) = (a.shape(), b.shape());
    let fits = k == k_b && [m, n] == plane(shapes[2]);
    assert_eq!(result.is_ok(), fits, "{result:?} for {shapes:?}");
    if fits {
        let at2 = |view: &Matrix<'_, f32>, i, j| f64::from(view.get([i, j]).expect("inside the shape"));
        let (x, y, z) = (|i, p| at2(&a, i, p), |p, j| at2(&b, p, j), |_: usize, j: usize| f64::from(bias[j]));
        let want = reference::gemm(m, n, k, 1.0, x, y, 1.0, z);
        let size = reference::gemm(m, n, k, 1.0, |i, p| x(i, p).abs(), |p, j| y(p, j).abs(), 1.0, |i, j| z(i, j).abs());
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let got = core::mem::replace(&mut c[at([0, i, j], strides[2])], POISON);
            let bound = (k + 4) as f64 * f64::from(f32::EPSILON) * size[i * n + j];
            let want = want[i * n + j];
            assert!((f64::from(got) - want).abs() <= bound, "[{i}, {j}]: {got}, expected {want} within {bound:e}");
        }
    }
    assert!(c.iter().all(|x| x.to_bits() == POISON.to_bits()), "wrote outside of the view, or after an error");
}

fuzz_target!(|input: Input| {
    run_packed(&input);
    if input.double {
        run::<f64>(&input, f64::EPSILON, f64::to_bits);
    } else {
        run::<f32>(&input, f32::EPSILON.into(), |x| x.to_bits().into());
    }
});
