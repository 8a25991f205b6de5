//! Whether attributes and tensors fit together, asked once, before anything is written.

use super::{Attention, Inputs, OutputShapes, Outputs, Tensor, TensorMut};
use crate::problem::check_shape;
use crate::{Element, Error, Result};

const AXES: [&str; 4] = ["batch", "heads", "seq", "dim"];
const SCORES: [&str; 4] = ["batch", "heads", "seqlen_q", "seqlen_k"];

/// Sizes of a call whose inputs fit together.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// Axes of the operands, 3 or 4.
    pub(super) rank: usize,
    pub(super) q: [usize; 4],
    /// As `k`, past and new.
    pub(super) keys: [usize; 4],
    pub(super) values: [usize; 4],
    /// Length of the past, if there is one.
    pub(super) past: Option<usize>,
    /// Keys that the mask says something about; all without a mask.
    pub(super) masked: usize,
    /// As given by `nonpad_kv_seqlen`.
    pub(super) lengths: Option<Vec<usize>>,
}

impl Call {
    pub(super) fn check<T1: Element, T2: Element>(attention: &Attention, inputs: &Inputs<'_, T1, T2>) -> Result<Self> {
        attention.check()?;
        let Inputs { q, k, v, past_key, past_value, .. } = inputs;
        let rank = q.rank();
        if rank < 3 {
            return Err(Error::Rank { operand: "q", expected: "3 or 4", actual: rank });
        }
        let like_q = if rank == 3 { "3, as q" } else { "4, as q" };
        check_rank("k", k.rank(), rank, like_q)?;
        check_rank("v", v.rank(), rank, like_q)?;
        pair(["past_key", "past_value"], [past_key.is_some(), past_value.is_some()])?;
        let q = attention.shape(q, "q", "q_num_heads", attention.q_num_heads)?;
        let k = attention.shape(k, "k", "kv_num_heads", attention.kv_num_heads)?;
        let v = attention.shape(v, "v", "kv_num_heads", attention.kv_num_heads)?;
        check_shape("k", [q[0], k[1], k[2], q[3]], k, AXES)?;
        check_shape("v", [q[0], k[1], k[2], v[3]], v, AXES)?;
        if q[1].checked_rem(k[1]).unwrap_or(q[1]) != 0 {
            return Err(Error::HeadGroups { num_heads: q[1], num_kv_heads: k[1] });
        }
        let (keys, past) = joined("past_key", past_key.as_ref(), k, None)?;
        let (values, _) = joined("past_value", past_value.as_ref(), v, past)?;
        let mut call = Self { rank, q, keys, values, past, masked: keys[2], lengths: None };
        call.check_mask(attention, inputs)?;
        call.check_lengths(inputs)?;
        Ok(call)
    }

    fn check_mask<T1, T2>(&mut self, attention: &Attention, inputs: &Inputs<'_, T1, T2>) -> Result<()> {
        let Some(mask) = &inputs.attn_mask else { return Ok(()) };
        let (shape, scores) = (mask.shape(), self.scores());
        for (&actual, axis) in shape.iter().rev().zip((0..4).rev()) {
            let pads = axis == 3 && attention.pads() && actual < scores[3];
            let broadcasts = actual == 1 && (axis < 3 || !attention.pads());
            if actual != scores[axis] && !pads && !broadcasts {
                let expected = scores[axis];
                return Err(Error::Shape { operand: "attn_mask", axis: SCORES[axis], expected, actual });
            }
        }
        if let (true, Some(&last)) = (attention.pads(), shape.last()) {
            self.masked = last;
        }
        Ok(())
    }

