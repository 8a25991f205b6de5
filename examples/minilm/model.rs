//! A BERT that makes sentence embeddings, from a Hugging Face folder: `config.json`, `tokenizer.json`, `model.safetensors`.
//!
//! The sentences of a batch lie behind one another without padding; only attention needs to know where each begins.

use std::error::Error;
use std::fs;
use std::path::Path;

use polyhead::gemm::{PackedMatrix, gemm_packed};
use polyhead::layer::{Config, Inputs, MultiHeadAttention, Outputs, Weights, Workspace};
use polyhead::{HeadsMut, Level, Matrices, MatricesMut, Matrix, MatrixMut, Options};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tokenizers::{Tokenizer, TruncationParams};

use crate::math::{LayerNorm, add, gelu, pool};

/// Rows that pass the feed-forward network at once, at most: what is between its two products (1536 floats a row) is then still in
/// the L2 cache when the second one reads it, and there are enough blocks for several threads. Sentences a second on two threads,
/// batches of 32 (480 tokens), with 24 / 36 / 48 / 72 / all rows: 432 / 457 / 460 / 437 / 405; on one thread no difference (AMD EPYC
/// (Zen 3), AVX2, two virtual cores, 2026-11-30, medians of six runs).
const BLOCK_ROWS: usize = 48;

