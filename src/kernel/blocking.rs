//! Block sizes: functions of shape and level alone, so that bits do not depend on threads, batch or position in a batch.

use crate::problem::Problem;
use crate::view::Grid;
use crate::{Error, Result};

/// Keys in a block of scores. The scores of a tile of 2 x 16 queries then take 16 KiB, half of the smallest L1 in use; measured
/// (AVX-512, D 64 and 128, S 2048): see benches/README.md.
pub(crate) const BLOCK_K: usize = 128;

/// Rows (queries of one or more heads) of a task. Long sequences take one head a task; short ones share K and V among the heads
/// of a group.
const BLOCK_ROWS: usize = 128;

/// How one problem is cut on a level of `lanes` queries a vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocking {
    pub(crate) grid: Grid,
    pub(crate) lanes: usize,
    /// Heads of a group that one pass over K and V serves.
    pub(crate) heads_per_pass: usize,
    /// A multiple of `lanes`.
    pub(crate) head_dim_v_padded: usize,
    pub(crate) block_k: usize,
}

impl Blocking {
    /// With averaged weights a task has all heads, as it adds up their weights.
    pub(crate) fn new(problem: &Problem<'_>, lanes: usize, averaged_weights: bool) -> Result<Self> {
        let queries = problem.seqlen_q.clamp(1, BLOCK_ROWS);
        let group = problem.group.max(1);
        let heads_per_pass = (BLOCK_ROWS / queries).clamp(1, group);
        let whole = problem.num_heads.max(1);
        let (group, heads) = if averaged_weights { (whole, whole) } else { (group, heads_per_pass) };
        let grid = Grid {
            batch: problem.batch,
            num_heads: problem.num_heads,
            seqlen_q: problem.seqlen_q,
            group,
            heads,
            queries,
        };
        Ok(Self {
            grid,
            lanes,
            heads_per_pass,
            head_dim_v_padded: problem
                .head_dim_v
                .checked_next_multiple_of(lanes)
                .ok_or(Error::Memory { bytes: usize::MAX })?,
            block_k: problem.seqlen_k.clamp(1, BLOCK_K).next_multiple_of(lanes),
        })
    }

    /// Queries of a full tile: two vectors.
    pub(crate) fn tile(&self) -> usize {
        2 * self.lanes
    }

    /// Tiles of a pass at the most.
    pub(crate) fn tiles(&self) -> usize {
        (self.grid.queries * self.heads_per_pass).div_ceil(self.tile())
    }
}
