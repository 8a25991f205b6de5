//! The memory of the other tests: that its edges are where they should be, and that touching them does not go unseen.

mod support;

use support::{Arrangement, Edges, Memory, PoisonedInput, PoisonedOutput};

#[test]
fn edges_are_at_the_elements() {
    for edges in Edges::ALL {
        for len in [0, 1, 2, 15, 16, 1023, 1024, 1025, 5000] {
            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut memory = Memory::from(edges, &values, -1.0);
            let address = memory.inner().as_ptr_range();
            let page = 4096;
            if cfg!(unix) && !cfg!(miri) {
                // Pages are a multiple of 4 KiB everywhere.
                assert!(edges != Edges::GuardBefore || (address.start as usize).is_multiple_of(page));
                assert!(edges != Edges::GuardAfter || (address.end as usize).is_multiple_of(page));
            }
            assert_eq!((memory.inner(), memory.clone().inner()), (&values[..], &values[..]));
            assert!(memory.len() >= len && memory.all().len() >= memory.len());
            memory.assert_outside(|&x| x == -1.0, "untouched");
            memory.inner_mut().fill(5.0);
            memory.assert_outside(|&x| x == -1.0, "untouched");
            assert!(memory.inner().iter().all(|&x| x == 5.0));
        }
    }
}

/// The first and the last element of every arrangement are those at the edges.
#[test]
fn views_reach_both_edges() {
    let shape = [2, 3, 5, 7];
    let values: Vec<f32> = (0..210).map(|i| i as f32).collect();
    for edges in Edges::ALL {
        for arrangement in Arrangement::ALL {
            let input = PoisonedInput::within(edges, &values, shape, arrangement);
            let (data, strides) = input.parts();
            let last: usize = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
            assert_eq!(data[0], 0.0);
            assert!(edges != Edges::GuardAfter || data.len() == last + 1, "{arrangement:?}");
            assert_eq!(data[last], *input.packed().last().expect("not empty"));
        }
        for arrangement in Arrangement::DISTINCT {
            let mut output = PoisonedOutput::<f32>::within(edges, shape, arrangement);
            output.assert_untouched("new");
            let (data, strides) = output.parts();
            for at in 0..210 {
                let index = [at / 105, at / 35 % 3, at / 7 % 5, at % 7];
                data[index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>()] = at as f32;
            }
            assert_eq!(output.packed(format_args!("{arrangement:?}")), values);
        }
    }
}

#[test]
#[should_panic(expected = "written Some(3) elements from the first of 3")]
fn foreign_elements_are_watched() {
    let mut memory = Memory::new(Edges::Foreign, 3, 0.0f32);
    memory[3] = 1.0;
    memory.assert_outside(|&x| x == 0.0, "a test");
}

/// In children, which a signal ends.
#[cfg(all(unix, not(miri)))]
#[test]
#[allow(unsafe_code, reason = "to touch what may not be touched")]
fn touching_a_guard_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const TOUCH: &str = "POLYHEAD_REDZONES_TOUCH";
    let cases = Edges::ALL.into_iter().flat_map(|edges| [-1, 0, 10, 999, 1000].map(|offset| (edges, offset)));
    let cases: Vec<_> = cases.flat_map(|(edges, offset)| [false, true].map(|write| (edges, offset, write))).collect();
    if let Ok(case) = std::env::var(TOUCH) {
        let (edges, offset, write) = cases[case.parse::<usize>().expect("the number of a case")];
        let mut memory = Memory::new(edges, 1000, 1.0f32);
        // SAFETY: the element is foreign or its page ends the process, and the process has no other purpose.
        unsafe {
            match write {
                true => memory.write_at(offset, 2.0),
                false => assert_eq!(memory.read_at(offset), 1.0),
            }
        }
        println!("touched");
        return;
    }
    for (number, case) in cases.iter().enumerate() {
        let mut child = Command::new(std::env::current_exe().expect("the path of this test"));
        child.args(["--exact", "touching_a_guard_ends_the_process", "--nocapture", "--test-threads=1"]);
        // A sanitizer's own handler of the signal would end the process in its own way.
        child.env(TOUCH, number.to_string()).env("ASAN_OPTIONS", "handle_segv=0:handle_sigbus=0");
        let output = match child.output() {
            Ok(output) => output,
            // An emulator runs this binary, but its system cannot start another.
            Err(error) => return eprintln!("SKIPPED: cannot start a process: {error}"),
        };
        let guarded = matches!(case, (Edges::GuardBefore, -1, _) | (Edges::GuardAfter, 1000, _));
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success() && stdout.contains("touched"), !guarded, "{case:?}: {stdout}");
        if guarded {
            let signal = output.status.signal();
            assert!(matches!(signal, Some(libc::SIGSEGV | libc::SIGBUS)), "{case:?}: {}", output.status);
        }
    }
}
