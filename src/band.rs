//! The keys that a query may see by its position alone.

use core::ops::Range;

/// The keys of a sequence that a query may see, mask and bias aside: those between two diagonals, and the first few.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Band {
    pub(crate) len: usize,
    /// Query `i` sees keys from `i + from` up to and without `i + to`. Exact, whatever offsets and windows were given.
    pub(crate) from: Option<i128>,
    pub(crate) to: Option<i128>,
    /// Keys below `hi` that are seen though they lie below `lo`.
    pub(crate) keep: usize,
}

impl Band {
    /// The keys `lo..hi` that a query may see, besides those to keep. Always `lo <= hi <= len`, and both ends never fall from
    /// one query to the next.
    pub(crate) fn range(&self, query: usize) -> (usize, usize) {
        // The casts are exact: 0 <= lo <= hi <= len, which was a usize.
        let end = |shift: Option<i128>, top: usize, none| {
            shift.map_or(none, |shift| (query as i128 + shift).clamp(0, top as i128) as usize)
        };
        let hi = end(self.to, self.len, self.len);
        (end(self.from, hi, 0), hi)
    }

    /// Keys seen, summed over some queries and saturated: sums of clamped lines, in constant time.
    pub(crate) fn pairs(&self, queries: Range<usize>) -> u64 {
        let all = self.len as u128 * queries.len() as u128;
        let keep = self.keep.min(self.len);
        let empty = self.from.zip(self.to).is_some_and(|(from, to)| from >= to);
        let between = match empty {
            true => 0,
            false => {
                let hi = self.to.map_or(all, |to| sum_clamped(to, self.len, &queries));
                hi.saturating_sub(self.from.map_or(0, |from| sum_clamped(from, self.len, &queries)))
            }
        };
        // Keys kept are those below both `lo` and `keep`.
        let lo = if empty { self.to } else { self.from };
        let kept = lo.map_or(0, |lo| sum_clamped(lo, keep, &queries));
        u64::try_from(between.saturating_add(kept)).unwrap_or(u64::MAX)
    }
}

/// Sum of `clamp(query + shift, 0, top)` over the queries, saturated.
fn sum_clamped(shift: i128, top: usize, queries: &Range<usize>) -> u128 {
    let (first, end, top) = (queries.start as i128, queries.end as i128, top as i128);
    let rises = (-shift).clamp(first, end.max(first));
    let full = (top - shift).clamp(rises, end.max(rises));
    let slope = match (full - rises) as u128 {
        0 => 0,
        n => n.saturating_mul((rises + shift + full - 1 + shift) as u128) / 2,
    };
    slope.saturating_add((end.max(full) - full) as u128 * top as u128)
}
