//! How fast this machine can be, how fast the kernels are on it, and what holds each of them back.
//!
//! ```text
//! cargo run --release --example roofline [-- --seconds N --threads N --json --svg FILE]
//! ```
//!
//! First the limits, measured: the clock, FMAs and exponentials of each level, bandwidth of reading by working set, how FMAs
//! scale with threads. Then attention, softmax and GEMM at common shapes, on one thread and on all, each with its share of what
//! the limits allow; and `roofline.svg`, a picture of both. Needs some 550 MB of memory.
//!
//! **Measurement.** Every figure is the best of repetitions of at least 5 ms each, after a warm-up: other work on the machine only
//! ever adds time. `median/best` says how much it added here. Limits are measured in three rounds, some seconds apart.
//! `--seconds` is shared out evenly between all figures, each of which takes three repetitions at least.
//!
//! **Model.** A call can not be faster than
//!
//! ```text
//! seconds = max(flops / FMA peak + exponentials / exp rate, bytes / bandwidth)
//! ```
//!
//! * FLOPs are those of the products over visible (query, key) pairs, `4 * pairs * head_dim`, with one exponential a pair. The
//!   two are added since both need the vector units. A kernel that hides one behind the other can exceed 100 %.
//! * Bytes are the compulsory traffic, every operand read and every result written once, as if writing cost as much as reading.
//!   The bandwidth is that of reading as many bytes again and again, interpolated between the measured working sets.
//! * For softmax the FLOPs besides the exponential are four an element: maximum, subtraction, sum, scaling.
//! * All limits are those of the best level, with the same number of threads. GEMM has kernels of its own and ignores
//!   `POLYHEAD_MAX_LEVEL`: with it set, its share can exceed 100 %.
//!
//! The limit that is printed is the larger side of the maximum, and of the sum the larger term.

mod buffer;
mod kernels;
mod limits;
mod measure;
mod options;
mod picture;
mod report;

use std::error::Error;
use std::fs::File;
use std::process::ExitCode;

use limits::Limits;
use measure::Stopwatch;
use options::Options;
use report::Report;

fn main() -> ExitCode {
    let run = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => roofline(&options),
        Ok(None) => {
            println!("{}", options::USAGE);
            Ok(())
        }
        Err(message) => Err(message.into()),
    };
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("roofline: {error}");
            ExitCode::FAILURE
        }
    }
}

fn roofline(options: &Options) -> Result<(), Box<dyn Error>> {
    if cfg!(debug_assertions) {
        eprintln!("roofline: built without --release; the figures say little");
    }
    // Before a minute of measuring, not after.
    let picture = options.svg.display();
    File::create(&options.svg).map_err(|error| format!("{picture} cannot be written: {error}"))?;
    let threads = options.threads;
    let thread_counts: Vec<usize> = limits::one_and_all(threads).collect();
    let cases = kernels::cases();
    let seconds_each = options.seconds / (Limits::count(threads) + cases.len() * thread_counts.len()) as f64;
    let report = Report::new(options.json);

    let limits = Limits::measure(seconds_each, threads)?;
    report.limits(&limits);
    let stopwatch = Stopwatch::new(seconds_each);
    let mut points = Vec::new();
    for case in cases {
        points.extend(kernels::measure(case, &limits, &thread_counts, &stopwatch, &report)?);
    }
    picture::draw(&options.svg, &limits, &points, &thread_counts)?;
    report.picture(&options.svg);
    Ok(())
}
