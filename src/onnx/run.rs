//! From a checked node to the fused kernel.

use super::check::Call;
use super::{Attention, Inputs, Outputs, mask, scores};
use crate::problem::{Problem, packed_len};
use crate::workspace::grow;
use crate::{Diagonal, Element, Heads, HeadsMut, Level, Options, Result, Window, multi_head_with};

pub(super) fn run<T1: Element, T2: Element>(
    attention: &Attention,
    call: &Call,
    inputs: &Inputs<'_, T1, T2>,
    mut outputs: Outputs<'_, T1, T2>,
) -> Result<()> {
    let (mut spare, mut spare_keys, mut spare_values, mut weights) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut options = attention.options(call)?;
    if let Some(mask) = &inputs.attn_mask {
        options = mask::set(options, mask, &mut spare)?;
    }
    let ([_, q_heads, ..], [_, kv_heads, ..]) = (call.q, call.keys);
    let q = inputs.q.heads(q_heads)?;
    let (seen, values_seen) = (narrowed(call.keys, call.masked), narrowed(call.values, call.masked));
    let problem = Problem::new(call.q, seen, values_seen, &options)?;
    let wants_weights = outputs.qk_matmul_output.is_some() && attention.qk_matmul_output_mode == 3;
    if wants_weights {
        grow(&mut weights, packed_len("qk_matmul_output", problem.scores_shape())?, || 0.0)?;
    }

    let past = inputs.past_key.map(|past| past.heads(kv_heads)).transpose()?;
    let mut present = outputs.present_key.as_mut().map(|present| present.heads(kv_heads)).transpose()?;
    let k = join(past, inputs.k.heads(kv_heads)?, present.as_mut(), &mut spare_keys)?;
    let past = inputs.past_value.map(|past| past.heads(kv_heads)).transpose()?;
    let mut present = outputs.present_value.as_mut().map(|present| present.heads(kv_heads)).transpose()?;
    let v = join(past, inputs.v.heads(kv_heads)?, present.as_mut(), &mut spare_values)?;

    let (k_seen, v_seen) = (narrow(&k, seen)?, narrow(&v, values_seen)?);
    let mut wanted = crate::Outputs::new(outputs.y.heads(q_heads)?);
    if wants_weights {
        wanted = wanted.weights(HeadsMut::bhsd(&mut weights, problem.scores_shape())?);
    }
    multi_head_with(&q, &k_seen, &v_seen, wanted, &options)?;
    let Some(output) = &mut outputs.qk_matmul_output else { return Ok(()) };
    let mut output = output.heads(q_heads)?;
    if wants_weights {
        scores::round_weights(&weights, call.masked, &mut output);
        return Ok(());
    }
    scores::Scores { problem: &problem, mode: attention.qk_matmul_output_mode, q, k }.write(&mut output)
}

impl Attention {
    /// What the kernel is asked for, but for the mask.
    fn options<'a>(&self, call: &'a Call) -> Result<Options<'a>> {
        // A query's position is its index and the number of keys that came before all of them.
        let diagonal = match (call.past, &call.lengths) {
            (Some(past), _) => Diagonal::Offset(crate::mask::saturate(past)),
            // The last query stands at the last key that its item has in use.
            (None, Some(_)) => Diagonal::BottomRight,
            (None, None) => Diagonal::TopLeft,
        };
        let mut options =
            Options { softmax_scale: self.scale, level: Some(Level::resolve(self.level)?), ..Options::new() };
        if self.is_causal {
            options = options.causal(diagonal);
        }
        // -1 is no bound; what does not fit `usize` is none either.
        let [left, right] = [self.left_window_size, self.right_window_size].map(|size| usize::try_from(size).ok());
        if left.is_some() || right.is_some() {
            options = options.window(Window { left, right, diagonal });
        }
        if let Some(lengths) = &call.lengths {
            options = options.key_lengths(lengths);
        }
        if self.softcap > 0.0 {
            options = options.softcap(self.softcap);
        }
        Ok(options)
    }
}

fn narrowed([batch, heads, _, dim]: [usize; 4], keys: usize) -> [usize; 4] {
    [batch, heads, keys, dim]
}

/// The first keys.
fn narrow<'a, T: Copy>(view: &Heads<'a, T>, shape: [usize; 4]) -> Result<Heads<'a, T>> {
    Heads::with_strides(view.data(), shape, view.strides())
}

/// Past and new rows: written behind one another where they are wanted, or to `spare` if they lie apart otherwise.
fn join<'s, T: Element>(
    past: Option<Heads<'s, T>>,
    new: Heads<'s, T>,
    present: Option<&'s mut HeadsMut<'_, T>>,
    spare: &'s mut Vec<T>,
) -> Result<Heads<'s, T>> {
    match (past, present) {
        (None, None) => Ok(new),
        (None, Some(present)) => {
            copy(&new, present, 0);
            Ok(new)
        }
        (Some(past), Some(present)) => {
            copy(&past, present, 0);
            copy(&new, present, past.shape()[2]);
            Ok(present.as_view())
        }
        (Some(past), None) => {
            let [batch, heads, seq, dim] = past.shape();
            let shape = [batch, heads, seq + new.shape()[2], dim];
            grow(spare, packed_len("past_key", shape)?, T::default)?;
            let mut both = HeadsMut::bhsd(spare, shape)?;
            copy(&past, &mut both, 0);
            copy(&new, &mut both, seq);
            Heads::bhsd(spare, shape)
        }
    }
}

/// Copies rows to the rows from `first` on. The other axes are of the same size.
fn copy<T: Element>(from: &Heads<'_, T>, to: &mut HeadsMut<'_, T>, first: usize) {
    let (source, target, data) = (from.layout(), to.layout(), from.data());
    let [batch, heads, seq, dim] = source.shape;
    if source.shape.contains(&0) {
        return;
    }
    let places = [source, target].map(|layout| [layout.strides[3], layout.strides[2]]);
    let packed_rows = dim == 1 || places.iter().all(|[step, _]| *step == 1);
    let packed_heads = packed_rows && (seq == 1 || places.iter().all(|[_, row]| *row == dim));
    // Elements that lie behind one another in both.
    let (rows, run) = if packed_heads { (1, seq * dim) } else { (seq, if packed_rows { dim } else { 1 }) };
    for head in 0..batch * heads {
        for row in 0..rows {
            let (b, h) = (head / heads, head % heads);
            let at = source.offset([b, h, row, 0]);
            let place = target.offset([b, h, first + row, 0]);
            let to = &mut to.data_mut()[place..];
            if run == 1 {
                (0..dim).for_each(|d| to[d * target.strides[3]] = data[at + d * source.strides[3]]);
            } else {
                to[..run].copy_from_slice(&data[at..][..run]);
            }
        }
    }
}
