//! Operands whose sequences have lengths of their own, packed behind one another or in pages: the bits of each sequence alone.
//! Partial results over keys, joined. Decoding step by step.

mod oracle;
mod support;

use half::{bf16, f16};
use oracle::{ALL_F32, Call, Opts, Wanted, shape};
use polyhead::{
    Diagonal, Element, Error, Heads, HeadsMut, Level, Mask, MultiHead, Options, Outputs, Paged, Ragged, Sequences,
    Window, attention, multi_head, multi_head_with,
};
use support::{Bits, Edges, Memory, PoisonedList, Rng, assert_all_close, assert_same_bits, levels};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const WIDTHS: [usize; 2] = [20, 11];

/// Sequences of so many queries and keys: prefill, decode, drafts, nothing at all.
const MIXED: [[usize; 2]; 9] =
    [[1, 70], [130, 130], [0, 5], [3, 1500], [20, 0], [1, 2100], [64, 300], [2, 1], [17, 17]];

/// One call for each sequence.
fn calls(lengths: &[[usize; 2]], options: &Opts, rng: &mut Rng) -> Vec<Call> {
    let [d, dv] = WIDTHS;
    let call = |&[l, s]: &[usize; 2]| Call::random(shape([1, HEADS, KV_HEADS, l, s, d, dv]), ALL_F32, rng);
    lengths.iter().map(call).map(|call| call.options(options.clone())).collect()
}

fn starts(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut starts = vec![0];
    lengths.for_each(|length| starts.push(starts[starts.len() - 1] + length));
    starts
}

/// (heads, seq, width) of each sequence, packed behind one another as (row, heads, width).
fn packed<T: Element>(parts: &[&[f32]], heads: usize, width: usize) -> Vec<T> {
    let mut all = Vec::new();
    for part in parts {
        let rows = part.len() / heads / width;
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            all.extend(part[(head * rows + row) * width..][..width].iter().map(|&x| T::from_f32_nearest(x)));
        }
    }
    all
}

/// All sequences in one call; out (row, head, width) and LSE (head, row).
fn run_ragged(calls: &[Call], options: &Options<'_>) -> (Vec<f32>, Vec<f32>) {
    let [d, dv] = WIDTHS;
    let (q_starts, k_starts) =
        (starts(calls.iter().map(|call| call.shape.seqlen_q)), starts(calls.iter().map(|call| call.shape.seqlen_k)));
    let (rows, keys) = (q_starts[calls.len()], k_starts[calls.len()]);
    let part = |f: fn(&Call) -> &[f32]| calls.iter().map(f).collect::<Vec<_>>();
    let edges = Edges::turn(rows + keys);
    let within = |data: Vec<f32>| Memory::from(edges, &data, f32::INPUT);
    let q = within(packed(&part(|call| &call.q), HEADS, d));
    let k = within(packed(&part(|call| &call.k), KV_HEADS, d));
    let v = within(packed(&part(|call| &call.v), KV_HEADS, dv));
    let [q_starts, k_starts] = [q_starts, k_starts].map(|starts| Memory::from(edges, &starts, usize::MAX));
    let (mut out, mut lse) = (PoisonedList::new(edges, rows * HEADS * dv), PoisonedList::new(edges, rows * HEADS));
    multi_head_with(
        &Ragged::packed(q.inner(), [rows, HEADS, d], q_starts.inner()).unwrap(),
        &Ragged::packed(k.inner(), [keys, KV_HEADS, d], k_starts.inner()).unwrap(),
        &Ragged::packed(v.inner(), [keys, KV_HEADS, dv], k_starts.inner()).unwrap(),
        Outputs::new(HeadsMut::bshd(out.slice(), [1, rows, HEADS, dv]).unwrap()).lse(lse.slice()),
        options,
    )
    .unwrap();
    (out.packed("out"), lse.packed("lse"))
}

/// Options without a table.
fn some_options() -> Vec<Opts> {
    let window = Window { left: Some(40), right: None, diagonal: Diagonal::BottomRight };
    let causal = Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() };
    vec![
        Opts::default(),
        causal.clone(),
        Opts { window: Some(window), keep_first: 3, ..causal.clone() },
        Opts { softcap: Some(2.0), sinks: Some(vec![0.5; HEADS]), ..causal.clone() },
        Opts { alibi: Some((vec![0.1; HEADS], Diagonal::BottomRight)), causal: Some(Diagonal::TopLeft), ..causal },
    ]
}

