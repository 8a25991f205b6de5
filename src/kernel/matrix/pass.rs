//! One pass over a KV head, on matrix tiles.

use super::super::fused::{Keys, Pass};
use super::super::lanes::{Lanes, Op};
use super::super::online::Normalize;
use super::super::operand::Operand;
use super::super::pack::{load_rows, rows_in_place};
use super::super::scratch::{Areas, MatrixAreas, Tile, Work};
use super::super::tile::{Rows, Transpose};
use super::pack::{PackColumns, PackLanes, PackRows};
use super::softmax::SoftmaxTerms;
use super::{MAX_TERMS, MatrixOp, Multiply, Product, SIDE, STEP, TILE, terms};
use crate::Precision;
use crate::element::AnySlice;
use crate::view::AnyHeads;

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
        for block in pass.blocks(lo, hi, pass.job.problem.key_length(pass.batch)) {
            run.block(tiles, block, areas);
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
        let block = Block { keys: part, bad_keys: run.pack_keys(part, k, matrix), bad_values: false };
        pass.scores(tile, part, at, work, |queries, s| run.scores(tile, part, &block, queries, s, k, matrix))
    }
}

/// What stays the same over a pass.
struct Run<'p, 'a, L, M: Multiply> {
    pass: &'p Pass<'a, L>,
    matrix: M,
    configured: M::Configured,
    /// Of queries, keys, values and probabilities.
    terms: [usize; 4],
    /// Steps of head_dim, and steps that a block of keys has room for.
    head_steps: usize,
    key_steps: usize,
}

/// Terms that the bits of an operand's elements fill.
fn own_terms(operand: &AnyHeads<'_>) -> usize {
    terms(operand.data, Precision::Highest)
}

/// A block of keys and values in tiles.
struct Block {
    keys: Keys,
    /// Whether keys, and values, are out of range.
    bad_keys: bool,
    bad_values: bool,
}

impl<'p, 'a, L: Lanes, M: Multiply> Run<'p, 'a, L, M> {
    fn new(pass: &'p Pass<'a, L>, matrix: M) -> Self {
        let (problem, blocking) = (pass.job.problem, &pass.job.blocking);
        Self {
            pass,
            matrix,
            configured: matrix.configure(),
            terms: [own_terms(&pass.job.q), own_terms(&pass.job.k), own_terms(&pass.job.v), MAX_TERMS]
                .map(|terms| terms.min(blocking.terms)),
            head_steps: problem.head_dim.div_ceil(STEP),
            key_steps: blocking.block_k.div_ceil(STEP),
        }
    }

    fn product(&self, lanes: usize, op: Product<'_>) {
        self.matrix.product_of(&self.configured, lanes, op);
    }

    /// Floats of one term of keys, of values, of a tile's queries and of its probabilities.
    fn key_term(&self) -> usize {
        self.key_steps * self.head_steps * 2 * TILE
    }

    fn value_term(&self) -> usize {
        self.pass.job.blocking.head_dim_v_padded.div_ceil(STEP) * self.key_steps * 2 * TILE
    }

    fn query_term(&self) -> usize {
        self.head_steps * self.pass.job.blocking.tile() * SIDE
    }

    fn probability_term(&self) -> usize {
        self.key_steps * self.pass.job.blocking.tile() * SIDE
    }

