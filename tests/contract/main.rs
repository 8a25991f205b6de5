//! The promises of the crate's contract, one test or more of each, named after it, on every level.
//!
//! `memory_is_bounded` is in `tests/memory`, `errors_not_panics` in `tests/errors.rs`, both of which need a process of
//! their own; everything at once and at random is in `tests/properties.rs`.

#[path = "../oracle/mod.rs"]
mod oracle;
#[path = "../support/mod.rs"]
mod support;

mod bits;
mod hidden;
mod layouts;
mod masks;
mod numbers;
mod precision;
mod score;
mod shapes;
#[cfg(feature = "rayon")]
mod threads;

/// Sizes around every block there is: lanes of 4, 8, 16, tiles of two of them, register tiles of 6 and 12 rows, and blocks of
/// 128 keys and 128 rows.
const EDGES: [usize; 25] =
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 25, 31, 32, 33, 65, 127, 128, 129, 257];
