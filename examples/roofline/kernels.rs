//! The kernels at common shapes, and what the limits allow them.

use std::error::Error;

use half::{bf16, f16};
use polyhead::gemm::gemm;
use polyhead::softmax::{SoftmaxOptions, softmax};
use polyhead::{Diagonal, Element, Heads, HeadsMut, Matrix, MatrixMut, Options, multi_head};

use crate::buffer::Buffer;
use crate::limits::{self, Limits};
use crate::measure::{Stopwatch, Timing};
use crate::report::Report;

/// Work of one call, as the model in the crate's documentation counts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) flops: f64,
    exps: f64,
    pub(crate) bytes: f64,
}

/// What a kernel is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Flops,
    Bytes,
}

/// A kernel with operands. `run` fills `output`.
trait Kernel: Send {
    fn run(&mut self) -> polyhead::Result<()>;
    fn output(&mut self) -> &mut [f32];
}

pub(crate) struct Case {
    name: String,
    unit: Unit,
    work: Work,
    build: Box<dyn Fn() -> Box<dyn Kernel>>,
}

/// A case as measured on some threads.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) work: Work,
    pub(crate) threads: usize,
    pub(crate) timing: Timing,
    /// The limit that binds, and the seconds of the model.
    pub(crate) limit: &'static str,
    pub(crate) model: f64,
}

impl Point {
    /// In 1e9 of its unit a second.
    pub(crate) fn rate(&self) -> f64 {
        let work = if self.unit == Unit::Flops { self.work.flops } else { self.work.bytes };
        work / self.timing.best / 1e9
    }

    pub(crate) fn gflops(&self) -> f64 {
        self.work.flops / self.timing.best / 1e9
    }

    pub(crate) fn percent(&self) -> f64 {
        100.0 * self.model / self.timing.best
    }
}

impl Work {
    /// The limit that binds, and the least seconds.
    fn model(&self, limits: &Limits, threads: usize) -> (&'static str, f64) {
        let (flops, exps) = (self.flops / limits.fma_peak(threads), self.exps / limits.exp_rate(threads));
        let bytes = self.bytes / limits.read_bandwidth(threads, self.bytes);
        if bytes >= flops + exps {
            ("bandwidth", bytes)
        } else {
            (if flops >= exps { "FMA" } else { "exp" }, flops + exps)
        }
    }
}

/// Measures a case on each number of threads.
pub(crate) fn measure(
    case: Case,
    limits: &Limits,
    thread_counts: &[usize],
    stopwatch: &Stopwatch,
    report: &Report,
) -> Result<Vec<Point>, Box<dyn Error>> {
    let Case { name, unit, work, build } = case;
    let mut kernel = build();
    let mut points = Vec::new();
    for &threads in thread_counts {
        let pool = limits::pool(threads)?;
        kernel.output().fill(f32::NAN);
        pool.install(|| kernel.run())?;
        if !kernel.output().iter().all(|x| x.is_finite()) {
            return Err(format!("{name}: a result is not finite").into());
        }
        let timing = pool.install(|| stopwatch.time(|n| (0..n).try_for_each(|_| kernel.run())))?;
        let (limit, model) = work.model(limits, threads);
        let point = Point { name: name.clone(), unit, work, threads, timing, limit, model };
        report.kernel(&point, limits.level);
        points.push(point);
    }
    Ok(points)
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dim in [64, 128] {
        for seqlen in [512, 2048] {
            let sizes = Sizes { batch: 1, heads: 8, kv_heads: 8, seqlen_q: seqlen, seqlen_k: seqlen, dim };
            cases.push(attention::<f32>(format!("prefill S {seqlen} D {dim}"), Unit::Flops, sizes, false));
            cases.push(attention::<f32>(format!("prefill S {seqlen} D {dim} causal"), Unit::Flops, sizes, true));
        }
    }
    let bert = Sizes { batch: 8, heads: 12, kv_heads: 12, seqlen_q: 128, seqlen_k: 128, dim: 64 };
    cases.push(attention::<f32>("BERT 8 x 12 x 128 x 64".into(), Unit::Flops, bert, false));
    let tiny = Sizes { batch: 32, heads: 8, kv_heads: 8, seqlen_q: 10, seqlen_k: 10, dim: 64 };
    cases.push(attention::<f32>("tiny 32 x 8 x 10 x 64".into(), Unit::Flops, tiny, false));
    for kv_heads in [32, 8] {
        let sizes = Sizes { batch: 1, heads: 32, kv_heads, seqlen_q: 1, seqlen_k: 4096, dim: 128 };
        cases.push(decode::<f32>(sizes));
        cases.push(decode::<f16>(sizes));
        cases.push(decode::<bf16>(sizes));
    }
    cases.push(softmax_case(1024, 1024));
    cases.extend([512, 1024].map(gemm_case));
    cases
}

