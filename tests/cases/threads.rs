//! A65 to A68: pools, panics, and bits that depend on neither.
#![cfg(feature = "rayon")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use polyhead::{Diagonal, MultiHead, Options, Shape};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::child;
use crate::operands::{Operands, Results, attend, on_every_level, shape, tolerance};
use crate::support::{Bits, Rng, assert_all_close, assert_same_bits, max_abs};

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// Enough work for more than one thread, and its result on the caller's.
fn work() -> (Operands, Results<f32>) {
    let operands = Operands::<f32>::random(shape(2, (4, 2), (140, 150), (32, 32)), 65);
    let threads =
        pool(4).install(|| MultiHead::new(operands.shape, &Options::new()).map(|plan| plan.explain().threads));
    assert!(threads.is_ok_and(|threads| threads > 1), "the work is too small for this test");
    let expected = pool(1).install(|| operands.run(&Options::new(), "on one thread"));
    expected.assert_close(&operands.reference(&Options::new()), max_abs(&operands.v), "on one thread");
    (operands, expected)
}

#[test]
fn a65_calls_from_inside_pools() {
    let (operands, expected) = work();
    let check = |place: &str| operands.run(&Options::new(), place).assert_same_bits(&expected, place);
    check("outside");
    rayon::scope(|scope| scope.spawn(|_| check("a worker of the global pool")));
    let (one, two, three) = (pool(1), pool(2), pool(3));
    one.install(|| check("a pool of one thread"));
    one.install(|| two.install(|| check("a pool inside a pool")));
    two.install(|| one.install(|| two.install(|| check("a pool inside a pool inside itself"))));
    three.install(|| {
        rayon::join(|| check("left"), || rayon::join(|| check("middle"), || two.install(|| check("right"))))
    });
    three.broadcast(|context| check(&format!("all workers at once, {}", context.index())));
    rayon::in_place_scope(|scope| {
        scope.spawn(|_| check("beside the caller"));
        check("the caller, beside a worker");
    });
}

#[test]
fn a65_many_queued_calls() {
    let (operands, expected) = work();
    for threads in [1, 2, 5] {
        let done = Mutex::new(0);
        pool(threads).scope(|scope| {
            for call in 0..100 {
                let (operands, expected, done) = (&operands, &expected, &done);
                scope.spawn(move |_| {
                    let out = operands.plan(&Options::new(), call);
                    assert_same_bits(&out, &expected.out, format_args!("call {call} of {threads} threads"));
                    *done.lock().expect("no panic yet") += 1;
                });
            }
        });
        assert_eq!(done.into_inner().expect("no panic"), 100);
    }
}

/// While a call waits for its own tasks its thread may steal another call: nested as deep as the queue, on a small
/// stack.
#[test]
fn a65_nested_calls_on_small_stacks() {
    fn nested(depth: usize, operands: &Operands, expected: &Results<f32>) {
        let check = || assert_same_bits(&operands.plan(&Options::new(), depth), &expected.out, depth);
        if depth > 0 {
            rayon::join(check, || nested(depth - 1, operands, expected));
        } else {
            check();
        }
    }
    let (operands, expected) = work();
    let pool = ThreadPoolBuilder::new().num_threads(3).stack_size(1 << 20).build().expect("a pool");
    pool.install(|| nested(30, &operands, &expected));
}

/// A panic of the caller's own code beside a call, on the same pool: the caller sees it, and pool and scratch work
/// after it. (Panics inside tasks need a hook: `src/parallel/panics.rs`.)
#[test]
fn a66_panic_beside_a_call() {
    let (operands, expected) = work();
    for threads in [1, 2, 3] {
        let pool = pool(threads);
        for round in 0..5 {
            let call = || operands.run(&Options::new(), "beside a panic");
            let panics = || resume_unwind(Box::new("on purpose"));
            let caught = catch_unwind(AssertUnwindSafe(|| match round % 2 {
                0 => pool.install(|| rayon::join(call, panics)).0,
                _ => pool.install(|| rayon::join(panics, call)).1,
            }));
            let payload = caught.expect_err("the panic is the caller's to see");
            assert_eq!(payload.downcast_ref(), Some(&"on purpose"));
            for (thread, results) in pool.broadcast(|_| call()).iter().enumerate() {
                results.assert_same_bits(&expected, format_args!("thread {thread} after {round} panics"));
            }
        }
    }
}

