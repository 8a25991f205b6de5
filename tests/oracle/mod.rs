//! Whole attention calls as owned values: how to make them, run them in poisoned memory, and judge what comes out.
#![allow(dead_code, unused_imports, reason = "each test crate uses a part of it")]

mod options;
mod tolerance;

use core::fmt::Display;

use half::{bf16, f16};
use polyhead::{Element, Heads, HeadsMut, Level, Options, Outputs, Shape, multi_head, multi_head_with, reference};

use crate::support::{
    Arrangement, Bits, Edges, PoisonedInput, PoisonedList, PoisonedOutput, Rng, assert_same_bits, is_close,
};
pub(crate) use options::{BiasTable, MaskTable, Opts, table_shape};
pub(crate) use tolerance::Expected;

/// An element type, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}
use Dtype::{Bf16, F16, F32};

impl Dtype {
    /// The nearest value of the type.
    pub(crate) fn round(self, x: f32) -> f32 {
        match self {
            F32 => x,
            F16 => f16::from_f32(x).to_f32(),
            Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// Largest relative error of `round`, and the largest absolute one among subnormals.
    pub(crate) fn unit(self) -> (f64, f64) {
        match self {
            F32 => (2f64.powi(-24), 0.0),
            F16 => (2f64.powi(-11), 2f64.powi(-25)),
            Bf16 => (2f64.powi(-8), 0.0),
        }
    }

    pub(crate) fn largest(self) -> f32 {
        match self {
            F32 => f32::MAX,
            F16 => f16::MAX.to_f32(),
            Bf16 => bf16::MAX.to_f32(),
        }
    }
}

/// Types of q, k, v and out: each alone, and mixtures in which no two operands agree.
pub(crate) const TYPES: [[Dtype; 4]; 9] = [
    [F32, F32, F32, F32],
    [F16, F16, F16, F16],
    [Bf16, Bf16, Bf16, Bf16],
    [F32, F16, F16, F32],
    [F32, Bf16, F16, Bf16],
    [Bf16, F32, F16, F32],
    [F16, Bf16, F32, F16],
    [Bf16, Bf16, Bf16, F32],
    [F16, F16, F16, F32],
];
pub(crate) const ALL_F32: [Dtype; 4] = TYPES[0];

/// Calls a function generic over the types of q, k, v and out.
macro_rules! with_types {
    ($types:expr, $f:ident($($arg:expr),*)) => {
        match $types {
            [F32, F32, F32, F32] => $f::<f32, f32, f32, f32>($($arg),*),
            [F16, F16, F16, F16] => $f::<f16, f16, f16, f16>($($arg),*),
            [Bf16, Bf16, Bf16, Bf16] => $f::<bf16, bf16, bf16, bf16>($($arg),*),
            [F32, F16, F16, F32] => $f::<f32, f16, f16, f32>($($arg),*),
            [F32, Bf16, F16, Bf16] => $f::<f32, bf16, f16, bf16>($($arg),*),
            [Bf16, F32, F16, F32] => $f::<bf16, f32, f16, f32>($($arg),*),
            [F16, Bf16, F32, F16] => $f::<f16, bf16, f32, f16>($($arg),*),
            [Bf16, Bf16, Bf16, F32] => $f::<bf16, bf16, bf16, f32>($($arg),*),
            [F16, F16, F16, F32] => $f::<f16, f16, f16, f32>($($arg),*),
            other => panic!("{other:?} is not in TYPES"),
        }
    };
}

/// Where the operands of a call lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) q: Arrangement,
    pub(crate) k: Arrangement,
    pub(crate) v: Arrangement,
    pub(crate) out: Arrangement,
    pub(crate) weights: Arrangement,
}

impl Places {
    pub(crate) const PACKED: Self = Self {
        q: Arrangement::Bhsd,
        k: Arrangement::Bhsd,
        v: Arrangement::Bhsd,
        out: Arrangement::Bhsd,
        weights: Arrangement::Bhsd,
    };
    /// NaN after every row and head of everything.
    pub(crate) const GAPS: Self = Self {
        q: Arrangement::RowGaps(3),
        k: Arrangement::RowGaps(5),
        v: Arrangement::RowGaps(1),
        out: Arrangement::RowGaps(2),
        weights: Arrangement::RowGaps(7),
    };
}

/// What is asked for besides the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Out,
    Lse,
    Weights,
    Averaged,
}

/// A call: operands as `f32` values that are exact in their types, packed (batch, heads, seq, dim).
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) shape: Shape,
    pub(crate) types: [Dtype; 4],
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) options: Opts,
    pub(crate) places: Places,
    /// Of all memory that the call reads or writes.
    pub(crate) edges: Edges,
}

/// What came out, packed; halves as the `f32` of the same value.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    pub(crate) out: Vec<f32>,
    /// Empty if not wanted.
    pub(crate) lse: Vec<f32>,
    /// Empty if not wanted.
    pub(crate) weights: Vec<f32>,
}

/// A shape in the order batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v.
pub(crate) fn shape(sizes: [usize; 7]) -> Shape {
    let [batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v] = sizes;
    Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v }
}