/// Uniform noise of unit variance.
fn noise<T: Element>(len: usize, seed: u64) -> Buffer<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 3f32.sqrt()
    };
    let mut data = Buffer::new(len, T::default());
    data.iter_mut().for_each(|x| *x = T::from_f32_nearest(next()));
    data
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    dim: usize,
}

impl Sizes {
    fn q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seqlen_q, self.dim]
    }

    fn kv(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seqlen_k, self.dim]
    }

    fn work<T: Element>(&self, causal: bool) -> Work {
        let Self { batch, heads, seqlen_q, seqlen_k, dim, .. } = *self;
        // With causality as many queries as keys: the first sees one key, the last all.
        let visible = if causal { seqlen_q * (seqlen_q + 1) / 2 } else { seqlen_q * seqlen_k };
        let pairs = (batch * heads * visible) as f64;
        let [q, kv] = [self.q(), self.kv()].map(|shape| shape.iter().product::<usize>());
        let bytes = (q + 2 * kv) * size_of::<T>() + q * size_of::<f32>();
        Work { flops: 4.0 * dim as f64 * pairs, exps: pairs, bytes: bytes as f64 }
    }
}

struct Attention<T> {
    sizes: Sizes,
    causal: bool,
    q: Buffer<T>,
    k: Buffer<T>,
    v: Buffer<T>,
    out: Buffer<f32>,
}

impl<T: Element> Kernel for Attention<T> {
    fn run(&mut self) -> polyhead::Result<()> {
        let (q, kv) = (self.sizes.q(), self.sizes.kv());
        let options = Options::new();
        let options = if self.causal { options.causal(Diagonal::TopLeft) } else { options };
        let (k, v) = (Heads::bhsd(&self.k, kv)?, Heads::bhsd(&self.v, kv)?);
        multi_head(&Heads::bhsd(&self.q, q)?, &k, &v, HeadsMut::bhsd(&mut self.out, q)?, &options)
    }

    fn output(&mut self) -> &mut [f32] {
        &mut self.out
    }
}

fn attention<T: Element>(name: String, unit: Unit, sizes: Sizes, causal: bool) -> Case {
    let build = move || -> Box<dyn Kernel> {
        let [q, kv] = [sizes.q(), sizes.kv()].map(|shape| shape.iter().product());
        let (k, v) = (noise::<T>(kv, 2), noise(kv, 3));
        Box::new(Attention { sizes, causal, q: noise(q, 1), k, v, out: Buffer::new(q, 0.0) })
    };
    Case { name, unit, work: sizes.work::<T>(causal), build: Box::new(build) }
}

fn decode<T: Element>(sizes: Sizes) -> Case {
    let name = format!("decode {}/{} heads {}", sizes.heads, sizes.kv_heads, T::NAME);
    attention::<T>(name, Unit::Bytes, sizes, false)
}

struct Softmax {
    shape: [usize; 2],
    x: Buffer<f32>,
    out: Buffer<f32>,
}

impl Kernel for Softmax {
    fn run(&mut self) -> polyhead::Result<()> {
        let out = MatrixMut::contiguous(&mut self.out, self.shape)?;
        softmax(&Matrix::contiguous(&self.x, self.shape)?, out, &SoftmaxOptions::new())
    }

    fn output(&mut self) -> &mut [f32] {
        &mut self.out
    }
}

fn softmax_case(rows: usize, columns: usize) -> Case {
    let n = (rows * columns) as f64;
    Case {
        name: format!("softmax {rows} rows of {columns}"),
        unit: Unit::Bytes,
        work: Work { flops: 4.0 * n, exps: n, bytes: 2.0 * n * size_of::<f32>() as f64 },
        build: Box::new(move || {
            let (x, out) = (noise(rows * columns, 1), Buffer::new(rows * columns, 0.0));
            Box::new(Softmax { shape: [rows, columns], x, out })
        }),
    }
}

struct Gemm {
    size: usize,
    a: Buffer<f32>,
    b: Buffer<f32>,
    out: Buffer<f32>,
}

impl Kernel for Gemm {
    fn run(&mut self) -> polyhead::Result<()> {
        let shape = [self.size; 2];
        let (a, b) = (Matrix::contiguous(&self.a, shape)?, Matrix::contiguous(&self.b, shape)?);
        gemm(1.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut self.out, shape)?)
    }

    fn output(&mut self) -> &mut [f32] {
        &mut self.out
    }
}

fn gemm_case(size: usize) -> Case {
    let n = size as f64;
    Case {
        name: format!("GEMM {size}"),
        unit: Unit::Flops,
        work: Work { flops: 2.0 * n * n * n, exps: 0.0, bytes: 3.0 * n * n * size_of::<f32>() as f64 },
        build: Box::new(move || {
            let [a, b] = [1, 2].map(|seed| noise(size * size, seed));
            Box::new(Gemm { size, a, b, out: Buffer::new(size * size, 0.0) })
        }),
    }
}
