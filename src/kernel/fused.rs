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

use super::blocking::Blocking;
use super::lanes::{Lanes, Op};
use super::mask_tile::{self, Place, Verdict};
use super::online::{Normalize, Probabilities, Softmax};
use super::pack::{load_row, load_rows};
use super::score::{Rule, ScorePass};
use super::scratch::{Areas, Scratch, Tile, tile_state};
use super::tile::{AllFinite, CarefulValues, Rows, Scores, Transpose, Values};
use crate::problem::Problem;
use crate::view::{AnyHeads, RowSink};

/// What all tasks of a call share.
pub(crate) struct Job<'a> {
    pub(crate) problem: &'a Problem<'a>,
    pub(crate) blocking: Blocking,
    pub(crate) q: AnyHeads<'a>,
    pub(crate) k: AnyHeads<'a>,
    pub(crate) v: AnyHeads<'a>,
}

/// How raw products become powers of two.
struct Scale {
    /// Factor of the scores before other rules; `None` if it is left to `c`.
    before: Option<f32>,
    /// Whether `c` stands for a negative scale, whose sign the queries then take.
    negative: bool,
    /// `p = 2^(c * (score - max))`.
    c: f32,
    /// Natural-log units of a score as softmax sees it.
    natural: f64,
}

impl Scale {
    /// Rules that add to scores need them scaled; else the scale is free, as a factor of the exponent. Factors so large or
    /// small that the difference of two products could overflow where the scaled one does not are applied first, too.
    fn new(problem: &Problem<'_>) -> Self {
        const LOG2_E: f64 = core::f64::consts::LOG2_E;
        let scale = problem.softmax_scale;
        let additive = problem.softcap.is_some() || problem.alibi.is_some() || problem.bias.is_some();
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
struct Keys {
    first: usize,
    count: usize,
}

impl Tile {
    /// The part of a block of keys that the tile looks at. It starts at a multiple of four keys, so that a key is always in
    /// the same partial sum of softmax.
    fn part(&self, block: Keys) -> Option<Keys> {
        let lo = self.any.0.max(block.first) - block.first;
        let hi = self.any.1.min(block.first + block.count).saturating_sub(block.first);
        (lo < hi).then(|| Keys { first: block.first + lo / 4 * 4, count: hi - lo / 4 * 4 })
    }
}

/// One block of rows for one KV head: queries of some heads of its group.
pub(crate) struct Attend<'a, 's> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) batch: usize,
    pub(crate) heads: Range<usize>,
    pub(crate) queries: Range<usize>,
    pub(crate) scratch: &'s mut Scratch,
    pub(crate) sink: &'s mut dyn RowSink,
}

impl Op for Attend<'_, '_> {
    type Output = ();
    fn run<L: Lanes>(self, l: L) {
        let Self { job, batch, heads, queries, scratch, sink } = self;
        let kv_head = job.problem.kv_head(heads.start);
        let pass = Pass { l, job, batch, kv_head, heads, queries, scale: Scale::new(job.problem) };
        let mut areas = scratch.areas();
        let tiles = core::mem::take(&mut areas.tiles);
        let tiles = pass.tiles(tiles, areas.ranges);
        for tile in tiles.iter() {
            pass.pack_queries(tile, &mut areas);
        }
        let lo = tiles.iter().map(|tile| tile.any.0).min().unwrap_or(0);
        let hi = tiles.iter().map(|tile| tile.any.1).max().unwrap_or(0);
        let block_k = job.blocking.block_k;
        for first in (lo / block_k * block_k..hi).step_by(block_k) {
            let count = block_k.min(job.problem.seqlen_k - first);
            pass.block(tiles, Keys { first, count }, &mut areas);
        }
        for tile in tiles.iter() {
            pass.finish(tile, &mut areas, sink);
        }
    }
}

/// What stays the same over one [`Attend`].
struct Pass<'a, L> {
    l: L,
    job: &'a Job<'a>,
    batch: usize,
    kv_head: usize,
    heads: Range<usize>,
    queries: Range<usize>,
    scale: Scale,
}