pub(crate) type Result<T> = core::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Numbers of `config.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) width: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    /// Width between the two products of a feed-forward network.
    inner: usize,
    positions: usize,
    vocabulary: usize,
    token_types: usize,
    eps: f32,
}

impl Sizes {
    fn read(path: &Path) -> Result<Self> {
        let json: Value = serde_json::from_slice(&read(path)?).map_err(|error| in_file(path, error))?;
        let size = |key: &str| -> Result<usize> {
            let value = json[key].as_u64().filter(|&value| value > 0);
            Ok(usize::try_from(value.ok_or_else(|| in_file(path, format!("no size {key}")))?)?)
        };
        // What this program computes.
        for (key, expected) in [("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")]
        {
            let value = json.get(key).and_then(Value::as_str).unwrap_or(expected);
            if value != expected {
                return Err(in_file(path, format!("{key} is {value}, only {expected} is known here")));
            }
        }
        Ok(Self {
            width: size("hidden_size")?,
            layers: size("num_hidden_layers")?,
            heads: size("num_attention_heads")?,
            inner: size("intermediate_size")?,
            positions: size("max_position_embeddings")?,
            vocabulary: size("vocab_size")?,
            token_types: size("type_vocab_size")?,
            eps: json["layer_norm_eps"].as_f64().unwrap_or(1e-12) as f32,
        })
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| in_file(path, error))
}

/// An error that names its file, in a line.
fn in_file(path: &Path, error: impl core::fmt::Display) -> Box<dyn Error + Send + Sync> {
    format!("{}: {}", path.display(), error.to_string().replace('\n', " ")).into()
}

/// A file of weights.
struct Checkpoint<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl<'a> Checkpoint<'a> {
    fn new(path: &'a Path, bytes: &'a [u8]) -> Result<Self> {
        Ok(Self { path, tensors: SafeTensors::deserialize(bytes).map_err(|error| in_file(path, error))? })
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let wrong = |what: String| in_file(self.path, what);
        let tensor = self.tensors.tensor(name).map_err(|_| wrong(format!("no tensor {name}")))?;
        if tensor.dtype() != Dtype::F32 || tensor.shape() != shape {
            let (dtype, actual) = (tensor.dtype(), tensor.shape());
            return Err(wrong(format!("{name} is {dtype:?} of shape {actual:?}, expected F32 of {shape:?}")));
        }
        Ok(tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
    }

    fn layer_norm(&self, name: &str, sizes: &Sizes) -> Result<LayerNorm> {
        let part = |part: &str| self.tensor(&format!("{name}.{part}"), &[sizes.width]);
        Ok(LayerNorm { weight: part("weight")?, bias: part("bias")?, eps: sizes.eps })
    }

    /// Weight (outputs, inputs) and bias.
    fn linear(&self, name: &str, [outputs, inputs]: [usize; 2]) -> Result<(Vec<f32>, Vec<f32>)> {
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        Ok((weight, self.tensor(&format!("{name}.bias"), &[outputs])?))
    }

    fn dense(&self, name: &str, shape: [usize; 2], level: Level) -> Result<Dense> {
        let (weight, bias) = self.linear(name, shape)?;
        let transposed = Matrix::contiguous(&weight, shape)?.permute([1, 0])?;
        Ok(Dense { weight: PackedMatrix::new(&transposed, Some(level))?, bias })
    }

    fn attention(&self, name: &str, sizes: &Sizes, level: Level) -> Result<MultiHeadAttention> {
        let shape = [sizes.width; 2];
        let [(q, q_bias), (k, k_bias), (v, v_bias), (out, out_bias)] =
            ["self.query", "self.key", "self.value", "output.dense"]
                .map(|part| self.linear(&format!("{name}.{part}"), shape))
                .into_iter()
                .collect::<Result<Vec<_>>>()?
                .try_into()
                .map_err(|_| "four projections")?;
        let [q, k, v, out] = [&q, &k, &v, &out].map(|weight| Matrix::contiguous(weight, shape));
        let weights =
            Weights::new(q?, k?, v?, out?).biases(Some(&q_bias), Some(&k_bias), Some(&v_bias), Some(&out_bias));
        Ok(MultiHeadAttention::new(Config::new(sizes.width, sizes.heads).level(level), &weights)?)
    }

    fn layer(&self, name: &str, sizes: &Sizes, level: Level) -> Result<Layer> {
        let Sizes { width, inner, .. } = *sizes;
        Ok(Layer {
            attention: self.attention(&format!("{name}.attention"), sizes, level)?,
            attention_norm: self.layer_norm(&format!("{name}.attention.output.LayerNorm"), sizes)?,
            up: self.dense(&format!("{name}.intermediate.dense"), [inner, width], level)?,
            down: self.dense(&format!("{name}.output.dense"), [width, inner], level)?,
            output_norm: self.layer_norm(&format!("{name}.output.LayerNorm"), sizes)?,
        })
    }
}

/// `x W^T + b`.
struct Dense {
    weight: PackedMatrix,
    bias: Vec<f32>,
}

impl Dense {
    fn apply(&self, x: &[f32], out: &mut [f32]) -> polyhead::Result<()> {
        let [inputs, outputs] = self.weight.shape();
        let rows = x.len() / inputs;
        let x = Matrix::contiguous(x, [rows, inputs])?;
        gemm_packed(&x, &self.weight, Some(&self.bias), &mut MatrixMut::contiguous(out, [rows, outputs])?)
    }
}

/// `x = norm(x + attention(x))`, then `x = norm(x + down(gelu(up(x))))`.
struct Layer {
    attention: MultiHeadAttention,
    attention_norm: LayerNorm,
    up: Dense,
    down: Dense,
    output_norm: LayerNorm,
}

impl Layer {
    /// All tokens, in blocks that threads share.
    fn apply(&self, starts: &[usize], buffers: &mut Buffers, weights: Option<HeadsMut<'_, f32>>) -> Result<()> {
        let Buffers { x, y, hidden, workspace } = buffers;
        let (width, inner) = (self.attention_norm.weight.len(), self.up.bias.len());
        let rows = x.len() / width;
        let shape = [1, rows, width];
        let outputs = Outputs::new(MatricesMut::contiguous(y, shape)?);
        let (inputs, outputs) = match weights {
            // One sentence only: weights of packed tokens would have no shape.
            Some(weights) => (Inputs::self_attention(Matrices::contiguous(x, shape)?), outputs.weights(weights)),
            None => (Inputs::packed(Matrix::contiguous(x, [rows, width])?, starts), outputs),
        };
        self.attention.forward_into(&inputs, outputs, &Options::new(), workspace)?;

        // As equal as can be.
        let height = rows.div_ceil(rows.div_ceil(BLOCK_ROWS));
        let blocks = x.par_chunks_mut(height * width).zip(y.par_chunks_mut(height * width));
        blocks
            .zip(hidden.par_chunks_mut(height * inner))
            .try_for_each(|((x, y), hidden)| self.feed_forward(x, y, hidden))?;
        Ok(())
    }

    /// What follows attention, for some tokens; `y` is attention's output.
    fn feed_forward(&self, x: &mut [f32], y: &mut [f32], hidden: &mut [f32]) -> polyhead::Result<()> {
        self.attention_norm.add_and_apply(x, y);
        self.up.apply(x, hidden)?;
        gelu(hidden);
        self.down.apply(hidden, y)?;
        self.output_norm.add_and_apply(x, y);
        Ok(())
    }
}

/// Token ids of sentences behind one another: sentence `i` has `starts[i]..starts[i + 1]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<u32>,
    pub(crate) starts: Vec<usize>,
}

/// Memory that calls reuse.
#[derive(Default)]
pub(crate) struct Buffers {
    /// A row for each token: the model's state, what is to be added to it, and the feed-forward network's inside.
    x: Vec<f32>,
    y: Vec<f32>,
    hidden: Vec<f32>,
    workspace: Workspace,
}

