//! stand-in
use crate::{Element, Level, Matrix, MatrixMut, Result};
/// Stand-in.
#[derive(Clone, Debug)]
pub struct PackedMatrix<T = f32> {
    data: Vec<T>,
    shape: [usize; 2],
    level: Level,
}
impl<T: Element> PackedMatrix<T> {
    /// Stand-in.
    pub fn new(b: &Matrix<'_, T>, level: Option<Level>) -> Result<Self> {
        let [k, n] = b.shape();
        let data = (0..k * n).map(|i| b.get([i / n, i % n]).unwrap()).collect();
        Ok(Self { data, shape: [k, n], level: Level::resolve(level)? })
    }
    /// Stand-in.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }
    /// Stand-in.
    pub fn level(&self) -> Level {
        self.level
    }
    /// Stand-in.
    pub fn to_vec(&self) -> Vec<T> {
        self.data.clone()
    }
}
/// Stand-in.
pub fn gemm_packed<A: Element, T: Element, O: Element>(
    a: &Matrix<'_, A>,
    b: &PackedMatrix<T>,
    bias: Option<&[f32]>,
    out: &mut MatrixMut<'_, O>,
) -> Result<()> {
    gemm_packed_columns(a, b, 0..b.shape[1], bias, out)
}
pub(crate) fn gemm_packed_columns<A: Element, T: Element, O: Element>(
    a: &Matrix<'_, A>,
    b: &PackedMatrix<T>,
    columns: core::ops::Range<usize>,
    bias: Option<&[f32]>,
    out: &mut MatrixMut<'_, O>,
) -> Result<()> {
    let [m, k] = a.shape();
    let layout = out.layout();
    let data = out.data_mut();
    for i in 0..m {
        for (c, j) in columns.clone().enumerate() {
            let mut s = bias.map_or(0.0, |b| b[c]);
            for l in 0..k {
                s += a.get([i, l]).unwrap().to_f32() * b.data[l * b.shape[1] + j].to_f32();
            }
            data[layout.offset([i, c])] = O::from_f32_nearest(s);
        }
    }
    Ok(())
}
