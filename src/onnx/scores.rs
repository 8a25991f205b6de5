//! The matrix that the kernel never has, for those who ask for `qk_matmul_output`.

use crate::gemm::gemm;
use crate::problem::{Problem, packed_len};
use crate::workspace::grow;
use crate::{Element, Heads, HeadsMut, Matrix, MatrixMut, Result};

/// Modes 0 to 2: scaled products, softcap, bias. One KV head after the other.
pub(super) struct Scores<'a, 'p, T> {
    /// Of the keys that a mask covers: those behind are hidden.
    pub(super) problem: &'a Problem<'p>,
    pub(super) mode: i64,
    pub(super) q: Heads<'a, T>,
    /// All keys.
    pub(super) k: Heads<'a, T>,
}

impl<T: Element> Scores<'_, '_, T> {
    pub(super) fn write(&self, output: &mut HeadsMut<'_, T>) -> Result<()> {
        let [batch, _, seqlen_q, seqlen_k] = output.shape();
        let (kv_heads, dim, group) = (self.k.shape()[1], self.problem.head_dim, self.problem.group);
        if output.shape().contains(&0) {
            return Ok(());
        }
        let queries = group.saturating_mul(seqlen_q);
        let (mut q, mut k, mut products) = (Vec::new(), Vec::new(), Vec::new());
        grow(&mut q, packed_len("q", [queries, dim])?, || 0.0)?;
        grow(&mut k, packed_len("k", [seqlen_k, dim])?, || 0.0)?;
        grow(&mut products, packed_len("qk_matmul_output", [queries, seqlen_k])?, || 0.0)?;
        for (b, kv) in (0..batch).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))) {
            let heads = kv * group..(kv + 1) * group;
            self.scale(&self.q, b, heads.clone(), &mut q);
            self.scale(&self.k, b, kv..kv + 1, &mut k);
            gemm(
                1.0,
                &Matrix::contiguous(&q, [queries, dim])?,
                &Matrix::contiguous(&k, [seqlen_k, dim])?.permute([1, 0])?,
                0.0,
                &mut MatrixMut::contiguous(&mut products, [queries, seqlen_k])?,
            )?;
            for (row, scores) in products.chunks_exact_mut(seqlen_k.max(1)).enumerate() {
                let index = [b, heads.start + row / seqlen_q, row % seqlen_q];
                self.modify(index, scores);
                store(scores, index, output);
            }
        }
        Ok(())
    }

    /// Rows of heads times the root of the scale, both rounded to the operands' type as ONNX has it.
    fn scale(&self, view: &Heads<'_, T>, batch: usize, heads: core::ops::Range<usize>, to: &mut [f32]) {
        let [_, _, seq, dim] = view.shape();
        let root = T::from_f32_nearest(self.problem.softmax_scale.sqrt()).to_f32();
        let (data, layout) = (view.data(), view.layout());
        for (row, to) in to.chunks_exact_mut(dim.max(1)).enumerate() {
            let at = layout.offset([batch, heads.start + row / seq, row % seq, 0]);
            for (d, to) in to.iter_mut().enumerate() {
                let x = data[at + d * layout.strides[3]].to_f32();
                *to = T::from_f32_nearest(x * root).to_f32();
            }
        }
    }

    /// What the mode asks for, of a row of products.
    fn modify(&self, [batch, head, query]: [usize; 3], scores: &mut [f32]) {
        let problem = self.problem;
        if let (true, Some(cap)) = (self.mode >= 1, problem.softcap) {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        if self.mode < 2 {
            return;
        }
        let (first, end) = problem.band(batch).range(query);
        for (key, score) in scores.iter_mut().enumerate() {
            let index = [batch, head, query, key];
            let seen = (first..end).contains(&key) && problem.masks().all(|(mask, attend)| mask.get(index) == *attend);
            let bias = problem.biases().next().filter(|_| seen).map_or(0.0, |bias| bias.get(index));
            *score = if seen && bias != f32::NEG_INFINITY { *score + bias } else { f32::NEG_INFINITY };
        }
    }
}

/// Mode 3: weights, packed, of the keys that a mask covers; those behind have none.
pub(super) fn round_weights<T: Element>(weights: &[f32], keys: usize, output: &mut HeadsMut<'_, T>) {
    let [batch, heads, seqlen_q, seqlen_k] = output.shape();
    if output.shape().contains(&0) {
        return;
    }
    let mut row = vec![0.0; seqlen_k];
    for at in 0..batch * heads * seqlen_q {
        row[..keys].copy_from_slice(&weights[at * keys..][..keys]);
        store(&row, [at / seqlen_q / heads, at / seqlen_q % heads, at % seqlen_q], output);
    }
}

/// Rounds a row into its place.
fn store<T: Element>(row: &[f32], [batch, head, query]: [usize; 3], output: &mut HeadsMut<'_, T>) {
    let layout = output.layout();
    let to = &mut output.data_mut()[layout.offset([batch, head, query, 0])..];
    match layout.strides[3] {
        1 => T::store_nearest(row, &mut to[..row.len()]),
        step => row.iter().enumerate().for_each(|(key, &x)| to[key * step] = T::from_f32_nearest(x)),
    }
}