impl<L: Lanes> Pass<'_, L> {
    /// Head and query of a row: all queries of the first head, then those of the second.
    fn row(&self, row: usize) -> (usize, usize) {
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
        let count = rows.div_ceil(width);
        for (index, tile) in tiles.iter_mut().take(count).enumerate() {
            let first = index * width;
            let rows = (rows - first).min(width);
            let vectors = rows.div_ceil(L::LANES);
            let (mut any, mut all) = ((usize::MAX, 0), (0, usize::MAX));
            for &(lo, hi) in &ranges[first..first + rows] {
                all = (all.0.max(lo), all.1.min(hi));
                if lo < hi {
                    any = (any.0.min(lo), any.1.max(hi));
                }
            }
            *tile = Tile { index, first, rows, vectors, lanes: vectors * L::LANES, started: false, any, all };
        }
        &mut tiles[..count]
    }

    /// Queries into lanes, and a fresh state.
    fn pack_queries(&self, tile: &Tile, areas: &mut Areas<'_>) {
        let width = self.job.problem.head_dim;
        let (head, query) = self.row(tile.first);
        let src = if query + tile.rows <= self.queries.end {
            load_rows(&self.job.q, [self.batch, head, query], tile.rows, 1, areas.stage)
        } else {
            for (i, row) in areas.stage.chunks_exact_mut(width.max(1)).take(tile.rows).enumerate() {
                let (head, query) = self.row(tile.first + i);
                load_row(&self.job.q, [self.batch, head, query], &mut row[..width]);
            }
            Rows { data: areas.stage, stride: width, width, count: tile.rows }
        };
        let dst = self.area_of(tile, areas.queries, width);
        self.l.vectorize(Transpose { src, dst, dst_stride: tile.lanes });
        if self.scale.negative {
            dst.iter_mut().for_each(|x| *x = -*x);
        }
        tile_state(areas.states, &self.job.blocking, tile.index, tile.lanes).reset();
    }

    /// The `width` rows of a tile in an area of all tiles.
    fn area_of<'t>(&self, tile: &Tile, area: &'t mut [f32], width: usize) -> &'t mut [f32] {
        &mut area[tile.index * self.job.blocking.tile() * width..][..tile.lanes * width]
    }

    /// One block of keys and values against all tiles.
    fn block(&self, tiles: &mut [Tile], block: Keys, areas: &mut Areas<'_>) {
        let Job { problem, blocking, k, v, .. } = self.job;
        let at = [self.batch, self.kv_head, block.first];
        let keys = load_rows(k, at, block.count, 1, areas.k);
        let values = load_rows(v, at, block.count, L::LANES, areas.v);
        let mut finite = None;
        for tile in tiles {
            let Some(part) = tile.part(block) else { continue };
            let verdict = self.mask(tile, part, areas.bias, areas.stage);
            if verdict == Verdict::Hidden {
                continue;
            }
            let queries = &*self.area_of(tile, areas.queries, problem.head_dim);
            let s = &mut areas.s[..part.count * tile.lanes];
            let partial = self.scores(tile, part, rows_of(keys, block, part), queries, s, &mut Rulebook {
                verdict,
                bias: areas.bias,
                pair: areas.pair,
                ranges: areas.ranges,
            });
            let state = tile_state(areas.states, blocking, tile.index, tile.lanes);
            self.l.vectorize(Softmax { s, vectors: tile.vectors, c: self.scale.c, state });
            let alpha = &*tile_state(areas.states, blocking, tile.index, tile.lanes).alpha;
            let step = Values {
                values: rows_of(values, block, part),
                p: s,
                lanes: tile.lanes,
                rows: tile.rows,
                alpha: tile.started.then_some(alpha),
                o: self.area_of(tile, areas.o, blocking.head_dim_v_padded),
            };
            tile.started = true;
            if partial && !*finite.get_or_insert_with(|| self.l.vectorize(AllFinite(values))) {
                self.note_seen(tile, part, areas.bias);
                self.l.vectorize(CarefulValues { inner: step, seen: areas.bias });
            } else {
                self.l.vectorize(step);
            }
        }
    }

    fn mask(&self, tile: &Tile, part: Keys, bias: &mut [f32], stage: &mut [f32]) -> Verdict {
        let place = Place {
            batch: self.batch,
            rows: &|row| self.row(tile.first + row),
            count: tile.rows,
            first_key: part.first,
            keys: part.count,
        };
        mask_tile::build(self.l, self.job.problem, &place, tile.lanes, bias, (stage, self.job.blocking.block_k))
    }

    /// Scores as softmax takes them: by all rules, -inf where hidden. Whether a key may be hidden from some row only.
    fn scores(
        &self,
        tile: &Tile,
        part: Keys,
        keys: Rows<'_>,
        queries: &[f32],
        s: &mut [f32],
        rules: &mut Rulebook<'_>,
    ) -> bool {
        let problem = self.job.problem;
        let queries = &queries[..problem.head_dim * tile.lanes];
        self.l.vectorize(Scores { keys, queries, vectors: tile.vectors, s });
        let apply = |s: &mut [f32], rule: Rule<'_>| self.l.vectorize(ScorePass { s, vectors: tile.vectors, rule });
        if let Some(scale) = self.scale.before {
            apply(s, Rule::Scale(scale));
        }
        if let Some(cap) = problem.softcap {
            apply(s, Rule::Softcap(cap));
        }
        let (first, second) = rules.pair.split_at_mut(self.job.blocking.tile());
        if let Some((slopes, diagonal)) = problem.alibi {
            for i in 0..tile.rows {
                let (head, query) = self.row(tile.first + i);
                first[i] = slopes[head];
                second[i] = (problem.position(diagonal, self.batch, query) - part.first as i128) as f32;
            }
            apply(s, Rule::Alibi { slopes: first, positions: second });
        }
        if rules.verdict == Verdict::Mixed {
            apply(s, Rule::Bias(rules.bias));
        }
        let all_seen = tile.all.0 <= part.first && part.first + part.count <= tile.all.1;
        if !all_seen {
            first.fill(0.0);
            second.fill(part.count as f32);
            for i in 0..tile.rows {
                let (lo, hi) = rules.ranges[tile.first + i];
                // At most a block: exact.
                first[i] = lo.saturating_sub(part.first).min(part.count) as f32;
                second[i] = hi.saturating_sub(part.first).min(part.count) as f32;
            }
            apply(s, Rule::Range { from: first, to: second });
        }
        !all_seen || rules.verdict == Verdict::Mixed
    }

    /// 1 where a row of the tile sees a key, else 0. Key by key: only for blocks with non-finite values.
    fn note_seen(&self, tile: &Tile, part: Keys, seen: &mut [f32]) {
        for (key, seen) in seen.chunks_exact_mut(tile.lanes).take(part.count).enumerate() {
            for (i, seen) in seen.iter_mut().enumerate().take(tile.rows) {
                let (head, query) = self.row(tile.first + i);
                let visible = self.job.problem.visible(self.batch, head, query, part.first + key);
                *seen = f32::from(u8::from(visible));
            }
        }
    }

    /// Normalises a tile and hands out its rows.
    fn finish(&self, tile: &Tile, areas: &mut Areas<'_>, sink: &mut dyn RowSink) {
        let Job { problem, blocking, .. } = self.job;
        let norm = &mut areas.pair[..tile.lanes];
        norm.fill(0.0);
        let state = tile_state(areas.states, blocking, tile.index, tile.lanes);
        for i in 0..tile.rows {
            let (head, query) = self.row(tile.first + i);
            let (factor, lse) = self.row_result((head, query), state.max[i], state.sum[i], sink.wants_lse());
            norm[i] = factor;
            if let Some(lse) = lse {
                sink.lse(head, query, lse);
            }
        }
        // The second pass needs the factors after `pair` is used for rules again.
        state.alpha.copy_from_slice(norm);
        let width = blocking.head_dim_v_padded;
        let o = self.area_of(tile, areas.o, width);
        if tile.started {
            self.l.vectorize(Normalize { o, width, norm: &state.alpha[..tile.rows] });
        } else {
            o.fill(0.0);
        }
        for i in 0..tile.rows {
            let (head, query) = self.row(tile.first + i);
            sink.out(head, query, &o[i * width..][..problem.head_dim_v]);
        }
        if sink.wants_weights() {
            self.weights(tile, areas, sink);
        }
    }

    /// The factor that normalises a row, and its LSE if that is asked for.
    fn row_result(&self, (head, query): (usize, usize), max: f32, sum: f32, wants_lse: bool) -> (f32, Option<f32>) {
        let problem = self.job.problem;
        if sum == 0.0 {
            // Every score was -inf: hidden, or of infinite operands, which softmax cannot weigh.
            let (lo, hi) = problem.key_range(self.batch, query);
            let seen = (lo..hi).any(|key| problem.visible(self.batch, head, query, key));
            let sink = problem.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
            return match seen {
                false => (0.0, Some(f32::NEG_INFINITY)),
                true if sink > f32::NEG_INFINITY => (0.0, Some(sink)),
                true => (f32::NAN, Some(f32::NAN)),
            };
        }
        if problem.sinks.is_none() && !wants_lse {
            return (1.0 / sum, None);
        }
        let max = f64::from(max) * self.scale.natural;
        let sink = problem.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head].into());
        let top = max.max(sink);
        let total = f64::from(sum) * (max - top).exp() + (sink - top).exp();
        (((max - top).exp() / total) as f32, Some((top + total.ln()) as f32))
    }

    /// Attention weights of a tile, from its finished state: scores again, block by block.
    fn weights(&self, tile: &Tile, areas: &mut Areas<'_>, sink: &mut dyn RowSink) {
        let Job { problem, blocking, k, .. } = self.job;
        let block_k = blocking.block_k;
        for first in (0..problem.seqlen_k).step_by(block_k) {
            let block = Keys { first, count: block_k.min(problem.seqlen_k - first) };
            areas.s.fill(0.0);
            if let Some(part) = tile.part(block) {
                let verdict = self.mask(tile, part, areas.bias, areas.stage);
                if verdict != Verdict::Hidden {
                    let keys = load_rows(k, [self.batch, self.kv_head, part.first], part.count, 1, areas.k);
                    let queries = &*self.area_of(tile, areas.queries, problem.head_dim);
                    let s = &mut areas.s[(part.first - first) * tile.lanes..][..part.count * tile.lanes];
                    self.scores(tile, part, keys, queries, s, &mut Rulebook {
                        verdict,
                        bias: areas.bias,
                        pair: areas.pair,
                        ranges: areas.ranges,
                    });
                    let state = tile_state(areas.states, blocking, tile.index, tile.lanes);
                    let (max, norm) = (&*state.max, &*state.alpha);
                    self.l.vectorize(Probabilities { s, vectors: tile.vectors, c: self.scale.c, max, norm });
                }
            }
            let (src, dst) = (&*areas.s, &mut *areas.stage);
            let src = Rows { data: src, stride: tile.lanes, width: tile.lanes, count: block.count };
            self.l.vectorize(Transpose { src, dst, dst_stride: block_k });
            for i in 0..tile.rows {
                let (head, query) = self.row(tile.first + i);
                let row = &mut areas.stage[i * block_k..][..block.count];
                if tile_state(areas.states, blocking, tile.index, tile.lanes).alpha[i].is_nan() {
                    // NaN for the keys that the row sees; a hidden key weighs nothing in any row.
                    for (key, weight) in row.iter_mut().enumerate() {
                        let visible = problem.visible(self.batch, head, query, first + key);
                        *weight = if visible { f32::NAN } else { 0.0 };
                    }
                }
                sink.weights(head, query, first, row);
            }
        }
    }
}

/// What the rules of a tile need besides its scores.
struct Rulebook<'a> {
    verdict: Verdict,
    bias: &'a [f32],
    pair: &'a mut [f32],
    ranges: &'a [(usize, usize)],
}

/// The rows of a loaded block that are the keys of a part of it.
fn rows_of<'a>(rows: Rows<'a>, block: Keys, part: Keys) -> Rows<'a> {
    let from = part.first - block.first;
    rows.range(from, from + part.count)
}
