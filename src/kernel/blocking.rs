//! Block sizes: those that bits depend on are functions of shape and level alone, not of threads, batch or position in a batch.

use super::few;
use super::matrix::STEP;
use crate::problem::Problem;
use crate::view::Grid;
use crate::{Error, Result};

/// Keys in a block of scores. The scores of a tile of 2 x 16 queries then take 16 KiB, half of the smallest L1 in use; measured
/// (AVX-512, D 64 and 128, S 2048): see benches/README.md.
pub(crate) const BLOCK_K: usize = 128;

/// Width of heads from which on a block has half as many keys, so that K, V, queries and outputs of a task share L2.
const WIDE: usize = 256;

/// Width of values from which on they are copied to panels. Time in place over time with panels, at D 128 / 192 / 256 / 512: 1.03 /
/// 1.03 / 1.03 / 1.08 ((1, 2, 2048, 2048, 128), (1, 1, 2048, 2048, 192), (1, 4, 512, 512, 256), (1, 2, 300, 300, 512); AVX2, AMD EPYC
/// (Zen 3), 2026-11-30; 1.01 where nothing was changed).
const PANELS_FROM: usize = 128;

/// Rows (queries of one or more heads) of a task. Long sequences take one head a task; short ones share K and V among the heads
/// of a group.
const BLOCK_ROWS: usize = 128;

/// Multiply-adds of a task at the least, if there are heads enough for it: to take a task from the list and to begin it costs as
/// much as a thousand or two. One task for all heads of (1, 8, 1, 16, 64) takes 0.92 of the instructions of eight.
const TASK_WORK: usize = 1 << 17;

/// Queries of a sequence up to which it counts as decoding: its keys are then taken in pieces.
const DECODE_QUERIES: usize = 16;

/// Keys of a piece at the least, of those that the sequence sees, and pieces of a sequence at the most. Every piece starts from
/// nothing, and the pieces are merged in order, whether one thread takes them all or several share them.
const PIECE_KEYS: usize = 1024;
pub(crate) const PIECES: usize = 16;

/// How one problem is cut on a level of `lanes` queries a vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocking<'a> {
    pub(crate) grid: Grid<'a>,
    pub(crate) lanes: usize,
    /// Rows of a pass at the most, and if there are enough of them.
    rows: usize,
    block_rows: usize,
    /// Multiples of `lanes`.
    pub(crate) head_dim_padded: usize,
    pub(crate) head_dim_v_padded: usize,
    pub(crate) block_k: usize,
    /// Terms of bf16 that operands become on matrix tiles; 0 if no sequence comes there.
    pub(crate) terms: usize,
    /// Keys that are packed for matrix tiles at once, of which each tile of rows takes [`MATRIX_K`] at a time.
    pub(crate) packed_k: usize,
}

impl<'a> Blocking<'a> {
    /// With averaged weights a task has all heads, as it adds up their weights. Of `threads` depends how rows are dealt out, and
    /// nothing that changes bits.
    pub(crate) fn new(
        problem: &Problem<'_>,
        starts: Option<&'a [usize]>,
        lanes: usize,
        averaged_weights: bool,
        terms: usize,
        threads: usize,
    ) -> Result<Self> {
        let terms = if worth_matrix(problem, problem.seqlen_q) { terms } else { 0 };
        let block_rows = if terms == 0 { BLOCK_ROWS } else { matrix_rows(problem, terms, threads) };
        let queries = problem.seqlen_q.clamp(1, block_rows);
        let group = problem.group.max(1);
        let heads_per_pass = heads_per_pass(problem.seqlen_q, group, block_rows);
        let whole = problem.num_heads.max(1);
        let (group, heads) = match starts {
            _ if averaged_weights => (whole, whole),
            // Ragged items may be long or short: a task has the whole group, in as many passes as its item asks for.
            Some(_) if problem.seqlen_q > DECODE_QUERIES => (group, group),
            // Small groups share a task, whole. Each has a pass of its own, as ever.
            None if heads_per_pass == group && problem.seqlen_k <= PIECE_KEYS => {
                let width = problem.head_dim.saturating_add(problem.head_dim_v);
                let work = group.saturating_mul(queries).saturating_mul(problem.seqlen_k).saturating_mul(width);
                match TASK_WORK / work.max(1) {
                    0 | 1 => (group, group),
                    groups => (whole, group.saturating_mul(groups).min(whole)),
                }
            }
            _ => (group, heads_per_pass),
        };
        let grid = Grid {
            batch: problem.batch,
            num_heads: problem.num_heads,
            seqlen_q: problem.seqlen_q,
            starts,
            group,
            heads,
            queries,
        };
        let block_k = if problem.head_dim.max(problem.head_dim_v) > WIDE { BLOCK_K / 2 } else { BLOCK_K };
        let padded = |width: usize| width.checked_next_multiple_of(lanes).ok_or(Error::Memory { bytes: usize::MAX });
        Ok(Self {
            grid,
            lanes,
            rows: match terms {
                0 => queries.saturating_mul(problem.group.max(1)).min(block_rows),
                // The most that a longer sequence may have: memory does not grow with it.
                _ => problem.seqlen_q.saturating_mul(problem.group.max(1)).min(most_matrix_rows(problem, terms)),
            },
            block_rows,
            head_dim_padded: padded(problem.head_dim)?,
            head_dim_v_padded: padded(problem.head_dim_v)?,
            block_k: problem.seqlen_k.clamp(1, block_k).next_multiple_of(lanes),
            terms,
            packed_k: packed_keys(problem, terms),
        })
    }

