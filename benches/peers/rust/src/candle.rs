//! candle: its flash attention for CPUs, and the plain form of two products and a softmax.

use bytemuck::{AnyBitPattern, NoUninit};
use candle_core::{DType, Device, Tensor, WithDType};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};

use crate::Result;
use crate::problem::{Case, Dtype, Prepared, Problem, Variant};

/// Operands and the last result, (batch, heads, seq, dim) but as `run` wants them.
struct Attend {
    case: Case,
    qkv: [Tensor; 3],
    mask: Option<Tensor>,
    out: Option<Tensor>,
    run: fn(&Attend) -> Result<Tensor>,
}

impl Variant for Attend {
    fn run(&mut self) -> Result<()> {
        self.out = Some((self.run)(self)?);
        Ok(())
    }

    fn output(&self) -> Result<Vec<f32>> {
        let out = self.out.as_ref().ok_or("not run yet")?;
        Ok(out.to_dtype(DType::F32)?.contiguous()?.flatten_all()?.to_vec1()?)
    }
}

fn scale(case: &Case) -> f64 {
    (case.dim as f64).sqrt().recip()
}

/// The queries of a group are the rows of one product with their KV head.
fn plain(attend: &Attend) -> Result<Tensor> {
    let (case, [q, k, v]) = (&attend.case, &attend.qkv);
    let &Case { batch, heads, kv_heads, seqlen_q, seqlen_k, dim, .. } = case;
    let rows = heads / kv_heads * seqlen_q;
    let q = (q.reshape((batch, kv_heads, rows, dim))? * scale(case))?;
    let mut scores = q.matmul(&k.t()?)?;
    if let Some(mask) = &attend.mask {
        let by_head = scores.reshape((batch, heads, seqlen_q, seqlen_k))?;
        scores = by_head.broadcast_add(mask)?.reshape((batch, kv_heads, rows, seqlen_k))?;
    }
    let weights = candle_nn::ops::softmax_last_dim(&scores)?;
    Ok(weights.matmul(v)?.reshape((batch, heads, seqlen_q, dim))?)
}

/// Operands are (batch, seq, heads, dim).
fn flash(attend: &Attend) -> Result<Tensor> {
    let (case, [q, k, v]) = (&attend.case, &attend.qkv);
    let mask = match &attend.mask {
        Some(mask) => AttnMask::Mask(mask.clone()),
        None if case.causal => AttnMask::causal_with_offset(case.seqlen_k - case.seqlen_q),
        None => AttnMask::None,
    };
    let scale = scale(case) as f32;
    Ok(match q.dtype() {
        DType::F32 => flash_attn::<f32>(q, k, v, scale, mask, None, None)?,
        DType::F16 => flash_attn::<f16>(q, k, v, scale, mask, None, None)?,
        DType::BF16 => flash_attn::<bf16>(q, k, v, scale, mask, None, None)?,
        other => return Err(format!("no flash attention of {other:?}").into()),
    })
}

fn tensors<T: WithDType + NoUninit + AnyBitPattern>(problem: &Problem) -> Result<[Tensor; 3]> {
    let (q, kv) = (problem.case.q_shape(), problem.case.kv_shape());
    let [a, b, c] = problem.qkv::<T>()?;
    let tensor = |data, [b, h, s, d]: [usize; 4]| Tensor::from_vec(data, (b, h, s, d), &Device::Cpu);
    Ok([tensor(a, q)?, tensor(b, kv)?, tensor(c, kv)?])
}

fn prepare_plain(problem: &Problem, qkv: &[Tensor; 3]) -> Result<Attend> {
    let [b, h, q, k] = problem.case.mask_shape();
    let tensor = |data| Tensor::from_vec(data, (b, h, q, k), &Device::Cpu)?.to_dtype(qkv[0].dtype());
    let mask = problem.additive_mask()?.map(tensor).transpose()?;
    Ok(Attend { case: problem.case.clone(), qkv: qkv.clone(), mask, out: None, run: plain })
}

fn prepare_flash(problem: &Problem, qkv: &[Tensor; 3]) -> Result<Attend> {
    let case = problem.case.clone();
    let mask = if problem.case.mask.is_some() {
        let [b, h, q, k] = case.mask_shape();
        let mask = Tensor::from_vec(problem.additive_mask()?.ok_or("no mask")?, (b, h, q, k), &Device::Cpu)?;
        let rows = mask.broadcast_as((b, h, case.seqlen_q, k))?.contiguous()?;
        Some(rows.to_dtype(qkv[0].dtype())?)
    } else {
        None
    };
    // It packs the operands of more than one batch item itself: here they are packed for it.
    let tokens_first = |x: &Tensor| if case.batch > 1 { x.transpose(1, 2)?.contiguous() } else { x.transpose(1, 2) };
    let [q, k, v] = qkv;
    let qkv = [tokens_first(q)?, tokens_first(k)?, tokens_first(v)?];
    Ok(Attend { case, qkv, mask, out: None, run: flash })
}

pub(crate) fn prepare(problem: &Problem) -> Result<Prepared> {
    let qkv = match problem.dtype {
        Dtype::F32 => tensors::<f32>(problem)?,
        Dtype::F16 => tensors::<f16>(problem)?,
        Dtype::Bf16 => tensors::<bf16>(problem)?,
    };
    let mut prepared = Prepared::default();
    prepared.add("plain", prepare_plain(problem, &qkv));
    prepared.add("flash", prepare_flash(problem, &qkv));
    Ok(prepared)
}
