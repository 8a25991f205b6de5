//! The steps of a tile of few rows: as those of [`fused`](super::fused), with a row of scores for each row.

use super::few::{Dots, RowSoftmax, RowValues, pack_query};
use super::fused::{Keys, Pass};
use super::lanes::Lanes;
use super::mask_tile::{self, Place, Verdict};
use super::pack::{load_row, load_rows, rows_in_place};
use super::score::{RowPass, RowRule};
use super::scratch::{Areas, Tile, Work};
use super::tile::{AllFinite, CarefulValues};
use crate::element::AnySlice;

/// Runs `$body` with `$rows` = the first rows of a part, in place and of their own type, or copied if they cannot be read so.
macro_rules! with_rows {
    ($heads:expr, $at:expr, $count:expr, $area:expr, $rows:ident => $body:expr) => {{
        let (heads, at, count) = ($heads, $at, $count);
        let mut run = None;
        match heads.data {
            AnySlice::F32(data) => {
                if let Some($rows) = rows_in_place(data, heads, at, count) {
                    run = Some($body)
                }
            }
            AnySlice::F16(data) => {
                if let Some($rows) = rows_in_place(data, heads, at, count) {
                    run = Some($body)
                }
            }
            AnySlice::Bf16(data) => {
                if let Some($rows) = rows_in_place(data, heads, at, count) {
                    run = Some($body)
                }
            }
        }
        match run {
            Some(result) => result,
            None => {
                let $rows = load_rows(heads, at, count, 1, $area);
                $body
            }
        }
    }};
}

