//! Rows of an intermediate result: tokens of all sequences, in a workspace.

use super::inputs::{Order, flattened, flattened_mut, order};
use crate::{Element, Error, Heads, HeadsMut, Matrices, MatricesMut, Matrix, MatrixMut, Result};

/// Where the rows (batch, seq) of a buffer lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    batch: usize,
    seq: usize,
    /// From one row to the next.
    stride: usize,
    order: Order,
}

impl Rows {
    /// For (batch, seq) rows of `columns`, in an order that an operand can have. A stride of a power of two would put all rows in
    /// one set of the L1 cache.
    pub(super) fn new([batch, seq]: [usize; 2], columns: usize, order: Option<Order>) -> Self {
        let stride = columns.checked_next_multiple_of(16).unwrap_or(columns);
        let stride = if stride.is_multiple_of(1024) { stride.saturating_add(16) } else { stride };
        Self { batch, seq, stride, order: order.unwrap_or(Order::BatchFirst) }
    }

    /// Floats.
    pub(super) fn len(&self) -> Result<usize> {
        let rows = self.batch.checked_mul(self.seq);
        let len = rows.and_then(|rows| rows.checked_mul(self.stride));
        len.filter(|len| len.checked_mul(size_of::<f32>()).is_some()).ok_or(Error::Memory { bytes: usize::MAX })
    }

    /// From one item to the next, and from one position to the next.
    fn strides(&self) -> [usize; 2] {
        match self.order {
            Order::BatchFirst => [self.seq * self.stride, self.stride],
            Order::SequenceFirst => [self.stride, self.batch * self.stride],
        }
    }

    fn start(&self, item: usize, position: usize) -> usize {
        let [down, across] = self.strides();
        item * down + position * across
    }

    /// Some columns of a row.
    pub(super) fn row<'a>(
        &self,
        data: &'a mut [f32],
        [item, position]: [usize; 2],
        columns: core::ops::Range<usize>,
    ) -> &'a mut [f32] {
        &mut data[self.start(item, position)..][columns]
    }

    /// The rows from a position on, (batch, seq - first, columns).
    pub(super) fn matrices_mut<'a>(
        &self,
        data: &'a mut [f32],
        first: usize,
        columns: usize,
    ) -> Result<MatricesMut<'a, f32>> {
        let [item, position] = self.strides();
        let data = data.get_mut(first * position..).unwrap_or_default();
        MatricesMut::with_strides(data, [self.batch, self.seq - first, columns], [item, position, 1])
    }

    /// All rows, (batch, seq, columns).
    pub(super) fn matrices<'a>(&self, data: &'a [f32], columns: usize) -> Result<Matrices<'a, f32>> {
        let [item, position] = self.strides();
        Matrices::with_strides(data, [self.batch, self.seq, columns], [item, position, 1])
    }

    /// Heads side by side from a column on, of `count` rows from a position on.
    pub(super) fn heads<'a>(
        &self,
        data: &'a [f32],
        [first, count]: [usize; 2],
        column: usize,
        [heads, dim]: [usize; 2],
    ) -> Result<Heads<'a, f32>> {
        let [item, position] = self.strides();
        let data = data.get(first * position + column..).unwrap_or_default();
        Heads::with_strides(data, [self.batch, heads, count, dim], [item, dim, position, 1])
    }

    /// Heads side by side, all rows.
    pub(super) fn heads_mut<'a>(&self, data: &'a mut [f32], [heads, dim]: [usize; 2]) -> Result<HeadsMut<'a, f32>> {
        let [item, position] = self.strides();
        HeadsMut::with_strides(data, [self.batch, heads, self.seq, dim], [item, dim, position, 1])
    }
}

/// Tokens of a sequence from which on its products are worth matrix tiles: a matter of the sequence alone, as its bits are. From a
/// model, not measured: a product of few rows is bound by reading weights, and terms of `f32` are half as large again.
const TILED_TOKENS: usize = 32;

/// Does what a product does to all rows of (batch, seq, columns) at once, if they lie so, else to those of each item. Products of
/// packed weights give a row the same bits either way. The product is told whether the rows are of sequences with many tokens;
/// `starts` says where those of packed tokens begin.
pub(super) fn for_rows<A: Element, O: Element>(
    x: Matrices<'_, A>,
    out: &mut MatricesMut<'_, O>,
    starts: Option<&[usize]>,
    product: impl Fn(&Matrix<'_, A>, &mut MatrixMut<'_, O>, bool) -> Result<()>,
) -> Result<()> {
    if let Some(starts) = starts {
        let (x, mut out) = (x.item(0), out.item_mut(0));
        let many = |i: usize| starts[i + 1] - starts[i] >= TILED_TOKENS;
        let mut first = 0;
        while first + 1 < starts.len() {
            let like = (first + 1..starts.len() - 1).take_while(|&i| many(i) == many(first)).count();
            let (rows, many) = (starts[first]..starts[first + 1 + like], many(first));
            product(&x.rows(rows.clone()), &mut out.rows_mut(rows), many)?;
            first += 1 + like;
        }
        return Ok(());
    }
    let product = |x: &Matrix<'_, A>, out: &mut MatrixMut<'_, O>, seq: usize| product(x, out, seq >= TILED_TOKENS);
    let seq = x.shape()[1];
    if order(&x.layout()) == order(&out.layout())
        && let (Some(x), Some(mut out)) = (flattened(x), flattened_mut(out))
    {
        return product(&x, &mut out, seq);
    }
    (0..x.shape()[0]).try_for_each(|item| product(&x.item(item), &mut out.item_mut(item), seq))
}
