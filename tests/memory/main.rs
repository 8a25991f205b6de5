//! What calls ask of the allocator: nothing on a second run of a plan, nothing that grows with seqlen_q or seqlen_k, nothing
//! for grouped heads. A global allocator counts over all threads that work for a test, so one test at a time.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait; this one passes everything on to the system's")]

mod operators;
#[path = "../support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use half::{bf16, f16};
use polyhead::{
    Bias, Diagonal, Element, Heads, HeadsMut, Level, Mask, MultiHead, Options, Outputs, Shape, View, Window,
    multi_head, multi_head_with,
};
use support::levels;

thread_local! {
    /// Whether this thread's allocations count. The test harness allocates too, at any time, on a thread of its own.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

/// Calls that hand out memory, bytes in use, and the most there were, of the threads that count.
struct Counting {
    calls: AtomicUsize,
    bytes: AtomicUsize,
    peak: AtomicUsize,
}

#[global_allocator]
static ALLOCATOR: Counting =
    Counting { calls: AtomicUsize::new(0), bytes: AtomicUsize::new(0), peak: AtomicUsize::new(0) };

impl Counting {
    fn more(&self, bytes: usize) {
        if !COUNTS.get() {
            return;
        }
        self.calls.fetch_add(1, Ordering::SeqCst);
        let now = self.bytes.fetch_add(bytes, Ordering::SeqCst).wrapping_add(bytes);
        self.peak.fetch_max(now, Ordering::SeqCst);
    }

    fn less(&self, bytes: usize) {
        if !COUNTS.get() {
            return;
        }
        // Wraps below zero, and back, where one thread frees what another took.
        self.bytes.fetch_sub(bytes, Ordering::SeqCst);
    }
}

// SAFETY: every method passes its arguments, of which the caller promises what `System` asks for, on to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.more(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.more(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist for a moment.
        self.more(size);
        // SAFETY: as above.
        let new = unsafe { System.realloc(old, layout, size) };
        self.less(layout.size());
        new
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        self.less(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

/// One test at a time. Its thread counts, and all of the global pool, which has worked before.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    #[cfg(feature = "rayon")]
    {
        rayon::broadcast(count_and_steal);
        work();
    }
    COUNTS.set(true);
    guard
}

/// Runs `body` in a pool whose threads count and have worked before. They end at some time after it, and no longer count then.
#[cfg(feature = "rayon")]
fn in_pool(threads: usize, body: impl FnOnce() + Send) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    pool.broadcast(count_and_steal);
    (0..20).for_each(|_| pool.install(work));
    pool.install(body);
    pool.broadcast(|_| COUNTS.set(false));
}

/// A thread that looks for work of others the first time, whenever that is, registers with crossbeam's collector, which takes some
/// kilobytes (2,304 bytes each, 2,712 once): not to be taken for a call's.
#[cfg(feature = "rayon")]
fn count_and_steal(_: rayon::BroadcastContext<'_>) {
    COUNTS.set(true);
    rayon::yield_now();
}

/// Many small joins, in the pool that the caller is in.
#[cfg(feature = "rayon")]
fn work() {
    fn halve(depth: usize) {
        if depth > 0 {
            rayon::join(|| halve(depth - 1), || halve(depth - 1));
        } else {
            std::hint::black_box((0..20_000).fold(0u64, |sum, x| sum ^ std::hint::black_box(x)));
        }
    }
    halve(8);
}

/// Allocations while `body` runs, on any thread, and how far the bytes in use rose.
fn measure(body: impl FnOnce()) -> (usize, usize) {
    let calls = ALLOCATOR.calls.load(Ordering::SeqCst);
    // From half of the range, so that nothing wraps.
    let start = usize::MAX / 2;
    ALLOCATOR.bytes.store(start, Ordering::SeqCst);
    ALLOCATOR.peak.store(start, Ordering::SeqCst);
    body();
    (ALLOCATOR.calls.load(Ordering::SeqCst) - calls, ALLOCATOR.peak.load(Ordering::SeqCst) - start)
}

/// Operands of a shape, and everything the options need.
struct Setup<T> {
    shape: Shape,
    q: Vec<T>,
    kv: Vec<T>,
    out: Vec<T>,
    lse: Vec<f32>,
    slopes: Vec<f32>,
    lengths: Vec<usize>,
    seen: Vec<bool>,
    bias: Vec<f32>,
}

