//! One pass over a KV head, on matrix tiles.
//!
//! A turn is a tile of rows and a block of keys. Products take units of their own, and softmax takes the vectors': while one turn is
//! in softmax, the products of the values of the turn before it, and those of the keys of the turn behind it, go on.

use super::super::blocking::MATRIX_K;
use super::super::fused::{Keys, Pass};
use super::super::lanes::Lanes;
use super::super::mask_tile::Verdict;
use super::super::online::Normalize;
use super::super::pack::load_rows;
use super::super::scratch::{Areas, MatrixAreas, Tile, Work};
use super::super::tile::{Rows, Transpose};
use super::operands::Run;
use super::output::{Add, AddProduct, AddValue, Rescale, Subnormals};
use super::product::Beside;
use super::softmax::SoftmaxTerms;
use super::{MatrixOp, Multiply, Product, STEP, TILE};

/// All keys against the tiles of rows of a pass, whose output rows it leaves as the other paths do.
pub(crate) struct OnMatrix<'p, 'a, 't, 's, L> {
    pub(crate) pass: &'p Pass<'a, L>,
    pub(crate) tiles: &'t mut [Tile],
    pub(crate) areas: &'t mut Areas<'s>,
}

impl<L: Lanes> MatrixOp for OnMatrix<'_, '_, '_, '_, L> {
    type Output = ();
    fn run<M: Multiply>(self, matrix: M) {
        let Self { pass, tiles, areas } = self;
        let run = Run::new(pass, matrix);
        for tile in tiles.iter_mut() {
            tile.started = false;
            pass.state(tile, areas.work.states).reset();
            run.pack_queries(tile, areas);
        }
        let lo = tiles.iter().map(|tile| tile.any.0).min().unwrap_or(0);
        let hi = tiles.iter().map(|tile| tile.any.1).max().unwrap_or(0);
        let (size, len) = (pass.job.blocking.packed_k, pass.job.problem.key_length(pass.batch));
        for packed in pass.blocks_of(size, lo, hi, len) {
            run.packed(tiles, packed, areas);
        }
        tiles.iter().filter(|tile| tile.started).for_each(|tile| run.transpose_output(tile, &mut areas.work));
    }
}

/// The scores of a part of a block again, at `work.s[at..]`: as [`Pass::scores`], with the bits that they had.
pub(crate) struct ScoresOnMatrix<'p, 'a, 't, 's, L> {
    pub(crate) pass: &'p Pass<'a, L>,
    pub(crate) tile: &'t Tile,
    pub(crate) part: Keys,
    pub(crate) at: usize,
    pub(crate) areas: &'t mut Areas<'s>,
}

impl<L: Lanes> MatrixOp for ScoresOnMatrix<'_, '_, '_, '_, L> {
    type Output = Option<bool>;
    fn run<M: Multiply>(self, matrix: M) -> Option<bool> {
        let Self { pass, tile, part, at, areas } = self;
        let run = Run::new(pass, matrix);
        let Areas { k, work, matrix, .. } = areas;
        let verdict = pass.mask(tile, part, work);
        if verdict == Verdict::Hidden {
            return None;
        }
        let block = Packed { keys: part, bad_keys: run.pack_keys(part, k, matrix), bad_values: false };
        let op = run.score_products(tile, part, &block, (matrix.keys, matrix.queries), &mut work.s[at..]);
        op.run(run.matrix, &run.configured);
        run.correct(tile, part, &block, at, k, work, matrix);
        // Products fill whole tiles.
        work.s[at..][part.count * tile.lanes..part.count.next_multiple_of(STEP) * tile.lanes].fill(0.0);
        Some(pass.rules(tile, part, at, verdict, work))
    }
}

/// A tile of rows, and the part of a block of keys that it sees.
#[derive(Clone, Copy)]
struct Turn {
    /// Among those of all tiles and blocks.
    index: usize,
    tile: usize,
    part: Keys,
    verdict: Verdict,
}

/// Keys and values in tiles.
struct Packed {
    keys: Keys,
    /// Whether keys, and values, are out of range.
    bad_keys: bool,
    bad_values: bool,
}

