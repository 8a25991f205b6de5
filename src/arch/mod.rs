//! One file a level: its vector type, and the proof that the processor has it.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Avx2, Avx512};
