//! Operands on their way in: rows of any element type and stride become `f32` rows, and queries become lanes.

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::tile::Rows;
use crate::element::{AnySlice, widen_bf16};
use crate::view::AnyHeads;

/// A power of two times 4 KiB between rows puts all of them in one set of the L1 cache: such blocks are copied.
const SET_CONFLICT: usize = 4096 / size_of::<f32>();

/// Rows `first..first + count` of a head as `f32`: in place if they lie so and their width is a multiple of `multiple`, else
/// copied to `area`, with zeros up to that multiple.
pub(crate) fn load_rows<'a>(
    heads: &AnyHeads<'a>,
    [batch, head, first]: [usize; 3],
    count: usize,
    multiple: usize,
    area: &'a mut [f32],
) -> Rows<'a> {
    let [_, _, _, width] = heads.layout.shape;
    let conflict = count > 1 && heads.layout.strides[2].is_multiple_of(SET_CONFLICT);
    if let AnySlice::F32(data) = heads.data
        && width % multiple == 0
        && !conflict
        && let Some(rows) = rows_in_place(data, heads, [batch, head, first], count)
        && rows.count == count
    {
        return rows;
    }
    if width == 0 || count == 0 {
        return Rows { data: &[], stride: 0, width: 0, count };
    }
    let padded = width.next_multiple_of(multiple);
    for (i, row) in area.chunks_exact_mut(padded).take(count).enumerate() {
        let (row, padding) = row.split_at_mut(width);
        load_row(heads, [batch, head, first + i], row);
        padding.fill(0.0);
    }
    Rows { data: area, stride: padded, width: padded, count }
}

/// Rows `first..` of a head, as many of `count` as lie one stride apart, in place; `None` if their elements are not side by
/// side, or rows overlap.
pub(crate) fn rows_in_place<'a, T>(
    data: &'a [T],
    heads: &AnyHeads<'a>,
    [batch, head, first]: [usize; 3],
    count: usize,
) -> Option<Rows<'a, T>> {
    let ([_, _, _, width], [_, _, stride, step]) = (heads.layout.shape, heads.layout.strides);
    if width == 0 || count == 0 {
        return Some(Rows { data: &[], stride: 0, width: 0, count });
    }
    let rows =
        || Rows { data: &data[heads.offset([batch, head, first])..], stride, width, count: heads.run(first, count) };
    let apart = count == 1 || stride >= width;
    ((step == 1 || width == 1) && apart).then(rows)
}

/// One row as `f32`.
pub(crate) fn load_row(heads: &AnyHeads<'_>, [batch, head, seq]: [usize; 3], row: &mut [f32]) {
    if row.is_empty() {
        return;
    }
    load_elements(heads.data, heads.offset([batch, head, seq]), heads.layout.strides[3], row);
}

/// Elements `offset`, `offset + step`, .. as `f32`.
#[inline(always)]
pub(crate) fn load_elements(data: AnySlice<'_>, offset: usize, step: usize, row: &mut [f32]) {
    match data {
        AnySlice::F32(data) => gather(&data[offset..], step, row, |from, to| to.copy_from_slice(from), |x| x),
        AnySlice::F16(data) => {
            gather(&data[offset..], step, row, |from, to| from.convert_to_f32_slice(to), f16::to_f32);
        }
        AnySlice::Bf16(data) => gather(&data[offset..], step, row, widen_bf16, bf16::to_f32),
    }
}

#[inline(always)]
fn gather<T: Copy>(
    src: &[T],
    step: usize,
    row: &mut [f32],
    contiguous: impl Fn(&[T], &mut [f32]),
    one: impl Fn(T) -> f32,
) {
    if step == 1 || row.len() == 1 {
        contiguous(&src[..row.len()], row);
    } else {
        row.iter_mut().enumerate().for_each(|(i, x)| *x = one(src[i * step]));
    }
}
