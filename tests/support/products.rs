//! Operands of products in many layouts, surrounded by NaN, and the check of a product against the reference.

use polyhead::gemm::{GemmElement, gemm};
use polyhead::{Matrices, MatricesMut, Matrix, MatrixMut, reference};

use crate::support::{Edges, Memory};

/// What the tests need of an element beyond the crate's trait.
pub(crate) trait Float: GemmElement + From<f32> + Into<f64> {
    const EPSILON: f64;
    /// A NaN that nothing else makes.
    const FOREIGN: Self;
    fn of(x: f64) -> Self;
    fn bits(self) -> u64;
}
impl Float for f32 {
    const EPSILON: f64 = f32::EPSILON as f64;
    const FOREIGN: Self = f32::from_bits(0x7fc0_1bad);
    fn of(x: f64) -> Self {
        x as f32
    }
    fn bits(self) -> u64 {
        self.to_bits().into()
    }
}
impl Float for f64 {
    const EPSILON: f64 = f64::EPSILON;
    const FOREIGN: Self = f64::from_bits(0x7ff8_0000_0000_1bad);
    fn of(x: f64) -> Self {
        x
    }
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

pub(crate) fn bits<T: Float>(data: &[T]) -> Vec<u64> {
    data.iter().map(|x| x.bits()).collect()
}

/// Reproducible values in -1..1.
pub(crate) struct Noise(pub(crate) u64);
impl Noise {
    pub(crate) fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    }
}

/// How a (batch, row, column) array lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lies {
    Packed,
    Gaps,
    Transposed,
    TransposedGaps,
    EveryOther,
    BatchInside,
    SameRows,
    SameColumns,
}
/// Those that an output may have.
pub(crate) const DISTINCT: [Lies; 6] =
    [Lies::Packed, Lies::Gaps, Lies::Transposed, Lies::TransposedGaps, Lies::EveryOther, Lies::BatchInside];
pub(crate) const ALL: [Lies; 8] = [
    Lies::Packed,
    Lies::Gaps,
    Lies::Transposed,
    Lies::TransposedGaps,
    Lies::EveryOther,
    Lies::BatchInside,
    Lies::SameRows,
    Lies::SameColumns,
];

/// An array with NaN between its elements, and edges in turn as the sizes go.
#[derive(Clone)]
pub(crate) struct Stored<T> {
    pub(crate) data: Memory<T>,
    pub(crate) shape: [usize; 3],
    pub(crate) strides: [usize; 3],
}

impl<T: Float> Stored<T> {
    pub(crate) fn new(shape: [usize; 3], lies: Lies, mut value: impl FnMut() -> f64) -> Self {
        let [b, r, c] = shape;
        let strides = match lies {
            Lies::Packed => [r * c, c, 1],
            Lies::Gaps => [r * (c + 3) + 5, c + 3, 1],
            Lies::Transposed => [r * c, 1, r],
            Lies::TransposedGaps => [c * (r + 2) + 1, 1, r + 2],
            Lies::EveryOther => [r * (2 * c + 1) + 1, 2 * c + 1, 2],
            Lies::BatchInside => [1, c * b, b],
            Lies::SameRows => [c, 0, 1],
            Lies::SameColumns => [r, 1, 0],
        };
        let reach: usize =
            shape.iter().zip(strides).map(|(&size, stride)| size.max(1).saturating_sub(1) * stride).sum();
        let len = if shape.contains(&0) { 0 } else { reach + 1 };
        let edges = Edges::turn(r + c + lies as usize);
        let mut stored = Self { data: Memory::new(edges, len, T::FOREIGN), shape, strides };
        for index in stored.indices() {
            let at = stored.at(index);
            stored.data[at] = T::of(value());
        }
        stored
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = [usize; 3]> + use<T> {
        let [b, r, c] = self.shape;
        (0..b).flat_map(move |i| (0..r).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
    }

    pub(crate) fn at(&self, index: [usize; 3]) -> usize {
        (0..3).map(|axis| index[axis] * self.strides[axis]).sum()
    }

    /// The element of an item of the batch; a batch of one serves all.
    pub(crate) fn get(&self, item: usize, row: usize, column: usize) -> f64 {
        let item = if self.shape[0] == 1 { 0 } else { item };
        self.data[self.at([item, row, column])].into()
    }

    pub(crate) fn view(&self) -> Matrices<'_, T> {
        Matrices::with_strides(&self.data, self.shape, self.strides).unwrap()
    }

    pub(crate) fn view_mut(&mut self) -> MatricesMut<'_, T> {
        MatricesMut::with_strides(&mut self.data, self.shape, self.strides).unwrap()
    }

