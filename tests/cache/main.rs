//! The caches against the reference over the whole history, against each other bit for bit, and against models made of
//! vectors.

mod memory;
mod model;
#[path = "../oracle/mod.rs"]
mod oracle;
mod paged;
mod ring;
#[path = "../support/mod.rs"]
mod support;

use half::{bf16, f16};
use oracle::{Call, Dtype, Expected, Opts, Results, shape};
use polyhead::cache::{BlockTable, KvCache, KvShape, PagedCache};
use polyhead::{
    Diagonal, Element, Error, Heads, HeadsMut, Options, Outputs, Paged, Ragged, Result, Sequences, Window, multi_head,
    multi_head_with,
};
use support::{Bits, Edges, Memory, PoisonedList, Rng, assert_same_bits, levels};

const MAX: usize = usize::MAX;
const KV: KvShape = KvShape { num_kv_heads: 2, head_dim: 20, head_dim_v: 12 };
const GROUP: usize = 3;
const HEADS: usize = GROUP * KV.num_kv_heads;

/// Keys and values of some tokens, (token, head, dim).
#[derive(Clone, Debug, Default)]
struct Tokens {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Tokens {
    fn random(n: usize, rng: &mut Rng) -> Self {
        let mut normals = |dim| rng.normals(n * KV.num_kv_heads * dim, 1.0);
        Self { k: normals(KV.head_dim), v: normals(KV.head_dim_v) }
    }

    fn len(&self) -> usize {
        self.k.len() / (KV.num_kv_heads * KV.head_dim)
    }

    fn extend(&mut self, other: &Self) {
        self.k.extend(&other.k);
        self.v.extend(&other.v);
    }

    fn truncate(&mut self, len: usize) {
        self.k.truncate(len * KV.num_kv_heads * KV.head_dim);
        self.v.truncate(len * KV.num_kv_heads * KV.head_dim_v);
    }

    fn converted<S: Element>(&self) -> [Vec<S>; 2] {
        [&self.k, &self.v].map(|rows| rows.iter().map(|&x| S::from_f32_nearest(x)).collect())
    }

    fn rounded<T: Element>(&self) -> Self {
        let [k, v] = self.converted::<T>().map(|rows| rows.into_iter().map(Element::to_f32).collect());
        Self { k, v }
    }

    /// Calls `f` with keys and values (1, heads, n, dim).
    fn with<R>(&self, f: impl FnOnce(&Heads<'_, f32>, &Heads<'_, f32>) -> R) -> R {
        let view = |rows, dim| Heads::bshd(rows, [1, self.len(), KV.num_kv_heads, dim]).expect("packed");
        f(&view(&self.k, KV.head_dim), &view(&self.v, KV.head_dim_v))
    }
}

/// New tokens of some sequences and their queries, packed behind one another.
struct Chunk {
    tokens: Vec<Tokens>,
    starts: Vec<usize>,
    /// (row, head, dim).
    q: Vec<f32>,
}

impl Chunk {
    fn random(counts: &[usize], rng: &mut Rng) -> Self {
        let tokens: Vec<_> = counts.iter().map(|&n| Tokens::random(n, rng)).collect();
        let mut starts = vec![0];
        counts.iter().for_each(|n| starts.push(starts[starts.len() - 1] + n));
        let rows = counts.iter().sum::<usize>();
        Self { tokens, starts, q: rng.normals(rows * HEADS * KV.head_dim, 1.0) }
    }

