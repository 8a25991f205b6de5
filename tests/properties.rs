//! Random calls, all options at once, against the reference and against themselves. `PROPTEST_CASES` asks for more.
//!
//! How far a result may be from the reference, and why, is said in `tests/oracle/tolerance.rs`.

mod oracle;
mod support;

use oracle::{BiasTable, Call, Dtype, MaskTable, Opts, Places, TYPES, Wanted, shape, table_shape};
use polyhead::{Diagonal, Shape, Window};
use proptest::prelude::*;
use support::{Arrangement, Edges, Rng, cases_of_256, levels};

/// What a random call is made of; the rest comes from the seed. Shrinks to the smallest sizes and the fewest options.
#[derive(Clone, Debug)]
struct Recipe {
    batch: usize,
    kv_heads: usize,
    group: usize,
    lengths: [usize; 2],
    widths: [usize; 2],
    types: usize,
    /// A bit for each option.
    options: u16,
    places: [usize; 5],
    edges: Edges,
    seed: u64,
}

/// Lengths: short ones, and around the blocks of 128 and their multiples.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        6 => 0..40usize,
        2 => 40..140usize,
        1 => prop::sample::select(vec![127, 128, 129, 255, 256, 257, 290]),
    ]
}

fn width() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1..36usize, 1 => Just(0), 2 => prop::sample::select(vec![63, 64, 65, 80, 96, 128, 129])]
}

fn recipe() -> impl Strategy<Value = Recipe> {
    recipe_of(length(), length())
}

/// A few queries and up to several pieces of keys.
fn decoding() -> impl Strategy<Value = Recipe> {
    let keys = prop_oneof![
        2 => 0..300usize,
        2 => 900..3000usize,
        1 => prop::sample::select(vec![1023, 1024, 1025, 2047, 2048, 2049, 16_383, 16_384, 16_500]),
    ];
    recipe_of(1..19usize, keys)
}

fn recipe_of(
    queries: impl Strategy<Value = usize>,
    keys: impl Strategy<Value = usize>,
) -> impl Strategy<Value = Recipe> {
    let heads = (0..4usize, prop_oneof![1 => Just(0), 20 => 1..4usize], 1..6usize);
    let sizes = ((queries, keys).prop_map(|(l, s)| [l, s]), [width(), width()]);
    let edges = prop::sample::select(&Edges::ALL[..]);
    (heads, sizes, 0..TYPES.len(), 0..1024u16, prop::array::uniform5(0..8usize), edges, any::<u64>()).prop_map(
        |((batch, kv_heads, group), (lengths, widths), types, options, places, edges, seed)| {
            let mut recipe = Recipe { batch, kv_heads, group, lengths, widths, types, options, places, edges, seed };
            // What the reference does in a few milliseconds.
            let work = |r: &Recipe| {
                r.batch * r.kv_heads * r.group * r.lengths[0] * r.lengths[1] * (r.widths[0] + r.widths[1] + 10)
            };
            while work(&recipe) > 2_000_000 {
                let Recipe { batch, kv_heads, group, lengths, .. } = &mut recipe;
                match [&mut *batch, kv_heads, group].into_iter().find(|n| **n > 1) {
                    Some(n) => *n -= 1,
                    None if lengths[0] > 1 => lengths[0] /= 2,
                    None => lengths[1] /= 2,
                }
            }
            recipe
        },
    )
}

fn diagonal(s: &Shape, rng: &mut Rng) -> Diagonal {
    let offset = rng.below(s.seqlen_q + s.seqlen_k + 1) as isize - s.seqlen_q as isize;
    rng.pick(&[Diagonal::TopLeft, Diagonal::BottomRight, Diagonal::Offset(offset)])
}

