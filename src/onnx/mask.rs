//! A node's mask as options of the kernel: a view where it can be one.

use half::slice::HalfFloatSliceExt;

use super::{AttnMask, Tensor};
use crate::element::widen_bf16;
use crate::problem::packed_len;
use crate::workspace::grow;
use crate::{Bias, Element, Mask, Options, Result, View};

/// Adds the mask to the options. `spare`, which is empty, gets the elements of 16-bit masks as `f32`.
pub(super) fn set<'a>(options: Options<'a>, mask: &AttnMask<'a>, spare: &'a mut Vec<f32>) -> Result<Options<'a>> {
    Ok(match mask {
        AttnMask::Bool(tensor) => options.mask(Mask::attend(tensor.view()?)?),
        AttnMask::F32(tensor) => options.bias(Bias::new(tensor.view()?)?),
        AttnMask::F16(tensor) => options.bias(widened(tensor, |row, to| row.convert_to_f32_slice(to), spare)?),
        AttnMask::Bf16(tensor) => options.bias(widened(tensor, widen_bf16, spare)?),
    })
}

/// The elements as `f32`, each once: an axis of stride 0 stays one.
fn widened<'a, T: Element>(
    tensor: &Tensor<'_, T>,
    widen: impl Fn(&[T], &mut [f32]),
    spare: &'a mut Vec<f32>,
) -> Result<Bias<'a>> {
    let view = tensor.view()?;
    let (data, layout) = (view.data(), view.layout());
    let own: [usize; 4] =
        core::array::from_fn(|axis| layout.shape[axis].min(if layout.strides[axis] == 0 { 1 } else { usize::MAX }));
    grow(spare, packed_len("attn_mask", own)?, || 0.0)?;
    let [_, heads, rows, width] = own;
    for (row, to) in spare.chunks_exact_mut(width.max(1)).enumerate() {
        let from = &data[layout.offset([row / rows / heads, row / rows % heads, row % rows, 0])..];
        match layout.strides[3] {
            1 => widen(&from[..width], to),
            stride => (0..width).for_each(|key| to[key] = from[key * stride].to_f32()),
        }
    }
    // Saturated only beside an axis of 0, where strides mean nothing.
    let by_head = rows.saturating_mul(width);
    let strides = [heads.saturating_mul(by_head), by_head, width, 1];
    let strides = core::array::from_fn(|axis| if layout.strides[axis] == 0 { 0 } else { strides[axis] });
    Bias::new(View::with_strides(spare, layout.shape, strides)?)
}
