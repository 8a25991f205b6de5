//! Is fused attention ever slower than this crate's own GEMM, softmax and GEMM with the scores in memory? Over a grid of shapes,
//! `f32`, on one thread.
//!
//! ```text
//! cargo bench --bench fused [-- WORD]     # WORD selects ids that contain it
//! ```
//!
//! The two run in turn, so that what disturbs one disturbs the other; times are medians. The baseline may keep its scores from
//! run to run and pays no allocation. Causality and key lengths it gets as a float mask with -inf, and computes everything.
//! Not a criterion bench, as criterion measures one function after the other.

mod common;

use std::time::{Duration, Instant};

use common::{Data, Sizes, noise, pool};
use polyhead::{Bias, Diagonal, Level, Matrix, Options};

/// Time for a shape, and how many measurements it takes at least.
const SLICE: Duration = Duration::from_millis(900);
const REPETITIONS: usize = 5;
/// Short calls are repeated to this length.
const SHORTEST: Duration = Duration::from_micros(100);
/// Values have unit variance.
const TOLERANCE: f64 = 1e-5;

/// What a query may see.
#[derive(Clone, Copy, Debug)]
enum Seen {
    All,
    /// All, with a float bias.
    Bias,
    /// Keys up to the query's own position, the last query at the last key.
    Causal,
    /// The first three quarters of the keys.
    Keys,
}

struct Case {
    id: String,
    sizes: Sizes,
    seen: Seen,
}

impl Case {
    fn new(kind: &str, seen: Seen, [batch, heads, seqlen_q, seqlen_k, dim]: [usize; 5]) -> Self {
        let sizes = Sizes { batch, heads, kv_heads: heads, seqlen_q, seqlen_k, dim };
        Self { id: format!("fused/{kind}/{}", sizes.id()), sizes, seen }
    }

    fn keys(&self) -> usize {
        self.sizes.seqlen_k * 3 / 4
    }

    /// What is added to scores, (seqlen_q, seqlen_k), for the baseline and for the check.
    fn added(&self) -> Option<Vec<f32>> {
        let Sizes { seqlen_q, seqlen_k, .. } = self.sizes;
        let hide_unless = |seen: &dyn Fn(usize, usize) -> bool| {
            let at = |i| if seen(i / seqlen_k, i % seqlen_k) { 0.0 } else { f32::NEG_INFINITY };
            Some((0..seqlen_q * seqlen_k).map(at).collect())
        };
        match self.seen {
            Seen::All => None,
            Seen::Bias => Some(noise(seqlen_q * seqlen_k, 4)),
            Seen::Causal => hide_unless(&|query, key| key + seqlen_q <= query + seqlen_k),
            Seen::Keys => hide_unless(&|_, key| key < self.keys()),
        }
    }
}

/// Medians of a call, in seconds.
struct Times {
    fused: f64,
    unfused: f64,
}

fn cases() -> Vec<Case> {
    // (batch, heads, seqlen_q, seqlen_k, dim)
    let square = |batch, heads, seqlen, dim| [batch, heads, seqlen, seqlen, dim];
    let mut cases = Vec::new();
    let mut add = |kind, seen, shapes: &[[usize; 5]]| {
        cases.extend(shapes.iter().map(|&shape| Case::new(kind, seen, shape)));
    };
    let small = [
        square(1, 1, 1, 64),
        square(1, 1, 4, 16),
        square(1, 1, 16, 8),
        square(1, 1, 16, 64),
        square(1, 1, 33, 64),
        square(1, 1, 64, 32),
        square(1, 1, 100, 80),
        square(2, 4, 8, 32),
        square(32, 8, 10, 64),
        square(64, 4, 16, 32),
        square(16, 12, 32, 64),
    ];
    add("small", Seen::All, &small);
    add(
        "skinny",
        Seen::All,
        &[
            square(1, 8, 128, 1),
            square(1, 8, 256, 4),
            square(1, 8, 256, 8),
            square(1, 8, 512, 16),
            square(1, 4, 1024, 24),
            [1, 8, 3, 512, 64],
            [1, 8, 512, 3, 64],
            [1, 8, 17, 1000, 40],
        ],
    );
    add(
        "square",
        Seen::All,
        &[
            square(1, 8, 128, 64),
            square(8, 12, 128, 64),
            square(4, 12, 197, 64),
            square(1, 8, 256, 128),
            square(1, 8, 384, 96),
            square(1, 8, 512, 64),
            square(1, 8, 512, 128),
            square(1, 4, 512, 256),
            square(1, 2, 300, 512),
        ],
    );
    add(
        "long",
        Seen::All,
        &[
            square(1, 8, 1024, 64),
            square(1, 2, 2048, 32),
            square(1, 2, 2048, 64),
            square(1, 2, 2048, 128),
            square(1, 1, 4096, 64),
            [1, 1, 64, 16384, 64],
        ],
    );
    add(
        "cross",
        Seen::All,
        &[
            [4, 8, 32, 77, 64],
            [1, 8, 256, 77, 40],
            [1, 8, 1024, 77, 64],
            [1, 8, 100, 850, 32],
            [1, 8, 16, 2048, 64],
            [1, 8, 1024, 16, 64],
        ],
    );
    add(
        "decode",
        Seen::All,
        &[
            [1, 8, 1, 16, 64],
            [1, 8, 1, 128, 64],
            [1, 32, 1, 512, 128],
            [1, 32, 1, 4096, 128],
            [8, 8, 1, 1024, 64],
            [16, 12, 1, 100, 64],
        ],
    );
    let masked = [square(8, 8, 50, 64), square(1, 8, 128, 64), square(1, 8, 512, 64), square(1, 2, 2048, 64)];
    add("bias", Seen::Bias, &masked);
    add("causal", Seen::Causal, &masked);
    add("causal", Seen::Causal, &[square(1, 1, 16, 64), [1, 8, 16, 1024, 64], [1, 8, 1024, 1024, 128]]);
    add("keys", Seen::Keys, &masked);
    cases
}