#[test]
fn ragged_sequences_have_the_bits_of_each_alone() {
    let mut rng = Rng::new(501);
    for (at, options) in some_options().iter().enumerate() {
        let calls = calls(&MIXED, options, &mut rng);
        let total: usize = calls.iter().map(|call| call.shape.seqlen_q).sum();
        for &level in levels() {
            let (out, lse) = options.with(|options| run_ragged(&calls, &options.level(level)));
            let mut first = 0;
            for call in &calls {
                let alone = call.run(level, Wanted::Lse);
                for [_, head, query] in call.rows() {
                    let (row, row_lse, _) = alone.row(&call.shape, [0, head, query]);
                    let at = (first + query) * HEADS + head;
                    let context = format!("options {at} on {} {:?} row {query}", level.name(), call.shape);
                    assert_same_bits(&out[at * WIDTHS[1]..][..WIDTHS[1]], row, &context);
                    assert_same_bits(&lse[head * total + first + query..][..1], row_lse, &context);
                }
                first += call.shape.seqlen_q;
            }
            assert!(at == 4 || out.iter().all(|x| x.is_finite()));
        }
    }
}

/// 64 sequences of decode only, on several threads: few blocks, whose keys are shared.
#[test]
fn ragged_bits_do_not_depend_on_threads() {
    let lengths: Vec<[usize; 2]> = (0..3).map(|i| [1 + i, 1500 + 700 * i]).collect();
    let calls = calls(&lengths, &Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() }, &mut Rng::new(502));
    for &level in levels() {
        let run = || calls[0].options.with(|options| run_ragged(&calls, &options.level(level)));
        let first = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(run);
        for threads in [2, 3, 8] {
            let again = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run);
            assert_same_bits(&again.0, &first.0, format_args!("{threads} threads on {}", level.name()));
            assert_same_bits(&again.1, &first.1, format_args!("{threads} threads on {}", level.name()));
        }
    }
}

/// A mask is of the longest sequences: (batch, 1, 1, seqlen_k).
#[test]
fn ragged_sequences_take_masks() {
    let lengths = [[3, 40], [5, 9]];
    let calls = calls(&lengths, &Opts::default(), &mut Rng::new(503));
    let seen: Vec<bool> = (0..80).map(|at| at % 3 != 1).collect();
    let mask = Mask::attend(polyhead::View::<bool, 4>::contiguous(&seen, [2, 1, 1, 40]).unwrap()).unwrap();
    for &level in levels() {
        let (out, _) = run_ragged(&calls, &Options::new().mask(mask).level(level));
        for (item, call) in calls.iter().enumerate() {
            let own = seen[item * 40..][..call.shape.seqlen_k].to_vec();
            let table = oracle::MaskTable { values: own, shape: [1, 1, 1, call.shape.seqlen_k], attend: true };
            let alone = call.clone().options(Opts { mask: Some(table), ..Opts::default() }).run(level, Wanted::Out);
            let first = [0, 3][item];
            for [_, head, query] in call.rows() {
                let at = ((first + query) * HEADS + head) * WIDTHS[1];
                assert_same_bits(&out[at..][..WIDTHS[1]], alone.row(&call.shape, [0, head, query]).0, level.name());
            }
        }
    }
}

/// A store of pages in random order, and the table of where each sequence's pages are.
fn pages<T: Element>(parts: &[&[f32]], width: usize, page_len: usize, order: &[u32]) -> Vec<T> {
    let mut store = vec![T::from_f32_nearest(f32::NAN); order.len() * KV_HEADS * page_len * width];
    let mut next = order.iter();
    for part in parts {
        let rows = part.len() / KV_HEADS / width;
        for first in (0..rows).step_by(page_len) {
            let page = *next.next().expect("enough pages") as usize;
            for (head, row) in
                (0..KV_HEADS).flat_map(|head| (first..rows.min(first + page_len)).map(move |r| (head, r)))
            {
                let from = &part[(head * rows + row) * width..][..width];
                let to = ((page * KV_HEADS + head) * page_len + row - first) * width;
                store[to..][..width].iter_mut().zip(from).for_each(|(to, &x)| *to = T::from_f32_nearest(x));
            }
        }
    }
    store
}