/// Each option whose bit is set.
fn options(bits: u16, s: &Shape, rng: &mut Rng) -> Opts {
    let on = |bit: u16| bits >> bit & 1 == 1;
    let longest = s.seqlen_q.max(s.seqlen_k) + 1;
    let mut options = Opts::default();
    if on(0) || s.head_dim == 0 {
        options.scale = Some(rng.pick(&[0.125, 1.0, -0.5, 0.0, 1e-20, 3.0]));
    }
    if on(1) {
        options.causal = Some(diagonal(s, rng));
    }
    if on(2) {
        let mut side = || if rng.chance(0.2) { None } else { Some(rng.below(longest)) };
        let (left, right) = (side(), side());
        options.window = Some(Window { left, right, diagonal: diagonal(s, rng) });
        options.keep_first = if on(9) { rng.below(longest) } else { 0 };
    }
    if on(3) {
        options.key_lengths = Some((0..s.batch).map(|_| rng.below(s.seqlen_k + 1)).collect());
    }
    if on(4) {
        let seen = f64::from(rng.uniform(0.1, 1.0));
        options.mask = Some(MaskTable::random(table_shape(s, rng.below(16)), seen, rng.chance(0.5), rng));
    }
    if on(5) {
        let hidden = if rng.chance(0.5) { 0.0 } else { 0.3 };
        options.bias = Some(BiasTable::random(table_shape(s, rng.below(16)), hidden, rng));
    }
    if on(6) {
        options.alibi = Some(((0..s.num_heads).map(|_| rng.uniform(-0.05, 0.7)).collect(), diagonal(s, rng)));
    }
    if on(7) {
        options.softcap = Some(rng.pick(&[0.3, 2.0, 20.0, 1000.0]));
    }
    if on(8) {
        let mut sink = |_| if rng.chance(0.2) { f32::NEG_INFINITY } else { 3.0 * rng.normal() };
        options.sinks = Some((0..s.num_heads).map(&mut sink).collect());
    }
    options
}

fn places(choice: [usize; 5]) -> Places {
    let [q, k, v] = [0, 1, 2].map(|at| Arrangement::ALL[choice[at]]);
    let [out, weights] = [3, 4].map(|at| Arrangement::DISTINCT[choice[at] % 6]);
    Places { q, k, v, out, weights }
}

impl Recipe {
    fn call(&self) -> (Call, Rng) {
        let mut rng = Rng::new(self.seed);
        let Self { batch, kv_heads, group, lengths: [l, s], widths: [d, dv], .. } = *self;
        let shape = shape([batch, kv_heads * group, kv_heads, l, s, d, dv]);
        let mut call = Call::random(shape, TYPES[self.types], &mut rng);
        let size = rng.pick(&[1.0, 1.0, 1.0, 0.01, 5.0, 50.0]);
        call.q.iter_mut().for_each(|x| *x = call.types[0].round(*x * size));
        let options = options(self.options, &shape, &mut rng);
        call.edges = self.edges;
        (call.options(options).places(places(self.places)), rng)
    }
}

