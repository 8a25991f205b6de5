//! The scratch of one thread: bounded by block sizes and head dims, never by sequence lengths.

use super::blocking::{Blocking, MATRIX_K};
use super::matrix::STEP;
use super::online::RowState;
use super::tile::Panels;
use crate::problem::Problem;
use crate::workspace::{Buffer, grow};
use crate::{Error, Result};

/// One thread's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    floats: Buffer,
    /// Sizes of the parts for the problem that `reserve` saw last.
    sizes: [usize; PARTS],
    ranges: Vec<(usize, usize)>,
    tiles: Vec<Tile>,
}

const PARTS: usize = 20;

/// A vector or two of rows that are computed together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tile {
    pub(crate) index: usize,
    /// First row of the task, and how many; the lanes behind them are computed and dropped.
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) vectors: usize,
    /// Floats of one row of scores: a lane for each row.
    pub(crate) lanes: usize,
    /// Whether a block has been taken in.
    pub(crate) started: bool,
    /// Whether it is computed as [`few`](super::few) does it.
    pub(crate) few: bool,
    /// Whether a query is out of the range of matrix tiles.
    pub(crate) bad: bool,
    /// Keys at whose multiples parts of blocks begin.
    pub(crate) align: usize,
    /// Keys that at least one row may see, and keys that all rows may see.
    pub(crate) any: (usize, usize),
    pub(crate) all: (usize, usize),
}

/// Parts of the scratch. Every part starts at a cache line.
pub(crate) struct Areas<'a> {
    /// A block of keys, and one of values, as packed `f32` rows.
    pub(crate) k: &'a mut [f32],
    pub(crate) v: &'a mut [f32],
    /// The block of values as panels; empty if they are narrow.
    pub(crate) panels: &'a mut [f32],
    pub(crate) tiles: &'a mut [Tile],
    /// What the pieces of the keys before this one have come to.
    pub(crate) partial: &'a mut [f32],
    pub(crate) work: Work<'a>,
    pub(crate) matrix: MatrixAreas<'a>,
}

/// Operands in matrix tiles; all empty where there are none.
pub(crate) struct MatrixAreas<'a> {
    /// Packed keys, and values.
    pub(crate) keys: &'a mut [f32],
    pub(crate) values: &'a mut [f32],
    /// Queries of all tiles of rows.
    pub(crate) queries: &'a mut [f32],
    /// Probabilities of two tiles of rows, and factors of their outputs.
    pub(crate) probabilities: &'a mut [f32],
    pub(crate) alphas: &'a mut [f32],
    /// Products of the values and one tile of rows.
    pub(crate) product: &'a mut [f32],
    /// Not 0 for what is out of range.
    pub(crate) key_flags: &'a mut [f32],
    pub(crate) value_flags: &'a mut [f32],
    pub(crate) query_flags: &'a mut [f32],
}

/// What the steps of a tile read and write besides K and V.
pub(crate) struct Work<'a> {
    /// Of all tiles of a task: transposed queries, output rows (and of a spare tile behind them), running states.
    pub(crate) queries: &'a mut [f32],
    pub(crate) o: &'a mut [f32],
    pub(crate) states: &'a mut [f32],
    /// Of one tile (scores on matrix tiles: of two): scores, bias, and rows on their way in or out.
    pub(crate) s: &'a mut [f32],
    pub(crate) bias: &'a mut [f32],
    pub(crate) stage: &'a mut [f32],
    /// Two rows of per-lane numbers.
    pub(crate) pair: &'a mut [f32],
    /// Keys that each row may see.
    pub(crate) ranges: &'a mut [(usize, usize)],
}

