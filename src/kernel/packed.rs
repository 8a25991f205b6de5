//! One block of `out = A B + bias`, B packed in panels: rows of A are broadcast against panels of two vectors of columns.
//!
//! Every element is one chain of FMAs over all of k, `k` ascending, and then the bias: between pieces of k its sum is kept as the
//! `f32` that it is. So tiles, blocks and pieces may be cut as is fastest; no bit depends on them.

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
/// Length of a piece of k: of a panel it is 64 KiB (AVX2), which stay in L2 while all rows of the block meet them. Sums are put aside
/// between pieces, which costs more than L1 would gain: 2048 x 1024 x 1024 has 89 / 91 / 93 / 94 GFLOP/s with pieces of 192 / 256 / 512 /
/// 1024, and 87.5 with 256 and blocks of 144 rows (AMD EPYC, Zen 3, one core, AVX2, 2026-11-30; matrixmultiply 85).
const PIECE: usize = 1024;
/// The same where A is copied or panels are widened, piece by piece.
const SHORT_PIECE: usize = 256;
/// Floats between rows of A that are copied: not a power of two, which would put all of them in a few sets of L1.
const COPY_STRIDE: usize = SHORT_PIECE + 16;
/// Blocks of no more rows than this take less room for copies: a vector of zeros costs as much as a product of a few rows.
const FEW: usize = 12;
/// The largest `MR` of any level.
const MAX_MR: usize = 12;

/// A on its way in.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) data: AnySlice<'a>,
    /// Inside `data`.
    pub(crate) layout: Layout<2>,
}

impl<'a> Left<'a> {
    /// The rows `from..to` where they lie, if they are `f32` side by side.
    fn in_place(&self, from: usize, to: usize) -> Option<Rows<'a>> {
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

impl Op for Block<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        const SUMS: usize = BLOCK_ROWS * 2 * MAX_LANES;
        const SUMS_OF_ALL: usize = BLOCK_ROWS * BLOCK_COLUMNS;
        const WIDE: usize = SHORT_PIECE * 2 * MAX_LANES;
        let [rows, _] = self.out.ranges();
        let ways = Ways::of::<L>(&self);
        match (ways.copied, ways.widened) {
            (false, false) if ways.piece >= self.a.layout.shape[1] => with_room::<L, 0, 0, 0>(l, self),
            (false, false) => with_room::<L, 0, SUMS, 0>(l, self),
            (false, true) => with_room::<L, 0, SUMS, WIDE>(l, self),
            (true, false) if rows.len() <= FEW => {
                with_room::<L, { FEW * COPY_STRIDE }, { FEW * BLOCK_COLUMNS }, 0>(l, self);
            }
            (true, false) => with_room::<L, { BLOCK_ROWS * COPY_STRIDE }, SUMS_OF_ALL, 0>(l, self),
            (true, true) => with_room::<L, { BLOCK_ROWS * COPY_STRIDE }, SUMS_OF_ALL, WIDE>(l, self),
        }
    }
}

/// How a block is computed.
struct Ways {
    /// Whether A is copied.
    copied: bool,
    /// Whether panels are made `f32` before rows meet them, where each tile of rows would do it again: conversions of f16 compete
    /// with FMAs (2048 x 1024 x 1024: 87 GFLOP/s instead of 67), but a shift of bf16 costs less than another pass (91 instead of 89).
    widened: bool,
    /// Length of the pieces of k.
    piece: usize,
}