/// What a panic leaves behind, run while it unwinds.
#[test]
fn a66_call_while_unwinding() {
    struct CallOnDrop<'a>(&'a Operands, &'a mut Option<Results<f32>>);
    impl Drop for CallOnDrop<'_> {
        fn drop(&mut self) {
            *self.1 = Some(self.0.run(&Options::new(), "while unwinding"));
        }
    }
    let (operands, expected) = work();
    let mut unwound = None;
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let _guard = CallOnDrop(&operands, &mut unwound);
        resume_unwind(Box::new(()))
    }));
    assert!(caught.is_err());
    unwound.expect("the guard was dropped").assert_same_bits(&expected, "while unwinding");
    operands.run(&Options::new(), "afterwards").assert_same_bits(&expected, "afterwards");
}

/// A plan whose pool is gone, and one that moves between pools of other sizes than it was made in.
#[test]
fn a66_plan_outlives_its_pool() {
    let (operands, expected) = work();
    let [q, k, v] = operands.views();
    let mut plan = pool(3).install(|| MultiHead::new(operands.shape, &Options::new())).expect("a valid plan");
    for threads in [1, 5, 2] {
        let mut out = vec![f32::OUTPUT; expected.out.len()];
        let view = polyhead::HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed");
        pool(threads).install(|| plan.run(&q, &k, &v, view)).expect("a valid call");
        assert_same_bits(&out, &expected.out, format_args!("{threads} threads"));
    }
}

/// A thread that ends may call once more, from the destructor of one of its locals, when ours are gone. In a process of
/// its own, as a panic there ends the process.
#[test]
fn a66_call_from_a_thread_local_destructor() {
    struct CallOnDrop;
    impl Drop for CallOnDrop {
        fn drop(&mut self) {
            let operands = Operands::<f32>::uni_ramp(shape(1, (1, 1), (2, 3), (4, 4)));
            operands.assert_rows(&Options::new(), &[2.0; 2], "in a destructor");
        }
    }
    thread_local! {
        static LAST: CallOnDrop = const { CallOnDrop };
    }
    child::run("threads::a66_call_from_a_thread_local_destructor", &[], || {
        let thread = std::thread::spawn(|| {
            // Locals are destroyed in the reverse of the order in which they were first used.
            LAST.with(|_| ());
            Operands::<f32>::random(shape(1, (1, 1), (2, 3), (4, 4)), 66).run(&Options::new(), "first");
        });
        assert!(thread.join().is_ok());
    });
}

/// The same bits on any number of threads, for one query and for many.
#[test]
fn a67_bits_do_not_depend_on_threads() {
    let lengths = [4000];
    for (heads, seqlen_q) in [((8, 2), 1), ((2, 2), 300), ((1, 1), 1)] {
        let operands = Operands::<f32>::random(shape(1, heads, (seqlen_q, 4097), (8, 8)), 67);
        let mask = Rng::new(67).bools(4097, 0.8);
        let causal = Options::new().causal(Diagonal::BottomRight);
        on_every_level(|level, name| {
            for options in [Options::new(), causal.key_lengths(&lengths).mask(attend(&mask, [1, 4097]))] {
                let options = options.level(level);
                let expected = pool(1).install(|| operands.plan(&options, name));
                for threads in [2, 3, 4, 7] {
                    let out = pool(threads).install(|| operands.plan(&options, name));
                    assert_same_bits(&out, &expected, format_args!("{seqlen_q} queries, {threads} threads on {name}"));
                }
            }
        });
        let (pool, expected) = (pool(4), operands.run(&causal, "on the caller's pool"));
        for repeat in 0..20 {
            let again = pool.install(|| operands.plan(&causal, repeat));
            assert_same_bits(&again, &expected.out, format_args!("{seqlen_q} queries, repeat {repeat}"));
        }
    }
}

