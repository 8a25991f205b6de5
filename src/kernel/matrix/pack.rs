//! Operands on their way into tiles of bf16 terms.

use super::super::lanes::{Lanes, Op};
use super::super::operand::Operand;
use super::super::tile::{Rows, Transpose};
use super::{MAX_TERMS, SIDE, STEP, TILE};

/// Magnitudes whose terms, and products of them, neither overflow nor are flushed to 0, as tiles do with what is smaller than
/// 2^-126. What else is not 0 takes another way: see [`OutOfRange`].
const IN_RANGE: (f32, f32) = (f32::from_bits((127 - 90) << 23), f32::from_bits((127 + 50) << 23));

/// Collects whether elements are out of range, lane by lane: then it is not 0.
struct OutOfRange<L: Lanes>(L::V);

impl<L: Lanes> OutOfRange<L> {
    #[inline(always)]
    fn new(l: L) -> Self {
        Self(l.splat(0.0))
    }

    /// Whether one was, in any lane.
    #[inline(always)]
    fn any(&self, l: L) -> bool {
        l.sum(self.0) != 0.0
    }

    #[inline(always)]
    fn see(&mut self, l: L, x: L::V) {
        let (zero, magnitude) = (l.splat(0.0), l.abs(x));
        let small = l.select(l.lt(magnitude, l.splat(IN_RANGE.0)), magnitude, zero);
        // True for NaN.
        self.0 = l.max(small, l.select(l.not_lt(magnitude, l.splat(IN_RANGE.1)), l.splat(1.0), self.0));
    }
}

/// The terms of two vectors, as rows of pairs.
///
/// Three terms, or one of a bf16, are exact however they are cut, and truncation takes least. Of two, what is left out (the product of
/// the second ones, too) is smallest, and as often negative as positive, if they are rounded: rms error of `High` 39 times that of
/// `f32` with truncation.
#[inline(always)]
pub(super) fn terms_of<L: Lanes, const TERMS: usize>(
    l: L,
    is_bf16: bool,
    [mut low, mut high]: [L::V; 2],
) -> [L::V; TERMS] {
    let exact = is_bf16 || TERMS == MAX_TERMS;
    let mut terms = [low; TERMS];
    for (i, term) in terms.iter_mut().enumerate() {
        let first = match exact {
            // What is left is a bf16.
            true if i + 1 == TERMS => [low, high],
            true => [l.truncate_bf16(low), l.truncate_bf16(high)],
            false => [l.round_bf16(low), l.round_bf16(high)],
        };
        *term = l.pair_bf16(first[0], first[1]);
        (low, high) = (l.sub(low, first[0]), l.sub(high, first[1]));
    }
    terms
}

/// Writes them, from term to term `term` floats.
#[inline(always)]
fn store_terms<L: Lanes, const TERMS: usize>(l: L, terms: [L::V; TERMS], dst: &mut [f32], term: usize) {
    for (i, x) in terms.into_iter().enumerate() {
        l.store(x, &mut dst[i * term..]);
    }
}

/// Runs `$body` with the constant `$n` equal to `$terms`.
macro_rules! with_terms {
    ($terms:expr, $n:ident => $body:expr) => {
        match $terms {
            1 => {
                const $n: usize = 1;
                $body
            }
            2 => {
                const $n: usize = 2;
                $body
            }
            _ => {
                const $n: usize = 3;
                $body
            }
        }
    };
}

pub(super) use with_terms;

/// Looks at rows one by one; it is hardly ever needed, so that all of them at once are looked at first.
#[inline(always)]
fn flag_rows<L: Lanes, T: Operand>(l: L, rows: Rows<'_, T>, flags: &mut [f32]) {
    for (i, flag) in flags.iter_mut().enumerate().take(rows.count) {
        let mut check = OutOfRange::new(l);
        for x in rows.row(i).chunks(L::LANES) {
            check.see(l, T::load_partial(l, x));
        }
        *flag = l.sum(check.0);
    }
}

/// Elements `from..` of a row, as many as a vector has and there are, zeros behind them.
#[inline(always)]
fn load_from<L: Lanes, T: Operand>(l: L, row: &[T], from: usize) -> L::V {
    match row.get(from..).unwrap_or_default() {
        [] => l.splat(0.0),
        row => T::load_partial(l, row),
    }
}

/// Rows into tiles of rows: `[terms][pairs of tiles][steps of columns][2]` tiles, whose pairs are columns `i` and `i + 16` of a step,
/// zeros behind the last column. Tiles behind the last row keep what they held. Says whether a row is out of range.
pub(super) struct PackRows<'a, T> {
    pub(super) rows: Rows<'a, T>,
    pub(super) terms: usize,
    pub(super) dst: &'a mut [f32],
    pub(super) term: usize,
    /// Not 0 where a row is out of range.
    pub(super) flags: &'a mut [f32],
}

impl<T: Operand> Op for PackRows<'_, T> {
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        with_terms!(self.terms, TERMS => self.pack::<L, TERMS>(l))
    }
}

