//! Layers of any kind against the naive one of the tests, and against themselves: through a state dict, packed tokens and caches.
//! Checkpoints with a tensor too few, too many or of another shape are errors, and so are files that are none.
#![no_main]

use arbitrary::Arbitrary;
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use polyhead::cache::{BlockTable, Cache, KvCache, PagedCache, PagedSequences};
use polyhead::layer::{Config, Inputs, MultiHeadAttention, Outputs, RotaryStyle, StateDict, Workspace};
use polyhead::{
    Bias, Diagonal, Element, Error, HeadsMut, Level, Mask, Matrices, MatricesMut, Matrix, Options, View, Window,
};

#[path = "../../tests/layer/naive.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod naive;

#[path = "../../tests/support/rng.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod rng;

mod support {
    pub(crate) use crate::rng::Rng;
}

use naive::{Naive, Tokens};
use support::Rng;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Kind {
    SelfAttention,
    Cross,
    Separate,
    SharedKeys,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Corner {
    TopLeft,
    BottomRight,
    Offset(i8),
}

impl From<Corner> for Diagonal {
    fn from(corner: Corner) -> Self {
        match corner {
            Corner::TopLeft => Self::TopLeft,
            Corner::BottomRight => Self::BottomRight,
            Corner::Offset(offset) => Self::Offset(offset.into()),
        }
    }
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    seed: u64,
    weights: u8,
    widths: [u8; 4],
    heads: [u8; 2],
    dims: [u8; 2],
    biases: u8,
    /// Bits: additional key and value, key of zeros, sinks, sequence first, batch first with gaps in the output, average.
    flags: u8,
    rotary: Option<(u8, bool)>,
    kind: Kind,
    batch: u8,
    lengths: [u8; 2],
    position: u16,
    level: u8,
    causal: Option<Corner>,
    window: Option<(Option<u8>, Option<u8>, Corner)>,
    keep_first: u8,
    key_lengths: Option<u64>,
    mask: Option<(u8, bool)>,
    bias: Option<u8>,
    alibi: bool,
    softcap: Option<u8>,
    /// How many tokens a step decodes; 0: no decoding.
    step: u8,
    /// What is done to a tensor of the checkpoint.
    damage: u8,
    file: &'a [u8],
}

impl Input<'_> {
    fn flag(&self, bit: u8) -> bool {
        self.flags >> bit & 1 == 1
    }

    fn naive<T: Element>(&self, rng: &mut Rng) -> Naive<T> {
        let mut widths = self.widths.map(|width| usize::from(width % 40) + 1);
        match self.kind {
            Kind::SelfAttention => widths = [widths[0], widths[0], widths[0], widths[3]],
            Kind::Cross => widths[2] = widths[1],
            Kind::SharedKeys => widths[1] = widths[0],
            Kind::Separate => {}
        }
        let kv_heads = usize::from(self.heads[1] % 3) + 1;
        let heads = kv_heads * (usize::from(self.heads[0] % 3) + 1);
        let dims = [usize::from(self.dims[0] % 24) + 1, usize::from(self.dims[1] % 24)];
        let mut naive = Naive::random(widths, [heads, kv_heads], dims, rng);
        for i in 0..4 {
            if self.biases >> i & 1 == 1 {
                naive.biases[i] = Some(Naive::vector(naive.outputs()[i], rng));
            }
        }
        if self.flag(0) {
            naive.bias_kv = Some([Naive::vector(kv_heads * dims[0], rng), Naive::vector(kv_heads * dims[1], rng)]);
        }
        naive.zero_attn = self.flag(1);
        naive.sinks = self.flag(2).then(|| Naive::vector(heads, rng));
        naive.rotary = self.rotary.map(|(dim, half)| {
            let style = if half { RotaryStyle::HalfSplit } else { RotaryStyle::Interleaved };
            (usize::from(dim) % (dims[0] / 2 + 1) * 2, style)
        });
        naive
    }

    fn corners(&self) -> impl Iterator<Item = Diagonal> {
        [self.causal, self.window.map(|window| window.2)].into_iter().flatten().map(Diagonal::from)
    }
}

/// What options refer to, for the keys with `extra` more in front.
struct Tables {
    lengths: Vec<usize>,
    mask: Vec<bool>,
    bias: Vec<f32>,
    slopes: Vec<f32>,
}