    /// Heads of a group that one pass over K and V serves, for a sequence of so many queries.
    pub(crate) fn heads_per_pass(&self, queries: usize, group: usize) -> usize {
        heads_per_pass(queries, group, self.block_rows)
    }

    /// Whether a sequence's products are taken on matrix tiles: a matter of its own shape, as its bits are.
    pub(crate) fn on_matrix(&self, problem: &Problem<'_>, batch: usize) -> bool {
        self.terms > 0 && worth_matrix(problem, problem.query_length(batch))
    }

    /// Keys in a block of scores of a sequence.
    pub(crate) fn score_keys(&self, problem: &Problem<'_>, batch: usize) -> usize {
        if self.on_matrix(problem, batch) { self.packed_k.min(MATRIX_K) } else { self.block_k }
    }

    /// Queries of a full tile: two vectors.
    pub(crate) fn tile(&self) -> usize {
        2 * self.lanes
    }

    /// Tiles of a pass at the most.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.tile())
    }

    /// Whether every block of the grid is one pass over its keys, if they are many, and may be cut into pieces of them.
    pub(crate) fn block_is_one_pass(&self) -> bool {
        self.grid.seqlen_q <= DECODE_QUERIES
    }

    /// Whether blocks of values are worth copying to panels: for several tiles, and rows so wide that a column of 128 of them
    /// overflows its sets of L1.
    pub(crate) fn has_panels(&self) -> bool {
        self.tiles() > 2 && self.head_dim_v_padded >= PANELS_FROM
    }

    /// Whether some item may count as decoding.
    pub(crate) fn may_have_pieces(&self) -> bool {
        self.grid.starts.is_some() || self.block_is_one_pass()
    }

    /// How the blocks of keys that a sequence sees are cut: blocks of a piece, and how many pieces there are.
    pub(crate) fn pieces(&self, problem: &Problem<'_>, batch: usize) -> (usize, usize) {
        let queries = problem.query_length(batch);
        if queries > DECODE_QUERIES || problem.key_length(batch) <= PIECE_KEYS {
            return (usize::MAX, 1);
        }
        let (band, keep) = (problem.band(batch), problem.keep_first);
        // Both ends of what a query sees rise from query to query.
        let (lo, hi) = (band.range(0).0, band.range(queries.saturating_sub(1)).1);
        let blocks = seen_blocks(self.block_k, keep, lo, hi).count();
        let piece = blocks.div_ceil((blocks.saturating_mul(self.block_k) / PIECE_KEYS).clamp(1, PIECES)).max(1);
        (piece, blocks.div_ceil(piece).max(1))
    }

    /// Floats of the partial result of one pass: output, maximum and sum of every row.
    pub(crate) fn partial_len(&self) -> Option<usize> {
        (self.tiles() * self.tile()).checked_mul(self.head_dim_v_padded.checked_add(2)?)
    }
}

