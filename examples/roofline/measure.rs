//! Time.

use std::time::{Duration, Instant};

/// Repetitions are lengthened to this, so that starting them and reading the time cost nothing.
const SHORTEST: Duration = Duration::from_millis(5);
const REPETITIONS: usize = 3;

/// Seconds of one run, over repetitions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) best: f64,
    pub(crate) median: f64,
}

pub(crate) struct Stopwatch {
    slice: Duration,
}

impl Stopwatch {
    /// Spends so many seconds on each measurement, if three repetitions take no longer.
    pub(crate) fn new(seconds: f64) -> Self {
        Self { slice: Duration::from_secs_f64(seconds) }
    }

    /// `run(n)` does the work n times.
    pub(crate) fn time<E>(&self, mut run: impl FnMut(u64) -> Result<(), E>) -> Result<Timing, E> {
        let begin = Instant::now();
        let mut once = |n| {
            let start = Instant::now();
            run(n)?;
            Ok(start.elapsed())
        };
        // Finding n warms up.
        let mut n = 1;
        once(n)?;
        while once(n)? < SHORTEST {
            n *= 2;
        }
        let mut times = Vec::new();
        while times.len() < REPETITIONS || begin.elapsed() < self.slice {
            times.push(once(n)?.as_secs_f64() / n as f64);
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(Timing { best: times[0], median: times[times.len() / 2] })
    }
}
