//! The register tiles: scores `S^T = K Q^T` and values `O += P V`.
//!
//! Scores have queries in lanes, so that softmax has no horizontal step; their elements are then broadcast against rows of V.
//! K and V are read as they lie in memory; only the queries are transposed on their way in.

use super::lanes::{Lanes, Op};
use super::operand::Operand;

/// `count` rows of `width` elements, `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) stride: usize,
    pub(crate) width: usize,
    pub(crate) count: usize,
}

impl<'a, T: Copy> Rows<'a, T> {
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.stride..][..self.width]
    }

    /// Columns `from..to`.
    pub(crate) fn columns(&self, from: usize, to: usize) -> Self {
        debug_assert!(from <= to && to <= self.width);
        let data = if from < to { &self.data[from..] } else { &[] };
        Self { data, width: to - from, ..*self }
    }

    /// Rows `from..to`.
    pub(crate) fn range(&self, from: usize, to: usize) -> Self {
        debug_assert!(from <= to && to <= self.count);
        let data = if from < to { &self.data[from * self.stride..] } else { &[] };
        Self { data, count: to - from, ..*self }
    }
}

/// Runs `$body` with the constant `$mr` equal to `$m`, which is 1..=`$most`; `$most` is a constant, 12 or less. What is beyond it
/// is not compiled (an `if` of a constant is decided before there is code): half of it, for tiles of 6 rows.
macro_rules! with_constant {
    ($m:expr, $mr:ident <= $most:expr => $body:expr) => {
        with_constant!(@ $m, $mr <= $most => $body; 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    (@ $m:expr, $mr:ident <= $most:expr => $body:expr; $($n:literal)*) => {
        match $m {
            $($n if const { $n <= $most } => { const $mr: usize = $n; $body })*
            _ => unreachable!("no register tile has so many rows"),
        }
    };
}

/// Runs `$body` with `$i` = 0, 1, ... `$n - 1`, each a constant; `$n` is at most 16. A loop whose body may panic is not always
/// unrolled, and accumulators that it indexes then live in memory: 79 against 99 GFLOP/s (AVX-512, D 64, S 2048).
macro_rules! unroll {
    ($i:ident < $n:expr => $body:expr) => {
        unroll!(@ $i < $n => $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident < $n:expr => $body:expr; $($k:literal)*) => {{
        $(if const { $k < $n } {
            const $i: usize = $k;
            $body
        })*
    }};
}

pub(super) use {unroll, with_constant};

/// How many of `left` rows the next register tile takes: `mr`, but the last two share what is left, since a tile of one or two
/// rows has too few accumulators to hide the latency of an FMA.
#[inline(always)]
pub(super) fn tile_rows(left: usize, mr: usize) -> usize {
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
    /// Whether to start from what `s` holds: the sum over the first part of head_dim.
    pub(crate) more: bool,
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
        with_constant!(rows, MR <= L::MR => score_tile::<L, NV, MR>(l, op.keys.range(first, first + MR), op.queries, tile, op.more));
        s = rest;
        first += rows;
    }
}

#[inline(always)]
fn score_tile<L: Lanes, const NV: usize, const MR: usize>(
    l: L,
    keys: Rows<'_>,
    queries: &[f32],
    s: &mut [f32],
    more: bool,
) {
    let lanes = NV * L::LANES;
    let mut acc = [[l.splat(0.0); NV]; MR];
    if more {
        unroll!(I < MR => for (j, acc) in acc[I].iter_mut().enumerate() {
            *acc = l.load(&s[I * lanes + j * L::LANES..]);
        });
    }
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

/// `o[row][d] = alpha[row] * o[row][d] + sum over keys of p[key][row] * values[key][d]`.
///
/// Here the values are in lanes and the probabilities are broadcast: the output comes as rows, and no lane is wasted where
/// there are fewer rows than lanes.
pub(crate) struct Values<'a, T = f32> {
    /// Their width is a multiple of `LANES`.
    pub(crate) values: Rows<'a, T>,
    /// From a panel of two vectors of columns to the next, if `values` are panels as [`Panels`] makes them.
    pub(crate) panel: Option<usize>,
    /// `[count][lanes]`.
    pub(crate) p: &'a [f32],
    pub(crate) lanes: usize,
    pub(crate) rows: usize,
    pub(crate) before: Before<'a>,
    /// `[rows][width]`.
    pub(crate) o: &'a mut [f32],
}

/// What becomes of the output that is there already.
#[derive(Clone, Copy)]
pub(crate) enum Before<'a> {
    /// It is overwritten, whatever it is.
    Nothing,
    /// Times these factors of the rows, the sum goes on from it: where blocks are cut then changes no bit.
    Continued(&'a [f32]),
    /// Times these factors, it is added to the sum of the keys: of many blocks each is summed by itself, and rounding errors stay
    /// small. (65,536 keys: rms 1.7e-7 instead of 1.3e-6.)
    Added(&'a [f32]),
}

impl<T: Operand> Op for Values<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        // Columns outside: a panel of V, 128 keys by two vectors, stays in L1 while all rows meet it. Fewer rows take more columns,
        // so that accumulators are not too few to hide the latency of an FMA.
        let mut column = match self.rows {
            _ if self.panel.is_some() => 0,
            1 => wide_columns::<L, T, 8, 1>(l, &mut self),
            2 => wide_columns::<L, T, 4, 2>(l, &mut self),
            3 => wide_columns::<L, T, 4, 3>(l, &mut self),
            _ => 0,
        };
        while column + 2 * L::LANES <= self.values.width {
            value_panel::<L, T, 2>(l, &mut self, column);
            column += 2 * L::LANES;
        }
        if column < self.values.width {
            value_panel::<L, T, 1>(l, &mut self, column);
        }
    }
}

/// As many columns as `NV` vectors at once make, for all of the `MR` rows that there are. Returns the first that is left.
#[inline(always)]
fn wide_columns<L: Lanes, T: Operand, const NV: usize, const MR: usize>(l: L, op: &mut Values<'_, T>) -> usize {
    let mut column = 0;
    while column + NV * L::LANES <= op.values.width {
        value_tile::<L, T, NV, MR>(l, op, 0, column);
        column += NV * L::LANES;
    }
    column
}

#[inline(always)]
fn value_panel<L: Lanes, T: Operand, const NV: usize>(l: L, op: &mut Values<'_, T>, column: usize) {
    let mut row = 0;
    while row < op.rows {
        let rows = tile_rows(op.rows - row, L::MR);
        with_constant!(rows, MR <= L::MR => value_tile::<L, T, NV, MR>(l, op, row, column));
        row += rows;
    }
}

#[inline(always)]
fn value_tile<L: Lanes, T: Operand, const NV: usize, const MR: usize>(
    l: L,
    op: &mut Values<'_, T>,
    row: usize,
    column: usize,
) {
    let Rows { data, stride, width, count } = op.values;
    let mut acc = [[l.splat(0.0); NV]; MR];
    if let Before::Continued(alpha) = op.before {
        let alpha = &alpha[row..][..MR];
        unroll!(I < MR => for (j, acc) in acc[I].iter_mut().enumerate() {
            let o = l.load(&op.o[(row + I) * width + column + j * L::LANES..]);
            *acc = l.mul(o, l.splat(alpha[I]));
        });
    }
    // All keys but the last in chunks of exact size, which leaves no check in the loop; behind the last row there may be nothing.
    // (With a check or two a key the portable level has 27 GFLOP/s where this has 30, D 64, S 512.)
    let stride = stride.max(NV * L::LANES);
    let last = count - 1;
    let first = op.panel.map_or(column, |panel| column / (2 * L::LANES) * panel);
    let values = &data[first..][..last * stride + NV * L::LANES];
    let rows = values[..last * stride].chunks_exact(stride);
    for (p, values) in op.p[..last * op.lanes].chunks_exact(op.lanes).zip(rows) {
        acc = value_step(l, acc, &p[row..], values);
    }
    acc = value_step(l, acc, &op.p[last * op.lanes + row..], &values[last * stride..]);
    if let Before::Added(alpha) = op.before {
        let alpha = &alpha[row..][..MR];
        unroll!(I < MR => for (j, acc) in acc[I].iter_mut().enumerate() {
            let o = l.load(&op.o[(row + I) * width + column + j * L::LANES..]);
            *acc = l.fma(o, l.splat(alpha[I]), *acc);
        });
    }
    unroll!(I < MR => for (j, acc) in acc[I].iter().enumerate() {
        l.store(*acc, &mut op.o[(row + I) * width + column + j * L::LANES..]);
    });
}

/// Copies rows of values, a multiple of `LANES` wide, to panels of two vectors of columns. Rows of many columns are a multiple of
/// many cache lines apart, so that a column of them finds room in few sets of L1; panels lie side by side.
pub(crate) struct Panels<'a> {
    pub(crate) values: Rows<'a>,
    pub(crate) dst: &'a mut [f32],
}

