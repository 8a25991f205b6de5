//! Few rows against many keys, the shape of decoding: every element of K and V is read once, as it lies in memory and in its own
//! type, and meets all rows while it is in a register.
//!
//! With fewer rows than lanes, queries in lanes would leave most lanes of the two products idle. So here head_dim is in lanes for
//! the scores, as head_dim_v is for the output anyway. Rows are padded to a power of two, `[keys][rows]`, so that vectors have whole
//! keys; see [`few_softmax`](super::few_softmax).

use super::blocking::BLOCK_K;
use super::few_softmax::FewSoftmax;
use super::fused::{Keys, Pass};
use super::lanes::{Lanes, MAX_LANES, Op};
use super::operand::Operand;
use super::pack::{load_row, load_rows, rows_in_place};
use super::scratch::{Areas, Tile, Work};
use super::tile::{AllFinite, Before, CarefulValues, Rows, Values, unroll};
use crate::element::AnySlice;
use crate::view::AnyHeads;

/// Queries of a sequence at the most. Not rows, which are more with a group of heads: what a row comes to must not depend on how
/// many heads share its keys.
pub(crate) const MAX_QUERIES: usize = 4;

/// Rows of which `Dots` takes the products with a key together: all that there are, or four.
fn group(lanes: usize) -> usize {
    lanes.min(4)
}

/// Writes a query as `Dots` reads it: `[group][chunk of head_dim][row of the group][lane]`, zeros behind head_dim.
struct PackQuery<'a> {
    query: &'a [f32],
    row: usize,
    size: usize,
    packed: &'a mut [f32],
}

impl Op for PackQuery<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { query, row, size, packed } = self;
        let packed = &mut packed[row / size * size * query.len().next_multiple_of(L::LANES)..];
        let mut at = row % size * L::LANES;
        let chunks = query.chunks_exact(L::LANES);
        let rest = chunks.remainder();
        for values in chunks {
            l.store(l.load(values), &mut packed[at..]);
            at += size * L::LANES;
        }
        if !rest.is_empty() {
            l.store(l.load_partial(rest, 0.0), &mut packed[at..]);
        }
    }
}

/// `s[key * lanes + row] = dot(keys[key], queries[row])` for all of the `lanes` rows, a power of two.
struct Dots<'a, T> {
    keys: Rows<'a, T>,
    /// As [`PackQuery`] leaves them.
    queries: &'a [f32],
    s: &'a mut [f32],
    lanes: usize,
}

impl<T: Operand> Op for Dots<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match (group(self.lanes), self.keys.width.is_multiple_of(L::LANES)) {
            (1, true) => self.all::<L, 1, false>(l),
            (1, false) => self.all::<L, 1, true>(l),
            (2, true) => self.all::<L, 2, false>(l),
            (2, false) => self.all::<L, 2, true>(l),
            (_, true) => self.all::<L, 4, false>(l),
            (_, false) => self.all::<L, 4, true>(l),
        }
    }
}

impl<T: Operand> Dots<'_, T> {
    /// `REST` says whether head_dim ends within a vector.
    #[inline(always)]
    fn all<L: Lanes, const NR: usize, const REST: bool>(self, l: L) {
        let Self { keys, queries, s, lanes } = self;
        let Rows { data, stride, width, count } = keys;
        if width == 0 {
            return s[..count * lanes].fill(0.0);
        }
        let (padded, ahead) = (width.next_multiple_of(L::LANES), rows_ahead(&keys));
        // Keys outside: four of them stay in L1 while all rows meet them. Behind the last one there may be nothing.
        let whole = (count - 1) / SUMS;
        let (s, rest) = s.split_at_mut(whole * SUMS * lanes);
        let groups = data[..whole * SUMS * stride].chunks_exact((SUMS * stride).max(1));
        for (i, (keys4, s)) in groups.zip(s.chunks_exact_mut(SUMS * lanes)).enumerate() {
            prefetch(l, &keys, i * SUMS + ahead, (i + 1) * SUMS + ahead);
            let (ab, cd) = keys4.split_at(2 * stride);
            let rows = [&ab[..width], &ab[stride..][..width], &cd[..width], &cd[stride..][..width]];
            for row in (0..lanes).step_by(NR) {
                let sums = dots::<L, T, NR, REST>(l, rows, &queries[row * padded..][..NR * padded]);
                put(&sums, lanes, &mut s[row..], SUMS);
            }
        }
        // The last key stands in for those that are missing.
        let key = |i: usize| keys.row((whole * SUMS + i).min(count - 1));
        let rows = [key(0), key(1), key(2), key(3)];
        for row in (0..lanes).step_by(NR) {
            let sums = dots::<L, T, NR, REST>(l, rows, &queries[row * padded..][..NR * padded]);
            put(&sums, lanes, &mut rest[row..], count - whole * SUMS);
        }
    }
}

