//! Softmax, its logarithm and the logarithm of its sum over rows, with the elements of a row in lanes.
//!
//! Three passes: the maximum; the exponentials and their sum; the results. Where results are `f32` side by side, the row of the
//! output is the working memory. Otherwise it is a fixed scratch; a row that is longer goes through it in segments, and its
//! exponentials are computed twice. The arithmetic is the same either way, and so are the bits.

use core::ops::Range;

use super::exp::exp_nonpositive;
use super::lanes::{Lanes, MAX_LANES, Op};
use super::pack::load_elements;
use crate::Element;
use crate::element::AnySlice;
use crate::mask::Broadcast;
use crate::view::{Layout, RowBlock};

/// What to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Softmax,
    LogSoftmax,
    /// One result a row.
    LogSumExp,
}

impl Kind {
    /// The result for what is hidden.
    fn hidden(self) -> f32 {
        if self == Self::Softmax { 0.0 } else { f32::NEG_INFINITY }
    }
}

/// A call, checked.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) kind: Kind,
    pub(crate) columns: usize,
    /// `None` if the output holds it.
    pub(crate) input: Option<(AnySlice<'a>, Layout<2>)>,
    /// With the value of what is seen.
    pub(crate) mask: Option<(Broadcast<'a, bool>, bool)>,
}

/// Elements of the working memory: 16 KiB, a half of a small L1 cache. A multiple of `BLOCK` vectors of every level, so that sums
/// do not depend on how a row is cut.
const SCRATCH: usize = 4096;

#[repr(align(64))]
struct Scratch([f32; SCRATCH]);

/// Short rows that go through each pass together: while one waits for its horizontal maximum or sum, the next is under way.
/// Rows of 16 take 0.7 of the time that they take one by one.
const GROUP: usize = 8;

/// All rows of a block.
pub(crate) struct Rows<'a, T> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) block: RowBlock<'a, T>,
}

impl<T: Element> Op for Rows<'_, T> {
    type Output = ();
    fn run<L: Lanes>(self, l: L) {
        l.vectorize(Vectorized(self));
    }
}

struct Vectorized<'a, T>(Rows<'a, T>);

impl<T: Element> Op for Vectorized<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Rows { job, mut block } = self.0;
        let mut rows = block.rows();
        let group = (SCRATCH / job.columns.max(1)).clamp(1, GROUP);
        let direct =
            job.kind != Kind::LogSumExp && block.row(rows.start).into_slice().and_then(T::as_f32_mut).is_some();
        let mut memory;
        let scratch = if direct {
            None
        } else {
            memory = Scratch([0.0; SCRATCH]);
            Some(&mut memory.0)
        };
        let mut lines = Lines { job, block, scratch };
        while !rows.is_empty() {
            let end = rows.end.min(rows.start + group);
            lines.softmax(l, rows.start..end);
            rows.start = end;
        }
    }
}

/// Rows between their memory and the working memory.
struct Lines<'a, 's, T> {
    job: &'a Job<'a>,
    block: RowBlock<'a, T>,
    /// `None` if results are computed where they belong.
    scratch: Option<&'s mut [f32; SCRATCH]>,
}

/// A part of a row that is in the working memory at once: all of it, except of a long one in scratch.
#[derive(Clone, Copy)]
struct Part {
    /// Which row of its group.
    i: usize,
    row: usize,
    from: usize,
    len: usize,
}

