//! Steady work allocates nothing: an allocator that counts what a thread asks for.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait; this one passes everything on to the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use polyhead::cache::{Ring, RingCache};

use super::*;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count() {
    // A thread that is ending may have dropped it already.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every method passes its arguments, of which the caller promises what `System` asks for, on to `System`
// unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

#[test]
fn decoding_allocates_nothing() {
    let rng = &mut Rng::new(6);
    let (prompt, token) = (Tokens::random(30, rng), Tokens::random(1, rng));
    let q: Vec<f32> = rng.normals(HEADS * KV.head_dim, 1.0);
    let q = Heads::bshd(&q, [1, 1, HEADS, KV.head_dim]).expect("packed");
    let mut out = vec![f16::ZERO; HEADS * KV.head_dim_v];
    let mut in_place = KvCache::<bf16>::new(KV, 1, 300).expect("memory");
    let ring = Ring { window: 20, keep_first: 4, max_chunk: 30, page_len: 8 };
    let mut rings = RingCache::<bf16>::new(KV, 1, ring).expect("memory");
    let mut paged = PagedCache::<f32>::new(KV, 80, 8).expect("memory");
    let mut table = BlockTable::with_capacity(1, 40).expect("memory");
    let id = paged.create().expect("memory");
    prompt.with(|k, v| {
        in_place.append(0, k, v).expect("room");
        rings.append(0, k, v).expect("room");
        paged.append(id, k, v).expect("room");
    });
    let mut decode = |steps: usize| {
        for _ in 0..steps {
            let options = Options::new();
            let mut view = HeadsMut::bshd(&mut out, [1, 1, HEADS, KV.head_dim_v]).expect("packed");
            token.with(|k, v| {
                in_place.append(0, k, v).expect("room");
                rings.append(0, k, v).expect("room");
                paged.append(id, k, v).expect("room");
            });
            in_place.attend(&q, view.reborrow(), &options).expect("a good call");
            rings.attend(&q, view.reborrow(), &options).expect("a good call");
            paged.batch(&[id], &mut table).expect("an id").attend(&q, view, &options).expect("a good call");
            // A draft that is not taken.
            let fork = paged.fork(id).expect("an id");
            token.with(|k, v| paged.append(fork, k, v)).expect("room");
            paged.truncate(fork, 5).expect("an id");
            paged.remove(fork).expect("an id");
        }
    };
    // The first call makes the thread's workspace, the first fork a place for it. 150 keys are a full block of them and
    // more.
    decode(150);
    let before = CALLS.get();
    decode(100);
    assert_eq!(CALLS.get() - before, 0);
    // The counter counts.
    drop(Box::new(before));
    assert_eq!(CALLS.get() - before, 1);
}
