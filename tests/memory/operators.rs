//! What layers, packed products and ONNX nodes ask of the allocator.

use polyhead::cache::KvCache;
use polyhead::layer::{self, Config, Inputs, MultiHeadAttention, Rotary, Weights, Workspace};
use polyhead::{Matrices, MatricesMut, Matrix, MatrixMut, gemm};

use super::*;

/// A call of a layer allocates its output, nothing else, once its workspace has grown; with the caller's own output nothing at
/// all. The same with weights, and for a step of decoding.
#[test]
fn memory_is_bounded_a_layer_allocates_its_output() {
    let _alone = alone();
    for &level in levels() {
        // Small: on this thread. Large: on those of a pool.
        assert_layer_is_free(level, [2, 3, 16], 1);
        #[cfg(feature = "rayon")]
        in_pool(2, || assert_layer_is_free(level, [4, 90, 64], 5));
    }
}

fn assert_layer_is_free(level: Level, shape: [usize; 3], tries: usize) {
    let [batch, seq, width] = shape;
    let w = vec![0.01f32; width * width];
    let w = Matrix::contiguous(&w, [width, width]).expect("packed");
    let config = Config::new(width, 4).level(level).rotary(Rotary::half_split(width / 4, 1e4));
    let layer = MultiHeadAttention::new(config, &Weights::new(w, w, w, w)).expect("weights that fit");
    let x = vec![0.5f32; batch * seq * width];
    let (mut out, mut weights) = (x.clone(), vec![0.0f32; batch * seq * seq]);
    let x = Matrices::contiguous(&x, shape).expect("packed");
    let (inputs, options) = (Inputs::self_attention(x), Options::new().causal(Diagonal::TopLeft));
    let mut workspace = Workspace::new();
    let mut cache = KvCache::<f32>::new(layer.kv_shape(), batch, 4 * seq).expect("memory");
    let mut into = || {
        let outputs = layer::Outputs::new(MatricesMut::contiguous(&mut out, shape).expect("packed"));
        layer.forward_into(&inputs, outputs, &options, &mut workspace).expect("a valid call");
        let outputs = layer::Outputs::new(MatricesMut::contiguous(&mut out, shape).expect("packed"));
        let view = HeadsMut::bhsd(&mut weights, [batch, 1, seq, seq]).expect("packed");
        layer.forward_into(&inputs, outputs.averaged_weights(view), &options, &mut workspace).expect("a valid call");
        cache.clear();
        let view = MatricesMut::contiguous(&mut out, shape).expect("packed");
        layer.decode_into(x, &mut cache, view, &options, &mut workspace).expect("room");
    };
    into();
    let least = (0..tries).map(|_| measure(&mut into)).find(|&used| used == (0, 0));
    assert_eq!(least, Some((0, 0)), "{shape:?} on {}: three calls allocated, every time", level.name());
    let forward = || drop(layer.forward(&inputs, &options).expect("a valid call"));
    forward();
    let bytes = batch * seq * width * size_of::<f32>();
    let least = (0..tries).map(|_| measure(forward)).find(|&used| used == (1, bytes));
    assert_eq!(least, Some((1, bytes)), "{shape:?} on {}: more than the output, every time", level.name());
}
/// A product with packed weights allocates nothing, on one thread or several, whether A is read in place or copied.
#[test]
fn packed_products_allocate_nothing() {
    fn check<T: Element>(level: Level, [m, k, n]: [usize; 3]) {
        let values = |len: usize| (0..len).map(|x| T::from_f32_nearest((x % 13) as f32 - 6.0)).collect::<Vec<_>>();
        let (a, b, bias, mut out) = (values(m * k), values(k * n), vec![0.5; n], values(m * n));
        let a = [[k, 1], [1, m]].map(|strides| Matrix::with_strides(&a, [m, k], strides).expect("a valid view"));
        let b = gemm::PackedMatrix::new(&Matrix::contiguous(&b, [k, n]).expect("a valid view"), Some(level));
        let b = b.expect("an available level");
        let mut run = || {
            for a in &a {
                let mut out = MatrixMut::contiguous(&mut out, [m, n]).expect("a valid view");
                gemm::gemm_packed(a, &b, Some(&bias), &mut out).expect("a valid call");
            }
        };
        run();
        // As above: rayon's own queues may grow.
        let least = (0..5).map(|_| measure(|| (0..5).for_each(|_| run()))).min();
        assert_eq!(least, Some((0, 0)), "{} on {}, {m} x {k} x {n}", T::NAME, level.name());
    }
    let _alone = alone();
    for &level in levels() {
        for size in [[1, 600, 1000], [5, 300, 70], [200, 300, 200]] {
            check::<f32>(level, size);
            check::<f16>(level, size);
            check::<bf16>(level, size);
        }
    }
}