fn check_paged<T: Bits>(page_len: usize, queries: usize, lengths: &[usize], options: &Opts, level: Level) {
    let [d, dv] = WIDTHS;
    let mut rng = Rng::new(504 + page_len as u64);
    let pairs: Vec<[usize; 2]> = lengths.iter().map(|&s| [queries, s]).collect();
    let calls = calls(&pairs, options, &mut rng);
    let per_sequence = lengths.iter().max().unwrap().div_ceil(page_len) + 1;
    let count: usize = lengths.iter().map(|s| s.div_ceil(page_len)).sum();
    let mut order: Vec<u32> = (0..count as u32).collect();
    (0..count).for_each(|i| order.swap(i, rng.below(count)));
    let (mut table, mut used) = (vec![u32::MAX; per_sequence * lengths.len()], 0);
    for (row, s) in table.chunks_mut(per_sequence).zip(lengths) {
        let n = s.div_ceil(page_len);
        row[..n].copy_from_slice(&order[used..used + n]);
        used += n;
    }
    let part = |f: fn(&Call) -> &[f32]| calls.iter().map(f).collect::<Vec<_>>();
    let edges = Edges::turn(page_len + queries);
    let within = |data: Vec<T>| Memory::from(edges, &data, T::INPUT);
    let k = within(pages(&part(|call| &call.k), d, page_len, &order));
    let v = within(pages(&part(|call| &call.v), dv, page_len, &order));
    let store = |data, width| Heads::bhsd(data, [count, KV_HEADS, page_len, width]).unwrap();
    let (table, lengths_in) = (Memory::from(edges, &table, u32::MAX), Memory::from(edges, lengths, usize::MAX));
    let k = Paged::new(store(k.inner(), d), table.inner(), lengths_in.inner()).unwrap();
    let v = Paged::new(store(v.inner(), dv), table.inner(), lengths_in.inner()).unwrap();
    let q = Memory::from(edges, &part(|call| &call.q).concat(), f32::INPUT);
    let q = Heads::bhsd(q.inner(), [lengths.len(), HEADS, queries, d]).unwrap();
    let mut out = PoisonedList::<f32>::new(edges, lengths.len() * HEADS * queries * dv);
    let view = HeadsMut::bhsd(out.slice(), [lengths.len(), HEADS, queries, dv]).unwrap();
    options.within(edges, |options| multi_head(&q, &k, &v, view, &options.level(level))).unwrap();
    let out = out.packed(format_args!("pages of {page_len}"));
    for (call, out) in calls.iter().zip(out.chunks(HEADS * queries * dv)) {
        let halves = |data: &[f32]| data.iter().map(|&x| T::from_f32_nearest(x)).collect::<Vec<T>>();
        let (k, v, mut alone) = (halves(&call.k), halves(&call.v), vec![0.0f32; out.len()]);
        let (q, s) = (Heads::bhsd(&call.q, [1, HEADS, queries, d]).unwrap(), call.shape.seqlen_k);
        let kv = |data, width| Heads::bhsd(data, [1, KV_HEADS, s, width]).unwrap();
        let view = HeadsMut::bhsd(&mut alone, [1, HEADS, queries, dv]).unwrap();
        options.with(|options| multi_head(&q, &kv(&k, d), &kv(&v, dv), view, &options.level(level))).unwrap();
        let context = format!("pages of {page_len} {} on {} {:?}", T::NAME, level.name(), call.shape);
        assert_same_bits(out, &alone, context);
    }
}

#[test]
fn pages_have_the_bits_of_rows_side_by_side() {
    let all = some_options();
    for (at, page_len) in [1, 3, 16, 64, 128, 200].into_iter().enumerate() {
        for &level in levels() {
            for (queries, lengths) in [(1, [70, 1300, 0, 129]), (2, [5, 1, 64, 2050]), (40, [40, 130, 3, 41])] {
                let options = &all[(at + queries) % all.len()];
                check_paged::<f32>(page_len, queries, &lengths, options, level);
                check_paged::<f16>(page_len, queries, &lengths, options, level);
                check_paged::<bf16>(page_len, queries, &lengths, options, level);
            }
        }
    }
}