pub(crate) fn q_shape(s: &Shape) -> [usize; 4] {
    [s.batch, s.num_heads, s.seqlen_q, s.head_dim]
}
pub(crate) fn k_shape(s: &Shape) -> [usize; 4] {
    [s.batch, s.num_kv_heads, s.seqlen_k, s.head_dim]
}
pub(crate) fn v_shape(s: &Shape) -> [usize; 4] {
    [s.batch, s.num_kv_heads, s.seqlen_k, s.head_dim_v]
}
pub(crate) fn out_shape(s: &Shape) -> [usize; 4] {
    [s.batch, s.num_heads, s.seqlen_q, s.head_dim_v]
}

impl Call {
    /// Normal operands, no option, memory with gaps; edges in turn, as the sizes go.
    pub(crate) fn random(shape: Shape, types: [Dtype; 4], rng: &mut Rng) -> Self {
        let mut normals = |shape: [usize; 4], dtype: Dtype| -> Vec<f32> {
            (0..shape.iter().product()).map(|_| dtype.round(rng.normal())).collect()
        };
        let (q, k, v) = (
            normals(q_shape(&shape), types[0]),
            normals(k_shape(&shape), types[1]),
            normals(v_shape(&shape), types[2]),
        );
        let mut options = Opts::default();
        if shape.head_dim == 0 {
            options.scale = Some(1.0);
        }
        let Shape { seqlen_q, seqlen_k, head_dim, head_dim_v, .. } = shape;
        let edges = Edges::turn(seqlen_q + seqlen_k + head_dim + head_dim_v);
        Self { shape, types, q, k, v, options, places: Places::GAPS, edges }
    }

    /// q = 0 and V = 1, 2, 3, ... in every column of every head: each output is the mean of the keys seen, counted from 1.
    pub(crate) fn ramp(shape: Shape) -> Self {
        let mut call = Self::random(shape, ALL_F32, &mut Rng::new(1));
        call.q.fill(0.0);
        for (at, x) in call.v.iter_mut().enumerate() {
            *x = (at / shape.head_dim_v % shape.seqlen_k + 1) as f32;
        }
        call
    }

    pub(crate) fn options(mut self, options: Opts) -> Self {
        self.options = options;
        self
    }

    pub(crate) fn places(mut self, places: Places) -> Self {
        self.places = places;
        let settle =
            |data: &mut Vec<f32>, shape, place| *data = PoisonedInput::new(data.as_slice(), shape, place).packed();
        settle(&mut self.q, q_shape(&self.shape), places.q);
        settle(&mut self.k, k_shape(&self.shape), places.k);
        settle(&mut self.v, v_shape(&self.shape), places.v);
        self
    }

    /// Rows of scores, (batch, head, query).
    pub(crate) fn rows(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let Shape { batch, num_heads, seqlen_q, .. } = self.shape;
        let rows = if [batch, num_heads, seqlen_q].contains(&0) { 0 } else { batch * num_heads * seqlen_q };
        (0..rows).map(move |row| [row / seqlen_q / num_heads, row / seqlen_q % num_heads, row % seqlen_q])
    }

    pub(crate) fn kv_head(&self, head: usize) -> usize {
        head / (self.shape.num_heads / self.shape.num_kv_heads)
    }

    /// Where key `key` of query head `head` begins in `k`, in units of rows.
    pub(crate) fn key_row(&self, batch: usize, head: usize, key: usize) -> usize {
        (batch * self.shape.num_kv_heads + self.kv_head(head)) * self.shape.seqlen_k + key
    }

    /// Whether the options let a query see a key: the rule of the documentation, word by word.
    pub(crate) fn sees(&self, [b, h, i, j]: [usize; 4]) -> bool {
        self.options.sees(&self.shape, [b, h, i, j])
    }

    pub(crate) fn expected(&self) -> Expected {
        Expected::new(self)
    }

    /// Packed output with options that the call's own do not say.
    pub(crate) fn output(&self, options: &Options<'_>) -> Vec<f32> {
        let ([q, k, v], out_shape) = self.packed_operands();
        let mut out = vec![f32::NAN; out_shape.iter().product()];
        multi_head(&q, &k, &v, HeadsMut::bhsd(&mut out, out_shape).expect("packed"), options).expect("a valid call");
        out
    }

    /// As [`output`](Self::output), by the reference.
    pub(crate) fn reference_output(&self, options: &Options<'_>) -> Vec<f64> {
        let ([q, k, v], _) = self.packed_operands();
        reference::multi_head(&q, &k, &v, options).expect("a valid call").out
    }