impl<T: Element> Setup<T> {
    fn new(shape: Shape) -> Self {
        let Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, .. } = shape;
        let values = |len: usize| (0..len).map(|x| T::from_f32_nearest((x % 13) as f32 * 0.125 - 0.75)).collect();
        Self {
            shape,
            q: values(batch * num_heads * seqlen_q * head_dim),
            kv: values(batch * num_kv_heads * seqlen_k * head_dim),
            out: values(batch * num_heads * seqlen_q * head_dim),
            lse: vec![0.0; batch * num_heads * seqlen_q],
            slopes: vec![0.01; num_heads],
            lengths: vec![seqlen_k - seqlen_k / 8; batch],
            seen: (0..seqlen_q.max(seqlen_k)).map(|x| x % 5 != 3).collect(),
            bias: (0..seqlen_q.max(seqlen_k)).map(|x| if x % 6 == 5 { f32::NEG_INFINITY } else { 0.5 }).collect(),
        }
    }

    /// The options, by name; the last has all of them.
    fn options(&self) -> Vec<(&'static str, Options<'_>)> {
        let new = Options::new();
        let (l, s) = (self.shape.seqlen_q, self.shape.seqlen_k);
        let scores = [self.shape.batch, self.shape.num_heads, l, s];
        let window = Window { left: Some(100), right: Some(20), diagonal: Diagonal::BottomRight };
        // Masks of all rows and keys, out of little memory: along the keys, along the queries.
        let by_key = Mask::attend(View::with_strides(&self.seen, scores, [0, 0, 0, 1]).expect("a valid call"))
            .expect("a valid call");
        let by_query = Bias::new(View::with_strides(&self.bias, scores, [0, 0, 1, 0]).expect("a valid call"))
            .expect("a valid call");
        vec![
            ("plain", new),
            ("causal", new.causal(Diagonal::BottomRight)),
            ("window", new.window(window)),
            ("lengths", new.key_lengths(&self.lengths)),
            ("mask", new.mask(by_key)),
            ("bias", new.bias(by_query)),
            ("alibi", new.alibi(&self.slopes, Diagonal::TopLeft)),
            ("softcap", new.softcap(5.0)),
            ("sinks", new.sinks(&self.slopes)),
            (
                "all",
                new.causal(Diagonal::BottomRight)
                    .window(window)
                    .key_lengths(&self.lengths)
                    .mask(by_key)
                    .bias(by_query)
                    .alibi(&self.slopes, Diagonal::TopLeft)
                    .softcap(5.0)
                    .sinks(&self.slopes),
            ),
        ]
    }

    fn shapes(&self) -> [[usize; 4]; 2] {
        let Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, .. } = self.shape;
        [[batch, num_heads, seqlen_q, head_dim], [batch, num_kv_heads, seqlen_k, head_dim]]
    }
}

/// Memory that outputs are written to, apart from the rest, which options borrow.
struct Target<T> {
    out: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Element> Target<T> {
    fn of(setup: &Setup<T>) -> Self {
        Self { out: setup.out.clone(), lse: setup.lse.clone() }
    }

    fn outputs(&mut self, shape: [usize; 4]) -> Outputs<'_, T> {
        Outputs::new(HeadsMut::bhsd(&mut self.out, shape).expect("a valid call")).lse(&mut self.lse)
    }
}

fn shape([batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim]: [usize; 6]) -> Shape {
    Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v: head_dim }
}

/// Asserts that runs of a plan after the first allocate nothing, in one of some `tries`: one where no other thread takes part,
/// more where rayon's queues may grow now and then.
fn assert_second_run_is_free<T: Element>(sizes: [usize; 6], tries: usize, context: &str) {
    let setup = Setup::<T>::new(shape(sizes));
    let [q_shape, kv_shape] = setup.shapes();
    let (q, kv) = (
        Heads::bhsd(&setup.q, q_shape).expect("a valid call"),
        Heads::bhsd(&setup.kv, kv_shape).expect("a valid call"),
    );
    let mut target = Target::of(&setup);
    let mut weights = vec![0.0f32; sizes[0] * sizes[1] * sizes[3] * sizes[4]];
    let weights_shape = [sizes[0], sizes[1], sizes[3], sizes[4]];
    for (name, options) in setup.options() {
        for &level in levels() {
            let mut plan = MultiHead::new(setup.shape, &options.level(level)).expect("a valid call");
            let mut run = || {
                plan.run_with(&q, &kv, &kv, target.outputs(q_shape)).expect("a valid call");
                let weights = HeadsMut::bhsd(&mut weights, weights_shape).expect("a valid call");
                plan.run_with(&q, &kv, &kv, target.outputs(q_shape).weights(weights)).expect("a valid call");
            };
            run();
            let least = (0..tries).map(|_| measure(|| (0..5).for_each(|_| run()))).find(|&used| used == (0, 0));
            let context = format!("{context}, {} {name} on {} {sizes:?}", T::NAME, level.name());
            assert_eq!(least, Some((0, 0)), "{context}: five runs allocated, every time");
        }
    }
}