impl<L: Lanes> Pass<'_, L> {
    /// Queries as `Dots` reads them.
    pub(super) fn pack_few(&self, tile: &Tile, work: &mut Work<'_>) {
        let row = &mut work.stage[..self.job.problem.head_dim];
        for i in 0..tile.rows {
            let (head, query) = self.row(tile.first + i);
            load_row(&self.job.q, [self.batch, head, query], row);
            if self.scale.negative {
                row.iter_mut().for_each(|x| *x = -*x);
            }
            pack_query(row, i, tile.rows, L::LANES, work.queries);
        }
    }

    /// Takes a part of the keys and their values into a tile.
    pub(super) fn few_part(&self, tile: &mut Tile, part: Keys, areas: &mut Areas<'_>) {
        let Some(partial) = self.few_scores(tile, part, 0, areas) else { return };
        let work = &mut areas.work;
        let (state, stride) = (self.state(tile, work.states), self.job.blocking.block_k);
        let (rows, count, c) = (tile.rows, part.count, self.scale.c);
        self.l.vectorize(RowSoftmax { s: work.s, stride, rows, count, c, state, alpha: work.pair });
        self.few_values(tile, part, (partial, !tile.started), areas);
        tile.started = true;
    }

    /// As [`Pass::scores`], row by row: those of row `i` begin at `work.s[i * block_k + at]`.
    pub(super) fn few_scores(&self, tile: &Tile, part: Keys, at: usize, areas: &mut Areas<'_>) -> Option<bool> {
        let Areas { k, work, .. } = areas;
        let verdicts = self.few_masks(tile, part, work)?;
        let stride = self.job.blocking.block_k;
        let mut done = 0;
        while done < part.count {
            let first = [self.batch, self.kv_head, part.first + done];
            done += with_rows!(&self.job.k, first, part.count - done, k, keys => {
                let s = &mut work.s[at + done..];
                self.l.vectorize(Dots { keys, queries: work.queries, rows: tile.rows, s, stride });
                keys.count
            });
        }
        let mut partial = false;
        for (i, verdict) in verdicts.into_iter().enumerate().take(tile.rows) {
            let row = &mut work.s[i * stride + at..][..part.count.next_multiple_of(L::LANES)];
            let bias = (verdict != Verdict::Clear).then_some(&work.bias[i * stride..]);
            self.few_rules(tile, i, part, row, bias);
            partial |= bias.is_some() | self.hide(work.ranges[tile.first + i], part, row);
            // What stands behind the last key counts as hidden.
            row[part.count..].fill(f32::NEG_INFINITY);
        }
        Some(partial)
    }

    /// Mask and bias of every row, at `work.bias[i * block_k]`. `None` if they hide all keys from all rows.
    fn few_masks(&self, tile: &Tile, part: Keys, work: &mut Work<'_>) -> Option<[Verdict; super::few::MAX_ROWS]> {
        let (problem, stride) = (self.job.problem, self.job.blocking.block_k);
        let mut verdicts = [Verdict::Clear; super::few::MAX_ROWS];
        if problem.mask.is_none() && problem.bias.is_none() {
            return Some(verdicts);
        }
        let rows = &|row| self.row(tile.first + row);
        let place = Place { batch: self.batch, rows, count: tile.rows, first_key: part.first, keys: part.count };
        for (i, verdict) in verdicts.iter_mut().enumerate().take(tile.rows) {
            let values = &mut work.bias[i * stride..][..part.count];
            *verdict = mask_tile::build_row(problem, place.index(i), part.first, values);
            mask_tile::prefetch_next(self.l, problem, &place, i);
        }
        (!verdicts[..tile.rows].iter().all(|&verdict| verdict == Verdict::Hidden)).then_some(verdicts)
    }

    /// Scale, softcap, ALiBi and bias of one row of scores.
    fn few_rules(&self, tile: &Tile, i: usize, part: Keys, row: &mut [f32], bias: Option<&[f32]>) {
        let problem = self.job.problem;
        let mut apply = |rule: RowRule<'_>| self.l.vectorize(RowPass { s: row, rule });
        // With nothing between them, scale and bias share a pass.
        let scale_with_bias = bias.is_some() && problem.softcap.is_none() && problem.alibi.is_none();
        let scale = self.scale.before.unwrap_or(1.0);
        if scale != 1.0 && !scale_with_bias {
            apply(RowRule::Scale(scale));
        }
        if let Some(cap) = problem.softcap {
            apply(RowRule::Softcap(cap));
        }
        if let Some((slopes, diagonal)) = problem.alibi {
            let (head, query) = self.row(tile.first + i);
            let position = (problem.position(diagonal, self.batch, query) - part.first as i128) as f32;
            apply(RowRule::Alibi { slope: slopes[head], position });
        }
        if let Some(bias) = bias {
            apply(RowRule::Bias { bias, scale: if scale_with_bias { scale } else { 1.0 } });
        }
    }

    /// Hides the keys that causality, window and key length hide from a row; whether there are any.
    fn hide(&self, (lo, hi): (usize, usize), part: Keys, row: &mut [f32]) -> bool {
        let keep = self.job.problem.keep_first.saturating_sub(part.first);
        let from = lo.saturating_sub(part.first).min(part.count);
        let to = hi.saturating_sub(part.first).min(part.count);
        row[keep.min(from)..from].fill(f32::NEG_INFINITY);
        row[to..part.count].fill(f32::NEG_INFINITY);
        keep < from || to < part.count
    }

    /// As [`Pass::add_values`], with the probabilities that start at `work.s[0]`.
    pub(super) fn few_values(&self, tile: &Tile, part: Keys, (partial, fresh): (bool, bool), areas: &mut Areas<'_>) {
        let Areas { v, work, .. } = areas;
        let (stride, rows) = (self.job.blocking.block_k, tile.rows);
        let mut alpha = (!fresh).then_some(&work.pair[..rows]);
        let mut done = 0;
        if partial && !self.few_all_finite(part, v) {
            self.note_seen(tile, part, work.bias, (1, stride));
            let at = [self.batch, self.kv_head, part.first];
            let values = load_rows(&self.job.v, at, part.count, L::LANES, v);
            let o = self.area_of(tile, work.o, self.job.blocking.head_dim_v_padded);
            let (p, seen, steps) = (&*work.s, &*work.bias, (1, stride));
            return self.l.vectorize(CarefulValues { values, p, seen, steps, rows, alpha, o });
        }
        while done < part.count {
            let first = [self.batch, self.kv_head, part.first + done];
            let o = self.area_of(tile, work.o, self.job.blocking.head_dim_v_padded);
            done += with_rows!(&self.job.v, first, part.count - done, v, values => {
                self.l.vectorize(RowValues { values, p: &work.s[done..], stride, rows, alpha, o });
                values.count
            });
            alpha = Some(&[1.0; super::few::MAX_ROWS]);
        }
    }

    /// Whether all values of a part are finite.
    fn few_all_finite(&self, part: Keys, area: &mut [f32]) -> bool {
        let mut done = 0;
        while done < part.count {
            let first = [self.batch, self.kv_head, part.first + done];
            let (count, finite) = with_rows!(&self.job.v, first, part.count - done, area, values => {
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
