//! Weights from safetensors files.

use half::{bf16, f16};
use polyhead::layer::{StateDict, Tensor};
use polyhead::{Element, Error};
use safetensors::{Dtype, serialize, tensor::TensorView};

use crate::support::Golden;

fn file(name: &str) -> Vec<u8> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_file_of_pytorch_is_its_state_dict() {
    let (golden, bytes) = (Golden::load("torch_mha"), file("torch_mha.safetensors"));
    fn check<T: Element>(golden: &Golden, bytes: &[u8]) {
        let state = StateDict::<T>::from_safetensors(bytes, "self/state.").expect("a file");
        let names: Vec<&str> = state.iter().map(|(name, _)| name).collect();
        let expected = ["in_proj_bias", "in_proj_weight", "out_proj.bias", "out_proj.weight"];
        assert_eq!(names, expected.map(|name| format!("self/state.{name}")));
        for (name, tensor) in state.iter() {
            let expected = golden.f32(name);
            assert_eq!(tensor.shape, expected.shape);
            assert!(tensor.data.iter().zip(&expected.data).all(|(x, &y)| *x == T::from_f32_nearest(y)), "{name}");
        }
    }
    check::<f32>(&golden, &bytes);
    check::<f16>(&golden, &bytes);
    check::<bf16>(&golden, &bytes);
}

#[test]
fn halves_are_read_exactly_and_other_types_refused() {
    let (halves, brains) = ([0x3c01u16, 0x8000, 0x7bff], [0x3f81u16, 0xff7f, 0x0001]);
    let [halves_bytes, brains_bytes] = [halves, brains].map(|bits| bits.map(u16::to_le_bytes).concat());
    let view = |dtype, bytes| TensorView::new(dtype, vec![3], bytes).expect("three elements");
    let bytes = [view(Dtype::F16, &halves_bytes), view(Dtype::BF16, &brains_bytes)];
    let [half, brain] = bytes;
    let bytes = serialize([("a.half", half), ("a.brain", brain), ("b.half", view(Dtype::I16, &halves_bytes))], None);
    let bytes = bytes.expect("a file");
    let state = StateDict::<f32>::from_safetensors(&bytes, "a.").expect("a file");
    let tensor = |data: [f32; 3]| Tensor { shape: vec![3], data: data.to_vec() };
    assert_eq!(state.get("a.half"), Some(&tensor(halves.map(|bits| f16::from_bits(bits).to_f32()))));
    assert_eq!(state.get("a.brain"), Some(&tensor(brains.map(|bits| bf16::from_bits(bits).to_f32()))));
    assert_eq!((state.get("b.half"), state.iter().count()), (None, 2));
    let error = StateDict::<f32>::from_safetensors(&bytes, "b.").unwrap_err();
    assert_eq!(error, Error::TensorType { name: "b.half".to_owned(), actual: "I16".to_owned() });
    for broken in [&bytes[..7], &bytes[..bytes.len() - 1], &[0xff; 40], &[]] {
        let error = StateDict::<f32>::from_safetensors(broken, "").unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
    }
}
