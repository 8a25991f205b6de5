//! The layer against its naive version, and against itself in other layouts, batches, pools and chunks.

use half::{bf16, f16};
use polyhead::cache::{BlockTable, Cache, KvCache, PagedCache, PagedSequences, Ring, RingCache};
use polyhead::layer::{Config, Inputs, MultiHeadAttention, Outputs, RotaryStyle, Workspace};
use polyhead::{
    Bias, Diagonal, Element, Error, HeadsMut, Mask, Matrices, MatricesMut, Matrix, Options, Precision, View, Window,
};

use crate::naive::{Naive, Tokens, self_attention, sequence_first};
use crate::support::{Rng, assert_all_close, assert_same_bits, levels, max_abs};

/// Layers of many kinds: (widths, heads, dims).
const KINDS: [([usize; 4], [usize; 2], [usize; 2]); 7] = [
    ([24, 24, 24, 24], [4, 4], [6, 6]),
    ([32, 32, 32, 32], [4, 2], [8, 8]),
    ([17, 17, 17, 9], [6, 1], [10, 3]),
    ([20, 13, 7, 5], [3, 3], [4, 9]),
    ([64, 64, 64, 64], [2, 1], [32, 32]),
    ([1, 1, 1, 1], [1, 1], [1, 1]),
    ([16, 16, 16, 16], [4, 4], [2, 0]),
];

fn check<T: Element>(naive: &Naive<T>, tokens: [&Tokens; 3], options: &Options<'_>, tolerance: f64, what: &str) {
    let expected = naive.run(tokens, 3, options);
    let [q, k, v] = tokens.map(Tokens::view);
    let same = |a: &Tokens, b: &Tokens| core::ptr::eq(a, b);
    let inputs = if same(tokens[0], tokens[1]) && same(tokens[1], tokens[2]) {
        Inputs::self_attention(q)
    } else {
        Inputs::new(q, k, v)
    };
    for &level in levels() {
        let layer = naive.layer(level);
        let context = format!("{what} on {} in {}", level.name(), T::NAME);
        let (out, weights) =
            layer.forward_with_weights(&inputs.first_position(3), false, options).expect("a valid call");
        let atol = tolerance * max_abs(&expected.out).max(1.0);
        assert_all_close(&out, &expected.out, atol, tolerance, format_args!("{context}: out"));
        assert_all_close(&weights, &expected.weights, tolerance, tolerance, format_args!("{context}: weights"));
        let plain = layer.forward(&inputs.first_position(3), options).expect("a valid call");
        assert_all_close(&plain, &expected.out, atol, tolerance, format_args!("{context}: out without weights"));
    }
}

fn kinds<T: Element>(tolerance: f64, seed: u64) {
    let mut rng = Rng::new(seed);
    for (kind, (widths, heads, dims)) in KINDS.into_iter().enumerate() {
        let mut naive = Naive::<T>::random(widths, heads, dims, &mut rng);
        if kind % 2 == 1 {
            naive = naive.with_biases(&mut rng);
        }
        if kind % 3 == 1 {
            naive.sinks = Some(Naive::<T>::vector(heads[0], &mut rng));
        }
        if kind == 0 || kind == 1 {
            naive.rotary = Some((dims[0] - 2, RotaryStyle::Interleaved));
        }
        if kind == 4 {
            naive.rotary = Some((dims[0], RotaryStyle::HalfSplit));
        }
        for (batch, l, s) in [(2, 5, 9), (3, 33, 33), (1, 1, 1), (4, 1, 40), (2, 7, 0), (0, 3, 3), (2, 0, 3)] {
            let query = Tokens::random([batch, l, widths[0]], &mut rng);
            let key = Tokens::random([batch, s, widths[1]], &mut rng);
            let value = Tokens::random([batch, s, widths[2]], &mut rng);
            check(&naive, [&query, &key, &value], &Options::new(), tolerance, &format!("cross, kind {kind}"));
            let causal = Options::new().causal(Diagonal::BottomRight).softcap(5.0);
            check(&naive, [&query, &key, &value], &causal, tolerance, &format!("causal, kind {kind}"));
            if widths[..3] == [widths[0]; 3] {
                let causal = Options::new().causal(Diagonal::TopLeft);
                check(&naive, [&query; 3], &causal, tolerance, &format!("self, kind {kind}"));
                check(&naive, [&query, &key, &key], &Options::new(), tolerance, &format!("memory, kind {kind}"));
                if l == s {
                    // As in DETR: queries and keys carry positions, values do not.
                    check(&naive, [&query, &query, &key], &Options::new(), tolerance, &format!("q = k, kind {kind}"));
                }
            }
        }
    }
}

