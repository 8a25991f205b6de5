//! A ring cache is the window and the kept tokens over the whole history, however often it has gone round.

use polyhead::cache::{Ring, RingCache};

use super::oracle::MaskTable;
use super::*;

/// ALiBi where no token is kept first: what is held is then as far away as it was.
fn slopes(ring: Ring) -> [f32; HEADS] {
    if ring.keep_first == 0 { [0.5, 0.25, 0.1, 0.0, 0.03, 1.0] } else { [0.0; HEADS] }
}

/// What a query sees: its window and the tokens kept, of the whole history.
fn visible(ring: Ring, l: usize, s: usize) -> Opts {
    let seen = |query: usize, key: usize| {
        let position = s - l + query;
        key <= position && (key + ring.window > position || key < ring.keep_first)
    };
    let alibi = Some((slopes(ring).to_vec(), Diagonal::BottomRight));
    Opts { mask: Some(MaskTable::plane(l, s, seen)), alibi, softcap: Some(5.0), ..Opts::default() }
}

fn rings(rng: &mut Rng, count: usize) -> Vec<Ring> {
    let random = |rng: &mut Rng| Ring {
        window: rng.pick(&[1, 2, 3, 7, 16, 33]),
        keep_first: rng.pick(&[0, 0, 1, 3, 4, 9]),
        max_chunk: rng.pick(&[1, 2, 5, 9]),
        page_len: rng.pick(&[1, 2, 3, 4, 5, 16]),
    };
    (0..count).map(|_| random(rng)).collect()
}

/// That what is held are the first pages of each history and its end, bit for bit.
fn check_contents<T: Element>(cache: &RingCache<T>, histories: &[Tokens], context: &str) {
    let Ring { keep_first, page_len, .. } = cache.ring();
    let (k, v) = (read(&cache.keys(), cache.held()), read(&cache.values(), cache.held()));
    for (item, history) in histories.iter().enumerate() {
        let held = cache.held()[item];
        let first = held.min(keep_first.next_multiple_of(page_len));
        let both = |rows: &[f32], dim: usize| {
            let row = KV.num_kv_heads * dim;
            [&rows[..first * row], &rows[rows.len() - (held - first) * row..]].concat()
        };
        assert_same_bits(&k[item], &both(&history.k, KV.head_dim), format_args!("{context}: keys of {item}"));
        assert_same_bits(&v[item], &both(&history.v, KV.head_dim_v), format_args!("{context}: values of {item}"));
    }
}

fn follows_the_whole_history<T: Element>(seed: u64, count: usize) {
    let rng = &mut Rng::new(seed);
    for ring in rings(rng, count) {
        let mut cache = RingCache::<T>::new(KV, 2, ring).expect("memory");
        let mut histories = vec![Tokens::default(); 2];
        let pages = (ring.window + ring.max_chunk - 2).div_ceil(ring.page_len) + 1;
        let held = (ring.keep_first.div_ceil(ring.page_len) + pages) * ring.page_len;
        // Items advance each by themselves, round and round; now and then the last tokens are taken back.
        let mut step = 0;
        while histories.iter().any(|history| history.len() < 3 * held.min(40)) {
            step += 1;
            let counts = [0, 1].map(|_| rng.below(ring.max_chunk + 1));
            let chunk = Chunk::random(&counts, rng);
            chunk.append::<f32>(|k, v| cache.append_all(k, v));
            for (history, tokens) in histories.iter_mut().zip(&chunk.tokens) {
                history.extend(&tokens.rounded::<T>());
            }
            let lengths: Vec<usize> = histories.iter().map(Tokens::len).collect();
            assert_eq!(cache.lengths(), lengths);
            for item in 0..2 {
                let least = lengths[item].min(ring.window - 1 + counts[item]);
                assert!(cache.held()[item] >= least && cache.held()[item] <= held, "{ring:?} {lengths:?}");
            }
            check_contents(&cache, &histories, &format!("{ring:?} step {step}"));
            let calls: Vec<Call> = (0..2)
                .map(|i| chunk.call(i, &histories[i], dtype::<T>(), visible(ring, counts[i], lengths[i])))
                .collect();
            let expected: Vec<Expected> = calls.iter().map(Call::expected).collect();
            for &level in levels() {
                let slopes = slopes(ring);
                let options = Options::new().alibi(&slopes, Diagonal::BottomRight).softcap(5.0).level(level);
                let results = chunk.attend(|q, out| cache.attend_with(q, out, &options));
                for item in 0..2 {
                    let context = format!("{ring:?} step {step} item {item}");
                    expected[item].check(&calls[item], level, &chunk.results(item, &results), context);
                }
            }
            if rng.chance(0.3) {
                let (item, back) = (rng.below(2), rng.below(ring.max_chunk + 1));
                let len = histories[item].len() - back.min(counts[item]);
                cache.truncate(item, len).expect("the last chunk can be taken back");
                histories[item].truncate(len);
            }
        }
    }
}

#[test]
fn rings_of_f32_follow_the_whole_history() {
    follows_the_whole_history::<f32>(1, 20);
}

#[test]
fn rings_of_halves_follow_the_whole_history() {
    follows_the_whole_history::<f16>(2, 5);
    follows_the_whole_history::<bf16>(3, 5);
}

