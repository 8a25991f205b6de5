//! Multi-head attention on real sentences, and what many heads give over one.
//!
//! ```text
//! cargo run --release --example quickstart
//! ```
//!
//! Takes the queries, keys and values of one layer of a real sentence model (all-MiniLM-L6-v2, 12 heads of 32), runs
//! them through [`MultiHead`], compares the result with PyTorch's, times it, and then looks at what the heads attend
//! to: as a table here, and as heat maps in `attention_heads.svg`. The same numbers seen as *one* head of 384 stand
//! beside it.

mod heads;
mod heat_map;
mod minilm;
mod picture;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use polyhead::{Explanation, Heads, HeadsMut, MultiHead, Options, Outputs, Shape};

use heads::HeadMaps;
use minilm::MiniLm;

/// Largest error against PyTorch, relative to the largest output.
const TOLERANCE: f64 = 1e-5;
/// Runs that the time is the median of.
const REPEATS: usize = 500;
/// The sentence and the word to look at. Sentence 0: "The animal didn't cross the street because it was too tired."
const SENTENCE: usize = 0;
const WORD: &str = "it";
const PICTURE: &str = "attention_heads.svg";

fn main() -> ExitCode {
    match quickstart() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quickstart: {error}");
            ExitCode::FAILURE
        }
    }
}

fn quickstart() -> Result<(), Box<dyn Error>> {
    let model = MiniLm::load()?;
    let MiniLm { batch, seqlen, num_heads, layer, .. } = model;
    println!("layer {layer} of all-MiniLM-L6-v2: {batch} sentences of up to {seqlen} tokens, {num_heads} heads\n");

    let many = attend(&model, num_heads)?;
    check(&many.out, &model.expected)?;
    report("many heads", &many);
    let one = attend(&model, 1)?;
    report("one head  ", &one);

    let many = HeadMaps::new(&many.weights, num_heads, &model);
    let one = HeadMaps::new(&one.weights, 1, &model);
    println!("\n{}", model.sentences[SENTENCE]);
    table(&many, &one, &model)?;
    differences(&many);

    picture::draw(Path::new(PICTURE), &many, &one, &model, SENTENCE, WORD)?;
    println!("\n{PICTURE}: what every word of the sentence attends to, in each head and in the single one");
    Ok(())
}

/// What one way to cut the layer into heads gives.
struct Attention {
    /// (batch, seqlen, num_heads, head_dim): the heads of a token side by side.
    out: Vec<f32>,
    /// (batch, num_heads, seqlen, seqlen).
    weights: Vec<f32>,
    explanation: Explanation,
    median: Duration,
}

/// Attention with so many heads: 12 as the model was trained, or 1 as wide as all of them.
///
/// q, k, v lie as a projection leaves them, (batch, seqlen, width). How many heads that is, is only how it is looked
/// at.
fn attend(model: &MiniLm, num_heads: usize) -> polyhead::Result<Attention> {
    let MiniLm { batch, seqlen, width, .. } = *model;
    let head_dim = width / num_heads;
    let layout = [batch, seqlen, num_heads, head_dim];
    let (q, k, v) = (Heads::bshd(&model.q, layout)?, Heads::bshd(&model.k, layout)?, Heads::bshd(&model.v, layout)?);

    // Short sentences are padded: keys beyond their length are not seen.
    let options = Options::new().key_lengths(&model.lengths);
    let (num_kv_heads, seqlen_q, seqlen_k, head_dim_v) = (num_heads, seqlen, seqlen, head_dim);
    let shape = Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v };
    let mut plan = MultiHead::new(shape, &options)?;

    let mut out = vec![0.0f32; batch * seqlen * width];
    let mut times = [Duration::ZERO; REPEATS];
    for time in &mut times {
        let start = Instant::now();
        plan.run(&q, &k, &v, HeadsMut::bshd(&mut out, layout)?)?;
        *time = start.elapsed();
    }
    times.sort_unstable();

    // Once more with the attention weights, which a plain run never has in memory.
    let mut weights = vec![0.0f32; batch * num_heads * seqlen * seqlen];
    let weights_view = HeadsMut::bhsd(&mut weights, [batch, num_heads, seqlen, seqlen])?;
    plan.run_with(&q, &k, &v, Outputs::new(HeadsMut::bshd(&mut out, layout)?).weights(weights_view))?;
    Ok(Attention { out, weights, explanation: plan.explain(), median: times[REPEATS / 2] })
}

