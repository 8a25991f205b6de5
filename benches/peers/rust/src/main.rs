//! `attend PEER` answers requests, lines of JSON on standard input, with lines of JSON: prepares an attention problem,
//! runs it for some seconds and says how long each call took. The Python workers beside this crate speak the same
//! protocol.

use std::error::Error;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

#[cfg(feature = "burn")]
mod burn;
#[cfg(feature = "candle")]
mod candle;
mod memory;
#[cfg(feature = "ours")]
mod ours;
mod problem;
#[cfg(feature = "rten")]
mod rten;

use problem::{Prepared, Problem, Variant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A library that was built in.
struct Peer {
    version: &'static str,
    /// The instruction set it says it uses.
    level: Option<&'static str>,
    prepare: fn(&Problem) -> Result<Prepared>,
}

fn peer(name: &str) -> Result<Peer> {
    match name {
        #[cfg(feature = "ours")]
        "ours" => Ok(ours::peer()),
        #[cfg(feature = "burn")]
        "burn" => Ok(Peer { version: "0.22.1", level: None, prepare: burn::prepare }),
        #[cfg(feature = "candle")]
        "candle" => Ok(Peer { version: "0.11.1", level: None, prepare: candle::prepare }),
        #[cfg(feature = "rten")]
        "rten" => Ok(Peer { version: "0.27.0", level: None, prepare: rten::prepare }),
        other => Err(format!("{other} is not built in").into()),
    }
}

fn main() -> Result<()> {
    let name = std::env::args().nth(1).ok_or("usage: attend PEER")?;
    let peer = peer(&name)?;
    let mut prepared = Prepared::default();
    let mut answers = std::io::stdout();
    writeln!(answers, "{}", json!({ "version": peer.version, "level": peer.level }))?;
    for line in std::io::stdin().lock().lines() {
        let answer = answer(&peer, &mut prepared, &line?).unwrap_or_else(|e| json!({ "error": e.to_string() }));
        writeln!(answers, "{answer}")?;
    }
    Ok(())
}

fn answer(peer: &Peer, prepared: &mut Prepared, line: &str) -> Result<Value> {
    let request: Value = serde_json::from_str(line)?;
    let text = |name: &str| request[name].as_str().ok_or(format!("no {name}"));
    match text("op")? {
        "release" => {
            *prepared = Prepared::default();
            Ok(json!({}))
        }
        "prepare" => {
            *prepared = Prepared::default();
            *prepared = (peer.prepare)(&serde_json::from_value(request)?)?;
            let names: Vec<&str> = prepared.variants.keys().copied().collect();
            Ok(json!({ "variants": names, "failures": prepared.failures }))
        }
        op => {
            let name = text("variant")?;
            let variant = prepared.variants.get_mut(name).ok_or(format!("no variant {name}"))?;
            match op {
                "check" => check(variant.as_mut(), text("output")?),
                "run" => {
                    let seconds = Duration::try_from_secs_f64(request["seconds"].as_f64().ok_or("no seconds")?)?;
                    Ok(json!({ "ms": times(variant.as_mut(), seconds)? }))
                }
                other => Err(format!("there is no op {other}").into()),
            }
        }
    }
}

/// One call: its time, the memory it took at its peak, its output written as f32.
fn check(variant: &mut dyn Variant, path: &str) -> Result<Value> {
    let resident = memory::reset_peak()?;
    let start = Instant::now();
    variant.run()?;
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let peak_kib = memory::status_kib("VmHWM")? - resident;
    std::fs::write(path, bytemuck::cast_slice(&variant.output()?))?;
    Ok(json!({ "ms": ms, "peak_kib": peak_kib }))
}

/// Milliseconds of each call, one at least.
fn times(variant: &mut dyn Variant, seconds: Duration) -> Result<Vec<f64>> {
    let begin = Instant::now();
    let mut spent = Vec::new();
    loop {
        let start = Instant::now();
        variant.run()?;
        spent.push(start.elapsed().as_secs_f64() * 1e3);
        if begin.elapsed() >= seconds {
            return Ok(spent);
        }
    }
}
