//! What a layer attends from and to.

use crate::problem::check_shape;
use crate::view::{Layout, check_starts};
use crate::{Element, Matrices, MatricesMut, Matrix, MatrixMut, Result};

/// Inputs of a call: queries (batch, seqlen_q, embed_dim), keys (batch, seqlen_k, kdim) and values (batch, seqlen_k, vdim), of
/// any strides, or tokens packed behind one another.
///
/// Inputs that are the same view are projected by one product.
///
/// ```
/// use polyhead::layer::Inputs;
/// use polyhead::{Matrices, Matrix};
/// let x = [0.5f32; 6 * 8];
/// let batch_first = Inputs::self_attention(Matrices::contiguous(&x, [2, 3, 8])?);
/// let sequence_first = Inputs::self_attention(Matrices::sequence_first(&x, [3, 2, 8])?);
/// // Sequences of one, two and three tokens.
/// let packed = Inputs::packed(Matrix::contiguous(&x, [6, 8])?, &[0, 1, 3, 6]);
/// # let _ = (batch_first, sequence_first, packed);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, A> {
    /// Query, key, value. Packed tokens are one batch item.
    pub(super) tokens: [Matrices<'a, A>; 3],
    /// Where the packed sequences of queries, and of keys and values, begin.
    pub(super) starts: Option<[&'a [usize]; 2]>,
    pub(super) first_position: usize,
}

impl<'a, A: Element> Inputs<'a, A> {
    /// Queries, keys and values of their own.
    pub fn new(query: Matrices<'a, A>, key: Matrices<'a, A>, value: Matrices<'a, A>) -> Self {
        Self { tokens: [query, key, value], starts: None, first_position: 0 }
    }

    /// Every token attends to the tokens of its own sequence.
    pub fn self_attention(x: Matrices<'a, A>) -> Self {
        Self::new(x, x, x)
    }

    /// Keys and values from a memory, such as an encoder's output.
    pub fn cross(query: Matrices<'a, A>, memory: Matrices<'a, A>) -> Self {
        Self::new(query, memory, memory)
    }

    /// Self-attention of sequences without padding, (tokens, embed_dim): sequence `i` has the rows `starts[i]..starts[i + 1]`. The
    /// output is (1, tokens, output_dim).
    pub fn packed(x: Matrix<'a, A>, starts: &'a [usize]) -> Self {
        Self::packed_cross(x, starts, x, starts)
    }

    /// Sequences of queries and sequences of a memory, both without padding.
    pub fn packed_cross(
        query: Matrix<'a, A>,
        query_starts: &'a [usize],
        memory: Matrix<'a, A>,
        memory_starts: &'a [usize],
    ) -> Self {
        let [query, memory] = [query, memory].map(one_item);
        Self { starts: Some([query_starts, memory_starts]), ..Self::cross(query, memory) }
    }

    /// The position of each sequence's first token, for a rotary embedding; 0 if it is not given.
    pub fn first_position(mut self, position: usize) -> Self {
        self.first_position = position;
        self
    }

    /// Checks the inputs against each other and against their widths.
    pub(super) fn check(&self, widths: [usize; 3]) -> Result<()> {
        const OPERANDS: [&str; 3] = ["query", "key", "value"];
        let [[batch, ..], [_, seqlen_k, _], _] = self.tokens.map(|tokens| tokens.shape());
        for (i, operand) in OPERANDS.into_iter().enumerate() {
            let seq = self.tokens[i].shape()[1];
            let expected = [batch, if i == 0 { seq } else { seqlen_k }, widths[i]];
            check_shape(operand, expected, self.tokens[i].shape(), ["batch", "seq", "dim"])?;
        }
        if let Some(starts) = self.starts {
            // That there is a sequence of keys for each of queries, attention checks.
            for (tokens, starts) in [0, 1].into_iter().zip(starts) {
                let rows = self.tokens[tokens].shape()[1];
                check_starts(rows, starts)?;
            }
        }
        Ok(())
    }

    /// Whether two inputs are the same elements.
    pub(super) fn same(&self, a: usize, b: usize) -> bool {
        let [a, b] = [self.tokens[a], self.tokens[b]];
        core::ptr::eq(a.data(), b.data()) && a.layout() == b.layout()
    }
}

fn one_item<'a, A: Copy>(x: Matrix<'a, A>) -> Matrices<'a, A> {
    let ([rows, columns], [down, across]) = (x.shape(), x.strides());
    x.reshaped([1, rows, columns], [0, down, across])
}

/// Which axis of (batch, seq, dim) rows go along first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Rows of a batch item lie together.
    BatchFirst,
    /// Rows of a position lie together.
    SequenceFirst,
}

/// All rows of (batch, seq, dim) as a matrix, if strides allow it in either order.
fn flat(layout: &Layout<3>) -> Option<(Order, [usize; 2], [usize; 2])> {
    let ([batch, seq, dim], [item, row, across]) = (layout.shape, layout.strides);
    let rows = batch.checked_mul(seq)?;
    if batch <= 1 || (seq > 1 && row.checked_mul(seq) == Some(item)) {
        Some((Order::BatchFirst, [rows, dim], [row, across]))
    } else if seq <= 1 {
        Some((Order::BatchFirst, [rows, dim], [item, across]))
    } else if item.checked_mul(batch) == Some(row) {
        Some((Order::SequenceFirst, [rows, dim], [item, across]))
    } else {
        None
    }
}

/// The order in which the rows of a view can be one matrix.
pub(super) fn order(layout: &Layout<3>) -> Option<Order> {
    flat(layout).map(|(order, ..)| order)
}

/// All rows as a matrix.
pub(super) fn flattened<'a, A: Copy>(x: Matrices<'a, A>) -> Option<Matrix<'a, A>> {
    flat(&x.layout()).map(|(_, shape, strides)| x.reshaped(shape, strides))
}

/// All rows as a matrix.
pub(super) fn flattened_mut<'a, O: Copy>(x: &'a mut MatricesMut<'_, O>) -> Option<MatrixMut<'a, O>> {
    let (_, shape, strides) = flat(&x.layout())?;
    Some(x.reborrow().reshaped(shape, strides))
}
