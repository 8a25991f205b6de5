//! The command line.

use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;

use polyhead::Level;

pub(crate) const USAGE: &str = "\
minilm --model DIR [--sentences FILE] [--batch N,..] [--threads N] [--seconds N] [--level NAME] [--svg FILE] [--json FILE]
  --model DIR       a folder with config.json, tokenizer.json and model.safetensors
  --sentences FILE  one sentence a line, cut where tokenizer.json says (default: eight of ours)
  --batch N,..      sentences of a call, for timing (default 1,32)
  --threads N       default: all of this machine
  --seconds N       time of each timing, about; 0 times nothing (default 2)
  --level NAME      portable, avx2 or avx512 (default: the best there is)
  --svg FILE        where the picture of the first sentence's attention goes (default minilm_attention.svg)
  --json FILE       write the figures there too";

pub(crate) struct Options {
    pub(crate) model: PathBuf,
    pub(crate) sentences: Option<PathBuf>,
    pub(crate) batches: Vec<usize>,
    pub(crate) threads: usize,
    pub(crate) seconds: f64,
    pub(crate) level: Level,
    pub(crate) svg: PathBuf,
    pub(crate) json: Option<PathBuf>,
}

impl Options {
    /// What the arguments ask for; `None` is help.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut model = None;
        let mut options = Self {
            model: PathBuf::new(),
            sentences: None,
            batches: vec![1, 32],
            threads: available_parallelism().map_or(1, NonZero::get),
            seconds: 2.0,
            level: Level::detect(),
            svg: PathBuf::from("minilm_attention.svg"),
            json: None,
        };
        while let Some(flag) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{flag} needs a value; see --help"));
            match flag.as_str() {
                "--model" => model = Some(value()?.into()),
                "--sentences" => options.sentences = Some(value()?.into()),
                "--batch" => {
                    let batch = |text: &str| number(&flag, text, |batch| (1..=65536).contains(batch));
                    options.batches = value()?.split(',').map(batch).collect::<Result<_, _>>()?;
                }
                "--threads" => options.threads = number(&flag, &value()?, |threads| (1..=4096).contains(threads))?,
                "--seconds" => options.seconds = number(&flag, &value()?, |seconds| (0.0..=86400.0).contains(seconds))?,
                "--level" => options.level = level(&value()?)?,
                "--svg" => options.svg = value()?.into(),
                "--json" => options.json = Some(value()?.into()),
                "--help" | "-h" => return Ok(None),
                _ => return Err(format!("unknown argument {flag}; see --help")),
            }
        }
        options.model = model.ok_or("--model DIR is missing; see --help")?;
        Ok(Some(options))
    }
}

fn number<T: std::str::FromStr>(flag: &str, value: &str, valid: impl Fn(&T) -> bool) -> Result<T, String> {
    value.parse().ok().filter(valid).ok_or(format!("{flag} {value}: not a number that makes sense here"))
}

fn level(name: &str) -> Result<Level, String> {
    let level = Level::from_name(name).filter(|level| Level::available().contains(level));
    level.ok_or_else(|| {
        let names: Vec<&str> = Level::available().iter().map(|level| level.name()).collect();
        format!("--level {name}: available here are {}", names.join(", "))
    })
}
