//! The functions that kernels are made of, over every `f32`.

use core::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use polyhead::Level;
use polyhead::probe::{self, Function};
use rayon::prelude::*;

use crate::errors::ulps;

/// Bit patterns that are taken together.
const PIECE: u64 = 1 << 16;
/// Every how many-th pattern `--quick` takes: a prime, so that the low bits vary.
const QUICK_STEP: u64 = 4099;

/// A function, where it is judged, and what its error may be.
pub(crate) struct Target {
    /// As `pytorch.json` has it.
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    pub(crate) domain: &'static str,
    how: How,
    exact: fn(f64) -> f64,
    /// Only x <= 0 counts, where the result is this at least (or NaN). Smaller results may be 0, and must not be above it.
    least: Option<f64>,
    /// In ulp; with an FMA instruction, and on `Level::Portable`, which may have none.
    ulp: [f64; 2],
    /// Absolute error, which is that relative to the row's largest probability.
    absolute: f64,
}

#[derive(Clone, Copy)]
enum How {
    Probe(Function),
    /// `2^(x log2 e)`.
    Attention,
}

/// The limits in ulp are those of the kernels' own tests, measured over every `f32` (`src/kernel/exp.rs`).
pub(crate) const TARGETS: [Target; 5] = [
    Target {
        name: "exp",
        description: "e^x",
        domain: "every f32",
        how: How::Probe(Function::Exp),
        exact: f64::exp,
        least: None,
        ulp: [0.9, 1.2],
        absolute: f64::INFINITY,
    },
    Target {
        name: "exp_nonpositive",
        description: "e^x of softmax",
        domain: "x <= 0, e^x >= 2^-126",
        how: How::Probe(Function::ExpNonpositive),
        exact: f64::exp,
        least: Some(f32::MIN_POSITIVE as f64),
        ulp: [0.9, 1.2],
        absolute: f64::INFINITY,
    },
    Target {
        name: "exp_attention",
        description: "e^x of attention, 2^(x log2 e)",
        domain: "x <= 0, e^x >= 2^-125",
        how: How::Attention,
        exact: f64::exp,
        least: Some(2.0 * f32::MIN_POSITIVE as f64),
        // x log2 e is rounded, by 2^-24 of itself at most, and the constant is off by 0.23 * 2^-24: relative to e^x that is
        // 1.23 * 2^-24 |x|, in ulp at most 1.23 * 87.3; and the error of 2^x.
        ulp: [108.4, 108.7],
        // 1.25 ulp below 1, and what is relative to |x| at its largest, 1.23 * 2^-24 / e.
        absolute: f32::EPSILON as f64,
    },
    Target {
        name: "exp2_nonpositive",
        description: "2^x",
        domain: "x <= 0, 2^x >= 2^-126",
        how: How::Probe(Function::Exp2Nonpositive),
        exact: f64::exp2,
        least: Some(f32::MIN_POSITIVE as f64),
        ulp: [0.96, 1.25],
        absolute: f64::INFINITY,
    },
    Target {
        name: "tanh",
        description: "tanh x",
        domain: "every f32",
        how: How::Probe(Function::Tanh),
        exact: f64::tanh,
        least: None,
        ulp: [1.4; 2],
        absolute: f64::INFINITY,
    },
];

impl Target {
    /// Whether the absolute error says something: the results are probabilities.
    pub(crate) fn has_absolute(&self) -> bool {
        self.least.is_some()
    }

    pub(crate) fn ulp_allowed(&self, level: Level) -> f64 {
        self.ulp[usize::from(level == Level::Portable)]
    }

    pub(crate) fn allows(&self, level: Level, worst: &Worst) -> bool {
        worst.ulp <= self.ulp_allowed(level) && worst.absolute <= self.absolute
    }

    /// Bit patterns of all numbers that count.
    fn patterns(&self) -> Range<u64> {
        // The sign is the upper bit. +0 is left out, -0 is not.
        if self.least.is_some() { 1 << 31..1 << 32 } else { 0..1 << 32 }
    }

    fn compute(&self, level: Level, x: &[f32], y: &mut [f32]) {
        match self.how {
            How::Probe(function) => probe::apply(level, function, x, y),
            How::Attention => probe::exp(level, x, y),
        }
    }

    /// The largest errors on each level over every pattern, or a sample of them.
    pub(crate) fn sweep(&self, levels: &[Level], quick: bool) -> Vec<Worst> {
        let step = if quick { QUICK_STEP } else { 1 };
        let Range { start, end } = self.patterns();
        let pieces = (end - start).div_ceil(PIECE * step);
        let (done, progress) = (AtomicUsize::new(0), pieces as usize / 10);
        let none = || vec![Worst::default(); levels.len()];
        let piece = |piece: u64| {
            let first = start + piece * PIECE * step;
            let last = end.min(first + PIECE * step);
            let x: Vec<f32> = (first..last).step_by(step as usize).map(|bits| f32::from_bits(bits as u32)).collect();
            let worst = self.errors(levels, &x);
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if progress > 100 && done % progress == 0 && done / progress < 10 {
                eprintln!("accuracy: {} of every f32, {} %", self.description, 10 * done / progress);
            }
            worst
        };
        (0..pieces).into_par_iter().map(piece).reduce(none, |a, b| a.into_iter().zip(b).map(|(a, b)| a.or(b)).collect())
    }

    fn errors(&self, levels: &[Level], x: &[f32]) -> Vec<Worst> {
        let exact: Vec<f64> = x.iter().map(|&x| (self.exact)(x.into())).collect();
        let mut y = vec![f32::NAN; x.len()];
        let errors = |&level: &Level| {
            self.compute(level, x, &mut y);
            let mut worst = Worst::default();
            x.iter().zip(&y).zip(&exact).for_each(|((&x, &y), &exact)| worst.add(x, y, exact, self.least));
            worst
        };
        levels.iter().map(errors).collect()
    }
}

/// The largest error in ulp and where it is, and the largest absolute error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Worst {
    pub(crate) ulp: f64,
    pub(crate) at: f32,
    pub(crate) absolute: f64,
}

impl Worst {
    fn add(&mut self, x: f32, y: f32, exact: f64, least: Option<f64>) {
        let ulp = match least {
            Some(least) if exact < least => {
                if (0.0..=1.0001 * least).contains(&f64::from(y)) {
                    return;
                }
                f64::INFINITY
            }
            _ => ulps(y, exact),
        };
        if ulp > self.ulp {
            (self.ulp, self.at) = (ulp, x);
        }
        if least.is_some() {
            self.absolute = self.absolute.max((f64::from(y) - exact).abs());
        }
    }

    fn or(self, other: Self) -> Self {
        let Self { ulp, at, .. } = if other.ulp > self.ulp { other } else { self };
        Self { ulp, at, absolute: self.absolute.max(other.absolute) }
    }
}
