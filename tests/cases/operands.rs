use core::fmt::Display;

use half::{bf16, f16};
use polyhead::reference::{self, Attention};
use polyhead::{
    Bias, Element, Heads, HeadsMut, Level, Mask, MultiHead, Options, Outputs, Shape, View, multi_head_with,
};

use crate::support::{Arrangement, Bits, PoisonedOutput, Rng, assert_all_close, assert_same_bits, levels, max_abs};

/// Numbers of queries around the edges of tiles (8, 16 and 32 on the three levels) and of tasks (128).
pub(crate) const EDGES_Q: [usize; 9] = [1, 7, 8, 9, 17, 32, 33, 128, 129];
/// Numbers of keys around the edges of vectors and of blocks (128).
pub(crate) const EDGES_K: [usize; 8] = [1, 2, 17, 127, 128, 129, 256, 257];

/// `heads`, `seqlen` and `dims` are those of queries and of keys, or of keys and of values.
pub(crate) fn shape(batch: usize, heads: (usize, usize), seqlen: (usize, usize), dims: (usize, usize)) -> Shape {
    Shape {
        batch,
        num_heads: heads.0,
        num_kv_heads: heads.1,
        seqlen_q: seqlen.0,
        seqlen_k: seqlen.1,
        head_dim: dims.0,
        head_dim_v: dims.1,
    }
}

/// A packed matrix.
pub(crate) fn table<T>(rows: usize, columns: usize, f: impl Fn(usize, usize) -> T) -> Vec<T> {
    (0..rows * columns).map(|at| f(at / columns, at % columns)).collect()
}

pub(crate) fn attend<const N: usize>(mask: &[bool], shape: [usize; N]) -> Mask<'_> {
    Mask::attend(View::contiguous(mask, shape).expect("a packed mask")).expect("up to four axes")
}

pub(crate) fn ignore<const N: usize>(mask: &[bool], shape: [usize; N]) -> Mask<'_> {
    Mask::ignore(View::contiguous(mask, shape).expect("a packed mask")).expect("up to four axes")
}

pub(crate) fn bias<const N: usize>(bias: &[f32], shape: [usize; N]) -> Bias<'_> {
    Bias::new(View::contiguous(bias, shape).expect("a packed bias")).expect("up to four axes")
}

/// Error allowed in an output relative to the largest value. Products of f16 and bf16 may be rounded to these types
/// once, and the output once more.
pub(crate) fn tolerance<T: Element>() -> f64 {
    match T::NAME {
        "f16" => 2.0 * f64::from(f16::EPSILON),
        "bf16" => 2.0 * f64::from(bf16::EPSILON),
        _ => 1e-5,
    }
}

/// All that a call gives, packed.
#[derive(Clone, Debug)]
pub(crate) struct Results<T> {
    pub(crate) out: Vec<T>,
    pub(crate) lse: Vec<f32>,
    pub(crate) weights: Vec<f32>,
}

impl<T: Bits> Results<T> {
    /// Of one call, with every output surrounded by what must not be touched.
    #[track_caller]
    pub(crate) fn of<K: Element, V: Element>(
        q: &Heads<'_, T>,
        k: &Heads<'_, K>,
        v: &Heads<'_, V>,
        options: &Options<'_>,
        context: impl Display,
    ) -> Self {
        let [batch, heads, seqlen_q, _] = q.shape();
        let [_, _, seqlen_k, head_dim_v] = v.shape();
        let mut out = PoisonedOutput::<T>::new([batch, heads, seqlen_q, head_dim_v], Arrangement::Bhsd);
        let mut weights = PoisonedOutput::<f32>::new([batch, heads, seqlen_q, seqlen_k], Arrangement::Bhsd);
        let mut lse = vec![f32::OUTPUT; batch * heads * seqlen_q];
        let outputs = Outputs::new(out.view()).lse(&mut lse).weights(weights.view());
        multi_head_with(q, k, v, outputs, options).unwrap_or_else(|error| panic!("{context}: {error}"));
        let written = lse.iter().all(|x| x.bits() != f32::OUTPUT.bits());
        assert!(written, "{context}: an LSE was not written");
        Self { out: out.packed(&context), lse, weights: weights.packed(&context) }
    }

    #[track_caller]
    pub(crate) fn assert_same_bits(&self, other: &Self, context: impl Display) {
        assert_same_bits(&self.out, &other.out, format_args!("{context}: out"));
        assert_same_bits(&self.lse, &other.lse, format_args!("{context}: LSE"));
        assert_same_bits(&self.weights, &other.weights, format_args!("{context}: weights"));
    }

    /// Compares with the reference, `largest` being the largest value. Rows that see nothing are zero exactly.
    #[track_caller]
    pub(crate) fn assert_close(&self, expected: &Attention, largest: f64, context: impl Display)
    where
        T: Into<f64>,
    {
        let (tol, atol) = (tolerance::<T>(), tolerance::<T>() * largest);
        assert_all_close(&self.out, &expected.out, atol, 0.0, format_args!("{context}: out"));
        assert_all_close(&self.lse, &expected.lse, tol, 1e-6, format_args!("{context}: LSE"));
        assert_all_close(&self.weights, &expected.weights, tol, 0.0, format_args!("{context}: weights"));
        let rows = expected.lse.len().max(1);
        let (width, keys) = (self.out.len() / rows, self.weights.len() / rows);
        for (row, _) in expected.lse.iter().enumerate().filter(|&(_, &lse)| lse == f64::NEG_INFINITY) {
            let zero = self.out[row * width..][..width].iter().all(|&x| x.into() == 0.0)
                && self.weights[row * keys..][..keys].iter().all(|&p| p == 0.0);
            assert!(zero, "{context}: row {row} sees nothing but is not zero");
        }
    }
}