impl<L: Lanes, M: Multiply> Run<'_, '_, L, M> {
    /// All tiles, each with all blocks of some keys and values.
    fn packed(&self, tiles: &mut [Tile], keys: Keys, areas: &mut Areas<'_>) {
        let Areas { k, v, work, matrix, .. } = areas;
        let (bad_keys, bad_values) = (self.pack_keys(keys, k, matrix), self.pack_values(keys, v, matrix));
        let block = Packed { keys, bad_keys, bad_values };
        self.has_tiny.set(self.has_tiny.get() || self.accumulates && bad_values);
        let mut ahead = self.turn(tiles, 0, keys, work);
        if let Some(turn) = &ahead {
            let op = self.score_products(&tiles[turn.tile], turn.part, &block, (matrix.keys, matrix.queries), work.s);
            op.run(self.matrix, &self.configured);
        }
        let (mut behind, mut half) = (None, 0);
        while let Some(now) = ahead {
            let (tile, at) = (&tiles[now.tile], half * (work.s.len() / 2));
            self.correct(tile, now.part, &block, at, k, work, matrix);
            let partial = self.pass.rules(tile, now.part, at, now.verdict, work);
            ahead = self.turn(tiles, now.index + 1, keys, work);
            let moved = self.softmax(tiles, [behind.as_ref(), Some(&now), ahead.as_ref()], &block, half, work, matrix);
            if let Some(Turn { tile, .. }) = behind.replace(now) {
                tiles[tile].started = true;
            }
            if self.accumulates && moved && tiles[now.tile].started {
                self.rescale(&tiles[now.tile], half, work, matrix);
            }
            if block.bad_values || self.has_tiny.get() {
                self.finish_values(&now, tiles, &block, half, work, matrix);
                self.add_bad_values(&tiles[now.tile], now.part, (&block, partial), at, v, work, matrix);
                behind = None;
            }
            half ^= 1;
        }
        if let Some(turn) = behind {
            self.finish_values(&turn, tiles, &block, half ^ 1, work, matrix);
        }
    }

    /// The next turn, from one on, that sees something; its mask is then in `work`.
    fn turn(&self, tiles: &[Tile], from: usize, keys: Keys, work: &mut Work<'_>) -> Option<Turn> {
        let blocks = keys.count.div_ceil(MATRIX_K);
        (from..tiles.len() * blocks).find_map(|index| {
            let (tile, first) = (index / blocks, index % blocks * MATRIX_K);
            let block = Keys { first: keys.first + first, count: MATRIX_K.min(keys.count - first) };
            let part = tiles[tile].part(block, self.pass.job.problem.keep_first)?;
            let verdict = self.pass.mask(&tiles[tile], part, work);
            (verdict != Verdict::Hidden).then_some(Turn { index, tile, part, verdict })
        })
    }

    /// Softmax of a turn, and beside it the products of the one before it, which are added to its output, and of the one behind it.
    /// Says whether a maximum has changed.
    fn softmax(
        &self,
        tiles: &[Tile],
        [behind, now, ahead]: [Option<&Turn>; 3],
        block: &Packed,
        half: usize,
        work: &mut Work<'_>,
        areas: &mut MatrixAreas<'_>,
    ) -> bool {
        let ([s, s_ahead], [p, p_behind]) = (halves(work.s, half), halves(areas.probabilities, half));
        let [alpha, alpha_behind] = halves(areas.alphas, half);
        let (mut scores, mut values, mut sums) = (self.nothing(), self.nothing(), None);
        if let Some(turn) = ahead {
            let operands = (&*areas.keys, &*areas.queries);
            scores = self.score_products(&tiles[turn.tile], turn.part, block, operands, s_ahead);
        }
        if let Some(turn) = behind {
            let (tile, o) = (&tiles[turn.tile], [&mut *work.o, &mut *areas.product]);
            let (op, o) = self.value_products(tile, turn.part, block, (areas.values, p_behind), o);
            (values, sums) = (op, o.map(|o| (tile, o)));
        }
        let more = sums.as_ref().map_or(0, |(tile, o)| AddProduct::<M>::ticks(o.len(), tile.lanes));
        let mut beside = Beside::new(self.matrix, &self.configured, [values, scores], more);
        let moved = now.is_some_and(|turn| {
            let (pass, tile) = (self.pass, &tiles[turn.tile]);
            pass.l.vectorize(SoftmaxTerms {
                s: &s[..turn.part.count * tile.lanes],
                lanes: tile.lanes,
                c: pass.scale.c,
                state: pass.state(tile, work.states),
                alpha: &mut alpha[..tile.lanes],
                terms: self.terms[3],
                p,
                term: self.probability_term(),
                beside: &mut beside,
            })
        });
        if let Some((tile, o)) = sums {
            let product = beside.first();
            // The first values have nothing to be added to.
            let alpha = tile.started.then_some(&alpha_behind[..tile.lanes]);
            self.pass.l.vectorize(AddProduct { o, product, lanes: tile.lanes, alpha, beside: &mut beside });
        }
        beside.finish();
        moved
    }