/// Products that become numbers together.
const SUMS: usize = 4;

/// Writes the products of `keys` keys and `NR` of `lanes` rows. (Chunks of a length that is not constant cost a division.)
#[inline(always)]
fn put<const NR: usize>(sums: &[[f32; NR]; SUMS], lanes: usize, s: &mut [f32], keys: usize) {
    if NR == lanes && keys == SUMS {
        s[..SUMS * NR].copy_from_slice(sums.as_flattened());
    } else {
        for (key, sums) in sums.iter().enumerate().take(keys) {
            s[key * lanes..][..NR].copy_from_slice(sums);
        }
    }
}

/// Products of `SUMS` keys and `NR` rows, key by key.
#[inline(always)]
fn dots<L: Lanes, T: Operand, const NR: usize, const REST: bool>(
    l: L,
    keys: [&[T]; SUMS],
    queries: &[f32],
) -> [[f32; NR]; SUMS] {
    // Four keys times four rows of accumulators are more than the registers of most levels.
    let acc = if NR < 4 {
        dot4::<L, T, NR, REST>(l, keys, queries)
    } else {
        let [a, b, c, d] = keys;
        let ([a, b], [c, d]) = (dot2::<L, T, NR, REST>(l, a, b, queries), dot2::<L, T, NR, REST>(l, c, d, queries));
        [a, b, c, d]
    };
    let mut sums = [[0.0; NR]; SUMS];
    unroll!(I < NR => {
        // Vector i of four times NR, key by key and row by row.
        let at = |i: usize| acc[i / NR][i % NR];
        let four = l.sum4([at(4 * I), at(4 * I + 1), at(4 * I + 2), at(4 * I + 3)]);
        sums.as_flattened_mut()[4 * I..][..4].copy_from_slice(&four);
    });
    sums
}

/// As [`dot2`], of four keys.
#[inline(always)]
fn dot4<L: Lanes, T: Operand, const NR: usize, const REST: bool>(
    l: L,
    keys: [&[T]; SUMS],
    queries: &[f32],
) -> [[L::V; NR]; SUMS] {
    let mut acc = [[l.splat(0.0); NR]; SUMS];
    let low = keys[0].chunks_exact(L::LANES).zip(keys[1].chunks_exact(L::LANES));
    let high = keys[2].chunks_exact(L::LANES).zip(keys[3].chunks_exact(L::LANES));
    for (((a, b), (c, d)), query) in low.zip(high).zip(queries.chunks_exact(NR * L::LANES)) {
        let keys = [T::load(l, a), T::load(l, b), T::load(l, c), T::load(l, d)];
        unroll!(R < NR => {
            let q = l.load(&query[R * L::LANES..]);
            for k in 0..SUMS {
                acc[k][R] = l.fma(keys[k], q, acc[k][R]);
            }
        });
    }
    if REST {
        let whole = keys[0].len() / L::LANES * L::LANES;
        let [a, b, c, d] = keys.map(|key| &key[whole..]);
        let rest = [T::load_partial(l, a), T::load_partial(l, b), T::load_partial(l, c), T::load_partial(l, d)];
        unroll!(R < NR => {
            let q = l.load(&queries[whole * NR + R * L::LANES..]);
            for k in 0..SUMS {
                acc[k][R] = l.fma(rest[k], q, acc[k][R]);
            }
        });
    }
    acc
}

/// Vectors whose lanes sum to the products of two keys and `NR` rows.
#[inline(always)]
fn dot2<L: Lanes, T: Operand, const NR: usize, const REST: bool>(
    l: L,
    a: &[T],
    b: &[T],
    queries: &[f32],
) -> [[L::V; NR]; 2] {
    let mut acc = [[l.splat(0.0); NR]; 2];
    let pairs = a.chunks_exact(L::LANES).zip(b.chunks_exact(L::LANES));
    for ((a, b), query) in pairs.zip(queries.chunks_exact(NR * L::LANES)) {
        let (a, b) = (T::load(l, a), T::load(l, b));
        unroll!(R < NR => {
            let q = l.load(&query[R * L::LANES..]);
            acc[0][R] = l.fma(a, q, acc[0][R]);
            acc[1][R] = l.fma(b, q, acc[1][R]);
        });
    }
    if REST {
        let whole = a.len() / L::LANES * L::LANES;
        let (a, b) = (T::load_partial(l, &a[whole..]), T::load_partial(l, &b[whole..]));
        unroll!(R < NR => {
            let q = l.load(&queries[whole * NR + R * L::LANES..]);
            acc[0][R] = l.fma(a, q, acc[0][R]);
            acc[1][R] = l.fma(b, q, acc[1][R]);
        });
    }
    acc
}

