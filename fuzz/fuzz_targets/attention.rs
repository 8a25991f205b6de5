//! Attention with any options, strides and element types against the f64 reference: same error or same result, and nothing
//! written outside of the output.
#![no_main]

use arbitrary::Arbitrary;
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use polyhead::{
    Bias, Diagonal, Element, Heads, HeadsMut, Level, Mask, Options, Outputs, View, Window, multi_head_with, reference,
};

#[path = "../../tests/support/rng.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod rng;
use rng::Rng;

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
    /// Bits: axes of q, k and v (batch, heads, seq) that lie at stride 0.
    broadcast: u16,
    scale: Option<i8>,
    causal: Option<Corner>,
    window: Option<(Option<u8>, Option<u8>, Corner)>,
    keep_first: u8,
    lengths: Option<Vec<u16>>,
    /// Axes that are not broadcast, polarity, density.
    masks: [Option<([bool; 4], bool, u8)>; 2],
    /// Axes that are not broadcast, how many of 8 are -inf.
    biases: [Option<([bool; 4], u8)>; 2],
    alibi: Option<(i8, Corner)>,
    softcap: Option<u8>,
    sinks: Option<i8>,
    level: u8,
    /// 0: plain values; else every n-th element of k and v is NaN or infinite.
    special: u8,
    seed: u64,
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
                0 => rng.uniform(-1.0, 1.0),
                n if i % (usize::from(n) + 40) == 7 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3],
                _ => rng.uniform(-1.0, 1.0),
            };
            T::from_f32_nearest(x)
        })
        .collect()
}

/// Values up to 1, scores up to a few hundred: their rounding times the largest score bounds the error of a probability.
fn close<T: Element>(ours: T, theirs: f64, what: &str) {
    let unit = match T::NAME {
        "f32" => 0.0,
        "f16" => 1.0 / 2048.0,
        _ => 1.0 / 256.0,
    };
    let ours = f64::from(ours.to_f32());
    let same = ours == theirs || (ours.is_nan() && theirs.is_nan());
    let either_infinite = !ours.is_finite() && !theirs.is_finite();
    let allowed = 2e-4 * (1.0 + theirs.abs()) + unit * theirs.abs();
    assert!(same || either_infinite || (ours - theirs).abs() <= allowed, "{what}: {ours} {theirs}");
}

/// Every element of the view is as expected, every other one as it was.
fn check_out<O: Bits>(out: &[O], [batch, heads, l, dv]: [usize; 4], strides: [usize; 4], expected: &[f64]) {
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
        assert!(written || x.is_poison(), "written outside of the view");
    }
}

/// A NaN that nothing makes.
trait Bits: Element {
    const POISON: Self;
    fn is_poison(&self) -> bool;
}

macro_rules! bits {
    ($($type:ty: $poison:literal),*) => {
        $(impl Bits for $type {
            const POISON: Self = <$type>::from_bits($poison);
            fn is_poison(&self) -> bool {
                self.to_bits() == $poison
            }
        })*
    };
}
bits!(f32: 0x7fc0_1234, f16: 0x7e34, bf16: 0x7fd2);

/// What options refer to.
struct Tables {
    lengths: Option<Vec<usize>>,
    /// Values, shape, polarity.
    masks: [Option<(Vec<bool>, [usize; 4], bool)>; 2],
    biases: [Option<(Vec<f32>, [usize; 4])>; 2],
    slopes: Vec<f32>,
    sinks: Vec<f32>,
}

fn mask((values, shape, attend): &(Vec<bool>, [usize; 4], bool)) -> Mask<'_> {
    let view = View::contiguous(values, *shape).expect("fits");
    if *attend { Mask::attend(view) } else { Mask::ignore(view) }.expect("four axes")
}

fn bias((values, shape): &(Vec<f32>, [usize; 4])) -> Bias<'_> {
    Bias::new(View::contiguous(values, *shape).expect("fits")).expect("four axes")
}

