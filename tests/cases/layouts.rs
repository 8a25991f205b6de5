//! A19 to A21, A26 to A29: operands and outputs in any layout.

use half::{bf16, f16};
use polyhead::{Heads, HeadsMut, Options, Outputs, Shape, multi_head_with};

use crate::operands::{Operands, Results, attend, on_every_level, shape, shapes};
use crate::support::{Arrangement, Bits, PoisonedInput, PoisonedOutput, Rng, assert_same_bits};

/// Compares a call on operands in these arrangements with the call on packed copies: the same bits.
fn assert_packed<T: Bits + Into<f64>>(operands: &Operands<T>, arrangements: [Arrangement; 3], options: &Options<'_>) {
    let [q, k, v] = shapes(&operands.shape);
    let q = PoisonedInput::new(&operands.q, q, arrangements[0]);
    let k = PoisonedInput::new(&operands.k, k, arrangements[1]);
    let v = PoisonedInput::new(&operands.v, v, arrangements[2]);
    let packed = Operands { q: q.packed(), k: k.packed(), v: v.packed(), ..operands.clone() };
    on_every_level(|level, name| {
        let (options, context) = (options.level(level), format!("{} {arrangements:?} on {name}", T::NAME));
        let strided = Results::of(&q.view(), &k.view(), &v.view(), &options, &context);
        strided.assert_same_bits(&packed.run(&options, &context), &context);
    });
}

/// Stored as (batch, heads, dim, seq), so that the innermost stride is the length; one operand at a time, and all.
#[test]
fn a19_innermost_stride_is_not_one() {
    const B: Arrangement = Arrangement::Bhsd;
    fn run<T: Bits + Into<f64>>(shape: Shape) {
        let operands = Operands::<T>::random(shape, 19);
        operands.check(&Options::new(), "packed");
        for a in [Arrangement::Bhds, Arrangement::DimStride(2), Arrangement::DimStride(7)] {
            for arrangements in [[a, B, B], [B, a, B], [B, B, a], [a, a, a]] {
                assert_packed(&operands, arrangements, &Options::new());
            }
        }
    }
    run::<f32>(shape(2, (3, 3), (33, 65), (24, 24)));
    run::<f16>(shape(1, (2, 1), (9, 130), (7, 5)));
    run::<bf16>(shape(1, (2, 1), (9, 130), (16, 33)));
    run::<f32>(shape(2, (4, 2), (1, 129), (5, 17)));
}

#[test]
fn a20_permuted_operands() {
    let [bshd, bhsd] = [Arrangement::Bshd, Arrangement::Bhsd];
    let small = Operands::<f32>::random(shape(84, (3, 3), (3, 3), (64, 64)), 20);
    assert_packed(&small, [bshd; 3], &Options::new());
    let one = Operands::<f32>::random(shape(1, (16, 16), (62, 62), (128, 128)), 20);
    assert_packed(&one, [bhsd, bhsd, bshd], &Options::new());
    for arrangement in Arrangement::ALL {
        for (seqlen_q, seqlen_k) in [(1, 1), (2, 3), (3, 2), (1, 4)] {
            let tiny = Operands::<f32>::random(shape(2, (2, 2), (seqlen_q, seqlen_k), (3, 2)), 21);
            assert_packed(&tiny, [arrangement; 3], &Options::new());
            assert_packed(&tiny, [bhsd, arrangement, bshd], &Options::new());
        }
    }
}

/// One KV head for 16 query heads, K and V row by row in one buffer; as one head, and as 16 that are one.
#[test]
fn a21_interleaved_keys_and_values() {
    for (seqlen_k, dim) in [(16, 128), (129, 128), (33, 24)] {
        let operands = Operands::<f32>::random(shape(1, (16, 1), (1, seqlen_k), (dim, dim)), 22);
        let row = |i: usize| [&operands.k[i * dim..][..dim], &operands.v[i * dim..][..dim]].concat();
        let buffer: Vec<f32> = (0..seqlen_k).flat_map(row).collect();
        let all = vec![true; seqlen_k];
        let masked = Options::new().mask(attend(&all, [1, 1, 1, seqlen_k]));
        operands.check(&masked, "packed");
        for kv_heads in [1, 16] {
            let view = |first: usize| {
                let strides = [usize::MAX, 0, 2 * dim, 1];
                Heads::with_strides(&buffer[first..], [1, kv_heads, seqlen_k, dim], strides).expect("inside")
            };
            on_every_level(|level, name| {
                let context = format!("{seqlen_k} keys in {kv_heads} heads on {name}");
                let packed = operands.run(&Options::new().level(level), &context);
                for options in [masked, Options::new()] {
                    let [q, _, _] = operands.views();
                    let strided = Results::of(&q, &view(0), &view(dim), &options.level(level), &context);
                    strided.assert_same_bits(&packed, &context);
                }
            });
        }
    }
}

/// (batch, seq, heads, dim) transposed, with space between items: two batch strides that do not fold into one.
#[test]
fn a26_every_batch_item_of_transposed_heads() {
    let (batch, seqlen, heads, dim) = (3, 5, 2, 8);
    let operands = Operands::<f32>::random(shape(batch, (heads, heads), (seqlen, seqlen), (dim, dim)), 26);
    assert_packed(&operands, [Arrangement::Bshd; 3], &Options::new());
    operands.check(&Options::new(), "packed");
    let item = seqlen * heads * dim;
    for gap in [0, 1, 19] {
        let strides = [item + gap, dim, heads * dim, 1];
        let spread = |packed: &[f32]| {
            let mut storage = vec![f32::NAN; batch * (item + gap)];
            for (at, &x) in packed.iter().enumerate() {
                let [b, h, s, d] = [at / item, at / dim / seqlen % heads, at / dim % seqlen, at % dim];
                storage[b * strides[0] + h * strides[1] + s * strides[2] + d] = x;
            }
            storage
        };
        let [q, k, v] = [&operands.q, &operands.k, &operands.v].map(|packed| spread(packed));
        let view = |data| Heads::with_strides(data, [batch, heads, seqlen, dim], strides).expect("inside");
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let strided = Results::of(&view(&q), &view(&k), &view(&v), &options, name);
            strided.assert_same_bits(&operands.run(&options, name), format_args!("gap {gap} on {name}"));
        });
    }
}

