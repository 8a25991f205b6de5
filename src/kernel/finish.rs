//! From a tile's last state to its outputs: normalised rows, LSE, and in a second pass over the keys attention weights.

use super::fused::{BlockValues, Keys, Pass};
use super::lanes::Lanes;
use super::matrix::{Matrix, ScoresOnMatrix};
use super::online::{Normalize, Probabilities};
use super::pack::load_rows;
use super::scratch::{Areas, Tile};
use super::tile::{Rows, Transpose};
use crate::view::RowSink;

impl<L: Lanes> Pass<'_, L> {
    /// Normalises a tile and hands out its rows.
    pub(super) fn finish(&self, tile: &Tile, areas: &mut Areas<'_>, sink: &mut dyn RowSink) {
        let work = &mut areas.work;
        let state = self.state(tile, work.states);
        let plain = self.job.problem.sinks.is_none() && !sink.wants_lse();
        for i in 0..tile.rows {
            if plain && state.sum[i] != 0.0 {
                state.norm[i] = 1.0 / state.sum[i];
                continue;
            }
            let (head, query) = self.row(tile.first + i);
            let (factor, lse) = self.row_result((head, query), state.max[i], state.sum[i]);
            state.norm[i] = factor;
            sink.lse(head, query, lse);
        }
        let width = self.job.blocking.head_dim_v_padded;
        let o = self.area_of(tile, work.o, width);
        if !tile.started {
            o.fill(0.0);
        } else if !self.l.vectorize(Normalize { o, width, norm: &state.norm[..tile.rows] }) {
            self.mend_overflow(tile, areas);
        }
        let o = self.area_of(tile, areas.work.o, width);
        for i in 0..tile.rows {
            let (head, query) = self.row(tile.first + i);
            sink.out(head, query, &o[i * width..][..self.job.problem.head_dim_v]);
        }
        if sink.wants_weights() {
            self.weights(tile, areas, sink);
        }
    }

    /// An output that is not finite though the row's sum of probabilities is may have overflown before it was normalised: it
    /// is computed again as an average of values with weights that are normalised first, of which no sum is larger than the
    /// largest value. What was finite stays as it is, whatever shares its tile.
    fn mend_overflow(&self, tile: &Tile, areas: &mut Areas<'_>) {
        let blocking = &self.job.blocking;
        let spare = Tile { index: blocking.tiles(), ..*tile };
        let mut fresh = true;
        for block in self.blocks(tile.any.0, tile.any.1, self.job.problem.key_length(self.batch)) {
            let Some(part) = tile.part(block, self.job.problem.keep_first) else { continue };
            let Some(partial) = self.probabilities(tile, part, 0, areas) else { continue };
            let Areas { v, work, .. } = areas;
            work.pair.fill(1.0);
            if tile.few {
                self.few_values(&spare, part, (partial, fresh), v, work);
            } else {
                let at = [self.batch, self.kv_head, block.first];
                let mut values = BlockValues::new(load_rows(&self.job.v, at, block.count, L::LANES, v), block);
                self.add_values(&spare, part, &mut values, (partial, fresh), work);
            }
            fresh = false;
        }
        let width = blocking.head_dim_v_padded;
        let norm = self.state(tile, areas.work.states).norm;
        let (o, again) = areas.work.o.split_at_mut(blocking.tiles() * blocking.tile() * width);
        let rows = self.area_of(tile, o, width).chunks_exact_mut(width).zip(again.chunks_exact(width)).zip(norm);
        for ((row, again), norm) in rows.take(tile.rows) {
            for (x, y) in row.iter_mut().zip(again) {
                // A row without a finite sum stays NaN, with the bits that it has.
                *x = if x.is_finite() || norm.is_nan() { *x } else { *y };
            }
        }
    }

    /// The factor that normalises a row, and its LSE.
    fn row_result(&self, (head, query): (usize, usize), max: f32, sum: f32) -> (f32, f32) {
        let problem = self.job.problem;
        let sink = problem.sinks.map(|sinks| sinks[head]);
        if sum == 0.0 {
            // Every score was -inf: hidden, or of infinite operands, which only a sink can outweigh.
            let seen = problem.keys(self.batch, query).any(|key| problem.visible(self.batch, head, query, key));
            return match (seen, sink) {
                (false, _) => (0.0, f32::NEG_INFINITY),
                (true, Some(sink)) if sink > f32::NEG_INFINITY => (0.0, sink),
                (true, _) => (f32::NAN, f32::NAN),
            };
        }
        let max = f64::from(max) * self.scale.natural;
        let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
        let top = max.max(sink);
        let total = f64::from(sum) * (max - top).exp() + (sink - top).exp();
        (((max - top).exp() / total) as f32, (top + total.ln()) as f32)
    }

    /// Scores of a part of a block again, made probabilities, at `work.s[at..]`. As [`Pass::scores`].
    fn probabilities(&self, tile: &Tile, part: Keys, at: usize, areas: &mut Areas<'_>) -> Option<bool> {
        let partial = match self.matrix() {
            Some(matrix) => matrix.run(ScoresOnMatrix { pass: self, tile, part, at, areas }),
            None => {
                let Areas { k, work, .. } = &mut *areas;
                self.scores(tile, part, at, work, |queries, s| {
                    if tile.few {
                        return self.few_products(tile, part, k, queries, s);
                    }
                    let keys = load_rows(&self.job.k, [self.batch, self.kv_head, part.first], part.count, 1, k);
                    self.products(tile, keys, queries, s);
                })
            }
        }?;
        let work = &mut areas.work;
        let state = self.state(tile, work.states);
        let s = &mut work.s[at..][..(part.count * tile.lanes).next_multiple_of(L::LANES)];
        let (max, norm) = (&*state.max, &*state.norm);
        self.l.vectorize(Probabilities { s: &mut *s, lanes: tile.lanes, c: self.scale.c, max, norm });
        // What is behind the last key in its vector.
        s[part.count * tile.lanes..].fill(0.0);
        Some(partial)
    }

    /// Attention weights of a tile.
    fn weights(&self, tile: &Tile, areas: &mut Areas<'_>, sink: &mut dyn RowSink) {
        let block_k = self.job.blocking.block_k;
        let all = self.job.problem.seqlen_k;
        for block in self.blocks(0, all, all) {
            areas.work.s.fill(0.0);
            if let Some(part) = tile.part(block, self.job.problem.keep_first) {
                self.probabilities(tile, part, (part.first - block.first) * tile.lanes, areas);
            }
            let work = &mut areas.work;
            let src = Rows { data: work.s, stride: tile.lanes, width: tile.lanes, count: block.count };
            self.l.vectorize(Transpose { src, dst: work.stage, dst_stride: block_k });
            let norm = self.state(tile, work.states).norm;
            for (i, norm) in norm.iter().enumerate().take(tile.rows) {
                let (head, query) = self.row(tile.first + i);
                let row = &mut work.stage[i * block_k..][..block.count];
                if norm.is_nan() {
                    // NaN for the keys that the row sees; a hidden key weighs nothing in any row.
                    for (key, weight) in (block.first..).zip(row.iter_mut()) {
                        let visible = self.job.problem.visible(self.batch, head, query, key);
                        *weight = if visible { f32::NAN } else { 0.0 };
                    }
                }
                sink.weights(head, query, block.first, row);
            }
        }
    }
}
