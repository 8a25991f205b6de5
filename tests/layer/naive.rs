//! The layer word by word, in f64, and random layers and inputs.

use polyhead::layer::{Config, Inputs, MultiHeadAttention, RotaryStyle, Weights};
use polyhead::{Element, Heads, Level, Matrices, Matrix, Options, reference};

use crate::support::Rng;

/// A layer as plain numbers.
#[derive(Clone, Debug)]
pub(crate) struct Naive<T> {
    /// embed_dim, kdim, vdim, output_dim.
    pub(crate) widths: [usize; 4],
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) rotary: Option<(usize, RotaryStyle)>,
    pub(crate) zero_attn: bool,
    /// Of query, key, value and output: (outputs, inputs), row-major, and a bias.
    weights: [Vec<T>; 4],
    pub(crate) biases: [Option<Vec<T>>; 4],
    pub(crate) bias_kv: Option<[Vec<T>; 2]>,
    pub(crate) sinks: Option<Vec<T>>,
}

pub(crate) const BASE: f64 = 100.0;

/// Tokens (batch, seq, width), packed.
pub(crate) struct Tokens {
    pub(crate) shape: [usize; 3],
    pub(crate) data: Vec<f32>,
}

impl Tokens {
    pub(crate) fn random(shape: [usize; 3], rng: &mut Rng) -> Self {
        Self { shape, data: (0..shape.iter().product()).map(|_| rng.normal()).collect() }
    }

    pub(crate) fn view(&self) -> Matrices<'_, f32> {
        Matrices::contiguous(&self.data, self.shape).expect("packed")
    }

    /// One item alone.
    pub(crate) fn item(&self, item: usize) -> Self {
        let [_, seq, width] = self.shape;
        Self { shape: [1, seq, width], data: self.data[item * seq * width..][..seq * width].to_vec() }
    }
}

/// What the naive layer gives: output, weights of every head (additional keys last).
pub(crate) struct Results {
    pub(crate) out: Vec<f64>,
    pub(crate) weights: Vec<f64>,
}

