//! rten: its Attention operator, and a plain graph. The parent writes both models.

use std::rc::Rc;

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

type Operands = [Tensor<f32>; 3];

struct Graph {
    model: Model,
    ids: [NodeId; 3],
    operands: Rc<Operands>,
    mask: Option<(NodeId, Mask)>,
    out_id: NodeId,
    out: Option<Value>,
}

impl Graph {
    fn load(problem: &Problem, operands: &Rc<Operands>, name: &str) -> Result<Self> {
        let model = Model::load_file(problem.directory.join(name))?;
        let ids = [model.node_id("q")?, model.node_id("k")?, model.node_id("v")?];
        let out_id = model.node_id("out")?;
        Ok(Self { model, ids, operands: Rc::clone(operands), mask: None, out_id, out: None })
    }

    fn masked(mut self, mask: Option<Mask>) -> Result<Self> {
        self.mask =
            mask.map(|mask| Ok::<_, Box<dyn std::error::Error>>((self.model.node_id("mask")?, mask))).transpose()?;
        Ok(self)
    }
}

impl Variant for Graph {
    fn run(&mut self) -> Result<()> {
        let mut inputs: Vec<(NodeId, ValueOrView<'_>)> =
            self.ids.into_iter().zip(self.operands.iter()).map(|(id, data)| (id, data.view().into())).collect();
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

fn attention(problem: &Problem, operands: &Rc<Operands>) -> Result<Graph> {
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
    Graph::load(problem, operands, "attention.onnx")?.masked(mask)
}

fn plain(problem: &Problem, operands: &Rc<Operands>) -> Result<Graph> {
    let mask = problem.additive_mask()?;
    let mask = mask.map(|mask| Mask::Added(Tensor::from_data(&problem.case.mask_shape(), mask)));
    Graph::load(problem, operands, "plain.onnx")?.masked(mask)
}

pub(crate) fn prepare(problem: &Problem) -> Result<Prepared> {
    if problem.dtype != Dtype::F32 {
        return Err("only f32".into());
    }
    let (q, kv) = (problem.case.q_shape(), problem.case.kv_shape());
    let [a, b, c] = problem.qkv::<f32>()?;
    let operands = Rc::new([Tensor::from_data(&q, a), Tensor::from_data(&kv, b), Tensor::from_data(&kv, c)]);
    let mut prepared = Prepared::default();
    prepared.add("attention", attention(problem, &operands));
    if problem.directory.join("plain.onnx").exists() {
        prepared.add("plain", plain(problem, &operands));
    }
    Ok(prepared)
}
