//! polyhead::multi_head and its layer, called from outside of its pool as most users do.

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};
use polyhead::layer::{Config, Inputs, MultiHeadAttention, Outputs, Weights, Workspace};
use polyhead::{
    Bias, Diagonal, Element, Heads, HeadsMut, Level, Mask, Matrices, MatricesMut, Matrix, Options, View, multi_head,
};

use crate::problem::{Case, Dtype, Precision, Prepared, Problem, Variant};
use crate::{Peer, Result};

pub(crate) fn peer() -> Peer {
    Peer { version: env!("CARGO_PKG_VERSION"), level: Some(Level::detect().name()), prepare }
}

struct Fused<T> {
    case: Case,
    precision: polyhead::Precision,
    qkv: [Vec<T>; 3],
    key_mask: Option<Vec<bool>>,
    float_mask: Option<Vec<f32>>,
    out: Vec<T>,
}

impl<T: Element + NoUninit + AnyBitPattern> Fused<T> {
    fn new(problem: &Problem) -> Result<Self> {
        let case = problem.case.clone();
        let out = vec![T::default(); case.q_shape().iter().product()];
        let precision = match problem.precision {
            Precision::Highest => polyhead::Precision::Highest,
            Precision::High => polyhead::Precision::High,
            Precision::Medium => polyhead::Precision::Medium,
        };
        let (key_mask, float_mask) = (problem.key_mask()?, problem.float_mask()?);
        Ok(Self { case, precision, qkv: problem.qkv()?, key_mask, float_mask, out })
    }
}

impl<T: Element> Variant for Fused<T> {
    fn run(&mut self) -> Result<()> {
        let (case, [q, k, v]) = (&self.case, &self.qkv);
        let mut options = Options::new().precision(self.precision);
        if case.causal {
            options = options.causal(Diagonal::BottomRight);
        }
        if let Some(mask) = &self.key_mask {
            options = options.mask(Mask::attend(View::contiguous(mask, case.mask_shape())?)?);
        }
        if let Some(mask) = &self.float_mask {
            options = options.bias(Bias::new(View::contiguous(mask, case.mask_shape())?)?);
        }
        let (q, out) = (Heads::bhsd(q, case.q_shape())?, HeadsMut::bhsd(&mut self.out, case.q_shape())?);
        multi_head(&q, &Heads::bhsd(k, case.kv_shape())?, &Heads::bhsd(v, case.kv_shape())?, out, &options)?;
        Ok(())
    }

    fn output(&self) -> Result<Vec<f32>> {
        Ok(self.out.iter().map(|x| x.to_f32()).collect())
    }
}

struct Layer<T: Element> {
    layer: MultiHeadAttention<T>,
    shape: [usize; 3],
    x: Vec<T>,
    out: Vec<T>,
    /// Attention weights, if they are wanted.
    weights: Vec<f32>,
    workspace: Workspace,
}

impl<T: Element + NoUninit + AnyBitPattern> Layer<T> {
    fn new(problem: &Problem) -> Result<Self> {
        let case = &problem.case;
        let width = case.heads * case.dim;
        let [x, weights] = problem.layer::<T>()?;
        let (matrices, biases) = weights.split_at(4 * width * width);
        let matrix = |i: usize| Matrix::contiguous(&matrices[i * width * width..][..width * width], [width, width]);
        let bias = |i: usize| Some(&biases[i * width..][..width]);
        let weights = Weights::new(matrix(0)?, matrix(1)?, matrix(2)?, matrix(3)?);
        let weights = weights.biases(bias(0), bias(1), bias(2), bias(3));
        let layer = MultiHeadAttention::new(Config::new(width, case.heads), &weights)?;
        let shares = if case.need_weights { case.batch * case.seqlen_q * case.seqlen_k } else { 0 };
        Ok(Self {
            layer,
            shape: [case.batch, case.seqlen_q, width],
            out: vec![T::default(); x.len()],
            x,
            weights: vec![0.0; shares],
            workspace: Workspace::new(),
        })
    }
}

impl<T: Element> Variant for Layer<T> {
    fn run(&mut self) -> Result<()> {
        let inputs = Inputs::self_attention(Matrices::contiguous(&self.x, self.shape)?);
        let mut outputs = Outputs::new(MatricesMut::contiguous(&mut self.out, self.shape)?);
        if !self.weights.is_empty() {
            let [batch, seq, _] = self.shape;
            outputs = outputs.averaged_weights(HeadsMut::bhsd(&mut self.weights, [batch, 1, seq, seq])?);
        }
        Ok(self.layer.forward_into(&inputs, outputs, &Options::new(), &mut self.workspace)?)
    }

    fn output(&self) -> Result<Vec<f32>> {
        Ok(self.out.iter().map(|x| x.to_f32()).collect())
    }
}

fn prepare(problem: &Problem) -> Result<Prepared> {
    let mut prepared = Prepared::default();
    if problem.case.kind == "layer" {
        match problem.dtype {
            Dtype::F32 => prepared.add("layer", Layer::<f32>::new(problem)),
            Dtype::F16 => prepared.add("layer", Layer::<f16>::new(problem)),
            Dtype::Bf16 => prepared.add("layer", Layer::<bf16>::new(problem)),
        }
        return Ok(prepared);
    }
    match problem.dtype {
        Dtype::F32 => prepared.add("fused", Fused::<f32>::new(problem)),
        Dtype::F16 => prepared.add("fused", Fused::<f16>::new(problem)),
        Dtype::Bf16 => prepared.add("fused", Fused::<bf16>::new(problem)),
    }
    Ok(prepared)
}
