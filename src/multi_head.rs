//! The one-call API and the plan behind it.

mod run;

use core::fmt;
use std::cell::Cell;

use crate::kernel::blocking::is_few;
use crate::kernel::matrix::{MAX_TERMS, terms};
use crate::problem::{Problem, check_shape, packed_len};
use crate::view::WeightsOut;
use crate::{Element, Error, HeadsMut, Level, Options, Result, Sequences};
use run::{Prepared, Workspace};

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
pub fn multi_head<O: Element>(
    q: &impl Sequences,
    k: &impl Sequences,
    v: &impl Sequences,
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
pub fn multi_head_with<O: Element>(
    q: &impl Sequences,
    k: &impl Sequences,
    v: &impl Sequences,
    outputs: Outputs<'_, O>,
    options: &Options<'_>,
) -> Result<()> {
    thread_local! {
        /// Taken out for the length of a call, so that nothing is borrowed while other work may run on this thread.
        static SPARE: Cell<Option<Box<Workspace>>> = const { Cell::new(None) };
    }
    // A thread that is ending may have dropped it already.
    let mut workspace = SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = run([q, k, v], outputs, options, &mut workspace);
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

/// Outputs of the right shapes.
struct Checked<'a, O> {
    out: HeadsMut<'a, O>,
    lse: Option<HeadsMut<'a, f32>>,
    weights: Option<WeightsOut<'a>>,
}

impl<'a, O: Element> Outputs<'a, O> {
    fn check(self, problem: &Problem<'_>, starts: Option<&[usize]>) -> Result<Checked<'a, O>> {
        let [mut batch, num_heads, mut seqlen_q, seqlen_k] = problem.scores_shape();
        if let Some(&[.., rows]) = starts {
            (batch, seqlen_q) = (1, rows);
            if self.weights.is_some() {
                return Err(Error::Unsupported { what: "attention weights of ragged queries" });
            }
        }
        let out = [batch, num_heads, seqlen_q, problem.head_dim_v];
        check_shape("out", out, self.out.shape(), ["batch", "heads", "seq", "dim"])?;
        let lse = self.lse.map(|lse| {
            let actual = lse.len();
            let wrong = |expected| Error::Length { operand: "lse", expected, actual };
            let expected = packed_len("lse", [batch, num_heads, seqlen_q])?;
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

fn run<O: Element>(
    [q, k, v]: [&dyn Sequences; 3],
    outputs: Outputs<'_, O>,
    options: &Options<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    let level = Level::resolve(options.level)?;
    let operands = [q.erase(), k.erase(), v.erase()];
    let problem = Problem::of_operands(&operands, [q.shape(), k.shape(), v.shape()], options)?;
    let starts = operands[0].starts()?;
    let mut outputs = outputs.check(&problem, starts)?;
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
    let weights = outputs.weights.as_ref().map(|weights| weights.averaged);
    let terms = operands.iter().map(|operand| terms(operand.data, options.precision)).max().unwrap_or(MAX_TERMS);
    let prepared = workspace.prepare(&problem, starts, level, weights, terms)?;
    workspace.execute(&problem, &prepared, operands, outputs);
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
        let problem = Problem::new(q, k, v, options)?;
        // Operands of any type: the most memory.
        let prepared = workspace.prepare(&problem, None, level, None, MAX_TERMS)?;
        let explanation = Explanation::new(&problem, &prepared, &workspace);
        Ok(Self { shape, options: *options, workspace, explanation })
    }

    /// Attention of operands of the planned shape. Allocates nothing on a pool of as many threads as the plan was made in.
    ///
    /// # Errors
    /// As [`multi_head`]; [`Error::Shape`] if an operand has not the planned shape.
    pub fn run<O: Element>(
        &mut self,
        q: &impl Sequences,
        k: &impl Sequences,
        v: &impl Sequences,
        out: HeadsMut<'_, O>,
    ) -> Result<()> {
        self.run_with(q, k, v, Outputs::new(out))
    }

    /// As [`run`](Self::run), with LSE or weights besides.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with<O: Element>(
        &mut self,
        q: &impl Sequences,
        k: &impl Sequences,
        v: &impl Sequences,
        outputs: Outputs<'_, O>,
    ) -> Result<()> {
        let actual = [q.shape(), k.shape(), v.shape()];
        for (i, expected) in self.shape.operands().into_iter().enumerate() {
            check_shape(["q", "k", "v"][i], expected, actual[i], ["batch", "heads", "seq", "dim"])?;
        }
        run([q, k, v], outputs, &self.options, &mut self.workspace)
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
    /// The algorithm: `"fused"` with queries in lanes, `"fused, few rows"` with head_dim in lanes, for decoding, or `"fused, matrix
    /// tiles"` with both products on tiles ([`Level::Amx`]).
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
    fn new(problem: &Problem<'_>, prepared: &Prepared<'_>, workspace: &Workspace) -> Self {
        let Prepared { blocking, level, threads, pairs: visible_pairs, .. } = *prepared;
        let width = (problem.head_dim as u64).saturating_add(problem.head_dim_v as u64);
        Self {
            level,
            path: match (is_few(problem, 0), blocking.on_matrix(problem, 0)) {
                (true, _) => "fused, few rows",
                (false, true) => "fused, matrix tiles",
                (false, false) => "fused",
            },
            tile: (blocking.tile(), blocking.score_keys(problem, 0)),
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