#[test]
fn rings_keep_what_a_truncation_leaves() {
    // Any truncation that is granted is as if the tokens had never been; any that is not leaves all as it was.
    let rng = &mut Rng::new(8);
    let (mut granted, mut refused) = (0, 0);
    for ring in rings(rng, 150) {
        let mut cache = RingCache::<f32>::new(KV, 1, ring).expect("memory");
        let mut history = Tokens::default();
        while history.len() < 60 {
            let chunk = Chunk::random(&[1 + rng.below(ring.max_chunk)], rng);
            chunk.append::<f32>(|k, v| cache.append_all(k, v));
            history.extend(&chunk.tokens[0]);
        }
        let len = rng.below(history.len() + 3);
        let before = (cache.held()[0], read(&cache.keys(), cache.held()));
        match cache.truncate(0, len) {
            Ok(()) => {
                granted += 1;
                history.truncate(len);
                let chunk = Chunk::random(&[1 + rng.below(ring.max_chunk)], rng);
                chunk.append::<f32>(|k, v| cache.append_all(k, v));
                history.extend(&chunk.tokens[0]);
                let call = chunk.call(0, &history, Dtype::F32, visible(ring, chunk.rows(), history.len()));
                let slopes = slopes(ring);
                let options = Options::new().alibi(&slopes, Diagonal::BottomRight).softcap(5.0);
                let results = chunk.attend(|q, out| cache.attend_with(q, out, &options));
                let context = format!("{ring:?} truncated to {len}");
                call.expected().check(&call, levels()[levels().len() - 1], &chunk.results(0, &results), context);
            }
            Err(Error::Overwritten { needed, oldest }) => {
                refused += 1;
                assert!(needed < oldest && oldest < 60 + ring.max_chunk && len + ring.max_chunk < history.len());
                assert!(before == (cache.held()[0], read(&cache.keys(), cache.held())), "{ring:?} {len}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(granted > 20 && refused > 20, "{granted} {refused}");
}

#[test]
fn rings_refuse_what_they_cannot_do() {
    let ring = Ring { window: 4, keep_first: 1, max_chunk: 2, page_len: 2 };
    let mut cache = RingCache::<f32>::new(KV, 2, ring).expect("memory");
    let rng = &mut Rng::new(4);
    let too_many = Error::Full { what: "tokens of a chunk", capacity: 2, needed: 3 };
    assert_eq!(Tokens::random(3, rng).with(|k, v| cache.append(0, k, v)), Err(too_many));
    let item = Error::Value { option: "item", expected: "an item of the batch", actual: 2.0 };
    assert_eq!(Tokens::random(1, rng).with(|k, v| cache.append(2, k, v)), Err(item.clone()));
    assert_eq!(cache.truncate(2, 0), Err(item));
    assert_eq!((cache.lengths(), cache.batch(), cache.ring()), (&[0, 0][..], 2, ring));
    for _ in 0..20 {
        Tokens::random(1, rng).with(|k, v| cache.append(0, k, v)).expect("one token");
    }
    // Twelve queries of item 0, whose first saw tokens that are gone; none of item 1.
    let chunk = Chunk::random(&[12, 0], rng);
    let attend = |cache: &RingCache<f32>, chunk: &Chunk, options: &Options<'_>| {
        chunk.try_attend(|q, outputs| cache.attend_with(q, outputs, options)).map(|_| ())
    };
    let none = Options::new();
    assert_eq!(attend(&cache, &chunk, &none), Err(Error::Overwritten { needed: 5, oldest: 14 }));
    // The first two tokens are kept, as they share a page with the one to keep.
    let all = Chunk::random(&[20, 0], rng);
    assert_eq!(attend(&cache, &all, &none), Err(Error::Overwritten { needed: 2, oldest: 14 }));
    let one = Chunk::random(&[1, 0], rng);
    assert_eq!(attend(&cache, &one, &none), Ok(()));
    assert_eq!(attend(&cache, &one, &none.window(cache.window())), Ok(()));
    let other = Window { left: Some(1), ..cache.window() };
    assert!(matches!(attend(&cache, &one, &none.window(other)), Err(Error::Unsupported { .. })));
    assert!(matches!(attend(&cache, &one, &none.key_lengths(&[1, 0])), Err(Error::Unsupported { .. })));
    assert_eq!(cache.truncate(0, 3), Err(Error::Overwritten { needed: 2, oldest: 14 }));
    assert_eq!((cache.truncate(0, 2), cache.lengths(), cache.held()), (Ok(()), &[2, 0][..], &[2, 0][..]));
    cache.clear();
    assert_eq!((cache.lengths(), cache.held()), (&[0, 0][..], &[0, 0][..]));
    for bad in [Ring { window: 0, ..ring }, Ring { max_chunk: 0, ..ring }, Ring { page_len: 0, ..ring }] {
        assert!(matches!(RingCache::<f32>::new(KV, 1, bad), Err(Error::Value { actual: 0.0, .. })));
    }
    let huge = [
        Ring { window: MAX, ..ring },
        Ring { max_chunk: MAX, ..ring },
        Ring { keep_first: MAX, page_len: 1, ..ring },
        Ring { keep_first: MAX, page_len: MAX / 2, ..ring },
        Ring { window: MAX, max_chunk: 1, page_len: MAX, keep_first: 2 },
    ];
    for bad in huge {
        let result = RingCache::<f32>::new(KV, 1, bad);
        assert!(matches!(result, Err(Error::Memory { .. } | Error::Value { option: "pages", .. })), "{result:?}");
    }
}
