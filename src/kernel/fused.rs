//! Fused attention over one block of rows: the flash loop (Dao et al. 2022, algorithm 1; Milakov and Gimelshein 2018), with
//! queries in lanes.
//!
//! ```text
//! for each block of keys that any row sees            K, V as f32 rows, in place where they lie so
//!     for each tile of 2 vectors of rows              O, row_max, row_sum of every tile stay in L2
//!         S = K Q^T                                   scores, in L1
//!         S = rule(S)                                 scale, softcap, ALiBi, bias, -inf where hidden
//!         P, row_max, row_sum, alpha = softmax(S)
//!         O = alpha O + P V
//! for each tile: out = O / row_sum, lse = row_max + ln(row_sum), weights in a second pass over the keys
//! ```
//!
//! A hidden key has probability exactly 0, which changes no bit of sum and output, so a row's result does not depend on which
//! other rows share its tile, nor on which hidden keys are skipped.

use core::ops::Range;

use super::blocking::{Blocking, is_few, seen_blocks};
use super::lanes::{Lanes, MAX_LANES, Op};
use super::mask_tile::{self, Place, Verdict};
use super::matrix::{Matrix, OnMatrix, SIDE, STEP};
use super::online::{KEY_ALIGN, RowState, Softmax};
use super::pack::{load_row, load_rows};
use super::score::{Rule, ScorePass};
use super::scratch::{Areas, Scratch, Tile, Work, tile_state};
use super::tile::{AllFinite, Before, CarefulValues, Panels, Rows, Scores, Transpose, Values};
use crate::problem::Problem;
use crate::view::{AnyHeads, RowSink};

/// Columns of queries and keys that scores are summed over at once: so many of a tile of queries leave room for keys in L1.
const SCORE_WIDTH: usize = 256;

/// What all tasks of a call share.
pub(crate) struct Job<'a> {
    pub(crate) problem: &'a Problem<'a>,
    pub(crate) blocking: Blocking<'a>,
    pub(crate) q: AnyHeads<'a>,
    pub(crate) k: AnyHeads<'a>,
    pub(crate) v: AnyHeads<'a>,
}

/// How raw products become powers of two.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    /// Factor of the scores before other rules; `None` if it is left to `c`.
    before: Option<f32>,
    /// Whether `c` stands for a negative scale, whose sign the queries then take.
    pub(super) negative: bool,
    /// `p = 2^(c * (score - max))`.
    pub(super) c: f32,
    /// Natural-log units of a score as softmax sees it.
    pub(super) natural: f64,
}

impl Scale {
    /// Rules that add to scores need them scaled; else the scale is free, as a factor of the exponent. Factors so large or
    /// small that the difference of two products could overflow where the scaled one does not are applied first, too.
    fn new(problem: &Problem<'_>) -> Self {
        const LOG2_E: f64 = core::f64::consts::LOG2_E;
        let scale = problem.softmax_scale;
        let additive = problem.softcap.is_some() || problem.alibi.is_some() || problem.biases().next().is_some();
        let moderate = (2f32.powi(-60)..2f32.powi(60)).contains(&scale.abs());
        if additive || !moderate {
            Self { before: Some(scale), negative: false, c: LOG2_E as f32, natural: 1.0 }
        } else {
            let natural = f64::from(scale.abs());
            Self { before: None, negative: scale < 0.0, c: (natural * LOG2_E) as f32, natural }
        }
    }
}

/// Keys `first..first + count` of a head.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    pub(super) first: usize,
    pub(super) count: usize,
}

impl Tile {
    /// The part of a block of keys that the tile looks at, whose first `keep` keys no window hides. It starts at a multiple of
    /// a few keys, so that a key is always in the same partial sum of softmax.
    pub(super) fn part(&self, block: Keys, keep: usize) -> Option<Keys> {
        let lo = if block.first < keep { 0 } else { self.any.0.max(block.first) - block.first };
        let hi = self.any.1.min(block.first + block.count).saturating_sub(block.first);
        let align = self.align;
        (lo < hi).then(|| Keys { first: block.first + lo / align * align, count: hi - lo / align * align })
    }

    /// Whether all rows may see all keys of a part, of which no window hides the first `keep`.
    fn sees_all(&self, part: Keys, keep: usize) -> bool {
        (self.all.0 <= part.first || keep == part.count) && part.first + part.count <= self.all.1
    }
}

/// One block of rows: queries of some heads, in passes over one KV head each.
pub(crate) struct Attend<'a, 's> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) batch: usize,
    pub(crate) heads: Range<usize>,
    pub(crate) queries: Range<usize>,
    pub(crate) scratch: &'s mut Scratch,
    pub(crate) step: Step<'s>,
}

