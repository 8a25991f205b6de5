//! What the attention benches share: data, pools, and the unfused baseline made of this crate's own GEMM and softmax.
#![allow(dead_code, reason = "each bench uses a part")]

use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, measurement::WallTime};
use polyhead::gemm::gemm_batched;
use polyhead::softmax::{SoftmaxOptions, softmax_in_place};
use polyhead::{Element, Heads, HeadsMut, Level, Matrices, MatricesMut, MatrixMut, Options, multi_head};

/// Uniform noise of unit variance.
pub(crate) fn noise<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 3f32.sqrt()
    };
    (0..len).map(|_| T::from_f32_nearest(next())).collect()
}

/// A group of short runs: there are many benches, and medians of ten settle.
pub(crate) fn group<'c>(c: &'c mut Criterion, name: &str) -> BenchmarkGroup<'c, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(10).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(200));
    group
}

/// A pool of `threads` threads: every measurement says how many it used.
pub(crate) fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool can be made")
}

/// Sizes of a problem, q and k as wide as v.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) seqlen_q: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) dim: usize,
}

impl Sizes {
    /// Self-attention without groups.
    pub(crate) fn of(batch: usize, heads: usize, seqlen: usize, dim: usize) -> Self {
        Self { batch, heads, kv_heads: heads, seqlen_q: seqlen, seqlen_k: seqlen, dim }
    }

    pub(crate) fn id(&self) -> String {
        let Self { batch, heads, kv_heads, seqlen_q, seqlen_k, dim } = self;
        let groups = if heads == kv_heads { String::new() } else { format!("_kv{kv_heads}") };
        format!("b{batch}_h{heads}{groups}_q{seqlen_q}_k{seqlen_k}_d{dim}")
    }

    pub(crate) fn q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seqlen_q, self.dim]
    }

    pub(crate) fn kv(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seqlen_k, self.dim]
    }

    /// Floating-point operations of both products for this share of the (query, key) pairs.
    pub(crate) fn flops(&self, visible: f64) -> u64 {
        (4.0 * (self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.dim) as f64 * visible) as u64
    }
}

/// Operands and an output of one problem.
pub(crate) struct Data<T> {
    pub(crate) sizes: Sizes,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    pub(crate) out: Vec<T>,
}

impl<T: Element> Data<T> {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let len = |shape: [usize; 4]| shape.iter().product();
        let (q, kv) = (len(sizes.q()), len(sizes.kv()));
        Self { sizes, q: noise(q, 1), k: noise(kv, 2), v: noise(kv, 3), out: vec![T::default(); q] }
    }

    pub(crate) fn run(&mut self, options: &Options<'_>) {
        let (q, kv) = (self.sizes.q(), self.sizes.kv());
        let view = |data, shape| Heads::bhsd(data, shape).expect("the data fit the shape");
        let out = HeadsMut::bhsd(&mut self.out, q).expect("the data fit the shape");
        multi_head(&view(&self.q, q), &view(&self.k, kv), &view(&self.v, kv), out, options).expect("valid");
    }

    /// Checks some rows of the first and last head against f64, once before timing. `bias(query, key)` is added to scores.
    pub(crate) fn assert_rows(&self, tolerance: f64, bias: impl Fn(usize, usize) -> f64) {
        let Sizes { batch, heads, kv_heads, seqlen_q, seqlen_k, dim } = self.sizes;
        let row =
            |data: &[T], i: usize| data[i * dim..][..dim].iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
        for (head, query) in
            [(0, 0), (0, seqlen_q - 1), (batch * heads - 1, seqlen_q / 2), (batch * heads - 1, seqlen_q - 1)]
        {
            let kv = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let q = row(&self.q, head * seqlen_q + query);
            let score = |key| {
                let k = row(&self.k, kv * seqlen_k + key);
                q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (dim as f64).sqrt() + bias(query, key)
            };
            let scores: Vec<f64> = (0..seqlen_k).map(score).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let mut want = vec![0.0; dim];
            for (key, s) in scores.iter().enumerate() {
                let p = (s - max).exp() / total;
                want.iter_mut().zip(row(&self.v, kv * seqlen_k + key)).for_each(|(x, v)| *x += p * v);
            }
            for (x, y) in row(&self.out, head * seqlen_q + query).iter().zip(want) {
                assert!((x - y).abs() <= tolerance, "head {head} query {query}: {x} against {y}");
            }
        }
    }
}

impl Data<f32> {
    /// GEMM, softmax, GEMM with the scores in memory: what a fused kernel has to beat. `bias`, of (seqlen_q, seqlen_k), is
    /// where the scores start from.
    pub(crate) fn run_unfused(&mut self, scores: &mut [f32], level: Level, bias: Option<&[f32]>) {
        let Sizes { batch, heads, kv_heads, seqlen_q, seqlen_k, dim } = self.sizes;
        assert_eq!(heads, kv_heads, "the baseline has no groups");
        let n = batch * heads;
        if let Some(bias) = bias {
            scores.chunks_exact_mut(bias.len()).for_each(|head| head.copy_from_slice(bias));
        }
        let fits = "the data fit the shape";
        let q = Matrices::contiguous(&self.q, [n, seqlen_q, dim]).expect(fits);
        let kt = Matrices::with_strides(&self.k, [n, dim, seqlen_k], [seqlen_k * dim, 1, dim]).expect(fits);
        let v = Matrices::contiguous(&self.v, [n, seqlen_k, dim]).expect(fits);
        let mut s = MatricesMut::contiguous(scores, [n, seqlen_q, seqlen_k]).expect(fits);
        let beta = if bias.is_some() { 1.0 } else { 0.0 };
        gemm_batched(1.0 / (dim as f32).sqrt(), &q, &kt, beta, &mut s).expect("valid");
        let rows = MatrixMut::contiguous(scores, [n * seqlen_q, seqlen_k]).expect(fits);
        softmax_in_place(rows, &SoftmaxOptions::new().level(level)).expect("valid");
        let p = Matrices::contiguous(scores, [n, seqlen_q, seqlen_k]).expect(fits);
        let mut out = MatricesMut::contiguous(&mut self.out, [n, seqlen_q, dim]).expect(fits);
        gemm_batched(1.0, &p, &v, 0.0, &mut out).expect("valid");
    }
}