/// Items `items` of a batch.
fn items<T: Bits>(all: &Operands<T>, items: core::ops::Range<usize>) -> Operands<T> {
    let cut = |data: &[T]| {
        let item = data.len() / all.shape.batch;
        data[items.start * item..items.end * item].to_vec()
    };
    let shape = Shape { batch: items.len(), ..all.shape };
    Operands { shape, q: cut(&all.q), k: cut(&all.k), v: cut(&all.v) }
}

/// An item alone has the bits that it has anywhere in a batch.
fn same_item<T: Bits + Into<f64>>(heads: (usize, usize), seqlen: (usize, usize)) {
    let mut all = Operands::<T>::random(shape(27, heads, seqlen, (8, 8)), 68);
    let alone = items(&all, 0..1);
    for (data, one) in [(&mut all.q, &alone.q), (&mut all.k, &alone.k), (&mut all.v, &alone.v)] {
        for item in [1, 26] {
            data[item * one.len()..][..one.len()].copy_from_slice(one);
        }
    }
    on_every_level(|level, name| {
        let options = Options::new().level(level).causal(Diagonal::BottomRight);
        let (expected, batch) = (alone.run(&options, name), all.run(&options, name));
        for item in [0, 1, 26] {
            let context = format!("{} {heads:?} {seqlen:?} item {item} on {name}", T::NAME);
            let (out, lse, weights) = (expected.out.len(), expected.lse.len(), expected.weights.len());
            let results = Results {
                out: batch.out[item * out..][..out].to_vec(),
                lse: batch.lse[item * lse..][..lse].to_vec(),
                weights: batch.weights[item * weights..][..weights].to_vec(),
            };
            results.assert_same_bits(&expected, context);
        }
    });
}

#[test]
fn a68_same_item_in_any_batch() {
    same_item::<f32>((2, 1), (5, 140));
    same_item::<f32>((4, 2), (1, 300));
    same_item::<f32>((1, 1), (130, 33));
    same_item::<half::f16>((2, 2), (9, 130));
    same_item::<half::bf16>((2, 2), (1, 17));
}

/// A head alone has the bits that it has beside others.
#[test]
fn a68_same_head_beside_any_number() {
    for (seqlen_q, seqlen_k) in [(1, 140), (33, 130), (129, 20)] {
        let all = Operands::<f32>::random(shape(1, (7, 7), (seqlen_q, seqlen_k), (8, 8)), 69);
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let seven = all.run(&options, name);
            // Heads as items of a batch.
            let one = Shape { batch: 7, num_heads: 1, num_kv_heads: 1, ..all.shape };
            let separate = Operands { shape: one, ..all.clone() };
            separate.run(&options, name).assert_same_bits(&seven, format_args!("{seqlen_q} {seqlen_k} on {name}"));
        });
    }
}

/// One query alone or among 27: within tolerance, not bit for bit (a promise that tiles of other shapes could not
/// keep).
#[test]
fn a68_rows_alone_and_together() {
    fn run<T: Bits + Into<f64>>(heads: (usize, usize)) {
        let (seqlen_q, dim) = (27, 8);
        let all = Operands::<T>::random(shape(1, heads, (seqlen_q, 140), (dim, dim)), 70);
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let together = all.run(&options, name).out;
            for query in [0, 13, 26] {
                let row = |data: &[T]| -> Vec<T> {
                    data.chunks(seqlen_q * dim).flat_map(|head| &head[query * dim..][..dim]).copied().collect()
                };
                let alone = Operands {
                    shape: Shape { seqlen_q: 1, ..all.shape },
                    q: row(&all.q),
                    k: all.k.clone(),
                    v: all.v.clone(),
                };
                let tolerance = tolerance::<T>() * max_abs(&all.v);
                let out = alone.run(&options, name).out;
                assert_all_close(&out, &row(&together), tolerance, 0.0, format_args!("query {query} on {name}"));
            }
        });
    }
    run::<f32>((4, 2));
    run::<f32>((1, 1));
    run::<half::f16>((2, 1));
}
