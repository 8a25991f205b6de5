//! How far a result may be from the reference.
//!
//! A naive `f32` kernel's error in one element is a matter of luck (it can be 0), so 2x that error cannot be the tolerance of
//! an element; `precision_is_asked_for` compares the two in aggregate. An element is judged by what rounding can do to it:
//!
//! * A score `scale * q.k` of `D` products moves by about `u (2 + sqrt(D)) |scale| |q|.|k|` (u = 2^-24; a random walk of `D`
//!   roundings, of partial sums no larger than `|q|.|k|`, and one each for scale, its own rounding and the exponent's factor).
//!   It is proportional to the score's size: scores of 1e6 are known to 0.1. Softcap shrinks that by its slope;
//!   softcap, ALiBi and bias add 4 u of the terms.
//! * Moving the score of key j by `d_j` and the largest by `d_top` changes the ratio of their weights by `exp(d_j + d_top)`. A
//!   weight `w_j` changes by no more than `min(1, w_j exp(x)) min(1, 1.3 x)`, `x = d_j + d_top`, summed over the keys, and the
//!   output by that times the largest visible `|V|`.
//! * Summing `S` probabilities and products adds `u (8 + sqrt(S))`, relative to the largest visible `|V|`.
//! * Probabilities below 2^-126 are flushed to 0, and the output is rounded once to its type.

use core::fmt::Display;

use polyhead::{Level, reference::Attention};

use super::{Call, Dtype, Results, is_close};

const U: f64 = 1.0 / (1u64 << 24) as f64;

/// What rounding can do to a row of scores.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// Of a weight, and of the output relative to `v_max`.
    weight: f64,
    lse: f64,
    /// Largest absolute value of V at a visible key.
    v_max: f64,
}

/// The reference's results and their tolerances.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) attention: Attention,
    pub(crate) averaged: Vec<f64>,
    rows: Vec<Row>,
}

/// Rounding unit of dot products, and how far a probability is from `f32`'s, relative to itself: where AMX multiplies bf16 (design.md,
/// section 3), an f16 is two bf16 terms whose smallest product is dropped, and bf16 values meet probabilities rounded to bf16.
fn units(call: &Call, level: Level) -> (f64, f64) {
    let [q, k, v, _] = call.types;
    if level.name() != "amx" {
        return (U, 0.0);
    }
    let score = if q == Dtype::F16 || k == Dtype::F16 { 2f64.powi(-16) } else { U };
    let value = match v {
        Dtype::Bf16 => 1.1 * 2f64.powi(-9),
        Dtype::F16 => 2f64.powi(-15),
        Dtype::F32 => 0.0,
    };
    (score, value)
}

/// Relative error of exponentials beyond rounding: where they become bf16 in the end, they are as exact as that asks for.
fn exponential(call: &Call, level: Level) -> f64 {
    if level.name() == "amx" && call.types[..3] == [Dtype::Bf16; 3] { 2f64.powi(-13) } else { 0.0 }
}

impl Expected {
    pub(crate) fn new(call: &Call) -> Self {
        let attention = call.reference();
        let rows = call.rows().enumerate().map(|(at, row)| Row::new(call, &attention, at, row)).collect();
        Self { averaged: attention.averaged_weights(), attention, rows }
    }

    /// Tolerances of weights and LSE of a row on a level.
    fn tolerance(&self, call: &Call, level: Level, row: usize) -> (f64, f64) {
        let (score, value) = units(call, level);
        let sums = 8.0 + (call.shape.seqlen_k as f64).sqrt();
        let Row { weight, lse, .. } = self.rows[row];
        let flushed = call.shape.seqlen_k as f64 * f64::from(f32::MIN_POSITIVE);
        (
            weight * score / U + value + U * sums + flushed,
            lse * score / U + exponential(call, level) + U * (sums + 2.0 * self.attention.lse[row].abs()),
        )
    }

    /// Asserts that out, and LSE and weights if there are any, are as expected.
    #[track_caller]
    pub(crate) fn check(&self, call: &Call, level: Level, results: &Results, context: impl Display) {
        let width = call.shape.head_dim_v;
        let (relative, absolute) = call.types[3].unit();
        for (at, row) in call.rows().enumerate() {
            let (weight, lse) = self.tolerance(call, level, at);
            let (out, lse_is, weights) = results.row(&call.shape, row);
            let say = |what: &str, i: usize, is: f32, expected: f64, tolerance: f64| {
                panic!(
                    "{context} on {} of {:?}: {what}[{i}] of row {row:?} is {is:e} instead of {expected:e}, allowed {tolerance:e}; {:?} {:?}",
                    level.name(),
                    call.types,
                    call.shape,
                    call.options
                )
            };
            for (i, (&is, &expected)) in out.iter().zip(&self.attention.out[at * width..]).enumerate() {
                let tolerance = self.rows[at].v_max * weight + absolute;
                if !is_close(is, expected, tolerance, relative) {
                    say("out", i, is, expected, tolerance);
                }
            }
            for &is in lse_is {
                if !is_close(is, self.attention.lse[at], lse, 0.0) {
                    say("lse", 0, is, self.attention.lse[at], lse);
                }
            }
            for (i, (&is, &expected)) in
                weights.iter().zip(&self.attention.weights[at * call.shape.seqlen_k..]).enumerate()
            {
                let [b, h, query] = row;
                let fits = is_close(is, expected, weight, 0.0) && (is == 0.0 || call.sees([b, h, query, i]));
                if !fits {
                    say("weights", i, is, expected, weight);
                }
            }
        }
    }

