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

pub(crate) mod gemm;
mod pack;
mod pass;
mod softmax;

use crate::Precision;
use crate::element::AnySlice;

pub(super) use pass::{OnMatrix, ScoresOnMatrix};

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

/// Products of tiles.
pub(crate) trait Multiply: Copy {
    /// While it lives, the tiles of this thread are ready.
    type Configured;

    fn configure(self) -> Self::Configured;

    /// A product of two tiles of rows by `NB` tiles of columns, which is 1 or 2.
    fn product<const NB: usize>(self, configured: &Self::Configured, op: Product<'_>);

    /// The same for so many columns: one tile of them, or two.
    fn product_of(self, configured: &Self::Configured, columns: usize, op: Product<'_>) {
        match columns / SIDE {
            1 => self.product::<1>(configured, op),
            _ => self.product::<2>(configured, op),
        }
    }
}

/// `c = sum of a_i b_j` over some terms of `a` and `b` and all steps; what `c` held is overwritten.
pub(crate) struct Product<'a> {
    /// Of `a` and of `b`.
    pub(crate) terms: [usize; 2],
    /// Steps, each of [`STEP`] elements; at least one.
    pub(crate) depth: usize,
    /// `[terms][depth][2]` tiles of `[row][pair]`, from term to term `a_term` floats.
    pub(crate) a: &'a [f32],
    pub(crate) a_term: usize,
    /// `[terms][depth][NB]` tiles of `[pair][column]`, from term to term `b_term` floats.
    pub(crate) b: &'a [f32],
    pub(crate) b_term: usize,
    /// `[2 * SIDE][NB * SIDE]`.
    pub(crate) c: &'a mut [f32],
}

impl Product<'_> {
    /// Panics if a tile is not within its slice.
    #[inline(always)]
    pub(crate) fn check<const NB: usize>(&self) {
        let spans = |len: usize, terms: usize, term: usize, tiles: usize| {
            let last = (terms - 1).checked_mul(term);
            let tiles = self.depth.checked_mul(tiles * TILE);
            last.zip(tiles).and_then(|(last, tiles)| last.checked_add(tiles)).is_some_and(|end| end <= len)
        };
        let [a, b] = self.terms;
        assert!((1..=MAX_TERMS).contains(&a) && (1..=MAX_TERMS).contains(&b));
        assert!(self.depth > 0 && (1..=2).contains(&NB));
        assert!(spans(self.a.len(), a, self.a_term, 2) && spans(self.b.len(), b, self.b_term, NB));
        assert!(self.c.len() >= 2 * SIDE * NB * SIDE);
    }
}

/// The products of terms that are summed, smallest first, so that few bits are lost: at most [`MAX_PRODUCTS`].
#[inline(always)]
pub(crate) fn products([a, b]: [usize; 2]) -> impl Iterator<Item = [usize; 2]> {
    let all: [_; MAX_PRODUCTS] = [[2, 0], [1, 1], [0, 2], [1, 0], [0, 1], [0, 0]];
    all.into_iter().filter(move |&[i, j]| i < a && j < b && i + j < a.max(b))
}

pub(crate) const MAX_PRODUCTS: usize = 6;
