//! PyTorch's numbers: `scaled_dot_product_attention` in 39 ways, and the heads of a real model on real sentences.

mod support;

use polyhead::{Bias, Diagonal, Heads, Level, Mask, Options, Outputs, View, multi_head_with, reference};
use safetensors::Dtype;
use serde_json::Value;
use support::{Arrangement, Golden, PoisonedInput, PoisonedOutput, Tensor, assert_all_close, levels, max_abs};

/// One case of `torch_sdpa`.
struct Case {
    name: String,
    q: Tensor<f32>,
    k: Tensor<f32>,
    v: Tensor<f32>,
    out: Tensor<f32>,
    lse: Tensor<f32>,
    mask: Option<Tensor<bool>>,
    bias: Option<Tensor<f32>>,
    causal: Option<Diagonal>,
    scale: Option<f32>,
}

impl Case {
    fn new(golden: &Golden, json: &Value) -> Self {
        let name = json["name"].as_str().expect("a name").to_owned();
        let key = |tensor: &str| format!("{name}/{tensor}");
        let mask = key("mask");
        let causal = json["causal"].as_str().map(|corner| match corner {
            "top_left" => Diagonal::TopLeft,
            "bottom_right" => Diagonal::BottomRight,
            other => panic!("{name}: causal {other}"),
        });
        Self {
            q: golden.f32(&key("q")),
            k: golden.f32(&key("k")),
            v: golden.f32(&key("v")),
            out: golden.f32(&key("output")),
            lse: golden.f32(&key("lse")),
            mask: (golden.dtype(&mask) == Some(Dtype::U8)).then(|| golden.bool(&mask)),
            bias: (golden.dtype(&mask) == Some(Dtype::F32)).then(|| golden.f32(&mask)),
            causal,
            scale: json["scale"].as_f64().map(|scale| scale as f32),
            name,
        }
    }

    fn options(&self) -> Options<'_> {
        let mut options = Options::new();
        if let Some(scale) = self.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(diagonal) = self.causal {
            options = options.causal(diagonal);
        }
        if let Some(mask) = &self.mask {
            let view = View::contiguous(&mask.data, mask.shape::<4>()).expect("packed");
            options = options.mask(Mask::attend(view).expect("four axes"));
        }
        if let Some(bias) = &self.bias {
            let view = View::contiguous(&bias.data, bias.shape::<4>()).expect("packed");
            options = options.bias(Bias::new(view).expect("four axes"));
        }
        options
    }

    /// Asserts out and LSE of one way to compute them.
    ///
    /// The output's tolerance is relative to max|V|. It holds for `large_logits` too, whose scores reach 3000: f32 sums
    /// move them by about 1e-3 (hence the relative tolerance of the LSE), but the second largest weight of any row is
    /// 2e-10 (in f64), so that no error of the scores below 1 can be seen in the output.
    fn check<T: Copy + Into<f64>>(&self, out: &[T], lse: &[T], tolerance: f64, by: &str) {
        let context = format!("{} by {by}", self.name);
        if self.name == "tall_bias_swamps" {
            return self.check_range(out, lse, &context);
        }
        assert_all_close(out, &self.out.data, tolerance * max_abs(&self.v.data), 0.0, format_args!("{context}: out"));
        assert_all_close(lse, &self.lse.data, tolerance, 1e-6, format_args!("{context}: lse"));
    }

    /// A bias of f32::MIN swamps every score, so that only this can be asked: a finite LSE, and output inside the range
    /// of its column of V (up to the rounding of a mean).
    fn check_range<T: Copy + Into<f64>>(&self, out: &[T], lse: &[T], context: &str) {
        let [_, _, seqlen_q, head_dim_v] = self.out.shape::<4>();
        let seqlen_k = self.v.shape[2];
        for (head, rows) in out.chunks(seqlen_q * head_dim_v).enumerate() {
            let v = &self.v.data[head * seqlen_k * head_dim_v..][..seqlen_k * head_dim_v];
            for (at, &x) in rows.iter().enumerate() {
                let column = || v.iter().skip(at % head_dim_v).step_by(head_dim_v).copied();
                let (low, high) = (column().fold(f32::INFINITY, f32::min), column().fold(f32::NEG_INFINITY, f32::max));
                let (x, slack): (f64, f64) = (x.into(), 1e-6);
                let inside = f64::from(low) - slack <= x && x <= f64::from(high) + slack;
                assert!(inside, "{context}: {x} outside {low}..={high}");
            }
        }
        assert!(lse.iter().all(|&x| x.into().is_finite()), "{context}: LSE");
    }
}

fn cases() -> Vec<Case> {
    let golden = Golden::load("torch_sdpa");
    let cases: Vec<Case> = golden.cases().iter().map(|json| Case::new(&golden, json)).collect();
    assert_eq!(cases.len(), 39);
    cases
}

fn heads(tensor: &Tensor<f32>) -> Heads<'_, f32> {
    Heads::bhsd(&tensor.data, tensor.shape()).expect("packed")
}