/// Which part of the work on a block of rows.
pub(crate) enum Step<'s> {
    /// All of it.
    Whole(&'s mut dyn RowSink),
    /// One piece of the keys, whose result is saved.
    Piece(usize, &'s mut [f32]),
    /// The end, from the saved results of all pieces in order. The first is the working memory.
    Join(&'s mut dyn Iterator<Item = &'s mut [f32]>, &'s mut dyn RowSink),
}

impl Op for Attend<'_, '_> {
    type Output = ();
    fn run<L: Lanes>(self, l: L) {
        let Self { job, batch, heads, queries, scratch, mut step } = self;
        let (problem, scale) = (job.problem, Scale::new(job.problem));
        let per_pass = job.blocking.heads_per_pass(problem.query_length(batch), problem.group);
        let mut areas = scratch.areas();
        let tiles = core::mem::take(&mut areas.tiles);
        let mut first = heads.start;
        while first < heads.end {
            let kv_head = problem.kv_head(first);
            let end = (first + per_pass).min((kv_head + 1) * problem.group).min(heads.end);
            let pass = Pass { l, job, batch, kv_head, heads: first..end, queries: queries.clone(), scale };
            pass.run(tiles, &mut areas, &mut step);
            first = end;
        }
    }
}

/// What stays the same over one pass of an [`Attend`].
pub(super) struct Pass<'a, L> {
    pub(super) l: L,
    pub(super) job: &'a Job<'a>,
    pub(super) batch: usize,
    pub(super) kv_head: usize,
    heads: Range<usize>,
    queries: Range<usize>,
    pub(super) scale: Scale,
}

impl<L: Lanes> Pass<'_, L> {
    fn run(&self, tiles: &mut [Tile], areas: &mut Areas<'_>, step: &mut Step<'_>) {
        let tiles = self.tiles(tiles, areas.work.ranges);
        for tile in tiles.iter() {
            self.pack_queries(tile, &mut areas.work);
        }
        let sink = match step {
            Step::Whole(sink) => {
                match self.matrix() {
                    Some(matrix) => matrix.run(OnMatrix { pass: self, tiles, areas }),
                    None => self.all_pieces(tiles, areas),
                }
                sink
            }
            Step::Piece(piece, result) => {
                self.piece(tiles, *piece, areas);
                return tiles.iter().for_each(|tile| self.save(tile, &mut areas.work, result));
            }
            Step::Join(results, sink) => {
                let Some(acc) = results.next() else { return };
                for other in results {
                    tiles.iter().for_each(|tile| self.merge_saved(tile, acc, other));
                }
                tiles.iter_mut().for_each(|tile| self.restore(tile, &mut areas.work, acc));
                sink
            }
        };
        for tile in tiles.iter() {
            self.finish(tile, areas, *sink);
        }
    }

    /// Matrix tiles, if this pass is one for them.
    pub(super) fn matrix(&self) -> Option<L::Matrix> {
        self.l.matrix().filter(|_| self.job.blocking.on_matrix(self.job.problem, self.batch))
    }

    /// Head and query of a row: all queries of the first head, then those of the second.
    pub(super) fn row(&self, row: usize) -> (usize, usize) {
        let queries = self.queries.len();
        // Most tasks have one head: spares two divisions a row.
        let (head, query) = if row < queries { (0, row) } else { (row / queries, row % queries) };
        (self.heads.start + head, self.queries.start + query)
    }

    /// Cuts the rows into tiles, and notes what each row may see.
    fn tiles<'t>(&self, tiles: &'t mut [Tile], ranges: &mut [(usize, usize)]) -> &'t mut [Tile] {
        let problem = self.job.problem;
        let rows = self.heads.len() * self.queries.len();
        let band = problem.band(self.batch);
        for (row, range) in ranges.iter_mut().take(rows).enumerate() {
            *range = band.range(self.row(row).1);
        }
        let width = self.job.blocking.tile();
        let few = is_few(problem, self.batch);
        let (align, unit) = match (few, self.matrix().is_some()) {
            (true, _) => (MAX_LANES, L::LANES),
            (false, false) => (KEY_ALIGN, L::LANES),
            (false, true) => (STEP, L::LANES.max(SIDE)),
        };
        let count = rows.div_ceil(width);
        for (index, tile) in tiles.iter_mut().take(count).enumerate() {
            let first = index * width;
            let rows = (rows - first).min(width);
            let vectors = rows.next_multiple_of(unit) / L::LANES;
            let (mut any, mut all) = ((usize::MAX, 0), (0, usize::MAX));
            for &(lo, hi) in &ranges[first..first + rows] {
                all = (all.0.max(lo), all.1.min(hi));
                if lo < hi || lo.min(problem.keep_first) > 0 {
                    any = (any.0.min(lo), any.1.max(hi));
                }
            }
            let lanes = if few { rows.next_power_of_two() } else { vectors * L::LANES };
            *tile = Tile { index, first, rows, vectors, lanes, started: false, few, bad: false, align, any, all };
        }
        &mut tiles[..count]
    }

    /// Queries into lanes.
    fn pack_queries(&self, tile: &Tile, work: &mut Work<'_>) {
        if tile.few {
            return self.pack_few(tile, work);
        }
        let width = self.job.problem.head_dim;
        let (head, query) = self.row(tile.first);
        let src = if query + tile.rows <= self.queries.end {
            load_rows(&self.job.q, [self.batch, head, query], tile.rows, 1, work.stage)
        } else {
            for (i, row) in work.stage.chunks_exact_mut(width.max(1)).take(tile.rows).enumerate() {
                let (head, query) = self.row(tile.first + i);
                load_row(&self.job.q, [self.batch, head, query], &mut row[..width]);
            }
            Rows { data: work.stage, stride: width, width, count: tile.rows }
        };
        let dst = self.area_of(tile, work.queries, width);
        self.l.vectorize(Transpose { src, dst, dst_stride: tile.lanes });
        if self.scale.negative {
            dst.iter_mut().for_each(|x| *x = -*x);
        }
    }

    /// All pieces of the keys in order, merged.
    fn all_pieces(&self, tiles: &mut [Tile], areas: &mut Areas<'_>) {
        let (_, count) = self.job.blocking.pieces(self.job.problem, self.batch);
        for piece in 0..count {
            self.piece(tiles, piece, areas);
            for tile in tiles.iter().take(if count > 1 { tiles.len() } else { 0 }) {
                match piece {
                    0 => self.save(tile, &mut areas.work, areas.partial),
                    _ => self.merge_tile(tile, &mut areas.work, areas.partial),
                }
            }
        }
        if count > 1 {
            tiles.iter_mut().for_each(|tile| self.restore(tile, &mut areas.work, areas.partial));
        }
    }

    /// One piece of the keys, from nothing.
    fn piece(&self, tiles: &mut [Tile], piece: usize, areas: &mut Areas<'_>) {
        for tile in tiles.iter_mut() {
            tile.started = false;
            self.state(tile, areas.work.states).reset();
        }
        let (blocks, _) = self.job.blocking.pieces(self.job.problem, self.batch);
        let lo = tiles.iter().map(|tile| tile.any.0).min().unwrap_or(0);
        let hi = tiles.iter().map(|tile| tile.any.1).max().unwrap_or(0);
        let len = self.job.problem.key_length(self.batch);
        for block in self.blocks(lo, hi, len).skip(piece * blocks).take(blocks) {
            self.block(tiles, block, areas);
        }
    }

    /// The `width` rows of a tile in an area of all tiles.
    pub(super) fn area_of<'t>(&self, tile: &Tile, area: &'t mut [f32], width: usize) -> &'t mut [f32] {
        &mut area[tile.index * self.job.blocking.tile() * width..][..tile.lanes * width]
    }

    pub(super) fn state<'t>(&self, tile: &Tile, states: &'t mut [f32]) -> RowState<'t> {
        tile_state(states, &self.job.blocking, tile.index, tile.vectors * L::LANES)
    }

    /// The blocks of keys that have some of `lo..hi`, or of those that no window hides. There are `len` keys.
    pub(super) fn blocks(&self, lo: usize, hi: usize, len: usize) -> impl Iterator<Item = Keys> + use<L> {
        self.blocks_of(self.job.blocking.block_k, lo, hi, len)
    }

    /// The same, of so many keys.
    pub(super) fn blocks_of(
        &self,
        size: usize,
        lo: usize,
        hi: usize,
        len: usize,
    ) -> impl Iterator<Item = Keys> + use<L> {
        let firsts = seen_blocks(size, self.job.problem.keep_first, lo, hi).map(move |block| block * size);
        firsts.map(move |first| Keys { first, count: size.min(len - first) })
    }

    /// One block of keys and values against all tiles.
    fn block(&self, tiles: &mut [Tile], block: Keys, areas: &mut Areas<'_>) {
        if is_few(self.job.problem, self.batch) {
            return self.few_block(tiles, block, areas);
        }
        let Areas { k, v, panels, work, .. } = areas;
        let keep = self.job.problem.keep_first;
        let at = [self.batch, self.kv_head, block.first];
        let keys = load_rows(&self.job.k, at, block.count, 1, k);
        let mut values = BlockValues::new(load_rows(&self.job.v, at, block.count, L::LANES, v), block);
        if tiles.len() > 2 && !panels.is_empty() {
            values.pack(self.l, panels);
        }
        for tile in tiles {
            let Some(part) = tile.part(block, keep) else { continue };
            let products = |queries: &[f32], s: &mut [f32]| self.products(tile, rows_of(keys, block, part), queries, s);
            let Some(partial) = self.scores(tile, part, 0, work, products) else { continue };
            self.softmax(tile, part, work);
            self.add_values(tile, part, &mut values, (partial, !tile.started), work);
            tile.started = true;
        }
    }

    /// Products of the queries of a tile and some keys, `s[key][lane]`.
    pub(super) fn products(&self, tile: &Tile, keys: Rows<'_>, queries: &[f32], s: &mut [f32]) {
        let width = self.job.problem.head_dim;
        let queries = &queries[tile.index * self.job.blocking.tile() * width..][..tile.lanes * width];
        let mut first = 0;
        loop {
            let part = Rows { data: &keys.data[first..], width: (width - first).min(SCORE_WIDTH), ..keys };
            let queries = &queries[first * tile.lanes..];
            self.l.vectorize(Scores { keys: part, queries, vectors: tile.vectors, s: &mut *s, more: first > 0 });
            first += SCORE_WIDTH;
            if first >= width {
                return;
            }
        }
    }

    /// Takes scores into the state of a tile, and makes them probabilities.
    pub(super) fn softmax(&self, tile: &Tile, part: Keys, work: &mut Work<'_>) {
        let state = self.state(tile, work.states);
        let (s, alpha) = (&mut work.s[..part.count * tile.lanes], &mut work.pair[..tile.lanes]);
        self.l.vectorize(Softmax { s, vectors: tile.vectors, c: self.scale.c, state, alpha });
    }

    /// Scores as softmax takes them: `products(queries, s)`, then all rules, -inf where hidden, at `work.s[at..]`. `None` if mask
    /// and bias hide all of them; else whether a key may be hidden from some row.
    pub(super) fn scores(
        &self,
        tile: &Tile,
        part: Keys,
        at: usize,
        work: &mut Work<'_>,
        products: impl FnOnce(&[f32], &mut [f32]),
    ) -> Option<bool> {
        let verdict = self.mask(tile, part, work);
        if verdict == Verdict::Hidden {
            return None;
        }
        products(work.queries, &mut work.s[at..][..self.scores_len(tile, part)]);
        Some(self.rules(tile, part, at, verdict, work))
    }

    /// Floats of scores: whole vectors, also where one has several keys.
    fn scores_len(&self, tile: &Tile, part: Keys) -> usize {
        (part.count * tile.lanes).next_multiple_of(L::LANES)
    }

    /// Brings mask and bias of a part to `work.bias`, if they matter.
    pub(super) fn mask(&self, tile: &Tile, part: Keys, work: &mut Work<'_>) -> Verdict {
        let Job { problem, blocking, .. } = self.job;
        let rows = &|row| self.row(tile.first + row);
        let place = Place { batch: self.batch, rows, count: tile.rows, first_key: part.first, keys: part.count };
        mask_tile::build(self.l, problem, &place, tile.lanes, work.bias, (work.stage, blocking.block_k))
    }

    /// All rules, after [`mask`](Self::mask) for the same part, on products at `work.s[at..]`. Says whether a key may be hidden from
    /// some row.
    pub(super) fn rules(&self, tile: &Tile, part: Keys, at: usize, verdict: Verdict, work: &mut Work<'_>) -> bool {
        let Job { problem, blocking, .. } = self.job;
        let s = &mut work.s[at..][..self.scores_len(tile, part)];
        let mut apply = |rule: Rule<'_>| self.l.vectorize(ScorePass { s, lanes: tile.lanes, rule });
        // With nothing between them, scale and bias share a pass.
        let mixed = verdict == Verdict::Mixed;
        let scale_with_bias = mixed && problem.softcap.is_none() && problem.alibi.is_none();
        let scale = self.scale.before.unwrap_or(1.0);
        if scale != 1.0 && !scale_with_bias {
            apply(Rule::Scale(scale));
        }
        if let Some(cap) = problem.softcap {
            apply(Rule::Softcap(cap));
        }
        let (first, second) = work.pair.split_at_mut(blocking.tile());
        if let Some((slopes, diagonal)) = problem.alibi {
            for i in 0..tile.rows {
                let (head, query) = self.row(tile.first + i);
                first[i] = slopes[head];
                second[i] = (problem.position(diagonal, self.batch, query) - part.first as i128) as f32;
            }
            fill_vector::<L>(tile.lanes, [first, second]);
            apply(Rule::Alibi { slopes: first, positions: second });
        }
        if mixed {
            apply(Rule::Bias { bias: work.bias, scale: if scale_with_bias { scale } else { 1.0 } });
        }
        let keep = problem.keep_first.saturating_sub(part.first).min(part.count);
        let all_seen = tile.sees_all(part, keep);
        if !all_seen {
            for (i, (lo, hi)) in work.ranges[tile.first..][..tile.rows].iter().enumerate() {
                // At most a block: exact.
                first[i] = lo.saturating_sub(part.first).min(part.count) as f32;
                second[i] = hi.saturating_sub(part.first).min(part.count) as f32;
            }
            fill_vector::<L>(tile.lanes, [first, second]);
            apply(Rule::Range { from: first, to: second, keep: keep as f32 });
        }
        !all_seen || mixed
    }

    /// Adds the values, weighed by the probabilities that start at `work.s[0]`, to the output of a tile, which is first
    /// multiplied by the factors in `work.pair`; a fresh one starts from zero.
    pub(super) fn add_values(
        &self,
        tile: &Tile,
        part: Keys,
        values: &mut BlockValues<'_>,
        (partial, fresh): (bool, bool),
        work: &mut Work<'_>,
    ) {
        let careful = partial && !values.all_finite(self.l);
        if careful {
            self.note_seen(tile, part, work.bias);
        }
        let (lanes, p) = (tile.lanes, &work.s[..part.count * tile.lanes]);
        let before = if fresh { Before::Nothing } else { Before::Added(&work.pair[..tile.lanes]) };
        let o = self.area_of(tile, work.o, self.job.blocking.head_dim_v_padded);
        let rows = tile.rows;
        if careful {
            let values = rows_of(values.rows, values.block, part);
            self.l.vectorize(CarefulValues { values, p, seen: work.bias, lanes, rows, before, o });
        } else {
            let (packed, panel) = values.panels.map_or((values.rows, None), |(packed, step)| (packed, Some(step)));
            let values = rows_of(packed, values.block, part);
            self.l.vectorize(Values { values, panel, p, lanes, rows, before, o });
        }
    }

    /// 1 where a row of the tile sees a key, else 0. Key by key: only for blocks with non-finite values.
    pub(super) fn note_seen(&self, tile: &Tile, part: Keys, seen: &mut [f32]) {
        for (key, seen) in seen.chunks_exact_mut(tile.lanes).take(part.count).enumerate() {
            for (i, seen) in seen.iter_mut().enumerate().take(tile.rows) {
                let (head, query) = self.row(tile.first + i);
                let visible = self.job.problem.visible(self.batch, head, query, part.first + key);
                *seen = f32::from(u8::from(visible));
            }
        }
    }
}

