//! Attention, and products with packed weights, on matrix tiles: units that multiply small bf16 matrices, with sums in `f32`.
//!
//! An `f32` is the sum of three bf16 (8 + 8 + 8 bits), so that the product of two `f32` is the sum of nine products of bf16, of which
//! the six largest are worth having (Henry, Tang and Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for
//! higher-precision computations", section III). An f16 is the sum of two, and a bf16 is one.
//!
//! ```text
//! S = K Q^T       tiles of K are rows of keys as they are; Q^T has two rows, i and i + 16 of 32, in one row of pairs
//! P = softmax(S)  queries in lanes, as on every level; two rows of probabilities, i and i + 16 of 32, become one row of pairs
//! O^T = V^T P     tiles of V^T are transposed as they are packed
//! ```
//!
//! Tiles are multiplied by a unit of their own while vectors go on. So the instructions of softmax of one tile of rows have steps of
//! products between them: of the scores of the next tile, and of the values of the one before (as FlashAttention-3 does on GPUs; Shah
//! et al. 2024, section 3.2). A processor that looks ahead by 512 instructions would not find them behind whole phases.

pub(crate) mod gemm;
mod operands;
mod output;
mod pack;
mod pass;
mod product;
mod softmax;

use crate::Precision;
use crate::element::AnySlice;

pub(super) use pass::{OnMatrix, ScoresOnMatrix};
pub(crate) use product::{Plan, Product};

/// Rows of a tile, and `f32`, or pairs of bf16, in a row of it.
pub(crate) const SIDE: usize = 16;
/// `f32`, or pairs of bf16, in a tile.
pub(crate) const TILE: usize = SIDE * SIDE;
/// Elements that are summed in one product of tiles.
pub(crate) const STEP: usize = 2 * SIDE;

/// Terms of bf16 that make one element, at the most.
pub(crate) const MAX_TERMS: usize = 3;

/// Terms that elements of a type become: as many as it has bits for, or the precision asks for.
pub(crate) fn terms(data: AnySlice<'_>, precision: Precision) -> usize {
    match (data, precision) {
        (AnySlice::Bf16(_), _) | (AnySlice::F32(_), Precision::Medium) => 1,
        (AnySlice::F16(_), _) | (AnySlice::F32(_), Precision::High) => 2,
        (AnySlice::F32(_), Precision::Highest) => MAX_TERMS,
    }
}

/// A level's matrix tiles. A value is proof that they can be used.
pub(crate) trait Matrix: Copy + Send + Sync + 'static {
    /// Runs `op` with them.
    fn run<O: MatrixOp>(self, op: O) -> O::Output;
}

/// Of levels without: no value exists.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoMatrix {}

impl Matrix for NoMatrix {
    fn run<O: MatrixOp>(self, _: O) -> O::Output {
        match self {}
    }
}

/// Work that needs matrix tiles.
pub(crate) trait MatrixOp {
    type Output;
    fn run<M: Multiply>(self, matrix: M) -> Self::Output;
}

/// Sums of products of tiles: 32 rows by one tile of columns, or two.
pub(crate) trait Multiply: Copy {
    /// While it lives, the tiles of this thread are ready. It has one set of sums.
    type Configured;

    fn configure(self) -> Self::Configured;

    /// The sums become 0.
    fn clear(self, configured: &Self::Configured);

    /// The sums become what [`store`](Self::store) has stored.
    fn load(self, configured: &Self::Configured, c: &[f32]);

    /// Adds the product of two tiles of rows, `a`, and of one tile of columns, or two, `b`.
    fn add(self, configured: &Self::Configured, a: &[f32], b: &[f32]);

    /// The sums, `[2 * SIDE][SIDE]` or `[2 * SIDE][2 * SIDE]`, as long as `c` is.
    fn store(self, configured: &Self::Configured, c: &mut [f32]);
}