#[test]
fn torch_sdpa_by_the_reference() {
    for case in cases() {
        let attention = reference::multi_head(&heads(&case.q), &heads(&case.k), &heads(&case.v), &case.options())
            .unwrap_or_else(|error| panic!("{}: {error}", case.name));
        case.check(&attention.out, &attention.lse, 1e-6, "reference");
    }
}

#[test]
fn torch_sdpa_by_every_level_in_every_layout() {
    for &level in levels() {
        for case in &cases() {
            for arrangement in Arrangement::DISTINCT {
                run(case, level, arrangement);
            }
        }
    }
}

fn run(case: &Case, level: Level, arrangement: Arrangement) {
    let by = format!("{} in {arrangement:?}", level.name());
    let [q, k, v] =
        [&case.q, &case.k, &case.v].map(|tensor| PoisonedInput::new(&tensor.data, tensor.shape(), arrangement));
    let mut out = PoisonedOutput::<f32>::new(case.out.shape(), arrangement);
    let mut lse = vec![f32::NAN; case.lse.data.len()];
    let outputs = Outputs::new(out.view()).lse(&mut lse);
    multi_head_with(&q.view(), &k.view(), &v.view(), outputs, &case.options().level(level))
        .unwrap_or_else(|error| panic!("{} by {by}: {error}", case.name));
    case.check(&out.packed(format_args!("{} by {by}", case.name)), &lse, 1e-5, &by);
}

/// q, k, v of a layer of all-MiniLM-L6-v2 for eight sentences of different lengths, padded to the longest.
struct MiniLm {
    q: Tensor<f32>,
    k: Tensor<f32>,
    v: Tensor<f32>,
    out: Tensor<f32>,
    lengths: Vec<usize>,
    /// Weights of the first two sentences, (heads, length, length).
    probs: [Tensor<f32>; 2],
}

impl MiniLm {
    fn load() -> Self {
        let golden = Golden::load("minilm_heads");
        let lengths = golden.i32("lengths").data.iter().map(|&len| len.try_into().expect("a length")).collect();
        let [q, k, v, out] = ["q", "k", "v", "output"].map(|key| golden.f32(key));
        Self { q, k, v, out, lengths, probs: ["probs_0", "probs_1"].map(|key| golden.f32(key)) }
    }

    fn weights_shape(&self) -> [usize; 4] {
        let [batch, heads, seqlen, _] = self.q.shape();
        [batch, heads, seqlen, seqlen]
    }

    fn check<T: Copy + Into<f64>>(&self, out: &[T], weights: &[T], tolerance: f64, by: &str) {
        let context = format!("minilm by {by}");
        assert_all_close(out, &self.out.data, tolerance * max_abs(&self.v.data), 0.0, format_args!("{context}: out"));
        let [_, heads, seqlen, _] = self.weights_shape();
        for (item, probs) in self.probs.iter().enumerate() {
            let len = self.lengths[item];
            assert_eq!(probs.shape, [heads, len, len]);
            for row in 0..heads * len {
                let (head, query) = (row / len, row % len);
                let weights = &weights[((item * heads + head) * seqlen + query) * seqlen..][..seqlen];
                let context = format!("{context}: weights of sentence {item}, head {head}, query {query}");
                assert_all_close(&weights[..len], &probs.data[row * len..][..len], tolerance, 0.0, &context);
                assert!(weights[len..].iter().all(|&p| p.into() == 0.0), "{context}: padding has weight");
            }
        }
    }
}

#[test]
fn minilm_by_the_reference() {
    let minilm = MiniLm::load();
    let options = Options::new().key_lengths(&minilm.lengths);
    let attention =
        reference::multi_head(&heads(&minilm.q), &heads(&minilm.k), &heads(&minilm.v), &options).expect("a valid call");
    minilm.check(&attention.out, &attention.weights, 1e-6, "reference");
    // In "The animal didn't cross the street because it was too tired", head 1 takes "it" (token 10) to "animal" (2).
    let it = &attention.weights[(28 + 10) * 28..][..28];
    assert!(it.iter().all(|&weight| weight <= it[2]), "{it:?}");
}

#[test]
fn minilm_by_every_level() {
    let minilm = MiniLm::load();
    let [q, k, v] = [&minilm.q, &minilm.k, &minilm.v]
        .map(|tensor| PoisonedInput::new(&tensor.data, tensor.shape(), Arrangement::PackedQkv));
    for &level in levels() {
        let mut out = PoisonedOutput::<f32>::new(minilm.out.shape(), Arrangement::Bshd);
        let mut weights = PoisonedOutput::<f32>::new(minilm.weights_shape(), Arrangement::RowGaps(5));
        let outputs = Outputs::new(out.view()).weights(weights.view());
        let options = Options::new().key_lengths(&minilm.lengths).level(level);
        multi_head_with(&q.view(), &k.view(), &v.view(), outputs, &options).expect("a valid call");
        minilm.check(&out.packed(level.name()), &weights.packed(level.name()), 1e-5, level.name());
    }
}
