//! How a problem is run: tasks over batch, heads, query blocks and pieces of the keys, heaviest first, in one parallel region.

use core::cmp::Reverse;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Checked;
use crate::kernel::blocking::{self, Blocking};
use crate::kernel::fused::{Attend, Job, Step};
use crate::kernel::scratch::Scratch;
use crate::problem::Problem;
use crate::view::{AnyHeads, Grid, OutputBlocks};
use crate::workspace::{Buffer, grow};
use crate::{Element, Error, Level, Result, parallel};

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    scratch: Vec<Scratch>,
    pub(super) tasks: Vec<Task>,
    /// Visible pairs of one head, and index, of each batch item.
    batches: Vec<(u64, usize)>,
    taken: Vec<AtomicBool>,
    /// Results of pieces of the keys, one for each task, where threads share a sequence.
    partials: Vec<Mutex<Buffer>>,
}

/// Few bytes, as there is one for every 128 queries of a head.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Task {
    /// Visible (query, key) pairs of one of its heads, saturated.
    pairs: u32,
    /// Block of the grid.
    block: u32,
}

/// Multiply-adds below which a call stays on the caller's thread.
///
/// (1, 2, S, S, 32) on one thread / on two of the pool the caller is in / on two, called from outside of the pool, in us:
/// S 16 (0.03 M) 2.0 / 2.9 / 15, S 64 (0.5 M) 15 / 9 / 26, S 96 (1.2 M) 31 / 19 / 38, S 128 (2.1 M) 55 / 31 / 37 (AMD EPYC, Zen 4,
/// two cores, 2026-11-30; `cargo bench --bench multi_head -- a72` with this constant at 0). From outside, waking a thread costs
/// some 10 us, and two threads win from 1.5 M on; from inside, from 0.1 M.
const SERIAL_BELOW: u64 = 1_000_000;

/// Blocks for each thread below which threads share the keys of a sequence, too.
const BLOCKS_PER_THREAD: usize = 4;

/// One problem on one level, ready to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prepared<'a> {
    pub(super) blocking: Blocking<'a>,
    pub(super) level: Level,
    pub(super) threads: usize,
    /// Visible (query, key) pairs over all heads.
    pub(super) pairs: u64,
    /// Pieces of the keys that are tasks of their own; 1 if a task takes all of them.
    pieces: usize,
}

