//! Panics that tests put into tasks: the caller sees them, nothing hangs, and whatever was in use works as before.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::cache::KvCache;
use crate::gemm::{PackedMatrix, gemm, gemm_packed};
use crate::layer::{Config, Inputs, MultiHeadAttention, Weights, Workspace};
use crate::softmax::{SoftmaxOptions, softmax};
use crate::{
    Diagonal, Heads, HeadsMut, Matrices, MatricesMut, Matrix, MatrixMut, MultiHead, Options, Outputs, Shape,
    multi_head_with,
};

/// Panics in one task of the calls that a thread makes inside [`trapped`].
#[derive(Debug)]
struct Spring {
    /// Tasks begun.
    begun: AtomicUsize,
    /// The task that panics, counted over all tasks of all calls.
    at: usize,
}

thread_local! {
    static SET: Cell<Option<Arc<Spring>>> = const { Cell::new(None) };
}

/// The spring of the thread that makes a call, for the length of the call: a call that the thread takes up while it waits for
/// this one is not trapped.
pub(super) struct Trap(Option<Arc<Spring>>);

impl Trap {
    pub(super) fn of_this_call() -> Self {
        Self(SET.take())
    }

    /// Before each task.
    pub(super) fn step(&self) {
        if let Some(spring) = &self.0
            && spring.begun.fetch_add(1, Ordering::Relaxed) == spring.at
        {
            // Without the panic hook, which would print a thousand messages.
            resume_unwind(Box::new(Injected(spring.at)));
        }
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        SET.set(self.0.take());
    }
}

/// What the injected panic carries.
#[derive(Debug, PartialEq)]
struct Injected(usize);

/// Calls `f` with a trap in the task `at`, if it gets there: what it returned, or the panic, and how many tasks began.
fn trapped<R>(at: usize, f: impl FnOnce() -> R) -> (Result<R, Injected>, usize) {
    let spring = Arc::new(Spring { begun: AtomicUsize::new(0), at });
    SET.set(Some(spring.clone()));
    let result = catch_unwind(AssertUnwindSafe(f));
    SET.set(None);
    let result = result.map_err(|payload| match payload.downcast::<Injected>() {
        Ok(injected) => *injected,
        Err(other) => resume_unwind(other),
    });
    (result, spring.begun.load(Ordering::Relaxed))
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

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i * 7919 % 101) as f32 / 101.0 - 0.4).collect()
}

fn bits(data: &[f32]) -> Vec<u32> {
    data.iter().map(|x| x.to_bits()).collect()
}

/// A call, with whatever it uses again and again; it gives what it computes, in bits.
type Call = Box<dyn FnMut() -> Vec<u32> + Send>;

/// Queries enough for several blocks, and one query of keys that threads share.
const LENGTHS: [[usize; 2]; 2] = [[150, 140], [1, 5000]];

