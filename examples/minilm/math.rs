//! What a BERT has besides products and attention, in plain loops that the compiler vectorises.

/// Partial sums that are kept side by side: without them a sum of floats is one chain of additions.
const LANES: usize = 16;

/// Beyond this, the normal distribution function is 0 or 1 in `f32`.
const GELU_LIMIT: f32 = 5.2;
/// `(Phi(t) - 1/2) / t` is `NUMERATOR(t^2) / DENOMINATOR(t^2)` for `|t| <= GELU_LIMIT`, lowest power first: a minimax fit to
/// `Phi(t) - 1/2` (least squares, reweighted by the error until it was even), 1.0e-8 off before rounding. In `f32` arithmetic
/// `Phi` is off by 2.2e-7 at most, and exactly 0 and 1 at the limits: `tests::gelu_is_that_of_the_error_function`.
const NUMERATOR: [f32; 7] =
    [3.989422e-1, 3.265138e-2, 4.298414e-3, 1.379449e-4, 2.9541357e-6, -2.2877687e-8, 1.2679531e-10];
const DENOMINATOR: [f32; 5] = [1.0, 2.4851042e-1, 2.719515e-2, 1.6397127e-3, 5.2111478e-5];

/// `x Phi(x)` of every element, `Phi(x) = (1 + erf(x / sqrt(2))) / 2` the normal distribution function: BERT's GELU, not its `tanh`
/// approximation. The error is below `2.5e-7 |x|`.
pub(crate) fn gelu(values: &mut [f32]) {
    for x in values {
        let t = x.clamp(-GELU_LIMIT, GELU_LIMIT);
        let square = t * t;
        let phi = 0.5 + t * polynomial(&NUMERATOR, square) / polynomial(&DENOMINATOR, square);
        *x *= phi;
    }
}

/// Horner's rule.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    let mut sum = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        sum = sum * x + coefficients[i];
    }
    sum
}

/// Layer normalisation: rows of mean 0 and variance 1, times `weight`, plus `bias`.
pub(crate) struct LayerNorm {
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Vec<f32>,
    pub(crate) eps: f32,
}

impl LayerNorm {
    /// Every row of `x`.
    pub(crate) fn apply(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(self.weight.len()) {
            let count = row.len() as f32;
            let mean = sum(row, |x| x) / count;
            let variance = sum(row, |x| (x - mean) * (x - mean)) / count;
            let factor = 1.0 / (variance + self.eps).sqrt();
            for ((x, weight), bias) in row.iter_mut().zip(&self.weight).zip(&self.bias) {
                *x = (*x - mean) * factor * weight + bias;
            }
        }
    }

    /// Every row of `x + y`, into `x`.
    pub(crate) fn add_and_apply(&self, x: &mut [f32], y: &[f32]) {
        let width = self.weight.len();
        for (x, y) in x.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
            add(x, y);
            self.apply(x);
        }
    }
}

/// `to += from`.
pub(crate) fn add(to: &mut [f32], from: &[f32]) {
    for (x, y) in to.iter_mut().zip(from) {
        *x += y;
    }
}

/// The sum of the terms of all elements.
#[inline(always)]
fn sum(values: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += term(x);
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|&x| term(x)).sum::<f32>()
}

/// The mean of a sentence's rows, scaled to length 1: the sentence's embedding.
pub(crate) fn pool(rows: &[f32], embedding: &mut [f32]) {
    embedding.fill(0.0);
    for row in rows.chunks_exact(embedding.len()) {
        add(embedding, row);
    }
    // The direction of the sum is that of the mean.
    let factor = 1.0 / sum(embedding, |x| x * x).sqrt().max(f32::MIN_POSITIVE);
    for x in embedding {
        *x *= factor;
    }
}

/// The cosine of the angle between two vectors of length 1.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The normal distribution function. The terms of the series are positive, so that nothing cancels.
    fn phi(x: f64) -> f64 {
        let (mut term, mut sum, mut n) = (x.abs(), 0.0, 1.0);
        while term > 1e-17 * sum {
            sum += term;
            n += 2.0;
            term *= x * x / n;
        }
        let half = sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        0.5 + half.copysign(x)
    }

    #[test]
    fn gelu_is_that_of_the_error_function() {
        // Table values, so that the series is tested too.
        for (x, expected) in [(0.0, 0.5), (1.0, 0.841_344_746_068_542_9), (-2.0, 0.022_750_131_948_179_2)] {
            assert!((phi(x) - expected).abs() < 1e-15, "{x}: {} instead of {expected}", phi(x));
        }
        let steps = 1 << 20;
        for i in 0..=steps {
            let x = (i as f32 / steps as f32 - 0.5) * 20.0;
            let mut values = [x];
            gelu(&mut values);
            let expected = f64::from(x) * phi(x.into());
            let error = (f64::from(values[0]) - expected).abs();
            assert!(error <= 2.5e-7 * f64::from(x.abs()), "gelu({x}) is {} instead of {expected}", values[0]);
        }
    }

    #[test]
    fn gelu_far_from_zero_is_the_identity_or_zero() {
        let mut values = [5.2f32, 7.5, 1e30, f32::INFINITY, -5.2, -7.5, -1e30, f32::NAN];
        gelu(&mut values);
        assert_eq!(values[..4], [5.2, 7.5, 1e30, f32::INFINITY]);
        assert_eq!(values[4..7], [0.0; 3]);
        assert!(values[7].is_nan());
    }

    /// Noise in -1..1.
    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn layer_norm_is_that_of_f64() {
        // Widths around that of the partial sums; a row that is far from 0.
        for width in [1, 7, 15, 16, 17, 384] {
            let norm = LayerNorm { weight: noise(width, 1), bias: noise(width, 2), eps: 1e-12 };
            let (mut x, y) = (noise(3 * width, 3), noise(3 * width, 4));
            x[width..2 * width].iter_mut().for_each(|x| *x += 30.0);
            let expected: Vec<f64> = (0..3 * width)
                .map(|i| {
                    let start = i / width * width;
                    // The sum that is normalised is that of f32.
                    let row: Vec<f64> = (start..start + width).map(|i| (x[i] + y[i]).into()).collect();
                    let mean = row.iter().sum::<f64>() / width as f64;
                    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
                    let normal = (row[i - start] - mean) / (variance + f64::from(norm.eps)).sqrt();
                    normal * f64::from(norm.weight[i - start]) + f64::from(norm.bias[i - start])
                })
                .collect();
            norm.add_and_apply(&mut x, &y);
            for (i, (&x, expected)) in x.iter().zip(expected).enumerate() {
                // A row around 30 has rounding errors of 30 * 2^-24 in its mean, in units of a deviation of about 1.
                let allowed = if i / width == 1 { 1e-5 } else { 2e-6 };
                assert!((f64::from(x) - expected).abs() <= allowed, "width {width}, {i}: {x} instead of {expected}");
            }
        }
    }

    #[test]
    fn pooling_is_the_direction_of_the_mean() {
        let mut embedding = [f32::NAN; 2];
        pool(&[1.0, 2.0, 5.0, 6.0], &mut embedding);
        assert!((embedding[0] - 0.6).abs() < 1e-7 && (embedding[1] - 0.8).abs() < 1e-7, "{embedding:?}");
        assert!((cosine(&embedding, &[0.8, 0.6]) - 0.96).abs() < 1e-6);
    }
}
