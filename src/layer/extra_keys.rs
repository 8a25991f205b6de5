//! The keys that a layer adds to every sequence: PyTorch's `add_bias_kv` and `add_zero_attn`.
//!
//! They are put before the keys of the input, not behind them, so that causality and key lengths need no more than a shift, and a
//! window keeps them as it keeps attention sinks. Columns of attention weights are turned round at the end.

use crate::workspace::grow;
use crate::{Diagonal, Error, HeadsMut, Options, Result, View, Window};

/// Masks, biases and key lengths with the additional keys.
#[derive(Debug, Default)]
pub(super) struct Padded {
    masks: [Vec<bool>; 2],
    biases: [Vec<f32>; 2],
    lengths: Vec<usize>,
}

impl Padded {
    /// Options for keys of which the first `extra` are seen by all queries.
    pub(super) fn options<'a>(
        &'a mut self,
        options: &Options<'a>,
        extra: usize,
        [seqlen_q, seqlen_k]: [usize; 2],
    ) -> Result<Options<'a>> {
        if options.alibi.is_some() {
            return Err(Error::Unsupported { what: "ALiBi with add_bias_kv or add_zero_attn" });
        }
        let shortest = options.key_lengths.and_then(|lengths| lengths.iter().min()).copied().unwrap_or(seqlen_k);
        let diagonals = [options.causal, options.window.map(|window| window.diagonal)];
        if diagonals.into_iter().flatten().any(|diagonal| diagonal.offset(seqlen_q, shortest) < 0) {
            // Causality would hide the additional keys too.
            let what = "a query before the first key with add_bias_kv or add_zero_attn";
            return Err(Error::Unsupported { what });
        }
        let mut padded = *options;
        let shift = |diagonal| match diagonal {
            Diagonal::TopLeft => Diagonal::Offset(extra as isize),
            // The last key is the last one still.
            Diagonal::BottomRight => Diagonal::BottomRight,
            Diagonal::Offset(offset) => Diagonal::Offset(offset.saturating_add_unsigned(extra)),
        };
        padded.causal = options.causal.map(shift);
        padded.window = options.window.map(|window| Window { diagonal: shift(window.diagonal), ..window });
        padded.keep_first = options.keep_first.saturating_add(extra);
        for (i, buffer) in self.masks.iter_mut().enumerate() {
            padded.masks[i] = options.masks[i]
                .map(|mask| mask.with_view(|view, attend| pad("mask", view, extra, seqlen_k, attend, buffer)))
                .transpose()?;
        }
        for (i, buffer) in self.biases.iter_mut().enumerate() {
            padded.biases[i] = options.biases[i]
                .map(|bias| bias.with_view(|view| pad("bias", view, extra, seqlen_k, 0.0, buffer)))
                .transpose()?;
        }
        if let Some(lengths) = options.key_lengths {
            self.lengths.clear();
            grow(&mut self.lengths, lengths.len(), usize::default)?;
            for (to, &from) in self.lengths.iter_mut().zip(lengths) {
                if from > seqlen_k {
                    let expected = "at most seqlen_k";
                    return Err(Error::Value { option: "key_lengths", expected, actual: from as f64 });
                }
                *to = from + extra;
            }
            padded.key_lengths = Some(&self.lengths);
        }
        Ok(padded)
    }

    pub(super) fn bytes(&self) -> usize {
        self.masks.iter().map(Vec::capacity).sum::<usize>()
            + self.biases.iter().map(Vec::capacity).sum::<usize>() * size_of::<f32>()
            + self.lengths.capacity() * size_of::<usize>()
    }
}

/// A packed copy of a mask or bias with `extra` columns of `value` before the others. Axes of size 1 stay so, except the last.
fn pad<'a, T: Copy + Default>(
    operand: &'static str,
    view: View<'_, T, 4>,
    extra: usize,
    seqlen_k: usize,
    value: T,
    buffer: &'a mut Vec<T>,
) -> Result<View<'a, T, 4>> {
    let [batch, heads, rows, columns] = view.shape();
    if columns != seqlen_k && columns != 1 {
        return Err(Error::Shape { operand, axis: "seqlen_k", expected: seqlen_k, actual: columns });
    }
    let shape = [batch, heads, rows, seqlen_k + extra];
    let len = shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size)).unwrap_or(usize::MAX);
    buffer.clear();
    grow(buffer, len, T::default)?;
    for (row, to) in buffer.chunks_exact_mut(seqlen_k + extra).enumerate() {
        let index = [row / rows / heads, row / rows % heads, row % rows];
        to[..extra].fill(value);
        for (key, to) in to[extra..].iter_mut().enumerate() {
            let column = if columns == 1 { 0 } else { key };
            *to = view.get([index[0], index[1], index[2], column]).unwrap_or(value);
        }
    }
    View::contiguous(buffer, shape)
}

/// Moves the first `extra` columns of attention weights behind the others.
pub(super) fn turn_columns(weights: &mut HeadsMut<'_, f32>, extra: usize) {
    let layout = weights.layout();
    let ([batch, heads, rows, columns], step) = (layout.shape, layout.strides[3]);
    for row in 0..batch * heads * rows {
        let start = layout.offset([row / rows / heads, row / rows % heads, row % rows, 0]);
        let row = &mut weights.data_mut()[start..];
        for _ in 0..extra {
            let first = row[0];
            for column in 1..columns {
                row[(column - 1) * step] = row[column * step];
            }
            row[(columns - 1) * step] = first;
        }
    }
}
