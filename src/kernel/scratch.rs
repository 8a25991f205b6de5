//! The scratch of one thread: bounded by block sizes and head dims, never by sequence lengths.

use super::blocking::Blocking;
use super::online::RowState;
use crate::problem::Problem;
use crate::workspace::{Buffer, grow};
use crate::{Error, Result};

/// One thread's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    floats: Buffer,
    ranges: Vec<(usize, usize)>,
}

/// Parts of the scratch. Every part starts at a cache line.
pub(crate) struct Areas<'a> {
    /// A block of keys, and one of values, as packed `f32` rows.
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
    /// Of all tiles of a task: transposed queries, transposed output, running states.
    pub(crate) queries: &'a mut [f32],
    pub(crate) o: &'a mut [f32],
    pub(crate) states: &'a mut [f32],
    /// Of one tile: scores, bias, and rows on their way in or out.
    pub(crate) s: &'a mut [f32],
    pub(crate) bias: &'a mut [f32],
    pub(crate) stage: &'a mut [f32],
    /// Two rows of per-lane numbers.
    pub(crate) pair: &'a mut [f32],
    /// Keys that each row may see.
    pub(crate) ranges: &'a mut [(usize, usize)],
}

/// Sizes of the parts, in the order of [`Areas`]; `None` if they overflow.
fn sizes(problem: &Problem<'_>, blocking: &Blocking) -> Option<[usize; 9]> {
    let (tile, tiles, block_k) = (blocking.tile(), blocking.tiles(), blocking.block_k);
    let rows = tiles * tile;
    let widest = blocking.head_dim_padded.max(blocking.head_dim_v_padded).max(block_k);
    let factors = [
        (block_k, problem.head_dim),
        (block_k, problem.head_dim_v),
        (rows, blocking.head_dim_padded),
        (rows, blocking.head_dim_v_padded),
        (rows, 3),
        (tile, block_k),
        (tile, block_k),
        (tile, widest),
        (tile, 2),
    ];
    let mut sizes = [0; 9];
    for (size, (count, width)) in sizes.iter_mut().zip(factors) {
        *size = count.checked_mul(width)?.checked_next_multiple_of(16)?;
    }
    Some(sizes)
}

impl Scratch {
    /// Makes room for a problem.
    pub(crate) fn reserve(&mut self, problem: &Problem<'_>, blocking: &Blocking) -> Result<()> {
        let floats = sizes(problem, blocking).and_then(|sizes| sizes.iter().try_fold(0usize, |sum, &x| sum.checked_add(x)));
        self.floats.reserve(floats.ok_or(Error::Memory { bytes: usize::MAX })?)?;
        grow(&mut self.ranges, blocking.tiles() * blocking.tile(), || (0, 0))
    }

    /// The parts, for a problem that `reserve` has seen.
    pub(crate) fn areas(&mut self, problem: &Problem<'_>, blocking: &Blocking) -> Areas<'_> {
        let mut rest = self.floats.as_mut_slice();
        let [k, v, queries, o, states, s, bias, stage, pair] = sizes(problem, blocking).expect("reserve has computed the same sizes").map(|size| {
            let (part, tail) = core::mem::take(&mut rest).split_at_mut(size);
            rest = tail;
            part
        });
        Areas { k, v, queries, o, states, s, bias, stage, pair, ranges: &mut self.ranges }
    }

    /// Bytes on the heap.
    pub(crate) fn bytes(&self) -> usize {
        self.floats.bytes() + self.ranges.capacity() * size_of::<(usize, usize)>()
    }
}

/// The state of tile `index`, whose rows are `lanes` wide.
pub(crate) fn tile_state<'a>(states: &'a mut [f32], blocking: &Blocking, index: usize, lanes: usize) -> RowState<'a> {
    let state = &mut states[index * 3 * blocking.tile()..][..3 * lanes];
    let (max, rest) = state.split_at_mut(lanes);
    let (sum, alpha) = rest.split_at_mut(lanes);
    RowState { max, sum, alpha }
}
