//! Generation, as far as attention goes: a cache filled token by token, each new token attending to all before it.
//!
//! ```sh
//! cargo run --release --example generate                      # 2000 steps, 4 layers, 32 heads on 8 KV heads, f16
//! cargo run --release --example generate -- --steps 500 --dtype f32 --kv-heads 32 --layers 1
//! ```
//!
//! Prints tokens a second and the rate at which the cache is read, beside the rate at which the same threads read plain memory of
//! the same size. Queries, keys and values are noise; the last step is checked against the `f64` reference.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use polyhead::cache::{KvCache, KvShape};
use polyhead::{Diagonal, Element, Heads, HeadsMut, Level, Options, Result, probe, reference};

/// What the command line asks for.
#[derive(Clone, Debug)]
struct Plan {
    steps: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: String,
}

const USAGE: &str =
    "usage: generate [--steps N] [--layers N] [--heads N] [--kv-heads N] [--head-dim N] [--dtype f32|f16|bf16]";

fn parse(mut args: impl Iterator<Item = String>) -> core::result::Result<Plan, String> {
    let mut plan = Plan { steps: 2000, layers: 4, heads: 32, kv_heads: 8, head_dim: 128, dtype: "f16".into() };
    while let Some(flag) = args.next() {
        let value = args.next().ok_or(format!("{flag} needs a value; {USAGE}"))?;
        let number = || value.parse().ok().filter(|&n| n > 0).ok_or(format!("{flag} needs a number, not {value}"));
        match flag.as_str() {
            "--steps" => plan.steps = number()?,
            "--layers" => plan.layers = number()?,
            "--heads" => plan.heads = number()?,
            "--kv-heads" => plan.kv_heads = number()?,
            "--head-dim" => plan.head_dim = number()?,
            "--dtype" => plan.dtype = value,
            _ => return Err(format!("unknown flag {flag}; {USAGE}")),
        }
    }
    Ok(plan)
}

/// Noise of unit variance.
struct Noise(u64);