    fn check_lengths<T1, T2>(&mut self, inputs: &Inputs<'_, T1, T2>) -> Result<()> {
        let (Some(given), batch, total) = (inputs.nonpad_kv_seqlen, self.q[0], self.keys[2]) else { return Ok(()) };
        if self.past.is_some() {
            return Err(Error::Conflict { argument: "nonpad_kv_seqlen", with: "past_key" });
        }
        if given.len() != batch {
            return Err(Error::Length { operand: "nonpad_kv_seqlen", expected: batch, actual: given.len() });
        }
        let lengths = given.iter().map(|&length| match usize::try_from(length) {
            Ok(length) if length <= total => Ok(length),
            _ => {
                let (option, expected) = ("nonpad_kv_seqlen", "0 to the length of the keys");
                Err(Error::Value { option, expected, actual: length as f64 })
            }
        });
        let lengths = lengths.collect::<Result<Vec<usize>>>()?;
        if let Some(&expected) = lengths.iter().find(|&&length| length > self.masked) {
            return Err(Error::Shape { operand: "attn_mask", axis: "seqlen_k", expected, actual: self.masked });
        }
        self.lengths = Some(lengths);
        Ok(())
    }

    /// Shape of the scores.
    pub(super) fn scores(&self) -> [usize; 4] {
        [self.q[0], self.q[1], self.q[2], self.keys[2]]
    }

    pub(super) fn output_shapes(&self) -> Result<OutputShapes> {
        let ([batch, heads, seqlen_q, _], dim) = (self.q, self.values[3]);
        let y = if self.rank == 3 {
            let overflow = Error::Overflow { operand: "y", axis: "hidden", size: heads, stride: dim };
            vec![batch, seqlen_q, heads.checked_mul(dim).ok_or(overflow)?]
        } else {
            vec![batch, heads, seqlen_q, dim]
        };
        let (present_key, present_value) = (self.keys, self.values);
        Ok(OutputShapes { y, present_key, present_value, qk_matmul_output: self.scores() })
    }

    pub(super) fn check_outputs<T1: Element, T2: Element>(&self, outputs: &Outputs<'_, T1, T2>) -> Result<()> {
        let shapes = self.output_shapes()?;
        let Outputs { y, present_key, present_value, qk_matmul_output } = outputs;
        let like_q = if self.rank == 3 { "3, as q" } else { "4, as q" };
        let names = if self.rank == 3 { &["batch", "seq", "hidden"] } else { &AXES[..] };
        check_output("y", Some(y), &shapes.y, like_q, names)?;
        pair(["present_key", "present_value"], [present_key.is_some(), present_value.is_some()])?;
        if present_key.is_some() && self.lengths.is_some() {
            return Err(Error::Conflict { argument: "nonpad_kv_seqlen", with: "present_key" });
        }
        check_output("present_key", present_key.as_ref(), &shapes.present_key, "4", &AXES)?;
        check_output("present_value", present_value.as_ref(), &shapes.present_value, "4", &AXES)?;
        check_output("qk_matmul_output", qk_matmul_output.as_ref(), &shapes.qk_matmul_output, "4", &SCORES)
    }
}

impl Attention {
    /// Whether a mask that is shorter than the keys is padded.
    pub(super) fn pads(&self) -> bool {
        self.opset >= 24
    }

