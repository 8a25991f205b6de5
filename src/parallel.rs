//! The only file that names rayon: how work is spread over threads.
//!
//! Every call is one parallel region on the pool that the caller is in. Without the `rayon` feature, or on a pool of one
//! thread, everything runs on the caller's thread. What is computed never depends on which thread does it.

#[cfg(test)]
mod panics;

use core::sync::atomic::{AtomicUsize, Ordering};

/// Threads of the pool the caller is in (the global pool outside any).
pub(crate) fn current_threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}

/// Runs `work(task, scratch)` once for every task in `0..tasks`, each thread with its own element of `scratch`.
///
/// Tasks are claimed in ascending order, so a list sorted heaviest first balances itself. At most `scratch.len()` threads
/// take part; with one element everything runs here, in order. Allocates nothing.
pub(crate) fn for_each_task<S: Send>(tasks: usize, scratch: &mut [S], work: impl Fn(usize, &mut S) + Sync) {
    let next = AtomicUsize::new(0);
    let helpers = scratch.len().min(tasks);
    #[cfg(test)]
    let trap = panics::Trap::of_this_call();
    fan_out(&mut scratch[..helpers], &|mine: &mut S| {
        loop {
            // Relaxed: the counter orders nothing but itself; the join that ends the region orders the results.
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            #[cfg(test)]
            trap.step();
            work(task, mine);
        }
    });
}

/// Calls `body` with every element of `each`, on as many threads as the pool spares.
fn fan_out<S: Send>(each: &mut [S], body: &(impl Fn(&mut S) + Sync)) {
    match each {
        [] => {}
        [one] => body(one),
        _ => {
            let (left, right) = each.split_at_mut(each.len() / 2);
            #[cfg(feature = "rayon")]
            rayon::join(|| fan_out(left, body), || fan_out(right, body));
            #[cfg(not(feature = "rayon"))]
            {
                fan_out(left, body);
                fan_out(right, body);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for tasks in [0, 1, 2, 7, 100] {
            for threads in [1, 2, 3, 8] {
                let runs: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                let mut scratch = vec![0usize; threads];
                for_each_task(tasks, &mut scratch, |task, mine| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                    *mine += 1;
                });
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
                assert_eq!(scratch.iter().sum::<usize>(), tasks);
            }
        }
    }
}
