//! One block of `out = A B + bias`, B packed in panels: rows of A are broadcast against panels of two vectors of columns.
//!
//! Every element is the sum over pieces of k, ascending, of chains of FMAs, and then the bias. Pieces are cut at multiples of one
//! length; so tiles and blocks may be cut as is fastest, no bit depends on them. (A chain over all of k would be simpler, and its
//! error larger: with k = 512, that of PyTorch's documentation example would exceed 1e-5 of its largest output without FMA.)

use core::ops::Range;

use super::lanes::{Lanes, MAX_LANES, Op};
use super::operand::Operand;
use super::pack::load_elements;
use super::tile::{Rows, Transpose, tile_rows, unroll, with_constant};
use crate::Element;
use crate::element::AnySlice;
use crate::view::{AnyRowBlock, Layout, RowBlock};

/// Rows of a block, at most: with k = 1024, A's take 288 KiB of the L2 cache while all panels of the block pass them.
pub(crate) const BLOCK_ROWS: usize = 72;
/// Columns of a block, at most: whole panels of every level.
pub(crate) const BLOCK_COLUMNS: usize = 128;
/// Length of a piece of k: of a panel it is 16 KiB (AVX2), which stay in L1 while all rows of the block meet them. Pieces of 512 and
/// 1024 gain 0 to 3 % of the speed (2048 x 1024 x 1024, AMD EPYC, Zen 3, one core, AVX2, 2026-11-30); a shorter one has smaller errors.
const PIECE: usize = 256;
/// Floats between rows of A that are copied: not a power of two, which would put all of them in a few sets of L1.
const COPY_STRIDE: usize = PIECE + 16;
/// Blocks of no more rows than this take less room for copies: a vector of zeros costs as much as a product of a few rows.
const FEW: usize = 12;

/// A on its way in.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) data: AnySlice<'a>,
    /// Inside `data`.
    pub(crate) layout: Layout<2>,
}

impl<'a> Left<'a> {
    /// A row as `f32`.
    pub(super) fn load_row(&self, row: usize, to: &mut [f32]) {
        let [stride, step] = self.layout.strides;
        load_elements(self.data, row * stride, step, to);
    }

    /// The rows `from..to` where they lie, if they are `f32` side by side.
    pub(super) fn in_place(&self, from: usize, to: usize) -> Option<Rows<'a>> {
        let ([_, width], [stride, step]) = (self.layout.shape, self.layout.strides);
        if width == 0 || from == to {
            return Some(Rows { data: &[], stride: 0, width: 0, count: to - from });
        }
        match self.data {
            AnySlice::F32(data) if step == 1 || width == 1 => {
                Some(Rows { data: &data[from * stride..], stride, width, count: to - from })
            }
            _ => None,
        }
    }

    /// Columns `columns` of the rows `from..to`, copied to `area`.
    #[inline(always)]
    fn copy<'s, L: Lanes>(&self, l: L, rows: [usize; 2], columns: [usize; 2], area: &'s mut [f32]) -> Rows<'s> {
        let ([from, to], [first, end]) = (rows, columns);
        let (count, width) = (to - from, end - first);
        let [stride, step] = self.layout.strides;
        match self.data {
            AnySlice::F32(data) if stride == 1 && count > 1 && step >= count => {
                let src = Rows { data: &data[from + first * step..], stride: step, width: count, count: width };
                Transpose { src, dst: area, dst_stride: COPY_STRIDE }.run(l);
            }
            data => {
                for (row, area) in (from..to).zip(area.chunks_exact_mut(COPY_STRIDE)) {
                    load_elements(data, row * stride + first * step, step, &mut area[..width]);
                }
            }
        }
        Rows { data: area, stride: COPY_STRIDE, width, count }
    }
}

/// A block of the product.
pub(crate) struct Block<'a, 'o> {
    pub(crate) a: Left<'a>,
    /// Panels `[k][2 * LANES]` of all columns, zeros behind the last.
    pub(crate) b: AnySlice<'a>,
    /// As many as B has columns.
    pub(crate) bias: Option<&'a [f32]>,
    /// No more than [`BLOCK_ROWS`] rows and [`BLOCK_COLUMNS`] columns, which begin with a panel.
    pub(crate) out: AnyRowBlock<'o>,
}

