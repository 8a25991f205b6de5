//! One attention problem: the sizes and options of a call, checked once, and the rule for which query sees which key.

use crate::band::Band;
use crate::mask::Broadcast;
use crate::view::{AnyHeads, Lengths};
use crate::{Diagonal, Error, Options, Result, Window};

/// Sizes and options that fit together. Nothing behind it checks again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) batch: usize,
    pub(crate) num_heads: usize,
    /// Query heads of each KV head; 0 if and only if there is no query head.
    pub(crate) group: usize,
    /// Of the longest sequences.
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    query_lengths: Lengths<'a>,
    own_key_lengths: Lengths<'a>,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    /// As given, or `1 / sqrt(head_dim)`; finite.
    pub(crate) softmax_scale: f32,
    /// Positive and finite.
    pub(crate) softcap: Option<f32>,
    /// At the shape of the scores, with the value that lets a key be seen.
    masks: [Option<(Broadcast<'a, bool>, bool)>; 2],
    /// At the shape of the scores.
    biases: [Option<Broadcast<'a, f32>>; 2],
    /// One finite slope for each query head.
    pub(crate) alibi: Option<(&'a [f32], Diagonal)>,
    /// One logit for each query head, finite or -inf.
    pub(crate) sinks: Option<&'a [f32]>,
    /// One length for each batch item, no longer than its sequence.
    pub(crate) key_lengths: Option<&'a [usize]>,
    pub(crate) causal: Option<Diagonal>,
    pub(crate) window: Option<Window>,
    /// Keys at the start of a sequence that the window does not hide on its left; 0 without a window.
    pub(crate) keep_first: usize,
}

impl<'a> Problem<'a> {
    /// As [`new`](Self::new) for operands whose sequences may have lengths of their own.
    pub(crate) fn of_operands(
        [q, k, v]: &[AnyHeads<'a>; 3],
        shapes: [[usize; 4]; 3],
        options: &Options<'a>,
    ) -> Result<Self> {
        let mut problem = Self::new(shapes[0], shapes[1], shapes[2], &Options { key_lengths: None, ..*options })?;
        (problem.query_lengths, problem.own_key_lengths) = (q.lengths(), k.lengths());
        for batch in 0..problem.batch {
            check_axis("v", "seq", k.lengths().get(batch), v.lengths().get(batch))?;
            if matches!((k.lengths(), v.lengths()), (Lengths::Same(_), Lengths::Same(_))) {
                break;
            }
        }
        let own = |batch| problem.own_key_lengths.get(batch);
        problem.key_lengths = checked_key_lengths(options.key_lengths, problem.batch, own)?;
        Ok(problem)
    }

    /// Checks the shapes (batch, heads, seq, dim) of `q`, `k` and `v` against each other and the options against them.
    /// An option's level and precision are not looked at. Does not allocate.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadGroups`], [`Error::NoDefaultScale`], [`Error::Length`] or [`Error::Value`].
    pub(crate) fn new(
        q_shape: [usize; 4],
        k_shape: [usize; 4],
        v_shape: [usize; 4],
        options: &Options<'a>,
    ) -> Result<Self> {
        let [batch, num_heads, seqlen_q, head_dim] = q_shape;
        let [_, num_kv_heads, seqlen_k, _] = k_shape;
        check_axis("k", "batch", batch, k_shape[0])?;
        check_axis("k", "dim", head_dim, k_shape[3])?;
        check_axis("v", "batch", batch, v_shape[0])?;
        check_axis("v", "heads", num_kv_heads, v_shape[1])?;
        check_axis("v", "seq", seqlen_k, v_shape[2])?;
        // `None` without KV heads, which is right only without query heads.
        if num_heads.checked_rem(num_kv_heads).unwrap_or(num_heads) != 0 {
            return Err(Error::HeadGroups { num_heads, num_kv_heads });
        }
        let scores = [batch, num_heads, seqlen_q, seqlen_k];
        let (mut masks, mut biases) = ([None; 2], [None; 2]);
        for i in 0..2 {
            masks[i] = options.masks[i].map(|mask| Ok((mask.broadcast(scores)?, mask.attend_value()))).transpose()?;
            biases[i] = options.biases[i].map(|bias| bias.broadcast(scores)).transpose()?;
        }
        Ok(Self {
            batch,
            num_heads,
            group: num_heads.checked_div(num_kv_heads).unwrap_or(0),
            seqlen_q,
            seqlen_k,
            query_lengths: Lengths::Same(seqlen_q),
            own_key_lengths: Lengths::Same(seqlen_k),
            head_dim,
            head_dim_v: v_shape[3],
            softmax_scale: checked_scale(options.softmax_scale, head_dim)?,
            softcap: checked_softcap(options.softcap)?,
            masks,
            biases,
            alibi: checked_alibi(options.alibi, num_heads)?,
            sinks: checked_sinks(options.sinks, num_heads)?,
            key_lengths: checked_key_lengths(options.key_lengths, batch, |_| seqlen_k)?,
            causal: options.causal,
            window: options.window,
            keep_first: if options.window.is_some() { options.keep_first } else { 0 },
        })
    }

    /// Shape of the scores and weights, (batch, heads, seqlen_q, seqlen_k).
    pub(crate) fn scores_shape(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.seqlen_q, self.seqlen_k]
    }

    /// The KV head that a query head reads.
    pub(crate) fn kv_head(&self, head: usize) -> usize {
        head / self.group
    }

    /// Keys in use of a batch item.
    pub(crate) fn key_length(&self, batch: usize) -> usize {
        self.key_lengths.map_or_else(|| self.own_key_lengths.get(batch), |lengths| lengths[batch])
    }

    /// Queries of a batch item.
    pub(crate) fn query_length(&self, batch: usize) -> usize {
        self.query_lengths.get(batch)
    }

    /// The key that a query stands beside, which may lie far outside the keys there are. Exact: no `isize` offset and
    /// no `usize` index or window overflows `i128`.
    pub(crate) fn position(&self, diagonal: Diagonal, batch: usize, query: usize) -> i128 {
        query as i128 + diagonal.offset(self.query_length(batch), self.key_length(batch)) as i128
    }

    /// What causality, window and key length let the queries of a batch item see.
    pub(crate) fn band(&self, batch: usize) -> Band {
        let shift = |diagonal| self.position(diagonal, batch, 0);
        let causal = self.causal.map(|diagonal| shift(diagonal) + 1);
        let (mut from, mut to) = (None, causal);
        if let Some(Window { left, right, diagonal }) = self.window {
            from = left.map(|left| shift(diagonal) - left as i128);
            let right = right.map(|right| shift(diagonal) + right as i128 + 1);
            to = to.into_iter().chain(right).min();
        }
        Band { len: self.key_length(batch), from, to, keep: self.keep_first }
    }

    /// The keys that causality, window and key length let a query see.
    pub(crate) fn keys(&self, batch: usize, query: usize) -> impl Iterator<Item = usize> + use<> {
        let (lo, hi) = self.band(batch).range(query);
        (0..self.keep_first.min(lo)).chain(lo..hi)
    }

    /// Whether causality, window, key length, mask and bias all let a query see a key.
    pub(crate) fn visible(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        let index = [batch, head, query, key];
        let (lo, hi) = self.band(batch).range(query);
        key < hi
            && (key >= lo || key < self.keep_first)
            && self.masks().all(|(mask, attend)| mask.get(index) == *attend)
            && self.biases().all(|bias| bias.get(index) != f32::NEG_INFINITY)
    }

    /// The masks, each with the value that lets a key be seen.
    pub(crate) fn masks(&self) -> impl Iterator<Item = &(Broadcast<'a, bool>, bool)> {
        self.masks.iter().flatten()
    }

    /// The biases.
    pub(crate) fn biases(&self) -> impl Iterator<Item = &Broadcast<'a, f32>> {
        self.biases.iter().flatten()
    }
}

/// Elements of a packed array with the leading axes (batch, heads, seq) and perhaps a fourth, which axes of stride 0 in
/// the operands may make longer than any memory.
pub(crate) fn packed_len<const N: usize>(operand: &'static str, shape: [usize; N]) -> Result<usize> {
    const AXES: [&str; 4] = ["batch", "heads", "seq", "last"];
    let mut len = 1usize;
    for axis in (0..N).rev().filter(|_| !shape.contains(&0)) {
        let (size, stride) = (shape[axis], len);
        // No element is larger than an f64.
        len = stride
            .checked_mul(size)
            .filter(|&len| len <= isize::MAX as usize / size_of::<f64>())
            .ok_or(Error::Overflow { operand, axis: AXES.get(axis).copied().unwrap_or("axis"), size, stride })?;
    }
    Ok(if shape.contains(&0) { 0 } else { len })
}

/// That a shape is the expected one.
pub(crate) fn check_shape<const N: usize>(
    operand: &'static str,
    expected: [usize; N],
    actual: [usize; N],
    axes: [&'static str; N],
) -> Result<()> {
    match (0..N).find(|&axis| expected[axis] != actual[axis]) {
        None => Ok(()),
        Some(i) => Err(Error::Shape { operand, axis: axes[i], expected: expected[i], actual: actual[i] }),
    }
}

fn check_axis(operand: &'static str, axis: &'static str, expected: usize, actual: usize) -> Result<()> {
    if expected == actual { Ok(()) } else { Err(Error::Shape { operand, axis, expected, actual }) }
}

/// One element for each of `expected` heads or batch items.
fn check_length<T>(operand: &'static str, list: &[T], expected: usize) -> Result<()> {
    let actual = list.len();
    if expected == actual { Ok(()) } else { Err(Error::Length { operand, expected, actual }) }
}

/// That no value is bad.
fn check_values(
    option: &'static str,
    expected: &'static str,
    values: &[f32],
    good: impl Fn(f32) -> bool,
) -> Result<()> {
    match values.iter().find(|&&x| !good(x)) {
        None => Ok(()),
        Some(&bad) => Err(Error::Value { option, expected, actual: bad.into() }),
    }
}

fn checked_scale(scale: Option<f32>, head_dim: usize) -> Result<f32> {
    match scale {
        None if head_dim == 0 => Err(Error::NoDefaultScale),
        // Rounded once: f64 has the digits to spare.
        None => Ok((head_dim as f64).sqrt().recip() as f32),
        Some(scale) => check_values("softmax_scale", "finite", &[scale], f32::is_finite).map(|()| scale),
    }
}

fn checked_softcap(softcap: Option<f32>) -> Result<Option<f32>> {
    if let Some(cap) = softcap {
        check_values("softcap", "positive and finite", &[cap], |cap| cap > 0.0 && cap.is_finite())?;
    }
    Ok(softcap)
}

type Alibi<'a> = Option<(&'a [f32], Diagonal)>;

fn checked_alibi(alibi: Alibi<'_>, num_heads: usize) -> Result<Alibi<'_>> {
    if let Some((slopes, _)) = alibi {
        check_length("alibi", slopes, num_heads)?;
        check_values("alibi", "finite slopes", slopes, f32::is_finite)?;
    }
    Ok(alibi)
}

fn checked_sinks(sinks: Option<&[f32]>, num_heads: usize) -> Result<Option<&[f32]>> {
    if let Some(sinks) = sinks {
        check_length("sinks", sinks, num_heads)?;
        check_values("sinks", "finite or -inf", sinks, |sink| sink < f32::INFINITY)?;
    }
    Ok(sinks)
}

fn checked_key_lengths(
    lengths: Option<&[usize]>,
    batch: usize,
    own: impl Fn(usize) -> usize,
) -> Result<Option<&[usize]>> {
    if let Some(lengths) = lengths {
        check_length("key_lengths", lengths, batch)?;
        if let Some((_, &bad)) = lengths.iter().enumerate().find(|&(batch, &len)| len > own(batch)) {
            return Err(Error::Value { option: "key_lengths", expected: "at most seqlen_k", actual: bad as f64 });
        }
    }
    Ok(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bias, Mask, Matrix};

    const MAX: usize = usize::MAX;

    fn problem<'a>(l: usize, s: usize, options: &Options<'a>) -> Problem<'a> {
        Problem::new([1, 1, l, 4], [1, 1, s, 4], [1, 1, s, 4], options).unwrap()
    }

    /// The definition, key by key.
    fn allowed(p: &Problem<'_>, query: usize, key: usize) -> bool {
        let len = p.key_lengths.map_or(p.seqlen_k, |lengths| lengths[0]);
        let (key, len) = (key as i128, len as i128);
        let position = |diagonal| {
            query as i128
                + match diagonal {
                    Diagonal::TopLeft => 0,
                    Diagonal::BottomRight => len - p.seqlen_q as i128,
                    Diagonal::Offset(offset) => offset as i128,
                }
        };
        key < len
            && p.causal.is_none_or(|diagonal| key <= position(diagonal))
            && p.window.is_none_or(|Window { left, right, diagonal }| {
                (left.is_none_or(|left| key >= position(diagonal) - left as i128) || key < p.keep_first as i128)
                    && right.is_none_or(|right| key <= position(diagonal) + right as i128)
            })
    }

    fn check_all_queries(p: &Problem<'_>) {
        let mut before = (0, 0);
        for start in 0..=p.seqlen_q {
            let sum: usize = (start..p.seqlen_q).map(|query| p.keys(0, query).count()).sum();
            assert_eq!(p.band(0).pairs(start..p.seqlen_q), sum as u64, "{p:?} from {start}");
        }
        for query in 0..p.seqlen_q {
            let (lo, hi) = p.band(0).range(query);
            assert!(lo <= hi && hi <= p.seqlen_k, "{p:?} query {query}: {lo}..{hi}");
            assert!(query == 0 || (lo >= before.0 && hi >= before.1), "{p:?} query {query}: ends fall");
            before = (lo, hi);
            for key in 0..p.seqlen_k {
                let expected = allowed(p, query, key);
                let listed = p.keys(0, query).any(|seen| seen == key);
                assert_eq!(listed, expected, "{p:?} query {query} key {key}: {lo}..{hi}");
                assert_eq!(p.visible(0, 0, query, key), expected);
            }
        }
    }

    #[test]
    fn the_band_is_the_definition() {
        let offsets = [isize::MIN, isize::MIN + 1, -6, -2, -1, 0, 1, 3, 6, isize::MAX - 1, isize::MAX];
        let mut diagonals = vec![Diagonal::TopLeft, Diagonal::BottomRight];
        diagonals.extend(offsets.map(Diagonal::Offset));
        let sides = [None, Some(0), Some(1), Some(3), Some(MAX)];
        let mut windows = vec![None];
        for &diagonal in &diagonals {
            for left in sides {
                windows.extend(sides.map(|right| Some(Window { left, right, diagonal })));
            }
        }
        for (l, s) in (0..=4).flat_map(|l| (0..=4).map(move |s| (l, s))) {
            for len in 0..=s {
                let lengths = [len];
                let base = Options::new().key_lengths(&lengths);
                for causal in diagonals.iter().map(|&d| Some(d)).chain([None]) {
                    for &window in &windows {
                        for keep_first in [0, 1, MAX] {
                            check_all_queries(&problem(l, s, &Options { causal, window, keep_first, ..base }));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_of_broadcast_axes_do_not_overflow() {
        let huge = [MAX; 4];
        let slopes = [1.0];
        let options = Options::new().causal(Diagonal::BottomRight).alibi(&slopes, Diagonal::Offset(isize::MAX));
        let p = Problem::new([MAX, 1, MAX, MAX], [MAX, 1, MAX, MAX], [MAX, 1, MAX, MAX], &options).unwrap();
        assert_eq!(p.band(MAX - 1).range(MAX - 1), (0, MAX));
        assert_eq!(p.position(Diagonal::Offset(isize::MAX), 0, MAX - 1), MAX as i128 - 1 + isize::MAX as i128);
        let window = Window { left: Some(MAX), right: Some(MAX), diagonal: Diagonal::Offset(isize::MIN) };
        let p = Problem::new(huge, huge, huge, &Options::new().window(window)).unwrap();
        assert_eq!(p.band(0).range(0), (0, isize::MAX as usize + 1));
        assert_eq!(p.band(0).range(MAX - 1), (0, MAX));
    }

    #[test]
    fn packed_len_is_checked() {
        assert_eq!(packed_len("lse", [2, 3, 5]), Ok(30));
        assert_eq!(packed_len("out", [MAX, MAX, MAX, 0]), Ok(0));
        assert_eq!(packed_len("out", [0, MAX, MAX, 1]), Ok(0));
        let error = |axis, size, stride| Err(Error::Overflow { operand: "out", axis, size, stride });
        assert_eq!(packed_len("out", [2, MAX / 2, 2, 3]), error("heads", MAX / 2, 6));
        assert_eq!(packed_len("out", [1, 1, 1, MAX]), error("last", MAX, 1));
    }

    #[test]
    fn mask_and_bias_hide_too() {
        let seen = [true, false, true, true];
        let table = [0.0, f32::MIN, f32::NEG_INFINITY, f32::NAN];
        let mask = Matrix::contiguous(&seen, [1, 4]).unwrap();
        let bias = Bias::new(Matrix::contiguous(&table, [1, 4]).unwrap()).unwrap();
        let see = |options: Options<'_>| [0, 1, 2, 3].map(|key| problem(2, 4, &options).visible(0, 0, 1, key));
        let options = Options::new();
        assert_eq!(see(options.mask(Mask::attend(mask).unwrap())), seen);
        assert_eq!(see(options.mask(Mask::ignore(mask).unwrap())), seen.map(|x| !x));
        assert_eq!(see(options.bias(bias)), [true, true, false, true]);
        let all = options.mask(Mask::attend(mask).unwrap()).bias(bias).causal(Diagonal::TopLeft);
        assert_eq!(see(all), [true, false, false, false]);
    }

    #[test]
    fn heads_and_positions() {
        let lengths = [3];
        let options = Options::new().alibi(&[0.5; 6], Diagonal::BottomRight).key_lengths(&lengths);
        let p = Problem::new([1, 6, 2, 4], [1, 2, 5, 4], [1, 2, 5, 7], &options).unwrap();
        assert_eq!((p.group, p.head_dim_v, p.softmax_scale), (3, 7, 0.5));
        assert_eq!(p.scores_shape(), [1, 6, 2, 5]);
        assert_eq!([0, 2, 3, 5].map(|head| p.kv_head(head)), [0, 0, 1, 1]);
        // Query 1 stands at key 2, the last of three.
        assert_eq!(p.position(Diagonal::BottomRight, 0, 1), 2);
    }

    #[test]
    fn shapes_are_checked_axis_by_axis() {
        let (q, k, v) = ([2, 6, 5, 8], [2, 3, 7, 8], [2, 3, 7, 4]);
        let options = Options::new();
        let change = |shape: [usize; 4], axis: usize| core::array::from_fn(|i| shape[i] + usize::from(i == axis));
        let cases: [(_, _, _, &str, &str); 5] = [
            (q, change(k, 0), v, "k", "batch"),
            (q, change(k, 3), v, "k", "dim"),
            (q, k, change(v, 0), "v", "batch"),
            (q, k, change(v, 1), "v", "heads"),
            (q, k, change(v, 2), "v", "seq"),
        ];
        assert!(Problem::new(q, k, v, &options).is_ok());
        for (q, k, v, name, which) in cases {
            match Problem::new(q, k, v, &options) {
                Err(Error::Shape { operand, axis, expected, actual }) => {
                    assert_eq!((operand, axis, actual), (name, which, expected + 1));
                }
                other => panic!("{name} {which}: {other:?}"),
            }
        }
    }

    #[test]
    fn head_groups() {
        let new = |h: usize, kv: usize| Problem::new([1, h, 1, 1], [1, kv, 1, 1], [1, kv, 1, 1], &Options::new());
        for (h, kv) in [(5, 2), (2, 4), (1, 0)] {
            assert_eq!(new(h, kv).unwrap_err(), Error::HeadGroups { num_heads: h, num_kv_heads: kv });
        }
        for (h, kv, group) in [(6, 2, 3), (4, 4, 1), (0, 3, 0), (0, 0, 0)] {
            assert_eq!(new(h, kv).unwrap().group, group);
        }
    }

    #[test]
    fn options_are_checked() {
        fn new<'a>(dim: usize, options: &Options<'a>) -> Result<Problem<'a>> {
            Problem::new([2, 4, 3, dim], [2, 2, 5, dim], [2, 2, 5, 1], options)
        }
        let none = Options::new();
        assert_eq!(new(0, &none).unwrap_err(), Error::NoDefaultScale);
        assert!(new(0, &none.softmax_scale(0.0)).is_ok());
        let value = |options: &Options<'_>, name: &str| match new(8, options) {
            Err(Error::Value { option, .. }) => assert_eq!(option, name),
            other => panic!("{name}: {other:?}"),
        };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            value(&none.softmax_scale(bad), "softmax_scale");
            value(&none.softcap(bad), "softcap");
            value(&none.alibi(&[0.0, 0.0, bad, 0.0], Diagonal::TopLeft), "alibi");
        }
        value(&none.softcap(0.0), "softcap");
        value(&none.softcap(-1.0), "softcap");
        value(&none.sinks(&[0.0, f32::NAN, 0.0, 0.0]), "sinks");
        value(&none.sinks(&[0.0, f32::INFINITY, 0.0, 0.0]), "sinks");
        value(&none.key_lengths(&[5, 6]), "key_lengths");
        assert!(new(8, &none.sinks(&[f32::NEG_INFINITY; 4]).key_lengths(&[5, 0]).softmax_scale(-1.0)).is_ok());
        let length = |options: &Options<'_>, name: &'static str, expected, actual| {
            assert_eq!(new(8, options).unwrap_err(), Error::Length { operand: name, expected, actual });
        };
        length(&none.alibi(&[0.0; 3], Diagonal::TopLeft), "alibi", 4, 3);
        length(&none.sinks(&[0.0; 5]), "sinks", 4, 5);
        length(&none.key_lengths(&[1]), "key_lengths", 2, 1);
        let (seen, table) = ([true; 4], [0.0; 6]);
        let mask = Mask::attend(Matrix::contiguous(&seen, [1, 4]).unwrap()).unwrap();
        let bias = Bias::new(Matrix::contiguous(&table, [6, 1]).unwrap()).unwrap();
        let shape = |operand, axis, expected, actual| Error::Shape { operand, axis, expected, actual };
        assert_eq!(new(8, &none.mask(mask)).unwrap_err(), shape("mask", "seqlen_k", 5, 4));
        assert_eq!(new(8, &none.bias(bias)).unwrap_err(), shape("bias", "seqlen_q", 3, 6));
    }
}
