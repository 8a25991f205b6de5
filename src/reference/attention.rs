//! Attention by its definition: every score, one after the other.

use crate::problem::{Problem, packed_len};
use crate::{Diagonal, Element, Error, Heads, Matrix, Options, Result, View};

#[cfg(test)]
mod tests;

/// What attention gives, with everything that a fast kernel never has in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// The output, packed (batch, heads, seqlen_q, head_dim_v).
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of the exponentials of each row of scores, the sink among them: (batch, heads,
    /// seqlen_q).
    pub lse: Vec<f64>,
    /// The weights, packed (batch, heads, seqlen_q, seqlen_k). Rows sum to 1, or to less with a sink.
    pub weights: Vec<f64>,
    /// Of the weights.
    shape: [usize; 4],
}

impl Attention {
    /// The weights averaged over the heads, packed (batch, seqlen_q, seqlen_k), as PyTorch's `nn.MultiheadAttention`
    /// returns them. Empty if there are no heads.
    ///
    /// ```
    /// use polyhead::{Heads, Options, reference};
    /// // Two heads, one query, two keys; head 0 prefers key 1 as head 1 prefers key 0.
    /// let q = Heads::bhsd(&[1.0f32, -1.0], [1, 2, 1, 1])?;
    /// let k = Heads::bhsd(&[0.0f32, 1.0, 0.0, 1.0], [1, 2, 2, 1])?;
    /// let attention = reference::multi_head(&q, &k, &k, &Options::new())?;
    /// assert_eq!(attention.averaged_weights(), [0.5, 0.5]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn averaged_weights(&self) -> Vec<f64> {
        let [_, heads, seqlen_q, seqlen_k] = self.shape;
        if self.weights.is_empty() {
            return Vec::new();
        }
        let head = seqlen_q * seqlen_k;
        let mean = |item: &[f64], at: usize| (0..heads).map(|h| item[h * head + at]).sum::<f64>() / heads as f64;
        self.weights.chunks(heads * head).flat_map(|item| (0..head).map(move |at| mean(item, at))).collect()
    }
}

/// Attention over all heads, with every option (level and precision mean nothing here).
///
/// The score of a query and a visible key is `softmax_scale * dot(q, k)`, then softcap, then ALiBi and bias; the
/// weights are their softmax, with a sink in the maximum and the sum if there is one. As IEEE arithmetic has it, but in
/// `f64`:
///
/// * K, V, mask and bias say nothing at a key that is hidden by any of causality, window, key length, mask or a bias of
///   -inf; its weight is 0, even in a row that is NaN.
/// * A query that sees no key gives output 0, weights 0 and LSE -inf, with or without a sink.
/// * A NaN or +inf among the visible scores makes output, LSE and visible weights of that row NaN, and of no other row.
/// * A visible score of -inf (infinite operands, not a bias) has weight 0; a row of nothing but such scores and no
///   finite sink is NaN.
/// * A NaN in V at a visible key makes its column of the output NaN, even if the weight is 0.
///
/// ```
/// use polyhead::{Diagonal, Heads, Options, reference};
/// let q = Heads::bhsd(&[0.0f32; 2], [1, 1, 2, 1])?;
/// let v = [1.0f32, 2.0, 3.0, 4.0, 5.0];
/// let v = Heads::bhsd(&v, [1, 1, 5, 1])?;
/// // All scores are 0, so each query averages what it sees.
/// let causal = |diagonal| reference::multi_head(&q, &v, &v, &Options::new().causal(diagonal));
/// assert_eq!(causal(Diagonal::TopLeft)?.out, [1.0, 1.5]);
/// assert_eq!(causal(Diagonal::BottomRight)?.out, [2.5, 3.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
///
/// # Errors
/// Those of every attention call: operands of different shapes, heads that do not group, bad options.
/// [`Error::Overflow`] or [`Error::Memory`] if output or weights do not fit in memory.
pub fn multi_head<Q: Element, K: Element, V: Element>(
    q: &Heads<'_, Q>,
    k: &Heads<'_, K>,
    v: &Heads<'_, V>,
    options: &Options<'_>,
) -> Result<Attention> {
    let problem = &Problem::new(q.shape(), k.shape(), v.shape(), options)?;
    let Problem { batch, num_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, .. } = *problem;
    let shape = [batch, num_heads, seqlen_q, seqlen_k];
    let mut lse = zeros("lse", [batch, num_heads, seqlen_q])?;
    let mut weights = zeros("weights", shape)?;
    let mut out = zeros("out", [batch, num_heads, seqlen_q, head_dim_v])?;
    let scale = options.softmax_scale.map_or(1.0 / (head_dim as f64).sqrt(), f64::from);

    // One loop over rows, not three: of three axes that hold no row one may have usize::MAX entries.
    for row in 0..lse.len() {
        let (b, h, i) = (row / seqlen_q / num_heads, row / seqlen_q % num_heads, row % seqlen_q);
        let kv = h / (num_heads / k.shape()[1]);
        let score = |j: usize| {
            let dot: f64 = (0..head_dim).map(|x| at(q, [b, h, i, x]) * at(k, [b, kv, j, x])).sum();
            modified(problem, scale * dot, [b, h, i, j])
        };
        let scores: Vec<Option<f64>> = (0..seqlen_k).map(|j| sees(problem, [b, h, i, j]).then(|| score(j))).collect();
        let weights = &mut weights[row * seqlen_k..][..seqlen_k];
        lse[row] = softmax_with_sink(&scores, problem.sinks.map(|sinks| sinks[h].into()), weights);
        for x in 0..head_dim_v {
            let visible = (0..seqlen_k).filter(|&j| scores[j].is_some());
            out[row * head_dim_v + x] = visible.map(|j| weights[j] * at(v, [b, kv, j, x])).sum();
        }
    }
    Ok(Attention { out, lse, weights, shape })
}