impl<T: Element> Lines<'_, '_, T> {
    #[inline(always)]
    fn softmax<L: Lanes>(&mut self, l: L, rows: Range<usize>) {
        let Job { kind, columns, .. } = *self.job;
        let len = if self.scratch.is_some() { columns.min(SCRATCH) } else { columns };
        let (whole, parts) = (len == columns, Parts { rows: rows.clone(), first: rows.start, from: 0, columns, len });
        let mut max = [f32::NEG_INFINITY; GROUP];
        for part in parts.clone() {
            self.load(part);
            max[part.i] = max[part.i].max(row_max(l, self.work(part)));
        }
        // Rows that have seen nothing: -inf - 0 is -inf, where -inf - -inf would be NaN.
        let shift = max.map(|max| if max > f32::NEG_INFINITY { max } else { 0.0 });
        // In the end 0 if nothing was seen, else at least 1; NaN if a NaN or +inf was.
        let mut sum = [0.0; GROUP];
        for part in parts.clone() {
            if !whole {
                self.load(part);
            }
            let (work, i) = (self.work(part), part.i);
            if max[i] == f32::INFINITY && work.iter().any(|x| x.is_nan()) {
                max[i] = f32::NAN;
            }
            sum[i] = match whole && kind == Kind::Softmax {
                true => sum_exp::<L, true>(l, work, shift[i], sum[i]),
                false => sum_exp::<L, false>(l, work, shift[i], sum[i]),
            };
        }
        if kind == Kind::LogSumExp {
            for (i, row) in rows.enumerate() {
                let lse = if max[i] == f32::INFINITY { max[i] } else { (f64::from(shift[i]) + sum[i].ln()) as f32 };
                *self.block.row(row).element(0) = T::from_f32_nearest(lse);
            }
            return;
        }
        for part in parts {
            if !whole {
                self.load(part);
                if kind == Kind::Softmax {
                    sum_exp::<L, true>(l, self.work(part), shift[part.i], 0.0);
                }
            }
            Finish::new(kind, shift[part.i], sum[part.i]).apply(l, self.work(part));
            if sum[part.i].is_nan() {
                hide(self.job, part, self.work(part), kind.hidden());
            }
            self.store(part);
        }
    }

    /// The working memory of a part.
    #[inline(always)]
    fn work(&mut self, part: Part) -> &mut [f32] {
        match &mut self.scratch {
            Some(scratch) => &mut scratch[part.i * part.len..][..part.len],
            None => {
                self.block.row(part.row).into_slice().and_then(T::as_f32_mut).expect("rows without scratch are `f32`")
            }
        }
    }

    /// Fills the working memory: elements as `f32`, -inf where hidden.
    #[inline(always)]
    fn load(&mut self, part: Part) {
        let Part { row, from, .. } = part;
        let job = self.job;
        if part.len == 0 {
            // Without columns, strides are unchecked.
            return;
        }
        if let Some((data, layout)) = job.input {
            load_elements(data, layout.offset([row, from]), layout.strides[1], self.work(part));
        } else if let Some(scratch) = &mut self.scratch {
            let into = &mut scratch[part.i * part.len..][..part.len];
            match self.block.row(row).into_slice() {
                Some(slice) => load_elements(T::erase(slice), from, 1, into),
                None => {
                    let mut row = self.block.row(row);
                    into.iter_mut().enumerate().for_each(|(i, x)| *x = row.element(from + i).to_f32());
                }
            }
        }
        hide(job, part, self.work(part), f32::NEG_INFINITY);
    }

    /// Empties the working memory, if it is not where results belong.
    #[inline(always)]
    fn store(&mut self, part: Part) {
        let Some(scratch) = &self.scratch else { return };
        let values = &scratch[part.i * part.len..][..part.len];
        match self.block.row(part.row).into_slice() {
            Some(slice) => T::store_nearest(values, &mut slice[part.from..part.from + part.len]),
            None => {
                let mut row = self.block.row(part.row);
                values.iter().enumerate().for_each(|(i, &x)| *row.element(part.from + i) = T::from_f32_nearest(x));
            }
        }
    }
}

/// Puts `value` where the mask hides.
#[inline(always)]
fn hide(job: &Job<'_>, part: Part, values: &mut [f32], value: f32) {
    let Some((mask, seen)) = &job.mask else { return };
    let source = &mask.data[mask.offset([0, 0, part.row, part.from])..];
    let set = |x: &mut f32, flag: bool| *x = if flag == *seen { *x } else { value };
    match mask.key_stride() {
        1 => values.iter_mut().zip(source).for_each(|(x, &flag)| set(x, flag)),
        step => values.iter_mut().enumerate().for_each(|(i, x)| set(x, source[i * step])),
    }
}

/// All parts of some rows.
#[derive(Clone)]
struct Parts {
    rows: Range<usize>,
    first: usize,
    from: usize,
    columns: usize,
    len: usize,
}

