//! Levels of x86-64 beyond its baseline.

mod amx;
mod avx2;
mod avx512;

pub(crate) use amx::Amx;
pub(crate) use avx2::Avx2;
pub(crate) use avx512::Avx512;
