//! A call of a layer: three products, attention, one product.

use core::cell::Cell;
use core::ops::Range;

use super::config::Sizes;
use super::extra_keys::turn_columns;
use super::inputs::order;
use super::rows::{Rows, for_rows};
use super::{Inputs, MultiHeadAttention, Workspace};
use crate::gemm::gemm_packed_columns;
use crate::problem::{check_shape, packed_len};
use crate::workspace::Buffer;
use crate::{Element, Error, Heads, HeadsMut, Matrices, MatricesMut, Options, Ragged, Result, multi_head_with};

/// Where a layer's results go: the output, and what else is wanted.
///
/// ```
/// use polyhead::layer::Outputs;
/// use polyhead::{HeadsMut, MatricesMut};
/// let (mut out, mut weights) = ([0.0f32; 2 * 5 * 8], [0.0f32; 2 * 5 * 7]);
/// let outputs = Outputs::new(MatricesMut::contiguous(&mut out, [2, 5, 8])?)
///     .averaged_weights(HeadsMut::bhsd(&mut weights, [2, 1, 5, 7])?);
/// # let _ = outputs;
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Debug)]
pub struct Outputs<'a, O> {
    out: MatricesMut<'a, O>,
    weights: Option<(HeadsMut<'a, f32>, bool)>,
}

impl<'a, O: Element> Outputs<'a, O> {
    /// Only the output: (batch, seqlen_q, output_dim), or (1, tokens, output_dim) of packed tokens.
    pub fn new(out: MatricesMut<'a, O>) -> Self {
        Self { out, weights: None }
    }

    /// Attention weights of every head, (batch, num_heads, seqlen_q, seqlen_k +
    /// [`extra_keys`](MultiHeadAttention::extra_keys)).
    pub fn weights(mut self, weights: HeadsMut<'a, f32>) -> Self {
        self.weights = Some((weights, false));
        self
    }

    /// Attention weights averaged over the heads, (batch, 1, seqlen_q, seqlen_k +
    /// [`extra_keys`](MultiHeadAttention::extra_keys)).
    pub fn averaged_weights(mut self, weights: HeadsMut<'a, f32>) -> Self {
        self.weights = Some((weights, true));
        self
    }

    fn check(&self, out: [usize; 3], weights: [usize; 4]) -> Result<()> {
        check_shape("out", out, self.out.shape(), ["batch", "seq", "dim"])?;
        if let Some((view, averaged)) = &self.weights {
            let expected = [weights[0], if *averaged { 1 } else { weights[1] }, weights[2], weights[3]];
            check_shape("weights", expected, view.shape(), ["batch", "heads", "seqlen_q", "seqlen_k"])?;
        }
        Ok(())
    }
}

/// Parts of a projection that one product made, and where its rows are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Projected {
    /// The first of these parts; the product lies in its buffer.
    pub(super) first: usize,
    rows: Rows,
    /// Rows before the tokens, for additional keys.
    extra: usize,
}

thread_local! {
    /// Taken out for the length of a call, so that nothing is borrowed while other work may run on this thread.
    static SPARE: Cell<Option<Workspace>> = const { Cell::new(None) };
}

/// Calls `f` with a workspace that this thread keeps.
pub(super) fn with_spare<R>(f: impl FnOnce(&mut Workspace) -> R) -> R {
    // A thread that is ending may have dropped it already.
    let mut workspace = SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default();
    let result = f(&mut workspace);
    let _ = SPARE.try_with(|spare| spare.set(Some(workspace)));
    result
}

impl<T: Element> MultiHeadAttention<T> {
    /// The layer's output, packed (batch, seqlen_q, output_dim), or (tokens, output_dim) of packed tokens.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into).
    pub fn forward<A: Element>(&self, inputs: &Inputs<'_, A>, options: &Options<'_>) -> Result<Vec<A>> {
        let shape = self.output_shape(inputs);
        let mut out = zeros("out", shape)?;
        let outputs = Outputs::new(MatricesMut::contiguous(&mut out, shape)?);
        with_spare(|workspace| self.forward_into(inputs, outputs, options, workspace))?;
        Ok(out)
    }