/// As [`Values`], for values that come from memory: a few keys at a time, so that they are in L1 while their columns are read one
/// panel after the other, and with the next ones asked for.
struct StreamedValues<'a, T>(Values<'a, T>);

/// Factors of rows that continue.
const ONES: [f32; 2 * MAX_LANES] = [1.0; 2 * MAX_LANES];

/// Bytes of the keys at a time.
const STREAM_BYTES: usize = 16384;

impl<T: Operand> Op for StreamedValues<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Values { values, p, lanes, rows, mut before, o, .. } = self.0;
        let ahead = rows_ahead(&values);
        let step = (STREAM_BYTES / size_of::<T>() / values.width.max(1)).clamp(4, 64);
        for first in (0..values.count).step_by(step) {
            let end = values.count.min(first + step);
            prefetch(l, &values, first + ahead, end + ahead);
            let p = &p[first * lanes..end * lanes];
            Values { values: values.range(first, end), panel: None, p, lanes, rows, before, o: &mut *o }.run(l);
            before = Before::Continued(&ONES);
        }
    }
}

/// Bytes between a row that is read and the row that is asked for: enough to cover the latency of memory, few enough to stay in L1.
const PREFETCH_BYTES: usize = 4096;

fn rows_ahead<T>(rows: &Rows<'_, T>) -> usize {
    (PREFETCH_BYTES / size_of::<T>() / rows.stride.max(1)).clamp(1, 64)
}

/// Asks for the rows `from..to`, as far as there are any.
#[inline(always)]
fn prefetch<L: Lanes, T: Copy>(l: L, rows: &Rows<'_, T>, from: usize, to: usize) {
    let to = to.min(rows.count);
    if from < to && rows.stride == rows.width {
        l.prefetch(&rows.data[from * rows.stride..to * rows.stride]);
    } else {
        (from..to).for_each(|i| l.prefetch(rows.row(i)));
    }
}

/// Runs `$body` with `$rows` = the first rows of a part, in place and of their own type, or copied if they cannot be read so.
macro_rules! with_rows {
    ($heads:expr, $at:expr, $count:expr, $multiple:expr, $area:expr, $rows:ident => $body:expr) => {{
        let (heads, at, count) = ($heads, $at, $count);
        let in_place = heads.layout.shape[3].is_multiple_of($multiple);
        let mut result = None;
        match heads.data {
            AnySlice::F32(data) if in_place => result = rows_in_place(data, heads, at, count).map(|$rows| $body),
            AnySlice::F16(data) if in_place => result = rows_in_place(data, heads, at, count).map(|$rows| $body),
            AnySlice::Bf16(data) if in_place => result = rows_in_place(data, heads, at, count).map(|$rows| $body),
            _ => {}
        }
        match result {
            Some(result) => result,
            None => {
                let $rows = load_rows(heads, at, count, $multiple, $area);
                $body
            }
        }
    }};
}

