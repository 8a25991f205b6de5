//! Pages that sequences share: who sees what, what is free, and what an error leaves.

use polyhead::cache::SequenceId;

use super::*;

/// Keys and values of sequences.
fn contents(cache: &PagedCache<f32>, ids: &[SequenceId]) -> Vec<[Vec<f32>; 2]> {
    let mut table = BlockTable::new();
    let lengths: Vec<usize> = ids.iter().map(|&id| cache.len(id).expect("an id")).collect();
    let batch = cache.batch(ids, &mut table).expect("ids");
    let (k, v) = (read(&batch.keys(), &lengths), read(&batch.values(), &lengths));
    k.into_iter().zip(v).map(|(k, v)| [k, v]).collect()
}

fn append(cache: &mut PagedCache<f32>, id: SequenceId, tokens: &Tokens) -> Result<()> {
    tokens.with(|k, v| cache.append(id, k, v))
}

fn joined(parts: &[&Tokens]) -> [Vec<f32>; 2] {
    let mut all = Tokens::default();
    parts.iter().for_each(|part| all.extend(part));
    [all.k, all.v]
}

#[test]
fn forks_share_pages_until_they_write() {
    let rng = &mut Rng::new(1);
    let [prompt, a1, b1, c1] = [10, 1, 2, 5].map(|n| Tokens::random(n, rng));
    let mut cache = PagedCache::<f32>::new(KV, 20, 4).expect("memory");
    let a = cache.create().expect("memory");
    append(&mut cache, a, &prompt).expect("room");
    let b = cache.fork(a).expect("an id");
    let c = cache.fork(b).expect("an id");
    assert_eq!(cache.free_pages(), 17);
    // The third page, of two tokens, is copied for b and for c; a is then alone with it.
    append(&mut cache, b, &b1).expect("room");
    assert_eq!(cache.free_pages(), 16);
    append(&mut cache, c, &c1).expect("room");
    assert_eq!(cache.free_pages(), 14);
    append(&mut cache, a, &a1).expect("room");
    assert_eq!(cache.free_pages(), 14);
    let expected = [joined(&[&prompt, &a1]), joined(&[&prompt, &b1]), joined(&[&prompt, &c1])];
    assert_eq!(contents(&cache, &[a, b, c]), expected);
    // A fork of a whole number of pages copies nothing.
    let mut half = prompt.clone();
    half.truncate(8);
    let d = cache.fork(a).expect("an id");
    cache.truncate(d, 8).expect("an id");
    append(&mut cache, d, &a1).expect("room");
    assert_eq!(cache.free_pages(), 13);
    // Within a page that others go on from, it does.
    cache.truncate(d, 7).expect("an id");
    assert_eq!(cache.free_pages(), 14);
    append(&mut cache, d, &a1).expect("room");
    assert_eq!(cache.free_pages(), 13);
    half.truncate(7);
    assert_eq!(contents(&cache, &[d, b, a, d])[..3], [joined(&[&half, &a1]), expected[1].clone(), expected[0].clone()]);
    // All pages come back, whoever goes first.
    for id in [a, d, b, c] {
        cache.remove(id).expect("an id");
    }
    assert_eq!((cache.free_pages(), cache.pages(), cache.page_len(), cache.shape()), (20, 20, 4, KV));
}

#[test]
fn exhaustion_leaves_everything_as_it_was() {
    let rng = &mut Rng::new(2);
    let [prompt, two, three, nine] = [6, 2, 3, 9].map(|n| Tokens::random(n, rng));
    let mut cache = PagedCache::<f32>::new(KV, 5, 4).expect("memory");
    let a = cache.create().expect("memory");
    append(&mut cache, a, &prompt).expect("room");
    let b = cache.fork(a).expect("an id");
    let c = cache.create().expect("memory");
    append(&mut cache, c, &two).expect("room");
    let before = contents(&cache, &[a, b, c]);
    assert_eq!(cache.free_pages(), 2);
    let full = |needed| Err(Error::Full { what: "pages", capacity: 2, needed });
    // Two tokens fill a's page, which is shared, so that they need a copy; nine need two pages more.
    assert_eq!(append(&mut cache, a, &nine), full(3));
    // A copy for either fork is not needed: the second to write has the page for itself.
    let chunk = Chunk::random(&[3, 3, 3], rng);
    let needs_four = |cache: &mut PagedCache<f32>, ids: &[SequenceId]| {
        let mut result = Ok(());
        chunk.append::<f32>(|k, v| {
            result = cache.append_all(ids, k, v);
            Ok(())
        });
        result
    };
    assert_eq!(needs_four(&mut cache, &[a, b, c]), full(4));
    assert_eq!((contents(&cache, &[a, b, c]), cache.free_pages()), (before.clone(), 2));
    let room = Chunk::random(&[2, 1, 2], rng);
    room.append::<f32>(|k, v| cache.append_all(&[a, b, c], k, v));
    assert_eq!(cache.free_pages(), 1);
    let expected =
        [&prompt, &prompt, &two].iter().zip(&room.tokens).map(|(old, new)| joined(&[old, new])).collect::<Vec<_>>();
    assert_eq!(contents(&cache, &[a, b, c]), expected);
    // Nothing has no need.
    append(&mut cache, a, &Tokens::random(4, rng)).expect("the last page");
    assert_eq!(append(&mut cache, b, &Tokens::default()), Ok(()));
    assert_eq!(append(&mut cache, c, &three), Err(Error::Full { what: "pages", capacity: 0, needed: 1 }));
    cache.remove(a).expect("an id");
    append(&mut cache, c, &three).expect("pages have come back");
}

