//! `pytorch.json`: PyTorch's errors on the same inputs.

use serde_json::Value;

use crate::Result;
use crate::errors::Errors;
use crate::functions::{Target, Worst};

pub(crate) struct Table(Value);

impl Table {
    pub(crate) fn load() -> Result<Self> {
        Ok(Self(serde_json::from_str(include_str!("pytorch.json"))?))
    }

    /// Where and when its figures were made.
    pub(crate) fn about(&self) -> String {
        let text = |key: &str| self.0[key].as_str().unwrap_or("?");
        let [torch, capability, architecture, date] = ["torch", "capability", "architecture", "date"].map(text);
        format!("PyTorch {torch} ({capability} on {architecture}, one thread), figures of {date}")
    }

    /// Errors in a case, which had inputs of this checksum.
    pub(crate) fn errors(&self, kind: &str, case: &str, dtype: &str, inputs: &str) -> Result<Errors> {
        let figures = &self.0[kind][case][dtype];
        match figures["inputs"].as_str() {
            Some(theirs) if theirs == inputs => {}
            theirs => {
                let theirs = theirs.unwrap_or("missing");
                return Err(format!(
                    "{kind}/{case} {dtype}: inputs have the checksum {inputs}, in pytorch.json it is {theirs}; \
                     inputs.rs and pytorch.py differ, or the table is older than cases.json: run examples/accuracy/pytorch.py"
                )
                .into());
            }
        }
        let sum = figures.get("sum").map(number);
        Ok(Errors { max: number(&figures["max"]), rms: number(&figures["rms"]), sum })
    }

    /// Errors of the function that `target` is compared with, over every `f32`.
    pub(crate) fn function(&self, target: &Target) -> Result<Worst> {
        let figures = &self.0["functions"][target.name];
        if figures.is_null() {
            return Err(format!("pytorch.json: without {}: run examples/accuracy/pytorch.py", target.name).into());
        }
        let at = figures["at"].as_f64().unwrap_or(f64::NAN) as f32;
        Ok(Worst { ulp: number(&figures["ulp"]), at, absolute: figures["absolute"].as_f64().unwrap_or(0.0) })
    }
}

/// What is not a finite number is written as null.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::INFINITY)
}