impl Panels<'_> {
    /// From panel to panel: a line more than one takes, as they would meet in one set, too.
    pub(crate) fn step(keys: usize, lanes: usize) -> usize {
        keys * 2 * lanes + 16
    }
}

impl Op for Panels<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (panel, step) = (2 * L::LANES, Self::step(self.values.count, L::LANES));
        for key in 0..self.values.count {
            for (from, to) in self.values.row(key).chunks(panel).zip(self.dst.chunks_mut(step)) {
                let to = &mut to[key * panel..];
                for (j, from) in from.chunks_exact(L::LANES).enumerate() {
                    l.store(l.load(from), &mut to[j * L::LANES..]);
                }
            }
        }
    }
}

/// One key: `acc[i] += p[i] * values`.
#[inline(always)]
fn value_step<L: Lanes, T: Operand, const NV: usize, const MR: usize>(
    l: L,
    mut acc: [[L::V; NV]; MR],
    p: &[f32],
    values: &[T],
) -> [[L::V; NV]; MR] {
    let (p, values) = (&p[..MR], &values[..NV * L::LANES]);
    let mut b = [l.splat(0.0); NV];
    for j in 0..NV {
        b[j] = T::load(l, &values[j * L::LANES..]);
    }
    for i in 0..MR {
        let a = l.splat(p[i]);
        for j in 0..NV {
            acc[i][j] = l.fma(a, b[j], acc[i][j]);
        }
    }
    acc
}