impl Iterator for Parts {
    type Item = Part;
    #[inline(always)]
    fn next(&mut self) -> Option<Part> {
        if self.rows.is_empty() {
            return None;
        }
        let (row, from) = (self.rows.start, self.from);
        let len = self.len.min(self.columns - from);
        self.from += len;
        if self.from == self.columns {
            self.rows.start += 1;
            self.from = 0;
        }
        Some(Part { i: row - self.first, row, from, len })
    }
}

/// Vectors in flight at once, each with its own partial maximum or sum.
const CHAINS: usize = 4;

/// The largest element; -inf if there is none. NaN does not count.
#[inline(always)]
fn row_max<L: Lanes>(l: L, row: &[f32]) -> f32 {
    let mut max = [l.splat(f32::NEG_INFINITY); CHAINS];
    let groups = row.chunks_exact(CHAINS * L::LANES);
    for (i, x) in groups.remainder().chunks(L::LANES).enumerate() {
        max[i] = l.max(l.load_partial(x, f32::NEG_INFINITY), max[i]);
    }
    for group in groups {
        for i in 0..CHAINS {
            max[i] = l.max(l.load(&group[i * L::LANES..]), max[i]);
        }
    }
    let mut lanes = [0.0; MAX_LANES];
    l.store(l.max(l.max(max[0], max[1]), l.max(max[2], max[3])), &mut lanes);
    let mut n = L::LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] = if lanes[i + n] > lanes[i] { lanes[i + n] } else { lanes[i] };
        }
    }
    lanes[0]
}

/// Vectors that are summed in `f32`, in four chains of 16; a row adds up its blocks in `f64`.
const BLOCK: usize = 64;

/// Adds `e^(x - shift)` of all elements to a sum, and puts it in their place if `STORE`.
#[inline(always)]
fn sum_exp<L: Lanes, const STORE: bool>(l: L, row: &mut [f32], shift: f32, mut total: f64) -> f64 {
    let shift = l.splat(shift);
    for block in row.chunks_mut(BLOCK * L::LANES) {
        let mut sum = [l.splat(0.0); CHAINS];
        let mut groups = block.chunks_exact_mut(CHAINS * L::LANES);
        for group in &mut groups {
            for i in 0..CHAINS {
                let x = &mut group[i * L::LANES..];
                let p = exp_nonpositive(l, l.sub(l.load(x), shift));
                sum[i] = l.add(sum[i], p);
                if STORE {
                    l.store(p, x);
                }
            }
        }
        for (i, x) in groups.into_remainder().chunks_mut(L::LANES).enumerate() {
            // Lanes beyond the end hold -inf and add 0.
            let p = exp_nonpositive(l, l.sub(l.load_partial(x, f32::NEG_INFINITY), shift));
            sum[i] = l.add(sum[i], p);
            if STORE {
                l.store_partial(p, x);
            }
        }
        total += f64::from(l.sum(l.add(l.add(sum[0], sum[1]), l.add(sum[2], sum[3]))));
    }
    total
}

/// From exponentials, or elements, to results.
#[derive(Clone, Copy)]
enum Finish {
    /// Times this. A division by the sum would save half an ulp, of several, and takes 5 to 15 % of the whole.
    Scale(f32),
    /// Minus this, minus that.
    Subtract(f32, f32),
}

impl Finish {
    #[inline(always)]
    fn new(kind: Kind, shift: f32, sum: f64) -> Self {
        match kind {
            Kind::Softmax => Self::Scale(if sum == 0.0 { 0.0 } else { (1.0 / sum) as f32 }),
            // ln(0) would turn -inf into NaN.
            _ => Self::Subtract(shift, if sum == 0.0 { 0.0 } else { sum.ln() as f32 }),
        }
    }

    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, row: &mut [f32]) {
        // No closures in here: they would not be compiled for the level.
        let mut vectors = row.chunks_exact_mut(L::LANES);
        for x in &mut vectors {
            l.store(self.one(l, l.load(x)), x);
        }
        let x = vectors.into_remainder();
        if !x.is_empty() {
            l.store_partial(self.one(l, l.load_partial(x, 0.0)), x);
        }
    }

    #[inline(always)]
    fn one<L: Lanes>(self, l: L, x: L::V) -> L::V {
        match self {
            Self::Scale(norm) => l.mul(x, l.splat(norm)),
            Self::Subtract(shift, log_sum) => l.sub(l.sub(x, l.splat(shift)), l.splat(log_sum)),
        }
    }
}
