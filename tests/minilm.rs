//! The example `minilm` against PyTorch: tokens, embeddings and attention of all-MiniLM-L6-v2, on every level.
//!
//! The model's folder is named by `POLYHEAD_MINILM` (the README says how to get it). Without it these tests are skipped aloud, and
//! fail if `POLYHEAD_REQUIRE_MINILM` is 1. The example's mathematics are tested without it, in `math.rs`.

mod support;

#[path = "../examples/minilm/math.rs"]
mod math;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/minilm/model.rs"]
mod model;

use std::path::{Path, PathBuf};

use model::{Buffers, Model, Tokens};
use polyhead::Level;
use support::{Golden, assert_all_close, assert_same_bits, levels};

/// Of embeddings, cosines and attention weights.
const TOLERANCE: f64 = 1e-4;

/// What PyTorch computed for eight sentences.
struct Expected {
    golden: Golden,
    sentences: Vec<String>,
    tokens: Tokens,
}

impl Expected {
    fn load() -> Self {
        let golden = Golden::load("minilm");
        let sentences = serde_json::from_value(golden.json["sentences"].clone()).expect("sentences");
        let (ids, mask) = (golden.i32("input_ids"), golden.bool("attention_mask"));
        let [_, longest] = ids.shape();
        let mut tokens = Tokens { ids: Vec::new(), starts: vec![0] };
        for (ids, mask) in ids.data.chunks_exact(longest).zip(mask.data.chunks_exact(longest)) {
            tokens.ids.extend(ids.iter().zip(mask).filter(|&(_, &token)| token).map(|(&id, _)| id as u32));
            tokens.starts.push(tokens.ids.len());
        }
        Self { golden, sentences, tokens }
    }

    fn first(&self) -> &[u32] {
        &self.tokens.ids[..self.tokens.starts[1]]
    }
}

/// The model's folder, or `None`, said aloud.
fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os("POLYHEAD_MINILM").map(PathBuf::from);
    if folder.is_none() {
        let required = std::env::var("POLYHEAD_REQUIRE_MINILM").is_ok_and(|value| value == "1");
        assert!(!required, "POLYHEAD_REQUIRE_MINILM is 1, and POLYHEAD_MINILM does not name the model's folder");
        eprintln!("SKIPPED: POLYHEAD_MINILM does not name the folder of all-MiniLM-L6-v2");
    }
    folder
}

fn load(folder: &Path, level: Level) -> Model {
    Model::load(folder, level).unwrap_or_else(|error| panic!("{error}"))
}

fn embed(model: &Model, tokens: &Tokens) -> Vec<f32> {
    let mut embeddings = Vec::new();
    model.embed(tokens, &mut Buffers::default(), &mut embeddings).expect("a valid batch");
    embeddings
}

#[test]
fn tokens_embeddings_and_attention_are_those_of_pytorch() {
    let Some(folder) = folder() else { return };
    let expected = Expected::load();
    for &level in levels() {
        let (model, name) = (load(&folder, level), level.name());
        assert_eq!(model.tokenize(&expected.sentences).expect("text"), expected.tokens);

        let embeddings = embed(&model, &expected.tokens);
        let wanted = expected.golden.f32("embeddings");
        assert_all_close(&embeddings, &wanted.data, TOLERANCE, 0.0, format_args!("{name}: embeddings"));
        let rows = || embeddings.chunks_exact(model.sizes.width);
        let cosines: Vec<f32> = rows().flat_map(|a| rows().map(|b| math::cosine(a, b))).collect();
        let wanted_cosines = expected.golden.f32("cosine");
        assert_all_close(&cosines, &wanted_cosines.data, TOLERANCE, 0.0, format_args!("{name}: cosine"));

        let weights = model.attention(expected.first(), &mut Buffers::default()).expect("a valid sentence");
        let wanted_weights = expected.golden.f32("attention_first");
        assert_all_close(&weights, &wanted_weights.data, TOLERANCE, 0.0, format_args!("{name}: attention"));

        let worst = |actual: &[f32], wanted: &[f32]| {
            actual.iter().zip(wanted).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).fold(0.0, f64::max)
        };
        println!(
            "{name}: largest error of embeddings {:.1e}, of cosines {:.1e}, of attention weights {:.1e}",
            worst(&embeddings, &wanted.data),
            worst(&cosines, &wanted_cosines.data),
            worst(&weights, &wanted_weights.data)
        );
    }
}