#[test]
fn every_kind_of_layer_is_the_naive_one() {
    kinds::<f32>(2e-5, 1);
}

#[test]
fn weights_of_other_types_are_used_as_they_are() {
    kinds::<bf16>(2e-5, 2);
    kinds::<f16>(2e-5, 3);
}

#[test]
fn additional_keys_are_seen_by_every_query_under_any_options() {
    let mut rng = Rng::new(4);
    for set in 1..4 {
        let mut naive = Naive::<f32>::random([12; 4], [4, 2], [3, 3], &mut rng).with_biases(&mut rng);
        naive.zero_attn = set & 2 != 0;
        if set & 1 != 0 {
            naive.bias_kv = Some([Naive::vector(6, &mut rng), Naive::vector(6, &mut rng)]);
        }
        let extra = naive.layer(levels()[0]).extra_keys();
        let (batch, l, s) = (3, 5, 8);
        let (query, memory) = (Tokens::random([batch, l, 12], &mut rng), Tokens::random([batch, s, 12], &mut rng));
        let bools = rng.bools(batch * l * s, 0.6);
        let floats: Vec<f32> = (0..s).map(|_| rng.normal()).collect();
        let widened = |row: &[bool]| [vec![true; extra], row.to_vec()].concat();
        let wide_bools: Vec<bool> = bools.chunks(s).flat_map(widened).collect();
        let wide_floats = [vec![0.0; extra], floats.clone()].concat();
        let mask = |data, s| Mask::attend(View::contiguous(data, [batch, 1, l, s]).unwrap()).unwrap();
        let bias = |data, s| Bias::new(View::contiguous(data, [1, s]).unwrap()).unwrap();
        let (lengths, wide_lengths) = ([8, 0, 5], [8 + extra, extra, 5 + extra]);
        let window = |diagonal| Window { left: Some(2), right: Some(1), diagonal };
        let shifted = Diagonal::Offset(extra as isize);
        let none = Options::new();
        let cases = [
            (none, none),
            (none.mask(mask(&bools, s)), none.mask(mask(&wide_bools, s + extra))),
            (none.bias(bias(&floats, s)), none.bias(bias(&wide_floats, s + extra))),
            (none.key_lengths(&lengths), none.key_lengths(&wide_lengths)),
            (none.causal(Diagonal::TopLeft), none.causal(shifted)),
            (none.window(window(Diagonal::TopLeft)), none.window(window(shifted)).keep_first(extra)),
            (
                none.mask(mask(&bools, s)).and_bias(bias(&floats, s)).causal(Diagonal::BottomRight),
                none.mask(mask(&wide_bools, s + extra))
                    .bias(bias(&wide_floats, s + extra))
                    .causal(Diagonal::BottomRight),
            ),
        ];
        for (at, (options, wide)) in cases.iter().enumerate() {
            let expected = naive.run([&query, &memory, &memory], 0, wide);
            for &level in levels() {
                let inputs = Inputs::cross(query.view(), memory.view());
                let (out, weights) =
                    naive.layer(level).forward_with_weights(&inputs, false, options).expect("a valid call");
                let context = format!("set {set}, case {at} on {}", level.name());
                assert_all_close(&out, &expected.out, 1e-5, 1e-5, format_args!("{context}: out"));
                assert_all_close(&weights, &expected.weights, 1e-5, 1e-5, format_args!("{context}: weights"));
            }
        }
        // Two inputs in one product, in either order of rows.
        let flipped = sequence_first(&query);
        let alike = naive.run([&query; 3], 0, &none);
        for &level in levels() {
            let layer = naive.layer(level);
            let flipped = Matrices::sequence_first(&flipped, [l, batch, 12]).unwrap();
            for inputs in [self_attention(&query), Inputs::self_attention(flipped)] {
                let out = layer.forward(&inputs, &none).expect("a valid call");
                assert_all_close(&out, &alike.out, 1e-5, 1e-5, format_args!("set {set} on {}", level.name()));
            }
        }
    }
}

