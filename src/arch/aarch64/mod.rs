//! Levels of aarch64.

mod neon;

pub(crate) use neon::Neon;
