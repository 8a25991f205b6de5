//! Figures as tables, or as a line of JSON each.

use std::path::Path;

use polyhead::Level;
use serde_json::json;

use crate::kernels::{Point, Unit};
use crate::limits::{Bandwidth, Limits, Rate};

pub(crate) struct Report {
    json: bool,
}

impl Report {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Only a table has headings.
    fn heading(&self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    pub(crate) fn limits(&self, limits: &Limits) {
        self.clock(limits.clock);
        self.heading("\nFMA peak, one thread     GFLOP/s  FLOP/cycle");
        for rate in limits.fma.iter().filter(|rate| rate.threads == 1) {
            self.rate("fma", rate, limits.clock);
        }
        if !limits.tiles.is_empty() {
            self.heading("\nbf16 on tiles, one thread   GFLOP/s  FLOP/cycle");
        }
        for rate in &limits.tiles {
            self.rate("tiles", rate, limits.clock);
        }
        self.heading("\nFMA by threads           GFLOP/s  efficiency");
        for rate in limits.fma.iter().filter(|rate| rate.level == limits.level) {
            self.scaling(rate, rate.per_second / (limits.fma_peak(1) * rate.threads as f64));
        }
        let all = limits.fma.iter().map(|rate| rate.threads).max().unwrap_or(1);
        if limits.fma_peak(all) < 0.9 * limits.fma_peak(1) * all as f64 {
            self.heading("threads share cores, or other work runs: figures of several threads may be too low");
        }
        self.heading("\nexp in L1, by threads   Gfloat/s  cycles per 16 of a thread");
        for rate in &limits.exp {
            self.exp(rate, limits.clock);
        }
        let sets = limits.bandwidth.chunk_by(|a, b| a.bytes == b.bytes);
        for (i, rows) in sets.enumerate() {
            if i == 0 {
                let columns: String = rows.iter().map(|row| format!("  {:>4} thr", row.threads)).collect();
                self.heading(&format!("\nreads by working set, GB/s{columns}"));
            }
            self.bandwidth(rows);
        }
        let columns = "threads       best  median/best      rate            limit  of the limit";
        self.heading(&format!("\n{:<30} {columns}", "kernel"));
    }

    fn clock(&self, hertz: f64) {
        if self.json {
            println!("{}", json!({ "kind": "clock", "ghz": hertz / 1e9 }));
        } else {
            println!("clock: {:.2} GHz, if a dependent integer addition takes one cycle", hertz / 1e9);
        }
    }

    fn rate(&self, kind: &str, rate: &Rate, clock: f64) {
        let (name, gflops, per_cycle) = (rate.level.name(), rate.per_second / 1e9, rate.per_second / clock);
        if self.json {
            let threads = rate.threads;
            println!(
                "{}",
                json!({ "kind": kind, "level": name, "threads": threads, "gflops": gflops, "flops_per_cycle": per_cycle })
            );
        } else {
            println!("{name:<22} {gflops:>9.1}  {per_cycle:>10.1}");
        }
    }

    fn scaling(&self, rate: &Rate, efficiency: f64) {
        let Rate { level, threads, per_second } = *rate;
        let (name, gflops) = (level.name(), per_second / 1e9);
        if self.json {
            println!(
                "{}",
                json!({ "kind": "scaling", "level": name, "threads": threads, "gflops": gflops, "efficiency": efficiency })
            );
        } else {
            println!("{:<22} {gflops:>9.1}  {efficiency:>10.2}", format!("{name}, {threads}"));
        }
    }

    fn exp(&self, rate: &Rate, clock: f64) {
        let Rate { level, threads, per_second } = *rate;
        let (name, gfloats, cycles) = (level.name(), per_second / 1e9, 16.0 * threads as f64 * clock / per_second);
        if self.json {
            println!(
                "{}",
                json!({ "kind": "exp", "level": name, "threads": threads, "gfloats": gfloats, "cycles_per_16": cycles })
            );
        } else {
            println!("{:<22} {gfloats:>9.2}  {cycles:>10.1}", format!("{name}, {threads}"));
        }
    }

    /// One working set, with each number of threads.
    fn bandwidth(&self, rows: &[Bandwidth]) {
        if self.json {
            for &Bandwidth { threads, bytes, per_second } in rows {
                let gbs = per_second / 1e9;
                println!("{}", json!({ "kind": "bandwidth", "threads": threads, "bytes": bytes, "gbs": gbs }));
            }
        } else if let [first, ..] = rows {
            let columns: String = rows.iter().map(|row| format!("  {:>8.1}", row.per_second / 1e9)).collect();
            println!("{:>26}{columns}", size(first.bytes));
        }
    }

    pub(crate) fn kernel(&self, point: &Point, level: Level) {
        let Point { name, threads, timing, limit, model, .. } = point;
        let (rate, percent) = (point.rate(), point.percent());
        let unit = if point.unit == Unit::Flops { "GFLOP/s" } else { "GB/s" };
        if self.json {
            let line = json!({
                "kind": "kernel", "name": name, "level": level.name(), "threads": threads, "seconds": timing.best,
                "median_seconds": timing.median, "rate": rate, "unit": unit, "limit": limit, "model_seconds": model,
                "percent": percent,
            });
            println!("{line}");
        } else {
            let (micros, noise) = (timing.best * 1e6, timing.median / timing.best);
            println!(
                "{name:<30} {threads:>7} {micros:>7.0} us {noise:>12.2} {rate:>9.1} {unit:<7} {limit:>9} {percent:>10.0} %"
            );
        }
    }

    pub(crate) fn picture(&self, path: &Path) {
        let path = path.display().to_string();
        if self.json {
            println!("{}", json!({ "kind": "picture", "file": path }));
        } else {
            println!("\n{path}: the limits as roofs, the kernels as points below them");
        }
    }
}

/// Bytes, a whole number of KiB or MiB.
pub(crate) fn size(bytes: usize) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}