/// A layer of grouped heads with rotary positions, and one of plain heads.
fn two_layers(rng: &mut Rng) -> [Naive<f32>; 2] {
    let mut grouped = Naive::random([40; 4], [4, 2], [16, 16], rng).with_biases(rng);
    grouped.rotary = Some((16, RotaryStyle::HalfSplit));
    [grouped, Naive::random([24; 4], [3, 3], [8, 8], rng)]
}

#[test]
fn any_layout_and_any_batch_give_the_same_bits() {
    let mut rng = Rng::new(5);
    for naive in two_layers(&mut rng) {
        let width = naive.widths[0];
        for (batch, seq) in [(3, 37), (2, 1), (1, 50), (5, 4)] {
            let x = Tokens::random([batch, seq, width], &mut rng);
            let flipped = sequence_first(&x);
            let gaps: Vec<f32> = x.data.chunks(width).flat_map(|row| [row, &[f32::NAN; 3]].concat()).collect();
            let starts: Vec<usize> = (0..=batch).map(|item| item * seq).collect();
            let options = Options::new().causal(Diagonal::TopLeft);
            for &level in levels() {
                let layer = naive.layer(level);
                let run = |inputs: &Inputs<'_, f32>| layer.forward(inputs, &options).expect("a valid call");
                let packed = run(&self_attention(&x));
                let context = format!("({batch}, {seq}, {width}) on {}", level.name());
                let view = Matrices::sequence_first(&flipped, [seq, batch, width]).unwrap();
                assert_same_bits(&run(&Inputs::self_attention(view)), &packed, &context);
                let strides = [seq * (width + 3), width + 3, 1];
                let view = Matrices::with_strides(&gaps, [batch, seq, width], strides).unwrap();
                assert_same_bits(&run(&Inputs::self_attention(view)), &packed, &context);
                let rows = Matrix::contiguous(&x.data, [batch * seq, width]).unwrap();
                assert_same_bits(&run(&Inputs::packed(rows, &starts)), &packed, &context);
                // Three products instead of one.
                let (k, v) = (x.data.clone(), x.data.clone());
                let [k, v] = [&k, &v].map(|data| Matrices::contiguous(data, [batch, seq, width]).unwrap());
                assert_same_bits(&run(&Inputs::new(x.view(), k, v)), &packed, &context);
                for item in 0..batch {
                    let alone = run(&self_attention(&x.item(item)));
                    assert_same_bits(&alone, &packed[item * seq * width..][..seq * width], &context);
                }
                let mut out = vec![f32::NAN; flipped.len() + 7];
                let into = MatricesMut::sequence_first(&mut out[..flipped.len()], [seq, batch, width]).unwrap();
                let outputs = Outputs::new(into);
                layer.forward_into(&self_attention(&x), outputs, &options, &mut Workspace::new()).unwrap();
                let expected = Tokens { shape: x.shape, data: packed };
                assert_same_bits(&out[..flipped.len()], &sequence_first(&expected), &context);
                assert!(out[flipped.len()..].iter().all(|x| x.is_nan()), "{context}: past the view");
            }
        }
    }
}

#[test]
#[cfg_attr(target_family = "wasm", ignore = "no threads there")]
fn any_pool_gives_the_same_bits() {
    let mut rng = Rng::new(6);
    let naive = Naive::<f32>::random([96; 4], [6, 3], [16, 16], &mut rng).with_biases(&mut rng);
    for shape in [[2, 150, 96], [1, 1, 96], [70, 3, 96]] {
        let x = Tokens::random(shape, &mut rng);
        for &level in levels() {
            let layer = naive.layer(level);
            let run = || layer.forward_with_weights(&self_attention(&x), true, &Options::new()).expect("a valid call");
            let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            let (out, weights) = pool(1).install(run);
            for threads in [2, 3, 7] {
                let (other, other_weights) = pool(threads).install(run);
                assert_same_bits(&other, &out, format_args!("{shape:?} on {}, {threads} threads", level.name()));
                assert_same_bits(&other_weights, &weights, "weights");
            }
        }
    }
}

