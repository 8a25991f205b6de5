//! The register tiles: scores `S^T = K Q^T` and values `O^T += V^T P^T`, with queries in lanes.
//!
//! Queries in lanes leave softmax without horizontal steps and read K and V as they lie in memory: an element of a key row is
//! broadcast and meets a vector of queries. Only the queries are transposed on the way in, and the output on the way out.

use super::lanes::{Lanes, Op};

/// `count` rows of `width` floats, `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) width: usize,
    pub(crate) count: usize,
}

impl<'a> Rows<'a> {
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.width]
    }

    /// Rows `from..to`.
    pub(crate) fn range(&self, from: usize, to: usize) -> Self {
        debug_assert!(from <= to && to <= self.count);
        let data = if from < to { &self.data[from * self.stride..] } else { &[] };
        Self { data, count: to - from, ..*self }
    }
}

/// Runs `$body` with the constant `$mr` equal to `$m`, which is 1..=12.
macro_rules! with_constant {
    ($m:expr, $mr:ident => $body:expr) => {
        with_constant!(@ $m, $mr => $body; 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    (@ $m:expr, $mr:ident => $body:expr; $($n:literal)*) => {
        match $m {
            $($n => { const $mr: usize = $n; $body })*
            _ => unreachable!("register tiles have 1 to 12 rows"),
        }
    };
}

/// How many of `left` rows the next register tile takes: `mr`, but the last two share what is left, since a tile of one or two
/// rows has too few accumulators to hide the latency of an FMA.
#[inline(always)]
fn tile_rows(left: usize, mr: usize) -> usize {
    if left <= mr {
        left
    } else if left < 2 * mr {
        left.div_ceil(2)
    } else {
        mr
    }
}

/// `s[key][lane] = dot(keys[key], queries[lane])`, `vectors` vectors of queries side by side.
pub(crate) struct Scores<'a> {
    pub(crate) keys: Rows<'a>,
    /// Queries transposed, `[width][lanes]`.
    pub(crate) queries: &'a [f32],
    pub(crate) vectors: usize,
    /// `[count][lanes]`.
    pub(crate) s: &'a mut [f32],
}

impl Op for Scores<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match self.vectors {
            1 => scores::<L, 1>(l, self),
            _ => scores::<L, 2>(l, self),
        }
    }
}

#[inline(always)]
fn scores<L: Lanes, const NV: usize>(l: L, op: Scores<'_>) {
    let lanes = NV * L::LANES;
    let mut s = op.s;
    let mut first = 0;
    while first < op.keys.count {
        let rows = tile_rows(op.keys.count - first, L::MR);
        let (tile, rest) = s.split_at_mut(rows * lanes);
        with_constant!(rows, MR => score_tile::<L, NV, MR>(l, op.keys.range(first, first + MR), op.queries, tile));
        s = rest;
        first += rows;
    }
}

#[inline(always)]
fn score_tile<L: Lanes, const NV: usize, const MR: usize>(l: L, keys: Rows<'_>, queries: &[f32], s: &mut [f32]) {
    let lanes = NV * L::LANES;
    let mut acc = [[l.splat(0.0); NV]; MR];
    let mut rows: [&[f32]; MR] = [&[]; MR];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = keys.row(i);
    }
    for (d, query) in queries.chunks_exact(lanes).take(keys.width).enumerate() {
        let mut b = [l.splat(0.0); NV];
        for j in 0..NV {
            b[j] = l.load(&query[j * L::LANES..]);
        }
        for i in 0..MR {
            let a = l.splat(rows[i][d]);
            for j in 0..NV {
                acc[i][j] = l.fma(a, b[j], acc[i][j]);
            }
        }
    }
    for i in 0..MR {
        for j in 0..NV {
            l.store(acc[i][j], &mut s[i * lanes + j * L::LANES..]);
        }
    }
}

/// `o[d][lane] = o[d][lane] * alpha[lane] + sum over keys of values[key][d] * p[key][lane]`.
pub(crate) struct Values<'a> {
    pub(crate) values: Rows<'a>,
    /// `[count][lanes]`.
    pub(crate) p: &'a [f32],
    pub(crate) vectors: usize,
    pub(crate) alpha: &'a [f32],
    /// The output transposed, `[width][lanes]`.
    pub(crate) o: &'a mut [f32],
}

impl Op for Values<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match self.vectors {
            1 => values::<L, 1>(l, self),
            _ => values::<L, 2>(l, self),
        }
    }
}