    fn queries_of<'q>(&self, tile: &Tile, queries: &'q mut [f32]) -> &'q mut [f32] {
        let len = self.terms[0] * self.query_term();
        &mut queries[tile.index * len..][..len]
    }

    fn pack_queries(&self, tile: &Tile, areas: &mut Areas<'_>) {
        let Areas { work, matrix, .. } = areas;
        let src = self.pass.area_of(tile, work.queries, self.pass.job.problem.head_dim);
        let flags = &mut matrix.query_flags[tile.first..];
        let dst = self.queries_of(tile, matrix.queries);
        let (terms, term) = (self.terms[0], self.query_term());
        self.pass.l.vectorize(PackLanes { src, lanes: tile.lanes, terms, dst, term, flags });
        // Lanes without a row hold anything.
        flags[tile.rows..tile.lanes].fill(0.0);
    }

    /// Brings keys into tiles, and says whether some are out of range.
    fn pack_keys(&self, keys: Keys, k: &mut [f32], areas: &mut MatrixAreas<'_>) -> bool {
        match self.pass.job.k.data {
            AnySlice::F32(data) => self.pack_keys_of(data, keys, k, areas),
            AnySlice::F16(data) => self.pack_keys_of(data, keys, k, areas),
            AnySlice::Bf16(data) => self.pack_keys_of(data, keys, k, areas),
        }
    }

    /// The same of `data`, in their own type if they lie in rows.
    fn pack_keys_of<T: Operand>(&self, data: &'a [T], keys: Keys, k: &mut [f32], areas: &mut MatrixAreas<'_>) -> bool {
        let (pass, terms) = (self.pass, self.terms[1]);
        let at = [pass.batch, pass.kv_head, keys.first];
        let (dst, term, flags) = (&mut *areas.keys, self.key_term(), &mut *areas.key_flags);
        match rows_in_place(data, &pass.job.k, at, keys.count).filter(|rows| rows.count == keys.count) {
            Some(rows) => pass.l.vectorize(PackRows { rows, terms, dst, term, flags }),
            None => {
                let rows = load_rows(&pass.job.k, at, keys.count, 1, k);
                pass.l.vectorize(PackRows { rows, terms, dst, term, flags })
            }
        }
    }

    /// Brings values into tiles, and says whether some are out of range.
    fn pack_values(&self, keys: Keys, v: &mut [f32], areas: &mut MatrixAreas<'_>) -> bool {
        let (pass, terms) = (self.pass, self.terms[2]);
        let at = [pass.batch, pass.kv_head, keys.first];
        let rows = load_rows(&pass.job.v, at, keys.count, L::LANES, v);
        let (dst, term, flags) = (&mut *areas.values, self.value_term(), &mut *areas.value_flags);
        let depth = self.key_steps;
        pass.l.vectorize(PackColumns { rows, terms, dst, term, depth, flags })
    }

    fn block(&self, tiles: &mut [Tile], keys: Keys, areas: &mut Areas<'_>) {
        let (pass, keep) = (self.pass, self.pass.job.problem.keep_first);
        let Areas { k, v, work, matrix, .. } = areas;
        let block =
            Block { keys, bad_keys: self.pack_keys(keys, k, matrix), bad_values: self.pack_values(keys, v, matrix) };
        for tile in tiles {
            let Some(part) = tile.part(keys, keep) else { continue };
            let scores = |queries: &[f32], s: &mut [f32]| self.scores(tile, part, &block, queries, s, k, matrix);
            let Some(partial) = pass.scores(tile, part, 0, work, scores) else { continue };
            let state = pass.state(tile, work.states);
            pass.l.vectorize(SoftmaxTerms {
                s: &mut work.s[..part.count * tile.lanes],
                lanes: tile.lanes,
                c: pass.scale.c,
                state,
                alpha: &mut work.pair[..tile.lanes],
                terms: self.terms[3],
                p: matrix.probabilities,
                term: self.probability_term(),
                keep: block.bad_values,
            });
            self.values(tile, part, &block, work, matrix);
            if block.bad_values {
                self.add_bad_values(tile, part, (&block, partial), v, work, matrix);
            }
            tile.started = true;
        }
    }

    /// Products of the queries of a tile and the keys of a part of a block.
    #[allow(clippy::too_many_arguments, reason = "areas of the scratch, borrowed one by one")]
    fn scores(
        &self,
        tile: &Tile,
        part: Keys,
        block: &Block,
        queries: &[f32],
        s: &mut [f32],
        k: &mut [f32],
        areas: &mut MatrixAreas<'_>,
    ) {
        let (lanes, first) = (tile.lanes, part.first - block.keys.first);
        let group = self.head_steps * 2 * TILE;
        let b = &*self.queries_of(tile, areas.queries);
        for (i, s) in s[..part.count * lanes].chunks_mut(STEP * lanes).enumerate() {
            let a = &areas.keys[(first / STEP + i) * group..];
            let whole = s.len() == STEP * lanes;
            let c = if whole { &mut *s } else { &mut *areas.product };
            let (depth, a_term, b_term) = (self.head_steps, self.key_term(), self.query_term());
            let terms = [self.terms[1], self.terms[0]];
            self.product(lanes, Product { terms, depth, a, a_term, b, b_term, c });
            if !whole {
                s.copy_from_slice(&areas.product[..s.len()]);
            }
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
        if flags.iter().any(|&flag| flag != 0.0) {
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

    /// Adds the values of a part, weighed by the probabilities in tiles, to the transposed output of a tile.
    fn values(&self, tile: &Tile, part: Keys, block: &Block, work: &mut Work<'_>, areas: &mut MatrixAreas<'_>) {
        let (lanes, first) = (tile.lanes, (part.first - block.keys.first) / STEP);
        let width = self.pass.job.blocking.head_dim_v_padded;
        let o = self.pass.area_of(tile, work.o, width);
        let (a_term, b_term) = (self.value_term(), self.probability_term());
        for (i, o) in o.chunks_mut(STEP * lanes).enumerate() {
            let a = &areas.values[(i * self.key_steps + first) * 2 * TILE..];
            let (b, c, depth) = (&*areas.probabilities, &mut *areas.product, part.count.div_ceil(STEP));
            let terms = [self.terms[2], self.terms[3]];
            self.product(lanes, Product { terms, depth, a, a_term, b, b_term, c });
            let alpha = tile.started.then_some(&work.pair[..lanes]);
            self.pass.l.vectorize(AddProduct { o, product: areas.product, lanes, alpha });
        }
    }

    /// Adds the values that are out of range, one key after the other: a row meets only those that it sees.
    fn add_bad_values(
        &self,
        tile: &Tile,
        part: Keys,
        (block, partial): (&Block, bool),
        v: &mut [f32],
        work: &mut Work<'_>,
        areas: &MatrixAreas<'_>,
    ) {
        let pass = self.pass;
        let first = part.first - block.keys.first;
        for key in (0..part.count).filter(|key| areas.value_flags[first + key] != 0.0) {
            let seen = &mut work.bias[..tile.lanes];
            for (i, seen) in seen.iter_mut().enumerate() {
                let sees = |(head, query)| pass.job.problem.visible(pass.batch, head, query, part.first + key);
                *seen = f32::from(u8::from(i < tile.rows && (!partial || sees(pass.row(tile.first + i)))));
            }
            let at = [pass.batch, pass.kv_head, part.first + key];
            let value = load_rows(&pass.job.v, at, 1, L::LANES, v).row(0);
            let p = &work.s[key * tile.lanes..][..tile.lanes];
            let o = pass.area_of(tile, work.o, pass.job.blocking.head_dim_v_padded);
            pass.l.vectorize(AddValue { o, value, p, seen });
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

/// `o = alpha * o + product`, rows of `lanes`, or `o = product`.
struct AddProduct<'a> {
    o: &'a mut [f32],
    product: &'a [f32],
    lanes: usize,
    alpha: Option<&'a [f32]>,
}

impl Op for AddProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { o, product, lanes, alpha } = self;
        let Some(alpha) = alpha else { return o.copy_from_slice(&product[..o.len()]) };
        for lane in (0..lanes).step_by(L::LANES) {
            let alpha = l.load(&alpha[lane..]);
            for (o, product) in o.chunks_exact_mut(lanes).zip(product.chunks_exact(lanes)) {
                let o = &mut o[lane..];
                l.store(l.fma(l.load(o), alpha, l.load(&product[lane..])), o);
            }
        }
    }
}

/// `o[d][row] += p[row] * value[d]` where the row sees the key.
struct AddValue<'a> {
    o: &'a mut [f32],
    value: &'a [f32],
    p: &'a [f32],
    seen: &'a [f32],
}

impl Op for AddValue<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let lanes = self.p.len();
        for lane in (0..lanes).step_by(L::LANES) {
            let (p, seen) = (l.load(&self.p[lane..]), l.lt(l.splat(0.0), l.load(&self.seen[lane..])));
            for (o, &value) in self.o.chunks_exact_mut(lanes).zip(self.value) {
                let o = &mut o[lane..];
                let old = l.load(o);
                l.store(l.select(seen, l.fma(p, l.splat(value), old), old), o);
            }
        }
    }
}