#[test]
fn hidden_and_other_items_are_unread() {
    let mut rng = Rng::new(7);
    let naive = Naive::<f32>::random([24; 4], [3, 3], [8, 8], &mut rng).with_biases(&mut rng);
    let clean = Tokens::random([2, 20, 24], &mut rng);
    let lengths = [20, 11];
    let hidden: Vec<bool> = (0..40).map(|i| i % 20 >= lengths[i / 20]).collect();
    let mut dirty = Tokens { shape: clean.shape, data: clean.data.clone() };
    dirty.data[(20 + 11) * 24..].fill(f32::NAN);
    for &level in levels() {
        let layer = naive.layer(level);
        let mask = Mask::ignore_keys(Matrix::contiguous(&hidden, [2, 20]).unwrap());
        for options in [Options::new().key_lengths(&lengths), Options::new().mask(mask)] {
            let run = |x: &Tokens| layer.forward(&self_attention(x), &options).expect("a valid call");
            let (expected, out) = (run(&clean), run(&dirty));
            assert_same_bits(&out[..31 * 24], &expected[..31 * 24], level.name());
            assert!(out[31 * 24..].iter().all(|x| x.is_nan()), "live NaN shows in its own rows");
        }
    }
}

/// Decodes a prompt in chunks of several sizes and compares with one causal call.
fn decode_with(
    layer: &MultiHeadAttention<f32>,
    x: &Tokens,
    options: &Options<'_>,
    cache: &mut impl Cache,
    context: &str,
) {
    let [batch, seq, width] = x.shape;
    let once = layer.forward(&self_attention(x), &options.causal(Diagonal::TopLeft)).expect("a valid call");
    let mut done = 0;
    for chunk in [5, 1, 1, 4, 1].into_iter().cycle() {
        let chunk = chunk.min(seq - done);
        if chunk == 0 {
            break;
        }
        let view = Matrices::with_strides(&x.data[done * width..], [batch, chunk, width], [seq * width, width, 1]);
        let out = layer.decode(view.unwrap(), cache, options).expect("room");
        for item in 0..batch {
            let expected = &once[(item * seq + done) * width..][..chunk * width];
            let out = &out[item * chunk * width..][..chunk * width];
            assert_all_close(out, expected, 1e-5, 1e-5, format_args!("{context}: item {item} from {done}"));
        }
        done += chunk;
        for item in 0..batch {
            assert_eq!(cache.position(item), Ok(done));
        }
    }
}

#[test]
fn decoding_with_any_cache_is_the_causal_layer() {
    let mut rng = Rng::new(8);
    for naive in two_layers(&mut rng) {
        let x = Tokens::random([2, 40, naive.widths[0]], &mut rng);
        for &level in levels() {
            let layer = naive.layer(level);
            let shape = layer.kv_shape();
            let none = Options::new();
            decode_with(&layer, &x, &none, &mut KvCache::<f32>::new(shape, 2, 40).unwrap(), "in place");
            let mut pages = PagedCache::<f32>::new(shape, 30, 7).unwrap();
            let ids = [pages.create().unwrap(), pages.create().unwrap()];
            let mut table = BlockTable::new();
            let mut sequences = PagedSequences::new(&mut pages, &ids, &mut table);
            decode_with(&layer, &x, &none, &mut sequences, "paged");
            let ring = Ring { window: 9, keep_first: 0, max_chunk: 5, page_len: 4 };
            let mut cache = RingCache::<f32>::new(shape, 2, ring).unwrap();
            let window = Window { left: Some(8), right: Some(0), diagonal: Diagonal::BottomRight };
            decode_with(&layer, &x, &Options::new().window(window), &mut cache, "ring");
        }
    }
}