impl Block<'_, '_> {
    /// Some of its rows and columns, which begin with a panel.
    pub(super) fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> Block<'_, '_> {
        Block { a: self.a, b: self.b, bias: self.bias, out: self.out.part(rows, columns) }
    }
}

impl Op for Block<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        const SUMS: usize = BLOCK_ROWS * 2 * MAX_LANES;
        const FEW_SUMS: usize = FEW * 2 * MAX_LANES;
        const WIDE: usize = PIECE * 2 * MAX_LANES;
        let [rows, columns] = self.out.ranges();
        let (few, copied) = (rows.len() <= FEW, self.a.in_place(rows.start, rows.end).is_none());
        let panels = columns.len().div_ceil(2 * L::LANES);
        // Panels that are taken alone: all of them, or what is left.
        let alone = at_once(rows.len()) == 1 || !panels.is_multiple_of(at_once(rows.len()));
        let widened = alone && !matches!(self.b, AnySlice::F32(_));
        match (copied, few) {
            (false, true) if !widened => with_room::<L, 0, FEW_SUMS, 0>(l, self),
            (false, true) => with_room::<L, 0, FEW_SUMS, WIDE>(l, self),
            (false, false) if !widened => with_room::<L, 0, SUMS, 0>(l, self),
            (false, false) => with_room::<L, 0, SUMS, WIDE>(l, self),
            (true, true) => with_room::<L, { FEW * COPY_STRIDE }, { FEW * BLOCK_COLUMNS }, WIDE>(l, self),
            (true, false) => {
                with_room::<L, { BLOCK_ROWS * COPY_STRIDE }, { BLOCK_ROWS * BLOCK_COLUMNS }, WIDE>(l, self);
            }
        }
    }
}

/// Panels that so many rows take at a time. Few rows take several, so that there are enough chains to hide the latency of an FMA.
fn at_once(rows: usize) -> usize {
    match rows {
        1 => 4,
        2 | 3 => 2,
        _ => 1,
    }
}

/// Floats from a cache line on.
#[repr(align(64))]
struct Room<const N: usize>([f32; N]);

/// Runs a block with room for copies of A, unfinished sums, and a panel as `f32`. Not inlined: what it takes of the stack is its own.
#[inline(never)]
fn with_room<L: Lanes, const A: usize, const SUMS: usize, const WIDE: usize>(l: L, block: Block<'_, '_>) {
    let (mut copy, mut sums, mut wide) = (Room([0.0; A]), Room([0.0; SUMS]), Room([0.0; WIDE]));
    let (copy, sums, wide) = (&mut copy.0[..], &mut sums.0[..], &mut wide.0[..]);
    match block.b {
        AnySlice::F32(b) => l.vectorize(Typed { block, b, copy, sums, wide }),
        AnySlice::F16(b) => l.vectorize(Typed { block, b, copy, sums, wide }),
        AnySlice::Bf16(b) => l.vectorize(Typed { block, b, copy, sums, wide }),
    }
}

/// A block with B's element type, and room.
struct Typed<'t, 'a, 'o, T> {
    block: Block<'a, 'o>,
    b: &'t [T],
    copy: &'t mut [f32],
    sums: &'t mut [f32],
    wide: &'t mut [f32],
}

impl<T: Operand> Op for Typed<'_, '_, '_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { mut block, b, copy, sums, wide } = self;
        let ([rows, columns], nr) = (block.out.ranges(), 2 * L::LANES);
        let k = block.a.layout.shape[1];
        let panels = columns.start / nr..columns.end.div_ceil(nr);
        let at_once = at_once(rows.len());
        let in_place = block.a.in_place(rows.start, rows.end);
        let mut room = (sums, wide);
        // Copies serve all panels; what is read in place needs no more sums than one tile of panels has.
        let group = if in_place.is_some() { at_once } else { panels.len() };
        let mut first = panels.start;
        while first < panels.end {
            let end = panels.end.min(first + group);
            let mut from = 0;
            loop {
                let to = k.min(from + PIECE);
                let a = match in_place {
                    Some(all) => all.columns(from, to),
                    None => block.a.copy(l, [rows.start, rows.end], [from, to], copy),
                };
                let part = Part { k, depth: [from, to], panels: [first, end] };
                product(l, &mut block, (a, b), part, &mut room, at_once);
                from = to;
                if from == k {
                    break;
                }
            }
            first = end;
        }
    }
}

