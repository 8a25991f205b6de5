//! A65 and A66, many at once: a thousand calls from threads and pools of all kinds, none of which hangs, is lost or gives other bits.
#![cfg(feature = "rayon")]

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use polyhead::gemm::{PackedMatrix, gemm_packed};
use polyhead::layer::{Config, Inputs, MultiHeadAttention, Weights};
use polyhead::{HeadsMut, Matrices, Matrix, MatrixMut, MultiHead, Options};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::operands::{Operands, shape};
use crate::support::{Bits, Rng, assert_same_bits};

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).stack_size(1 << 20).build().expect("a pool")
}

/// Runs `f` on a thread of its own and fails if it takes longer than any machine needs.
fn watched(f: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        f();
        let _ = sender.send(());
    });
    match receiver.recv_timeout(Duration::from_secs(600)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        _ => thread.join().unwrap_or_else(|payload| resume_unwind(payload)),
    }
}

/// What all threads share, and what it gives: large enough for several threads.
struct Work {
    operands: Operands,
    plan: Mutex<MultiHead<'static>>,
    layer: MultiHeadAttention<f32>,
    weights: PackedMatrix<f32>,
    tokens: Vec<f32>,
    expected: [Vec<f32>; 4],
}

impl Work {
    fn new() -> Self {
        let mut rng = Rng::new(65);
        let operands = Operands::<f32>::random(shape(2, (4, 2), (70, 75), (32, 32)), 65);
        let w = rng.normals::<f32>(96 * 96, 0.1);
        let w = Matrix::contiguous(&w, [96, 96]).expect("packed");
        let layer = MultiHeadAttention::new(Config::new(96, 4), &Weights::new(w, w, w, w)).expect("a valid layer");
        let wide = rng.normals::<f32>(96 * 300, 1.0);
        let weights = PackedMatrix::new(&Matrix::contiguous(&wide, [96, 300]).expect("packed"), None).expect("memory");
        let plan = Mutex::new(MultiHead::new(operands.shape, &Options::new()).expect("a valid plan"));
        let tokens = rng.normals::<f32>(2 * 70 * 96, 1.0);
        let mut work = Self { operands, plan, layer, weights, tokens, expected: Default::default() };
        work.expected = pool(1).install(|| [0, 1, 2, 3].map(|kind| work.run(kind)));
        work
    }

    /// A call of one of four kinds: the shared plan, an attention call, the shared layer, a product with shared weights.
    fn run(&self, kind: usize) -> Vec<f32> {
        let tokens = Matrix::contiguous(&self.tokens, [140, 96]).expect("packed");
        let [q, k, v] = self.operands.views();
        match kind {
            0 => {
                let mut out = vec![f32::OUTPUT; self.operands.out_shape().iter().product()];
                let view = HeadsMut::bhsd(&mut out, self.operands.out_shape()).expect("packed");
                // Held for the length of a call, so in a pool of its own: a thread that waits in a pool may take up another call,
                // and would wait for itself.
                let plan: &mut MultiHead<'_> = &mut self.plan.lock().expect("no panic");
                pool(2).install(|| plan.run(&q, &k, &v, view)).expect("a valid call");
                out
            }
            1 => self.operands.run(&Options::new(), "one of many").out,
            2 => {
                let inputs = Inputs::self_attention(Matrices::contiguous(&self.tokens, [2, 70, 96]).expect("packed"));
                self.layer.forward(&inputs, &Options::new()).expect("a valid call")
            }
            _ => {
                let mut out = vec![f32::OUTPUT; 140 * 300];
                let mut view = MatrixMut::contiguous(&mut out, [140, 300]).expect("packed");
                gemm_packed(&tokens, &self.weights, None, &mut view).expect("the shapes fit");
                out
            }
        }
    }

    fn check(&self, call: usize, done: &AtomicUsize) {
        // The plan is for threads of no pool.
        let kind = if rayon::current_thread_index().is_some() { 1 + call % 3 } else { call % 4 };
        assert_same_bits(&self.run(kind), &self.expected[kind], format_args!("call {call}"));
        done.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a65_a_thousand_calls_at_once() {
    watched(|| {
        let (work, done) = (Work::new(), AtomicUsize::new(0));
        let pools = [1, 2, 3, 5].map(pool);
        let (work, done) = (&work, &done);
        std::thread::scope(|scope| {
            for thread in 0..10 {
                let pools = &pools;
                scope.spawn(move || {
                    let (one, other) = (&pools[thread % 4], &pools[(thread + 1) % 4]);
                    for call in (0..100).step_by(10) {
                        let check = |i: usize| work.check(call + i, done);
                        check(0);
                        one.install(|| check(1));
                        one.install(|| other.install(|| check(2)));
                        one.install(|| rayon::join(|| check(3), || other.install(|| check(4))));
                        one.scope(|scope| {
                            scope.spawn(move |_| other.install(|| check(5)));
                            scope.spawn(move |scope| scope.spawn(move |_| check(6)));
                            check(7);
                        });
                        rayon::join(|| check(8), || one.install(|| other.install(|| one.install(|| check(9)))));
                    }
                });
            }
        });
        assert_eq!(done.load(Ordering::Relaxed), 1000);
    });
}