/// Rows of all heads, head h at h * dim: head h must read its own V, which is 1000 h.
#[test]
fn a27_head_offsets() {
    for (batch, heads, seqlen, dim) in [(1, 4, 5, 16), (2, 1, 5, 16), (2, 3, 40, 7), (1, 4, 1, 16)] {
        let mut operands = Operands::<f32>::uni_ramp(shape(batch, (heads, heads), (seqlen, seqlen), (dim, dim)));
        operands.each_value(|head, _, _| 1000.0 * head as f32);
        let packed_rows = PoisonedInput::new(&operands.v, [batch, heads, seqlen, dim], Arrangement::Bshd);
        let keys = PoisonedInput::new(&operands.k, [batch, heads, seqlen, dim], Arrangement::Bshd);
        let queries = PoisonedInput::new(&operands.q, [batch, heads, seqlen, dim], Arrangement::PackedQkv);
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let results = Results::of(&queries.view(), &keys.view(), &packed_rows.view(), &options, name);
            for (row, out) in results.out.chunks(dim).enumerate() {
                let expected = 1000.0 * (row / seqlen % heads) as f32;
                // A mean of equal numbers, to the last bit or two.
                assert!(out.iter().all(|x| (x - expected).abs() <= 2e-7 * expected), "{name} row {row}: {out:?}");
            }
        });
    }
}

/// Strides of axes of size 1 mean nothing, however large. (The report's product of matrices is in `tests/gemm.rs`.)
#[test]
fn a28_strides_of_single_axes() {
    for sizes in [[1, 1, 1, 2], [1, 2, 1, 1], [2, 1, 1, 3], [1, 1, 3, 1], [1, 1, 1, 1]] {
        let [batch, heads, seqlen, dim] = sizes;
        let operands = Operands::<f32>::random(shape(batch, (heads, heads), (seqlen, seqlen), (dim, dim)), 28);
        let packed = [heads * seqlen * dim, seqlen * dim, dim, 1];
        for odd in [0, 1, 2048, 16384, usize::MAX / 4, usize::MAX] {
            let strides = core::array::from_fn(|axis| if sizes[axis] == 1 { odd } else { packed[axis] });
            let view = |data| Heads::with_strides(data, sizes, strides).expect("strides of size 1 are ignored");
            on_every_level(|level, name| {
                let options = Options::new().level(level);
                let (q, k, v) = (view(&operands.q), view(&operands.k), view(&operands.v));
                let expected = operands.run(&options, name);
                Results::of(&q, &k, &v, &options, name).assert_same_bits(&expected, format_args!("{sizes:?} {odd}"));
                let mut out = vec![f32::OUTPUT; expected.out.len()];
                let view = HeadsMut::with_strides(&mut out, sizes, strides).expect("as for inputs");
                multi_head_with(&q, &k, &v, Outputs::new(view), &options).expect("a valid call");
                assert_same_bits(&out, &expected.out, format_args!("{sizes:?} {odd}: out"));
            });
        }
    }
}

/// The output has the caller's strides; what lies between its rows stays as it was.
#[test]
fn a29_output_in_the_callers_layout() {
    fn run<T: Bits + Into<f64>>(shape: Shape) {
        let operands = Operands::<T>::random(shape, 29);
        let [out_shape, _, _] = shapes(&Shape { head_dim: shape.head_dim_v, ..shape });
        let weights_shape = [shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k];
        on_every_level(|level, name| {
            let options = Options::new().level(level);
            let packed = operands.run(&options, name);
            for arrangement in Arrangement::DISTINCT {
                let context = format!("{} {arrangement:?} on {name}", T::NAME);
                let mut out = PoisonedOutput::<T>::new(out_shape, arrangement);
                let mut weights = PoisonedOutput::<f32>::new(weights_shape, arrangement);
                let outputs = Outputs::new(out.view()).weights(weights.view());
                let [q, k, v] = operands.views();
                multi_head_with(&q, &k, &v, outputs, &options).expect("a valid call");
                assert_same_bits(&out.packed(&context), &packed.out, &context);
                assert_same_bits(&weights.packed(&context), &packed.weights, &context);
            }
        });
    }
    run::<f32>(shape(2, (3, 3), (33, 40), (8, 8)));
    run::<f32>(shape(1, (4, 2), (5, 130), (3, 17)));
    run::<f16>(shape(2, (2, 1), (3, 9), (4, 5)));
    run::<bf16>(shape(2, (2, 1), (1, 9), (4, 1)));
}

/// A fixed seed and several ways to lie at once.
#[test]
fn a19_to_a29_random_layouts() {
    let mut rng = Rng::new(29);
    for case in 0..60 {
        let heads = rng.pick(&[(1, 1), (2, 1), (4, 2), (3, 3)]);
        let (seqlen_q, seqlen_k) = (1 + rng.below(40), 1 + rng.below(140));
        let shape = shape(1 + rng.below(3), heads, (seqlen_q, seqlen_k), (1 + rng.below(20), 1 + rng.below(20)));
        let operands = Operands::<f32>::random(shape, case);
        let arrangements = core::array::from_fn(|_| rng.pick(&Arrangement::ALL));
        assert_packed(&operands, arrangements, &Options::new());
    }
}