#[test]
fn sequences_that_do_not_fit_are_errors() {
    let data = [0.0f32; 60];
    let rows = Heads::bhsd(&data, [1, 2, 5, 6]).unwrap();
    let value = |result: Result<_, Error>, name: &str| match result {
        Err(Error::Value { option, .. }) => assert_eq!(option, name),
        other => panic!("{name}: {other:?}"),
    };
    for bad in [&[][..], &[0], &[1, 5], &[0, 4], &[0, 6], &[0, 3, 2, 5], &[0, usize::MAX, 5]] {
        value(Ragged::new(rows, bad).map(|_| ()), "starts");
    }
    assert!(matches!(
        Ragged::new(Heads::bhsd(&data, [2, 1, 5, 6]).unwrap(), &[0, 5]),
        Err(Error::Shape { operand: "ragged", axis: "batch", expected: 1, actual: 2 })
    ));
    let store = Heads::bhsd(&data, [5, 2, 2, 3]).unwrap();
    value(Paged::new(store, &[0, 1, 2, 3], &[4, 5]).map(|_| ()), "lengths");
    value(Paged::new(store, &[0, 1, 2, 5], &[4, 3]).map(|_| ()), "table");
    value(Paged::new(store, &[], &[1]).map(|_| ()), "lengths");
    value(Paged::new(Heads::bhsd(&data[..0], [5, 2, 0, 3]).unwrap(), &[0], &[1]).map(|_| ()), "lengths");
    assert!(matches!(Paged::new(store, &[0, 1, 2], &[2, 2]), Err(Error::Length { operand: "table", .. })));
    // An entry that no position needs may be anything; no sequence is a batch of none.
    let paged = Paged::new(store, &[0, 9, 2, 3], &[2, 4]).unwrap();
    assert_eq!((paged.shape(), Paged::new(store, &[], &[]).unwrap().shape()), ([2, 2, 4, 3], [0, 2, 0, 3]));

    let options = Options::new();
    let mut out = [7.0f32; 60];
    let q = Heads::bhsd(&data[..12], [2, 2, 1, 3]).unwrap();
    let other = Paged::new(store, &[0, 1, 2, 3], &[3, 4]).unwrap();
    fn view(out: &mut [f32]) -> HeadsMut<'_, f32> {
        HeadsMut::bhsd(out, [2, 2, 1, 3]).unwrap()
    }
    assert_eq!(
        multi_head(&q, &paged, &other, view(&mut out[..12]), &options).unwrap_err(),
        Error::Shape { operand: "v", axis: "seq", expected: 2, actual: 3 }
    );
    let long = options.key_lengths(&[3, 4]);
    assert!(matches!(
        multi_head(&q, &paged, &paged, view(&mut out[..12]), &long),
        Err(Error::Value { option: "key_lengths", .. })
    ));
    assert!(matches!(
        multi_head(&paged, &paged, &paged, view(&mut out[..12]), &options),
        Err(Error::Unsupported { .. })
    ));
    let ragged = Ragged::new(rows, &[0, 2, 5]).unwrap();
    let mut weights = [7.0f32; 36];
    let wanted = Outputs::new(HeadsMut::bhsd(&mut out, [1, 2, 5, 6]).unwrap())
        .weights(HeadsMut::bhsd(&mut weights, [2, 2, 3, 3]).unwrap());
    assert!(matches!(multi_head_with(&ragged, &ragged, &ragged, wanted, &options), Err(Error::Unsupported { .. })));
    assert!(matches!(
        multi_head(&ragged, &ragged, &ragged, HeadsMut::bhsd(&mut out, [2, 2, 3, 5]).unwrap(), &options),
        Err(Error::Shape { operand: "out", .. })
    ));
    assert_eq!(out, [7.0; 60]);
}

