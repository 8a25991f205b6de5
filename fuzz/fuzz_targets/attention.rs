//! Attention with any options, strides and element types against the f64 reference: same error or same result, and nothing
//! written outside of the output.
#![no_main]

use arbitrary::Arbitrary;
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use polyhead::{
    Bias, Diagonal, Element, Heads, HeadsMut, Level, Mask, Options, Outputs, View, Window, multi_head_with, reference,
};

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Type {
    F32,
    F16,
    Bf16,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Corner {
    TopLeft,
    BottomRight,
    Offset(i16),
    Far(isize),
}

impl From<Corner> for Diagonal {
    fn from(corner: Corner) -> Self {
        match corner {
            Corner::TopLeft => Self::TopLeft,
            Corner::BottomRight => Self::BottomRight,
            Corner::Offset(offset) => Self::Offset(offset.into()),
            Corner::Far(offset) => Self::Offset(offset),
        }
    }
}

#[derive(Arbitrary, Debug)]
struct Input {
    types: [Type; 3],
    batch: u8,
    kv_heads: u8,
    group: u8,
    seqlen_q: u8,
    seqlen_k: u16,
    head_dim: u8,
    head_dim_v: u8,
    /// Gap between rows, seq-major or head-major, dim-strided, for each operand and the output.
    layouts: [(u8, bool, bool); 4],
    scale: Option<i8>,
    causal: Option<Corner>,
    window: Option<(Option<u8>, Option<u8>, Corner)>,
    lengths: Option<Vec<u16>>,
    mask: Option<([bool; 4], bool, u64)>,
    bias: Option<([bool; 4], u8)>,
    alibi: Option<(i8, Corner)>,
    softcap: Option<u8>,
    sinks: Option<i8>,
    level: u8,
    /// 0: plain values; else every n-th element of k and v is NaN or infinite.
    special: u8,
    seed: u64,
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Strides of a (batch, heads, seq, dim) operand, and the slice length they need.
fn strides(shape: [usize; 4], (gap, seq_major, dim_strided): (u8, bool, bool)) -> ([usize; 4], usize) {
    let [batch, heads, seq, dim] = shape;
    let step = if dim_strided { 2 } else { 1 };
    let row = (dim * step + usize::from(gap % 5)).max(1);
    let (head, seq_stride, item) =
        if seq_major { (row, row * heads, row * heads * seq) } else { (row * seq, row, row * heads * seq) };
    ([item, head, seq_stride, step], batch * item + 1)
}

fn fill<T: Element>(len: usize, rng: &mut Rng, special: u8) -> Vec<T> {
    (0..len)
        .map(|i| {
            let x = match special {
                0 => rng.uniform(),
                n if i % (usize::from(n) + 40) == 7 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3],
                _ => rng.uniform(),
            };
            T::from_f32_nearest(x)
        })
        .collect()
}

/// Values up to 1, scores up to a few hundred: their rounding times the largest score bounds the error of a probability.
fn close(ours: f32, theirs: f64, what: &str) {
    let same = f64::from(ours) == theirs || (ours.is_nan() && theirs.is_nan());
    let either_infinite = !ours.is_finite() && !theirs.is_finite();
    assert!(
        same || either_infinite || (f64::from(ours) - theirs).abs() <= 2e-4 * (1.0 + theirs.abs()),
        "{what}: {ours} {theirs}"
    );
}

/// Every element of the view is as expected, every other one as it was.
fn check_out(out: &[f32], [batch, heads, l, dv]: [usize; 4], strides: [usize; 4], expected: &[f64]) {
    let mut written = vec![false; out.len()];
    let mut expected = expected.iter();
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..l {
                for x in 0..dv {
                    let at = [b, h, i, x].iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>();
                    close(out[at], *expected.next().expect("as many"), "out");
                    written[at] = true;
                }
            }
        }
    }
    for (x, written) in out.iter().zip(written) {
        assert!(written || x.to_bits() == POISON, "written outside of the view");
    }
}

const POISON: u32 = 0x7fc0_1234;