impl Tables {
    fn new(input: &Input<'_>, [batch, heads, l, s]: [usize; 4], rng: &mut Rng) -> Self {
        let seen = f64::from(input.mask.map_or(0, |(seen, _)| seen)) / 255.0;
        let hidden = f64::from(input.bias.unwrap_or(0)) / 512.0;
        let mut bias = || if rng.chance(hidden) { f32::NEG_INFINITY } else { rng.normal() };
        let bias = (0..batch * s).map(|_| bias()).collect();
        Self {
            lengths: (0..batch).map(|_| rng.below(s + 1)).collect(),
            mask: rng.bools(l * s, seen),
            bias,
            slopes: (0..heads).map(|_| rng.uniform(0.0, 0.5)).collect(),
        }
    }

    fn widened(&self, s: usize, extra: usize, attend: bool) -> Self {
        fn wide<T: Copy>(data: &[T], s: usize, extra: usize, value: T) -> Vec<T> {
            data.chunks(s.max(1)).flat_map(|row| [vec![value; extra], row.to_vec()].concat()).collect()
        }
        Self {
            lengths: self.lengths.iter().map(|len| len + extra).collect(),
            mask: wide(&self.mask, s, extra, attend),
            bias: wide(&self.bias, s, extra, 0.0),
            slopes: self.slopes.clone(),
        }
    }