#[inline(always)]
fn values<L: Lanes, const NV: usize>(l: L, op: Values<'_>) {
    let lanes = NV * L::LANES;
    let mut alpha = [l.splat(0.0); NV];
    for j in 0..NV {
        alpha[j] = l.load(&op.alpha[j * L::LANES..]);
    }
    let mut o = op.o;
    let mut first = 0;
    while first < op.values.width {
        let rows = tile_rows(op.values.width - first, L::MR);
        let (tile, rest) = o.split_at_mut(rows * lanes);
        with_constant!(rows, MR => value_tile::<L, NV, MR>(l, op.values, first, op.p, alpha, tile));
        o = rest;
        first += rows;
    }
}

#[inline(always)]
fn value_tile<L: Lanes, const NV: usize, const MR: usize>(
    l: L,
    values: Rows<'_>,
    first: usize,
    p: &[f32],
    alpha: [L::V; NV],
    o: &mut [f32],
) {
    let lanes = NV * L::LANES;
    let mut acc = [[l.splat(0.0); NV]; MR];
    for i in 0..MR {
        for j in 0..NV {
            acc[i][j] = l.mul(l.load(&o[i * lanes + j * L::LANES..]), alpha[j]);
        }
    }
    for (key, p) in p.chunks_exact(lanes).take(values.count).enumerate() {
        let a = &values.data[key * values.stride + first..][..MR];
        let mut b = [l.splat(0.0); NV];
        for j in 0..NV {
            b[j] = l.load(&p[j * L::LANES..]);
        }
        for i in 0..MR {
            let a = l.splat(a[i]);
            for j in 0..NV {
                acc[i][j] = l.fma(a, b[j], acc[i][j]);
            }
        }
    }
    for i in 0..MR {
        for j in 0..NV {
            l.store(acc[i][j], &mut o[i * lanes + j * L::LANES..]);
        }
    }
}

/// As [`Values`], but a lane meets only the keys that it sees: for values with NaN or infinities, which a probability of 0
/// would not silence. The same operations in the same order, so that the other lanes get the same bits.
pub(crate) struct CarefulValues<'a> {
    pub(crate) inner: Values<'a>,
    /// `[count][lanes]`, 1 where the key is seen, else 0.
    pub(crate) seen: &'a [f32],
}

impl Op for CarefulValues<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Values { values, p, vectors, alpha, o } = self.inner;
        let lanes = vectors * L::LANES;
        let half = l.splat(0.5);
        for d in 0..values.width {
            for j in (0..lanes).step_by(L::LANES) {
                let mut acc = l.mul(l.load(&o[d * lanes + j..]), l.load(&alpha[j..]));
                for key in 0..values.count {
                    let sum = l.fma(l.splat(values.row(key)[d]), l.load(&p[key * lanes + j..]), acc);
                    acc = l.select(l.lt(half, l.load(&self.seen[key * lanes + j..])), sum, acc);
                }
                l.store(acc, &mut o[d * lanes + j..]);
            }
        }
    }
}

/// Whether all elements of the rows are finite.
pub(crate) struct AllFinite<'a>(pub(crate) Rows<'a>);

impl Op for AllFinite<'_> {
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        // x * 0 is 0 for a finite x, else NaN, which stays in the sum.
        let mut acc = l.splat(0.0);
        let mut tail = 0.0;
        for i in 0..self.0.count {
            let row = self.0.row(i).chunks_exact(L::LANES);
            tail += row.remainder().iter().map(|x| x * 0.0).sum::<f32>();
            for x in row {
                acc = l.fma(l.load(x), l.splat(0.0), acc);
            }
        }
        l.sum(acc) == 0.0 && tail == 0.0
    }
}

/// Transposes a matrix whose sides are multiples of `LANES`: `dst[column][row] = src[row][column]`.
pub(crate) struct Transpose<'a> {
    pub(crate) src: &'a [f32],
    pub(crate) src_stride: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) dst: &'a mut [f32],
    pub(crate) dst_stride: usize,
}

impl Op for Transpose<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for row in (0..self.rows).step_by(L::LANES) {
            for column in (0..self.columns).step_by(L::LANES) {
                let src = &self.src[row * self.src_stride + column..];
                let dst = &mut self.dst[column * self.dst_stride + row..];
                l.transpose(src, self.src_stride, dst, self.dst_stride);
            }
        }
    }
}