#[test]
fn unknown_ids_are_errors() {
    let mut cache = PagedCache::<f32>::new(KV, 4, 4).expect("memory");
    let token = Tokens::random(1, &mut Rng::new(3));
    let gone = cache.create().expect("memory");
    append(&mut cache, gone, &token).expect("room");
    cache.remove(gone).expect("an id");
    // Its place goes to another one.
    let live = cache.create().expect("memory");
    append(&mut cache, live, &token).expect("room");
    let unknown = || Error::UnknownSequence;
    assert_eq!(append(&mut cache, gone, &token), Err(unknown()));
    assert_eq!(cache.truncate(gone, 0), Err(unknown()));
    assert_eq!(cache.remove(gone), Err(unknown()));
    assert_eq!(cache.fork(gone), Err(unknown()));
    assert_eq!(cache.len(gone), Err(unknown()));
    assert_eq!(cache.batch(&[live, gone], &mut BlockTable::new()).map(|_| ()), Err(unknown()));
    let mut other = PagedCache::<f32>::new(KV, 4, 4).expect("memory");
    assert_eq!(other.len(live), Err(unknown()));
    // Another cache that has seen the same has the same ids.
    let same = [other.create().expect("memory"), other.create().expect("memory")];
    assert_eq!(same[0], gone);
    assert_eq!((cache.len(live), cache.free_pages()), (Ok(1), 3));
    let twice = Chunk::random(&[1, 1], &mut Rng::new(4));
    twice.append::<f32>(|k, v| {
        let result = cache.append_all(&[live, live], k, v);
        assert_eq!(result, Err(Error::Value { option: "ids", expected: "each id once", actual: 1.0 }));
        Ok(())
    });
    assert_eq!(cache.len(live), Ok(1));
}

#[test]
fn sizes_of_nothing_and_of_too_much() {
    let sizes = |num_kv_heads, head_dim, head_dim_v| KvShape { num_kv_heads, head_dim, head_dim_v };
    let page_len = PagedCache::<f32>::new(KV, 4, 0);
    assert!(matches!(page_len, Err(Error::Value { option: "page_len", actual: 0.0, .. })), "{page_len:?}");
    let pages = PagedCache::<f32>::new(sizes(0, 0, 0), MAX, 1);
    assert!(matches!(pages, Err(Error::Value { option: "pages", .. })), "{pages:?}");
    let memory = PagedCache::<f32>::new(sizes(1, 1, 0), 3, MAX / 2);
    assert!(matches!(memory, Err(Error::Memory { .. })), "{memory:?}");
    let mut none = PagedCache::<f32>::new(KV, 0, 16).expect("nothing");
    let id = none.create().expect("memory");
    let full = Err(Error::Full { what: "pages", capacity: 0, needed: 1 });
    assert_eq!(append(&mut none, id, &Tokens::random(1, &mut Rng::new(5))), full);
    let mut table = BlockTable::new();
    assert_eq!(none.batch(&[id, id], &mut table).expect("ids").keys().shape(), [2, 2, 0, 20]);
    assert_eq!(none.batch(&[], &mut table).expect("no ids").values().shape(), [0, 2, 0, 12]);
    assert!(matches!(BlockTable::with_capacity(MAX, 2), Err(Error::Memory { bytes: MAX })));
    // Tokens without an element are counted all the same.
    let mut wide = PagedCache::<f32>::new(sizes(MAX, 0, 0), 3, MAX / 2).expect("nothing");
    let (a, many) = (wide.create().expect("memory"), Heads::<f32>::bhsd(&[], [1, MAX, MAX, 0]).expect("nothing"));
    assert_eq!(wide.append(a, &many, &many), Ok(()));
    let b = wide.fork(a).expect("an id");
    assert_eq!(wide.append(b, &many, &many), Err(Error::Full { what: "pages", capacity: 0, needed: MAX }));
    wide.truncate(b, MAX - 1).expect("an id");
    assert_eq!((wide.len(a), wide.len(b), wide.free_pages()), (Ok(MAX), Ok(MAX - 1), 0));
}
