//! The inputs: integers by SplitMix64, then conversions that round at most once and the same everywhere, so that `pytorch.py` makes
//! the same bits. Every number is a function of its place.

use half::{bf16, f16};

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The output function of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Number `at` of a seed's stream.
fn number(seed: u64, at: u64) -> u64 {
    mix(seed.wrapping_add(at.wrapping_add(1).wrapping_mul(GAMMA)))
}

/// FNV-1a.
fn seed_of(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3))
}

/// Irwin and Hall's: the sum of twelve numbers of 21 bits each. Mean 0, deviation 1, within 6, exact.
fn normal(seed: u64, at: u64) -> f64 {
    const PART: u64 = (1 << 21) - 1;
    let sum: u64 = (4 * at..4 * at + 4)
        .map(|at| {
            let bits = number(seed, at);
            (bits & PART) + (bits >> 21 & PART) + (bits >> 42 & PART)
        })
        .sum();
    (2 * sum as i64 - 12 * PART as i64) as f64 * 2f64.powi(-22)
}

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub(crate) const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The nearest value of the type.
    pub(crate) fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// The bits of a value of the type.
    fn bits(self, x: f32) -> u64 {
        match self {
            Self::F32 => x.to_bits().into(),
            Self::F16 => f16::from_f32(x).to_bits().into(),
            Self::Bf16 => bf16::from_f32(x).to_bits().into(),
        }
    }

    /// Largest relative error of rounding.
    pub(crate) fn unit(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-24),
            Self::F16 => 2f64.powi(-11),
            Self::Bf16 => 2f64.powi(-8),
        }
    }

    pub(crate) fn smallest_normal(self) -> f64 {
        match self {
            Self::F32 | Self::Bf16 => 2f64.powi(-126),
            Self::F16 => 2f64.powi(-14),
        }
    }

    /// Scale of `Distribution::Subnormal`.
    fn tiny(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-133),
            Self::F16 => 2f64.powi(-17),
            Self::Bf16 => 2f64.powi(-129),
        }
    }
}

/// What an operand holds. A row is `head_dim` elements of Q, K and V, one of B's rows, or one element of softmax's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Distribution {
    Normal {
        deviation: f64,
        mean: f64,
    },
    Uniform {
        low: f64,
        high: f64,
    },
    /// The first `of` rows, again and again.
    Repeat {
        of: usize,
        deviation: f64,
    },
    /// Row `row` holds `value` alone.
    Peak {
        row: usize,
        value: f64,
        deviation: f64,
    },
    /// Normal, times 2^-reach to 2^reach.
    Wide {
        reach: u32,
    },
    /// Normal, so small that all are subnormal in their type.
    Subnormal,
    /// Multiples of 1/8 in -4..4, and -inf for a quarter of all but the first column.
    Mask,
}

impl Distribution {
    fn element(self, seed: u64, at: usize, [rows, width]: [usize; 2], dtype: Dtype) -> f64 {
        let (place, row) = (at as u64, at / width % rows);
        match self {
            Self::Normal { deviation, mean } => mean + deviation * normal(seed, place),
            Self::Uniform { low, high } => low + (high - low) * ((number(seed, place) >> 11) as f64 * 2f64.powi(-53)),
            Self::Repeat { of, deviation } => deviation * normal(seed, (at - (row - row % of) * width) as u64),
            Self::Peak { row: peak, value, .. } if row == peak => value,
            Self::Peak { deviation, .. } => deviation * normal(seed, place),
            Self::Wide { reach } => {
                let exponent = number(!seed, place) % u64::from(2 * reach + 1);
                normal(seed, place) * 2f64.powi(exponent as i32 - reach as i32)
            }
            Self::Subnormal => normal(seed, place) * dtype.tiny(),
            Self::Mask => {
                let bits = number(seed, place);
                let hidden = bits & 3 == 0 && !at.is_multiple_of(width);
                if hidden { f64::NEG_INFINITY } else { ((bits >> 2 & 63) as f64 - 32.0) / 8.0 }
            }
        }
    }
}