/// Decoding by a window in a long cache: the bits of the window's keys alone, on any number of threads, as only keys in sight are cut
/// into pieces. And with the first keys in sight, and what lies between hidden.
#[test]
fn a_window_in_a_long_cache_is_its_keys() {
    let mut rng = Rng::new(251);
    let ([heads, kv_heads, s, seen], [d, dv]) = ([16, 2, 6144, 2304], WIDTHS);
    let window = Window { left: Some(seen - 1), right: Some(0), diagonal: Diagonal::BottomRight };
    let long = Call::random(shape([1, heads, kv_heads, 1, s, d, dv]), ALL_F32, &mut rng);
    let tail = |data: &[f32], width: usize| {
        data.chunks_exact(s * width).flat_map(|head| &head[(s - seen) * width..]).copied().collect::<Vec<_>>()
    };
    let shape = shape([1, heads, kv_heads, 1, seen, d, dv]);
    let short = Call { shape, k: tail(&long.k, d), v: tail(&long.v, dv), ..long.clone() };
    let long = long.options(Opts { window: Some(window), ..Opts::default() });
    let kept = Options::new().window(window).keep_first(5);
    let (expected, expected_kept) = (short.expected(), long.reference_output(&kept));
    for &level in levels() {
        short.check(level, &expected, level.name());
        let alone = short.run(level, Wanted::Lse);
        let run = |threads: usize| {
            let plan = MultiHead::new(long.shape, &kept.level(level)).unwrap().explain();
            assert_eq!(plan.threads, threads, "large enough to be shared");
            long.run(level, Wanted::Lse)
                .assert_same_bits(&alone, format_args!("{threads} threads on {}", level.name()));
            assert_all_close(&long.output(&kept.level(level)), &expected_kept, 1e-6, 1e-5, level.name());
        };
        #[cfg(feature = "rayon")]
        for threads in [1, 2, 3] {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(|| run(threads));
        }
        #[cfg(not(feature = "rayon"))]
        run(1);
    }
}

/// Every cut of the keys into pieces, empty ones among them, joins to the whole.
#[test]
fn merged_pieces_are_the_whole() {
    let mut rng = Rng::new(505);
    let [l, s, d, dv] = [5, 90, 12, 70];
    let call = Call::random(shape([2, 4, 2, l, s, d, dv]), ALL_F32, &mut rng);
    let options = Options::new().causal(Diagonal::BottomRight);
    let q = Heads::bhsd(&call.q, [2, 4, l, d]).unwrap();
    let run = |from: usize, to: usize, level: Level| {
        let part = |data, width| {
            Heads::with_strides(data, [2, 2, to - from, width], [2 * s * width, s * width, width, 1]).unwrap()
        };
        let (mut out, mut lse) = (vec![f32::NAN; 2 * 4 * l * dv], vec![f32::NAN; 2 * 4 * l]);
        let outputs = Outputs::new(HeadsMut::bhsd(&mut out, [2, 4, l, dv]).unwrap()).lse(&mut lse);
        // The same diagonal, whatever part of the keys there is.
        let diagonal = Diagonal::Offset(s as isize - l as isize - from as isize);
        let (k, v) = (part(&call.k[from * d..], d), part(&call.v[from * dv..], dv));
        multi_head_with(&q, &k, &v, outputs, &options.causal(diagonal).level(level)).unwrap();
        (out, lse)
    };
    for &level in levels() {
        let (whole, whole_lse) = run(0, s, level);
        for cuts in [vec![], vec![0, 0, 45], vec![1, 86, 88, 90], vec![30, 60], (0..s).collect()] {
            let ends: Vec<usize> = cuts.iter().copied().chain([s]).collect();
            let firsts = core::iter::once(0).chain(cuts.iter().copied());
            let results: Vec<_> = firsts.zip(&ends).map(|(from, &to)| run(from, to, level)).collect();
            let view = |data| Heads::bhsd(data, [2, 4, l, dv]).unwrap();
            let pieces: Vec<_> = results.iter().map(|(out, lse)| (view(out), &lse[..])).collect();
            let (mut out, mut lse) = (vec![f32::NAN; whole.len()], vec![f32::NAN; whole_lse.len()]);
            attention::merge(&pieces, HeadsMut::bhsd(&mut out, [2, 4, l, dv]).unwrap(), &mut lse).unwrap();
            assert_all_close(&out, &whole, 2e-6, 1e-6, format_args!("{cuts:?} on {}", level.name()));
            assert_all_close(&lse, &whole_lse, 1e-6, 1e-6, format_args!("lse, {cuts:?} on {}", level.name()));
        }
    }
}