#[test]
fn a_failed_step_leaves_the_cache_as_it_was() {
    let mut rng = Rng::new(9);
    let [naive, _] = two_layers(&mut rng);
    let layer = naive.layer(levels()[0]);
    let x = Tokens::random([1, 3, 40], &mut rng);
    let mut cache = KvCache::<f32>::new(layer.kv_shape(), 1, 8).unwrap();
    layer.decode(x.view(), &mut cache, &Options::new()).unwrap();
    let before = layer.decode(x.view(), &mut cache, &Options::new()).unwrap();
    cache.truncate(0, 3).unwrap();
    let mask = [true; 5];
    let wrong = Options::new().mask(Mask::attend(Matrix::contiguous(&mask, [1, 5]).unwrap()).unwrap());
    let error = layer.decode(x.view(), &mut cache, &wrong).unwrap_err();
    assert_eq!(error, Error::Shape { operand: "mask", axis: "seqlen_k", expected: 6, actual: 5 });
    assert_eq!(cache.lengths(), [3]);
    assert_same_bits(&layer.decode(x.view(), &mut cache, &Options::new()).unwrap(), &before, "again");
    let error = layer.decode(x.view(), &mut cache, &Options::new()).unwrap_err();
    assert_eq!(error, Error::Full { what: "tokens", capacity: 8, needed: 9 });
    assert_eq!(cache.lengths(), [6]);
}

#[test]
fn options_of_the_config_hold_in_every_call() {
    let mut rng = Rng::new(10);
    let naive = Naive::<f32>::random([16; 4], [2, 2], [8, 8], &mut rng);
    let x = Tokens::random([2, 30, 16], &mut rng);
    let window = Window { left: Some(3), right: Some(0), diagonal: Diagonal::TopLeft };
    let said = Options::new().softmax_scale(0.7).softcap(2.0).window(window);
    for &level in levels() {
        let config = naive.config().level(level);
        let config = config.softmax_scale(0.7).softcap(2.0).window(window).precision(Precision::High);
        let layer = naive.try_layer(config).unwrap();
        let by_config = layer.forward(&self_attention(&x), &Options::new()).unwrap();
        let by_call = naive.layer(level).forward(&self_attention(&x), &said).unwrap();
        assert_same_bits(&by_config, &by_call, level.name());
        let other = Options::new().softmax_scale(0.1);
        let expected = naive.layer(level).forward(&self_attention(&x), &said.softmax_scale(0.1)).unwrap();
        assert_same_bits(&layer.forward(&self_attention(&x), &other).unwrap(), &expected, "the call's own");
    }
}

#[test]
fn inputs_and_outputs_of_other_types() {
    let mut rng = Rng::new(11);
    let naive = Naive::<bf16>::random([24; 4], [3, 3], [8, 8], &mut rng);
    let x = Tokens::random([2, 9, 24], &mut rng);
    let narrow: Vec<bf16> = x.data.iter().map(|&x| bf16::from_f32(x)).collect();
    let wide = Tokens { shape: x.shape, data: narrow.iter().map(|x| x.to_f32()).collect() };
    for &level in levels() {
        let layer = naive.layer(level);
        let expected = layer.forward(&self_attention(&wide), &Options::new()).unwrap();
        let inputs = Inputs::self_attention(Matrices::contiguous(&narrow, x.shape).unwrap());
        let rounded: Vec<f32> = expected.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        let out: Vec<f32> =
            layer.forward(&inputs, &Options::new()).unwrap().iter().map(|x: &bf16| x.to_f32()).collect();
        assert_same_bits(&out, &rounded, level.name());
        let (mut out, mut weights) = (vec![f16::ZERO; 2 * 9 * 24], vec![0.0f32; 2 * 9 * 9]);
        let outputs = Outputs::new(MatricesMut::contiguous(&mut out, x.shape).unwrap());
        let outputs = outputs.averaged_weights(HeadsMut::bhsd(&mut weights, [2, 1, 9, 9]).unwrap());
        layer.forward_into(&inputs, outputs, &Options::new(), &mut Workspace::new()).unwrap();
        assert_all_close(
            &weights.chunks(9).map(|row| row.iter().sum()).collect::<Vec<f32>>(),
            &[1.0; 18],
            1e-5,
            0.0,
            "",
        );
        assert!(out.iter().zip(&expected).all(|(x, &y)| *x == f16::from_f32(y)));
    }
}

#[test]
fn config_of_the_quickstart() {
    assert_eq!(Config::new(512, 8).sizes().unwrap().head_dim, 64);
}
