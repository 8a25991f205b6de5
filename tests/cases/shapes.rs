//! A30 to A35: sizes of any number.

use half::{bf16, f16, slice::HalfBitsSliceExt};
use polyhead::{Diagonal, Error, Heads, HeadsMut, MultiHead, Options, Shape, View, multi_head};

use crate::operands::{Operands, attend, on_every_level, shape, shapes};
use crate::support::{
    Arrangement, Bits, PoisonedInput, PoisonedOutput, Rng, assert_all_close, assert_same_bits, max_abs,
};

/// Nothing to do is done; no division by a size of zero.
#[test]
fn a30_axes_of_size_zero() {
    for (batch, heads, seqlen, dims) in [
        (7, (7, 7), (0, 0), (7, 7)),
        (0, (7, 7), (3, 5), (7, 7)),
        (2, (0, 0), (3, 5), (7, 7)),
        (2, (0, 3), (3, 5), (7, 7)),
        (2, (3, 3), (0, 5), (7, 7)),
        (2, (3, 3), (3, 0), (7, 7)),
        (2, (3, 1), (1, 0), (7, 7)),
        (2, (3, 3), (3, 5), (7, 0)),
        (2, (3, 1), (130, 0), (7, 2)),
    ] {
        let operands = Operands::<f32>::random(shape(batch, heads, seqlen, dims), 30);
        for causal in [None, Some(Diagonal::TopLeft), Some(Diagonal::BottomRight)] {
            let options = causal.map_or(Options::new(), |diagonal| Options::new().causal(diagonal));
            let expected = operands.check(&options, format_args!("{:?} {causal:?}", operands.shape));
            // Without keys there are rows, of zeros; otherwise the output is empty.
            assert!(expected.out.is_empty() || seqlen.1 == 0 && expected.out.iter().all(|&x| x == 0.0));
            let lengths = vec![0; batch];
            operands.check(&options.key_lengths(&lengths), "no key in use");
        }
    }
}

/// Vectors of no elements have products of 0 and so equal weights; what they have not is a default scale.
#[test]
fn a30_head_dim_zero() {
    for (seqlen_q, seqlen_k) in [(1, 1), (3, 5), (33, 130)] {
        let operands = Operands::<f32>::uni_ramp(shape(2, (4, 2), (seqlen_q, seqlen_k), (0, 3)));
        let mean = (seqlen_k + 1) as f64 / 2.0;
        operands.assert_rows(&Options::new().softmax_scale(1.0), &vec![mean; seqlen_q], "head_dim 0");
        let mut out = vec![f32::OUTPUT; 2 * 4 * seqlen_q * 3];
        let [q, k, v] = operands.views();
        let view = HeadsMut::bhsd(&mut out, operands.out_shape()).expect("packed");
        assert_eq!(multi_head(&q, &k, &v, view, &Options::new()), Err(Error::NoDefaultScale));
        assert!(out.iter().all(|x| x.bits() == f32::OUTPUT.bits()));
        assert_eq!(MultiHead::new(operands.shape, &Options::new()).map(|_| ()), Err(Error::NoDefaultScale));
    }
}

/// Query heads h of one KV head are neighbours: 0, 0, 1, 1 and not 0, 1, 0, 1.
#[test]
fn a31_grouped_heads_in_group_order() {
    for (heads, kv_heads) in [(4, 2), (6, 2), (8, 1), (9, 3), (130, 2), (3, 3)] {
        for (seqlen_q, seqlen_k) in [(1, 5), (5, 130), (40, 3), (129, 2)] {
            let mut operands = Operands::<f32>::uni_ramp(shape(2, (heads, kv_heads), (seqlen_q, seqlen_k), (4, 2)));
            operands.each_value(|head, _, _| head as f32);
            let expected = operands.check(&Options::new(), format_args!("{heads}/{kv_heads}"));
            for (at, x) in expected.out.iter().enumerate() {
                let head = at / (2 * seqlen_q) % heads;
                assert!(is_head(*x, head / (heads / kv_heads)), "{heads}/{kv_heads}: head {head} gives {x}");
            }
        }
    }
}

fn is_head(x: f64, kv_head: usize) -> bool {
    (x - kv_head as f64).abs() < 1e-12
}