pub(crate) struct Model {
    pub(crate) sizes: Sizes,
    pub(crate) level: Level,
    tokenizer: Tokenizer,
    words: Vec<f32>,
    /// Of each position, with the embedding of token type 0 added.
    positions: Vec<f32>,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

impl Model {
    /// Reads a folder and packs the weights.
    pub(crate) fn load(folder: &Path, level: Level) -> Result<Self> {
        let sizes = Sizes::read(&folder.join("config.json"))?;
        let path = folder.join("tokenizer.json");
        let tokenizer = tokenizer(&path, &sizes).map_err(|error| in_file(&path, error))?;
        let path = folder.join("model.safetensors");
        let bytes = read(&path)?;
        let checkpoint = Checkpoint::new(&path, &bytes)?;
        let Sizes { width, positions, vocabulary, token_types, .. } = sizes;
        let table = |name: &str, rows: usize| checkpoint.tensor(&format!("embeddings.{name}.weight"), &[rows, width]);
        let mut positions = table("position_embeddings", positions)?;
        let types = table("token_type_embeddings", token_types)?;
        positions.chunks_exact_mut(width).for_each(|row| add(row, &types[..width]));
        let layer = |i: usize| checkpoint.layer(&format!("encoder.layer.{i}"), &sizes, level);
        Ok(Self {
            level,
            tokenizer,
            words: table("word_embeddings", vocabulary)?,
            positions,
            norm: checkpoint.layer_norm("embeddings.LayerNorm", &sizes)?,
            layers: (0..sizes.layers).map(layer).collect::<Result<_>>()?,
            sizes,
        })
    }

    pub(crate) fn tokenize<S: AsRef<str>>(&self, sentences: &[S]) -> Result<Tokens> {
        let mut tokens = Tokens { ids: Vec::new(), starts: vec![0] };
        for sentence in sentences {
            tokens.ids.extend_from_slice(self.tokenizer.encode_fast(sentence.as_ref(), true)?.get_ids());
            tokens.starts.push(tokens.ids.len());
        }
        Ok(tokens)
    }

    /// What a token stands for.
    pub(crate) fn piece(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string())
    }

    /// The sentences' embeddings, (sentences, width), each of length 1.
    pub(crate) fn embed(&self, tokens: &Tokens, buffers: &mut Buffers, embeddings: &mut Vec<f32>) -> Result<()> {
        self.encode(tokens, buffers, None)?;
        let (width, sentences) = (self.sizes.width, tokens.starts.len() - 1);
        embeddings.resize(sentences * width, 0.0);
        for (embedding, sentence) in embeddings.chunks_exact_mut(width).zip(tokens.starts.windows(2)) {
            pool(&buffers.x[sentence[0] * width..sentence[1] * width], embedding);
        }
        Ok(())
    }

    /// Attention weights of one sentence, (layers, heads, tokens, tokens).
    pub(crate) fn attention(&self, ids: &[u32], buffers: &mut Buffers) -> Result<Vec<f32>> {
        let tokens = Tokens { ids: ids.to_vec(), starts: vec![0, ids.len()] };
        let mut weights = vec![0.0; self.sizes.layers * self.sizes.heads * ids.len() * ids.len()];
        self.encode(&tokens, buffers, Some(&mut weights))?;
        Ok(weights)
    }

    /// Leaves the last layer's output in `buffers.x`.
    fn encode(&self, tokens: &Tokens, buffers: &mut Buffers, weights: Option<&mut [f32]>) -> Result<()> {
        let (Sizes { width, heads, inner, .. }, count) = (self.sizes, tokens.ids.len());
        for (buffer, width) in [(&mut buffers.x, width), (&mut buffers.y, width), (&mut buffers.hidden, inner)] {
            buffer.resize(count * width, 0.0);
        }
        if count == 0 {
            return Ok(());
        }
        self.look_up(tokens, &mut buffers.x)?;
        let mut maps = weights.into_iter().flat_map(|weights| weights.chunks_exact_mut(heads * count * count));
        for layer in &self.layers {
            let map = maps.next().map(|map| HeadsMut::bhsd(map, [1, heads, count, count])).transpose()?;
            layer.apply(&tokens.starts, buffers, map)?;
        }
        Ok(())
    }

    /// Embeddings of words and positions.
    fn look_up(&self, tokens: &Tokens, x: &mut [f32]) -> Result<()> {
        let width = self.sizes.width;
        for sentence in tokens.starts.windows(2) {
            let (from, to) = (sentence[0], sentence[1]);
            if to - from > self.sizes.positions {
                let (count, most) = (to - from, self.sizes.positions);
                return Err(format!("a sentence has {count} tokens, the model takes {most} at most").into());
            }
            let rows = x[from * width..to * width].chunks_exact_mut(width);
            let positions = self.positions.chunks_exact(width);
            for ((row, position), &id) in rows.zip(positions).zip(&tokens.ids[from..to]) {
                let word = self.words.get(id as usize * width..(id as usize + 1) * width);
                row.copy_from_slice(word.ok_or_else(|| format!("the model has no token {id}"))?);
                add(row, position);
            }
        }
        self.norm.apply(x);
        Ok(())
    }
}

/// Without the padding that the file asks for, and for no more tokens than there are positions.
fn tokenizer(path: &Path, sizes: &Sizes) -> Result<Tokenizer> {
    let mut tokenizer = Tokenizer::from_bytes(fs::read(path)?)?;
    tokenizer.with_padding(None);
    let truncation = tokenizer.get_truncation().cloned();
    let max_length = truncation.as_ref().map_or(sizes.positions, |params| params.max_length.min(sizes.positions));
    tokenizer.with_truncation(Some(TruncationParams { max_length, ..truncation.unwrap_or_default() }))?;
    Ok(tokenizer)
}