impl<T: Operand> PackRows<'_, T> {
    #[inline(always)]
    fn pack<L: Lanes, const TERMS: usize>(self, l: L) -> bool {
        let Self { rows, dst, term, flags, .. } = self;
        let depth = rows.width.div_ceil(STEP);
        let mut check = OutOfRange::new(l);
        for i in 0..rows.count {
            let row = rows.row(i);
            let first = i / STEP * depth * 2 * TILE + i % STEP * SIDE;
            for (step, columns) in row.chunks(STEP).enumerate() {
                let dst = &mut dst[first + step * 2 * TILE..];
                for j in (0..SIDE).step_by(L::LANES) {
                    let pair = [load_from(l, columns, j), load_from(l, columns, SIDE + j)];
                    check.see(l, pair[0]);
                    check.see(l, pair[1]);
                    store_terms(l, terms_of::<L, TERMS>(l, T::IS_BF16, pair), &mut dst[j..], term);
                }
            }
        }
        flags[..rows.count].fill(0.0);
        let any = check.any(l);
        if any {
            flag_rows(l, rows, flags);
        }
        any
    }
}

/// Rows that lie transposed, `[width][lanes]`, into tiles of columns: `[terms][steps][lanes / 16]` tiles, whose pairs are `i` and
/// `i + 16` of a step.
pub(super) struct PackLanes<'a> {
    pub(super) src: &'a [f32],
    pub(super) lanes: usize,
    pub(super) terms: usize,
    pub(super) dst: &'a mut [f32],
    pub(super) term: usize,
    /// Not 0 where a lane is out of range.
    pub(super) flags: &'a mut [f32],
}

impl Op for PackLanes<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        with_terms!(self.terms, TERMS => self.pack::<L, TERMS>(l));
    }
}

impl PackLanes<'_> {
    #[inline(always)]
    fn pack<L: Lanes, const TERMS: usize>(self, l: L) {
        let Self { src, lanes, dst, term, flags, .. } = self;
        for lane in (0..lanes).step_by(L::LANES) {
            let mut check = OutOfRange::new(l);
            for (step, src) in src.chunks(STEP * lanes).enumerate() {
                let tile = (step * lanes / SIDE + lane / SIDE) * TILE;
                for i in 0..SIDE {
                    let pair = [load_from(l, src, i * lanes + lane), load_from(l, src, (SIDE + i) * lanes + lane)];
                    check.see(l, pair[0]);
                    check.see(l, pair[1]);
                    let dst = &mut dst[tile + i * SIDE + lane % SIDE..];
                    store_terms(l, terms_of::<L, TERMS>(l, false, pair), dst, term);
                }
            }
            l.store(check.0, &mut flags[lane..]);
        }
    }
}

/// Columns into tiles of rows, which is transposed: `[terms][pairs of tiles of columns][steps of rows][2]` tiles, whose pairs are
/// rows `i` and `i + 16` of a step. Zeros for rows behind the last, for rows that are out of range, and for columns behind the last.
/// Says whether a row is out of range.
pub(super) struct PackColumns<'a, T> {
    pub(super) rows: Rows<'a, T>,
    pub(super) terms: usize,
    pub(super) dst: &'a mut [f32],
    pub(super) term: usize,
    /// Steps that there is room for.
    pub(super) depth: usize,
    pub(super) flags: &'a mut [f32],
}

impl<T: Operand> Op for PackColumns<'_, T> {
    type Output = bool;
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> bool {
        with_terms!(self.terms, TERMS => self.pack::<L, TERMS>(l))
    }
}

impl<T: Operand> PackColumns<'_, T> {
    #[inline(always)]
    fn pack<L: Lanes, const TERMS: usize>(self, l: L) -> bool {
        let Self { rows, dst, term, depth, flags, .. } = self;
        let mut check = OutOfRange::new(l);
        for i in 0..rows.count {
            for x in rows.row(i).chunks(L::LANES) {
                check.see(l, T::load_partial(l, x));
            }
        }
        flags[..rows.count].fill(0.0);
        let any = check.any(l);
        if any {
            flag_rows(l, rows, flags);
        }
        let row = |row: usize| if row >= rows.count || any && flags[row] != 0.0 { &[] } else { rows.row(row) };
        let mut pairs = [[0.0; TILE]; TERMS];
        for first in (0..rows.count).step_by(STEP) {
            for column in (0..rows.width.next_multiple_of(2 * SIDE)).step_by(SIDE) {
                for at in (0..TILE).step_by(L::LANES) {
                    let (low, column) = (first + at / SIDE, column + at % SIDE);
                    let pair = [load_from(l, row(low), column), load_from(l, row(low + SIDE), column)];
                    store_terms(
                        l,
                        terms_of::<L, TERMS>(l, T::IS_BF16, pair),
                        &mut pairs.as_flattened_mut()[at..],
                        TILE,
                    );
                }
                let tile = ((column / STEP * depth + first / STEP) * 2 + column / SIDE % 2) * TILE;
                for (i, pairs) in pairs.iter().enumerate() {
                    let src = Rows { data: pairs, stride: SIDE, width: SIDE, count: SIDE };
                    Transpose { src, dst: &mut dst[i * term + tile..], dst_stride: SIDE }.run(l);
                }
            }
        }
        any
    }
}