impl<L: Lanes> Pass<'_, L> {
    /// Queries as `Dots` reads them.
    pub(super) fn pack_few(&self, tile: &Tile, work: &mut Work<'_>) {
        let stage = &mut work.stage[..self.job.problem.head_dim];
        let queries = &mut work.queries[self.few_queries(tile)..];
        for row in 0..tile.lanes {
            // Of the rows that there are not the products are dropped.
            if row < tile.rows {
                let (head, query) = self.row(tile.first + row);
                load_row(&self.job.q, [self.batch, head, query], stage);
                if self.scale.negative {
                    stage.iter_mut().for_each(|x| *x = -*x);
                }
            }
            self.l.vectorize(PackQuery { query: stage, row, size: group(tile.lanes), packed: queries });
        }
    }

    /// One block of keys and values against all tiles.
    pub(super) fn few_block(&self, tiles: &mut [Tile], block: Keys, areas: &mut Areas<'_>) {
        let Areas { k, v, work, .. } = areas;
        for tile in tiles {
            let Some(part) = tile.part(block, self.job.problem.keep_first) else { continue };
            let products = |queries: &[f32], s: &mut [f32]| self.few_products(tile, part, k, queries, s);
            let Some(partial) = self.scores(tile, part, 0, work, products) else { continue };
            self.few_softmax(tile, part, work);
            self.few_values(tile, part, (partial, !tile.started), v, work);
            tile.started = true;
        }
    }

    /// As [`Pass::softmax`].
    fn few_softmax(&self, tile: &Tile, part: Keys, work: &mut Work<'_>) {
        let (used, len) = (part.count * tile.lanes, part.count.next_multiple_of(L::LANES) * tile.lanes);
        work.s[used..len].fill(f32::NEG_INFINITY);
        let state = self.state(tile, work.states);
        self.l.vectorize(FewSoftmax {
            s: &mut work.s[..len],
            rows: tile.lanes,
            c: self.scale.c,
            state,
            alpha: work.pair,
        });
    }

    /// Where the queries of a tile begin.
    fn few_queries(&self, tile: &Tile) -> usize {
        tile.index * self.job.blocking.tile() * self.job.blocking.head_dim_padded
    }

    /// Products of the queries and a part of the keys, `s[key][lane]`.
    pub(super) fn few_products(&self, tile: &Tile, part: Keys, area: &mut [f32], queries: &[f32], s: &mut [f32]) {
        let (lanes, queries) = (tile.lanes, &queries[self.few_queries(tile)..]);
        self.prefetch_first(&self.job.v, part.first, part.count);
        let mut done = 0;
        while done < part.count {
            let at = [self.batch, self.kv_head, part.first + done];
            let s = &mut s[done * lanes..];
            done += with_rows!(&self.job.k, at, part.count - done, 1, area, keys => {
                self.l.vectorize(Dots { keys, queries, s, lanes });
                keys.count
            });
        }
    }

    /// Asks for the first rows of what is read next, as each row asks for one that follows in its own block.
    /// Not worth it for a sequence of less than a small block.
    fn prefetch_first(&self, heads: &AnyHeads<'_>, first: usize, count: usize) {
        fn rows<L: Lanes, T: Copy>(l: L, rows: Option<Rows<'_, T>>) {
            if let Some(rows) = rows {
                prefetch(l, &rows, 0, rows_ahead(&rows));
            }
        }
        let at = [self.batch, self.kv_head, first];
        match heads.data {
            _ if count < BLOCK_K / 2 => {}
            AnySlice::F32(data) => rows(self.l, rows_in_place(data, heads, at, count)),
            AnySlice::F16(data) => rows(self.l, rows_in_place(data, heads, at, count)),
            AnySlice::Bf16(data) => rows(self.l, rows_in_place(data, heads, at, count)),
        }
    }

    /// As [`Pass::add_values`].
    pub(super) fn few_values(
        &self,
        tile: &Tile,
        part: Keys,
        (partial, fresh): (bool, bool),
        area: &mut [f32],
        work: &mut Work<'_>,
    ) {
        let (rows, lanes) = (tile.rows, tile.lanes);
        let o = self.area_of(tile, work.o, self.job.blocking.head_dim_v_padded);
        let mut before = if fresh { Before::Nothing } else { Before::Continued(&work.pair[..lanes]) };
        let next = part.first + part.count;
        self.prefetch_first(&self.job.k, next, self.job.problem.key_length(self.batch) - next);
        if partial && !self.few_all_finite(part, area) {
            self.note_seen(tile, part, work.bias);
            let values = load_rows(&self.job.v, [self.batch, self.kv_head, part.first], part.count, L::LANES, area);
            let (p, seen) = (&*work.s, &*work.bias);
            return self.l.vectorize(CarefulValues { values, p, seen, lanes, rows, before, o });
        }
        let mut done = 0;
        while done < part.count {
            let at = [self.batch, self.kv_head, part.first + done];
            let p = &work.s[done * lanes..];
            done += with_rows!(&self.job.v, at, part.count - done, L::LANES, area, values => {
                let count = values.count;
                let p = &p[..count * lanes];
                self.l.vectorize(StreamedValues(Values { values, panel: None, p, lanes, rows, before, o: &mut *o }));
                count
            });
            before = Before::Continued(&ONES);
        }
    }

    /// Whether all values of a part are finite.
    fn few_all_finite(&self, part: Keys, area: &mut [f32]) -> bool {
        let mut done = 0;
        while done < part.count {
            let at = [self.batch, self.kv_head, part.first + done];
            let (count, finite) = with_rows!(&self.job.v, at, part.count - done, 1, area, values => {
                (values.count, self.l.vectorize(AllFinite(values)))
            });
            if !finite {
                return false;
            }
            done += count;
        }
        true
    }
}