/// Sizes of the parts, in the order of `areas`; `None` if they overflow.
fn sizes(problem: &Problem<'_>, blocking: &Blocking<'_>) -> Option<[usize; PARTS]> {
    let (tile, tiles, block_k) = (blocking.tile(), blocking.tiles(), blocking.block_k);
    let rows = tiles * tile;
    let widest = problem.head_dim.max(block_k);
    let (terms, steps) = (blocking.terms, |len: usize| len.div_ceil(STEP) * STEP);
    // A pair takes as much as one float.
    let (keys, head_dim, head_dim_v) = (blocking.packed_k, steps(problem.head_dim), steps(blocking.head_dim_v_padded));
    let on_matrix = usize::from(terms > 0);
    let factors = [
        (block_k, problem.head_dim),
        (block_k, blocking.head_dim_v_padded),
        (rows, blocking.head_dim_padded),
        (rows + tile, blocking.head_dim_v_padded),
        (rows, 3),
        (tile, if terms > 0 { block_k.max(2 * MATRIX_K) } else { block_k }),
        (tile, block_k),
        (tile, widest),
        (tile, 2),
        (if blocking.may_have_pieces() { 1 } else { 0 }, blocking.partial_len()?),
        if blocking.has_panels() {
            (blocking.head_dim_v_padded.div_ceil(tile), Panels::step(block_k, blocking.lanes))
        } else {
            (0, 0)
        },
        (terms * keys / 2, head_dim),
        (terms * keys / 2, head_dim_v),
        (terms * rows / 2, head_dim),
        (terms * MATRIX_K, tile),
        (on_matrix * 2, tile),
        (on_matrix * head_dim_v, tile),
        (on_matrix, keys),
        (on_matrix, keys),
        (on_matrix, rows),
    ];
    let mut sizes = [0; PARTS];
    for (size, (count, width)) in sizes.iter_mut().zip(factors) {
        *size = count.checked_mul(width)?.checked_next_multiple_of(16)?;
    }
    Some(sizes)
}

impl Scratch {
    /// Makes room for a problem.
    pub(crate) fn reserve(&mut self, problem: &Problem<'_>, blocking: &Blocking<'_>) -> Result<()> {
        let too_large = Error::Memory { bytes: usize::MAX };
        self.sizes = sizes(problem, blocking).ok_or(too_large.clone())?;
        let floats = self.sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)).ok_or(too_large)?;
        self.floats.reserve(floats)?;
        grow(&mut self.ranges, blocking.tiles() * blocking.tile(), Default::default)?;
        grow(&mut self.tiles, blocking.tiles(), Tile::default)
    }

    /// The parts, for the problem that `reserve` has seen last.
    pub(crate) fn areas(&mut self) -> Areas<'_> {
        let mut rest = self.floats.as_mut_slice();
        let [
            k,
            v,
            queries,
            o,
            states,
            s,
            bias,
            stage,
            pair,
            partial,
            panels,
            m_keys,
            m_values,
            m_queries,
            probabilities,
            alphas,
            product,
            key_flags,
            value_flags,
            query_flags,
        ] = self.sizes.map(|size| {
            let (part, tail) = core::mem::take(&mut rest).split_at_mut(size);
            rest = tail;
            part
        });
        let work = Work { queries, o, states, s, bias, stage, pair, ranges: &mut self.ranges };
        let matrix = MatrixAreas {
            keys: m_keys,
            values: m_values,
            queries: m_queries,
            probabilities,
            alphas,
            product,
            key_flags,
            value_flags,
            query_flags,
        };
        Areas { k, v, panels, tiles: &mut self.tiles, partial, work, matrix }
    }

    /// Bytes on the heap.
    pub(crate) fn bytes(&self) -> usize {
        self.floats.bytes()
            + self.ranges.capacity() * size_of::<(usize, usize)>()
            + self.tiles.capacity() * size_of::<Tile>()
    }
}

/// The state of tile `index`, whose rows are `lanes` wide.
pub(crate) fn tile_state<'a>(
    states: &'a mut [f32],
    blocking: &Blocking<'_>,
    index: usize,
    lanes: usize,
) -> RowState<'a> {
    let state = &mut states[index * 3 * blocking.tile()..][..3 * lanes];
    let (max, rest) = state.split_at_mut(lanes);
    let (sum, norm) = rest.split_at_mut(lanes);
    RowState { max, sum, norm }
}