/// As [`Values`], but a row meets only the keys that it sees: for values with NaN or infinities, which a probability of 0
/// would not silence. The same operations in the same order, so that rows which see all keys get the same bits.
pub(crate) struct CarefulValues<'a> {
    pub(crate) values: Rows<'a>,
    pub(crate) p: &'a [f32],
    /// `[count][lanes]`, 1 where the row sees the key, else 0.
    pub(crate) seen: &'a [f32],
    pub(crate) lanes: usize,
    pub(crate) rows: usize,
    pub(crate) before: Before<'a>,
    pub(crate) o: &'a mut [f32],
}

impl Op for CarefulValues<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { values, p, seen, lanes, rows, before, o } = self;
        for row in 0..rows {
            let o = &mut o[row * values.width..][..values.width];
            for (column, o) in o.chunks_exact_mut(L::LANES).enumerate() {
                let mut acc = match before {
                    Before::Continued(alpha) => l.mul(l.load(o), l.splat(alpha[row])),
                    _ => l.splat(0.0),
                };
                for key in (0..values.count).filter(|key| seen[key * lanes + row] != 0.0) {
                    let value = l.load(&values.row(key)[column * L::LANES..]);
                    acc = l.fma(l.splat(p[key * lanes + row]), value, acc);
                }
                if let Before::Added(alpha) = before {
                    acc = l.fma(l.load(o), l.splat(alpha[row]), acc);
                }
                l.store(acc, o);
            }
        }
    }
}

/// Whether all elements of the rows are finite.
pub(crate) struct AllFinite<'a, T>(pub(crate) Rows<'a, T>);

impl<T: Operand> Op for AllFinite<'_, T> {
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        // x * 0 is 0 for a finite x, else NaN, which stays in the sum. Four sums, as an FMA waits for the one before it.
        let mut acc = [l.splat(0.0); 4];
        for i in 0..self.0.count {
            let groups = self.0.row(i).chunks_exact(4 * L::LANES);
            for x in groups.remainder().chunks(L::LANES) {
                acc[0] = l.fma(T::load_partial(l, x), l.splat(0.0), acc[0]);
            }
            for x in groups {
                for j in 0..4 {
                    acc[j] = l.fma(T::load(l, &x[j * L::LANES..]), l.splat(0.0), acc[j]);
                }
            }
        }
        l.sum(l.add(l.add(acc[0], acc[1]), l.add(acc[2], acc[3]))) == 0.0
    }
}

/// `dst[column][row] = src[row][column]`. Up to the next multiple of `LANES` rows, what stands in `dst` is unspecified.
pub(crate) struct Transpose<'a> {
    pub(crate) src: Rows<'a>,
    pub(crate) dst: &'a mut [f32],
    pub(crate) dst_stride: usize,
}

impl Op for Transpose<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { src, dst, dst_stride } = self;
        for row in (0..src.count).step_by(L::LANES) {
            let rows = (src.count - row).min(L::LANES);
            // Less than a vector at the end is transposed with what comes before it, if there is enough of that.
            let mut column = 0;
            while column < src.width && src.width >= L::LANES {
                let from = column.min(src.width - L::LANES);
                let (src, dst) = (&src.data[row * src.stride + from..], &mut dst[from * dst_stride + row..]);
                l.transpose(src, self.src.stride, rows, dst, dst_stride);
                column += L::LANES;
            }
            for column in column..src.width {
                for i in 0..rows {
                    dst[column * dst_stride + row + i] = src.row(row + i)[column];
                }
            }
        }
    }
}