/// A piece of k of some panels.
#[derive(Clone, Copy)]
struct Part {
    k: usize,
    depth: [usize; 2],
    panels: [usize; 2],
}

/// The product of a piece of A and of some panels: to the output if it is the last piece, else to `sums`.
#[inline(always)]
fn product<L: Lanes, T: Operand>(
    l: L,
    block: &mut Block<'_, '_>,
    (a, b): (Rows<'_>, &[T]),
    part: Part,
    (sums, wide): &mut (&mut [f32], &mut [f32]),
    at_once: usize,
) {
    let ([mut panel, end], nr, [from, to]) = (part.panels, 2 * L::LANES, part.depth);
    let piece = |panel: usize| &b[(panel * part.k + from) * nr..][..(to - from) * nr];
    while panel < end {
        let count = if end - panel >= at_once { at_once } else { 1 };
        // With a single piece nothing is kept from panel to panel.
        let at = if to - from == part.k { 0 } else { (panel - part.panels[0]) * a.count * nr };
        let sums = &mut sums[at..];
        if count > 1 {
            let panels = core::array::from_fn(|p| piece(panel + p.min(count - 1)));
            let tile = Tile { block: &mut *block, a, part, sums, at: [0, panel] };
            match a.count {
                1 => outlined(l, Streams::<4, 1, T> { tile, panels }),
                2 => outlined(l, Streams::<2, 2, T> { tile, panels }),
                _ => outlined(l, Streams::<2, 3, T> { tile, panels }),
            }
        } else if let Some(narrow) = T::as_f32(piece(panel)) {
            let ahead = |row| T::as_f32(ahead::<L, T>(b, &part, [row, panel])).unwrap_or_default();
            panel_by_tiles(l, block, a, (narrow, ahead), (part, panel, sums));
        } else {
            // Made `f32` once for all rows: conversions of f16 compete with FMAs (2048 x 1024 x 1024: 87 GFLOP/s instead of 67; a
            // shift of bf16 costs about what the pass does, 89 instead of 91), and kernels of one type are fewer to compile.
            let wide = &mut wide[..(to - from) * nr];
            for (narrow, wide) in piece(panel).chunks_exact(L::LANES).zip(wide.chunks_exact_mut(L::LANES)) {
                l.store(T::load(l, narrow), wide);
            }
            panel_by_tiles(l, block, a, (wide, |_| &*wide), (part, panel, sums));
        }
        panel += count;
    }
}

/// All rows meet one panel.
#[inline(always)]
fn panel_by_tiles<'b, L: Lanes>(
    l: L,
    block: &mut Block<'_, '_>,
    a: Rows<'_>,
    (panel, ahead): (&'b [f32], impl Fn(usize) -> &'b [f32]),
    (part, at, sums): (Part, usize, &mut [f32]),
) {
    let mut row = 0;
    while row < a.count {
        let rows = tile_rows(a.count - row, L::MR);
        let tile = Tile { block: &mut *block, a, part, sums: &mut *sums, at: [row, at] };
        with_constant!(rows, MR <= L::MR => outlined(l, OnePanel::<MR> { tile, panel, ahead: ahead(row) }));
        row += rows;
    }
}

/// Not inlined: with all tiles in one function there are not enough registers for the addresses of rows, and loads of them in the
/// innermost loop take much of the speed.
#[inline(never)]
fn outlined<L: Lanes, O: Op<Output = ()>>(l: L, op: O) {
    l.vectorize(op);
}