#[test]
fn merging_at_the_edges() {
    const INF: f32 = f32::INFINITY;
    let merge = |pieces: &[([f32; 2], [f32; 2])]| {
        let pieces: Vec<_> = pieces.iter().map(|(o, l)| (Heads::bhsd(o, [1, 1, 2, 1]).unwrap(), &l[..])).collect();
        let (mut out, mut lse) = ([7.0f32; 2], [7.0f32; 2]);
        attention::merge(&pieces, HeadsMut::bhsd(&mut out, [1, 1, 2, 1]).unwrap(), &mut lse).unwrap();
        (out, lse)
    };
    assert_eq!(merge(&[]), ([0.0; 2], [-INF; 2]));
    // A piece that saw nothing is not read, even if it holds NaN.
    assert_eq!(merge(&[([f32::NAN, 0.0], [-INF; 2]), ([3.0, 0.0], [1.0, -INF])]), ([3.0, 0.0], [1.0, -INF]));
    // Scores near the largest number do not overflow; a NaN stays in its row.
    let (out, lse) = merge(&[([2.0, 1.0], [3e38, f32::NAN]), ([4.0, 1.0], [3e38, 0.0])]);
    assert_eq!((out[0], lse[0]), (3.0, 3e38));
    assert!(out[1].is_nan() && lse[1].is_nan());
    let (short, long) = ([0.0f32; 1], [0.0f32; 2]);
    let (mut out, mut lse) = ([7.0f32; 2], [7.0f32; 2]);
    let piece = Heads::bhsd(&long, [1, 1, 2, 1]).unwrap();
    let mut fails = |pieces: &[_], lse: &mut [f32]| {
        attention::merge(pieces, HeadsMut::bhsd(&mut out, [1, 1, 2, 1]).unwrap(), lse).unwrap_err()
    };
    let wrong = Error::Length { operand: "lse", expected: 2, actual: 1 };
    assert_eq!(fails(&[(piece, &short[..])], &mut lse), wrong);
    assert_eq!(fails(&[(piece, &long[..])], &mut lse[..1]), wrong);
    let other = Heads::bhsd(&long, [1, 2, 1, 1]).unwrap();
    let wrong = Error::Shape { operand: "piece", axis: "heads", expected: 1, actual: 2 };
    assert_eq!(fails(&[(other, &long[..])], &mut lse), wrong);
    assert_eq!((out, lse), ([7.0; 2], [7.0; 2]));
}

/// Tokens in chunks of 64 against the keys so far are the rows of one call over all of them.
#[test]
fn chunked_prefill_is_one_shot_prefill() {
    let [s, d, dv] = [200, 16, 16];
    let causal = Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() };
    let whole = Call::random(shape([1, 4, 2, s, s, d, dv]), ALL_F32, &mut Rng::new(506)).options(causal.clone());
    for &level in levels() {
        let expected = whole.run(level, Wanted::Lse);
        for chunk in [1, 7, 64] {
            for first in (0..s).step_by(chunk) {
                let end = s.min(first + chunk);
                let rows = |data: &[f32], heads: usize, width: usize, from: usize| -> Vec<f32> {
                    (0..heads).flat_map(|h| data[(h * s + from) * width..(h * s + end) * width].to_vec()).collect()
                };
                let mut part = whole.clone();
                part.shape.seqlen_q = end - first;
                part.shape.seqlen_k = end;
                (part.q, part.k, part.v) =
                    (rows(&whole.q, 4, d, first), rows(&whole.k, 2, d, 0), rows(&whole.v, 2, dv, 0));
                let results = part.run(level, Wanted::Lse);
                for [_, head, query] in part.rows() {
                    let context = format!("chunk {chunk} from {first} on {}", level.name());
                    let (out, lse, _) = results.row(&part.shape, [0, head, query]);
                    let (all, all_lse, _) = expected.row(&whole.shape, [0, head, first + query]);
                    assert_all_close(out, all, 2e-6, 1e-6, &context);
                    assert_all_close(lse, all_lse, 2e-6, 1e-6, &context);
                }
            }
        }
    }
}