impl<T: Element> Naive<T> {
    pub(crate) fn random(widths: [usize; 4], heads: [usize; 2], dims: [usize; 2], rng: &mut Rng) -> Self {
        let ([num_heads, num_kv_heads], [head_dim, head_dim_v]) = (heads, dims);
        let outputs = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim_v, widths[3]];
        let inputs = [widths[0], widths[1], widths[2], num_heads * head_dim_v];
        let mut weight = |i: usize| -> Vec<T> {
            let scale = (inputs[i].max(1) as f32).sqrt().recip();
            (0..outputs[i] * inputs[i]).map(|_| T::from_f32_nearest(rng.normal() * scale)).collect()
        };
        let weights = [weight(0), weight(1), weight(2), weight(3)];
        Self {
            widths,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim_v,
            rotary: None,
            zero_attn: false,
            weights,
            biases: [const { None }; 4],
            bias_kv: None,
            sinks: None,
        }
    }

    pub(crate) fn vector(len: usize, rng: &mut Rng) -> Vec<T> {
        (0..len).map(|_| T::from_f32_nearest(0.5 * rng.normal())).collect()
    }

    pub(crate) fn with_biases(mut self, rng: &mut Rng) -> Self {
        self.biases = [0, 1, 2, 3].map(|i| Some(Self::vector(self.outputs()[i], rng)));
        self
    }

    pub(crate) fn outputs(&self) -> [usize; 4] {
        let Self { num_heads, num_kv_heads, head_dim, head_dim_v, widths, .. } = self;
        [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim_v, widths[3]]
    }

    pub(crate) fn config(&self) -> Config {
        let [embed_dim, kdim, vdim, output_dim] = self.widths;
        let config = Config::new(embed_dim, self.num_heads).num_kv_heads(self.num_kv_heads).head_dim(self.head_dim);
        let config = config.head_dim_v(self.head_dim_v).kdim(kdim).vdim(vdim).output_dim(output_dim);
        let config = config.add_zero_attn(self.zero_attn);
        match self.rotary {
            Some((dim, style)) => config.rotary(polyhead::layer::Rotary { dim, base: BASE, style }),
            None => config,
        }
    }

    pub(crate) fn layer(&self, level: Level) -> MultiHeadAttention<T> {
        self.try_layer(self.config().level(level)).expect("weights that fit")
    }

    pub(crate) fn try_layer(&self, config: Config) -> polyhead::Result<MultiHeadAttention<T>> {
        let inputs = [self.widths[0], self.widths[1], self.widths[2], self.num_heads * self.head_dim_v];
        let [q, k, v, o] =
            [0, 1, 2, 3].map(|i| Matrix::contiguous(&self.weights[i], [self.outputs()[i], inputs[i]]).expect("packed"));
        let [qb, kb, vb, ob] = self.biases.each_ref().map(Option::as_deref);
        let mut weights = Weights::new(q, k, v, o).biases(qb, kb, vb, ob);
        if let Some([key, value]) = &self.bias_kv {
            weights = weights.bias_kv(key, value);
        }
        if let Some(sinks) = &self.sinks {
            weights = weights.sinks(sinks);
        }
        MultiHeadAttention::new(config, &weights)
    }

    fn project<'a>(&'a self, i: usize, row: impl Iterator<Item = f64> + Clone + 'a) -> impl Iterator<Item = f64> + 'a {
        let width = row.clone().count();
        (0..self.outputs()[i]).map(move |output| {
            let bias = self.biases[i].as_ref().map_or(0.0, |bias| f64::from(bias[output].to_f32()));
            let weights = &self.weights[i][output * width..][..width];
            bias + weights.iter().zip(row.clone()).map(|(w, x)| f64::from(w.to_f32()) * x).sum::<f64>()
        })
    }

    /// Heads of all tokens, (batch, seq, heads, dim), turned by their positions, with the additional keys first.
    fn heads(&self, part: usize, tokens: &Tokens, first_position: usize) -> (Vec<f32>, [usize; 4]) {
        let [batch, seq, width] = tokens.shape;
        let (heads, dim) = match part {
            0 => (self.num_heads, self.head_dim),
            1 => (self.num_kv_heads, self.head_dim),
            _ => (self.num_kv_heads, self.head_dim_v),
        };
        let mut extra: Vec<Vec<f32>> = Vec::new();
        if part > 0 {
            extra.extend(self.bias_kv.as_ref().map(|kv| kv[part - 1].iter().map(|x| x.to_f32()).collect()));
            extra.extend(self.zero_attn.then(|| vec![0.0; heads * dim]));
        }
        let mut data = Vec::new();
        for item in 0..batch {
            extra.iter().for_each(|row| data.extend_from_slice(row));
            for position in 0..seq {
                let row = &tokens.data[(item * seq + position) * width..][..width];
                let mut row: Vec<f64> = self.project(part, row.iter().map(|&x| f64::from(x))).collect();
                if part < 2 {
                    row.chunks_mut(dim.max(1)).for_each(|head| self.turn(head, first_position + position));
                }
                data.extend(row.iter().map(|&x| x as f32));
            }
        }
        (data, [batch, seq + extra.len(), heads, dim])
    }

    fn turn(&self, head: &mut [f64], position: usize) {
        let Some((dim, style)) = self.rotary else { return };
        for pair in 0..dim / 2 {
            let angle = position as f64 * BASE.powf(-2.0 * pair as f64 / dim as f64);
            let (a, b) = match style {
                RotaryStyle::Interleaved => (2 * pair, 2 * pair + 1),
                RotaryStyle::HalfSplit => (pair, pair + dim / 2),
            };
            let (x, y) = (head[a], head[b]);
            head[a] = x * angle.cos() - y * angle.sin();
            head[b] = x * angle.sin() + y * angle.cos();
        }
    }

    /// The layer's results. `options` speak of the keys with the additional ones first.
    pub(crate) fn run(&self, tokens: [&Tokens; 3], first_position: usize, options: &Options<'_>) -> Results {
        let [q, k, v] = [0, 1, 2].map(|part| self.heads(part, tokens[part], first_position));
        let [qh, kh, vh] = [&q, &k, &v].map(|(data, shape)| Heads::bshd(data, *shape).expect("packed"));
        let sinks: Option<Vec<f32>> = self.sinks.as_ref().map(|sinks| sinks.iter().map(|x| x.to_f32()).collect());
        let mut options = *options;
        if let Some(sinks) = &sinks {
            options = options.sinks(sinks);
        }
        let attention = reference::multi_head(&qh, &kh, &vh, &options).expect("a valid call");
        let ([batch, heads, seq, dim], seqlen_k) = ([q.1[0], q.1[2], q.1[1], self.head_dim_v], k.1[1]);
        let mut out = Vec::new();
        for (item, position) in (0..batch).flat_map(|item| (0..seq).map(move |position| (item, position))) {
            let row = (0..heads).flat_map(|head| {
                attention.out[((item * heads + head) * seq + position) * dim..][..dim].iter().copied()
            });
            out.extend(self.project(3, row.collect::<Vec<f64>>().into_iter()));
        }
        let extra = seqlen_k - tokens[1].shape[1];
        let mut weights = attention.weights;
        weights.chunks_mut(seqlen_k.max(1)).for_each(|row| row.rotate_left(extra));
        Results { out, weights }
    }
}

/// Views of the same tokens in every way that inputs can lie.
pub(crate) fn sequence_first(tokens: &Tokens) -> Vec<f32> {
    let [batch, seq, width] = tokens.shape;
    let rows = (0..seq).flat_map(|position| (0..batch).map(move |item| item * seq + position));
    rows.flat_map(|row| tokens.data[row * width..][..width].iter().copied()).collect()
}

pub(crate) fn self_attention(tokens: &Tokens) -> Inputs<'_, f32> {
    Inputs::self_attention(tokens.view())
}