/// A step of ONNX's operator copies keys and values to the present outputs and widens 16-bit masks, as its page says; else nothing.
#[cfg(feature = "onnx")]
#[test]
fn memory_of_an_onnx_node_is_what_it_says() {
    use polyhead::onnx::{Attention, AttnMask, Inputs, Outputs, Tensor, TensorMut};
    let _alone = alone();
    let (l, past, new, d) = (64, 4000, 96, 32);
    let total = past + new;
    let q = vec![0.5f32; l * 4 * d];
    let (k, cache) = (vec![0.25f32; new * 2 * d], vec![0.25f32; 2 * past * d]);
    let (bools, floats, halves) = (vec![true; l * total], vec![0.5f32; l * total], vec![f16::ONE; l * total]);
    let (mut y, mut key, mut value) = (vec![0.0f32; q.len()], vec![0.0f32; 2 * total * d], vec![0.0f32; 2 * total * d]);
    let mut run = |mask: AttnMask<'_>, with_past: bool| {
        let new = Tensor::new(&k, &[1, new, 2 * d]).expect("packed");
        let mut inputs = Inputs::new(Tensor::new(&q, &[1, l, 4 * d]).expect("packed"), new, new);
        inputs.attn_mask = Some(mask);
        let mut outputs = Outputs::new(TensorMut::new(&mut y, &[1, l, 4 * d]).expect("packed"));
        if with_past {
            inputs.past_key = Some(Tensor::new(&cache, &[1, 2, past, d]).expect("packed"));
            inputs.past_value = inputs.past_key;
            outputs.present_key = Some(TensorMut::new(&mut key, &[1, 2, total, d]).expect("packed"));
            outputs.present_value = Some(TensorMut::new(&mut value, &[1, 2, total, d]).expect("packed"));
        }
        let attention =
            Attention::new().is_causal(true).q_num_heads(4).kv_num_heads(2).left_window_size(1000).softcap(20.0);
        attention.run(&inputs, outputs).expect("a valid node");
    };
    fn mask<'a, T: Copy>(data: &'a [T], shape: [usize; 2]) -> AttnMask<'a>
    where
        AttnMask<'a>: From<Tensor<'a, T>>,
    {
        Tensor::new(&data[..shape[0] * shape[1]], &shape).expect("packed").into()
    }
    for (with_past, keys) in [(true, total), (false, new), (false, new - 7)] {
        let shape = [l, keys];
        // The first makes the room that all share.
        run(mask(&bools, shape), with_past);
        for of in [mask(&bools, shape), mask(&floats, shape)] {
            // Rayon's queues grow now and then.
            let peak = (0..5).map(|_| measure(|| run(of, with_past)).1).min().unwrap_or(0);
            assert!(peak < 1024, "{peak} bytes, {with_past} {keys}");
        }
        let peak = (0..5).map(|_| measure(|| run(mask(&halves, shape), with_past)).1).min().unwrap_or(0);
        let widened = l * keys * size_of::<f32>();
        assert!((widened..widened + 1024).contains(&peak), "{peak} bytes, {with_past} {keys}");
    }
}
