//! Signals that arrive while kernels run: the processor's state, tiles among it, is as it was when the handler returns.
#![cfg(unix)]

mod support;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use polyhead::{Heads, HeadsMut, Options, multi_head};
use support::{Rng, assert_same_bits, levels};

static SIGNALS: AtomicU64 = AtomicU64::new(0);
static SUM: AtomicU32 = AtomicU32::new(0);

/// Uses vector registers.
extern "C" fn handler(_: libc::c_int) {
    let numbers: [f32; 64] = core::array::from_fn(|i| i as f32 * 1.5);
    SUM.fetch_add(core::hint::black_box(numbers).iter().sum::<f32>() as u32, Ordering::Relaxed);
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Sends this process a signal whenever so much processor time is used; 0 stops it.
#[allow(unsafe_code, reason = "system calls")]
fn every(microseconds: libc::suseconds_t) {
    let time = libc::timeval { tv_sec: 0, tv_usec: microseconds };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: the handler only computes and adds to atomics, which a signal handler may do; structures are initialised.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGPROF, &action, core::ptr::null_mut()), 0);
        assert_eq!(libc::setitimer(libc::ITIMER_PROF, &timer, core::ptr::null_mut()), 0);
    }
}

#[test]
fn signals_change_no_bit() {
    let ([l, s, d], mut rng) = ([130, 300, 64], Rng::new(15));
    let (q, k, v) =
        (rng.normals::<f32>(2 * l * d, 1.0), rng.normals::<f32>(2 * s * d, 1.0), rng.normals(2 * s * d, 1.0));
    for &level in levels() {
        let run = || {
            let mut out = vec![f32::NAN; 2 * l * d];
            let (q, kv) =
                (Heads::bhsd(&q, [1, 2, l, d]).unwrap(), [&k, &v].map(|x| Heads::bhsd(x, [1, 2, s, d]).unwrap()));
            let into = HeadsMut::bhsd(&mut out, [1, 2, l, d]).unwrap();
            multi_head(&q, &kv[0], &kv[1], into, &Options::new().level(level)).unwrap();
            out
        };
        let expected = run();
        let before = SIGNALS.load(Ordering::Relaxed);
        every(1000);
        let mut calls = 0;
        while calls < 20 || (SIGNALS.load(Ordering::Relaxed) < before + 10 && calls < 100_000) {
            assert_same_bits(&run(), &expected, level.name());
            calls += 1;
        }
        every(0);
        assert!(SIGNALS.load(Ordering::Relaxed) > before, "no signal came in {calls} calls on {}", level.name());
    }
    assert!(SUM.load(Ordering::Relaxed) > 0);
}
