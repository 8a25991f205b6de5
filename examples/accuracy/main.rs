//! How exact the results are: attention, softmax, products and the functions they are made of, on every level and in every element
//! type, against `f64` and beside PyTorch on the same inputs.
//!
//! ```text
//! cargo run --release --example accuracy [-- --quick --level NAME --json FILE]
//! ```
//!
//! Inputs are those of `cases.json`, seeded, rounded to the element type: that rounding is no error. The truth is `f64` throughout
//! (`polyhead::reference`, and `f64::exp` for the functions). PyTorch's figures are stored in `pytorch.json`, which `pytorch.py` makes;
//! it holds a checksum of every input, so that no figure stands beside one of other numbers. `naive` is a plain loop in `f32` that
//! adds in order and rounds once to the type in the end.
//!
//! Of attention and products errors are relative to the largest element of the truth, of softmax to each probability.
//!
//! The status is 1 if an error of ours is above what it may be:
//!
//! * the largest: twice that of `naive`, and one rounding to the type (of one element, `naive` may be right by luck);
//! * rms: twice that of `naive`;
//! * precision `High`: 20 times instead of twice, or 2^-16 and 2^-18; `Medium`: twice what `naive` makes of operands rounded to bf16;
//! * functions: what the tests of the kernels allow (`src/kernel/exp.rs`).

mod attention;
mod cases;
mod errors;
mod functions;
mod gemm;
mod inputs;
mod options;
mod report;
mod row;
mod softmax;
mod table;

use std::process::ExitCode;

use cases::{Case, Kind};
use functions::TARGETS;
use options::Options;
use rayon::prelude::*;
use report::Report;
use row::Row;
use table::Table;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    let run = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => accuracy(&options),
        Ok(None) => {
            println!("{}", options::USAGE);
            Ok(())
        }
        Err(message) => Err(message.into()),
    };
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("accuracy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn accuracy(options: &Options) -> Result<()> {
    if cfg!(debug_assertions) {
        eprintln!("accuracy: built without --release; it will take long");
    }
    let (table, cases) = (Table::load()?, Case::load_all()?);
    let mut report = Report::new(&table, options);
    for kind in Kind::ALL {
        let pairs: Vec<_> = cases
            .iter()
            .filter(|case| case.kind == kind)
            .flat_map(|case| case.types.iter().map(move |&dtype| (case, dtype)))
            .collect();
        let rows: Result<Vec<Row>> =
            pairs.into_par_iter().map(|(case, dtype)| Row::measure(case, dtype, &options.levels, &table)).collect();
        report.rows(kind, rows?);
    }
    for target in &TARGETS {
        report.function(target, table.function(target)?, target.sweep(&options.levels, options.quick));
    }
    report.finish()
}
