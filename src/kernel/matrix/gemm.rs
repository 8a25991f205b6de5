//! `out = A B + bias` on matrix tiles, B packed once.

use core::ops::Range;

use super::super::lanes::{Lanes, Op};
use super::super::packed::{BLOCK_COLUMNS, BLOCK_ROWS, Block, Finish};
use super::super::tile::Rows;
use super::output::Add;
use super::pack::{PackLanes, PackRows};
use super::product::{Plan, steps_at_once};
use super::{Matrix, MatrixOp, Multiply, Product, SIDE, STEP, TILE};

/// Steps of k that one product sums. Products of more are added, so that rounding errors of long sums stay small: rms of `f32` at k 4096,
/// relative to the largest, 4.8e-8, and 8.6e-8 with 64 steps (`examples/accuracy`).
const MOST_STEPS: usize = 16;

/// Steps that k has.
fn steps(k: usize) -> usize {
    k.div_ceil(STEP)
}

/// Panels of B as terms of bf16: `[panel][terms][steps][columns / 16]` tiles.
#[derive(Clone, Copy)]
pub(crate) struct Terms<'a> {
    pub(crate) terms: usize,
    pub(crate) data: &'a [f32],
    /// Of each panel, whether a column is out of range.
    pub(crate) flagged: &'a [bool],
}

impl Terms<'_> {
    /// Floats of a panel of so many columns.
    pub(crate) fn panel_len(k: usize, columns: usize, terms: usize) -> Option<usize> {
        steps(k).checked_mul(columns)?.checked_mul(SIDE * terms)
    }
}

/// One panel of B, `[k][columns]` as `f32`, becomes terms. Says whether a column is out of range.
pub(crate) struct PackPanel<'a> {
    pub(crate) panel: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) terms: usize,
    pub(crate) dst: &'a mut [f32],
}

impl Op for PackPanel<'_> {
    type Output = bool;
    fn run<L: Lanes>(self, l: L) -> bool {
        let Self { panel, columns, terms, dst } = self;
        let (term, mut flags) = (dst.len() / terms, [0.0; 2 * SIDE]);
        l.vectorize(PackLanes { src: panel, lanes: columns, terms, dst, term, flags: &mut flags });
        flags.iter().any(|&flag| flag != 0.0)
    }
}

/// A block of the product, on matrix tiles where the level has them.
pub(crate) struct Tiled<'a, 'o, 's> {
    pub(crate) block: Block<'a, 'o>,
    pub(crate) b: Terms<'a>,
    /// Terms that A becomes.
    pub(crate) terms: usize,
    /// At least [`Tiled::scratch_len`] floats.
    pub(crate) scratch: &'s mut [f32],
}

impl Tiled<'_, '_, '_> {
    /// Floats of scratch for a block of so many rows.
    pub(crate) fn scratch_len(rows: usize, k: usize, terms: usize) -> Option<usize> {
        let rows = rows.next_multiple_of(STEP);
        let columns = steps(k).checked_mul(STEP)?;
        let a = columns.checked_mul(rows * terms / 2)?;
        a.checked_add(columns)?.checked_add(rows + 2 * rows * STEP)
    }
}

impl Op for Tiled<'_, '_, '_> {
    type Output = ();
    fn run<L: Lanes>(self, l: L) {
        match l.matrix() {
            Some(matrix) => matrix.run(OnMatrix { l, op: self }),
            None => {
                let mut block = self.block;
                let [rows, columns] = block.out.ranges();
                plainly(l, &mut block, rows, columns);
            }
        }
    }
}

/// Part of a block without tiles, which begins with a panel.
fn plainly<L: Lanes>(l: L, block: &mut Block<'_, '_>, rows: Range<usize>, columns: Range<usize>) {
    for row in rows.clone().step_by(BLOCK_ROWS) {
        for column in columns.clone().step_by(BLOCK_COLUMNS) {
            let (rows, columns) =
                (row..rows.end.min(row + BLOCK_ROWS), column..columns.end.min(column + BLOCK_COLUMNS));
            block.part(rows, columns).run(l);
        }
    }
}