/// Puts `count` special values into a list of numbers.
fn sprinkle(data: &mut [f32], specials: &[f32], count: usize, dtype: Dtype, rng: &mut Rng) {
    for _ in 0..if data.is_empty() { 0 } else { count } {
        let at = rng.below(data.len());
        let value = rng.pick(specials);
        data[at] = if value.is_finite() { dtype.round(value.clamp(-dtype.largest(), dtype.largest())) } else { value };
    }
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
const TINY: f32 = 1e-42;

/// NaN, infinities, zeros of either sign, subnormal and huge numbers in everything. Not so huge that a score or a sum of
/// values, finite in f64, overflows in f32 ("+inf follows IEEE in f32 arithmetic").
fn add_specials(call: &mut Call, rng: &mut Rng) {
    let count = |rng: &mut Rng| rng.pick(&[0, 0, 1, 3]);
    let scores = [NAN, INF, -INF, -0.0, 0.0, TINY, 1e17, -1e17];
    let (in_q, in_k, in_v) = (count(rng), count(rng), count(rng));
    sprinkle(&mut call.q, &scores, in_q, call.types[0], rng);
    sprinkle(&mut call.k, &scores, in_k, call.types[1], rng);
    let values = if call.types[3] == Dtype::F16 {
        [NAN, INF, -INF, -0.0, 0.0, TINY, 6e4, -6e4]
    } else {
        [NAN, INF, -INF, -0.0, 0.0, TINY, 1e30, -1e30]
    };
    sprinkle(&mut call.v, &values, in_v, call.types[2], rng);
    if let Some(bias) = &mut call.options.bias {
        let biases = [NAN, INF, -INF, -0.0, f32::MIN, 1e38, TINY];
        sprinkle(&mut bias.values, &biases, 2, Dtype::F32, rng);
    }
    // Strides of 0 have the same value in several places.
    let places = call.places;
    *call = call.clone().places(places);
}

/// An infinite value times a weight too small for f32 is 0 * inf: there the reference, with its f64 weights, is no judge.
fn excuse_flushed_weights(call: &Call, expected: &mut oracle::Expected, out: &[f32]) {
    let (s, dv) = (call.shape.seqlen_k, call.shape.head_dim_v);
    for (at, [b, h, _]) in call.rows().enumerate() {
        for x in 0..dv {
            let flushed = |j: &usize| {
                let value = call.v[call.key_row(b, h, *j) * dv + x];
                let weight = expected.attention.weights[at * s + j];
                value.is_infinite() && weight != 0.0 && weight < 1e-35
            };
            if (0..s).any(|j| flushed(&j)) {
                expected.attention.out[at * dv + x] = out[at * dv + x].into();
            }
        }
    }
}

/// A part of the queries as a call of its own, with every diagonal moved to where the part begins.
fn chunk(call: &Call, first: usize, count: usize) -> Call {
    let s = call.shape;
    let mut part = call.clone();
    part.shape.seqlen_q = count;
    let head = |head: &[f32]| head[first * s.head_dim..][..count * s.head_dim].to_vec();
    part.q = call.q.chunks((s.seqlen_q * s.head_dim).max(1)).flat_map(head).collect();
    let moved = |diagonal: Diagonal| match diagonal {
        Diagonal::TopLeft => Diagonal::Offset(first as isize),
        Diagonal::Offset(offset) => Diagonal::Offset(offset + first as isize),
        // Without lengths, which give every item an offset of its own.
        Diagonal::BottomRight => Diagonal::Offset(s.seqlen_k as isize - s.seqlen_q as isize + first as isize),
    };
    let options = &mut part.options;
    options.causal = options.causal.map(moved);
    options.window = options.window.map(|window| Window { diagonal: moved(window.diagonal), ..window });
    options.alibi = options.alibi.take().map(|(slopes, diagonal)| (slopes, moved(diagonal)));
    // Tables have gaps between heads of their own width only where they have the axis.
    if let Some(mask) = options.mask.as_mut().filter(|mask| mask.shape[2] == s.seqlen_q && s.seqlen_q > 1) {
        let width = mask.shape[3];
        let head = |head: &[bool]| head[first * width..][..count * width].to_vec();
        mask.values = mask.values.chunks((s.seqlen_q * width).max(1)).flat_map(head).collect();
        mask.shape[2] = count;
    }
    if let Some(bias) = options.bias.as_mut().filter(|bias| bias.shape[2] == s.seqlen_q && s.seqlen_q > 1) {
        let width = bias.shape[3];
        let head = |head: &[f32]| head[first * width..][..count * width].to_vec();
        bias.values = bias.values.chunks((s.seqlen_q * width).max(1)).flat_map(head).collect();
        bias.shape[2] = count;
    }
    part
}

proptest! {
    #![proptest_config(cases_of_256(96))]

    #[test]
    fn any_call_is_as_the_reference(recipe in recipe()) {
        let (call, _) = recipe.call();
        let expected = call.expected();
        for &level in levels() {
            call.check(level, &expected, "random call");
        }
    }

    #[test]
    fn any_decoding_call_is_as_the_reference(recipe in decoding()) {
        let (call, _) = recipe.call();
        let expected = call.expected();
        for &level in levels() {
            call.check(level, &expected, "decoding");
        }
    }

    #[test]
    fn any_call_with_special_values_is_as_the_reference(recipe in prop_oneof![recipe(), decoding()]) {
        let (mut call, mut rng) = recipe.call();
        add_specials(&mut call, &mut rng);
        let expected = call.expected();
        for &level in levels() {
            let results = call.run(level, Wanted::Weights);
            let mut expected = expected.clone();
            excuse_flushed_weights(&call, &mut expected, &results.out);
            expected.check(&call, level, &results, "special values");
            expected.check_averaged(&call, level, &call.run(level, Wanted::Averaged), "special values");
        }
    }
}

proptest! {
    #![proptest_config(cases_of_256(32))]

    /// What lies at some keys changes no bit of the rows that see none of them.
    #[test]
    fn any_hidden_key_is_unread(recipe in prop_oneof![recipe(), decoding()], share in 0.0..1.0f64) {
        let (call, mut rng) = recipe.call();
        let places = Places { k: Arrangement::RowGaps(1), v: Arrangement::RowGaps(2), ..call.places };
        let call = call.places(places);
        let Shape { num_kv_heads, seqlen_k, head_dim, head_dim_v, .. } = call.shape;
        // Keys from some position on, or anywhere.
        let from = rng.below(seqlen_k + 1);
        let chosen: Vec<bool> = (0..seqlen_k).map(|j| if share < 0.5 { j >= from } else { rng.chance(share - 0.5) }).collect();
        let mut fill = |k: &[f32], v: &[f32]| {
            let mut other = call.clone();
            for row in (0..call.shape.batch * num_kv_heads * seqlen_k).filter(|row| chosen[row % seqlen_k]) {
                other.k[row * head_dim..][..head_dim].fill_with(|| rng.pick(k));
                other.v[row * head_dim_v..][..head_dim_v].fill_with(|| rng.pick(v));
            }
            other
        };
        let (zeros, garbage) = (fill(&[0.0], &[0.0]), fill(&[NAN, INF, -INF, 6e4, 0.0], &[NAN, INF, -INF, 6e4, -0.0]));
        let halves = fill(&[NAN, 1.0], &[1.0, -1.0]);
        for &level in levels() {
            let clean = zeros.run(level, Wanted::Weights);
            for other in [&garbage, &halves] {
                let results = other.run(level, Wanted::Weights);
                for [b, h, i] in call.rows() {
                    if (0..seqlen_k).all(|j| !chosen[j] || !call.sees([b, h, i, j])) {
                        results.assert_same_row(&clean, &call.shape, [b, h, i], format_args!("{}", level.name()));
                    }
                }
            }
        }
    }

    /// Where the operands lie changes no bit.
    #[test]
    fn any_layout_gives_the_bits_of_packed_copies(recipe in prop_oneof![recipe(), decoding()]) {
        let (call, _) = recipe.call();
        let packed = Call { places: Places::PACKED, edges: Edges::Foreign, ..call.clone() };
        for &level in levels() {
            for wanted in [Wanted::Weights, Wanted::Averaged] {
                let (strided, packed) = (call.run(level, wanted), packed.run(level, wanted));
                strided.assert_same_bits(&packed, format_args!("{:?} on {}", call.places, level.name()));
            }
        }
    }
}

proptest! {
    #![proptest_config(cases_of_256(64))]

    /// A13: queries in chunks, each at its offset, give the rows of the whole call.
    #[test]
    fn any_chunks_of_queries_are_as_the_whole(recipe in recipe(), sizes in prop::collection::vec(1..70usize, 1..5)) {
        // Key lengths would move the bottom right of each item.
        let (call, _) = Recipe { options: recipe.options & !8, ..recipe }.call();
        let whole = call.expected();
        let (mut first, mut turn) = (0, 0);
        while first < call.shape.seqlen_q {
            let count = sizes[turn % sizes.len()].min(call.shape.seqlen_q - first);
            let part = chunk(&call, first, count);
            let rows = whole.rows_of_queries(&call, first, count);
            for &level in levels() {
                rows.check(&part, level, &part.run(level, Wanted::Weights), format_args!("queries {first}.."));
            }
            (first, turn) = (first + count, turn + 1);
        }
    }
}