impl Tables {
    fn new(input: &Input, scores: [usize; 4], rng: &mut Rng) -> Self {
        let [batch, heads, _, s] = scores;
        let broadcast =
            |keep: [bool; 4]| -> [usize; 4] { core::array::from_fn(|i| if keep[i] { scores[i] } else { 1 }) };
        let length = |list: &Vec<u16>, i: usize| usize::from(list.get(i).copied().unwrap_or(0)) % (s + 1);
        let lengths = input.lengths.as_ref().map(|list| (0..batch).map(|i| length(list, i)).collect());
        let masks = input.masks.map(|mask| {
            mask.map(|(keep, attend, density)| {
                let shape = broadcast(keep);
                (rng.bools(shape.iter().product(), f64::from(density % 8) / 8.0), shape, attend)
            })
        });
        let biases = input.biases.map(|bias| {
            bias.map(|(keep, infinite)| {
                let shape = broadcast(keep);
                let hidden = f64::from(infinite % 4) / 8.0;
                let mut value = || if rng.chance(hidden) { f32::NEG_INFINITY } else { rng.uniform(-3.0, 3.0) };
                ((0..shape.iter().product()).map(|_| value()).collect(), shape)
            })
        });
        let slopes = vec![f32::from(input.alibi.map_or(0, |(slope, _)| slope)) / 256.0; heads];
        let sinks = vec![f32::from(input.sinks.unwrap_or(0)) / 16.0; heads];
        Self { lengths, masks, biases, slopes, sinks }
    }

    fn options(&self, input: &Input) -> Options<'_> {
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
            options = options.keep_first(input.keep_first.into());
        }
        if let Some(lengths) = &self.lengths {
            options = options.key_lengths(lengths);
        }
        let [first, second] = self.masks.each_ref().map(|table| table.as_ref().map(mask));
        options = first.map_or(options, |mask| options.mask(mask));
        options = second.map_or(options, |mask| options.and_mask(mask));
        let [first, second] = self.biases.each_ref().map(|table| table.as_ref().map(bias));
        options = first.map_or(options, |bias| options.bias(bias));
        options = second.map_or(options, |bias| options.and_bias(bias));
        if let Some((_, corner)) = input.alibi {
            // A far diagonal makes all scores of a row large, and their f32 rounding with them.
            let near = match corner {
                Corner::Offset(offset) => Corner::Offset(offset % 256),
                Corner::Far(_) => Corner::TopLeft,
                corner => corner,
            };
            options = options.alibi(&self.slopes, near.into());
        }
        if let Some(cap) = input.softcap {
            options = options.softcap(f32::from(cap) / 8.0);
        }
        if input.sinks.is_some() {
            options = options.sinks(&self.sinks);
        }
        let levels = Level::available();
        options.level(levels[usize::from(input.level) % levels.len()])
    }
}

fn run<Q: Element, K: Element, V: Element, O: Bits>(input: &Input) {
    let mut rng = Rng::new(input.seed);
    let (batch, kv) = (usize::from(input.batch % 3), usize::from(input.kv_heads % 3));
    let heads = kv * usize::from(input.group % 4);
    let (l, s) = (usize::from(input.seqlen_q) % 70, usize::from(input.seqlen_k) % 300);
    let (d, dv) = (usize::from(input.head_dim) % 40, usize::from(input.head_dim_v) % 40);
    let shapes = [[batch, heads, l, d], [batch, kv, s, d], [batch, kv, s, dv], [batch, heads, l, dv]];
    let mut layout: Vec<_> = shapes.iter().zip(input.layouts).map(|(&shape, layout)| strides(shape, layout)).collect();
    for at in (0..9).filter(|at| input.broadcast >> at & 1 == 1) {
        layout[at / 3].0[at % 3] = 0;
    }
    let q = fill::<Q>(layout[0].1, &mut rng, 0);
    let k = fill::<K>(layout[1].1, &mut rng, input.special);
    let v = fill::<V>(layout[2].1, &mut rng, input.special);
    let q = Heads::with_strides(&q, shapes[0], layout[0].0).expect("fits");
    let k = Heads::with_strides(&k, shapes[1], layout[1].0).expect("fits");
    let v = Heads::with_strides(&v, shapes[2], layout[2].0).expect("fits");
    let scores = [batch, heads, l, s];
    let tables = Tables::new(input, scores, &mut rng);
    let options = tables.options(input);

    let (out_strides, out_len) = layout[3];
    let mut out = vec![O::POISON; out_len];
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
            assert!(out.iter().all(Bits::is_poison), "written on error");
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
        [Type::F32, Type::F32, Type::F32] => run::<f32, f32, f32, f32>(&input),
        [Type::F32, Type::F16, _] => run::<f32, f16, f16, f16>(&input),
        [Type::F32, _, _] => run::<f32, bf16, f16, bf16>(&input),
        [Type::F16, Type::F16, _] => run::<f16, f16, f16, f16>(&input),
        [Type::F16, _, _] => run::<f16, f16, f32, f32>(&input),
        [Type::Bf16, Type::Bf16, _] => run::<bf16, bf16, bf16, bf16>(&input),
        [Type::Bf16, _, _] => run::<bf16, bf16, bf16, f32>(&input),
    }
});