    /// Asserts that out and averaged weights are as expected.
    #[track_caller]
    pub(crate) fn check_averaged(&self, call: &Call, level: Level, results: &Results, context: impl Display) {
        assert_eq!(results.weights.len(), call.shape.batch * call.shape.seqlen_q * call.shape.seqlen_k);
        let heads = call.shape.num_heads;
        let planes = call.shape.seqlen_q * call.shape.seqlen_k;
        for (at, &is) in results.weights.iter().enumerate() {
            let (b, i, j) = (at / planes, at % planes / call.shape.seqlen_k, at % call.shape.seqlen_k);
            let row = |h: usize| (b * heads + h) * call.shape.seqlen_q + i;
            let tolerance = (0..heads).map(|h| self.tolerance(call, level, row(h)).0).fold(0.0, f64::max);
            let hidden = (0..heads).all(|h| !call.sees([b, h, i, j]));
            // Without heads there is nothing to average: zeros.
            let expected = self.averaged.get(at).copied().unwrap_or(0.0);
            assert!(
                is_close(is, expected, tolerance, 0.0) && (is == 0.0 || !hidden),
                "{context} on {}: averaged weight of item {b} query {i} key {j} is {is:e} instead of {expected:e}, allowed {tolerance:e}; {:?} {:?}",
                level.name(),
                call.shape,
                call.options
            );
        }
    }

    /// What a call of only the queries `first..first + count` must give.
    pub(crate) fn rows_of_queries(&self, call: &Call, first: usize, count: usize) -> Self {
        fn pick<T: Copy>(data: &[T], l: usize, first: usize, count: usize, width: usize) -> Vec<T> {
            data.chunks((l * width).max(1)).flat_map(|head| head[first * width..][..count * width].to_vec()).collect()
        }
        let (l, s, dv) = (call.shape.seqlen_q, call.shape.seqlen_k, call.shape.head_dim_v);
        let mut part = self.clone();
        part.rows = pick(&self.rows, l, first, count, 1);
        part.attention.lse = pick(&self.attention.lse, l, first, count, 1);
        part.attention.out = pick(&self.attention.out, l, first, count, dv);
        part.attention.weights = pick(&self.attention.weights, l, first, count, s);
        part
    }

    /// The largest tolerance of any weight on this level, to see that a test can fail.
    pub(crate) fn loosest(&self, call: &Call, level: Level) -> f64 {
        (0..self.rows.len()).map(|row| self.tolerance(call, level, row).0).fold(0.0, f64::max)
    }
}

impl Row {
    fn new(call: &Call, attention: &Attention, at: usize, [b, h, i]: [usize; 3]) -> Self {
        let (s, d, dv) = (call.shape.seqlen_k, call.shape.head_dim, call.shape.head_dim_v);
        let weights = &attention.weights[at * s..][..s];
        let scale = call.options.softmax_scale(&call.shape).abs();
        let q = &call.q[at * d..][..d];
        let mut moves = vec![f64::NAN; s];
        let (mut top, mut v_max) = (None::<usize>, 0.0f64);
        for j in (0..s).filter(|&j| call.sees([b, h, i, j])) {
            let row = call.key_row(b, h, j);
            let k = &call.k[row * d..][..d];
            let products = || q.iter().zip(k).map(|(&x, &y)| f64::from(x) * f64::from(y));
            let size = scale * products().map(f64::abs).sum::<f64>();
            // As the cap leaves it.
            let shown = call.options.softcap.map_or(size, |cap| size.min(cap.into()));
            let mut terms = shown + call.options.alibi_at(&call.shape, [b, h, i, j]).abs();
            terms += f64::from(call.options.bias_at([b, h, i, j])).abs();
            let mut dot = (2.0 + (d as f64).sqrt()) * size * U;
            if let Some(cap) = call.options.softcap.map(f64::from) {
                // The slope of the cap where it is steepest. (Of infinite scores nothing is rounded.)
                let least = (scale * products().sum::<f64>()).abs() - dot;
                let slope = 1.0 - (least.max(0.0) / cap).tanh().powi(2);
                dot = if size == f64::INFINITY { 0.0 } else { dot * slope };
            }
            moves[j] = if terms == f64::INFINITY { 0.0 } else { dot + 4.0 * U * terms };
            if top.is_none_or(|top| weights[j] > weights[top]) {
                top = Some(j);
            }
            let v = call.v[row * dv..][..dv].iter().map(|&x| f64::from(x.abs()));
            v_max = v.filter(|x| x.is_finite()).fold(v_max, f64::max);
        }
        let Some(top) = top else { return Self::default() };
        let (mut weight, mut lse) = (0.0, 0.0);
        for j in (0..s).filter(|&j| !moves[j].is_nan()) {
            let x = moves[j] + moves[top];
            let largest = (weights[j] * x.exp()).min(1.0);
            weight += largest * (1.3 * x).min(1.0);
            lse += largest * x;
        }
        // All of the weight can go from one key to another.
        Self { weight: f64::min(weight, 2.0), lse, v_max }
    }
}
