//! The one-call API and the plan behind it: tasks over batch, heads and query blocks, heaviest first, in one parallel region.

use core::cmp::Reverse;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};
use std::cell::Cell;

use crate::kernel::blocking::Blocking;
use crate::kernel::fused::{Attend, Job};
use crate::kernel::scratch::Scratch;
use crate::problem::Problem;
use crate::view::{AnyHeads, Grid, OutputBlocks, WeightsOut};
use crate::workspace::grow;
use crate::{Element, Error, Heads, HeadsMut, Level, Options, Result, parallel};

/// Fused multi-head attention: `out = softmax(softmax_scale * q k^T) v` for every head of every batch item, with everything
/// that [`Options`] adds.
///
/// Shapes: `q` (batch, num_heads, seqlen_q, head_dim), `k` (batch, num_kv_heads, seqlen_k, head_dim), `v` (batch,
/// num_kv_heads, seqlen_k, head_dim_v), `out` (batch, num_heads, seqlen_q, head_dim_v). Query head `h` reads KV head
/// `h / (num_heads / num_kv_heads)`. Element types may differ; all arithmetic is in `f32`. No L x S matrix is ever stored.
///
/// Runs on the rayon pool that the caller is in, small problems on the caller's thread; the result has the same bits either
/// way. A query that may see no key gives zeros.
///
/// # Errors
/// [`Error`] says which operand, axis or option does not fit; `out` is then untouched.
///
/// ```
/// use polyhead::{Heads, HeadsMut, Options, multi_head};
/// let (q, k, v) = ([0.0f32; 2 * 3 * 8], [1.0f32; 2 * 5 * 8], [2.0f32; 2 * 5 * 4]);
/// let mut out = [0.0f32; 2 * 3 * 4];
/// multi_head(
///     &Heads::bhsd(&q, [1, 2, 3, 8])?,
///     &Heads::bhsd(&k, [1, 2, 5, 8])?,
///     &Heads::bhsd(&v, [1, 2, 5, 4])?,
///     HeadsMut::bhsd(&mut out, [1, 2, 3, 4])?,
///     &Options::new(),
/// )?;
/// assert_eq!(out, [2.0; 24]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn multi_head<Q: Element, K: Element, V: Element, O: Element>(
    q: &Heads<'_, Q>,
    k: &Heads<'_, K>,
    v: &Heads<'_, V>,
    out: HeadsMut<'_, O>,
    options: &Options<'_>,
) -> Result<()> {
    multi_head_with(q, k, v, Outputs::new(out), options)
}

/// As [`multi_head`], with the LSE or the attention weights besides.
///
/// # Errors
/// As [`multi_head`].
///
/// ```
/// use polyhead::{Heads, HeadsMut, Options, Outputs, multi_head_with};
/// let (q, k, v) = ([0.0f32; 8], [1.0f32; 4 * 8], [2.0f32; 4 * 8]);
/// let (mut out, mut lse, mut weights) = ([0.0f32; 8], [0.0f32; 1], [0.0f32; 4]);
/// let outputs = Outputs::new(HeadsMut::bhsd(&mut out, [1, 1, 1, 8])?)
///     .lse(&mut lse)
///     .weights(HeadsMut::bhsd(&mut weights, [1, 1, 1, 4])?);
/// let kv = [1, 1, 4, 8];
/// let q = Heads::bhsd(&q, [1, 1, 1, 8])?;
/// multi_head_with(&q, &Heads::bhsd(&k, kv)?, &Heads::bhsd(&v, kv)?, outputs, &Options::new())?;
/// assert_eq!(weights, [0.25; 4]);
/// assert!((lse[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn multi_head_with<Q: Element, K: Element, V: Element, O: Element>(
    q: &Heads<'_, Q>,
    k: &Heads<'_, K>,
    v: &Heads<'_, V>,
    outputs: Outputs<'_, O>,
    options: &Options<'_>,
) -> Result<()> {
    thread_local! {
        /// Taken out for the length of a call, so that nothing is borrowed while other work may run on this thread.
        static SPARE: Cell<Option<Workspace>> = const { Cell::new(None) };
    }
    // A thread that is ending may have dropped it already.
    let mut workspace = SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = run(q, k, v, outputs, options, &mut workspace);
    let _ = SPARE.try_with(|spare| spare.set(Some(workspace)));
    result
}