/// Rows of A and panels of B from `at` on (the row counts from the first of the piece).
struct Tile<'t, 'a, 'o> {
    block: &'t mut Block<'a, 'o>,
    a: Rows<'t>,
    part: Part,
    sums: &'t mut [f32],
    at: [usize; 2],
}

impl Tile<'_, '_, '_> {
    /// Adds the sum over a piece of k to those before, for the tile's `p`-th panel; the last goes to the output.
    #[inline(always)]
    fn settle<L: Lanes, const MR: usize>(&mut self, l: L, p: usize, mut acc: [[L::V; 2]; MR]) {
        let (nr, [row, panel], [from, to]) = (2 * L::LANES, self.at, self.part.depth);
        let sums = &mut self.sums[(p * self.a.count + row) * nr..][..MR * nr];
        if from > 0 {
            unroll!(I < MR => {
                acc[I][0] = l.add(l.load(&sums[I * nr..]), acc[I][0]);
                acc[I][1] = l.add(l.load(&sums[I * nr + L::LANES..]), acc[I][1]);
            });
        }
        unroll!(I < MR => {
            l.store(acc[I][0], &mut sums[I * nr..]);
            l.store(acc[I][1], &mut sums[I * nr + L::LANES..]);
        });
        if to == self.part.k {
            outlined(l, Finish { block: self.block, sums, at: [row, panel + p] });
        }
    }
}

/// A tile of `MR` rows and one panel, and what is asked for meanwhile.
struct OnePanel<'t, 'a, 'o, const MR: usize> {
    tile: Tile<'t, 'a, 'o>,
    panel: &'t [f32],
    ahead: &'t [f32],
}

impl<const MR: usize> Op for OnePanel<'_, '_, '_, MR> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        if MR > L::MR {
            return; // No tile of this level: `tile_rows` gives up to `MR`.
        }
        let Self { mut tile, panel, ahead } = self;
        let rows = tile.a.range(tile.at[0], tile.at[0] + MR);
        let acc = panel_product::<L, MR>(l, &rows, panel, ahead);
        tile.settle(l, 0, acc);
    }
}

/// A tile of all rows, `MR`, and `NP` panels: the first of these.
struct Streams<'t, 'a, 'o, const NP: usize, const MR: usize, T> {
    tile: Tile<'t, 'a, 'o>,
    panels: [&'t [T]; 4],
}

impl<T: Operand, const NP: usize, const MR: usize> Op for Streams<'_, '_, '_, NP, MR, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { mut tile, panels } = self;
        let acc = streams::<L, T, NP, MR>(l, &tile.a, panels);
        for (p, acc) in acc.into_iter().enumerate() {
            tile.settle(l, p, acc);
        }
    }
}

/// What a tile asks for meanwhile: a quarter of the part of B that comes next, so that the first tiles of a piece fetch all of it.
#[inline(always)]
fn ahead<'b, L: Lanes, T>(b: &'b [T], part: &Part, [row, panel]: [usize; 2]) -> &'b [T] {
    let Part { k, depth: [from, to], panels } = *part;
    let nr = 2 * L::LANES;
    let quarter = (to - from) / STEPS * nr;
    let next = if panels[1] - panels[0] > 1 { (panel + 1) * k + from } else { panel * k + to };
    let start = next * nr + row / L::MR * quarter;
    b.get(start..start + quarter).unwrap_or(&b[(panel * k + from) * nr..][..quarter])
}

/// `sum over d of rows[i][d] * panel[d]`, four steps of `d` at a time; asks for a row of `ahead` with each four.
#[inline(always)]
fn panel_product<L: Lanes, const MR: usize>(l: L, left: &Rows<'_>, panel: &[f32], ahead: &[f32]) -> [[L::V; 2]; MR] {
    let (nr, width, mut acc) = (2 * L::LANES, left.width, [[l.splat(0.0); 2]; MR]);
    let mut rows: [&[f32]; MR] = [&[]; MR];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = left.row(i);
    }
    let whole = width / STEPS * STEPS;
    for (s, (panel, ahead)) in panel.chunks_exact(STEPS * nr).zip(ahead.chunks_exact(nr)).enumerate() {
        l.prefetch(ahead);
        let mut a: [&[f32]; MR] = [&[]; MR];
        for i in 0..MR {
            a[i] = &rows[i][s * STEPS..][..STEPS];
        }
        unroll!(S < STEPS => acc = step(l, acc, &a, S, &panel[S * nr..]));
    }
    for d in whole..width {
        acc = step(l, acc, &rows, d, &panel[d * nr..]);
    }
    acc
}

