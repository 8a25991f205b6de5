//! The command line.

use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;

pub(crate) const USAGE: &str = "\
roofline [--seconds N] [--threads N] [--json] [--svg FILE]
  --seconds N   time to spend, about (default 60)
  --threads N   threads to go up to (default: all of this machine)
  --json        a line of JSON for each figure instead of tables
  --svg FILE    where the picture goes (default roofline.svg)";

pub(crate) struct Options {
    pub(crate) seconds: f64,
    pub(crate) threads: usize,
    pub(crate) json: bool,
    pub(crate) svg: PathBuf,
}

impl Options {
    /// What the arguments ask for; `None` is help.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let threads = available_parallelism().map_or(1, NonZero::get);
        let mut options = Self { seconds: 60.0, threads, json: false, svg: PathBuf::from("roofline.svg") };
        while let Some(flag) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{flag} needs a value; see --help"));
            match flag.as_str() {
                "--seconds" => {
                    options.seconds = number(&flag, &value()?, |&seconds| seconds > 0.0 && seconds <= 86400.0)?
                }
                "--threads" => options.threads = number(&flag, &value()?, |threads| (1..=4096).contains(threads))?,
                "--json" => options.json = true,
                "--svg" => options.svg = value()?.into(),
                "--help" | "-h" => return Ok(None),
                _ => return Err(format!("unknown argument {flag}; see --help")),
            }
        }
        Ok(Some(options))
    }
}

fn number<T: std::str::FromStr>(flag: &str, value: &str, valid: impl Fn(&T) -> bool) -> Result<T, String> {
    value.parse().ok().filter(valid).ok_or(format!("{flag} {value}: not a number that makes sense here"))
}
