//! The projections of queries, keys and values: packed side by side, so that one product makes all that one input needs.

use core::ops::Range;

use super::config::Sizes;
use super::weights::Weights;
use crate::gemm::{PackedMatrix, gemm_packed_columns};
use crate::workspace::grow;
use crate::{Element, Matrix, MatrixMut, Result};

/// Columns at which a part may begin: a multiple of the width of every level's panels.
const ALIGN: usize = 32;

/// Queries, keys or values, among the columns of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// First column of a product of all parts.
    first: usize,
}

impl Part {
    pub(super) fn width(&self) -> usize {
        self.heads * self.dim
    }

    fn end(&self) -> usize {
        self.first + self.width()
    }
}

/// Packed weights (inputs, columns): of all parts, if their inputs are of one width, else of each.
#[derive(Clone, Debug)]
enum Packs<T: Element> {
    Joint(PackedMatrix<T>),
    Separate([PackedMatrix<T>; 3]),
}

/// The three projections. Parts are 0 (queries), 1 (keys), 2 (values).
#[derive(Clone, Debug)]
pub(super) struct Projections<T: Element> {
    packs: Packs<T>,
    pub(super) parts: [Part; 3],
    /// Bias of every column of all parts; 0 where there is none.
    bias: Vec<f32>,
    has_bias: [bool; 3],
}

impl<T: Element> Projections<T> {
    /// `weights` fit `sizes`; `pack` packs the transpose of a matrix.
    pub(super) fn new(
        sizes: &Sizes,
        weights: &Weights<'_, T>,
        pack: impl Fn(Matrix<'_, T>) -> Result<PackedMatrix<T>>,
    ) -> Result<Self> {
        let Sizes { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = *sizes;
        let mut first = 0;
        let parts =
            [(num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim_v)].map(|(heads, dim)| {
                let part = Part { heads, dim, first };
                first = part.end().next_multiple_of(ALIGN);
                part
            });
        let end = parts[2].end();
        let mut bias = Vec::new();
        grow(&mut bias, end, f32::default)?;
        for (part, from) in parts.iter().zip(weights.biases) {
            for (x, from) in bias[part.first..].iter_mut().zip(from.unwrap_or_default()) {
                *x = from.to_f32();
            }
        }
        let matrices = [weights.query, weights.key, weights.value];
        let inputs = matrices.map(|matrix| matrix.shape()[1]);
        let packs = if inputs == [inputs[0]; 3] {
            let mut joint = Vec::new();
            grow(&mut joint, end.saturating_mul(inputs[0]), T::default)?;
            for (part, matrix) in parts.iter().zip(matrices) {
                let rows = &mut joint[part.first * inputs[0]..][..part.width() * inputs[0]];
                for (i, x) in rows.iter_mut().enumerate() {
                    *x = matrix.get([i / inputs[0], i % inputs[0]]).unwrap_or_default();
                }
            }
            Packs::Joint(pack(Matrix::contiguous(&joint, [end, inputs[0]])?)?)
        } else {
            Packs::Separate([pack(weights.query)?, pack(weights.key)?, pack(weights.value)?])
        };
        Ok(Self { packs, parts, bias, has_bias: [0, 1, 2].map(|part| weights.biases[part].is_some()) })
    }

    /// Whether one product can make several parts.
    pub(super) fn is_joint(&self) -> bool {
        matches!(self.packs, Packs::Joint(_))
    }

    /// Columns of a product of some parts, which are one if the projections are not joint.
    pub(super) fn columns(&self, parts: Range<usize>) -> usize {
        self.parts[parts.end - 1].end() - self.parts[parts.start].first
    }

    /// First column of a part in a product of the parts from `from` on.
    pub(super) fn offset(&self, part: usize, from: usize) -> usize {
        self.parts[part].first - self.parts[from].first
    }

    /// Projects rows of an input, which are of sequences with `many` tokens or not. `out` has [`columns`](Self::columns).
    pub(super) fn project<A: Element>(
        &self,
        x: &Matrix<'_, A>,
        parts: Range<usize>,
        many: bool,
        out: &mut MatrixMut<'_, f32>,
    ) -> Result<()> {
        let first = self.parts[parts.start].first;
        let columns = first..first + self.columns(parts.clone());
        let bias = Some(&self.bias[columns.clone()]);
        match &self.packs {
            Packs::Joint(pack) => gemm_packed_columns(x, pack, columns, many, bias, out),
            Packs::Separate(packs) => gemm_packed_columns(x, &packs[parts.start], 0..columns.len(), many, bias, out),
        }
    }

    /// Weight (outputs, inputs) and bias of a part, as they were given.
    pub(super) fn part(&self, part: usize) -> (Vec<T>, Option<Vec<T>>) {
        let Part { first, .. } = self.parts[part];
        let width = self.parts[part].width();
        let (pack, from) = match &self.packs {
            Packs::Joint(pack) => (pack, first),
            Packs::Separate(packs) => (&packs[part], 0),
        };
        let bias = self.bias[first..][..width].iter().map(|&x| T::from_f32_nearest(x)).collect();
        (transposed(pack, from..from + width), self.has_bias[part].then_some(bias))
    }
}

/// Columns of a packed matrix as rows.
pub(super) fn transposed<T: Element>(pack: &PackedMatrix<T>, columns: Range<usize>) -> Vec<T> {
    let [inputs, width] = pack.shape();
    let rows = pack.to_vec();
    columns
        .flat_map(|column| (0..inputs).map(move |i| (i, column)))
        .map(|(i, column)| rows[i * width + column])
        .collect()
}
