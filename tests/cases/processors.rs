//! A63 and A64: unaligned memory, and processors without the best instructions.

use half::{bf16, f16};
use polyhead::{Error, Heads, HeadsMut, Level, Options, Outputs, multi_head, multi_head_with};

use crate::child;
use crate::operands::{Operands, attend, on_every_level, shape, shapes};
use crate::support::{Bits, Rng, assert_same_bits};

/// Slices that start at every element of a cache line.
#[test]
fn a63_unaligned_slices() {
    fn run<T: Bits + Into<f64>>(seqlen: (usize, usize), dims: (usize, usize)) {
        let operands = Operands::<T>::random(shape(1, (2, 1), seqlen, dims), 63);
        let mask = Rng::new(63).bools(seqlen.0 * seqlen.1, 0.8);
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let expected = operands.run(&options.mask(attend(&mask, [seqlen.0, seqlen.1])), name);
            for offset in 0..64 / size_of::<T>() {
                let shift = |data: &[T]| [&vec![T::INPUT; offset], data].concat();
                let (q, k, v) = (shift(&operands.q), shift(&operands.k), shift(&operands.v));
                let moved = [vec![true; offset], mask.clone()].concat();
                let mut out = vec![T::OUTPUT; offset + expected.out.len()];
                let mut lse = vec![f32::OUTPUT; offset + expected.lse.len()];
                let [q_shape, k_shape, v_shape] = shapes(&operands.shape);
                let view = |data, shape| Heads::bhsd(data, shape).expect("packed");
                let (q, k, v) = (view(&q[offset..], q_shape), view(&k[offset..], k_shape), view(&v[offset..], v_shape));
                let outputs = Outputs::new(HeadsMut::bhsd(&mut out[offset..], operands.out_shape()).expect("packed"));
                let options = options.mask(attend(&moved[offset..], [seqlen.0, seqlen.1]));
                multi_head_with(&q, &k, &v, outputs.lse(&mut lse[offset..]), &options).expect("valid");
                let context = format!("{} {dims:?}, {offset} elements off, on {name}", T::NAME);
                assert_same_bits(&out[offset..], &expected.out, &context);
                assert_same_bits(&lse[offset..], &expected.lse, &context);
                assert!(out[..offset].iter().all(|x| x.bits() == T::OUTPUT.bits()), "{context}");
            }
        });
    }
    run::<f32>((3, 5), (2, 3));
    run::<f32>((33, 130), (16, 16));
    run::<f16>((9, 40), (32, 8));
    run::<bf16>((9, 40), (8, 32));
}

const NAMES: [&str; 5] = ["portable", "avx2", "avx512", "amx", "neon"];

/// `POLYHEAD_MAX_LEVEL` makes the machine look like a lesser one; there the same answers come, and the better levels
/// are an error. Each limit needs a process, as the first call reads it. (To run without the instructions, and not only
/// without the level: `qemu-x86_64 -cpu Nehalem` and `-cpu SandyBridge`, see tests/README.md.)
#[test]
fn a64_lesser_processors() {
    const TEST: &str = "processors::a64_lesser_processors";
    let best_below =
        |limit: Level| Level::available().iter().rfind(|&&level| level <= limit).copied().unwrap_or(Level::Portable);
    let known = NAMES.iter().filter_map(|name| Level::from_name(name)).filter(|&level| level <= Level::detect());
    let limits: Vec<(String, Level)> = known
        .flat_map(|limit| {
            [(limit.name().to_owned(), best_below(limit)), (limit.name().to_uppercase(), best_below(limit))]
        })
        .chain([("no such level".to_owned(), Level::Portable), (String::new(), Level::Portable)])
        .collect();
    for (limit, best) in limits {
        let variables = [("POLYHEAD_MAX_LEVEL", limit.as_str()), ("POLYHEAD_CASES_BEST", best.name())];
        child::run(TEST, &variables, limited);
    }
}

/// In the child.
fn limited() {
    let best = std::env::var("POLYHEAD_CASES_BEST").expect("set by the parent");
    assert_eq!(Level::detect().name(), best);
    let operands = Operands::<f32>::random(shape(1, (4, 2), (33, 130), (17, 5)), 64);
    operands.check(&Options::new(), "the levels that are left");
    assert!(Level::available().iter().all(|&level| level <= Level::detect()));
    for better in NAMES.iter().filter_map(|name| Level::from_name(name)).filter(|&level| level > Level::detect()) {
        let mut out = vec![f32::OUTPUT; operands.out_shape().iter().product()];
        let [q, k, v] = operands.views();
        let view = HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed");
        let error = multi_head(&q, &k, &v, view, &Options::new().level(better)).expect_err("not available");
        assert_eq!(error, Error::LevelUnavailable { requested: better.name(), best: Level::detect().name() });
        assert!(out.iter().all(|x| x.bits() == f32::OUTPUT.bits()));
    }
}
