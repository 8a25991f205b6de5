//! Products of a case: in `f64`, naively in `f32`, by `gemm` (`f32`, no level) and by `gemm_packed` on each level.

use polyhead::gemm::{PackedMatrix, gemm, gemm_packed};
use polyhead::{Element, Level, Matrix, MatrixMut, Precision, reference};

use crate::Result;
use crate::cases::Case;
use crate::errors::Errors;
use crate::inputs::{Dtype, Inputs};
use crate::row::{Figure, Measured, allowed, allowed_high, narrow, widen, with_type};

struct Product {
    /// m, n, k.
    shape: [usize; 3],
    a: Vec<f32>,
    b: Vec<f32>,
}

pub(crate) fn measure(case: &Case, dtype: Dtype, levels: &[Level]) -> Result<Measured> {
    let shape = case.shape::<3>()?;
    let [m, n, k] = shape;
    let mut inputs = Inputs::new(&case.path, dtype);
    let product = Product {
        shape,
        a: inputs.operand("a", case.holds("a")?, m * k, [m, k]),
        b: inputs.operand("b", case.holds("b")?, k * n, [k, n]),
    };
    let truth = product.truth();
    let errors = |c: &[f32]| Errors::relative_to_largest(c, &truth);
    let naive = errors(&product.naive(dtype));
    let figure = |column: &str, c: Vec<f32>, allowed| {
        let (column, errors) = (column.to_string(), errors(&c));
        Figure { column, errors, allowed }
    };
    let mut ours = Vec::new();
    for &level in levels {
        ours.push(figure(level.name(), with_type!(dtype, product, packed(level, None))?, allowed(naive, 2.0, dtype)));
        let precisions: &[Precision] = match level {
            Level::Amx => &[Precision::Highest, Precision::High, Precision::Medium],
            _ => &[],
        };
        let mut last = None;
        for &precision in precisions {
            let c = with_type!(dtype, product, packed(level, Some(precision)))?;
            if last.as_ref() == Some(&c) {
                continue;
            }
            let (name, allowed) = match precision {
                Precision::Medium => ("medium", allowed(errors(&product.rounded_to_bf16().naive(dtype)), 2.0, dtype)),
                Precision::High => ("high", allowed_high(naive, dtype)),
                Precision::Highest => ("highest", allowed(naive, 2.0, dtype)),
            };
            ours.push(figure(&format!("{} tiles {name}", level.name()), c.clone(), allowed));
            last = Some(c);
        }
    }
    if dtype == Dtype::F32 {
        ours.push(figure("gemm", product.gemm()?, allowed(naive, 2.0, dtype)));
    }
    Ok(Measured { checksum: inputs.checksum(), naive, ours })
}

impl Product {
    fn truth(&self) -> Vec<f64> {
        let [m, n, k] = self.shape;
        let a = |i: usize, x: usize| f64::from(self.a[i * k + x]);
        reference::gemm(m, n, k, 1.0, a, |x, j| f64::from(self.b[x * n + j]), 0.0, |_, _| 0.0)
    }

    fn gemm(&self) -> polyhead::Result<Vec<f32>> {
        let [m, n, k] = self.shape;
        let mut c = vec![f32::NAN; m * n];
        let (a, b) = (Matrix::contiguous(&self.a, [m, k])?, Matrix::contiguous(&self.b, [k, n])?);
        gemm(1.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut c, [m, n])?)?;
        Ok(c)
    }

    /// On matrix tiles with a precision, where the level has them.
    fn packed<T: Element>(&self, level: Level, precision: Option<Precision>) -> polyhead::Result<Vec<f32>> {
        let [m, n, k] = self.shape;
        let (a, b, mut c) = (narrow::<T>(&self.a), narrow::<T>(&self.b), vec![T::default(); m * n]);
        let mut b = PackedMatrix::new(&Matrix::contiguous(&b, [k, n])?, Some(level))?;
        if let Some(precision) = precision {
            b = b.with_tiles(precision)?;
        }
        gemm_packed(&Matrix::contiguous(&a, [m, k])?, &b, None, &mut MatrixMut::contiguous(&mut c, [m, n])?)?;
        Ok(widen(c))
    }

    fn rounded_to_bf16(&self) -> Self {
        let round = |data: &[f32]| data.iter().map(|&x| Dtype::Bf16.round(x)).collect();
        Self { shape: self.shape, a: round(&self.a), b: round(&self.b) }
    }

    /// Dot products in order, in `f32`, one rounding to the type in the end.
    fn naive(&self, dtype: Dtype) -> Vec<f32> {
        let [_, n, k] = self.shape;
        let dot = |a: &[f32], j: usize| a.iter().enumerate().fold(0.0f32, |sum, (x, a)| sum + a * self.b[x * n + j]);
        self.a.chunks_exact(k).flat_map(|a| (0..n).map(move |j| dtype.round(dot(a, j)))).collect()
    }
}