/// Steps of k between two checks.
const STEPS: usize = 4;

/// `acc[i] + rows[i][d] * panel`.
#[inline(always)]
fn step<L: Lanes, T: Operand, const MR: usize>(
    l: L,
    mut acc: [[L::V; 2]; MR],
    rows: &[&[f32]; MR],
    d: usize,
    panel: &[T],
) -> [[L::V; 2]; MR] {
    let b = [T::load(l, panel), T::load(l, &panel[L::LANES..])];
    unroll!(I < MR => {
        let a = l.splat(rows[I][d]);
        acc[I] = [l.fma(a, b[0], acc[I][0]), l.fma(a, b[1], acc[I][1])];
    });
    acc
}

/// The same for several panels at once.
#[inline(always)]
fn streams<L: Lanes, T: Operand, const NP: usize, const MR: usize>(
    l: L,
    left: &Rows<'_>,
    from: [&[T]; 4],
) -> [[[L::V; 2]; MR]; NP] {
    let mut acc = [[[l.splat(0.0); 2]; MR]; NP];
    let mut rows: [&[f32]; MR] = [&[]; MR];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = left.row(i);
    }
    let mut panels: [&[T]; NP] = [&[]; NP];
    panels.copy_from_slice(&from[..NP]);
    for d in 0..left.width {
        unroll!(P < NP => acc[P] = step(l, acc[P], &rows, d, &panels[P][d * 2 * L::LANES..]));
    }
    acc
}

/// Adds the bias to finished rows of a panel, `[row][column]`, and writes them.
pub(super) struct Finish<'t, 'a, 'o> {
    pub(super) block: &'t mut Block<'a, 'o>,
    pub(super) sums: &'t mut [f32],
    /// First row, counted from the block's, and panel.
    pub(super) at: [usize; 2],
}

impl Op for Finish<'_, '_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { block, sums, at: [row, panel] } = self;
        let ([rows, columns], nr) = (block.out.ranges(), 2 * L::LANES);
        let (first, end) = (panel * nr, columns.end.min((panel + 1) * nr));
        if let Some(bias) = block.bias {
            let bias = &bias[first..end];
            let (low, high) = bias.split_at(bias.len().min(L::LANES));
            let (low, high) = (l.load_partial(low, 0.0), l.load_partial(high, 0.0));
            for sums in sums.chunks_exact_mut(nr) {
                l.store(l.add(l.load(sums), low), sums);
                let sums = &mut sums[L::LANES..];
                l.store(l.add(l.load(sums), high), sums);
            }
        }
        let place = (rows.start + row, first - columns.start, end - first);
        match &mut block.out {
            AnyRowBlock::F32(block) => put(block, place, sums, nr),
            AnyRowBlock::F16(block) => put(block, place, sums, nr),
            AnyRowBlock::Bf16(block) => put(block, place, sums, nr),
        }
    }
}

/// Writes the first `count` of each `nr` values to a row of its own, from column `from` of the block on.
#[inline(always)]
fn put<T: Element>(block: &mut RowBlock<'_, T>, place: (usize, usize, usize), values: &[f32], nr: usize) {
    let (row, from, count) = place;
    for (row, values) in (row..).zip(values.chunks_exact(nr)) {
        let values = &values[..count];
        if block.has_slices() {
            if let Some(line) = block.row(row).into_slice() {
                T::store_nearest(values, &mut line[from..from + count]);
            }
        } else {
            let mut line = block.row(row);
            for (i, &x) in values.iter().enumerate() {
                *line.element(from + i) = T::from_f32_nearest(x);
            }
        }
    }
}
