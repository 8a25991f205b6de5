//! What an error is: three measures, each against `f64`.

/// Errors of one result, relative; what they are relative to depends on who makes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Errors {
    pub(crate) max: f64,
    pub(crate) rms: f64,
    /// Softmax: how far the sum of a row is from 1, at most.
    pub(crate) sum: Option<f64>,
}

impl Errors {
    /// Of errors that are relative already. A NaN anywhere is the largest: infinity.
    fn of(errors: impl Iterator<Item = f64>) -> Self {
        let (mut max, mut squares, mut count) = (0.0f64, 0.0, 0usize);
        for error in errors {
            let error = if error.is_nan() { f64::INFINITY } else { error };
            max = max.max(error);
            squares += error * error;
            count += 1;
        }
        Self { max, rms: (squares / count.max(1) as f64).sqrt(), sum: None }
    }

    /// `|x - truth| / max |truth|`.
    pub(crate) fn relative_to_largest(actual: &[f32], truth: &[f64]) -> Self {
        assert_eq!(actual.len(), truth.len());
        let largest = truth.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        Self::of(actual.iter().zip(truth).map(|(&x, truth)| (f64::from(x) - truth).abs() / largest))
    }

    /// `|p - truth| / truth` over probabilities of at least 2^-126, where a truth below `smallest` counts as that; and how far
    /// the sums of rows of `columns` are from 1. Smaller probabilities may be 0, and must not be larger than 2^-125.
    pub(crate) fn of_probabilities(actual: &[f32], truth: &[f64], columns: usize, smallest: f64) -> Self {
        assert_eq!(actual.len(), truth.len());
        let least = f64::from(f32::MIN_POSITIVE);
        let error = |(&p, &truth): (&f32, &f64)| {
            let p = f64::from(p);
            match truth >= least {
                true => Some((p - truth).abs() / truth.max(smallest)),
                false if (0.0..=2.0 * least).contains(&p) => None,
                false => Some(f64::INFINITY),
            }
        };
        let distance = |row: &[f32]| (row.iter().map(|&p| f64::from(p)).sum::<f64>() - 1.0).abs();
        let sum = Self::of(actual.chunks(columns).map(distance)).max;
        Self { sum: Some(sum), ..Self::of(actual.iter().zip(truth).filter_map(error)) }
    }
}

/// Error in units of the last place of the exact result as an `f32`, subnormals included. What has to be NaN or infinite is off
/// by 0 or by infinity.
pub(crate) fn ulps(actual: f32, exact: f64) -> f64 {
    let nearest = exact as f32;
    if !nearest.is_finite() || !actual.is_finite() {
        let same = actual == nearest || (actual.is_nan() && nearest.is_nan());
        return if same { 0.0 } else { f64::INFINITY };
    }
    let exponent = (nearest.to_bits() >> 23 & 255).max(1);
    // 2^(150 - exponent), the reciprocal of the unit, made of its bits.
    (f64::from(actual) - exact).abs() * f64::from_bits(u64::from(1023 + 150 - exponent) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps_by_hand() {
        assert_eq!(ulps(1.0, 1.0), 0.0);
        assert_eq!(ulps(1.0 + f32::EPSILON, 1.0), 1.0);
        assert_eq!(ulps(-4.0, -4.0 - 2f64.powi(-22)), 0.5);
        assert_eq!(ulps(0.0, 0.0), 0.0);
        assert_eq!(ulps(f32::from_bits(3), f64::from(f32::from_bits(1))), 2.0);
        assert_eq!(ulps(f32::MIN_POSITIVE, f64::from(f32::MIN_POSITIVE) + 2f64.powi(-150)), 0.5);
        assert_eq!(ulps(f32::MAX, f64::from(f32::MAX) - 2f64.powi(103)), 0.5);
        assert_eq!(ulps(f32::INFINITY, 1e300), 0.0);
        assert_eq!(ulps(f32::MAX, 1e300), f64::INFINITY);
        assert_eq!(ulps(f32::NAN, f64::NAN), 0.0);
        assert_eq!(ulps(0.0, f64::NAN), f64::INFINITY);
        assert_eq!(ulps(f32::NAN, 0.0), f64::INFINITY);
        assert_eq!(ulps(f32::INFINITY, f64::NEG_INFINITY), f64::INFINITY);
    }

    #[test]
    fn errors_by_hand() {
        let errors = Errors::relative_to_largest(&[1.0, -8.5, 0.0], &[1.5, -8.0, 0.0]);
        assert_eq!(errors, Errors { max: 0.0625, rms: (2.0 * 0.0625f64.powi(2) / 3.0).sqrt(), sum: None });
        assert_eq!(Errors::relative_to_largest(&[f32::NAN, 1.0], &[1.0, 1.0]).max, f64::INFINITY);

        let tiny = 2f64.powi(-130);
        let errors =
            Errors::of_probabilities(&[0.5, 0.25, 0.0, 0.5, 0.5, 0.0], &[0.5, 0.5, tiny, 0.5, 0.5, tiny], 3, tiny);
        assert_eq!(errors, Errors { max: 0.5, rms: 0.25, sum: Some(0.25) });
        // A truth that is below the smallest normal number of the type.
        assert_eq!(Errors::of_probabilities(&[0.25, 0.75], &[0.125, 0.75], 2, 0.5).max, 0.25);
        assert_eq!(Errors::of_probabilities(&[1e-30, 1.0], &[tiny, 1.0], 2, tiny).max, f64::INFINITY);
    }
}