/// As with K and V repeated for every head (torch's `repeat_interleave`).
#[test]
fn a31_equals_repeated_heads() {
    let (heads, kv_heads, seqlen_k, dim) = (6, 2, 140, 8);
    for seqlen_q in [1, 7, 50, 129] {
        let grouped = Operands::<f32>::random(shape(2, (heads, kv_heads), (seqlen_q, seqlen_k), (dim, dim)), 31);
        let repeat = |data: &[f32]| -> Vec<f32> {
            let head = seqlen_k * dim;
            data.chunks(head).flat_map(|one| one.repeat(heads / kv_heads)).collect()
        };
        let shape = Shape { num_kv_heads: heads, ..grouped.shape };
        let repeated = Operands { shape, q: grouped.q.clone(), k: repeat(&grouped.k), v: repeat(&grouped.v) };
        let expected = grouped.check(&Options::new(), "grouped");
        assert_eq!(repeated.check(&Options::new(), "repeated"), expected);
    }
}

/// Values of another width than queries and keys, narrower and wider; the scale is of the keys' width.
#[test]
fn a32_values_of_another_width() {
    let reported = Operands::<f32>::random(shape(8, (4, 1), (1, 36), (32, 24)), 32);
    let expected = reported.check(&Options::new(), "reported");
    assert_eq!(expected.out.len(), 8 * 4 * 24);
    let explicit = reported.reference(&Options::new().softmax_scale(1.0 / 32f32.sqrt()));
    assert_all_close(&explicit.out, &expected.out, 1e-6, 0.0, "1 / sqrt(32)");
    for (dim, dim_v) in [(32, 1), (32, 33), (1, 128), (3, 100), (64, 16)] {
        let operands = Operands::<f32>::random(shape(1, (2, 1), (33, 130), (dim, dim_v)), 32);
        operands.check(&Options::new(), format_args!("{dim} and {dim_v}"));
    }
}

const WIDTHS: [usize; 29] =
    [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 37, 40, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 256, 320, 576];

/// Every width counts to its last element, which alone tells the keys apart here.
#[test]
fn a33_every_head_dim() {
    fn run<T: Bits + Into<f64>>(dim: usize, dim_v: usize, seqlen: (usize, usize)) {
        let mut operands = Operands::<T>::random(shape(1, (2, 1), seqlen, (dim, dim_v)), 33);
        for (at, k) in operands.k.iter_mut().enumerate() {
            if at % dim != dim - 1 {
                *k = T::from_f32_nearest(0.0);
            }
        }
        let options = Options::new().softmax_scale(1.0);
        operands.check(&options, format_args!("{} {dim} and {dim_v}", T::NAME));
    }
    for (i, &dim) in WIDTHS.iter().enumerate() {
        run::<f32>(dim, dim, (3, 5));
        run::<f32>(dim, WIDTHS[WIDTHS.len() - 1 - i], (18, 20));
        run::<f16>(dim, dim, (3, 5));
        run::<bf16>(dim, dim, (1, 5));
    }
    for dim in [1, 33, 65, 320] {
        run::<f32>(dim, dim, (34, 131));
    }
}

/// A last block of keys that is not full, with NaN behind it, and twice the same.
#[test]
fn a34_keys_not_a_multiple_of_the_block() {
    for seqlen_k in (1..=130).chain([255, 256, 257, 383]) {
        for seqlen_q in [1, 34] {
            if seqlen_q > 1 && seqlen_k % 3 != 0 && !(126..=130).contains(&seqlen_k) && seqlen_k != 38 && seqlen_k != 70
            {
                continue;
            }
            let operands = Operands::<f32>::random(shape(1, (1, 1), (seqlen_q, seqlen_k), (8, 4)), 34);
            let [_, k_shape, v_shape] = shapes(&operands.shape);
            let k = PoisonedInput::new(&operands.k, k_shape, Arrangement::Bhsd);
            let v = PoisonedInput::new(&operands.v, v_shape, Arrangement::Bhsd);
            let expected = operands.reference(&Options::new());
            let [q, _, _] = operands.views();
            on_every_level(|level, name| {
                let options = Options::new().level(level);
                let run = |_| crate::operands::Results::of(&q, &k.view(), &v.view(), &options, seqlen_k);
                let [first, second] = [0, 1].map(run);
                first.assert_close(&expected, max_abs(&operands.v), format_args!("{seqlen_k} keys on {name}"));
                second.assert_same_bits(&first, format_args!("{seqlen_k} keys on {name}, again"));
            });
        }
    }
}

/// More keys than 16 bits count.
#[test]
fn a35_more_than_65536_keys() {
    for seqlen_k in [65535, 65536, 65537] {
        let operands = Operands::<f32>::random(shape(1, (1, 1), (2, seqlen_k), (8, 8)), 35);
        let mask = Rng::new(35).bools(2 * seqlen_k, 0.5);
        let options = Options::new().mask(attend(&mask, [2, seqlen_k]));
        operands.check(&options, seqlen_k);
        operands.check(&Options::new().causal(Diagonal::BottomRight), seqlen_k);
    }
}