    fn rows(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Of what is read and written, in turn as the rows go.
    fn edges(&self) -> Edges {
        Edges::turn(self.rows())
    }

    /// Calls `append` with the tokens of all sequences, of type `S`.
    fn append<S: Bits>(&self, append: impl FnOnce(&Ragged<'_, S>, &Ragged<'_, S>) -> Result<()>) {
        let mut all = Tokens::default();
        self.tokens.iter().for_each(|tokens| all.extend(tokens));
        let [k, v] = all.converted::<S>().map(|rows| Memory::from(self.edges(), &rows, S::INPUT));
        let starts = Memory::from(self.edges(), &self.starts, usize::MAX);
        let view = |rows, dim| Ragged::packed(rows, [self.rows(), KV.num_kv_heads, dim], starts.inner());
        let k = view(k.inner(), KV.head_dim).expect("packed");
        let v = view(v.inner(), KV.head_dim_v).expect("packed");
        append(&k, &v).expect("there is room");
    }

    /// Output (row, head, dim) and LSE (head, row) of an attention call.
    fn attend(&self, call: impl FnOnce(&Ragged<'_, f32>, Outputs<'_, f32>) -> Result<()>) -> [Vec<f32>; 2] {
        self.try_attend(call).expect("a good call")
    }

    /// The same, of a call that may refuse, and then writes nothing.
    fn try_attend(&self, call: impl FnOnce(&Ragged<'_, f32>, Outputs<'_, f32>) -> Result<()>) -> Result<[Vec<f32>; 2]> {
        let list = |len| PoisonedList::<f32>::new(self.edges(), len);
        let (mut out, mut lse) = (list(self.rows() * HEADS * KV.head_dim_v), list(self.rows() * HEADS));
        let q = Memory::from(self.edges(), &self.q, f32::INPUT);
        let q = Ragged::packed(q.inner(), [self.rows(), HEADS, KV.head_dim], &self.starts).expect("packed");
        let view = HeadsMut::bshd(out.slice(), [1, self.rows(), HEADS, KV.head_dim_v]).expect("packed");
        let result = call(&q, Outputs::new(view).lse(lse.slice()));
        if result.is_err() {
            [&out, &lse].into_iter().for_each(|list| list.assert_untouched("refused"));
        }
        result.map(|()| [out.packed("out"), lse.packed("lse")])
    }

    /// The call of one sequence over its whole history.
    fn call(&self, item: usize, history: &Tokens, dtype: Dtype, options: Opts) -> Call {
        let (first, l, s) = (self.starts[item], self.starts[item + 1] - self.starts[item], history.len());
        let sizes = shape([1, HEADS, KV.num_kv_heads, l, s, KV.head_dim, KV.head_dim_v]);
        let mut call = Call::random(sizes, [Dtype::F32, dtype, dtype, Dtype::F32], &mut Rng::new(0)).options(options);
        call.q = head_major(&self.q[first * HEADS * KV.head_dim..], l, HEADS, KV.head_dim);
        call.k = head_major(&history.k, s, KV.num_kv_heads, KV.head_dim);
        call.v = head_major(&history.v, s, KV.num_kv_heads, KV.head_dim_v);
        call
    }

    /// The part of the results of one sequence, packed.
    fn results(&self, item: usize, [out, lse]: &[Vec<f32>; 2]) -> Results {
        let (first, l) = (self.starts[item], self.starts[item + 1] - self.starts[item]);
        let out = head_major(&out[first * HEADS * KV.head_dim_v..], l, HEADS, KV.head_dim_v);
        let lse = (0..HEADS).flat_map(|head| lse[head * self.rows() + first..][..l].to_vec()).collect();
        Results { out, lse, weights: Vec::new() }
    }
}

/// Rows of (token, head, dim) as (head, token, dim).
fn head_major(rows: &[f32], tokens: usize, heads: usize, dim: usize) -> Vec<f32> {
    let row = |head: usize, token: usize| &rows[(token * heads + head) * dim..][..dim];
    (0..heads).flat_map(|head| (0..tokens).flat_map(move |token| row(head, token))).copied().collect()
}

fn dtype<T: Element>() -> Dtype {
    match T::NAME {
        "f32" => Dtype::F32,
        "f16" => Dtype::F16,
        _ => Dtype::Bf16,
    }
}

/// What an operand holds of each sequence, (token, head, dim): a query that sees only the key beside it gives its
/// value.
fn read<T: Element>(operand: &Paged<'_, T>, lengths: &[usize]) -> Vec<Vec<f32>> {
    let [batch, heads, longest, dim] = operand.shape();
    let (q, mut out) = (vec![0.0f32; dim], vec![f32::NAN; batch * longest * heads * dim]);
    let q = Heads::with_strides(&q, [batch, heads, longest, dim], [0, 0, 0, 1]).expect("broadcast");
    let only_itself = Window { left: Some(0), right: Some(0), diagonal: Diagonal::TopLeft };
    let view = HeadsMut::bshd(&mut out, [batch, longest, heads, dim]).expect("packed");
    multi_head(&q, operand, operand, view, &Options::new().window(only_itself)).expect("a good call");
    let rows = lengths.iter().enumerate();
    rows.map(|(i, len)| out[i * longest * heads * dim..][..len * heads * dim].to_vec()).collect()
}

/// Keys and values of a batch with `lengths`, with NaN behind each sequence, through a view.
fn plain<T: Element>(
    histories: &[Tokens],
    chunk: &Chunk,
    options: &Options<'_>,
    outputs: Outputs<'_, f32>,
) -> Result<()> {
    let lengths: Vec<usize> = histories.iter().map(Tokens::len).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let padded = |rows: fn(&Tokens) -> &Vec<f32>, dim: usize| -> Vec<T> {
        let mut all = Vec::new();
        for (i, history) in histories.iter().enumerate() {
            all.extend(rows(history).iter().map(|&x| T::from_f32_nearest(x)));
            all.resize((i + 1) * longest * KV.num_kv_heads * dim, T::from_f32_nearest(f32::NAN));
        }
        all
    };
    let (k, v) = (padded(|tokens| &tokens.k, KV.head_dim), padded(|tokens| &tokens.v, KV.head_dim_v));
    let q = Ragged::packed(&chunk.q, [chunk.rows(), HEADS, KV.head_dim], &chunk.starts)?;
    let k = Heads::bshd(&k, [lengths.len(), longest, KV.num_kv_heads, KV.head_dim])?;
    let v = Heads::bshd(&v, [lengths.len(), longest, KV.num_kv_heads, KV.head_dim_v])?;
    multi_head_with(&q, &k, &v, outputs, &options.key_lengths(&lengths))
}

/// Chunks of three sequences: prompts of several lengths, single tokens, drafts, nothing.
const CHUNKS: [[usize; 3]; 6] = [[130, 7, 0], [1, 1, 1], [1, 1, 16], [0, 20, 3], [1, 0, 1], [2, 130, 1]];

fn in_place_and_paged_are_right<T: Element, S: Bits>() {
    let rng = &mut Rng::new(17);
    let mut histories = vec![Tokens::default(); 3];
    let mut in_place = KvCache::<T>::new(KV, 3, 160).expect("memory");
    let mut paged: Vec<(PagedCache<T>, Vec<_>)> = [(16, 40), (64, 10), (3, 160), (5, 100), (1, 500), (1000, 3)]
        .map(|(page_len, pages)| {
            let mut cache = PagedCache::new(KV, pages, page_len).expect("memory");
            let ids = (0..3).map(|_| cache.create().expect("memory")).collect();
            (cache, ids)
        })
        .into();
    let mut table = BlockTable::new();
    let opts = Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() };
    for (step, counts) in CHUNKS.iter().enumerate() {
        let chunk = Chunk::random(counts, rng);
        chunk.append::<S>(|k, v| in_place.append_all(k, v));
        for (cache, ids) in &mut paged {
            chunk.append::<S>(|k, v| cache.append_all(ids, k, v));
        }
        for (history, tokens) in histories.iter_mut().zip(&chunk.tokens) {
            history.extend(&tokens.rounded::<S>().rounded::<T>());
        }
        let calls: Vec<Call> =
            (0..3).map(|item| chunk.call(item, &histories[item], dtype::<T>(), opts.clone())).collect();
        let expected: Vec<Expected> = calls.iter().map(Call::expected).collect();
        for &level in levels() {
            let context = format!("{} step {step} on {}", T::NAME, level.name());
            let options = Options::new().causal(Diagonal::BottomRight).level(level);
            let results = chunk.attend(|q, outputs| in_place.attend_with(q, outputs, &options));
            for item in 0..3 {
                expected[item].check(&calls[item], level, &chunk.results(item, &results), &context);
            }
            let same = chunk.attend(|_, outputs| plain::<T>(&histories, &chunk, &options, outputs));
            (0..2).for_each(|i| assert_same_bits(&results[i], &same[i], format_args!("{context}: plain")));
            for (cache, ids) in &paged {
                let batch = cache.batch(ids, &mut table).expect("ids");
                let same = chunk.attend(|q, outputs| batch.attend_with(q, outputs, &options));
                let what = format!("{context}: pages of {}", cache.page_len());
                (0..2).for_each(|i| assert_same_bits(&results[i], &same[i], &what));
            }
        }
    }
}

#[test]
fn in_place_and_paged_hold_f32() {
    in_place_and_paged_are_right::<f32, f32>();
    in_place_and_paged_are_right::<f32, bf16>();
}

#[test]
fn in_place_and_paged_hold_f16() {
    in_place_and_paged_are_right::<f16, f32>();
    in_place_and_paged_are_right::<f16, f16>();
}

#[test]
fn in_place_and_paged_hold_bf16() {
    in_place_and_paged_are_right::<bf16, f16>();
    in_place_and_paged_are_right::<bf16, bf16>();
}

#[test]
fn tokens_are_converted_from_any_strides() {
    // Elements 2 apart, widths over and under the 64 that are converted at once.
    fn check<T: Element, S: Element>() {
        for dim in [1, 3, 63, 64, 65, 130] {
            let shape = KvShape { num_kv_heads: 2, head_dim: dim, head_dim_v: dim };
            let rows: Vec<f32> = Rng::new(3).normals(3 * 2 * dim * 2, 1.0);
            let source: Vec<S> = rows.iter().map(|&x| S::from_f32_nearest(x)).collect();
            let strided = Heads::with_strides(&source, [1, 2, 3, dim], [0, 2 * dim, 4 * dim, 2]).expect("fits");
            let one_value = Heads::with_strides(&source, [1, 2, 3, dim], [0, 0, 0, 0]).expect("fits");
            let mut cache = KvCache::<T>::new(shape, 1, 6).expect("memory");
            cache.append(0, &strided, &one_value).expect("room");
            cache.append_all(&one_value, &strided).expect("room");
            let round = |x: S| T::from_f32_nearest(x.to_f32()).to_f32();
            let every_other: Vec<f32> = source.iter().step_by(2).map(|&x| round(x)).collect();
            let one = vec![round(source[0]); 3 * 2 * dim];
            let [k, v] = [cache.keys(), cache.values()].map(|operand| read(&operand, &[6]).concat());
            assert_same_bits(&k, &[&every_other[..], &one].concat(), format_args!("{} {} k {dim}", T::NAME, S::NAME));
            assert_same_bits(&v, &[&one[..], &every_other].concat(), format_args!("{} {} v {dim}", T::NAME, S::NAME));
        }
    }
    check::<f32, f32>();
    check::<f16, f32>();
    check::<f16, bf16>();
    check::<bf16, bf16>();
    check::<f32, f16>();
}

#[test]
fn in_place_truncates_and_refuses() {
    let rng = &mut Rng::new(5);
    let mut cache = KvCache::<f32>::new(KV, 2, 10).expect("memory");
    let (long, short) = (Tokens::random(8, rng), Tokens::random(3, rng));
    long.with(|k, v| cache.append(1, k, v)).expect("room");
    let full = Error::Full { what: "tokens", capacity: 10, needed: 11 };
    assert_eq!(short.with(|k, v| cache.append(1, k, v)), Err(full.clone()));
    // Item 0 has room, item 1 has not.
    let chunk = Chunk::random(&[3, 3], rng);
    let counts = |cache: &KvCache<f32>| cache.lengths().to_vec();
    let [k, v] = Tokens::random(6, rng).converted::<f32>();
    let k = Heads::bshd(&k, [2, 3, KV.num_kv_heads, KV.head_dim]).expect("packed");
    let v = Heads::bshd(&v, [2, 3, KV.num_kv_heads, KV.head_dim_v]).expect("packed");
    assert_eq!(cache.append_all(&k, &v), Err(full));
    assert_eq!((chunk.rows(), counts(&cache)), (6, vec![0, 8]));
    assert_same_bits(&read(&cache.keys(), &[0, 8])[1], &long.k, "after a refusal");
    cache.truncate(1, 9).expect("an item");
    assert_eq!(counts(&cache), [0, 8]);
    cache.truncate(1, 5).expect("an item");
    short.with(|k, v| cache.append(1, k, v)).expect("room");
    let mut kept = long.clone();
    kept.truncate(5);
    kept.extend(&short);
    assert_same_bits(&read(&cache.keys(), &[0, 8])[1], &kept.k, "k after truncation");
    assert_same_bits(&read(&cache.values(), &[0, 8])[1], &kept.v, "v after truncation");
    cache.clear();
    assert_eq!((counts(&cache), cache.batch(), cache.capacity(), cache.shape()), (vec![0, 0], 2, 10, KV));
    assert!(cache.bytes() >= 2 * 10 * KV.num_kv_heads * (KV.head_dim + KV.head_dim_v) * 4);
}

#[test]
fn in_place_errors_not_panics() {
    let mut cache = KvCache::<f32>::new(KV, 2, 4).expect("memory");
    let rows = [0.0f32; 400];
    let view = |shape: [usize; 4]| Heads::bhsd(&rows[..shape.iter().product()], shape).expect("packed");
    let (k, v) = (view([1, 2, 1, 20]), view([1, 2, 1, 12]));
    let item = |actual| Err(Error::Value { option: "item", expected: "an item of the batch", actual });
    assert_eq!(cache.append(2, &k, &v), item(2.0));
    assert_eq!(cache.truncate(MAX, 0), item(MAX as f64));
    let shape = |operand, axis, expected, actual| Err(Error::Shape { operand, axis, expected, actual });
    assert_eq!(cache.append_all(&k, &v), shape("k", "batch", 2, 1));
    assert_eq!(cache.append(0, &view([1, 3, 1, 20]), &v), shape("k", "heads", 2, 3));
    assert_eq!(cache.append(0, &k, &k), shape("v", "dim", 12, 20));
    assert_eq!(cache.append(0, &k, &view([1, 2, 2, 12])), shape("v", "seq", 1, 2));
    assert_eq!(cache.lengths(), [0, 0]);
    let mut out = [0.0; 72];
    let view = HeadsMut::bhsd(&mut out, [1, HEADS, 1, 12]).expect("packed");
    let q = Heads::bhsd(&rows[..120], [1, HEADS, 1, 20]).expect("packed");
    assert_eq!(cache.attend(&q, view, &Options::new()), shape("q", "batch", 2, 1));
    // Sizes that overflow, and sizes of nothing.
    let sizes = |num_kv_heads, head_dim, head_dim_v| KvShape { num_kv_heads, head_dim, head_dim_v };
    for (kv, batch, capacity) in [(sizes(MAX, MAX, 1), 1, 1), (sizes(1, 0, 3), 2, MAX / 2), (sizes(1, 1, 1), 1, MAX)] {
        let result = KvCache::<f16>::new(kv, batch, capacity);
        assert!(matches!(result, Err(Error::Memory { .. })), "{result:?}");
    }
    let result = KvCache::<f16>::new(sizes(0, 0, 0), MAX, 1);
    assert!(matches!(result, Err(Error::Value { option: "pages", .. })), "{result:?}");
    let mut empty = KvCache::<f32>::new(sizes(MAX, 0, MAX), 1, 0).expect("nothing");
    let nothing = Heads::<f32>::bhsd(&[], [1, MAX, 0, 0]).expect("nothing");
    let none = Heads::<f32>::bhsd(&[], [1, MAX, 0, MAX]).expect("nothing");
    assert_eq!(empty.append(0, &nothing, &none), Ok(()));
    let mut wide = KvCache::<f32>::new(sizes(1, 0, 0), 1, MAX).expect("nothing");
    let many = Heads::<f32>::bhsd(&[], [1, 1, MAX, 0]).expect("nothing");
    assert_eq!(wide.append_all(&many, &many), Ok(()));
    assert_eq!(wide.append_all(&many, &many), Err(Error::Full { what: "tokens", capacity: MAX, needed: MAX }));
    assert_eq!(wide.lengths(), [MAX]);
    assert_eq!(KvCache::<f32>::new(KV, 0, 7).expect("nothing").batch(), 0);
}
