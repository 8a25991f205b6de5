//! The command line.

use std::path::PathBuf;

use polyhead::Level;

pub(crate) const USAGE: &str = "\
accuracy [--quick] [--level NAME] [--json FILE]
  --quick        functions of every 4099th f32 instead of all, which take minutes
  --level NAME   portable, avx2 or avx512 (default: all there are)
  --json FILE    write the figures there too";

pub(crate) struct Options {
    pub(crate) quick: bool,
    pub(crate) levels: Vec<Level>,
    pub(crate) json: Option<PathBuf>,
}

impl Options {
    /// What the arguments ask for; `None` is help.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut options = Self { quick: false, levels: Level::available().to_vec(), json: None };
        while let Some(flag) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{flag} needs a value; see --help"));
            match flag.as_str() {
                "--quick" => options.quick = true,
                "--level" => options.levels = vec![level(&value()?)?],
                "--json" => options.json = Some(value()?.into()),
                "--help" | "-h" => return Ok(None),
                _ => return Err(format!("unknown argument {flag}; see --help")),
            }
        }
        Ok(Some(options))
    }
}

fn level(name: &str) -> Result<Level, String> {
    let level = Level::from_name(name).filter(|level| Level::available().contains(level));
    level.ok_or_else(|| {
        let names: Vec<&str> = Level::available().iter().map(|level| level.name()).collect();
        format!("--level {name}: available here are {}", names.join(", "))
    })
}