/// Packed operands of a call.
#[derive(Clone, Debug)]
pub(crate) struct Operands<T = f32> {
    pub(crate) shape: Shape,
    pub(crate) q: Vec<T>,
    pub(crate) k: Vec<T>,
    pub(crate) v: Vec<T>,
}

impl<T: Bits + Into<f64>> Operands<T> {
    /// Normal numbers.
    pub(crate) fn random(shape: Shape, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let [q, k, v] = shapes(&shape).map(|sizes| rng.normals(sizes.iter().product(), 1.0));
        Self { shape, q, k, v }
    }

    /// All scores equal, and `v[j][..] = j + 1`: a query's output is one more than the mean index of what it sees.
    pub(crate) fn uni_ramp(shape: Shape) -> Self {
        let mut operands = Self::random(shape, 7);
        operands.q.fill(T::from_f32_nearest(0.0));
        operands.each_value(|_, key, _| (key + 1) as f32);
        operands
    }

    /// Sets V to `f(kv_head, key, column)`, alike for all items.
    pub(crate) fn each_value(&mut self, f: impl Fn(usize, usize, usize) -> f32) {
        let Shape { num_kv_heads, seqlen_k, head_dim_v, .. } = self.shape;
        for (at, v) in self.v.iter_mut().enumerate() {
            let row = at / head_dim_v;
            *v = T::from_f32_nearest(f(row / seqlen_k % num_kv_heads, row % seqlen_k, at % head_dim_v));
        }
    }

    /// Sets whole rows of K and V of every item and KV head.
    pub(crate) fn fill_keys(&mut self, keys: impl Fn(usize) -> bool, value: f32) {
        let Shape { seqlen_k, head_dim, head_dim_v, .. } = self.shape;
        for (data, width) in [(&mut self.k, head_dim), (&mut self.v, head_dim_v)] {
            for (row, elements) in data.chunks_exact_mut(width).enumerate() {
                if keys(row % seqlen_k) {
                    elements.fill(T::from_f32_nearest(value));
                }
            }
        }
    }

    pub(crate) fn views(&self) -> [Heads<'_, T>; 3] {
        let [q, k, v] = shapes(&self.shape);
        [(&self.q, q), (&self.k, k), (&self.v, v)].map(|(data, shape)| Heads::bhsd(data, shape).expect("packed"))
    }

    pub(crate) fn out_shape(&self) -> [usize; 4] {
        let [[batch, heads, seqlen_q, _], _, [_, _, _, head_dim_v]] = shapes(&self.shape);
        [batch, heads, seqlen_q, head_dim_v]
    }

    #[track_caller]
    pub(crate) fn run(&self, options: &Options<'_>, context: impl Display) -> Results<T> {
        let [q, k, v] = self.views();
        Results::of(&q, &k, &v, options, context)
    }

    /// As a plan, of only the output.
    #[track_caller]
    pub(crate) fn plan(&self, options: &Options<'_>, context: impl Display) -> Vec<T> {
        let mut out = vec![T::OUTPUT; self.out_shape().iter().product()];
        let [q, k, v] = self.views();
        let view = HeadsMut::bhsd(&mut out, self.out_shape()).expect("packed");
        let run = MultiHead::new(self.shape, options).and_then(|mut plan| plan.run(&q, &k, &v, view));
        run.unwrap_or_else(|error| panic!("{context}: {error}"));
        out
    }

    pub(crate) fn reference(&self, options: &Options<'_>) -> Attention {
        let [q, k, v] = self.views();
        reference::multi_head(&q, &k, &v, options).expect("a valid call")
    }

    /// Compares every level with the reference, and a call for the output alone with one that gives the weights too:
    /// bit for bit, unless the output is not a number, whose bits mean nothing. Returns the reference.
    #[track_caller]
    pub(crate) fn check(&self, options: &Options<'_>, context: impl Display) -> Attention {
        let expected = self.reference(options);
        for &level in levels() {
            let (options, context) = (options.level(level), format!("{context} on {}", level.name()));
            let results = self.run(&options, &context);
            results.assert_close(&expected, max_abs(&self.v), &context);
            let same = |x: &T| if (*x).into().is_nan() { T::INPUT } else { *x };
            let (all, alone) = (results.out.iter().map(same), self.plan(&options, &context));
            let alone: Vec<T> = alone.iter().map(same).collect();
            assert_same_bits(&alone, &all.collect::<Vec<_>>(), format_args!("{context}: without weights"));
        }
        expected
    }

    /// Checks, and compares all elements of each row of each head with one number.
    #[track_caller]
    pub(crate) fn assert_rows(&self, options: &Options<'_>, rows: &[f64], context: impl Display) {
        let expected = self.check(options, &context);
        let width = self.shape.head_dim_v;
        let rows: Vec<f64> = (0..expected.out.len()).map(|at| rows[at / width % self.shape.seqlen_q]).collect();
        assert_all_close(&expected.out, &rows, 1e-6 * max_abs(&rows), 0.0, format_args!("{context}: rows"));
    }
}

/// Shapes of q, k, v.
pub(crate) fn shapes(shape: &Shape) -> [[usize; 4]; 3] {
    let &Shape { batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v } = shape;
    [
        [batch, num_heads, seqlen_q, head_dim],
        [batch, num_kv_heads, seqlen_k, head_dim],
        [batch, num_kv_heads, seqlen_k, head_dim_v],
    ]
}

/// Runs a test for every level, with its name.
pub(crate) fn on_every_level(mut test: impl FnMut(Level, &str)) {
    for &level in levels() {
        test(level, level.name());
    }
}