    /// As [`forward`](Self::forward), with the attention weights, packed (batch, num_heads, seqlen_q, seqlen_k +
    /// [`extra_keys`](Self::extra_keys)), or if `average` is set their mean over the heads, (batch, seqlen_q, ..): PyTorch's
    /// `need_weights=True`.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into).
    ///
    /// ```
    /// use polyhead::layer::{Config, Inputs, MultiHeadAttention, Weights};
    /// use polyhead::{Matrices, Matrix, Options};
    /// let w = [0.125f32; 8 * 8];
    /// let w = Matrix::contiguous(&w, [8, 8])?;
    /// let layer = MultiHeadAttention::new(Config::new(8, 2), &Weights::new(w, w, w, w))?;
    /// let x = [1.0f32; 4 * 8];
    /// let inputs = Inputs::self_attention(Matrices::contiguous(&x, [1, 4, 8])?);
    /// let (out, weights) = layer.forward_with_weights(&inputs, true, &Options::new())?;
    /// assert_eq!((out, weights), (vec![1.0; 4 * 8], vec![0.25; 4 * 4]));
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn forward_with_weights<A: Element>(
        &self,
        inputs: &Inputs<'_, A>,
        average: bool,
        options: &Options<'_>,
    ) -> Result<(Vec<A>, Vec<f32>)> {
        let shape = self.output_shape(inputs);
        let mut weights_shape = self.weights_shape(inputs);
        if average {
            weights_shape[1] = 1;
        }
        let (mut out, mut weights) = (zeros("out", shape)?, zeros("weights", weights_shape)?);
        let outputs = Outputs::new(MatricesMut::contiguous(&mut out, shape)?);
        let view = HeadsMut::bhsd(&mut weights, weights_shape)?;
        let outputs = if average { outputs.averaged_weights(view) } else { outputs.weights(view) };
        with_spare(|workspace| self.forward_into(inputs, outputs, options, workspace))?;
        Ok((out, weights))
    }

    /// The layer's results into views, with the caller's workspace: allocates nothing once that is large enough.
    ///
    /// The call's scale, softcap and window take the place of the [`Config`](super::Config)'s, its sinks that of the weights'.
    ///
    /// # Errors
    /// [`Error::Shape`] for inputs or outputs that do not fit the layer or each other, and all errors of
    /// [`multi_head_with`] for options. [`Error::Unsupported`] for another level than the layer's, for additional keys with packed
    /// tokens, ALiBi or queries that stand before the first key, and for weights of packed tokens. Nothing is then written.
    pub fn forward_into<A: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, A>,
        mut outputs: Outputs<'_, O>,
        options: &Options<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Sizes { embed_dim, kdim, vdim, num_heads, head_dim_v, .. } = self.sizes;
        inputs.check([embed_dim, kdim, vdim])?;
        let extra = self.extra_keys();
        if extra > 0 && inputs.starts.is_some() {
            return Err(Error::Unsupported { what: "packed tokens with add_bias_kv or add_zero_attn" });
        }
        outputs.check(self.output_shape(inputs), self.weights_shape(inputs))?;
        let mut options = self.options(options)?;
        let [[batch, seqlen_q, _], [_, seqlen_k, _], _] = inputs.tokens.map(|tokens| tokens.shape());

