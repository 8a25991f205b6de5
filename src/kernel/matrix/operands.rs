//! Operands of one pass over a KV head, in tiles.

use core::cell::Cell;
use core::ops::Range;

use super::super::blocking::MATRIX_K;
use super::super::fused::{Keys, Pass};
use super::super::lanes::Lanes;
use super::super::operand::Operand;
use super::super::pack::{load_rows, rows_in_place};
use super::super::scratch::{Areas, MatrixAreas, Tile};
use super::super::tile::Rows;
use super::pack::{PackColumns, PackLanes, PackRows};
use super::product::Plan;
use super::{MAX_TERMS, Multiply, SIDE, STEP, TILE, terms};
use crate::Precision;
use crate::element::AnySlice;
use crate::view::AnyHeads;

/// What stays the same over a pass.
pub(super) struct Run<'p, 'a, L, M: Multiply> {
    pub(super) pass: &'p Pass<'a, L>,
    pub(super) matrix: M,
    pub(super) configured: M::Configured,
    /// Of queries, keys, values and probabilities.
    pub(super) terms: [usize; 4],
    /// Products of keys and queries, and of values and probabilities.
    pub(super) plans: [Plan; 2],
    /// Whether outputs are summed in tiles. Sums of rounded probabilities lose nothing by it; for others each block of keys is summed
    /// by itself, and added.
    pub(super) accumulates: bool,
    /// Whether outputs that tiles add to may be subnormal, by values that were out of range: tiles would take them for 0.
    pub(super) has_tiny: Cell<bool>,
    /// Steps of head_dim, and of the packed keys.
    pub(super) head_steps: usize,
    pub(super) key_steps: usize,
}

/// Terms that the bits of an operand's elements fill.
fn own_terms(operand: &AnyHeads<'_>) -> usize {
    terms(operand.data, Precision::Highest)
}

#[derive(Clone, Copy)]
enum Side {
    Keys,
    Values,
}

impl<'p, 'a, L: Lanes, M: Multiply> Run<'p, 'a, L, M> {
    pub(super) fn new(pass: &'p Pass<'a, L>, matrix: M) -> Self {
        let (problem, blocking) = (pass.job.problem, &pass.job.blocking);
        let terms = [own_terms(&pass.job.q), own_terms(&pass.job.k), own_terms(&pass.job.v), MAX_TERMS]
            .map(|terms| terms.min(blocking.terms));
        let mut run = Self {
            pass,
            matrix,
            configured: matrix.configure(),
            terms,
            plans: [Plan::new([1; 2], [0; 2]); 2],
            has_tiny: Cell::new(false),
            accumulates: terms[3] == 1 && blocking.head_dim_v_padded.is_multiple_of(STEP),
            head_steps: problem.head_dim.div_ceil(STEP),
            key_steps: blocking.packed_k / STEP,
        };
        run.plans = [
            Plan::new([terms[1], terms[0]], [run.key_term(), run.query_term()]),
            Plan::new([terms[2], terms[3]], [run.value_term(), run.probability_term()]),
        ];
        run
    }

    /// Floats of one term of keys, of values, of a tile's queries and of its probabilities.
    pub(super) fn key_term(&self) -> usize {
        self.key_steps * self.head_steps * 2 * TILE
    }

    pub(super) fn value_term(&self) -> usize {
        self.pass.job.blocking.head_dim_v_padded.div_ceil(STEP) * self.key_steps * 2 * TILE
    }

    pub(super) fn query_term(&self) -> usize {
        self.head_steps * self.pass.job.blocking.tile() * SIDE
    }

    pub(super) fn probability_term(&self) -> usize {
        MATRIX_K / STEP * self.pass.job.blocking.tile() * SIDE
    }

    /// Where the queries of a tile are.
    pub(super) fn queries_of(&self, tile: &Tile) -> Range<usize> {
        let len = self.terms[0] * self.query_term();
        tile.index * len..(tile.index + 1) * len
    }

    pub(super) fn pack_queries(&self, tile: &mut Tile, areas: &mut Areas<'_>) {
        let Areas { work, matrix, .. } = areas;
        let src = self.pass.area_of(tile, work.queries, self.pass.job.problem.head_dim);
        let flags = &mut matrix.query_flags[tile.first..];
        let dst = &mut matrix.queries[self.queries_of(tile)];
        let (terms, term) = (self.terms[0], self.query_term());
        self.pass.l.vectorize(PackLanes { src, lanes: tile.lanes, terms, dst, term, flags });
        // Lanes without a row hold anything.
        flags[tile.rows..tile.lanes].fill(0.0);
        tile.bad = flags[..tile.rows].iter().any(|&flag| flag != 0.0);
    }

    /// Brings keys into tiles, and says whether some are out of range. `k` is room for them as `f32`.
    pub(super) fn pack_keys(&self, keys: Keys, k: &mut [f32], areas: &mut MatrixAreas<'_>) -> bool {
        self.pack_block(&self.pass.job.k, keys, k, Side::Keys, (areas.keys, areas.key_flags))
    }

    /// The same of values.
    pub(super) fn pack_values(&self, keys: Keys, v: &mut [f32], areas: &mut MatrixAreas<'_>) -> bool {
        self.pack_block(&self.pass.job.v, keys, v, Side::Values, (areas.values, areas.value_flags))
    }

    /// Keys or values, in their own type if they lie in rows.
    fn pack_block(
        &self,
        heads: &AnyHeads<'a>,
        keys: Keys,
        area: &mut [f32],
        side: Side,
        to: (&mut [f32], &mut [f32]),
    ) -> bool {
        fn in_place<'x, T>(data: &'x [T], heads: &AnyHeads<'x>, at: [usize; 3], count: usize) -> Option<Rows<'x, T>> {
            rows_in_place(data, heads, at, count).filter(|rows| rows.count == count)
        }
        let (pass, (dst, flags)) = (self.pass, to);
        // As many as `area` has room for.
        let piece = pass.job.blocking.block_k;
        let mut any = false;
        for first in (0..keys.count).step_by(piece) {
            let count = piece.min(keys.count - first);
            let at = [pass.batch, pass.kv_head, keys.first + first];
            let step = match side {
                Side::Keys => self.head_steps * 2 * TILE,
                Side::Values => 2 * TILE,
            };
            let (dst, flags) = (&mut dst[first / STEP * step..], &mut flags[first..]);
            let packed = match heads.data {
                AnySlice::F32(data) => in_place(data, heads, at, count).map(|rows| self.pack(rows, side, dst, flags)),
                AnySlice::F16(data) => in_place(data, heads, at, count).map(|rows| self.pack(rows, side, dst, flags)),
                AnySlice::Bf16(data) => in_place(data, heads, at, count).map(|rows| self.pack(rows, side, dst, flags)),
            };
            any |= packed.unwrap_or_else(|| self.pack(load_rows(heads, at, count, 1, area), side, dst, flags));
        }
        any
    }

    fn pack<T: Operand>(&self, rows: Rows<'_, T>, side: Side, dst: &mut [f32], flags: &mut [f32]) -> bool {
        let l = self.pass.l;
        match side {
            Side::Keys => l.vectorize(PackRows { rows, terms: self.terms[1], dst, term: self.key_term(), flags }),
            Side::Values => {
                let depth = self.key_steps;
                l.vectorize(PackColumns { rows, terms: self.terms[2], dst, term: self.value_term(), depth, flags })
            }
        }
    }
}