    /// The input's options for `s` keys, `extra` of which are the layer's own.
    fn options(&self, input: &Input<'_>, [batch, l, s]: [usize; 3], extra: usize) -> Options<'_> {
        let shift = |corner: Corner| match (Diagonal::from(corner), extra) {
            (Diagonal::TopLeft, 1..) => Diagonal::Offset(extra as isize),
            (Diagonal::Offset(offset), _) => Diagonal::Offset(offset + extra as isize),
            (diagonal, _) => diagonal,
        };
        let mut options = Options::new();
        if let Some(corner) = input.causal {
            options = options.causal(shift(corner));
        }
        if let Some((left, right, corner)) = input.window {
            let (left, right) = (left.map(usize::from), right.map(usize::from));
            options = options.window(Window { left, right, diagonal: shift(corner) });
            options = options.keep_first(usize::from(input.keep_first) + extra);
        }
        if input.key_lengths.is_some() {
            options = options.key_lengths(&self.lengths);
        }
        if let Some((_, attend)) = input.mask {
            let view = View::contiguous(&self.mask, [l, s]).expect("packed");
            let mask = if attend { Mask::attend(view) } else { Mask::ignore(view) };
            options = options.mask(mask.expect("two axes"));
        }
        if input.bias.is_some() {
            options = options.and_bias(Bias::of_keys(Matrix::contiguous(&self.bias, [batch, s]).expect("packed")));
        }
        if input.alibi {
            options = options.alibi(&self.slopes, Diagonal::BottomRight);
        }
        if let Some(cap) = input.softcap {
            options = options.softcap(f32::from(cap) / 16.0 + 0.25);
        }
        options
    }
}

fn close(ours: &[f32], theirs: &[f64], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let largest = theirs.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    for (at, (&x, &y)) in ours.iter().zip(theirs).enumerate() {
        assert!((f64::from(x) - y).abs() <= 1e-4 * largest, "{what}[{at}]: {x} {y}");
    }
}

fn same(ours: &[f32], theirs: &[f32], what: &str) {
    assert!(ours.iter().map(|x| x.to_bits()).eq(theirs.iter().map(|x| x.to_bits())), "{what}");
}

fn run<T: Element>(input: &Input<'_>) {
    let mut rng = Rng::new(input.seed);
    let naive = input.naive::<T>(&mut rng);
    let levels = Level::available();
    let config = naive.config().level(levels[usize::from(input.level) % levels.len()]);
    let layer = naive.try_layer(config).expect("weights that fit");
    checkpoint(input, config, &layer);

    let batch = usize::from(input.batch % 4);
    let [l, mut s] = input.lengths.map(|len| usize::from(len) % 50);
    if matches!(input.kind, Kind::SelfAttention | Kind::SharedKeys) {
        s = l;
    }
    let mut tokens = |seq, width| Tokens::random([batch, seq, width], &mut rng);
    let [query, key, value] = [tokens(l, naive.widths[0]), tokens(s, naive.widths[1]), tokens(s, naive.widths[2])];
    let tokens = match input.kind {
        Kind::SelfAttention => [&query; 3],
        Kind::Cross => [&query, &key, &key],
        Kind::SharedKeys => [&query, &query, &value],
        Kind::Separate => [&query, &key, &value],
    };
    let position = usize::from(input.position % 500);
    let extra = layer.extra_keys();
    let tables = Tables::new(input, [batch, naive.num_heads, l, s], &mut rng);
    let attend = input.mask.is_some_and(|(_, attend)| attend);
    let wide = tables.widened(s, extra, attend);
    let options = tables.options(input, [batch, l, s], 0);
    let flipped = naive::sequence_first(&query);
    let mut views = tokens.map(Tokens::view);
    if input.flag(3) {
        views[0] = Matrices::sequence_first(&flipped, [l, batch, naive.widths[0]]).expect("packed");
    }
    let inputs = Inputs::new(views[0], views[1], views[2]).first_position(position);
    let result = layer.forward_with_weights(&inputs, false, &options);
    let shortest = if input.key_lengths.is_some() { tables.lengths.iter().copied().min().unwrap_or(s) } else { s };
    let before_first = |diagonal| match diagonal {
        Diagonal::TopLeft => false,
        Diagonal::BottomRight => shortest < l,
        Diagonal::Offset(offset) => offset < 0,
    };
    if extra > 0 && (input.alibi || input.corners().any(before_first)) {
        assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
        return;
    }
    let (out, weights) = result.expect("a valid call");
    // Of no keys a mask has no rows to widen.
    if s > 0 || extra == 0 {
        let expected = naive.run(tokens, position, &wide.options(input, [batch, l, s + extra], extra));
        close(&out, &expected.out, "out");
        close(&weights, &expected.weights, "weights");
    }
    into_views(input, &layer, &inputs, &options, [batch, l, s], &out);
    if matches!(input.kind, Kind::SelfAttention) && extra == 0 {
        packed_tokens(&layer, tokens[0], position, &mut rng);
        decode(input, &layer, tokens[0]);
    }
}

/// The same bits in an output of any strides, beside averaged weights, and nothing written between.
fn into_views<T: Element>(
    input: &Input<'_>,
    layer: &MultiHeadAttention<T>,
    inputs: &Inputs<'_, f32>,
    options: &Options<'_>,
    [batch, l, s]: [usize; 3],
    expected: &[f32],
) {
    const POISON: u32 = 0x7fc0_1234;
    let sizes = layer.config().sizes().expect("a valid layer");
    let width = sizes.output_dim;
    let (gap, extra) = (usize::from(input.flag(4)), layer.extra_keys());
    let strides =
        if input.flag(3) { [width + gap, batch * (width + gap), 1] } else { [l * (width + gap) + gap, width + gap, 1] };
    let mut out = vec![f32::from_bits(POISON); batch * (l + 1) * (width + gap) + gap];
    let mut weights = vec![0.0f32; batch * l * (s + extra)];
    let view = MatricesMut::with_strides(&mut out, [batch, l, width], strides).expect("disjoint");
    let mut outputs = Outputs::new(view);
    if input.flag(5) {
        outputs = outputs.averaged_weights(HeadsMut::bhsd(&mut weights, [batch, 1, l, s + extra]).expect("packed"));
    }
    layer.forward_into(inputs, outputs, options, &mut Workspace::new()).expect("as before");
    let mut expected = expected.iter();
    for at in (0..batch).flat_map(|item| (0..l).map(move |row| item * strides[0] + row * strides[1])) {
        for x in &mut out[at..at + width] {
            assert_eq!(x.to_bits(), expected.next().expect("as many").to_bits(), "into a view");
            *x = f32::from_bits(POISON);
        }
    }
    assert!(out.iter().all(|x| x.to_bits() == POISON), "written outside of the view");
}

/// Sequences without padding have the bits of each alone.
fn packed_tokens<T: Element>(layer: &MultiHeadAttention<T>, x: &Tokens, position: usize, rng: &mut Rng) {
    let [batch, seq, width] = x.shape;
    let rows = batch * seq;
    let mut starts: Vec<usize> = (0..rng.below(5)).map(|_| rng.below(rows + 1)).chain([0, rows]).collect();
    starts.sort_unstable();
    let options = Options::new().causal(Diagonal::TopLeft);
    let view = Matrix::contiguous(&x.data, [rows, width]).expect("packed");
    let packed = layer.forward(&Inputs::packed(view, &starts).first_position(position), &options).expect("valid");
    let mut alone = Vec::new();
    for range in starts.windows(2) {
        let shape = [1, range[1] - range[0], width];
        let sequence = Matrices::contiguous(&x.data[range[0] * width..range[1] * width], shape).expect("packed");
        let inputs = Inputs::self_attention(sequence).first_position(position);
        alone.extend(layer.forward(&inputs, &options).expect("a valid call"));
    }
    same(&packed, &alone, "packed tokens");
}

/// Step by step through two kinds of cache: what one causal call gives, and the same bits from both.
fn decode<T: Element>(input: &Input<'_>, layer: &MultiHeadAttention<T>, x: &Tokens) {
    let [batch, seq, width] = x.shape;
    let step = usize::from(input.step % 8);
    if step == 0 {
        return;
    }
    let inputs = naive::self_attention(x);
    let once = layer.forward(&inputs, &Options::new().causal(Diagonal::TopLeft)).expect("a valid call");
    let once: Vec<f64> = once.into_iter().map(f64::from).collect();
    let shape = layer.kv_shape();
    let mut flat = KvCache::<f32>::new(shape, batch, seq).expect("small");
    let mut pages = PagedCache::<f32>::new(shape, batch * seq + 1, 1 + step).expect("small");
    let ids: Vec<_> = (0..batch).map(|_| pages.create().expect("room")).collect();
    let mut table = BlockTable::new();
    let mut sequences = PagedSequences::new(&mut pages, &ids, &mut table);
    let output = layer.config().sizes().expect("a valid layer").output_dim;
    for done in (0..seq).step_by(step) {
        let n = step.min(seq - done);
        let strides = [seq * width, width, 1];
        let data = &x.data[(done * width).min(x.data.len())..];
        let view = Matrices::with_strides(data, [batch, n, width], strides).expect("within");
        let out = layer.decode(view, &mut flat, &Options::new()).expect("room");
        same(&layer.decode(view, &mut sequences, &Options::new()).expect("room"), &out, "pages");
        for item in 0..batch {
            let expected = &once[(item * seq + done) * output..][..n * output];
            close(&out[item * n * output..][..n * output], expected, "decoded");
            assert_eq!((flat.position(item), sequences.position(item)), (Ok(done + n), Ok(done + n)));
        }
    }
}

/// The weights come back as they were given; a damaged checkpoint is an error.
fn checkpoint<T: Element>(input: &Input<'_>, config: Config, layer: &MultiHeadAttention<T>) {
    let state = layer.to_state_dict("layer.");
    let again = MultiHeadAttention::from_state_dict(config, &state, "layer.").expect("what was saved");
    assert_eq!(again.to_state_dict("layer."), state);
    let victim = usize::from(input.damage >> 3) % state.iter().count();
    let mut damaged = StateDict::new();
    for (at, (name, tensor)) in state.iter().enumerate() {
        let mut tensor = tensor.clone();
        let mut name = name.to_owned();
        match (at == victim, input.damage % 6) {
            (true, 0) => name.push('x'),
            (true, 1) => tensor.shape.push(2),
            (true, 2) => tensor.shape[0] = usize::MAX,
            (true, 3) => tensor.data.push(T::default()),
            (true, 4) => tensor.shape.insert(0, 1),
            (true, _) => damaged.insert("layer.other", tensor.clone()),
            _ => {}
        }
        damaged.insert(name, tensor);
    }
    assert!(MultiHeadAttention::from_state_dict(config, &damaged, "layer.").is_err(), "{}", input.damage % 6);
    // Any bytes: an error, or tensors whose sizes fit.
    if let Ok(state) = StateDict::<T>::from_safetensors(input.file, "") {
        assert!(state.iter().all(|(_, tensor)| tensor.shape.iter().product::<usize>() == tensor.data.len()));
    }
}

fuzz_target!(|input: Input<'_>| {
    match input.weights % 3 {
        0 => run::<f32>(&input),
        1 => run::<f16>(&input),
        _ => run::<bf16>(&input),
    }
});
