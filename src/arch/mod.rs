//! One file a level: its vector type, and the proof that the processor has it.

#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
mod aarch64;
#[cfg(polyhead_emulated_matrix)]
mod emulated;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(all(target_arch = "aarch64", target_feature = "neon"))]
pub(crate) use aarch64::Neon;
#[cfg(polyhead_emulated_matrix)]
pub(crate) use emulated::Emulated;
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Avx2, Avx512};
