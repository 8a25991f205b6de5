//! A case as the parent describes it, and what peers make of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use serde::Deserialize;

use crate::{Result, memory};

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) kind: String,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) dim: usize,
    /// The last query sees all keys, the one before all but the last.
    pub(crate) causal: bool,
    pub(crate) mask: Option<MaskKind>,
    /// Of a layer: whether attention weights are wanted, too.
    pub(crate) need_weights: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MaskKind {
    /// bool, (batch, 1, 1, seqlen_k), true is seen.
    Key,
    /// f32, (1, 1, seqlen_q, seqlen_k), added to the scores.
    Float,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    Highest,
    High,
    Medium,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(not(feature = "ours"), allow(dead_code, reason = "only polyhead can be asked for a precision"))]
pub(crate) struct Problem {
    pub(crate) case: Case,
    pub(crate) dtype: Dtype,
    pub(crate) precision: Precision,
    /// Where q.bin, k.bin, v.bin and mask.bin are, and attention.onnx and plain.onnx for who reads models.
    pub(crate) directory: PathBuf,
}

impl Case {
    pub(crate) fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seqlen_q, self.dim]
    }

    pub(crate) fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seqlen_k, self.dim]
    }

    pub(crate) fn mask_shape(&self) -> [usize; 4] {
        match self.mask {
            Some(MaskKind::Key) => [self.batch, 1, 1, self.seqlen_k],
            _ => [1, 1, self.seqlen_q, self.seqlen_k],
        }
    }
}

impl Problem {
    fn read<T: Zeroable + NoUninit + AnyBitPattern>(&self, name: &str, shape: [usize; 4]) -> Result<Vec<T>> {
        let mut data = memory::huge_zeros::<T>(shape.iter().product());
        File::open(self.directory.join(name))?.read_exact(bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }

    pub(crate) fn qkv<T: Zeroable + NoUninit + AnyBitPattern>(&self) -> Result<[Vec<T>; 3]> {
        let (q, kv) = (self.case.q_shape(), self.case.kv_shape());
        Ok([self.read("q.bin", q)?, self.read("k.bin", kv)?, self.read("v.bin", kv)?])
    }

    /// Tokens (batch, seq, heads * dim) of a layer, and its weights: rows of W_q, W_k, W_v and W_o, then their biases.
    #[cfg(feature = "ours")]
    pub(crate) fn layer<T: Zeroable + NoUninit + AnyBitPattern>(&self) -> Result<[Vec<T>; 2]> {
        let width = self.case.heads * self.case.dim;
        Ok([self.read("q.bin", self.case.q_shape())?, self.read("weights.bin", [1, 1, 4 * width + 4, width])?])
    }

    pub(crate) fn key_mask(&self) -> Result<Option<Vec<bool>>> {
        if self.case.mask != Some(MaskKind::Key) {
            return Ok(None);
        }
        let bytes: Vec<u8> = self.read("mask.bin", self.case.mask_shape())?;
        Ok(Some(bytes.into_iter().map(|byte| byte != 0).collect()))
    }

    pub(crate) fn float_mask(&self) -> Result<Option<Vec<f32>>> {
        let is_float = self.case.mask == Some(MaskKind::Float);
        is_float.then(|| self.read("mask.bin", self.case.mask_shape())).transpose()
    }
}

#[cfg(any(feature = "candle", feature = "rten"))]
impl Problem {
    /// Whether each key is seen by each query, by causality alone.
    pub(crate) fn causal_mask(&self) -> Vec<bool> {
        let Case { seqlen_q, seqlen_k, .. } = self.case;
        (0..seqlen_q * seqlen_k).map(|i| i % seqlen_k + seqlen_q <= i / seqlen_k + seqlen_k).collect()
    }

    /// What is added to the scores, of `mask_shape`; causality only if nothing else masks.
    pub(crate) fn additive_mask(&self) -> Result<Option<Vec<f32>>> {
        let hidden =
            |seen: Vec<bool>| seen.into_iter().map(|seen| if seen { 0.0 } else { f32::NEG_INFINITY }).collect();
        Ok(match self.case.mask {
            Some(MaskKind::Key) => self.key_mask()?.map(hidden),
            Some(MaskKind::Float) => self.float_mask()?,
            None => self.case.causal.then(|| hidden(self.causal_mask())),
        })
    }
}

/// One way to compute a problem.
pub(crate) trait Variant {
    /// What is timed.
    fn run(&mut self) -> Result<()>;
    /// What the last run computed, packed (batch, heads, seqlen_q, dim).
    fn output(&self) -> Result<Vec<f32>>;
}

/// The ways of one peer by name, and why others cannot be.
#[derive(Default)]
pub(crate) struct Prepared {
    pub(crate) variants: BTreeMap<&'static str, Box<dyn Variant>>,
    pub(crate) failures: BTreeMap<&'static str, String>,
}

impl Prepared {
    pub(crate) fn add<V: Variant + 'static>(&mut self, name: &'static str, variant: Result<V>) {
        match variant {
            Ok(variant) => drop(self.variants.insert(name, Box::new(variant))),
            Err(error) => drop(self.failures.insert(name, error.to_string())),
        }
    }
}
