//! `cases.json`, which `pytorch.py` reads too: what is computed, on which inputs.

use serde_json::Value;

use crate::Result;
use crate::inputs::{Distribution, Dtype};

/// Of a case: what its shape and operands mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v; `q`, `k`, `v` and perhaps `bias`, of
    /// (seqlen_q, seqlen_k).
    Attention,
    /// rows, columns; `x`.
    Softmax,
    /// m, n, k; `a`, `b`.
    Gemm,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Attention, Self::Softmax, Self::Gemm];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Softmax => "softmax",
            Self::Gemm => "gemm",
        }
    }
}

/// A case, for each of some element types.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    /// Kind and name: what the seeds are made of.
    pub(crate) path: String,
    pub(crate) causal: bool,
    pub(crate) types: Vec<Dtype>,
    shape: Vec<usize>,
    operands: Vec<(String, Distribution)>,
}

impl Case {
    pub(crate) fn load_all() -> Result<Vec<Self>> {
        let all: Value = serde_json::from_str(include_str!("cases.json"))?;
        let mut cases = Vec::new();
        for kind in Kind::ALL {
            for case in all[kind.name()].as_array().ok_or("cases.json: a kind is missing")? {
                let case = Self::parse(kind, case).ok_or_else(|| format!("cases.json: not a case: {case}"))?;
                cases.push(case);
            }
        }
        Ok(cases)
    }

    fn parse(kind: Kind, case: &Value) -> Option<Self> {
        let name = case["name"].as_str()?.to_string();
        let operands = ["q", "k", "v", "bias", "x", "a", "b"].into_iter().filter(|&operand| !case[operand].is_null());
        let types = match case["types"].as_array() {
            Some(types) => types.iter().map(|dtype| Dtype::from_name(dtype.as_str()?)).collect::<Option<_>>()?,
            None => Dtype::ALL.to_vec(),
        };
        Some(Self {
            kind,
            path: format!("{}/{name}", kind.name()),
            name,
            causal: case["causal"].as_bool().unwrap_or(false),
            types,
            shape: case["shape"].as_array()?.iter().map(|size| Some(size.as_u64()? as usize)).collect::<Option<_>>()?,
            operands: operands
                .map(|name| Some((name.to_string(), distribution(case[name].as_array()?)?)))
                .collect::<Option<_>>()?,
        })
    }

    pub(crate) fn shape<const N: usize>(&self) -> Result<[usize; N]> {
        let wrong = |shape| format!("cases.json: {}: {shape:?} is not a shape", self.path);
        self.shape.clone().try_into().map_err(|shape| wrong(shape).into())
    }

    pub(crate) fn holds(&self, operand: &str) -> Result<Distribution> {
        self.find(operand).ok_or_else(|| format!("cases.json: {}: without {operand}", self.path).into())
    }

    pub(crate) fn find(&self, operand: &str) -> Option<Distribution> {
        self.operands.iter().find(|(name, _)| name == operand).map(|&(_, holds)| holds)
    }
}

fn distribution(spec: &[Value]) -> Option<Distribution> {
    let (name, numbers) = spec.split_first()?;
    let numbers: Vec<f64> = numbers.iter().map(Value::as_f64).collect::<Option<_>>()?;
    Some(match (name.as_str()?, numbers[..].as_ref()) {
        ("normal", &[deviation, mean]) => Distribution::Normal { deviation, mean },
        ("uniform", &[low, high]) => Distribution::Uniform { low, high },
        ("repeat", &[of, deviation]) => Distribution::Repeat { of: of as usize, deviation },
        ("peak", &[row, value, deviation]) => Distribution::Peak { row: row as usize, value, deviation },
        ("wide", &[reach]) => Distribution::Wide { reach: reach as u32 },
        ("subnormal", []) => Distribution::Subnormal,
        ("mask", []) => Distribution::Mask,
        _ => return None,
    })
}