/// Makes the operands of a case and a checksum of all their bits.
pub(crate) struct Inputs<'a> {
    /// Kind and name of the case.
    path: &'a str,
    dtype: Dtype,
    checksum: u64,
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(path: &'a str, dtype: Dtype) -> Self {
        Self { path, dtype, checksum: 0 }
    }

    /// `len` elements in matrices of `rows` x `width`, exact in the case's type.
    pub(crate) fn operand(&mut self, name: &str, holds: Distribution, len: usize, matrix: [usize; 2]) -> Vec<f32> {
        let (seed, dtype) = (seed_of(&format!("{}/{name}", self.path)), self.dtype);
        let element = |at| dtype.round(holds.element(seed, at, matrix, dtype) as f32);
        let data: Vec<f32> = (0..len).map(element).collect();
        let salted = |(at, &x): (u64, &f32)| mix(dtype.bits(x).wrapping_add((at + 1).wrapping_mul(GAMMA)));
        let sum = (0..).zip(&data).map(salted).fold(0, u64::wrapping_add);
        self.checksum = self.checksum.wrapping_mul(31).wrapping_add(sum);
        data
    }

    /// Of the operands so far, as the table has it.
    pub(crate) fn checksum(&self) -> String {
        format!("{:016x}", self.checksum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The first numbers of seed 1234567, as published with the generator.
        let first: Vec<u64> = (0..3).map(|at| number(1_234_567, at)).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
        // FNV-1a's own test vector.
        assert_eq!(seed_of("a"), 0xAF63_DC4C_8601_EC8C);
    }

    #[test]
    fn distributions_are_what_they_are_called() {
        let many = |holds: Distribution, dtype| -> Vec<f64> {
            Inputs::new("test", dtype).operand("x", holds, 40_000, [100, 4]).into_iter().map(f64::from).collect()
        };
        let moments = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            (mean, (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64).sqrt())
        };
        for dtype in Dtype::ALL {
            let (mean, deviation) = moments(&many(Distribution::Normal { deviation: 3.0, mean: 5.0 }, dtype));
            assert!((mean - 5.0).abs() < 0.1 && (deviation - 3.0).abs() < 0.1, "{mean} {deviation}");
            let (mean, deviation) = moments(&many(Distribution::Uniform { low: 1.0, high: 3.0 }, dtype));
            assert!((mean - 2.0).abs() < 0.02 && (deviation - 2.0 / 12f64.sqrt()).abs() < 0.02, "{mean} {deviation}");

            let x = many(Distribution::Repeat { of: 3, deviation: 1.0 }, dtype);
            assert!(x[..12] == x[12..24] && x[396..400] == x[..4] && x[400..412] != x[..12] && x[..4] != x[4..8]);
            let x = many(Distribution::Peak { row: 7, value: 2.0, deviation: 1.0 }, dtype);
            assert!(x.chunks(4).enumerate().all(|(row, x)| (x == [2.0; 4]) == (row % 100 == 7)));
            let x = many(Distribution::Wide { reach: 8 }, dtype);
            assert!(x.iter().any(|x| x.abs() > 256.0) && x.iter().any(|x| x.abs() < 0.001));
            let x = many(Distribution::Subnormal, dtype);
            assert!(x.iter().all(|x| x.abs() < dtype.smallest_normal()), "{dtype:?}");
            assert!(x.iter().filter(|&&x| x != 0.0).count() > 35_000, "{dtype:?}");
            let x = many(Distribution::Mask, dtype);
            let hidden = x.iter().filter(|x| x.is_infinite()).count();
            assert!((7000..8000).contains(&hidden) && x.iter().step_by(4).all(|x| (-4.0..4.0).contains(x)));
        }
    }
}
