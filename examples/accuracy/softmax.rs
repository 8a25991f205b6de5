//! Softmax of a case: in `f64`, naively in `f32`, and by the kernels of each level.

use polyhead::softmax::{SoftmaxOptions, softmax};
use polyhead::{Element, Level, Matrix, MatrixMut, reference};

use crate::Result;
use crate::cases::Case;
use crate::errors::Errors;
use crate::inputs::{Dtype, Inputs};
use crate::row::{Figure, Measured, allowed, narrow, widen, with_type};

struct Softmax {
    shape: [usize; 2],
    x: Vec<f32>,
}

pub(crate) fn measure(case: &Case, dtype: Dtype, levels: &[Level]) -> Result<Measured> {
    let shape = case.shape::<2>()?;
    let [rows, columns] = shape;
    let mut inputs = Inputs::new(&case.path, dtype);
    let softmax = Softmax { shape, x: inputs.operand("x", case.holds("x")?, rows * columns, [columns, 1]) };
    let truth = softmax.truth();
    let errors = |p: &[f32]| Errors::of_probabilities(p, &truth, columns, dtype.smallest_normal());
    let naive = errors(&softmax.naive(dtype));
    let mut ours = Vec::new();
    for &level in levels {
        let errors = errors(&with_type!(dtype, softmax, run(level))?);
        ours.push(Figure { column: level.name().into(), errors, allowed: allowed(naive, 2.0, dtype) });
    }
    Ok(Measured { checksum: inputs.checksum(), naive, ours })
}

impl Softmax {
    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.x.chunks_exact(self.shape[1])
    }

    fn truth(&self) -> Vec<f64> {
        let wide = |row: &[f32]| row.iter().map(|&x| x.into()).collect::<Vec<f64>>();
        self.rows().flat_map(|row| reference::softmax(&wide(row), None)).collect()
    }

    fn run<T: Element>(&self, level: Level) -> polyhead::Result<Vec<f32>> {
        let (x, mut out) = (narrow::<T>(&self.x), vec![T::default(); self.x.len()]);
        let options = SoftmaxOptions::new().level(level);
        softmax(&Matrix::contiguous(&x, self.shape)?, MatrixMut::contiguous(&mut out, self.shape)?, &options)?;
        Ok(widen(out))
    }

    /// As one writes it at first: `f32` throughout, a sum in order, one rounding to the type in the end.
    fn naive(&self, dtype: Dtype) -> Vec<f32> {
        let probabilities = |row: &[f32]| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let p: Vec<f32> = row.iter().map(|x| (x - max).exp()).collect();
            let sum = p.iter().fold(0.0f32, |sum, p| sum + p);
            p.into_iter().map(move |p| dtype.round(p / sum))
        };
        self.rows().flat_map(probabilities).collect()
    }
}
