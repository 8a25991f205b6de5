//! burn's backend of plain Rust, burn-flex: its tiled attention, and its form of two products and a softmax. It computes
//! in f32, and converts 16-bit operands at each call.

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::{Element, Shape, TensorData};
use burn_flex::FlexTensor;
use burn_flex::ops::attention::{attention_flash, attention_naive};
use bytemuck::Pod;
use half::{bf16, f16};

use crate::Result;
use crate::problem::{Case, Dtype, Prepared, Problem, Variant};

/// Of q, k, v, a mask (true is hidden) and what is added to the scores.
type Attention = fn(
    FlexTensor,
    FlexTensor,
    FlexTensor,
    Option<FlexTensor>,
    Option<FlexTensor>,
    AttentionModuleOptions,
) -> FlexTensor;

/// Operands, which clones share, and the last result.
#[derive(Clone)]
struct Attend {
    qkv: [FlexTensor; 3],
    hidden: Option<FlexTensor>,
    added: Option<FlexTensor>,
    causal: bool,
    out: Option<FlexTensor>,
    run: Attention,
    widen: fn(&FlexTensor) -> Vec<f32>,
}

impl Variant for Attend {
    fn run(&mut self) -> Result<()> {
        let [q, k, v] = self.qkv.clone();
        // The last query sees all keys, and scores are divided by the root of the head dim.
        let options = AttentionModuleOptions { is_causal: self.causal, ..Default::default() };
        self.out = Some((self.run)(q, k, v, self.hidden.clone(), self.added.clone(), options));
        Ok(())
    }

    fn output(&self) -> Result<Vec<f32>> {
        Ok((self.widen)(self.out.as_ref().ok_or("not run yet")?))
    }
}

fn tensor<T: Element>(data: Vec<T>, shape: [usize; 4]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}

/// Repeated for each query: of one row it would do so at each call.
fn hidden(problem: &Problem) -> Result<Option<FlexTensor>> {
    let Case { batch, seqlen_q, seqlen_k, .. } = problem.case;
    Ok(problem.key_mask()?.map(|seen| {
        let rows = seen.chunks_exact(seqlen_k).flat_map(|keys| std::iter::repeat_n(keys, seqlen_q));
        tensor(rows.flatten().map(|seen| !seen).collect(), [batch, 1, seqlen_q, seqlen_k])
    }))
}

fn naive<T: Element + Pod>(problem: &Problem) -> Result<Attend> {
    let (q_shape, kv_shape) = (problem.case.q_shape(), problem.case.kv_shape());
    let [q, k, v] = problem.qkv::<T>()?;
    let added = |mask: Vec<f32>| tensor(mask.into_iter().map(T::from_elem).collect(), problem.case.mask_shape());
    Ok(Attend {
        qkv: [tensor(q, q_shape), tensor(k, kv_shape), tensor(v, kv_shape)],
        hidden: hidden(problem)?,
        added: problem.float_mask()?.map(added),
        causal: problem.case.causal,
        out: None,
        run: attention_naive,
        widen: |out| out.storage::<T>().iter().map(|x| x.to_f32()).collect(),
    })
}

/// The queries of a group are the rows of one product with their KV head: possible if no mask tells them apart. The
/// library itself reads K and V once for each query head.
fn grouped(attend: &Attend, case: &Case) -> Attend {
    let rows = case.heads / case.kv_heads * case.seqlen_q;
    let [q, k, v] = attend.qkv.clone();
    let q = q.reshape(Shape::from([case.batch, case.kv_heads, rows, case.dim]));
    Attend { qkv: [q, k, v], ..attend.clone() }
}

pub(crate) fn prepare(problem: &Problem) -> Result<Prepared> {
    let naive = match problem.dtype {
        Dtype::F32 => naive::<f32>(problem)?,
        Dtype::F16 => naive::<f16>(problem)?,
        Dtype::Bf16 => naive::<bf16>(problem)?,
    };
    let flash = Attend { run: attention_flash, ..naive.clone() };
    let case = &problem.case;
    let mut prepared = Prepared::default();
    if case.heads != case.kv_heads && !case.causal && case.mask.is_none() {
        prepared.add("naive_grouped_rows", Ok(grouped(&naive, case)));
        prepared.add("flash_grouped_rows", Ok(grouped(&flash, case)));
    }
    prepared.add("naive", Ok(naive));
    prepared.add("flash", Ok(flash));
    Ok(prepared)
}