/// Strides that overflow are an error at the door if they are used, and ignored if not.
#[test]
fn a35_strides_that_overflow() {
    let data = [1.0f32; 64];
    let mut out = [0.0f32; 64];
    for stride in [1 << 31, usize::MAX / 2, usize::MAX - 7, usize::MAX] {
        for axis in 0..3 {
            let strides = core::array::from_fn(|i| if i == axis { stride } else { [64, 32, 8, 1][i] });
            let two = core::array::from_fn(|i| [1, 1, 1, 8][i] + usize::from(i == axis));
            let refused = |error| matches!(error, Error::Overflow { .. } | Error::Length { .. });
            assert!(Heads::with_strides(&data, two, strides).is_err_and(refused), "{axis} {stride}");
            assert!(HeadsMut::with_strides(&mut out, two, strides).is_err_and(refused), "{axis} {stride}");
            let one = Heads::with_strides(&data, [1, 1, 1, 8], strides).expect("the stride is never used");
            let view = HeadsMut::with_strides(&mut out, [1, 1, 1, 8], strides).expect("the stride is never used");
            multi_head(&one, &one, &one, view, &Options::new()).expect("a valid call");
            assert_eq!(out[..8], [1.0; 8]);
        }
        // Each axis fits, but not their sum.
        let reach = isize::MAX as usize / 8;
        assert!(
            View::with_strides(&data, [2, 2, 2, 8], [reach, reach, reach, 1])
                .is_err_and(|error: Error| { matches!(error, Error::Overflow { .. } | Error::Length { .. }) })
        );
    }
}

/// Rows further apart than 32 bits count, in memory that is reserved but hardly touched.
#[test]
#[cfg(target_pointer_width = "64")]
fn a35_offsets_beyond_32_bits() {
    const ROW: usize = (1 << 31) + 3;
    let (seqlen, dim, far) = (2, 8, [0, 0, ROW, 1]);
    let len = ROW + dim;
    if Vec::<u16>::new().try_reserve_exact(len).is_err() {
        eprintln!("SKIPPED: a35_offsets_beyond_32_bits cannot reserve 4 GiB");
        return;
    }
    let mut storage = vec![0u16; len];
    let operands = Operands::<f16>::random(shape(1, (1, 1), (seqlen, seqlen), (dim, dim)), 35);
    let sizes = [1, 1, seqlen, dim];
    for which in 0..3 {
        let near = [&operands.q, &operands.k, &operands.v][which];
        let buffer: &mut [f16] = storage.reinterpret_cast_mut();
        for row in 0..seqlen {
            buffer[row * ROW..][..dim].copy_from_slice(&near[row * dim..][..dim]);
        }
        let mut views = operands.views();
        views[which] = Heads::with_strides(buffer, sizes, far).expect("inside");
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let results = crate::operands::Results::of(&views[0], &views[1], &views[2], &options, name);
            results.assert_same_bits(&operands.run(&options, name), format_args!("operand {which} on {name}"));
        });
    }
    on_every_level(|level, name| {
        let options = Options::new().level(level);
        let buffer: &mut [f16] = storage.reinterpret_cast_mut();
        let [q, k, v] = operands.views();
        let out = HeadsMut::with_strides(&mut *buffer, sizes, far).expect("inside");
        multi_head(&q, &k, &v, out, &options).expect("a valid call");
        let rows = [&buffer[..dim], &buffer[ROW..]].concat();
        assert_same_bits(&rows, &operands.run(&options, name).out, format_args!("out on {name}"));
    });
}

/// An output of many small rows is written whole, whatever the sizes.
#[test]
fn a30_to_a35_random_shapes() {
    let mut rng = Rng::new(30);
    for case in 0..80 {
        let kv_heads = rng.below(3);
        let heads = (kv_heads * rng.below(4), kv_heads);
        let seqlen = (rng.below(40), rng.below(150));
        let shape = shape(rng.below(3), heads, seqlen, (1 + rng.below(40), rng.below(40)));
        let operands = Operands::<f32>::random(shape, case);
        operands.check(&Options::new(), format_args!("{shape:?}"));
        let mut out = PoisonedOutput::<f32>::new(operands.out_shape(), Arrangement::RowGaps(3));
        let [q, k, v] = operands.views();
        multi_head(&q, &k, &v, out.view(), &Options::new()).expect("a valid call");
        out.packed(format_args!("{shape:?}"));
    }
}
