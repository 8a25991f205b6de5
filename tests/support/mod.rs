//! What the integration tests share. Each of them is a crate of its own and uses a part of it.
#![allow(dead_code, unused_imports, reason = "no test uses all of it")]

mod golden;
pub(crate) mod guarded;
mod poison;
mod rng;

use core::fmt::Display;
use std::sync::{Once, OnceLock};

use polyhead::Level;
use proptest::test_runner::Config as ProptestConfig;

pub(crate) use golden::{Golden, Tensor};
pub(crate) use guarded::{Edges, Memory};
pub(crate) use poison::{Arrangement, Bits, PoisonedInput, PoisonedList, PoisonedOutput};
pub(crate) use rng::Rng;

/// Every level that can be tested here, or those that `POLYHEAD_TEST_LEVELS` names. Says aloud which cannot.
///
/// # Panics
/// If `POLYHEAD_REQUIRE_LEVELS` (names with commas between) has one that is not available: on a machine that is there
/// to test a level, skipping it is a failure.
pub(crate) fn levels() -> &'static [Level] {
    let available = Level::available();
    let named = |name: &str| available.iter().any(|level| level.name().eq_ignore_ascii_case(name));
    static SAY_ONCE: Once = Once::new();
    SAY_ONCE.call_once(|| {
        for skipped in ["portable", "avx2", "avx512", "amx", "neon"].into_iter().filter(|name| !named(name)) {
            eprintln!("SKIPPED: level {skipped} is not available here");
        }
    });
    let required = std::env::var("POLYHEAD_REQUIRE_LEVELS").unwrap_or_default();
    for name in required.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        assert!(named(name), "POLYHEAD_REQUIRE_LEVELS asks for {name}, available are {available:?}");
    }
    static CHOSEN: OnceLock<Vec<Level>> = OnceLock::new();
    CHOSEN.get_or_init(|| match std::env::var("POLYHEAD_TEST_LEVELS") {
        Err(_) => available.to_vec(),
        Ok(names) => {
            let level = |name| Level::from_name(name).filter(|level| available.contains(level));
            let chosen =
                |name| level(name).unwrap_or_else(|| panic!("POLYHEAD_TEST_LEVELS has {name}, which is not there"));
            names.split(',').map(chosen).collect()
        }
    })
}

/// Of 256 cases, which is what there are unless `PROPTEST_CASES` says otherwise, so many.
pub(crate) fn cases_of_256(share: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    // Failures are printed whole; they leave no file.
    ProptestConfig { cases: (default.cases * share).div_ceil(256), failure_persistence: None, ..default }
}

/// Whether `|actual - expected| <= atol + rtol * |expected|`; NaN equals NaN, an infinity only itself.
pub(crate) fn is_close(actual: impl Into<f64>, expected: impl Into<f64>, atol: f64, rtol: f64) -> bool {
    let (actual, expected) = (actual.into(), expected.into());
    if actual.is_nan() || expected.is_nan() {
        return actual.is_nan() && expected.is_nan();
    }
    if actual.is_infinite() || expected.is_infinite() {
        return actual == expected;
    }
    (actual - expected).abs() <= atol + rtol * expected.abs()
}

/// Asserts [`is_close`].
#[track_caller]
pub(crate) fn assert_close(
    actual: impl Into<f64>,
    expected: impl Into<f64>,
    atol: f64,
    rtol: f64,
    context: impl Display,
) {
    let (actual, expected) = (actual.into(), expected.into());
    assert!(
        is_close(actual, expected, atol, rtol),
        "{context}: {actual:e} instead of {expected:e}, error {:e}, allowed {:e}",
        (actual - expected).abs(),
        atol + rtol * expected.abs(),
    );
}

/// Asserts [`is_close`] of every element; names the first that is not, the worst one, and how many there are.
#[track_caller]
pub(crate) fn assert_all_close<A, E>(actual: &[A], expected: &[E], atol: f64, rtol: f64, context: impl Display)
where
    A: Copy + Into<f64>,
    E: Copy + Into<f64>,
{
    assert_eq!(actual.len(), expected.len(), "{context}: lengths");
    let pair = |i: usize| -> (f64, f64) { (actual[i].into(), expected[i].into()) };
    let bad: Vec<usize> = (0..actual.len()).filter(|&i| !is_close(actual[i], expected[i], atol, rtol)).collect();
    let Some(&first) = bad.first() else { return };
    // How far over the tolerance; what is NaN or infinite on one side only is worst.
    let excess = |i: usize| {
        let (a, e) = pair(i);
        let error = (a - e).abs() / (atol + rtol * e.abs());
        if error.is_nan() { f64::INFINITY } else { error }
    };
    let worst = bad.iter().copied().max_by(|&i, &j| excess(i).total_cmp(&excess(j))).unwrap_or(first);
    let show = |i: usize| {
        let (a, e) = pair(i);
        format!("[{i}] is {a:e} instead of {e:e}, error {:e} of allowed {:e}", (a - e).abs(), atol + rtol * e.abs())
    };
    panic!("{context}: {} of {} differ. First {}; worst {}", bad.len(), actual.len(), show(first), show(worst));
}

/// Asserts that two slices are the same bit for bit.
#[track_caller]
pub(crate) fn assert_same_bits<T: Bits>(actual: &[T], expected: &[T], context: impl Display) {
    assert_eq!(actual.len(), expected.len(), "{context}: lengths");
    if let Some(i) = (0..actual.len()).find(|&i| actual[i].bits() != expected[i].bits()) {
        panic!("{context}: [{i}] is {:?} instead of {:?}", actual[i], expected[i]);
    }
}

/// Largest absolute value that is finite, 0 without one.
pub(crate) fn max_abs<T: Copy + Into<f64>>(values: &[T]) -> f64 {
    values.iter().map(|&x| x.into().abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}
