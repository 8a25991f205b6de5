//! The figures as tables, and as JSON.

use std::collections::HashMap;
use std::path::PathBuf;

use polyhead::Level;
use serde_json::{Value, json};

use crate::Result;
use crate::cases::Kind;
use crate::errors::Errors;
use crate::functions::{Target, Worst};
use crate::inputs::Dtype;
use crate::options::Options;
use crate::row::{Figure, Row};
use crate::table::Table;

/// From here on PyTorch's error counts as smaller.
const SMALLER: f64 = 1.1;

pub(crate) struct Report {
    levels: Vec<Level>,
    json: Option<PathBuf>,
    figures: Vec<Value>,
    /// Figures that are not allowed.
    wrong: Vec<String>,
    /// Where PyTorch is closer to the truth.
    closer: Vec<String>,
    /// How many of our figures are closer than PyTorch's, and how many there are.
    ours_closer: [usize; 2],
    functions: usize,
}

impl Report {
    pub(crate) fn new(table: &Table, options: &Options) -> Self {
        println!("errors against f64; beside them {}", table.about());
        println!("* the largest of its column and type, ! more than it may be");
        let sweep = if options.quick { "a sample of" } else { "every" };
        println!("functions: {sweep} f32 (PyTorch's: every)");
        let (levels, json) = (options.levels.clone(), options.json.clone());
        let (figures, wrong, closer) = Default::default();
        Self { levels, json, figures, wrong, closer, ours_closer: [0; 2], functions: 0 }
    }

    pub(crate) fn rows(&mut self, kind: Kind, rows: Vec<Row>) {
        let relative_to = match kind {
            Kind::Attention | Kind::Gemm => "max and rms of |x - truth| / max |truth|",
            Kind::Softmax => {
                "max and rms of |p - truth| / truth (where truth >= 2^-126; of f16 / max(truth, 2^-14)), and max |sum of a row - 1|"
            }
        };
        println!("\n{}: {relative_to}", kind.name());
        let columns = columns(&rows);
        let sums = kind == Kind::Softmax;
        let width = if sums { 27 } else { 18 };
        let heading: String = columns.iter().map(|column| format!(" | {column:<width$}")).collect();
        println!("{:<31} type{heading}", "case");
        let worst = largest(&rows);
        let mut name = "";
        for row in &rows {
            let first = if row.name == name { "" } else { &row.name };
            let mut line = format!("{first:<31} {:<4}", row.dtype.name());
            for column in &columns {
                line.push_str(" | ");
                let Some((errors, allowed)) = figure(row, column) else {
                    line.push_str(&format!("{:<width$}", ""));
                    continue;
                };
                let is_worst = worst.get(&(column.as_str(), row.dtype.name())) == Some(&errors.max);
                let mark = if allowed { if is_worst { "*" } else { "" } } else { "!" };
                line.push_str(&format!("{:>7.1e}{mark:<1} {:>7.1e}  ", errors.max, errors.rms));
                if sums {
                    line.push_str(&format!("{:>7.1e}  ", errors.sum.unwrap_or(0.0)));
                }
            }
            println!("{}", line.trim_end());
            name = &row.name;
        }
        rows.iter().for_each(|row| self.judge(row));
    }

    /// Notes what is too large, where PyTorch is closer, and all of it as JSON.
    fn judge(&mut self, row: &Row) {
        let case = format!("{}/{} {}", row.kind.name(), row.name, row.dtype.name());
        for figure in &row.ours {
            let Figure { column, errors, allowed } = figure;
            if !figure.is_allowed() {
                self.wrong.push(format!("{case} on {column}: {}, allowed {}", text(errors), text(allowed)));
            }
            let parts = [("max", errors.max, row.pytorch.max), ("rms", errors.rms, row.pytorch.rms)];
            let sum = errors.sum.zip(row.pytorch.sum).map(|(ours, theirs)| ("sum", ours, theirs));
            let parts = || parts.into_iter().chain(sum);
            self.ours_closer[0] += parts().filter(|(_, ours, theirs)| *theirs > SMALLER * ours).count();
            self.ours_closer[1] += parts().count();
            let smaller: Vec<String> = parts()
                .filter(|(_, ours, theirs)| *ours > SMALLER * theirs)
                .map(|(what, ours, theirs)| format!("{what} {theirs:.2e} < {ours:.2e}"))
                .collect();
            if !smaller.is_empty() {
                self.closer.push(format!("{case} than {column}: {}", smaller.join(", ")));
            }
        }
        let ours: serde_json::Map<String, Value> =
            row.ours.iter().map(|figure| (figure.column.clone(), value(&figure.errors))).collect();
        self.figures.push(json!({
            "kind": row.kind.name(), "case": row.name, "type": row.dtype.name(),
            "pytorch": value(&row.pytorch), "naive": value(&row.naive), "ours": ours,
        }));
    }