    /// The matrix of item 0.
    pub(crate) fn matrix(&self) -> Matrix<'_, T> {
        let [_, r, c] = self.shape;
        Matrix::with_strides(&self.data, [r, c], [self.strides[1], self.strides[2]]).unwrap()
    }

    pub(crate) fn matrix_mut(&mut self) -> MatrixMut<'_, T> {
        let [_, r, c] = self.shape;
        MatrixMut::with_strides(&mut self.data, [r, c], [self.strides[1], self.strides[2]]).unwrap()
    }

    /// Elements in row-major order.
    pub(crate) fn packed(&self) -> Vec<T> {
        self.indices().map(|index| self.data[self.at(index)]).collect()
    }
}

/// Checks `c` against `alpha a b + beta before`: values within `k * EPSILON * sum |a b|`, and every other bit as before.
pub(crate) fn check<T: Float>(alpha: T, a: &Stored<T>, b: &Stored<T>, beta: T, before: &Stored<T>, c: &Stored<T>) {
    let ([batch, m, n], k) = (c.shape, a.shape[2]);
    let (alpha, beta): (f64, f64) = (alpha.into(), beta.into());
    let mut expected_bits = bits(&before.data);
    for item in 0..batch {
        let (x, y, z) = (|i, p| a.get(item, i, p), |p, j| b.get(item, p, j), |i, j| before.get(item, i, j));
        let expected = reference::gemm(m, n, k, alpha, x, y, beta, z);
        let sizes = reference::gemm(
            m,
            n,
            k,
            alpha.abs(),
            |i, p| x(i, p).abs(),
            |p, j| y(p, j).abs(),
            beta.abs(),
            |i, j| z(i, j).abs(),
        );
        for i in 0..m {
            for j in 0..n {
                let (got, want, size) = (c.get(item, i, j), expected[i * n + j], sizes[i * n + j]);
                let bound = (k + 4) as f64 * T::EPSILON * size;
                assert!((got - want).abs() <= bound, "[{item}, {i}, {j}]: {got}, expected {want} within {bound:e}");
                let at = c.at([item, i, j]);
                expected_bits[at] = c.data[at].bits();
            }
        }
    }
    assert!(expected_bits == bits(&c.data), "wrote outside of the view");
    c.data.assert_outside(|x| x.bits() == T::FOREIGN.bits(), "C");
}

/// Packed operands of noise for a single product.
pub(crate) fn operands<T: Float>(m: usize, n: usize, k: usize) -> (Stored<T>, Stored<T>, Stored<T>) {
    let mut noise = Noise((m * 31 + n * 7 + k) as u64);
    let mut make = |shape| Stored::new(shape, Lies::Packed, || noise.next());
    (make([1, m, k]), make([1, k, n]), make([1, m, n]))
}

/// Runs a single product and checks it.
pub(crate) fn run<T: Float>(alpha: f64, a: &Stored<T>, b: &Stored<T>, beta: f64, c: &Stored<T>) -> Stored<T> {
    let (alpha, beta, mut out) = (T::of(alpha), T::of(beta), c.clone());
    gemm(alpha, &a.matrix(), &b.matrix(), beta, &mut out.matrix_mut()).unwrap();
    check(alpha, a, b, beta, c, &out);
    out
}