        let projected = self.project(inputs, &mut workspace.projected)?;
        self.rotate(inputs, &projected, workspace)?;
        let Workspace { projected: buffers, heads, padded, .. } = workspace;
        if extra > 0 {
            options = padded.options(&options, extra, [seqlen_q, seqlen_k])?;
        }
        let data = buffers.each_mut().map(|buffer| &*buffer.as_mut_slice());
        let [q, k, v] = [0, 1, 2].map(|part| {
            let count = if part == 0 { seqlen_q } else { extra + seqlen_k };
            self.heads(part, count, &projected[part], data[projected[part].first])
        });
        let rows = Rows::new([batch, seqlen_q], self.sizes.concat(), order(&outputs.out.layout()));
        heads.reserve(rows.len()?)?;
        let out = crate::Outputs::new(rows.heads_mut(heads.as_mut_slice(), [num_heads, head_dim_v])?);
        let wanted = match &mut outputs.weights {
            Some((weights, true)) => out.averaged_weights(weights.reborrow()),
            Some((weights, false)) => out.weights(weights.reborrow()),
            None => out,
        };
        attend([q?, k?, v?], inputs.starts, wanted, &options)?;
        if let Some((weights, _)) = outputs.weights.as_mut().filter(|_| extra > 0) {
            turn_columns(weights, extra);
        }
        self.project_heads(rows, heads, inputs.starts.map(|[queries, _]| queries), &mut outputs.out)
    }

    /// Projects attention outputs, heads side by side.
    pub(super) fn project_heads<O: Element>(
        &self,
        rows: Rows,
        heads: &mut Buffer,
        starts: Option<&[usize]>,
        out: &mut MatricesMut<'_, O>,
    ) -> Result<()> {
        let x = rows.matrices(heads.as_mut_slice(), self.sizes.concat())?;
        let (columns, bias) = (0..self.sizes.output_dim, self.output_bias.as_deref());
        for_rows(x, out, starts, |x, out, many| gemm_packed_columns(x, &self.output, columns.clone(), many, bias, out))
    }

    /// Projects all inputs, those that are the same by one product.
    pub(super) fn project<A: Element>(
        &self,
        inputs: &Inputs<'_, A>,
        buffers: &mut [Buffer; 3],
    ) -> Result<[Projected; 3]> {
        let mut projected = [None; 3];
        let mut first = 0;
        while first < 3 {
            let mut end = first + 1;
            while self.projections.is_joint() && end < 3 && inputs.same(first, end) {
                end += 1;
            }
            let starts = inputs.starts.map(|[queries, keys]| if first == 0 { queries } else { keys });
            let made = self.project_parts((inputs.tokens[first], starts), first..end, &mut buffers[first])?;
            projected[first..end].fill(Some(made));
            first = end;
        }
        Ok(projected.map(|made| made.unwrap_or_else(|| unreachable!("every part belongs to a product"))))
    }

    /// Projects an input for some parts, behind room for additional keys if there are keys or values among these.
    fn project_parts<A: Element>(
        &self,
        (x, starts): (Matrices<'_, A>, Option<&[usize]>),
        parts: Range<usize>,
        buffer: &mut Buffer,
    ) -> Result<Projected> {
        let [batch, seq, _] = x.shape();
        let extra = if parts.end > 1 { self.extra_keys() } else { 0 };
        let columns = self.projections.columns(parts.clone());
        let seq = seq.checked_add(extra).ok_or(Error::Memory { bytes: usize::MAX })?;
        let rows = Rows::new([batch, seq], columns, order(&x.layout()));
        buffer.reserve(rows.len()?)?;
        let data = buffer.as_mut_slice();
        let mut out = rows.matrices_mut(data, extra, columns)?;
        for_rows(x, &mut out, starts, |x, out, many| self.projections.project(x, parts.clone(), many, out))?;
        for part in parts.clone().filter(|&part| part > 0) {
            let column = self.projections.offset(part, parts.start);
            for item in 0..batch {
                for position in 0..extra {
                    let width = self.projections.parts[part].width();
                    let row = rows.row(data, [item, position], column..column + width);
                    match &self.bias_kv {
                        Some(kv) if position == 0 => row.copy_from_slice(&kv[part - 1]),
                        _ => row.fill(0.0),
                    }
                }
            }
        }
        Ok(Projected { first: parts.start, rows, extra })
    }

    /// The heads of a part: `count` rows, the last ones.
    pub(super) fn heads<'a>(
        &self,
        part: usize,
        count: usize,
        projected: &Projected,
        data: &'a [f32],
    ) -> Result<Heads<'a, f32>> {
        let column = self.projections.offset(part, projected.first);
        let first = if part == 0 { projected.extra } else { 0 };
        let part = self.projections.parts[part];
        projected.rows.heads(data, [first, count], column, [part.heads, part.dim])
    }

    /// Turns queries and keys by their positions.
    fn rotate<A: Element>(
        &self,
        inputs: &Inputs<'_, A>,
        projected: &[Projected; 3],
        workspace: &mut Workspace,
    ) -> Result<()> {
        for part in 0..2 {
            let [batch, seq, _] = inputs.tokens[part].shape();
            let whole = [0, seq];
            let starts = inputs.starts.map_or(&whole[..], |starts| starts[part]);
            for item in 0..batch {
                for sequence in starts.windows(2) {
                    let tokens = sequence[0]..sequence[1];
                    self.rotate_run(part, &projected[part], [item, inputs.first_position], tokens, workspace)?;
                }
            }
        }
        Ok(())
    }

    /// Turns the queries (part 0) or keys (part 1) of some tokens of an item, of which the first has `position`.
    pub(super) fn rotate_run(
        &self,
        part: usize,
        projected: &Projected,
        [item, position]: [usize; 2],
        tokens: Range<usize>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Some(rotary) = self.config.rotary_embedding() else { return Ok(()) };
        let Workspace { projected: buffers, turns, .. } = workspace;
        let end = position.checked_add(tokens.len());
        let beyond =
            Error::Value { option: "first_position", expected: "a position of fewer", actual: position as f64 };
        turns.reserve(rotary, position..end.ok_or(beyond)?)?;
        let column = self.projections.offset(part, projected.first);
        let columns = column..column + self.projections.parts[part].width();
        let data = buffers[projected.first].as_mut_slice();
        for (i, token) in tokens.enumerate() {
            let row = projected.rows.row(data, [item, projected.extra + token], columns.clone());
            turns.apply(position + i, row, self.sizes.head_dim);
        }
        Ok(())
    }

    /// What holds in a call.
    pub(super) fn options<'a>(&'a self, options: &Options<'a>) -> Result<Options<'a>> {
        if options.level.is_some_and(|level| level != self.level()) {
            return Err(Error::Unsupported {
                what: "another level than the one that the layer's weights are packed for",
            });
        }
        let mut options = self.config.options(options).level(self.level());
        options.sinks = options.sinks.or(self.sinks.as_deref());
        Ok(options)
    }

    fn output_shape<A: Element>(&self, inputs: &Inputs<'_, A>) -> [usize; 3] {
        let [batch, seqlen_q, _] = inputs.tokens[0].shape();
        [batch, seqlen_q, self.sizes.output_dim]
    }

    fn weights_shape<A: Element>(&self, inputs: &Inputs<'_, A>) -> [usize; 4] {
        let [[batch, seqlen_q, _], [_, seqlen_k, _], _] = inputs.tokens.map(|tokens| tokens.shape());
        [batch, self.sizes.num_heads, seqlen_q, seqlen_k.saturating_add(self.extra_keys())]
    }
}

/// Attention of projected heads. Not generic, so that it is compiled once.
fn attend(
    [q, k, v]: [Heads<'_, f32>; 3],
    starts: Option<[&[usize]; 2]>,
    outputs: crate::Outputs<'_, f32>,
    options: &Options<'_>,
) -> Result<()> {
    match starts {
        None => multi_head_with(&q, &k, &v, outputs, options),
        Some([q_starts, k_starts]) => {
            let (k, v) = (Ragged::new(k, k_starts)?, Ragged::new(v, k_starts)?);
            multi_head_with(&Ragged::new(q, q_starts)?, &k, &v, outputs, options)
        }
    }
}

/// A packed output.
pub(super) fn zeros<O: Element, const N: usize>(operand: &'static str, shape: [usize; N]) -> Result<Vec<O>> {
    let mut out = Vec::new();
    crate::workspace::grow(&mut out, packed_len(operand, shape)?, O::default)?;
    Ok(out)
}
