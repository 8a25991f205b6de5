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
    if problem.masks().next().is_none() && problem.biases().next().is_none() {
        return Verdict::Clear;
    }
    let first = place.index(0);
    let same = |row| {
        let index = place.index(row);
        problem.masks().all(|(mask, _)| mask.same_row(first, index))
            && problem.biases().all(|bias| bias.same_row(first, index))
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

/// A bias that no mask or other bias changes, where it lies, if its rows are one distance apart.
fn in_place<'a>(problem: &Problem<'a>, place: &Place<'_>) -> Option<Rows<'a>> {
    let mut biases = problem.biases();
    let (Some(bias), None, None) = (biases.next(), biases.next(), problem.masks().next()) else { return None };
    if bias.key_stride() != 1 {
        return None;
    }
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
    for bias in problem.biases().filter(|bias| bias.key_stride() == 1 && next < problem.seqlen_k) {
        let [batch, head, query] = place.index(row);
        let count = place.keys.min(problem.seqlen_k - next);
        l.prefetch(&bias.data[bias.offset([batch, head, query, next])..][..count]);
    }
}

/// One row of masks and biases.
fn build_row(problem: &Problem<'_>, [batch, head, query]: [usize; 3], first_key: usize, values: &mut [f32]) -> Verdict {
    let index = [batch, head, query, first_key];
    let (mut masks, mut biases) = (problem.masks(), problem.biases());
    match biases.next() {
        Some(bias) => each(bias, index, values, |x, bias| *x = bias),
        None => {
            let Some((mask, attend)) = masks.next() else { return Verdict::Clear };
            each(mask, index, values, |x, seen| *x = if seen == *attend { 0.0 } else { f32::NEG_INFINITY });
        }
    }
    for bias in biases {
        each(bias, index, values, |x, bias| *x = sum_of_biases(*x, bias));
    }
    for (mask, attend) in masks {
        each(mask, index, values, |x, seen| *x = if seen == *attend { *x } else { f32::NEG_INFINITY });
    }
    if problem.biases().next().is_some() {
        return Verdict::Mixed;
    }
    // Counting vectorises, as a search or a sum of floats does not; of the bytes of a single mask it is cheapest.
    let mut masks = problem.masks();
    let seen = match (masks.next(), masks.next()) {
        (Some((mask, attend)), None) if mask.key_stride() == 1 => {
            mask.data[mask.offset(index)..][..values.len()].iter().filter(|&seen| seen == attend).count()
        }
        _ => values.iter().filter(|&&x| x == 0.0).count(),
    };
    match seen {
        0 => Verdict::Hidden,
        seen if seen == values.len() => Verdict::Clear,
        _ => Verdict::Mixed,
    }
}

/// -inf where either is, and finite where both are. NaN shows.
#[inline(always)]
fn sum_of_biases(a: f32, b: f32) -> f32 {
    let sum = a + b;
    if a == f32::NEG_INFINITY || b == f32::NEG_INFINITY {
        f32::NEG_INFINITY
    } else if sum == f32::NEG_INFINITY {
        f32::MIN
    } else {
        sum
    }
}

#[inline(always)]
fn each<T: Copy>(from: &Broadcast<'_, T>, index: [usize; 4], values: &mut [f32], update: impl Fn(&mut f32, T)) {
    let source = &from.data[from.offset(index)..];
    match from.key_stride() {
        0 => values.iter_mut().for_each(|x| update(x, source[0])),
        1 => values.iter_mut().zip(source).for_each(|(x, &y)| update(x, y)),
        step => values.iter_mut().enumerate().for_each(|(i, x)| update(x, source[i * step])),
    }
}