    #[inline(always)]
    fn nothing(&self) -> Product<'_> {
        Product::nothing(&self.plans[0])
    }

    /// Products of the keys of a part, in tiles, and the queries of a tile of rows: `s[key][lane]`, in whole tiles of keys.
    #[inline(always)]
    fn score_products<'x>(
        &'x self,
        tile: &Tile,
        part: Keys,
        block: &Packed,
        (keys, queries): (&'x [f32], &'x [f32]),
        s: &'x mut [f32],
    ) -> Product<'x> {
        let a_block = self.head_steps * 2 * TILE;
        Product {
            plan: &self.plans[0],
            depth: self.head_steps,
            columns: tile.lanes,
            a: &keys[(part.first - block.keys.first) / STEP * a_block..],
            a_block,
            b: &queries[self.queries_of(tile)],
            c: &mut s[..part.count.next_multiple_of(STEP) * tile.lanes],
            more: false,
        }
    }

    /// Products of the values of a part and the probabilities of a tile of rows, in tiles: `product[d][lane]`, and the output that they
    /// are to be added to; or sums with that output.
    #[inline(always)]
    fn value_products<'x>(
        &'x self,
        tile: &Tile,
        part: Keys,
        block: &Packed,
        (values, probabilities): (&'x [f32], &'x [f32]),
        [o, product]: [&'x mut [f32]; 2],
    ) -> (Product<'x>, Option<&'x mut [f32]>) {
        let width = self.pass.job.blocking.head_dim_v_padded;
        let o = self.pass.area_of(tile, o, width);
        let (c, o) = match self.accumulates {
            true => (o, None),
            false => (&mut product[..width.next_multiple_of(STEP) * tile.lanes], Some(o)),
        };
        let op = Product {
            plan: &self.plans[1],
            depth: part.count.div_ceil(STEP),
            columns: tile.lanes,
            a: &values[(part.first - block.keys.first) / STEP * 2 * TILE..],
            a_block: self.key_steps * 2 * TILE,
            b: probabilities,
            c,
            more: self.accumulates && tile.started,
        };
        (op, o)
    }

    /// Scores at `work.s[at..]` of keys and queries that are out of range, in place of their products on tiles.
    #[allow(clippy::too_many_arguments, reason = "areas of the scratch, borrowed one by one")]
    fn correct(
        &self,
        tile: &Tile,
        part: Keys,
        block: &Packed,
        at: usize,
        k: &mut [f32],
        work: &mut Work<'_>,
        areas: &mut MatrixAreas<'_>,
    ) {
        let (lanes, first) = (tile.lanes, part.first - block.keys.first);
        let (s, queries) = (&mut work.s[at..], &*work.queries);
        if !block.bad_keys && !tile.bad {
            return;
        }
        let mut plainly = |key: usize, count: usize, s: &mut [f32]| {
            let at = [self.pass.batch, self.pass.kv_head, part.first + key];
            self.pass.products(tile, load_rows(&self.pass.job.k, at, count, 1, k), queries, s);
        };
        if block.bad_keys {
            for key in (0..part.count).filter(|key| areas.key_flags[first + key] != 0.0) {
                plainly(key, 1, &mut s[key * lanes..][..lanes]);
            }
        }
        let flags = &areas.query_flags[tile.first..][..tile.rows];
        if tile.bad {
            for (i, s) in s[..part.count * lanes].chunks_mut(STEP * lanes).enumerate() {
                let again = &mut areas.product[..s.len()];
                plainly(i * STEP, s.len() / lanes, again);
                for (row, again) in s.chunks_exact_mut(lanes).zip(again.chunks_exact(lanes)) {
                    for lane in (0..tile.rows).filter(|&lane| flags[lane] != 0.0) {
                        row[lane] = again[lane];
                    }
                }
            }
        }
    }

    /// Values of the last turn, whose probabilities are in a half, without softmax of another.
    fn finish_values(
        &self,
        turn: &Turn,
        tiles: &mut [Tile],
        block: &Packed,
        half: usize,
        work: &mut Work<'_>,
        areas: &mut MatrixAreas<'_>,
    ) {
        let (pass, width) = (self.pass, self.pass.job.blocking.head_dim_v_padded);
        let tile = &tiles[turn.tile];
        let tiny = tile.started && self.has_tiny.get();
        if tiny {
            pass.l.vectorize(Subnormals { o: pass.area_of(tile, work.o, width), dst: areas.product });
        }
        self.softmax(tiles, [Some(turn), None, None], block, half ^ 1, work, areas);
        if tiny {
            pass.l.vectorize(Add { sums: pass.area_of(tile, work.o, width), more: areas.product });
        }
        tiles[turn.tile].started = true;
    }

    /// Brings the output of a tile to its new maxima.
    fn rescale(&self, tile: &Tile, half: usize, work: &mut Work<'_>, areas: &mut MatrixAreas<'_>) {
        let [alpha, _] = halves(areas.alphas, half);
        let o = self.pass.area_of(tile, work.o, self.pass.job.blocking.head_dim_v_padded);
        self.pass.l.vectorize(Rescale { o, alpha: &alpha[..tile.lanes] });
    }

    /// Adds the values that are out of range, one key after the other, weighed by the probabilities of the scores at `work.s[at..]`: a
    /// row meets only those that it sees.
    #[allow(clippy::too_many_arguments, reason = "areas of the scratch, borrowed one by one")]
    fn add_bad_values(
        &self,
        tile: &Tile,
        part: Keys,
        (block, partial): (&Packed, bool),
        at: usize,
        v: &mut [f32],
        work: &mut Work<'_>,
        areas: &MatrixAreas<'_>,
    ) {
        let pass = self.pass;
        let first = part.first - block.keys.first;
        for key in (0..part.count).filter(|key| areas.value_flags[first + key] != 0.0) {
            let seen = &mut work.stage[..tile.lanes];
            for (i, seen) in seen.iter_mut().enumerate() {
                let sees = |(head, query)| pass.job.problem.visible(pass.batch, head, query, part.first + key);
                *seen = f32::from(u8::from(i < tile.rows && (!partial || sees(pass.row(tile.first + i)))));
            }
            let value = load_rows(&pass.job.v, [pass.batch, pass.kv_head, part.first + key], 1, L::LANES, v).row(0);
            let s = &work.s[at + key * tile.lanes..][..tile.lanes];
            let (max, c, terms) = (&*pass.state(tile, work.states).max, pass.scale.c, self.terms[3]);
            let o = pass.area_of(tile, work.o, pass.job.blocking.head_dim_v_padded);
            pass.l.vectorize(AddValue { o, value, s, max, c, terms, seen });
        }
    }

    /// Output rows of a finished tile, in place of the transposed ones.
    fn transpose_output(&self, tile: &Tile, work: &mut Work<'_>) {
        let blocking = &self.pass.job.blocking;
        let width = blocking.head_dim_v_padded;
        let (o, spare) = work.o.split_at_mut(blocking.tiles() * blocking.tile() * width);
        let o = self.pass.area_of(tile, o, width);
        let src = Rows { data: o, stride: tile.lanes, width: tile.lanes, count: width };
        self.pass.l.vectorize(Transpose { src, dst: &mut *spare, dst_stride: width });
        o.copy_from_slice(&spare[..o.len()]);
        if self.terms[3] == 1 {
            // What was summed are rounded probabilities: as if they were exact.
            let state = self.pass.state(tile, work.states);
            let factors = state.norm.iter_mut().zip(state.sum.iter());
            factors.for_each(|(norm, sum)| *norm = if *sum == 0.0 { 1.0 } else { sum / *norm });
            self.pass.l.vectorize(Normalize { o, width, norm: &state.norm[..tile.rows] });
        }
    }
}

/// One half of an area for two tiles of rows, and the other one.
fn halves(area: &mut [f32], half: usize) -> [&mut [f32]; 2] {
    let (first, second) = area.split_at_mut(area.len() / 2);
    if half == 0 { [first, second] } else { [second, first] }
}