fn assert_plans_are_free(tries: usize, context: &str) {
    for sizes in [[1, 2, 1, 20, 40, 16], [2, 4, 2, 150, 140, 33]] {
        assert_second_run_is_free::<f32>(sizes, tries, context);
        assert_second_run_is_free::<f16>(sizes, tries, context);
        assert_second_run_is_free::<bf16>(sizes, tries, context);
    }
}

/// A plan allocates when it is made and never again, on this thread and in pools.
///
/// Inside of a pool rayon allocates nothing for a join either, once each of its threads has stolen for the first time. (From a
/// thread outside of any pool it does now and then, for its queue of injected jobs; see `memory_is_bounded_outside_of_a_pool`.)
#[test]
fn memory_is_bounded_a_plan_allocates_once() {
    let _alone = alone();
    #[cfg(feature = "rayon")]
    for threads in [1, 2, 3] {
        in_pool(threads, || assert_plans_are_free(if threads == 1 { 1 } else { 5 }, &format!("pool of {threads}")));
    }
    #[cfg(not(feature = "rayon"))]
    assert_plans_are_free(1, "serial");
}

/// A small call stays on its thread, where nothing of rayon is asked for: no allocation either. A large one from outside of a
/// pool is injected into the global one: rayon's queue takes a block of memory for every 63 injections.
#[test]
fn memory_is_bounded_outside_of_a_pool() {
    let _alone = alone();
    assert_second_run_is_free::<f32>([1, 2, 1, 20, 40, 16], 1, "outside of a pool");
    let setup = Setup::<f32>::new(shape([2, 4, 2, 150, 300, 33]));
    let [q_shape, kv_shape] = setup.shapes();
    let (q, kv) = (
        Heads::bhsd(&setup.q, q_shape).expect("a valid call"),
        Heads::bhsd(&setup.kv, kv_shape).expect("a valid call"),
    );
    let mut target = Target::of(&setup);
    let mut plan = MultiHead::new(setup.shape, &Options::new()).expect("a valid call");
    let mut run = || plan.run_with(&q, &kv, &kv, target.outputs(q_shape)).expect("a valid call");
    // The first steals of each thread of the global pool.
    (0..20).for_each(|_| run());
    let (calls, _) = measure(|| (0..100).for_each(|_| run()));
    assert!(calls <= 4, "100 calls from outside of a pool allocated {calls} times");
}

/// Bytes that one call of `multi_head_with` on a thread that has made none needs beyond its operands.
fn extra<T: Element>(setup: &Setup<T>, target: &mut Target<T>, options: &Options<'_>) -> usize {
    let [q_shape, kv_shape] = setup.shapes();
    let (q, kv) = (
        Heads::bhsd(&setup.q, q_shape).expect("a valid call"),
        Heads::bhsd(&setup.kv, kv_shape).expect("a valid call"),
    );
    let mut bytes = 0;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            COUNTS.set(true);
            measure(|| multi_head_with(&q, &kv, &kv, target.outputs(q_shape), options).expect("a valid call")).1
        });
        bytes = thread.join().expect("the call succeeds");
    });
    bytes
}

/// A call's extra memory for twice the length is that for the length, with each option and all of them, on every level; on the
/// best one with as many heads and keys as would make scores of 1 GB. All of them are long enough for every thread there is.
#[test]
fn memory_is_bounded() {
    let _alone = alone();
    for &level in levels() {
        let sizes = if level == Level::detect() { [(16, 16, 2000), (4, 1, 700)] } else { [(4, 4, 400), (4, 1, 400)] };
        for (heads, kv_heads, len) in sizes {
            let setups = [len, 2 * len].map(|len| Setup::<f32>::new(shape([1, heads, kv_heads, len, len, 8])));
            let mut targets = setups.each_ref().map(Target::of);
            for ((name, short), (_, long)) in setups[0].options().into_iter().zip(setups[1].options()) {
                if heads == 16 && !["causal", "mask", "all"].contains(&name) {
                    // The other sizes have all of them, in less time.
                    continue;
                }
                let short = extra(&setups[0], &mut targets[0], &short.level(level));
                let long = extra(&setups[1], &mut targets[1], &long.level(level));
                let say = format!("{name} {heads}/{kv_heads} on {}: {short} bytes, then {long}", level.name());
                assert!(short > 0 && long * 10 <= short * 11, "{say}");
                // Threads of this machine times a tile of this head_dim, generously: not K and V, nor L x S.
                let threads = MultiHead::new(setups[1].shape, &Options::new().level(level))
                    .expect("a valid call")
                    .explain()
                    .threads;
                // On matrix tiles up to 512 keys are packed, for up to 2048 rows.
                let tile = if level == Level::Amx { 1 << 20 } else { 256 << 10 };
                assert!(long <= threads * tile, "{say}");
            }
        }
    }
}