/// Repeats the numbers of fewer rows than a vector has lanes, as their scores lie.
pub(super) fn fill_vector<L: Lanes>(lanes: usize, numbers: [&mut [f32]; 2]) {
    for numbers in numbers {
        (lanes..L::LANES).for_each(|i| numbers[i] = numbers[i - lanes]);
    }
}

/// A loaded block of values.
pub(super) struct BlockValues<'a> {
    rows: Rows<'a>,
    block: Keys,
    /// The same as panels, and from one to the next, where that pays.
    panels: Option<(Rows<'a>, usize)>,
    /// Whether all are finite, once somebody has asked.
    finite: Option<bool>,
}

impl<'a> BlockValues<'a> {
    pub(super) fn new(rows: Rows<'a>, block: Keys) -> Self {
        Self { rows, block, panels: None, finite: None }
    }

    fn pack<L: Lanes>(&mut self, l: L, area: &'a mut [f32]) {
        l.vectorize(Panels { values: self.rows, dst: area });
        let step = Panels::step(self.rows.count, L::LANES);
        self.panels = Some((Rows { data: area, stride: 2 * L::LANES, ..self.rows }, step));
    }

    fn all_finite<L: Lanes>(&mut self, l: L) -> bool {
        *self.finite.get_or_insert_with(|| l.vectorize(AllFinite(self.rows)))
    }
}

/// The rows of a loaded block that are the keys of a part of it.
pub(super) fn rows_of<'a>(rows: Rows<'a>, block: Keys, part: Keys) -> Rows<'a> {
    let from = part.first - block.first;
    rows.range(from, from + part.count)
}