impl Noise {
    fn fill<T: Element>(&mut self, to: &mut [T]) {
        for x in to {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *x = T::from_f32_nearest(((self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 3f32.sqrt());
        }
    }
}

/// Progress on a terminal; nothing into a file.
fn progress(step: usize, steps: usize, started: Instant) {
    if std::io::stderr().is_terminal() && (step.is_multiple_of(50) || step == steps) {
        eprint!("\r{step} of {steps} tokens, {:.0} a second ", step as f64 / started.elapsed().as_secs_f64());
        let _ = std::io::stderr().flush();
        if step == steps {
            eprintln!();
        }
    }
}

/// All steps; the time of attention and of appending.
fn generate<T: Element>(plan: &Plan) -> Result<(Duration, Duration)> {
    let &Plan { steps, layers, heads, kv_heads, head_dim, .. } = plan;
    let shape = KvShape { num_kv_heads: kv_heads, head_dim, head_dim_v: head_dim };
    let mut caches = (0..layers).map(|_| KvCache::<T>::new(shape, 1, steps)).collect::<Result<Vec<_>>>()?;
    let options = Options::new().causal(Diagonal::BottomRight);
    let (mut q, mut k, mut v) =
        (vec![0.0f32; heads * head_dim], vec![0.0f32; kv_heads * head_dim], vec![0.0f32; kv_heads * head_dim]);
    let (mut out, mut noise) = (vec![0.0f32; heads * head_dim], Noise(1));
    let (mut attending, mut appending) = (Duration::ZERO, Duration::ZERO);
    let (q_shape, kv_shape) = ([1, heads, 1, head_dim], [1, kv_heads, 1, head_dim]);
    let started = Instant::now();
    for step in 1..=steps {
        for cache in &mut caches {
            noise.fill(&mut q);
            noise.fill(&mut k);
            noise.fill(&mut v);
            let begun = Instant::now();
            cache.append_all(&Heads::bhsd(&k, kv_shape)?, &Heads::bhsd(&v, kv_shape)?)?;
            let appended = Instant::now();
            cache.attend(&Heads::bhsd(&q, q_shape)?, HeadsMut::bhsd(&mut out, q_shape)?, &options)?;
            attending += appended.elapsed();
            appending += appended - begun;
        }
        progress(step, steps, started);
    }
    check(&caches[layers - 1], &q, &out, q_shape)?;
    Ok((attending, appending))
}

/// The last output, against the reference over the keys and values that the cache holds.
fn check<T: Element>(cache: &KvCache<T>, q: &[f32], out: &[f32], q_shape: [usize; 4]) -> Result<()> {
    let [_, heads, _, head_dim] = q_shape;
    let KvShape { num_kv_heads, .. } = cache.shape();
    let steps = cache.capacity();
    // The same noise again: what went into the last layer.
    let head = heads - 1;
    let kv = head / (heads / num_kv_heads);
    let rows = |view: polyhead::Paged<'_, T>| -> Result<Vec<f32>> {
        // One head of the cache, read through attention itself: a query that sees one key alone copies its value.
        let mut rows = vec![0.0f32; steps * num_kv_heads * head_dim];
        let zeros = vec![0.0f32; steps * num_kv_heads * head_dim];
        let shape = [1, num_kv_heads, steps, head_dim];
        let own = polyhead::Window { left: Some(0), right: Some(0), diagonal: Diagonal::TopLeft };
        let options = Options::new().window(own);
        polyhead::multi_head(&Heads::bhsd(&zeros, shape)?, &view, &view, HeadsMut::bhsd(&mut rows, shape)?, &options)?;
        Ok(rows[kv * steps * head_dim..][..steps * head_dim].to_vec())
    };
    let (k, v) = (rows(cache.keys())?, rows(cache.values())?);
    let (one, all) = ([1, 1, 1, head_dim], [1, 1, steps, head_dim]);
    let q = Heads::bhsd(&q[head * head_dim..][..head_dim], one)?;
    let expected = reference::multi_head(&q, &Heads::bhsd(&k, all)?, &Heads::bhsd(&v, all)?, &Options::new())?;
    for (x, y) in out[head * head_dim..].iter().zip(&expected.out) {
        assert!((f64::from(*x) - y).abs() < 1e-5, "the last step gives {x} instead of {y}");
    }
    Ok(())
}

/// Bytes a second of reading plain memory, on all threads of the pool; the best of a few.
fn read_rate(bytes: usize) -> f64 {
    let threads = rayon::current_num_threads();
    let data = vec![1.0f32; (bytes / 4).max(threads * 1024)];
    let read = |part: &[f32]| {
        std::hint::black_box(probe::sum(Level::detect(), part));
    };
    let once = || {
        let begun = Instant::now();
        rayon::scope(|scope| {
            for part in data.chunks(data.len().div_ceil(threads)) {
                scope.spawn(move |_| read(part));
            }
        });
        (data.len() * 4) as f64 / begun.elapsed().as_secs_f64()
    };
    (0..9).map(|_| once()).fold(0.0, f64::max)
}

fn main() -> ExitCode {
    let plan = match parse(std::env::args().skip(1)) {
        Ok(plan) => plan,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::FAILURE;
        }
    };
    let (result, size) = match plan.dtype.as_str() {
        "f32" => (generate::<f32>(&plan), 4),
        "f16" => (generate::<f16>(&plan), 2),
        "bf16" => (generate::<bf16>(&plan), 2),
        other => {
            eprintln!("--dtype is {other}, expected f32, f16 or bf16");
            return ExitCode::FAILURE;
        }
    };
    let (attending, appending) = match result {
        Ok(times) => times,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let Plan { steps, layers, heads, kv_heads, head_dim, dtype } = &plan;
    let token = 2 * kv_heads * head_dim * size;
    let read = (layers * token * (steps * (steps + 1) / 2)) as f64;
    let rate = read / attending.as_secs_f64();
    // A step reads all layers; on average they are half full.
    let plain = read_rate(layers * token * steps / 2);
    println!(
        "{steps} tokens, {layers} layers, {heads} heads on {kv_heads} KV heads of {head_dim}, {dtype}, level {}, {} threads",
        Level::detect().name(),
        rayon::current_num_threads()
    );
    println!(
        "{:.0} tokens/s ({:.2} s attention, {:.3} s appending)",
        *steps as f64 / (attending + appending).as_secs_f64(),
        attending.as_secs_f64(),
        appending.as_secs_f64()
    );
    println!(
        "cache read at {:.1} GB/s, plain memory of that size at {:.1} GB/s: {:.0} %",
        rate / 1e9,
        plain / 1e9,
        100.0 * rate / plain
    );
    ExitCode::SUCCESS
}
