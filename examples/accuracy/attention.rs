//! Attention of a case: in `f64`, naively in `f32`, and by the kernels of each level in each precision.

use polyhead::{Bias, Diagonal, Element, Heads, HeadsMut, Level, Matrix, Options, Precision, multi_head, reference};

use crate::Result;
use crate::cases::Case;
use crate::errors::Errors;
use crate::inputs::{Dtype, Inputs};
use crate::row::{Figure, Measured, allowed, allowed_high, narrow, widen, with_type};

struct Attention {
    /// batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v.
    shape: [usize; 7],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    bias: Option<Vec<f32>>,
    causal: bool,
}

pub(crate) fn measure(case: &Case, dtype: Dtype, levels: &[Level]) -> Result<Measured> {
    let shape = case.shape::<7>()?;
    let [b, h, kv, l, s, d, dv] = shape;
    let mut inputs = Inputs::new(&case.path, dtype);
    let attention = Attention {
        shape,
        q: inputs.operand("q", case.holds("q")?, b * h * l * d, [l, d]),
        k: inputs.operand("k", case.holds("k")?, b * kv * s * d, [s, d]),
        v: inputs.operand("v", case.holds("v")?, b * kv * s * dv, [s, dv]),
        bias: case.find("bias").map(|holds| inputs.operand("bias", holds, l * s, [l, s])),
        causal: case.causal,
    };
    let truth = attention.truth()?;
    let errors = |out: &[f32]| Errors::relative_to_largest(out, &truth);
    let naive = errors(&attention.naive(dtype));
    // Operands may be rounded to bf16.
    let medium = || errors(&attention.rounded_to_bf16().naive(dtype));

    let mut ours = Vec::new();
    for &level in levels {
        let run = |precision| with_type!(dtype, attention, run(level, precision));
        let highest = run(Precision::Highest)?;
        let allow = |factor| allowed(naive, factor, dtype);
        ours.push(Figure { column: level.name().into(), errors: errors(&highest), allowed: allow(2.0) });
        for precision in [Precision::High, Precision::Medium] {
            let out = run(precision)?;
            if same_bits(&out, &highest) {
                continue;
            }
            let (name, allowed) = match precision {
                Precision::Medium => ("medium", allowed(medium(), 2.0, dtype)),
                _ => ("high", allowed_high(naive, dtype)),
            };
            ours.push(Figure { column: format!("{} {name}", level.name()), errors: errors(&out), allowed });
        }
    }
    Ok(Measured { checksum: inputs.checksum(), naive, ours })
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()))
}

impl Attention {
    fn options(&self) -> polyhead::Result<Options<'_>> {
        let [_, _, _, l, s, _, _] = self.shape;
        let mut options = Options::new();
        if self.causal {
            options = options.causal(Diagonal::TopLeft);
        }
        if let Some(bias) = &self.bias {
            options = options.bias(Bias::new(Matrix::contiguous(bias, [l, s])?)?);
        }
        Ok(options)
    }

    fn truth(&self) -> polyhead::Result<Vec<f64>> {
        let [b, h, kv, l, s, d, dv] = self.shape;
        let q = Heads::bhsd(&self.q, [b, h, l, d])?;
        let (k, v) = (Heads::bhsd(&self.k, [b, kv, s, d])?, Heads::bhsd(&self.v, [b, kv, s, dv])?);
        Ok(reference::multi_head(&q, &k, &v, &self.options()?)?.out)
    }

    fn run<T: Element>(&self, level: Level, precision: Precision) -> polyhead::Result<Vec<f32>> {
        let [b, h, kv, l, s, d, dv] = self.shape;
        let (q, k, v) = (narrow::<T>(&self.q), narrow::<T>(&self.k), narrow::<T>(&self.v));
        let mut out = vec![T::default(); b * h * l * dv];
        multi_head(
            &Heads::bhsd(&q, [b, h, l, d])?,
            &Heads::bhsd(&k, [b, kv, s, d])?,
            &Heads::bhsd(&v, [b, kv, s, dv])?,
            HeadsMut::bhsd(&mut out, [b, h, l, dv])?,
            &self.options()?.level(level).precision(precision),
        )?;
        Ok(widen(out))
    }

    fn rounded_to_bf16(&self) -> Self {
        let round = |data: &[f32]| data.iter().map(|&x| Dtype::Bf16.round(x)).collect();
        Self {
            q: round(&self.q),
            k: round(&self.k),
            v: round(&self.v),
            bias: self.bias.clone(),
            shape: self.shape,
            causal: self.causal,
        }
    }

    /// As one writes it at first: `f32` throughout, dot products, sums and values in order, one rounding to the type in the end.
    fn naive(&self, dtype: Dtype) -> Vec<f32> {
        let [_, h, kv, l, s, d, dv] = self.shape;
        let scale = 1.0 / (d as f32).sqrt();
        let mut out = Vec::new();
        for (row, q) in self.q.chunks_exact(d).enumerate() {
            let (item, head, i) = (row / l / h, row / l % h, row % l);
            let first = (item * kv + head / (h / kv)) * s;
            let seen = if self.causal { s.min(i + 1) } else { s };
            let score = |j: usize| {
                let dot = q.iter().zip(&self.k[(first + j) * d..]).fold(0.0f32, |sum, (x, y)| sum + x * y);
                scale * dot + self.bias.as_ref().map_or(0.0, |bias| bias[i * s + j])
            };
            let scores: Vec<f32> = (0..seen).map(score).collect();
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let p: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum = p.iter().fold(0.0f32, |sum, p| sum + p);
            let value =
                |x: usize| p.iter().enumerate().fold(0.0f32, |sum, (j, p)| sum + p * self.v[(first + j) * dv + x]);
            out.extend((0..dv).map(|x| dtype.round(value(x) / sum)));
        }
        out
    }
}
