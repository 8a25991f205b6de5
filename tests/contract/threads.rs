use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use polyhead::{Diagonal, Heads, HeadsMut, MultiHead, Options};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::oracle::{ALL_F32, Call, Opts, Wanted, shape};
use crate::support::{Rng, levels};

/// No test may wait while another has blocked the global pool.
static GLOBAL_POOL: Mutex<()> = Mutex::new(());

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

/// 17 M multiply-adds: worth several threads.
fn large() -> Call {
    let options = Opts { causal: Some(Diagonal::TopLeft), ..Opts::default() };
    Call::random(shape([2, 4, 2, 200, 200, 64, 40]), ALL_F32, &mut Rng::new(151)).options(options)
}

/// 33 k multiply-adds: not worth a second one.
fn small() -> Call {
    Call::random(shape([1, 2, 1, 16, 16, 32, 32]), ALL_F32, &mut Rng::new(152))
}

/// Runs `body` on a thread that is in no pool while every thread of the global pool waits; `None` if it does not come back.
fn while_global_pool_is_blocked<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> Option<R> {
    let _alone = GLOBAL_POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let threads = rayon::current_num_threads();
    let (started, all_started) = mpsc::channel();
    let release = Arc::new(std::sync::Barrier::new(threads + 1));
    for _ in 0..threads {
        let (started, release) = (started.clone(), Arc::clone(&release));
        rayon::spawn(move || {
            started.send(()).expect("the test listens");
            release.wait();
        });
    }
    (0..threads).for_each(|_| all_started.recv().expect("all threads start"));
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(body()));
    // Far beyond what it takes; only a call that waits for the blocked threads gets here.
    let result = result.recv_timeout(Duration::from_secs(60)).ok();
    release.wait();
    result
}

#[test]
fn one_parallel_region_on_the_callers_pool() {
    let run = |call: Call| move || levels().iter().map(|&level| call.run(level, Wanted::Lse)).collect::<Vec<_>>();
    let expected = pool(1).install(run(large()));
    let inside = while_global_pool_is_blocked(move || pool(2).install(run(large())));
    let inside = inside.expect("a call inside of a pool waited for the global one");
    for (a, b) in inside.iter().zip(&expected) {
        a.assert_same_bits(b, "in a pool of two");
    }
    let outside = while_global_pool_is_blocked(run(small()));
    let outside = outside.expect("a small call did not stay on its caller's thread");
    for (a, b) in outside.iter().zip(&pool(1).install(run(small()))) {
        a.assert_same_bits(b, "a small call");
    }
}

#[test]
fn one_parallel_region_of_as_many_threads_as_the_work_is_worth() {
    for threads in [1, 2, 3, 7] {
        pool(threads).install(|| {
            for &level in levels() {
                let options = Options::new().level(level);
                let explain = |call: Call| MultiHead::new(call.shape, &options).expect("a plan").explain();
                let (large, small) = (explain(large()), explain(small()));
                assert_eq!((large.threads, small.threads), (threads.min(large.tasks), 1), "{large} {small}");
                assert_eq!(large.level, level);
            }
        });
    }
}

/// A65: from tasks of a pool, in a pool of one, from a pool's task into another pool, and a hundred at once, while threads
/// that wait in one call take up another.
#[test]
fn one_parallel_region_in_any_nesting() {
    let _alone = GLOBAL_POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (one, two, three) = (pool(1), pool(2), pool(3));
    for &level in levels() {
        let call = large();
        let run = || call.run(level, Wanted::Lse);
        let expected = run();
        let check = |context: &str| run().assert_same_bits(&expected, format_args!("{context} on {}", level.name()));
        one.install(|| check("in a pool of one"));
        two.install(|| rayon::join(|| check("joined"), || check("joined")));
        two.install(|| three.install(|| check("from pool to pool")));
        two.scope(|scope| {
            scope.spawn(|_| one.install(|| check("from a task into a pool of one")));
            scope.spawn(|scope| scope.spawn(|_| check("from a task of a task")));
        });
        for pool in [&one, &two] {
            pool.scope(|scope| (0..8).for_each(|_| scope.spawn(|_| check("one of eight"))));
        }
        let small = small();
        let expected = small.run(level, Wanted::Weights);
        let one = || small.run(level, Wanted::Weights).assert_same_bits(&expected, "one of a hundred");
        three.scope(|scope| (0..100).for_each(|_| scope.spawn(|_| one())));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| check("from a thread of its own"));
            }
        });
    }
}

/// Plans are independent of each other, and of the pool they were made in.
#[test]
fn one_parallel_region_for_plans() {
    let call = large();
    let s = call.shape;
    for &level in levels() {
        let expected = call.run(level, Wanted::Out).out;
        let options = Options::new().causal(Diagonal::TopLeft).level(level);
        let run = |plan: &mut MultiHead<'_>| {
            let mut out = vec![f32::NAN; expected.len()];
            plan.run(
                &Heads::bhsd(&call.q, [s.batch, s.num_heads, s.seqlen_q, s.head_dim]).unwrap(),
                &Heads::bhsd(&call.k, [s.batch, s.num_kv_heads, s.seqlen_k, s.head_dim]).unwrap(),
                &Heads::bhsd(&call.v, [s.batch, s.num_kv_heads, s.seqlen_k, s.head_dim_v]).unwrap(),
                HeadsMut::bhsd(&mut out, [s.batch, s.num_heads, s.seqlen_q, s.head_dim_v]).unwrap(),
            )
            .unwrap();
            crate::support::assert_same_bits(&out, &expected, format_args!("a plan on {}", level.name()));
        };
        let mut plan = MultiHead::new(s, &options).unwrap();
        run(&mut plan);
        let mut other = pool(1).install(|| MultiHead::new(s, &options).unwrap());
        pool(3).install(|| rayon::join(|| run(&mut plan), || run(&mut other)));
        pool(1).install(|| run(&mut plan));
    }
}

/// Rounding mode, flush-to-zero and exception masks of a thread, without the flags that arithmetic raises.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "reads a control register, for which there is no safe function")]
fn floating_point_control() -> u32 {
    let mut mxcsr = 0u32;
    // SAFETY: stores four bytes to a variable of four bytes.
    unsafe { core::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags)) };
    mxcsr & !0x3f
}

#[cfg(target_arch = "x86_64")]
#[test]
fn one_parallel_region_that_leaves_the_floating_point_control_alone() {
    let two = pool(2);
    let before = floating_point_control();
    assert_eq!(before, 0x1f80, "the control word of a new thread");
    for &level in levels() {
        for wanted in [Wanted::Lse, Wanted::Averaged] {
            for call in [small(), large()] {
                call.run(level, wanted);
                assert_eq!(floating_point_control(), before, "the caller's, on {}", level.name());
                two.install(|| call.run(level, wanted));
                for after in two.broadcast(|_| floating_point_control()) {
                    assert_eq!(after, before, "a worker's, on {}", level.name());
                }
            }
        }
    }
}
