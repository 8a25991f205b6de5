//! What this machine can do at most, measured with the loops of `polyhead::probe`.

use std::convert::Infallible;
use std::error::Error;
use std::hint::black_box;

use polyhead::{Level, probe};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::buffer::Buffer;
use crate::measure::Stopwatch;

/// Working sets, in bytes: all threads together, each with its share. The smaller ones stay in the first levels of cache; the
/// largest is beyond any last one.
const SMALLEST: usize = 32 << 10;
const LARGEST: usize = 512 << 20;
/// What stands for the second level of cache: larger than any first, not larger than the second of current processors.
pub(crate) const L2_BYTES: usize = 256 << 10;
pub(crate) const DRAM_BYTES: usize = LARGEST;
/// Floats of the operand of an exponential: with the result 16 KiB.
const EXP_FLOATS: usize = 2048;

/// How often each limit is measured, at different times.
const ROUNDS: usize = 3;
/// Additions and exclusive ors in a round of the chain that measures the clock.
const CHAIN: u64 = 16;

/// A rate of a level, a second, all threads together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) level: Level,
    pub(crate) threads: usize,
    pub(crate) per_second: f64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Bandwidth {
    pub(crate) threads: usize,
    pub(crate) bytes: usize,
    /// Bytes a second, all threads together.
    pub(crate) per_second: f64,
}

pub(crate) struct Limits {
    /// The level that kernels run on.
    pub(crate) level: Level,
    /// Hz.
    pub(crate) clock: f64,
    /// FLOP/s: each level on one thread, then the best on 2, 3, ... threads.
    pub(crate) fma: Vec<Rate>,
    /// FLOP/s of bf16 products on matrix tiles, of the levels that have them, on one thread.
    pub(crate) tiles: Vec<Rate>,
    /// Exponentials a second: each level on one thread, then the best on all threads.
    pub(crate) exp: Vec<Rate>,
    pub(crate) bandwidth: Vec<Bandwidth>,
}

fn working_sets() -> impl Iterator<Item = usize> {
    std::iter::successors(Some(SMALLEST), |bytes| Some(2 * bytes)).take_while(|&bytes| bytes <= LARGEST)
}

pub(crate) fn pool(threads: usize) -> Result<ThreadPool, Box<dyn Error>> {
    Ok(ThreadPoolBuilder::new().num_threads(threads).build()?)
}

/// One thread, and all of them if they are more.
pub(crate) fn one_and_all(threads: usize) -> impl Iterator<Item = usize> {
    std::iter::once(1).chain((threads > 1).then_some(threads))
}

impl Limits {
    /// How many figures `measure` finds.
    pub(crate) fn count(threads: usize) -> usize {
        let (levels, counts) = (Level::available().len(), one_and_all(threads).count());
        let (clock, fma, exp) = (1, levels + threads - 1, levels + counts - 1);
        clock + fma + tiled().count() + exp + counts * working_sets().count()
    }

    /// Measures everything, in rounds: what disturbs one may have passed by the next.
    pub(crate) fn measure(seconds_each: f64, threads: usize) -> Result<Self, Box<dyn Error>> {
        let stopwatch = Stopwatch::new(seconds_each / ROUNDS as f64);
        let best = Level::detect();
        let each_level = || Level::available().iter().map(|&level| Rate { level, threads: 1, per_second: 0.0 });
        let more = |threads| Rate { level: best, threads, per_second: 0.0 };
        let set = |bytes| one_and_all(threads).map(move |threads| Bandwidth { threads, bytes, per_second: 0.0 });
        let mut limits = Self {
            level: best,
            clock: 0.0,
            fma: each_level().chain((2..=threads).map(more)).collect(),
            tiles: each_level().filter(|rate| tiled().any(|level| level == rate.level)).collect(),
            exp: each_level().chain(one_and_all(threads).skip(1).map(more)).collect(),
            bandwidth: working_sets().flat_map(set).collect(),
        };
        let data = Buffer::new(LARGEST / size_of::<f32>(), 1.0f32);
        for _ in 0..ROUNDS {
            limits.clock = limits.clock.max(clock(&stopwatch));
            for rate in &mut limits.fma {
                rate.per_second = rate.per_second.max(fma(&stopwatch, &pool(rate.threads)?, rate.level));
            }
            for rate in &mut limits.tiles {
                rate.per_second = rate.per_second.max(tiles(&stopwatch, rate.level));
            }
            for rate in &mut limits.exp {
                rate.per_second = rate.per_second.max(exp(&stopwatch, &pool(rate.threads)?, rate.level));
            }
            for row in &mut limits.bandwidth {
                let set = &data[..row.bytes / size_of::<f32>()];
                row.per_second = row.per_second.max(read(&stopwatch, &pool(row.threads)?, best, set));
            }
        }
        Ok(limits)
    }

