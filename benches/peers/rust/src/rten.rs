//! rten: its Attention operator, and a plain graph. The parent writes both models.

use rten::{Model, NodeId, Value, ValueOrView};
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use crate::Result;
use crate::problem::{Dtype, MaskKind, Prepared, Problem, Variant};

enum Mask {
    /// What ONNX calls bool.
    Seen(Tensor<i32>),
    Added(Tensor<f32>),
}

struct Graph {
    model: Model,
    inputs: Vec<(NodeId, Tensor<f32>)>,
    mask: Option<(NodeId, Mask)>,
    out_id: NodeId,
    out: Option<Value>,
}

impl Graph {
    fn load(problem: &Problem, name: &str) -> Result<Self> {
        let model = Model::load_file(problem.directory.join(name))?;
        let (q, kv) = (problem.case.q_shape(), problem.case.kv_shape());
        let data = problem.qkv::<f32>()?.into_iter().zip([("q", q), ("k", kv), ("v", kv)]);
        let inputs = data
            .map(|(data, (name, shape))| Ok((model.node_id(name)?, Tensor::from_data(&shape, data))))
            .collect::<Result<_>>()?;
        let out_id = model.node_id("out")?;
        Ok(Self { model, inputs, mask: None, out_id, out: None })
    }

    fn masked(mut self, mask: Option<Mask>) -> Result<Self> {
        self.mask = mask.map(|mask| Ok::<_, Box<dyn std::error::Error>>((self.model.node_id("mask")?, mask))).transpose()?;
        Ok(self)
    }
}

impl Variant for Graph {
    fn run(&mut self) -> Result<()> {
        let mut inputs: Vec<(NodeId, ValueOrView<'_>)> =
            self.inputs.iter().map(|(id, data)| (*id, data.view().into())).collect();
        match &self.mask {
            Some((id, Mask::Seen(mask))) => inputs.push((*id, mask.view().into())),
            Some((id, Mask::Added(mask))) => inputs.push((*id, mask.view().into())),
            None => {}
        }
        self.out = self.model.run(inputs, &[self.out_id], None)?.pop();
        Ok(())
    }

    fn output(&self) -> Result<Vec<f32>> {
        match &self.out {
            Some(Value::FloatTensor(out)) => Ok(out.to_vec()),
            _ => Err("no float output".into()),
        }
    }
}

fn attention(problem: &Problem) -> Result<Graph> {
    let case = &problem.case;
    let seen = |mask: Vec<bool>| mask.into_iter().map(i32::from).collect::<Vec<_>>();
    let mask = if case.causal && case.seqlen_q != case.seqlen_k {
        let shape = [1, 1, case.seqlen_q, case.seqlen_k];
        Some(Mask::Seen(Tensor::from_data(&shape, seen(problem.causal_mask()))))
    } else if case.mask == Some(MaskKind::Key) {
        problem.key_mask()?.map(|mask| Mask::Seen(Tensor::from_data(&case.mask_shape(), seen(mask))))
    } else {
        problem.float_mask()?.map(|mask| Mask::Added(Tensor::from_data(&case.mask_shape(), mask)))
    };
    Graph::load(problem, "attention.onnx")?.masked(mask)
}

fn plain(problem: &Problem) -> Result<Graph> {
    let mask = problem.additive_mask()?;
    let mask = mask.map(|mask| Mask::Added(Tensor::from_data(&problem.case.mask_shape(), mask)));
    Graph::load(problem, "plain.onnx")?.masked(mask)
}

pub(crate) fn prepare(problem: &Problem) -> Result<Prepared> {
    if problem.dtype != Dtype::F32 {
        return Err("only f32".into());
    }
    let mut prepared = Prepared::default();
    prepared.add("attention", attention(problem));
    if problem.directory.join("plain.onnx").exists() {
        prepared.add("plain", plain(problem));
    }
    Ok(prepared)
}