/// The same at lengths of a long context, 12800 and 25600, where windows keep the work small; in every element type.
#[test]
fn memory_is_bounded_at_long_contexts() {
    fn check<T: Element>() {
        let window = Window { left: Some(64), right: Some(0), diagonal: Diagonal::BottomRight };
        let setups = [12_800, 25_600].map(|len| Setup::<T>::new(shape([1, 2, 1, len, len, 8])));
        for &level in levels() {
            let options = Options::new().window(window).level(level);
            let [short, long] = setups.each_ref().map(|setup| extra(setup, &mut Target::of(setup), &options));
            let say = format!("{} on {}: {short} bytes, then {long}", T::NAME, level.name());
            assert!(short > 0 && long * 10 <= short * 11, "{say}");
        }
    }
    let _alone = alone();
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// Few queries of many keys: what a decoding step needs does not grow with its past, K and V are not copied for the heads of
/// a group.
#[test]
fn memory_is_bounded_for_grouped_heads_and_decoding() {
    let _alone = alone();
    for &level in levels() {
        for l in [1, 4] {
            let setups = [2000, 16_000].map(|len| Setup::<bf16>::new(shape([1, 32, 1, l, len, 16])));
            let options = Options::new().level(level);
            let [short, long] = setups.each_ref().map(|setup| extra(setup, &mut Target::of(setup), &options));
            let say = format!("L = {l} on {}: {short} bytes, then {long}", level.name());
            assert!(short > 0 && long * 10 <= short * 11, "{say}");
            // One copy of K in f32 would be 16000 * 16 * 4 bytes = 1 MB, one for each head 32 MB.
            assert!(long < 16_000 * 16 * 4, "{say}");
        }
    }
}

/// The memory of `multi_head` is kept for the next call of the thread: the second of the same shape allocates nothing.
#[test]
fn memory_is_bounded_and_reused_between_calls() {
    let _alone = alone();
    let setup = Setup::<f32>::new(shape([1, 2, 1, 30, 100, 16]));
    let [q_shape, kv_shape] = setup.shapes();
    let (q, kv) = (
        Heads::bhsd(&setup.q, q_shape).expect("a valid call"),
        Heads::bhsd(&setup.kv, kv_shape).expect("a valid call"),
    );
    let mut target = Target::of(&setup);
    for &level in levels() {
        let mut run = || {
            let out = HeadsMut::bhsd(&mut target.out, q_shape).expect("a valid call");
            multi_head(&q, &kv, &kv, out, &Options::new().level(level)).expect("a valid call");
        };
        run();
        // Rayon's queues grow now and then; what the crate allocated, it would allocate in every one of the five.
        let least = (0..5).map(|_| measure(|| (0..5).for_each(|_| run()))).min();
        assert_eq!(least, Some((0, 0)), "{}", level.name());
    }
}

/// What a plan says that it holds is what it holds.
#[test]
fn memory_is_bounded_by_what_explain_says() {
    let _alone = alone();
    for &level in levels() {
        for sizes in [[1, 2, 1, 20, 40, 16], [2, 4, 2, 300, 300, 64]] {
            // Rayon may free something of its own meanwhile: the most of five.
            let (held, said) = (0..5)
                .map(|_| {
                    let mut plan = None;
                    let make = || MultiHead::new(shape(sizes), &Options::new().level(level)).expect("a valid call");
                    measure(|| plan = Some(make()));
                    let held = ALLOCATOR.bytes.load(Ordering::SeqCst) - usize::MAX / 2;
                    (held, plan.expect("made").explain().workspace_bytes)
                })
                .max()
                .expect("five");
            assert_eq!(held, said, "{} {sizes:?}", level.name());
        }
    }
}