    /// What can be said without the tensors.
    fn check(&self) -> Result<()> {
        let integers = [
            ("opset", "23 or more", self.opset, self.opset >= 23),
            ("left_window_size", "-1 or more", self.left_window_size, self.left_window_size >= -1),
            ("right_window_size", "-1 or more", self.right_window_size, self.right_window_size >= -1),
            ("q_num_heads", "positive", self.q_num_heads.unwrap_or(1), self.q_num_heads.is_none_or(|n| n > 0)),
            ("kv_num_heads", "positive", self.kv_num_heads.unwrap_or(1), self.kv_num_heads.is_none_or(|n| n > 0)),
            (
                "qk_matmul_output_mode",
                "0 to 3",
                self.qk_matmul_output_mode,
                (0..4).contains(&self.qk_matmul_output_mode),
            ),
            (
                "softmax_precision",
                "1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16)",
                self.softmax_precision.unwrap_or(1),
                self.softmax_precision.is_none_or(|precision| [1, 10, 11, 16].contains(&precision)),
            ),
        ];
        for (option, expected, actual, good) in integers {
            if !good {
                return Err(Error::Value { option, expected, actual: actual as f64 });
            }
        }
        for (option, value) in [("scale", self.scale.unwrap_or(1.0)), ("softcap", self.softcap)] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::Value { option, expected: "finite and not negative", actual: value.into() });
            }
        }
        Ok(())
    }

    /// (batch, heads, seq, dim) of an operand of three or four axes.
    fn shape<T: Copy>(
        &self,
        tensor: &Tensor<'_, T>,
        operand: &'static str,
        attribute: &'static str,
        heads: Option<i64>,
    ) -> Result<[usize; 4]> {
        // Checked to be positive; an axis cannot be longer than `usize`.
        let heads = heads.map(|heads| usize::try_from(heads).unwrap_or(usize::MAX));
        match (tensor.shape(), heads) {
            (&[batch, seq, hidden], Some(heads)) if hidden.is_multiple_of(heads) => {
                Ok([batch, heads, seq, hidden / heads])
            }
            (&[_, _, _], Some(heads)) => {
                let expected = "a divisor of the last axis, of three";
                Err(Error::Value { option: attribute, expected, actual: heads as f64 })
            }
            (&[_, _, _], None) => Err(Error::Missing { argument: attribute, needed_by: "an operand of three axes" }),
            (&[_, _, _, _], Some(_)) if self.opset >= 25 => {
                Err(Error::Conflict { argument: attribute, with: "operands of four axes" })
            }
            (&[batch, actual, seq, dim], heads) => match heads.filter(|&heads| heads != actual) {
                None => Ok([batch, actual, seq, dim]),
                Some(expected) => Err(Error::Shape { operand, axis: "heads", expected, actual }),
            },
            (shape, _) => Err(Error::Rank { operand, expected: "3 or 4", actual: shape.len() }),
        }
    }
}

fn check_rank(operand: &'static str, actual: usize, rank: usize, expected: &'static str) -> Result<()> {
    if actual == rank { Ok(()) } else { Err(Error::Rank { operand, expected, actual }) }
}

/// That there are both or none.
fn pair([a, b]: [&'static str; 2], given: [bool; 2]) -> Result<()> {
    match given {
        [true, false] => Err(Error::Missing { argument: b, needed_by: a }),
        [false, true] => Err(Error::Missing { argument: a, needed_by: b }),
        _ => Ok(()),
    }
}

/// Shape of past and new together, and the length of the past, which may have to be a certain one.
fn joined<T: Copy>(
    operand: &'static str,
    past: Option<&Tensor<'_, T>>,
    new: [usize; 4],
    expected: Option<usize>,
) -> Result<([usize; 4], Option<usize>)> {
    let Some(past) = past else { return Ok((new, None)) };
    let [batch, heads, seq, dim] = new;
    let &[a, b, length, d] = past.shape() else {
        return Err(Error::Rank { operand, expected: "4", actual: past.rank() });
    };
    check_shape(operand, [batch, heads, expected.unwrap_or(length), dim], [a, b, length, d], AXES)?;
    let overflow = Error::Overflow { operand, axis: "seq", size: length, stride: 1 };
    Ok(([batch, heads, length.checked_add(seq).ok_or(overflow)?, dim], Some(length)))
}

fn check_output<T: Element>(
    operand: &'static str,
    output: Option<&TensorMut<'_, T>>,
    expected: &[usize],
    rank: &'static str,
    axes: &[&'static str],
) -> Result<()> {
    let Some(output) = output else { return Ok(()) };
    check_rank(operand, output.shape().len(), expected.len(), rank)?;
    for ((&expected, &actual), &axis) in expected.iter().zip(output.shape()).zip(axes) {
        if expected != actual {
            return Err(Error::Shape { operand, axis, expected, actual });
        }
    }
    Ok(())
}