/// Compares with what PyTorch computed in float64.
fn check(out: &[f32], expected: &[f32]) -> Result<(), Box<dyn Error>> {
    let largest = expected.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
    // Not `f64::max`: a NaN must not pass.
    let errors = out.iter().zip(expected).map(|(&x, &y)| (f64::from(x) - f64::from(y)).abs() / largest);
    let worst = errors.fold(0.0, |worst, error| if error <= worst { worst } else { error });
    println!("largest error against PyTorch: {worst:.1e} of the largest output (allowed {TOLERANCE:.0e})");
    if out.len() == expected.len() && worst <= TOLERANCE {
        return Ok(());
    }
    Err(format!("the output differs from PyTorch's by {worst:.1e} of its largest element").into())
}

fn report(name: &str, attention: &Attention) {
    let Attention { explanation, median, .. } = attention;
    let gflops = explanation.flops as f64 / median.as_secs_f64() / 1e9;
    println!("{name}: {:.1} us (median of {REPEATS}), {gflops:.1} GFLOP/s; {explanation}", median.as_secs_f64() * 1e6);
}

/// A line for each head, and one for the single head.
fn table(many: &HeadMaps, one: &HeadMaps, model: &MiniLm) -> Result<(), Box<dyn Error>> {
    let tokens = &model.tokens[SENTENCE];
    let word = tokens.iter().position(|token| token == WORD).ok_or("the word is not in the sentence")?;
    println!("head       entropy  distance  what \"{WORD}\" attends to most");
    let line = |name: &str, maps: &HeadMaps, head: usize| {
        let top = maps.top(SENTENCE, head, word, 3);
        let words: Vec<String> = top.iter().map(|&(key, p)| format!("{:<8} {p:.3}", tokens[key])).collect();
        println!("{name:<9} {:>5.2} bit {:>9.2}  {}", maps.entropy(head), maps.distance(head), words.join("   "));
    };
    for head in 0..many.num_heads() {
        line(&head.to_string(), many, head);
    }
    line("one head", one, 0);
    println!(
        "\nEntropy of a row of weights in bits; distance from a query to what it attends to in tokens; means over {} sentences.\n\
         \"One head\" is no other model, only the same q, k, v with each token's heads taken as one vector of {} under one\n\
         softmax. Its scores are the sums of all heads' scores over sqrt({}): {} patterns become one, in which the key that\n\
         most heads agree on wins. A model trained with one head would have learnt other q, k, v.",
        model.batch,
        model.width,
        many.num_heads(),
        many.num_heads()
    );
    Ok(())
}

fn differences(maps: &HeadMaps) {
    let pairs = maps.overlaps();
    let mean = pairs.iter().map(|pair| pair.overlap).sum::<f64>() / pairs.len() as f64;
    println!("\nHow much two heads share (sum over keys of the smaller weight): {mean:.2} on average");
    let by_overlap = |a: &&heads::Pair, b: &&heads::Pair| a.overlap.total_cmp(&b.overlap);
    for (what, pair) in
        [("most alike", pairs.iter().max_by(by_overlap)), ("least alike", pairs.iter().min_by(by_overlap))]
    {
        if let Some(heads::Pair { a, b, overlap }) = pair {
            println!("  {what:<11}  heads {a} and {b}: {overlap:.2}");
        }
    }
}
