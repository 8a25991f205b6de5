use polyhead::Element;

/// SplitMix64 (Steele, Lea and Flood 2014): seeded, the same numbers everywhere.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `[0, 1)`, of 53 bits.
    fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In `[low, high)` up to rounding.
    pub(crate) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        (f64::from(low) + self.unit() * (f64::from(high) - f64::from(low))) as f32
    }

    /// In `0..n`, or 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    /// One of the choices.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Mean 0, deviation 1 (Box and Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        // 1 - unit() is never 0.
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        (radius * (core::f64::consts::TAU * self.unit()).cos()) as f32
    }

    /// `len` normal numbers of this deviation, rounded to `T`.
    pub(crate) fn normals<T: Element>(&mut self, len: usize, deviation: f32) -> Vec<T> {
        (0..len).map(|_| T::from_f32_nearest(deviation * self.normal())).collect()
    }

    /// `len` booleans, `true` with this probability.
    pub(crate) fn bools(&mut self, len: usize, probability: f64) -> Vec<bool> {
        (0..len).map(|_| self.chance(probability)).collect()
    }
}