/// Operands of an attention call of 4 query heads and 2 KV heads.
struct Operands {
    shape: Shape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Operands {
    fn new([seqlen_q, seqlen_k]: [usize; 2]) -> Self {
        let shape = Shape { batch: 1, num_heads: 4, num_kv_heads: 2, seqlen_q, seqlen_k, head_dim: 32, head_dim_v: 32 };
        let (q, k) = (numbers(4 * seqlen_q * 32), numbers(2 * seqlen_k * 32));
        Self { shape, q, v: k.iter().rev().copied().collect(), k }
    }

    /// Out and LSE by `call`.
    fn with(&self, call: impl FnOnce([&Heads<'_, f32>; 3], Outputs<'_, f32>)) -> Vec<u32> {
        let Shape { seqlen_q, seqlen_k, .. } = self.shape;
        let (mut out, mut lse) = (vec![f32::NAN; self.q.len()], vec![f32::NAN; 4 * seqlen_q]);
        let outputs = Outputs::new(HeadsMut::bhsd(&mut out, [1, 4, seqlen_q, 32]).unwrap()).lse(&mut lse);
        let [k, v] = [&self.k, &self.v].map(|data| Heads::bhsd(data, [1, 2, seqlen_k, 32]).unwrap());
        call([&Heads::bhsd(&self.q, [1, 4, seqlen_q, 32]).unwrap(), &k, &v], outputs);
        bits(&[out, lse].concat())
    }
}

/// The plan is made in the pool of the first call.
fn plan(lengths: [usize; 2]) -> Call {
    let (operands, mut plan) = (Operands::new(lengths), None);
    Box::new(move || {
        let options = Options::new().causal(Diagonal::BottomRight);
        let plan = plan.get_or_insert_with(|| MultiHead::new(operands.shape, &options).unwrap());
        operands.with(|[q, k, v], outputs| plan.run_with(q, k, v, outputs).unwrap())
    })
}

fn one_call(lengths: [usize; 2]) -> Call {
    let operands = Operands::new(lengths);
    Box::new(move || operands.with(|[q, k, v], outputs| multi_head_with(q, k, v, outputs, &Options::new()).unwrap()))
}

fn product([m, n, k]: [usize; 3]) -> Call {
    let (a, b) = (numbers(m * k), numbers(k * n));
    Box::new(move || {
        let mut c = vec![f32::NAN; m * n];
        let (a, b) = (Matrix::contiguous(&a, [m, k]).unwrap(), Matrix::contiguous(&b, [k, n]).unwrap());
        gemm(1.0, &a, &b, 0.0, &mut MatrixMut::contiguous(&mut c, [m, n]).unwrap()).unwrap();
        bits(&c)
    })
}

fn packed_product([m, n, k]: [usize; 3]) -> Call {
    let (a, b) = (numbers(m * k), numbers(k * n));
    let b = PackedMatrix::new(&Matrix::contiguous(&b, [k, n]).unwrap(), None).unwrap();
    Box::new(move || {
        let mut c = vec![f32::NAN; m * n];
        let a = Matrix::contiguous(&a, [m, k]).unwrap();
        gemm_packed(&a, &b, None, &mut MatrixMut::contiguous(&mut c, [m, n]).unwrap()).unwrap();
        bits(&c)
    })
}

fn rows_of_softmax(shape: [usize; 2]) -> Call {
    let x = numbers(shape[0] * shape[1]);
    Box::new(move || {
        let (x, mut out) = (Matrix::contiguous(&x, shape).unwrap(), vec![f32::NAN; shape[0] * shape[1]]);
        softmax(&x, MatrixMut::contiguous(&mut out, shape).unwrap(), &SoftmaxOptions::new()).unwrap();
        bits(&out)
    })
}

/// A layer of 96 channels and 4 heads.
fn layer() -> MultiHeadAttention<f32> {
    let w: Vec<f32> = numbers(96 * 96).iter().map(|x| x / 8.0).collect();
    let w = Matrix::contiguous(&w, [96, 96]).unwrap();
    MultiHeadAttention::new(Config::new(96, 4), &Weights::new(w, w, w, w)).unwrap()
}

fn layer_forward(keep: bool) -> Call {
    let (layer, x, mut workspace) = (layer(), numbers(2 * 130 * 96), Workspace::new());
    Box::new(move || {
        let inputs = Inputs::self_attention(Matrices::contiguous(&x, [2, 130, 96]).unwrap());
        if !keep {
            return bits(&layer.forward::<f32>(&inputs, &Options::new()).unwrap());
        }
        let mut out = vec![f32::NAN; x.len()];
        let outputs = crate::layer::Outputs::new(MatricesMut::contiguous(&mut out, [2, 130, 96]).unwrap());
        layer.forward_into(&inputs, outputs, &Options::new(), &mut workspace).unwrap();
        bits(&out)
    })
}

/// A chunk of a prompt; what the call before left in the cache is taken back first.
fn layer_decode() -> Call {
    let (layer, x) = (layer(), numbers(130 * 96));
    let mut cache = KvCache::<f32>::new(layer.kv_shape(), 1, 300).unwrap();
    let x = move |f: &mut dyn FnMut(Matrices<'_, f32>)| f(Matrices::contiguous(&x, [1, 130, 96]).unwrap());
    x(&mut |x| drop(layer.decode::<f32>(x, &mut cache, &Options::new()).unwrap()));
    Box::new(move || {
        assert!([130, 260].contains(&cache.lengths()[0]), "a chunk is in the cache as a whole or not at all");
        cache.truncate(0, 130).unwrap();
        let mut out = Vec::new();
        x(&mut |x| out = layer.decode(x, &mut cache, &Options::new()).unwrap());
        bits(&out)
    })
}

fn calls() -> Vec<(&'static str, Call)> {
    vec![
        ("multi_head", one_call(LENGTHS[0])),
        ("multi_head of one query", one_call(LENGTHS[1])),
        ("a plan", plan(LENGTHS[0])),
        ("a plan of one query", plan(LENGTHS[1])),
        ("gemm", product([300, 100, 80])),
        ("gemm of a vector", product([1300, 1, 420])),
        ("gemm_packed", packed_product([150, 300, 60])),
        ("softmax", rows_of_softmax([40, 1500])),
        ("forward_into", layer_forward(true)),
        ("forward", layer_forward(false)),
        ("decode", layer_decode()),
    ]
}

/// A thousand calls with a panic in one of their tasks, all tasks of each kind of call on each pool in turn, and as many
/// without.
#[test]
#[cfg_attr(target_family = "wasm", ignore = "no threads there, and a panic ends the process")]
fn a_panic_in_a_task_is_the_callers_and_breaks_nothing() {
    watched(|| {
        const ROUNDS: usize = 31;
        let mut panics = 0;
        for threads in [1, 2, 5] {
            let pool = pool(threads);
            for (name, mut call) in calls() {
                let (expected, tasks) = pool.install(|| trapped(usize::MAX, &mut call));
                let expected = expected.expect("no trap");
                assert!(tasks > 0, "{name} has no tasks");
                // Without the feature there is one thread.
                let alone = pool.install(super::current_threads) == 1;
                assert!(alone || tasks > 1, "{name} is too small for this test");
                for round in 0..ROUNDS {
                    let (at, place) = (round % tasks, format!("{name}, {tasks} tasks on {threads} threads"));
                    let (result, _) = pool.install(|| trapped(at, &mut call));
                    assert_eq!(result, Err(Injected(at)), "{place}");
                    panics += 1;
                    let (again, begun) = pool.install(|| trapped(usize::MAX, &mut call));
                    assert!(again.as_ref() == Ok(&expected), "after a panic in task {at} of {place}");
                    assert_eq!(begun, tasks, "after a panic in task {at} of {place}");
                }
            }
        }
        assert!(panics >= 1000, "{panics}");
    });
}

/// A thousand calls of one plan and one layer from many threads, through pools inside pools, every seventh with a panic in a
/// task: each call gives the panic or the exact bits.
#[test]
#[cfg_attr(target_family = "wasm", ignore = "no threads there, and a panic ends the process")]
fn panics_among_nested_calls_stay_with_their_calls() {
    watched(|| {
        let (operands, x, layer) = (Operands::new(LENGTHS[0]), numbers(130 * 96), layer());
        let plan = Mutex::new(MultiHead::new(operands.shape, &Options::new()).unwrap());
        let attend = || {
            // Poisoned by the panics of others.
            let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
            operands.with(|[q, k, v], outputs| plan.run_with(q, k, v, outputs).unwrap())
        };
        let forward = || {
            let inputs = Inputs::self_attention(Matrices::contiguous(&x, [1, 130, 96]).unwrap());
            bits(&layer.forward::<f32>(&inputs, &Options::new()).unwrap())
        };
        let expected = [attend(), forward()];
        let (pools, panics, done) = ([1, 2, 3].map(pool), AtomicUsize::new(0), AtomicUsize::new(0));
        let call = |number: usize| {
            let trap = if number.is_multiple_of(7) { number / 7 % 3 } else { usize::MAX };
            // The plan is locked by a thread of no pool, which takes up no other call while it waits.
            let which = number % 2;
            let (result, begun) = match which {
                0 => trapped(trap, attend),
                _ => pools[number % 3].install(|| trapped(trap, forward)),
            };
            let wanted = if trap < begun { Err(Injected(trap)) } else { Ok(expected[which].clone()) };
            assert!(result == wanted, "call {number}, {begun} tasks begun");
            panics.fetch_add(usize::from(result.is_err()), Ordering::Relaxed);
            done.fetch_add(1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (call, pools) = (&call, &pools);
                scope.spawn(move || {
                    for number in (thread * 125)..(thread * 125 + 125) {
                        match number % 2 {
                            // In the global pool, from outside of it.
                            0 => call(number),
                            _ => pools[number / 2 % 3].install(|| rayon::join(|| call(number), || ())).0,
                        }
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), 1000);
        assert!(panics.into_inner() > 70);
    });
}
