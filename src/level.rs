//! The one place that asks the processor what it can do and hands out proofs of it.

use std::sync::OnceLock;

#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
use crate::arch::Neon;
use crate::arch::Portable;
#[cfg(target_arch = "x86_64")]
use crate::arch::{Avx2, Avx512};
use crate::kernel::{Lanes, Op};
use crate::{Error, Result};

/// An instruction-set tier, worst first.
///
/// ```
/// use polyhead::Level;
/// let best = Level::detect();
/// assert!(Level::available().contains(&best) && Level::available().contains(&Level::Portable));
/// println!("running on {}", best.name());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// What the build's target has at least (SSE2 on x86-64, NEON on aarch64, simd128 on wasm), through the crate `wide`.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL besides.
    Avx512,
    /// x86-64 with AMX tiles of bf16 (Intel, since Sapphire Rapids) besides, if the operating system grants them: on Linux.
    Amx,
    /// aarch64 with NEON.
    Neon,
}

/// The lanes that level `Amx` has beside its tiles.
#[cfg(all(target_arch = "x86_64", not(polyhead_emulated_matrix)))]
type MatrixLanes = Avx512;
#[cfg(all(target_arch = "x86_64", polyhead_emulated_matrix))]
type MatrixLanes = Avx2;

impl Level {
    const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx, Self::Neon];

    /// The best level of this machine, lowered to what the environment variable `POLYHEAD_MAX_LEVEL` names when the first call
    /// reads it. A name that is no level's lowers it to `Portable`: a typing error can cost speed but not run what the machine
    /// lacks.
    pub fn detect() -> Self {
        *Self::available().last().unwrap_or(&Self::Portable)
    }

    /// All levels that can be used, worst first.
    pub fn available() -> &'static [Self] {
        static AVAILABLE: OnceLock<Vec<Level>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            let limit = std::env::var("POLYHEAD_MAX_LEVEL").ok().map(|name| Self::from_name(&name));
            let allowed = |level: Level| limit.is_none_or(|limit| level <= limit.unwrap_or(Level::Portable));
            Self::ALL.into_iter().filter(|&level| level.in_cpu() && allowed(level)).collect()
        })
    }

    /// Lower-case name, as in `POLYHEAD_MAX_LEVEL` and bench ids.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
            Self::Neon => "neon",
        }
    }

    /// The level of that name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name().eq_ignore_ascii_case(name.trim()))
    }

    fn in_cpu(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => MatrixLanes::with_matrix().is_some(),
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Self::Neon => true,
            #[allow(unreachable_patterns, reason = "what is left depends on the target")]
            _ => false,
        }
    }

    /// Runs `op` with the proof of this level, which is one of `available()`.
    pub(crate) fn dispatch<O: Op>(self, op: O) -> O::Output {
        #[cfg(target_arch = "x86_64")]
        {
            if let (Self::Amx, Some(lanes)) = (self, MatrixLanes::with_matrix()) {
                return op.run(lanes);
            }
            if let (Self::Avx512, Some(lanes)) = (self, Avx512::new()) {
                return op.run(lanes);
            }
            if let (Self::Avx2, Some(lanes)) = (self, Avx2::new()) {
                return op.run(lanes);
            }
        }
        #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
        if self == Self::Neon {
            return op.run(Neon);
        }
        op.run(Portable)
    }

    /// Queries in a vector.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Self::Portable => Portable::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            Self::Amx => MatrixLanes::LANES,
            #[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
            Self::Neon => Neon::LANES,
            #[allow(unreachable_patterns, reason = "what is left depends on the target")]
            _ => Portable::LANES,
        }
    }

    /// The level to run on: the one asked for, or the best.
    pub(crate) fn resolve(requested: Option<Self>) -> Result<Self> {
        match requested {
            None => Ok(Self::detect()),
            Some(level) if Self::available().contains(&level) => Ok(level),
            Some(level) => Err(Error::LevelUnavailable { requested: level.name(), best: Self::detect().name() }),
        }
    }
}