    /// FLOP/s of the best level.
    pub(crate) fn fma_peak(&self, threads: usize) -> f64 {
        self.of_best_level(&self.fma, threads)
    }

    /// Exponentials a second of the best level.
    pub(crate) fn exp_rate(&self, threads: usize) -> f64 {
        self.of_best_level(&self.exp, threads)
    }

    fn of_best_level(&self, rates: &[Rate], threads: usize) -> f64 {
        let rate = rates.iter().find(|rate| rate.level == self.level && rate.threads == threads);
        rate.expect("measured for one thread and for all").per_second
    }

    /// Bytes a second of reading a working set of this size: on a line between the measured ones, over the logarithm of the size.
    pub(crate) fn read_bandwidth(&self, threads: usize, bytes: f64) -> f64 {
        let curve: Vec<&Bandwidth> = self.bandwidth.iter().filter(|row| row.threads == threads).collect();
        let (first, last) = (curve[0], curve[curve.len() - 1]);
        let bytes = bytes.clamp(first.bytes as f64, last.bytes as f64);
        let pair = curve.windows(2).find(|pair| bytes <= pair[1].bytes as f64).expect("within the curve");
        let share = (bytes / pair[0].bytes as f64).log2() / (pair[1].bytes as f64 / pair[0].bytes as f64).log2();
        pair[0].per_second + share * (pair[1].per_second - pair[0].per_second)
    }
}

/// Seconds of a run that cannot fail.
fn best(stopwatch: &Stopwatch, mut run: impl FnMut(u64)) -> f64 {
    let Ok(timing) = stopwatch.time::<Infallible>(|n| {
        run(n);
        Ok(())
    });
    timing.best
}

/// Clock in Hz: integer additions and exclusive ors in turn, each with the result of the one before. That each takes one cycle
/// is an assumption, true of all processors that the levels are for; the two in turn leave a compiler nothing to fold.
fn clock(stopwatch: &Stopwatch) -> f64 {
    let (a, b) = (black_box(0x9e37_79b9_7f4a_7c15_u64), black_box(0xbf58_476d_1ce4_e5b9_u64));
    let seconds = best(stopwatch, |n| {
        let mut x = black_box(1u64);
        for _ in 0..1000 * n {
            for _ in 0..CHAIN / 2 {
                x = x.wrapping_add(a) ^ b;
            }
        }
        black_box(x);
    });
    (1000 * CHAIN) as f64 / seconds
}

fn fma(stopwatch: &Stopwatch, pool: &ThreadPool, level: Level) -> f64 {
    const ROUNDS: u64 = 1000;
    let (flops, _) = probe::fma(level, ROUNDS);
    let seconds = best(stopwatch, |n| {
        pool.broadcast(|_| black_box(probe::fma(level, black_box(ROUNDS * n))));
    });
    (flops * pool.current_num_threads() as u64) as f64 / seconds
}

/// Levels with matrix tiles.
fn tiled() -> impl Iterator<Item = Level> {
    Level::available().iter().copied().filter(|&level| probe::tiles(level, 1).is_some())
}

fn tiles(stopwatch: &Stopwatch, level: Level) -> f64 {
    let flops = probe::tiles(level, 1).map_or(0, |(flops, _)| flops);
    let seconds = best(stopwatch, |n| {
        black_box(probe::tiles(level, black_box(n)));
    });
    flops as f64 / seconds
}

fn exp(stopwatch: &Stopwatch, pool: &ThreadPool, level: Level) -> f64 {
    let mut x = Buffer::new(EXP_FLOATS, 0.0);
    x.iter_mut().enumerate().for_each(|(i, x)| *x = -20.0 * i as f32 / EXP_FLOATS as f32);
    let seconds = best(stopwatch, |n| {
        pool.broadcast(|_| {
            let mut out = Buffer::new(EXP_FLOATS, 0.0);
            for _ in 0..n {
                probe::exp(level, black_box(&x), &mut out);
                black_box(&mut out);
            }
        });
    });
    (EXP_FLOATS * pool.current_num_threads()) as f64 / seconds
}

/// Reads the set again and again, each thread a part of its own.
fn read(stopwatch: &Stopwatch, pool: &ThreadPool, level: Level, set: &[f32]) -> f64 {
    let threads = pool.current_num_threads();
    let parts: Vec<&[f32]> = set.chunks(set.len().div_ceil(threads)).collect();
    let seconds = best(stopwatch, |n| {
        pool.broadcast(|thread| {
            if let Some(part) = parts.get(thread.index()) {
                for _ in 0..n {
                    black_box(probe::sum(level, black_box(part)));
                }
            }
        });
    });
    size_of_val(set) as f64 / seconds
}