impl Ways {
    fn of<L: Lanes>(block: &Block<'_, '_>) -> Self {
        let ([rows, _], k) = (block.out.ranges(), block.a.layout.shape[1]);
        let copied = block.a.in_place(rows.start, rows.end).is_none();
        let widened = matches!(block.b, AnySlice::F16(_)) && rows.len() > (2 * L::MR).max(FEW);
        let piece = match copied || widened {
            true => SHORT_PIECE,
            // A panel that is used once need not stay anywhere.
            false if rows.len() <= L::MR => k,
            false => PIECE,
        };
        Self { copied, widened, piece }
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
        // Few rows take several panels at a time, so that there are enough chains to hide the latency of an FMA.
        let at_once = match rows.len() {
            1 => 4,
            2 | 3 => 2,
            _ => 1,
        };
        let in_place = block.a.in_place(rows.start, rows.end);
        let Ways { widened, piece, .. } = Ways::of::<L>(&block);
        let wide = widened.then_some(wide);
        let mut room = (sums, wide);
        // Copies serve all panels; what is read in place needs no more sums than one tile of panels has.
        let group = if in_place.is_some() { at_once } else { panels.len() };
        let mut first = panels.start;
        while first < panels.end {
            let end = panels.end.min(first + group);
            let mut from = 0;
            loop {
                let to = k.min(from + piece);
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
    (sums, wide): &mut (&mut [f32], Option<&mut [f32]>),
    at_once: usize,
) {
    let ([mut panel, end], nr, [from, to]) = (part.panels, 2 * L::LANES, part.depth);
    let piece = |panel: usize| &b[(panel * part.k + from) * nr..][..(to - from) * nr];
    while panel < end {
        let count = if end - panel >= at_once { at_once } else { 1 };
        // Without a piece before or after this one there are none.
        let at = if to - from == part.k { 0 } else { (panel - part.panels[0]) * a.count * nr };
        let sums = &mut sums[at..];
        if let Some(wide) = wide {
            let wide = &mut wide[..(to - from) * nr];
            for (narrow, wide) in piece(panel).chunks_exact(L::LANES).zip(wide.chunks_exact_mut(L::LANES)) {
                l.store(T::load(l, narrow), wide);
            }
            panel_by_tiles(l, block, a, [&*wide; 4], |_| wide, (part, panel, sums));
        } else if count == 1 {
            let ahead = |row| ahead::<L, T>(b, &part, [row, panel]);
            panel_by_tiles(l, block, a, [piece(panel); 4], ahead, (part, panel, sums));
        } else {
            let panels = core::array::from_fn(|p| piece(panel + p.min(count - 1)));
            let tile = Tile { block: &mut *block, a, panels, ahead: &[], part, sums, at: [0, panel] };
            match a.count {
                1 => outlined(l, Exactly::<4, 1, T>(tile)),
                2 => outlined(l, Exactly::<2, 2, T>(tile)),
                _ => outlined(l, Exactly::<2, 3, T>(tile)),
            }
        }
        panel += count;
    }
}

/// All rows meet one panel.
#[inline(always)]
fn panel_by_tiles<'b, L: Lanes, T: Operand>(
    l: L,
    block: &mut Block<'_, '_>,
    a: Rows<'_>,
    panels: [&'b [T]; 4],
    ahead: impl Fn(usize) -> &'b [T],
    (part, panel, sums): (Part, usize, &mut [f32]),
) {
    let mut row = 0;
    while row < a.count {
        let rows = tile_rows(a.count - row, L::MR);
        let tile = Tile { block: &mut *block, a, panels, ahead: ahead(row), part, sums: &mut *sums, at: [row, panel] };
        with_constant!(rows, MR => outlined(l, Exactly::<1, MR, T>(tile)));
        row += rows;
    }
}

/// Not inlined: with all tiles in one function there are not enough registers for the addresses of rows, and loads of them in the
/// innermost loop take a quarter of the speed (54 against 70 GFLOP/s, 1024 x 1024 x 1024, AVX2, on a busy machine).
#[inline(never)]
fn outlined<L: Lanes, O: Op<Output = ()>>(l: L, op: O) {
    l.vectorize(op);
}

/// Rows of A and panels of B from `at` on (the row counts from the first of the piece).
struct Tile<'t, 'a, 'o, T> {
    block: &'t mut Block<'a, 'o>,
    a: Rows<'t>,
    /// The piece of k of the panels, of which the first are used.
    panels: [&'t [T]; 4],
    /// What is asked for meanwhile.
    ahead: &'t [T],
    part: Part,
    sums: &'t mut [f32],
    at: [usize; 2],
}

/// A tile of `MR` rows and `NP` panels.
struct Exactly<'t, 'a, 'o, const NP: usize, const MR: usize, T>(Tile<'t, 'a, 'o, T>);

impl<T: Operand, const NP: usize, const MR: usize> Op for Exactly<'_, '_, '_, NP, MR, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        if MR > L::MR {
            return; // No tile of this level: `tile_rows` gives up to `MR`.
        }
        let Self(Tile { block, a, panels, ahead, part, sums, at: [row, panel] }) = self;
        let Part { k, depth: [from, to], .. } = part;
        let nr = 2 * L::LANES;
        let mut acc = [[[l.splat(0.0); 2]; MR]; NP];
        if from > 0 {
            for (p, acc) in acc.iter_mut().enumerate() {
                let sums = &sums[(p * a.count + row) * nr..][..MR * nr];
                unroll!(I < MR => acc[I] = [l.load(&sums[I * nr..]), l.load(&sums[I * nr + L::LANES..])]);
            }
        }
        let rows = a.range(row, row + MR);
        if NP == 1 {
            acc[0] = panel_product(l, &rows, panels[0], ahead, acc[0]);
        } else {
            acc = streams(l, &rows, panels, acc);
        }
        for (p, acc) in acc.iter().enumerate() {
            if to == k {
                finish(l, block, *acc, [row, panel + p]);
                continue;
            }
            let sums = &mut sums[(p * a.count + row) * nr..][..MR * nr];
            unroll!(I < MR => {
                l.store(acc[I][0], &mut sums[I * nr..]);
                l.store(acc[I][1], &mut sums[I * nr + L::LANES..]);
            });
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

/// `acc[i] + sum over d of rows[i][d] * panel[d]`, four steps of `d` at a time; asks for a row of `ahead` with each four.
#[inline(always)]
fn panel_product<L: Lanes, T: Operand, const MR: usize>(
    l: L,
    left: &Rows<'_>,
    panel: &[T],
    ahead: &[T],
    mut acc: [[L::V; 2]; MR],
) -> [[L::V; 2]; MR] {
    let (nr, width) = (2 * L::LANES, left.width);
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
    mut acc: [[[L::V; 2]; MR]; NP],
) -> [[[L::V; 2]; MR]; NP] {
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

/// Adds the bias to `MR` rows of a panel and writes them.
#[inline(always)]
fn finish<L: Lanes, const MR: usize>(
    l: L,
    block: &mut Block<'_, '_>,
    mut acc: [[L::V; 2]; MR],
    [row, panel]: [usize; 2],
) {
    let [rows, columns] = block.out.ranges();
    let (nr, row) = (2 * L::LANES, rows.start + row);
    let (first, end) = (panel * nr, columns.end.min((panel + 1) * nr));
    if let Some(bias) = block.bias {
        let bias = &bias[first..end];
        let (low, high) = bias.split_at(bias.len().min(L::LANES));
        let bias = [l.load_partial(low, 0.0), l.load_partial(high, 0.0)];
        unroll!(I < MR => acc[I] = [l.add(acc[I][0], bias[0]), l.add(acc[I][1], bias[1])]);
    }
    let from = first - columns.start;
    if let AnyRowBlock::F32(block) = &mut block.out
        && end - first == nr
        && block.has_slices()
    {
        unroll!(I < MR => {
            if let Some(out) = block.row(row + I).into_slice() {
                let out = &mut out[from..from + nr];
                l.store(acc[I][0], out);
                l.store(acc[I][1], &mut out[L::LANES..]);
            }
        });
        return;
    }
    let mut values = Room([0.0; MAX_MR * 2 * MAX_LANES]);
    let values = &mut values.0[..MR * nr];
    unroll!(I < MR => {
        l.store(acc[I][0], &mut values[I * nr..]);
        l.store(acc[I][1], &mut values[I * nr + L::LANES..]);
    });
    let place = (row, from, end - first);
    match &mut block.out {
        AnyRowBlock::F32(block) => put(block, place, values, nr),
        AnyRowBlock::F16(block) => put(block, place, values, nr),
        AnyRowBlock::Bf16(block) => put(block, place, values, nr),
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