impl Workspace {
    /// Lists the tasks and makes room for as many threads as the work is worth. `weights` says whether attention weights are wanted,
    /// and whether averaged.
    pub(super) fn prepare<'a>(
        &mut self,
        problem: &Problem<'_>,
        starts: Option<&'a [usize]>,
        level: Level,
        weights: Option<bool>,
        terms: usize,
    ) -> Result<Prepared<'a>> {
        let terms = if level == Level::Amx { terms } else { 0 };
        // Asking for threads starts the global pool.
        let pool_for = |work: u64| if work < SERIAL_BELOW { 1 } else { parallel::current_threads() };
        let widths = problem.head_dim.saturating_add(problem.head_dim_v);
        let most_work = || {
            let sizes = [problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k, widths];
            sizes.into_iter().fold(1u64, |work, size| work.saturating_mul(size as u64))
        };
        // Only rows for matrix tiles are dealt out by threads.
        let threads = if terms > 0 { pool_for(most_work()) } else { 1 };
        let cut = Blocking::new(problem, starts, level.lanes(), weights == Some(true), terms, threads)?;
        let blocks = cut.grid.len();
        if u32::try_from(blocks).is_err() {
            return Err(Error::Memory { bytes: blocks.saturating_mul(size_of::<Task>()) });
        }
        grow(&mut self.taken, blocks, AtomicBool::default)?;
        let pairs = self.order_tasks(problem, &cut.grid)?;
        let work = pairs.saturating_mul(widths as u64);
        let pool = pool_for(work);
        let mut prepared = Prepared { blocking: cut, level, threads: 1, pairs, pieces: 1 };
        let short_of_blocks = (1..BLOCKS_PER_THREAD * pool).contains(&self.tasks.len());
        if pool > 1 && short_of_blocks && weights.is_none() && cut.block_is_one_pass() {
            prepared.pieces = (0..problem.batch).map(|batch| cut.pieces(problem, batch).1).max().unwrap_or(1);
        }
        let tasks = self.tasks.len() * prepared.pieces;
        prepared.threads = pool.clamp(1, tasks.max(1));
        grow(&mut self.scratch, prepared.threads, Scratch::default)?;
        for scratch in &mut self.scratch[..prepared.threads] {
            scratch.reserve(problem, &cut)?;
        }
        if prepared.pieces > 1 {
            let len = cut.partial_len().ok_or(Error::Memory { bytes: usize::MAX })?;
            // For as many pieces as there can be: memory that does not grow with the keys.
            let most = self.tasks.len() * blocking::PIECES;
            grow(&mut self.partials, most, Mutex::default)?;
            for partial in &mut self.partials[..most] {
                exclusive(partial).reserve(len)?;
            }
        }
        Ok(prepared)
    }

    /// Fills the task list and returns the visible pairs of all heads.
    ///
    /// Batch items go by weight, the query blocks of each head heaviest first, so that what is left at the end is small. Heads
    /// stay together: their tasks share K and V in cache (causal, D 128, S 2048: 0.60 of full if all blocks of all heads are
    /// sorted by weight, 0.52 so).
    fn order_tasks(&mut self, problem: &Problem<'_>, grid: &Grid<'_>) -> Result<u64> {
        self.tasks.clear();
        if grid.len() == 0 {
            // The product of the axes is 0, but that of some of them may overflow.
            return Ok(0);
        }
        self.batches.clear();
        grow(&mut self.batches, grid.batch, Default::default)?;
        let mut count = 0;
        for (batch, (pairs, index)) in self.batches.iter_mut().enumerate() {
            (*pairs, *index) = (problem.band(batch).pairs(0..problem.query_length(batch)), batch);
            count += grid.query_blocks(batch) * grid.head_blocks();
        }
        self.batches.sort_unstable_by_key(|&(pairs, batch)| (Reverse(pairs), batch));
        let bytes = count.saturating_mul(size_of::<Task>());
        self.tasks.try_reserve_exact(count).map_err(|_| Error::Memory { bytes })?;
        for &(_, batch) in &self.batches {
            let (band, first) = (problem.band(batch), self.tasks.len());
            for query_block in 0..grid.query_blocks(batch) {
                let pairs = band.pairs(grid.queries_of(batch, query_block));
                let block = grid.index(batch, 0, query_block) as u32;
                self.tasks.push(Task { pairs: u32::try_from(pairs).unwrap_or(u32::MAX), block });
            }
            self.tasks[first..].sort_unstable_by_key(|task| (Reverse(task.pairs), task.block));
            // Every head of an item sees the same pairs.
            let head = first..self.tasks.len();
            for head_block in 1..grid.head_blocks() {
                let step = (grid.index(batch, head_block, 0) - grid.index(batch, 0, 0)) as u32;
                for task in head.clone() {
                    let like = self.tasks[task];
                    self.tasks.push(Task { block: like.block + step, ..like });
                }
            }
        }
        let per_head = self.batches.iter().fold(0u64, |sum, &(pairs, _)| sum.saturating_add(pairs));
        Ok(per_head.saturating_mul(grid.num_heads as u64))
    }

    pub(super) fn bytes(&self) -> usize {
        let partial = |partial: &Mutex<Buffer>| partial.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        self.scratch.iter().map(Scratch::bytes).sum::<usize>()
            + self.partials.iter().map(partial).sum::<usize>()
            + self.partials.capacity() * size_of::<Mutex<Buffer>>()
            + self.scratch.capacity() * size_of::<Scratch>()
            + self.batches.capacity() * size_of::<(u64, usize)>()
            + self.tasks.capacity() * size_of::<Task>()
            + self.taken.capacity() * size_of::<AtomicBool>()
    }

    /// Runs all tasks.
    pub(super) fn execute<O: Element>(
        &mut self,
        problem: &Problem<'_>,
        prepared: &Prepared<'_>,
        operands: [AnyHeads<'_>; 3],
        outputs: Checked<'_, O>,
    ) {
        let Prepared { blocking: cut, level, threads, pieces, .. } = *prepared;
        let [q, k, v] = operands;
        let job = Job { problem, blocking: cut, q, k, v };
        let taken = &self.taken[..cut.grid.len()];
        taken.iter().for_each(|taken| taken.store(false, Ordering::Relaxed));
        let blocks = OutputBlocks::new(cut.grid, outputs.out, outputs.lse, outputs.weights, taken);
        let (tasks, partials) = (&self.tasks, &mut self.partials);
        if pieces == 1 {
            parallel::for_each_task(tasks.len(), &mut self.scratch[..threads], |task, scratch| {
                let Some(mut block) = blocks.take(tasks[task].block as usize) else { return };
                let (batch, heads, queries) = (block.batch, block.heads.clone(), block.queries.clone());
                let step = Step::Whole(&mut block);
                attend(level, Attend { job: &job, batch, heads, queries, scratch, step });
            });
            return;
        }
        let shared = &*partials;
        parallel::for_each_task(tasks.len() * pieces, &mut self.scratch[..threads], |task, scratch| {
            let (block, piece) = (tasks[task / pieces].block as usize, task % pieces);
            let Some((batch, heads, queries)) = cut.grid.block(block) else { return };
            if piece >= cut.pieces(problem, batch).1 {
                return;
            }
            // Nobody waits for it: each task has its own.
            let mut result = shared[task].lock().unwrap_or_else(PoisonError::into_inner);
            let step = Step::Piece(piece, result.as_mut_slice());
            attend(level, Attend { job: &job, batch, heads, queries, scratch, step });
        });
        for (task, results) in tasks.iter().zip(partials.chunks_exact_mut(pieces)) {
            let Some(mut block) = blocks.take(task.block as usize) else { continue };
            let (batch, heads, queries) = (block.batch, block.heads.clone(), block.queries.clone());
            let own = &mut results[..cut.pieces(problem, batch).1];
            let mut results = own.iter_mut().map(|result| exclusive(result).as_mut_slice());
            let step = Step::Join(&mut results, &mut block);
            attend(level, Attend { job: &job, batch, heads, queries, scratch: &mut self.scratch[0], step });
        }
    }
}

/// Not generic, so that kernels are compiled with this crate and not once more with every crate that calls it.
fn attend(level: Level, work: Attend<'_, '_>) {
    level.dispatch(work);
}

/// A buffer that nobody else has. One whose holder panicked is as good as any: it is written before it is read.
fn exclusive(buffer: &mut Mutex<Buffer>) -> &mut Buffer {
    buffer.get_mut().unwrap_or_else(PoisonError::into_inner)
}