/// Attention of one head, as [`multi_head`] with batch and heads of 1.
///
/// ```
/// use polyhead::{Matrix, Options, reference};
/// let q = Matrix::contiguous(&[0.0f32; 3], [1, 3])?;
/// let k = Matrix::contiguous(&[1.0f32; 6], [2, 3])?;
/// let v = Matrix::contiguous(&[1.0f32, 10.0, 3.0, 30.0], [2, 2])?;
/// let attention = reference::sdpa(&q, &k, &v, &Options::new())?;
/// assert_eq!(attention.weights, [0.5, 0.5]);
/// assert_eq!(attention.out, [2.0, 20.0]);
/// assert_eq!(attention.lse, [f64::ln(2.0)]);
/// # Ok::<(), polyhead::Error>(())
/// ```
///
/// # Errors
/// As [`multi_head`].
pub fn sdpa<Q: Element, K: Element, V: Element>(
    q: &Matrix<'_, Q>,
    k: &Matrix<'_, K>,
    v: &Matrix<'_, V>,
    options: &Options<'_>,
) -> Result<Attention> {
    multi_head(&one_head(q)?, &one_head(k)?, &one_head(v)?, options)
}

fn one_head<'a, T: Element>(matrix: &Matrix<'a, T>) -> Result<Heads<'a, T>> {
    let ([rows, columns], [row, column]) = (matrix.shape(), matrix.strides());
    View::with_strides(matrix.data(), [1, 1, rows, columns], [0, 0, row, column])
}

/// A packed array of zeros, or an error if there is no room for it.
fn zeros<const N: usize>(operand: &'static str, shape: [usize; N]) -> Result<Vec<f64>> {
    let len = packed_len(operand, shape)?;
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| Error::Memory { bytes: len * size_of::<f64>() })?;
    data.resize(len, 0.0);
    Ok(data)
}

/// An element as `f64`. Every index here comes from the shapes that `Problem` has checked.
fn at<T: Element>(view: &Heads<'_, T>, index: [usize; 4]) -> f64 {
    view.get(index).map_or(f64::NAN, |x| x.to_f32().into())
}

/// The key that query `i` of item `b` stands beside, which need not exist.
fn position(problem: &Problem<'_>, diagonal: Diagonal, b: usize, i: usize) -> i128 {
    let first = match diagonal {
        Diagonal::TopLeft => 0,
        Diagonal::BottomRight => length(problem, b) as i128 - problem.seqlen_q as i128,
        Diagonal::Offset(offset) => offset as i128,
    };
    first + i as i128
}

fn length(problem: &Problem<'_>, b: usize) -> usize {
    problem.key_lengths.map_or(problem.seqlen_k, |lengths| lengths[b])
}

/// Whether a query sees a key: each rule asked in turn. Not `Problem::visible`, which this is to check.
fn sees(problem: &Problem<'_>, index: [usize; 4]) -> bool {
    let [b, _, i, j] = index;
    if j >= length(problem, b) {
        return false;
    }
    // Keys after the query's own.
    let ahead = |diagonal| j as i128 - position(problem, diagonal, b, i);
    if problem.causal.is_some_and(|diagonal| ahead(diagonal) > 0) {
        return false;
    }
    if let Some(window) = problem.window {
        let ahead = ahead(window.diagonal);
        let too_early = j >= problem.keep_first && window.left.is_some_and(|left| -ahead > left as i128);
        let too_late = window.right.is_some_and(|right| ahead > right as i128);
        if too_early || too_late {
            return false;
        }
    }
    if problem.masks().any(|&(mask, attend)| mask.get(index) != attend) {
        return false;
    }
    // A finite bias, however negative, hides nothing; nor does NaN.
    problem.biases().all(|bias| bias.get(index) != f32::NEG_INFINITY)
}

/// Softcap, ALiBi and bias, in this order, on a scaled score.
fn modified(problem: &Problem<'_>, mut score: f64, index: [usize; 4]) -> f64 {
    let [b, h, i, j] = index;
    if let Some(cap) = problem.softcap.map(f64::from) {
        score = cap * (score / cap).tanh();
    }
    if let Some((slopes, diagonal)) = problem.alibi {
        let distance = (position(problem, diagonal, b, i) - j as i128).abs();
        score -= f64::from(slopes[h]) * distance as f64;
    }
    score + problem.biases().map(|bias| f64::from(bias.get(index))).sum::<f64>()
}

/// Writes the weights of a row of scores, of which `None` is hidden, and returns its LSE.
fn softmax_with_sink(scores: &[Option<f64>], sink: Option<f64>, weights: &mut [f64]) -> f64 {
    let visible = || scores.iter().copied().flatten();
    if visible().next().is_none() {
        return f64::NEG_INFINITY;
    }
    // `f64::max` ignores NaN, the sum does not.
    let max = visible().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = visible().chain(sink).map(|score| (score - max).exp()).sum();
    for (weight, score) in weights.iter_mut().zip(scores) {
        if let Some(score) = score {
            *weight = (score - max).exp() / sum;
        }
    }
    max + sum.ln()
}