    fn packed_operands(&self) -> ([Heads<'_, f32>; 3], [usize; 4]) {
        let s = &self.shape;
        let [q, k, v] = [(&self.q, q_shape(s)), (&self.k, k_shape(s)), (&self.v, v_shape(s))]
            .map(|(data, shape)| Heads::bhsd(data, shape).expect("packed"));
        ([q, k, v], [s.batch, s.num_heads, s.seqlen_q, s.head_dim_v])
    }

    pub(crate) fn reference(&self) -> reference::Attention {
        let [q, k, v] = self.packed_operands().0;
        self.options.with(|options| {
            reference::multi_head(&q, &k, &v, options)
                .unwrap_or_else(|error| panic!("{error}: {:?} {:?}", self.shape, self.options))
        })
    }

    /// Runs in poisoned memory. Asserts that every element wanted is written and no other.
    pub(crate) fn run(&self, level: Level, wanted: Wanted) -> Results {
        with_types!(self.types, run(self, level, wanted))
    }

    /// Runs on a level with out, LSE and weights, and with averaged weights, and compares all with the reference.
    #[track_caller]
    pub(crate) fn check(&self, level: Level, expected: &Expected, context: impl Display) -> Results {
        let results = self.run(level, Wanted::Weights);
        expected.check(self, level, &results, &context);
        let averaged = self.run(level, Wanted::Averaged);
        expected.check_averaged(self, level, &averaged, &context);
        // What else is asked for changes no bit of the output.
        assert_same_bits(&averaged.out, &results.out, format_args!("{context}: out beside averaged weights"));
        assert_same_bits(&self.run(level, Wanted::Out).out, &results.out, format_args!("{context}: out alone"));
        results
    }
}

fn run<Q: Bits, K: Bits, V: Bits, O: Bits>(call: &Call, level: Level, wanted: Wanted) -> Results {
    fn input<T: Bits>(edges: Edges, data: &[f32], shape: [usize; 4], place: Arrangement) -> PoisonedInput<T> {
        let exact = |&x: &f32| T::from_f32_nearest(x);
        PoisonedInput::within(edges, &data.iter().map(exact).collect::<Vec<T>>(), shape, place)
    }
    let &Call { ref shape, places, edges, .. } = call;
    let q = input::<Q>(edges, &call.q, q_shape(shape), places.q);
    let k = input::<K>(edges, &call.k, k_shape(shape), places.k);
    let v = input::<V>(edges, &call.v, v_shape(shape), places.v);
    let mut out = PoisonedOutput::<O>::within(edges, out_shape(shape), places.out);
    let planes = if wanted == Wanted::Averaged { 1 } else { shape.num_heads };
    let weights_shape = [shape.batch, planes, shape.seqlen_q, shape.seqlen_k];
    let mut weights = PoisonedOutput::<f32>::within(edges, weights_shape, places.weights);
    let mut lse = PoisonedList::<f32>::new(edges, shape.batch * shape.num_heads * shape.seqlen_q);
    let mut outputs = Outputs::new(out.view());
    if wanted != Wanted::Out {
        outputs = outputs.lse(lse.slice());
    }
    match wanted {
        Wanted::Weights => outputs = outputs.weights(weights.view()),
        Wanted::Averaged => outputs = outputs.averaged_weights(weights.view()),
        _ => {}
    }
    call.options
        .within(edges, |options| multi_head_with(&q.view(), &k.view(), &v.view(), outputs, &options.level(level)))
        .unwrap_or_else(|error| panic!("{error}: {:?} {:?}", call.shape, call.options));
    let context = format!("{} {wanted:?} {:?} {:?}", level.name(), call.types, call.shape);
    let has_weights = matches!(wanted, Wanted::Weights | Wanted::Averaged);
    if !has_weights {
        weights.assert_untouched(&context);
    }
    Results {
        out: out.packed(&context).into_iter().map(Element::to_f32).collect(),
        lse: if wanted == Wanted::Out { Vec::new() } else { lse.packed(format_args!("{context}: lse")) },
        weights: if has_weights { weights.packed(&context) } else { Vec::new() },
    }
}

impl Results {
    /// Asserts that all of it is the same bit for bit.
    #[track_caller]
    pub(crate) fn assert_same_bits(&self, other: &Self, context: impl Display) {
        assert_same_bits(&self.out, &other.out, format_args!("{context}: out"));
        assert_same_bits(&self.lse, &other.lse, format_args!("{context}: lse"));
        assert_same_bits(&self.weights, &other.weights, format_args!("{context}: weights"));
    }

    /// Out, LSE and weights of one row of scores.
    pub(crate) fn row(&self, shape: &Shape, [b, h, i]: [usize; 3]) -> (&[f32], &[f32], &[f32]) {
        fn part(data: &[f32], row: usize, width: usize) -> &[f32] {
            if data.is_empty() { data } else { &data[row * width..][..width] }
        }
        let row = (b * shape.num_heads + h) * shape.seqlen_q + i;
        (part(&self.out, row, shape.head_dim_v), part(&self.lse, row, 1), part(&self.weights, row, shape.seqlen_k))
    }

    /// Asserts that one row is the same bit for bit.
    #[track_caller]
    pub(crate) fn assert_same_row(&self, other: &Self, shape: &Shape, row: [usize; 3], context: impl Display) {
        let (a, b) = (self.row(shape, row), other.row(shape, row));
        assert_same_bits(a.0, b.0, format_args!("{context}: out of row {row:?}"));
        assert_same_bits(a.1, b.1, format_args!("{context}: lse of row {row:?}"));
        assert_same_bits(a.2, b.2, format_args!("{context}: weights of row {row:?}"));
    }
}