/// Where results go: the output, and what else is wanted.
#[derive(Debug)]
pub struct Outputs<'a, O> {
    out: HeadsMut<'a, O>,
    lse: Option<&'a mut [f32]>,
    weights: Option<(HeadsMut<'a, f32>, bool)>,
}

impl<'a, O> Outputs<'a, O> {
    /// Only the output, (batch, num_heads, seqlen_q, head_dim_v).
    pub fn new(out: HeadsMut<'a, O>) -> Self {
        Self { out, lse: None, weights: None }
    }

    /// The logarithm (natural) of the sum of the exponentials of each row's scores, sink included: packed (batch, num_heads,
    /// seqlen_q). -inf for a row that may see no key.
    pub fn lse(mut self, lse: &'a mut [f32]) -> Self {
        self.lse = Some(lse);
        self
    }

    /// Attention weights of every head, (batch, num_heads, seqlen_q, seqlen_k): the probabilities that the output was made
    /// with. They cost a second pass over the keys.
    pub fn weights(mut self, weights: HeadsMut<'a, f32>) -> Self {
        self.weights = Some((weights, false));
        self
    }

    /// Attention weights averaged over the heads, (batch, 1, seqlen_q, seqlen_k).
    pub fn averaged_weights(mut self, weights: HeadsMut<'a, f32>) -> Self {
        self.weights = Some((weights, true));
        self
    }
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
struct Workspace {
    scratch: Vec<Scratch>,
    tasks: Vec<Task>,
    /// Visible pairs of one head, and index, of each batch item.
    batches: Vec<(u64, usize)>,
    taken: Vec<AtomicBool>,
}

/// Eight bytes, as there is one for every 128 queries of a head.
#[derive(Clone, Copy, Debug, Default)]
struct Task {
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

/// One problem on one level, ready to run.
#[derive(Clone, Copy, Debug)]
struct Prepared<'a> {
    problem: Problem<'a>,
    blocking: Blocking,
    level: Level,
    threads: usize,
    /// Visible (query, key) pairs over all heads.
    pairs: u64,
}

impl Workspace {
    /// Lists the tasks and makes room for as many threads as the work is worth.
    fn prepare<'a>(&mut self, problem: Problem<'a>, level: Level, averaged: bool) -> Result<Prepared<'a>> {
        let blocking = Blocking::new(&problem, level.lanes(), averaged)?;
        let blocks = blocking.grid.len();
        if u32::try_from(blocks).is_err() {
            return Err(Error::Memory { bytes: blocks.saturating_mul(size_of::<Task>()) });
        }
        grow(&mut self.tasks, blocks, Task::default)?;
        grow(&mut self.taken, blocks, AtomicBool::default)?;
        self.tasks.truncate(blocks);
        let pairs = self.order_tasks(&problem, &blocking.grid)?;
        let work = pairs.saturating_mul((problem.head_dim.saturating_add(problem.head_dim_v)) as u64);
        let threads = if work < SERIAL_BELOW { 1 } else { parallel::current_threads().clamp(1, blocks.max(1)) };
        grow(&mut self.scratch, threads, Scratch::default)?;
        for scratch in &mut self.scratch[..threads] {
            scratch.reserve(&problem, &blocking)?;
        }
        Ok(Prepared { problem, blocking, level, threads, pairs })
    }

    /// Fills the task list and returns the visible pairs of all heads.
    ///
    /// Batch items go by weight, the query blocks of each head heaviest first, so that what is left at the end is small. Heads
    /// stay together: their tasks share K and V in cache (causal, D 128, S 2048: 0.60 of full if all blocks of all heads are
    /// sorted by weight, 0.52 so).
    fn order_tasks(&mut self, problem: &Problem<'_>, grid: &Grid) -> Result<u64> {
        if self.tasks.is_empty() {
            // The product of the axes is 0, but that of some of them may overflow.
            return Ok(0);
        }
        let (head_blocks, query_blocks) = (grid.head_blocks(), grid.query_blocks());
        self.batches.clear();
        grow(&mut self.batches, grid.batch, Default::default)?;
        for (batch, (pairs, index)) in self.batches.iter_mut().enumerate() {
            (*pairs, *index) = (problem.band(batch).pairs(0..grid.seqlen_q), batch);
        }
        self.batches.sort_unstable_by_key(|&(pairs, batch)| (Reverse(pairs), batch));
        let item_blocks = head_blocks * query_blocks;
        for (&(_, batch), item) in self.batches.iter().zip(self.tasks.chunks_exact_mut(item_blocks)) {
            let (first, others) = item.split_at_mut(query_blocks);
            let band = problem.band(batch);
            for (block, task) in (batch * item_blocks..).zip(first.iter_mut()) {
                let pairs = band.pairs(grid.block(block).2);
                *task = Task { pairs: u32::try_from(pairs).unwrap_or(u32::MAX), block: block as u32 };
            }
            first.sort_unstable_by_key(|task| (Reverse(task.pairs), task.block));
            // Every head of an item sees the same pairs.
            for (i, head) in others.chunks_exact_mut(query_blocks).enumerate() {
                for (task, like) in head.iter_mut().zip(&*first) {
                    *task = Task { block: like.block + ((i + 1) * query_blocks) as u32, ..*like };
                }
            }
        }
        let per_head = self.batches.iter().fold(0u64, |sum, &(pairs, _)| sum.saturating_add(pairs));
        Ok(per_head.saturating_mul(grid.num_heads as u64))
    }

    fn bytes(&self) -> usize {
        self.scratch.iter().map(Scratch::bytes).sum::<usize>()
            + self.scratch.capacity() * size_of::<Scratch>()
            + self.batches.capacity() * size_of::<(u64, usize)>()
            + self.tasks.capacity() * size_of::<Task>()
            + self.taken.capacity() * size_of::<AtomicBool>()
    }

    /// Runs all tasks.
    fn execute<O: Element>(&mut self, prepared: &Prepared<'_>, operands: [AnyHeads<'_>; 3], outputs: Checked<'_, O>) {
        let Prepared { problem, blocking, level, threads, .. } = *prepared;
        let [q, k, v] = operands;
        let job = Job { problem: &problem, blocking, q, k, v };
        self.taken.iter().for_each(|taken| taken.store(false, Ordering::Relaxed));
        let blocks = OutputBlocks::new(blocking.grid, outputs.out, outputs.lse, outputs.weights, &self.taken);
        let tasks = &self.tasks;
        parallel::for_each_task(tasks.len(), &mut self.scratch[..threads], |task, scratch| {
            let Some(mut block) = blocks.take(tasks[task].block as usize) else { return };
            let (batch, all_heads, queries) = (block.batch, block.heads.clone(), block.queries.clone());
            let mut first = all_heads.start;
            while first < all_heads.end {
                // Heads of one group share a pass; with averaged weights a task has all groups.
                let group_end = (problem.kv_head(first) + 1) * problem.group;
                let end = (first + blocking.heads_per_pass).min(group_end).min(all_heads.end);
                let (heads, queries) = (first..end, queries.clone());
                level.dispatch(Attend { job: &job, batch, heads, queries, scratch, sink: &mut block });
                first = end;
            }
        });
    }
}