fn run<Q: Element, K: Element, V: Element>(input: &Input) {
    let mut rng = Rng(input.seed);
    let (batch, kv) = (usize::from(input.batch % 3), usize::from(input.kv_heads % 3));
    let heads = kv * usize::from(input.group % 4);
    let (l, s) = (usize::from(input.seqlen_q) % 70, usize::from(input.seqlen_k) % 300);
    let (d, dv) = (usize::from(input.head_dim) % 40, usize::from(input.head_dim_v) % 40);
    let shapes = [[batch, heads, l, d], [batch, kv, s, d], [batch, kv, s, dv], [batch, heads, l, dv]];
    let layout: Vec<_> = shapes.iter().zip(input.layouts).map(|(&shape, layout)| strides(shape, layout)).collect();
    let q = fill::<Q>(layout[0].1, &mut rng, 0);
    let k = fill::<K>(layout[1].1, &mut rng, input.special);
    let v = fill::<V>(layout[2].1, &mut rng, input.special);
    let q = Heads::with_strides(&q, shapes[0], layout[0].0).expect("fits");
    let k = Heads::with_strides(&k, shapes[1], layout[1].0).expect("fits");
    let v = Heads::with_strides(&v, shapes[2], layout[2].0).expect("fits");

    let scores = [batch, heads, l, s];
    let broadcast = |keep: [bool; 4]| core::array::from_fn(|i| if keep[i] { scores[i] } else { 1 });
    let lengths: Option<Vec<usize>> = input
        .lengths
        .as_ref()
        .map(|list| (0..batch).map(|i| usize::from(list.get(i).copied().unwrap_or(0)) % (s + 1)).collect());
    let mask_shape = input.mask.map(|(keep, _, _)| broadcast(keep)).unwrap_or([1; 4]);
    let bias_shape = input.bias.map(|(keep, _)| broadcast(keep)).unwrap_or([1; 4]);
    let density = input.mask.map_or(0, |(_, _, density)| density % 8);
    let mask: Vec<bool> = (0..mask_shape.iter().product()).map(|_| rng.next() % 8 >= density).collect();
    let infinite = input.bias.map_or(0, |(_, n)| u64::from(n % 4));
    let bias: Vec<f32> = (0..bias_shape.iter().product())
        .map(|_| if rng.next() % 8 < infinite { f32::NEG_INFINITY } else { 3.0 * rng.uniform() })
        .collect();
    let slopes = vec![f32::from(input.alibi.map_or(0, |(slope, _)| slope)) / 256.0; heads];
    let sinks = vec![f32::from(input.sinks.unwrap_or(0)) / 16.0; heads];

    let mut options = Options::new();
    if let Some(scale) = input.scale {
        options = options.softmax_scale(f32::from(scale) / 64.0);
    }
    if let Some(corner) = input.causal {
        options = options.causal(corner.into());
    }
    if let Some((left, right, corner)) = input.window {
        let (left, right) = (left.map(usize::from), right.map(usize::from));
        options = options.window(Window { left, right, diagonal: corner.into() });
    }
    if let Some(lengths) = &lengths {
        options = options.key_lengths(lengths);
    }
    if let Some((_, attend, _)) = input.mask {
        let view = View::contiguous(&mask, mask_shape).expect("fits");
        let mask = if attend { Mask::attend(view) } else { Mask::ignore(view) };
        options = options.mask(mask.expect("four axes"));
    }
    if input.bias.is_some() {
        options = options.bias(Bias::new(View::contiguous(&bias, bias_shape).expect("fits")).expect("four axes"));
    }
    if let Some((_, corner)) = input.alibi {
        // A far diagonal makes all scores of a row large, and their f32 rounding with them.
        let near = match corner {
            Corner::Offset(offset) => Corner::Offset(offset % 256),
            Corner::Far(_) => Corner::TopLeft,
            corner => corner,
        };
        options = options.alibi(&slopes, near.into());
    }
    if let Some(cap) = input.softcap {
        options = options.softcap(f32::from(cap) / 8.0);
    }
    if input.sinks.is_some() {
        options = options.sinks(&sinks);
    }
    let levels = Level::available();
    options = options.level(levels[usize::from(input.level) % levels.len()]);

    let (out_strides, out_len) = layout[3];
    let mut out = vec![f32::from_bits(POISON); out_len];
    let mut lse = vec![0.0f32; batch * heads * l];
    let mut weights = vec![0.0f32; batch * heads * l * s];
    let outputs = Outputs::new(HeadsMut::with_strides(&mut out, shapes[3], out_strides).expect("disjoint"))
        .lse(&mut lse)
        .weights(HeadsMut::bhsd(&mut weights, scores).expect("fits"));
    let result = multi_head_with(&q, &k, &v, outputs, &options);
    let expected = reference::multi_head(&q, &k, &v, &options);
    let expected = match (result, expected) {
        (Err(ours), Err(theirs)) => {
            assert_eq!(ours, theirs);
            assert!(out.iter().all(|x| x.to_bits() == POISON), "written on error");
            return;
        }
        (Ok(()), Ok(expected)) => expected,
        (ours, theirs) => panic!("{ours:?} against {:?}", theirs.map(|_| ())),
    };
    check_out(&out, shapes[3], out_strides, &expected.out);
    lse.iter().zip(&expected.lse).for_each(|(&x, &y)| close(x, y, "lse"));
    weights.iter().zip(&expected.weights).for_each(|(&x, &y)| close(x, y, "weights"));
}

fuzz_target!(|input: Input| {
    match input.types {
        [Type::F32, Type::F32, Type::F32] => run::<f32, f32, f32>(&input),
        [Type::F32, Type::F16, _] => run::<f32, f16, f16>(&input),
        [Type::F32, _, _] => run::<f32, bf16, f16>(&input),
        [Type::F16, _, _] => run::<f16, f16, f32>(&input),
        [Type::Bf16, _, _] => run::<bf16, bf16, bf16>(&input),
    }
});