#[test]
fn an_embedding_does_not_depend_on_the_batch() {
    let Some(folder) = folder() else { return };
    let (expected, model) = (Expected::load(), load(&folder, Level::detect()));
    // One buffer for all, so that what a call left in it shows.
    let (mut buffers, mut alone) = (Buffers::default(), Vec::new());
    let together = embed(&model, &expected.tokens);
    for (sentence, together) in expected.sentences.iter().zip(together.chunks_exact(model.sizes.width)) {
        let tokens = model.tokenize(&[sentence]).expect("text");
        model.embed(&tokens, &mut buffers, &mut alone).expect("a valid batch");
        assert_same_bits(&alone, together, sentence);
    }
}

#[test]
fn empty_and_wrong_batches() {
    let Some(folder) = folder() else { return };
    let model = load(&folder, Level::detect());
    assert!(embed(&model, &Tokens { ids: vec![], starts: vec![0] }).is_empty());
    // Text without words has the two tokens at its ends; text without end is cut.
    assert_eq!(model.tokenize(&[""]).expect("text").ids, [101, 102]);
    let long = model.tokenize(&["word ".repeat(10_000)]).expect("text");
    assert!(long.ids.len() <= 512 && embed(&model, &long).iter().all(|x| x.is_finite()));
    for ids in [vec![u32::MAX], vec![30_522], vec![101; 513]] {
        let tokens = Tokens { starts: vec![0, ids.len()], ids };
        assert!(model.embed(&tokens, &mut Buffers::default(), &mut Vec::new()).is_err());
    }
}

#[test]
fn errors_name_the_file() {
    let folder = std::env::temp_dir().join(format!("polyhead-minilm-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("a temporary file");
    let error = |expected: &[&str]| {
        let error = Model::load(&folder, Level::Portable).err().expect("an incomplete folder").to_string();
        assert!(expected.iter().all(|part| error.contains(part)) && !error.contains('\n'), "{error}");
    };
    error(&["config.json"]);
    write("config.json", "{\n");
    error(&["config.json"]);
    let config = r#"{"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
        "max_position_embeddings": 16, "type_vocab_size": 2"#;
    write("config.json", &format!("{config}}}"));
    error(&["config.json", "vocab_size"]);
    write("config.json", &format!(r#"{config}, "vocab_size": 2, "hidden_act": "relu"}}"#));
    error(&["config.json", "hidden_act", "relu"]);
    write("config.json", &format!(r#"{config}, "vocab_size": 2}}"#));
    error(&["tokenizer.json"]);
    write("tokenizer.json", r#"{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#);
    error(&["model.safetensors"]);
    write("model.safetensors", "no tensors");
    error(&["model.safetensors"]);
    let tensors: [(&str, safetensors::tensor::TensorView<'_>); 0] = [];
    let empty = safetensors::serialize(tensors, None).expect("a file of nothing");
    std::fs::write(folder.join("model.safetensors"), empty).expect("a temporary file");
    error(&["model.safetensors", "embeddings.position_embeddings.weight"]);
    let view =
        |data| safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2, 4], data).expect("8 floats");
    let small = safetensors::serialize([("embeddings.position_embeddings.weight", view(&[0; 32]))], None);
    std::fs::write(folder.join("model.safetensors"), small.expect("a file")).expect("a temporary file");
    error(&["model.safetensors", "[2, 4]", "[16, 4]"]);
    std::fs::remove_dir_all(&folder).expect("the temporary folder");
}