/// Outputs of the right shapes.
struct Checked<'a, O> {
    out: HeadsMut<'a, O>,
    lse: Option<HeadsMut<'a, f32>>,
    weights: Option<WeightsOut<'a>>,
}

fn check_shape(operand: &'static str, expected: [usize; 4], actual: [usize; 4], axes: [&'static str; 4]) -> Result<()> {
    match (0..4).find(|&axis| expected[axis] != actual[axis]) {
        None => Ok(()),
        Some(i) => Err(Error::Shape { operand, axis: axes[i], expected: expected[i], actual: actual[i] }),
    }
}

impl<'a, O: Element> Outputs<'a, O> {
    fn check(self, problem: &Problem<'_>) -> Result<Checked<'a, O>> {
        let [batch, num_heads, seqlen_q, seqlen_k] = problem.scores_shape();
        check_shape("out", problem.output_shape(), self.out.shape(), ["batch", "heads", "seq", "dim"])?;
        let lse = self.lse.map(|lse| {
            let actual = lse.len();
            let wrong = |expected| Error::Length { operand: "lse", expected, actual };
            let expected = crate::problem::packed_len("lse", [batch, num_heads, seqlen_q])?;
            if actual == expected { HeadsMut::bhsd(lse, [batch, num_heads, seqlen_q, 1]) } else { Err(wrong(expected)) }
        });
        let weights = self.weights.map(|(view, averaged)| {
            let planes = if averaged { 1 } else { num_heads };
            let expected = [batch, planes, seqlen_q, seqlen_k];
            check_shape("weights", expected, view.shape(), ["batch", "heads", "seqlen_q", "seqlen_k"])?;
            Ok(WeightsOut { view, averaged })
        });
        Ok(Checked { out: self.out, lse: lse.transpose()?, weights: weights.transpose()? })
    }
}

impl<O> Checked<'_, O> {
    /// Whether there is not one element to write.
    fn is_empty(&self) -> bool
    where
        O: Element,
    {
        let empty = |shape: [usize; 4]| shape.contains(&0);
        empty(self.out.shape())
            && self.lse.as_ref().is_none_or(|lse| empty(lse.shape()))
            && self.weights.as_ref().is_none_or(|weights| empty(weights.view.shape()))
    }
}