fn heads_per_pass(queries: usize, group: usize, block_rows: usize) -> usize {
    (block_rows / queries.clamp(1, block_rows)).clamp(1, group.max(1))
}

/// Whether so many queries make up for bringing keys and values into matrix tiles. From a model, not measured: to pack a key costs
/// about a cycle an element, and a product on tiles saves some 2.6 cycles of 4.9 (D 64, three terms).
fn worth_matrix(problem: &Problem<'_>, queries: usize) -> bool {
    queries >= MATRIX_QUERIES && problem.head_dim > 0 && problem.head_dim_v > 0
}

const MATRIX_QUERIES: usize = 64;

/// Keys in a block of scores on matrix tiles. The scores of two tiles of 32 rows, probabilities of two as a term, and the outputs of
/// one then take 32 of 48 KiB of L1; tiles are multiplied faster than L2 brings them.
pub(crate) const MATRIX_K: usize = 64;

/// A width as tiles have it.
fn in_steps(width: usize) -> usize {
    width.div_ceil(STEP).saturating_mul(STEP)
}

/// Keys whose packed keys and values take a fifth of L2 (2 MiB where there are tiles), at most 512. A tile of rows meets all of them
/// before the next one, while its outputs stay in L1.
fn packed_keys(problem: &Problem<'_>, terms: usize) -> usize {
    const BYTES: usize = 400 << 10;
    let key = in_steps(problem.head_dim).saturating_add(in_steps(problem.head_dim_v)).saturating_mul(2 * terms).max(1);
    let most = 1 << (BYTES / key).clamp(2 * MATRIX_K, 512).ilog2();
    problem.seqlen_k.clamp(1, most).next_multiple_of(MATRIX_K)
}

/// Rows of a task on matrix tiles, which share packed keys and values. From a model, not measured: to pack a block of keys takes as
/// long as some 64 rows of it, tasks come in rounds of one a thread, and half a round is lost in the end. Changes no bit.
fn matrix_rows(problem: &Problem<'_>, terms: usize, threads: usize) -> usize {
    const PACK_ROWS: usize = 64;
    let group = problem.group.max(1);
    let time = |rows: usize| {
        let heads = heads_per_pass(problem.seqlen_q, group, rows);
        let queries = problem.seqlen_q.clamp(1, rows);
        let kv_heads = problem.batch.saturating_mul(problem.num_heads / group);
        let tasks = kv_heads.saturating_mul(group.div_ceil(heads)).saturating_mul(problem.seqlen_q.div_ceil(queries));
        let rounds = tasks.div_ceil(threads.max(1));
        rounds.saturating_mul(2).saturating_add(1).saturating_mul(queries * heads + PACK_ROWS)
    };
    let most = most_matrix_rows(problem, terms);
    let choices = [most, most / 2, most / 4, most / 8, BLOCK_ROWS].into_iter().filter(|&rows| rows >= BLOCK_ROWS);
    choices.min_by_key(|&rows| time(rows)).unwrap_or(BLOCK_ROWS)
}

/// Rows whose outputs and packed queries take a part of L2 (2 MiB where there are tiles), in powers of two: at most 2048.
fn most_matrix_rows(problem: &Problem<'_>, terms: usize) -> usize {
    const BYTES: usize = 768 << 10;
    let row = problem
        .head_dim_v
        .saturating_mul(4)
        .saturating_add(in_steps(problem.head_dim).saturating_mul(2 * terms))
        .max(1);
    let rows = (BYTES / row).clamp(2 * BLOCK_ROWS, 2048);
    1 << rows.ilog2()
}

/// Whether a sequence's queries are few enough for [`few`](super::few): a matter of its own shape, so that its bits are, too.
pub(crate) fn is_few(problem: &Problem<'_>, batch: usize) -> bool {
    problem.query_length(batch) <= few::MAX_QUERIES
}

/// The blocks of `size` keys that have some of `lo..hi`, or of the first `keep`, which no window hides: their numbers.
pub(crate) fn seen_blocks(size: usize, keep: usize, lo: usize, hi: usize) -> impl Iterator<Item = usize> {
    let kept = keep.min(hi).div_ceil(size);
    (0..kept).chain(kept.max(lo / size)..hi.div_ceil(size))
}
