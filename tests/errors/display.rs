//! What errors say: the operand, and both values.

use polyhead::Error;

#[test]
fn errors_name_operand_and_values() {
    let text = |error: Error| error.to_string();
    let (name, shape) = ("encoder.bias".to_owned(), vec![3, 4]);
    let cases = [
        (Error::Shape { operand: "k", axis: "seq", expected: 7, actual: 8 }, "k: axis seq has size 8, expected 7"),
        (Error::HeadGroups { num_heads: 6, num_kv_heads: 4 }, "num_heads (6) is not a multiple of num_kv_heads (4)"),
        (Error::Length { operand: "lse", expected: 7, actual: 6 }, "lse: 7 elements are needed, the slice has 6"),
        (
            Error::Overflow { operand: "view", axis: "row", size: 2, stride: 9 },
            "view: axis row of size 2 and stride 9 overflows the address space",
        ),
        (
            Error::Overlap { operand: "out", axis: "seq", expected: 8, actual: 4 },
            "out: elements overlap, axis seq has stride 4, expected at least 8",
        ),
        (Error::Value { option: "softcap", expected: "positive", actual: -1.5 }, "softcap is -1.5, expected positive"),
        (Error::Memory { bytes: 99 }, "99 bytes cannot be allocated"),
        (Error::Unsupported { what: "a thing" }, "a thing is not supported"),
        (
            Error::Full { what: "pages", capacity: 8, needed: 9 },
            "the cache is full: 9 pages are needed, there is room for 8",
        ),
        (
            Error::Overwritten { needed: 3, oldest: 5 },
            "token 3 is needed and has been overwritten, the oldest left is 5",
        ),
        (Error::UnknownSequence, "the cache has no sequence of this id"),
        (
            Error::TensorShape { name: name.clone(), expected: vec![2], actual: shape.clone() },
            "tensor encoder.bias has shape [3, 4], expected [2]",
        ),
        (Error::MissingTensor { name: name.clone(), expected: vec![] }, "tensor encoder.bias is missing"),
        (
            Error::MissingTensor { name: name.clone(), expected: shape.clone() },
            "tensor encoder.bias of shape [3, 4] is missing",
        ),
        (
            Error::UnexpectedTensor { name: name.clone(), shape },
            "tensor encoder.bias of shape [3, 4] is not one of this layer's",
        ),
        (
            Error::TensorType { name, actual: "I32".to_owned() },
            "tensor encoder.bias has type I32, expected f32, f16 or bf16",
        ),
        (Error::Checkpoint { reason: "no header".to_owned() }, "the checkpoint cannot be read: no header"),
        (Error::Rank { operand: "Q", expected: "3 or 4", actual: 2 }, "Q has 2 axes, expected 3 or 4"),
        (Error::Missing { argument: "V", needed_by: "K" }, "V is missing, K needs it"),
        (Error::Conflict { argument: "a", with: "b" }, "a and b exclude each other"),
    ];
    for (error, expected) in cases {
        assert_eq!(text(error), expected);
    }
    assert!(text(Error::NoDefaultScale).contains("head_dim 0"));
    let level = Error::LevelUnavailable { requested: "amx", best: "avx2" };
    assert_eq!(text(level), "level amx is not available here, the best level is avx2");
    let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(Error::UnknownSequence);
    assert!(boxed.source().is_none());
}