fn run<Q: Element, K: Element, V: Element, O: Element>(
    q: &Heads<'_, Q>,
    k: &Heads<'_, K>,
    v: &Heads<'_, V>,
    outputs: Outputs<'_, O>,
    options: &Options<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    let level = Level::resolve(options.level)?;
    let problem = Problem::new(q.shape(), k.shape(), v.shape(), options)?;
    let mut outputs = outputs.check(&problem)?;
    if problem.num_heads == 0 {
        // No task has a row, but the mean of no heads has elements.
        if let Some(weights) = &mut outputs.weights {
            weights.view.fill(0.0);
        }
        return Ok(());
    }
    if outputs.is_empty() {
        return Ok(());
    }
    let averaged = outputs.weights.as_ref().is_some_and(|weights| weights.averaged);
    let prepared = workspace.prepare(problem, level, averaged)?;
    workspace.execute(&prepared, [(*q).into(), (*k).into(), (*v).into()], outputs);
    Ok(())
}

/// Sizes of an attention problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Batch items.
    pub batch: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Queries of an item.
    pub seqlen_q: usize,
    /// Keys of an item.
    pub seqlen_k: usize,
    /// Width of queries and keys.
    pub head_dim: usize,
    /// Width of values and outputs.
    pub head_dim_v: usize,
}

impl Shape {
    /// Shapes of q, k and v.
    fn operands(&self) -> [[usize; 4]; 3] {
        let Self { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v } = *self;
        [
            [batch, num_heads, seqlen_q, head_dim],
            [batch, num_kv_heads, seqlen_k, head_dim],
            [batch, num_kv_heads, seqlen_k, head_dim_v],
        ]
    }
}

/// [`multi_head`] as a plan: checked and allocated once, run many times without allocating.
///
/// ```
/// use polyhead::{Heads, HeadsMut, MultiHead, Options, Outputs, Shape};
/// let shape = Shape {
///     batch: 1, num_heads: 4, num_kv_heads: 2, seqlen_q: 6, seqlen_k: 6, head_dim: 8, head_dim_v: 8,
/// };
/// let mut plan = MultiHead::new(shape, &Options::new())?;
/// println!("{}", plan.explain());
/// let (q, kv) = ([0.5f32; 4 * 6 * 8], [0.25f32; 2 * 6 * 8]);
/// let mut out = [0.0f32; 4 * 6 * 8];
/// for _step in 0..3 {
///     let (q, kv) = (Heads::bhsd(&q, [1, 4, 6, 8])?, Heads::bhsd(&kv, [1, 2, 6, 8])?);
///     plan.run(&q, &kv, &kv, HeadsMut::bhsd(&mut out, [1, 4, 6, 8])?)?;
/// }
/// assert_eq!(out, [0.25; 4 * 6 * 8]);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiHead<'o> {
    shape: Shape,
    options: Options<'o>,
    workspace: Workspace,
    explanation: Explanation,
}