struct OnMatrix<'a, 'o, 's, L> {
    l: L,
    op: Tiled<'a, 'o, 's>,
}

impl<L: Lanes> MatrixOp for OnMatrix<'_, '_, '_, L> {
    type Output = ();
    fn run<M: Multiply>(self, matrix: M) {
        let Self { l, op: Tiled { mut block, b, terms, scratch } } = self;
        let ([rows, columns], k, nr) = (block.out.ranges(), block.a.layout.shape[1], 2 * L::LANES);
        let tiles = rows.len().div_ceil(STEP);
        let term = tiles * steps(k) * 2 * TILE;
        let (a, scratch) = scratch.split_at_mut(terms * term);
        let (row, scratch) = scratch.split_at_mut(steps(k) * STEP);
        let (flags, scratch) = scratch.split_at_mut(tiles * STEP);
        let (sums, more) = scratch[..2 * tiles * STEP * nr].split_at_mut(tiles * STEP * nr);
        let out_of_range = pack_rows(l, &block, terms, (a, term), row, flags);
        let panels = columns.start / nr..columns.end.div_ceil(nr);
        let configured = matrix.configure();
        let len = Terms::panel_len(k, nr, b.terms).expect("packed");
        for panel in panels.clone().filter(|&panel| !b.flagged[panel]) {
            let right = &b.data[panel * len..][..len];
            let factors = [terms, b.terms];
            let plan = &Plan::new(factors, [term, len / b.terms]);
            for part in (0..steps(k)).step_by(MOST_STEPS) {
                let (end, c) = (steps(k).min(part + MOST_STEPS), if part == 0 { &mut *sums } else { &mut *more });
                // Of B so much that it stays in L1 while all tiles of rows meet it.
                let size = steps_at_once(factors);
                for first in (part..end).step_by(size) {
                    let op = Product {
                        plan,
                        depth: size.min(end - first),
                        columns: nr,
                        a: &a[first * 2 * TILE..],
                        a_block: steps(k) * 2 * TILE,
                        b: &right[first * nr * SIDE..],
                        c,
                        more: first > part,
                    };
                    op.run(matrix, &configured);
                }
                if part > 0 {
                    l.vectorize(Add { sums, more });
                }
            }
            for (tile, sums) in sums.chunks_exact_mut(STEP * nr).enumerate() {
                let count = (rows.len() - tile * STEP).min(STEP);
                l.vectorize(Finish { block: &mut block, sums: &mut sums[..count * nr], at: [tile * STEP, panel] });
            }
        }
        // What is out of range, and all that shares its row or panel, as on the level below.
        for panel in panels.filter(|&panel| b.flagged[panel]) {
            let columns = (panel * nr).max(columns.start)..((panel + 1) * nr).min(columns.end);
            plainly(l, &mut block, rows.clone(), columns);
        }
        for i in (0..rows.len()).filter(|&i| out_of_range && flags[i] != 0.0) {
            plainly(l, &mut block, rows.start + i..rows.start + i + 1, columns.clone());
        }
    }
}

/// Rows of A into tiles; says whether one is out of range.
fn pack_rows<L: Lanes>(
    l: L,
    block: &Block<'_, '_>,
    terms: usize,
    (dst, term): (&mut [f32], usize),
    row: &mut [f32],
    flags: &mut [f32],
) -> bool {
    let ([rows, _], k) = (block.out.ranges(), block.a.layout.shape[1]);
    if let Some(rows) = block.a.in_place(rows.start, rows.end) {
        return l.vectorize(PackRows { rows, terms, dst, term, flags });
    }
    let mut any = false;
    for (i, index) in rows.enumerate() {
        let row = &mut row[..k];
        block.a.load_row(index, row);
        let first = i / STEP * steps(k) * 2 * TILE + i % STEP * SIDE;
        let rows = Rows { data: row, stride: k, width: k, count: 1 };
        let flags = &mut flags[i..=i];
        any |= l.vectorize(PackRows { rows, terms, dst: &mut dst[first..], term, flags });
    }
    any
}