    pub(crate) fn function(&mut self, target: &Target, pytorch: Worst, ours: Vec<Worst>) {
        if self.functions == 0 {
            println!("\nfunctions: largest error in ulp and where, and absolutely where results are probabilities");
            let columns: String = self.levels.iter().map(|level| format!(" | {:<27}", level.name())).collect();
            println!("{:<31} {:<22} | {:<27}{columns}", "function", "of", "PyTorch");
        }
        self.functions += 1;
        let cell = |worst: &Worst, mark: &str| {
            let absolute = if target.has_absolute() { format!("{:.1e}", worst.absolute) } else { String::new() };
            format!(" | {:>7.3}{mark:<1} {:>10.3e} {absolute:>7}", worst.ulp, worst.at)
        };
        let mut line = format!("{:<31} {:<22}{}", target.description, target.domain, cell(&pytorch, ""));
        let mut levels = serde_json::Map::new();
        for (&level, worst) in self.levels.iter().zip(&ours) {
            let allowed = target.allows(level, worst);
            line.push_str(&cell(worst, if allowed { "" } else { "!" }));
            if !allowed {
                let limit = target.ulp_allowed(level);
                self.wrong.push(format!("{} on {}: {worst:?}, allowed {limit} ulp", target.name, level.name()));
            }
            if worst.ulp > SMALLER * pytorch.ulp {
                let (name, level) = (target.name, level.name());
                let absolute = match target.has_absolute() {
                    true => format!(", absolutely {:.1e} and {:.1e}", pytorch.absolute, worst.absolute),
                    false => String::new(),
                };
                self.closer.push(format!("{name} than {level}: {:.3} < {:.3} ulp{absolute}", pytorch.ulp, worst.ulp));
            }
            levels.insert(level.name().into(), worst_value(worst));
        }
        println!("{}", line.trim_end());
        self.figures.push(json!({
            "kind": "function", "case": target.name, "type": Dtype::F32.name(), "pytorch": worst_value(&pytorch), "ours": levels,
        }));
    }

    /// Ends the tables, writes the file, and fails if an error is too large.
    pub(crate) fn finish(self) -> Result<()> {
        let ([ours, of], percent) = (self.ours_closer, 100.0 * (SMALLER - 1.0));
        println!("\ncases: {ours} of {of} figures are closer than PyTorch's by more than {percent:.0} %");
        println!("\nPyTorch is closer by more than {percent:.0} %: {}", count(&self.closer));
        self.closer.iter().for_each(|line| println!("  {line}"));
        println!("\nmore than allowed: {}", count(&self.wrong));
        self.wrong.iter().for_each(|line| println!("  {line}"));
        if let Some(path) = &self.json {
            let lines: String = self.figures.iter().map(|figure| format!("{figure}\n")).collect();
            std::fs::write(path, lines).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        match self.wrong.len() {
            0 => Ok(()),
            wrong => Err(format!("{wrong} figures are more than allowed").into()),
        }
    }
}

fn count(lines: &[String]) -> String {
    if lines.is_empty() { "nowhere".into() } else { lines.len().to_string() }
}

/// PyTorch, the naive loop, then all of ours in the order of their first row.
fn columns(rows: &[Row]) -> Vec<String> {
    let mut columns = vec!["PyTorch".to_string(), "naive".to_string()];
    for figure in rows.iter().flat_map(|row| &row.ours) {
        if !columns.contains(&figure.column) {
            columns.push(figure.column.clone());
        }
    }
    columns
}

/// The errors of a row in a column, and whether they are allowed.
fn figure(row: &Row, column: &str) -> Option<(Errors, bool)> {
    match column {
        "PyTorch" => Some((row.pytorch, true)),
        "naive" => Some((row.naive, true)),
        _ => {
            let figure = row.ours.iter().find(|figure| figure.column == column)?;
            Some((figure.errors, figure.is_allowed()))
        }
    }
}

/// The largest maximum of each column and type.
fn largest(rows: &[Row]) -> HashMap<(&str, &'static str), f64> {
    let mut worst = HashMap::new();
    for row in rows {
        let ours = row.ours.iter().map(|figure| (figure.column.as_str(), figure.errors.max));
        for (column, max) in ours.chain([("PyTorch", row.pytorch.max), ("naive", row.naive.max)]) {
            let largest = worst.entry((column, row.dtype.name())).or_insert(0.0f64);
            *largest = largest.max(max);
        }
    }
    worst
}

fn text(errors: &Errors) -> String {
    let sum = errors.sum.map(|sum| format!(", sum {sum:.2e}")).unwrap_or_default();
    format!("max {:.2e}, rms {:.2e}{sum}", errors.max, errors.rms)
}

/// Null where a number is infinite.
fn value(errors: &Errors) -> Value {
    match errors.sum {
        Some(sum) => json!({ "max": errors.max, "rms": errors.rms, "sum": sum }),
        None => json!({ "max": errors.max, "rms": errors.rms }),
    }
}

fn worst_value(worst: &Worst) -> Value {
    json!({ "ulp": worst.ulp, "at": worst.at, "absolute": worst.absolute })
}
