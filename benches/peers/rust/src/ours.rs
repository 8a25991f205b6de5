//! polyhead::multi_head, called from outside of its pool as most users do.

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};
use polyhead::{Bias, Diagonal, Element, Heads, HeadsMut, Level, Mask, Options, View, multi_head};

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

fn prepare(problem: &Problem) -> Result<Prepared> {
    let mut prepared = Prepared::default();
    match problem.dtype {
        Dtype::F32 => prepared.add("fused", Fused::<f32>::new(problem)),
        Dtype::F16 => prepared.add("fused", Fused::<f16>::new(problem)),
        Dtype::Bf16 => prepared.add("fused", Fused::<bf16>::new(problem)),
    }
    Ok(prepared)
}