impl<'o> MultiHead<'o> {
    /// Plans for one shape and one set of options, with scratch for the threads of the pool the caller is in.
    ///
    /// # Errors
    /// As [`multi_head`].
    pub fn new(shape: Shape, options: &Options<'o>) -> Result<Self> {
        let mut workspace = Workspace::default();
        let [q, k, v] = shape.operands();
        let level = Level::resolve(options.level)?;
        let prepared = workspace.prepare(Problem::new(q, k, v, options)?, level, false)?;
        let explanation = Explanation::new(&prepared, &workspace);
        Ok(Self { shape, options: *options, workspace, explanation })
    }

    /// Attention of operands of the planned shape. Allocates nothing on a pool of as many threads as the plan was made in.
    ///
    /// # Errors
    /// As [`multi_head`]; [`Error::Shape`] if an operand has not the planned shape.
    pub fn run<Q: Element, K: Element, V: Element, O: Element>(
        &mut self,
        q: &Heads<'_, Q>,
        k: &Heads<'_, K>,
        v: &Heads<'_, V>,
        out: HeadsMut<'_, O>,
    ) -> Result<()> {
        self.run_with(q, k, v, Outputs::new(out))
    }

    /// As [`run`](Self::run), with LSE or weights besides.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with<Q: Element, K: Element, V: Element, O: Element>(
        &mut self,
        q: &Heads<'_, Q>,
        k: &Heads<'_, K>,
        v: &Heads<'_, V>,
        outputs: Outputs<'_, O>,
    ) -> Result<()> {
        let actual = [q.shape(), k.shape(), v.shape()];
        for (i, expected) in self.shape.operands().into_iter().enumerate() {
            check_shape(["q", "k", "v"][i], expected, actual[i], ["batch", "heads", "seq", "dim"])?;
        }
        run(q, k, v, outputs, &self.options, &mut self.workspace)
    }

    /// What a run does: level, path, tiles, tasks, threads, memory.
    pub fn explain(&self) -> Explanation {
        self.explanation
    }
}

/// How a plan runs; `Display` says it in a line.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The level it runs on.
    pub level: Level,
    /// The algorithm: `"fused"`.
    pub path: &'static str,
    /// Queries and keys of a tile of scores.
    pub tile: (usize, usize),
    /// Tasks that threads can share.
    pub tasks: usize,
    /// Threads that take part at the most.
    pub threads: usize,
    /// Bytes of scratch on the heap.
    pub workspace_bytes: usize,
    /// Visible (query, key) pairs over all heads.
    pub visible_pairs: u64,
    /// Floating-point operations of the two products, `2 * visible_pairs * (head_dim + head_dim_v)`.
    pub flops: u64,
}

impl Explanation {
    fn new(prepared: &Prepared<'_>, workspace: &Workspace) -> Self {
        let Prepared { problem, blocking, level, threads, pairs: visible_pairs, .. } = *prepared;
        let width = (problem.head_dim as u64).saturating_add(problem.head_dim_v as u64);
        Self {
            level,
            path: "fused",
            tile: (blocking.tile(), blocking.block_k),
            tasks: workspace.tasks.len(),
            threads,
            workspace_bytes: workspace.bytes(),
            visible_pairs,
            flops: visible_pairs.saturating_mul(width).saturating_mul(2),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, path, tile, tasks, threads, workspace_bytes, flops, .. } = self;
        write!(
            f,
            "{path} on {}: tiles of {} queries x {} keys, {tasks} tasks on {threads} threads, {} KiB of scratch, {:.3} MFLOP",
            level.name(),
            tile.0,
            tile.1,
            workspace_bytes.div_ceil(1024),
            *flops as f64 / 1e6
        )
    }
}
