//! Boolean masks and biases of a tile, brought from rows of keys into lanes of queries.

use super::lanes::Lanes;
use super::tile::{Rows, Transpose};
use crate::mask::Broadcast;
use crate::problem::Problem;

/// What mask and bias do to a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing.
    Clear,
    /// They hide all of it.
    Hidden,
    /// The tile of biases says.
    Mixed,
}

/// A tile's place: batch item, its rows as (head, query), and its keys.
pub(crate) struct Place<'a> {
    pub(crate) batch: usize,
    pub(crate) rows: &'a dyn Fn(usize) -> (usize, usize),
    pub(crate) count: usize,
    pub(crate) first_key: usize,
    pub(crate) keys: usize,
}

impl Place<'_> {
    fn index(&self, row: usize) -> [usize; 3] {
        let (head, query) = (self.rows)(row);
        [self.batch, head, query]
    }
}

/// Writes the sum of mask (0 or -inf) and bias to `bias`, `[keys][lanes]`, if it matters. `stage` has room
/// for `lanes` rows of `stride` floats.
pub(crate) fn build<L: Lanes>(
    l: L,
    problem: &Problem<'_>,
    place: &Place<'_>,
    lanes: usize,
    bias: &mut [f32],
    (stage, stride): (&mut [f32], usize),
) -> Verdict {
    if problem.mask.is_none() && problem.bias.is_none() {
        return Verdict::Clear;
    }
    let first = place.index(0);
    let same = |row| {
        let index = place.index(row);
        problem.mask.is_none_or(|(mask, _)| mask.same_row(first, index))
            && problem.bias.is_none_or(|bias| bias.same_row(first, index))
    };
    let shared = (1..place.count).all(same);
    let rows = if shared { 1 } else { place.count };
    if let Some(src) = in_place(problem, place).filter(|_| !shared) {
        (0..rows).for_each(|row| prefetch_next(l, problem, place, row));
        l.vectorize(Transpose { src, dst: bias, dst_stride: lanes });
        return Verdict::Mixed;
    }
    let (mut hidden, mut clear) = (true, true);
    for (row, values) in stage.chunks_exact_mut(stride).take(rows).enumerate() {
        let verdict = build_row(problem, place.index(row), place.first_key, &mut values[..place.keys]);
        prefetch_next(l, problem, place, row);
        hidden &= verdict == Verdict::Hidden;
        clear &= verdict == Verdict::Clear;
    }
    if clear || hidden {
        return if clear { Verdict::Clear } else { Verdict::Hidden };
    }
    if shared {
        for (key, row) in bias.chunks_exact_mut(lanes).take(place.keys).enumerate() {
            row.fill(stage[key]);
        }
    } else {
        let src = Rows { data: stage, stride, width: place.keys, count: place.count };
        l.vectorize(Transpose { src, dst: bias, dst_stride: lanes });
    }
    Verdict::Mixed
}

/// Biases that no mask changes, where they lie, if their rows are one distance apart.
fn in_place<'a>(problem: &Problem<'a>, place: &Place<'_>) -> Option<Rows<'a>> {
    let bias = problem.bias.filter(|bias| problem.mask.is_none() && bias.key_stride() == 1)?;
    let offset = |row| {
        let [batch, head, query] = place.index(row);
        bias.offset([batch, head, query, place.first_key])
    };
    let (first, second) = (offset(0), offset(place.count.min(2) - 1));
    let stride = second.checked_sub(first)?;
    let even = (2..place.count).all(|row| offset(row) == first + row * stride);
    even.then(|| Rows { data: &bias.data[first..], stride, width: place.keys, count: place.count })
}

/// Asks for the biases of the next block of keys: rows of them are too far apart for the processor to foresee (a float mask at
/// S 2048, D 64, AVX-512 costs 1.25 of no mask with it, 1.39 without).
fn prefetch_next<L: Lanes>(l: L, problem: &Problem<'_>, place: &Place<'_>, row: usize) {
    let next = place.first_key + place.keys;
    if let Some(bias) = problem.bias.filter(|bias| bias.key_stride() == 1 && next < problem.seqlen_k) {
        let [batch, head, query] = place.index(row);
        let count = place.keys.min(problem.seqlen_k - next);
        l.prefetch(&bias.data[bias.offset([batch, head, query, next])..][..count]);
    }
}

/// One row of mask and bias.
fn build_row(problem: &Problem<'_>, [batch, head, query]: [usize; 3], first_key: usize, values: &mut [f32]) -> Verdict {
    let index = [batch, head, query, first_key];
    match problem.bias {
        Some(bias) => {
            copy(&bias, index, values, |b| b);
            if let Some((mask, attend)) = problem.mask {
                let (source, step) = (&mask.data[mask.offset(index)..], mask.key_stride());
                values.iter_mut().enumerate().for_each(|(i, x)| {
                    *x = if source[i * step] == attend { *x } else { f32::NEG_INFINITY };
                });
            }
            Verdict::Mixed
        }
        None => {
            let Some((mask, attend)) = problem.mask else { return Verdict::Clear };
            copy(&mask, index, values, |seen| if seen == attend { 0.0 } else { f32::NEG_INFINITY });
            let source = &mask.data[mask.offset(index)..];
            // Counting vectorises, as a search or a sum of floats does not; of bytes it is cheapest.
            let seen = match mask.key_stride() {
                1 => source[..values.len()].iter().filter(|&&seen| seen == attend).count(),
                _ => values.iter().filter(|&&x| x == 0.0).count(),
            };
            match seen {
                0 => Verdict::Hidden,
                seen if seen == values.len() => Verdict::Clear,
                _ => Verdict::Mixed,
            }
        }
    }
}

#[inline(always)]
fn copy<T: Copy>(from: &Broadcast<'_, T>, index: [usize; 4], values: &mut [f32], convert: impl Fn(T) -> f32) {
    let source = &from.data[from.offset(index)..];
    match from.key_stride() {
        0 => values.fill(convert(source[0])),
        1 => values.iter_mut().zip(source).for_each(|(x, &y)| *x = convert(y)),
        step => values.iter_mut().enumerate().for_each(|(i, x)| *x = convert(source[i * step])),
    }
}