/// Runs both once and checks them; then, unless this is a test, measures them.
fn run(case: &Case, measure: bool) -> Option<Times> {
    let Sizes { batch, heads, seqlen_q, seqlen_k, .. } = case.sizes;
    let added = case.added();
    let lengths = vec![case.keys(); batch];
    let options = match case.seen {
        Seen::All => Options::new(),
        Seen::Bias => {
            let bias = added.as_deref().expect("a bias");
            let matrix = Matrix::contiguous(bias, [seqlen_q, seqlen_k]).expect("the bias fits");
            Options::new().bias(Bias::new(matrix).expect("two axes"))
        }
        Seen::Causal => Options::new().causal(Diagonal::BottomRight),
        Seen::Keys => Options::new().key_lengths(&lengths),
    };
    let level = Level::detect();
    let mut data = Data::<f32>::new(case.sizes);
    let mut scores = vec![0.0; batch * heads * seqlen_q * seqlen_k];
    let expected = |query, key| added.as_ref().map_or(0.0, |added| f64::from(added[query * seqlen_k + key]));

    data.run(&options);
    data.assert_rows(TOLERANCE, expected);
    data.out.fill(f32::NAN);
    data.run_unfused(&mut scores, level, added.as_deref());
    data.assert_rows(TOLERANCE, expected);
    if !measure {
        return None;
    }

    let mut both = |n: u32| {
        let start = Instant::now();
        (0..n).for_each(|_| data.run(&options));
        let middle = Instant::now();
        (0..n).for_each(|_| data.run_unfused(&mut scores, level, added.as_deref()));
        [middle - start, middle.elapsed()]
    };
    let begin = Instant::now();
    let mut n = 1;
    while both(n).into_iter().min().is_some_and(|least| least < SHORTEST) {
        n *= 2;
    }
    let mut times = [Vec::new(), Vec::new()];
    while times[0].len() < REPETITIONS || begin.elapsed() < SLICE {
        for (times, time) in times.iter_mut().zip(both(n)) {
            times.push(time / n);
        }
    }
    let [fused, unfused] = times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64()
    });
    Some(Times { fused, unfused })
}

fn main() {
    let (flags, words): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|arg| arg.starts_with('-'));
    // As criterion: cargo bench passes --bench, cargo test nothing; options of criterion's have no meaning here.
    let has = |flag: &str| flags.iter().any(|arg| arg == flag);
    let measure = has("--bench") && !has("--test");
    let selected = |case: &Case| words.iter().all(|word| case.id.contains(word.as_str()));
    let cases: Vec<Case> = cases().into_iter().filter(selected).collect();
    let pool = pool(1);
    if measure && !cases.is_empty() {
        println!("{:<44} {:>12} {:>12} {:>14}", "shape", "fused us", "unfused us", "unfused/fused");
    }
    let mut ratios = Vec::new();
    for case in cases {
        match pool.install(|| run(&case, measure)) {
            None => println!("{:<44} checked", case.id),
            Some(Times { fused, unfused }) => {
                let ratio = unfused / fused;
                println!("{:<44} {:>12.2} {:>12.2} {ratio:>14.2}", case.id, fused * 1e6, unfused * 1e6);
                ratios.push((case.id, ratio));
            }
        }
    }
    if !ratios.is_empty() {
        summarize(ratios);
    }
}

/// Names the shapes where fused is slower, worst first.
fn summarize(mut ratios: Vec<(String, f64)>) {
    let shapes = ratios.len();
    ratios.retain(|&(_, ratio)| ratio < 1.0);
    ratios.sort_by(|a, b| a.1.total_cmp(&b.1));
    println!("\nfused is slower at {} of {shapes} shapes", ratios.len());
    for (id, ratio) in ratios {
        println!("{id:<44} {ratio:.2}");
    }
}
