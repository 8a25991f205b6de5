//! Caches under any sequence of calls: what they hold and what is free against vectors of tokens and counted pages,
//! attention against the f64 reference over the whole history.
#![no_main]

use std::rc::Rc;

use arbitrary::Arbitrary;
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use polyhead::cache::{BlockTable, KvCache, KvShape, PagedCache, Ring, RingCache, SequenceId};
use polyhead::{Diagonal, Element, Error, Heads, HeadsMut, Level, Options, Outputs, Ragged, Result, Window, reference};

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Operation {
    Create,
    Fork(u8),
    /// As many tokens as the second number says, to one sequence.
    Append(u8, u8),
    /// A number of tokens to every sequence.
    AppendAll([u8; 8]),
    Truncate(u8, u8),
    Remove(u8),
    InPlace(u8),
    TruncateInPlace(u8),
    Ring(u8),
    TruncateRing(u8),
    /// On this level, with so many queries.
    Attend(u8, u8),
}

#[derive(Arbitrary, Debug)]
struct Input {
    element: u8,
    kv_heads: u8,
    group: u8,
    dims: [u8; 2],
    pages: u8,
    page_len: u8,
    capacity: u8,
    /// Window, tokens kept, chunk, page_len.
    ring: [u8; 4],
    operations: Vec<Operation>,
}

/// SplitMix64 of a number, in [-1, 1).
fn value(seed: u64) -> f32 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Rows (token, head, dim) of numbered tokens.
fn rows<T: Element>(tokens: &[u64], width: usize, salt: u64) -> Vec<T> {
    let element = |&token: &u64, x: usize| T::from_f32_nearest(value(token << 20 ^ (x as u64) << 3 ^ salt));
    tokens.iter().flat_map(|token| (0..width).map(move |x| element(token, x))).collect()
}

/// A sequence of the paged cache: the pages have a count each, shared as they are.
#[derive(Clone)]
struct Sequence {
    id: SequenceId,
    tokens: Vec<u64>,
    pages: Vec<Rc<()>>,
}

struct World<T> {
    shape: KvShape,
    group: usize,
    paged: PagedCache<T>,
    sequences: Vec<Sequence>,
    in_place: KvCache<T>,
    in_place_tokens: Vec<u64>,
    ring: RingCache<T>,
    ring_tokens: Vec<u64>,
    next: u64,
}

impl<T: Element> World<T> {
    fn new(input: &Input) -> Self {
        let size = |x: u8, n: u8| usize::from(x % n);
        let shape = KvShape {
            num_kv_heads: size(input.kv_heads, 3),
            head_dim: size(input.dims[0], 20),
            head_dim_v: size(input.dims[1], 20),
        };
        let [window, keep_first, max_chunk, page_len] = input.ring;
        let ring = Ring {
            window: 1 + size(window, 40),
            keep_first: size(keep_first, 12),
            max_chunk: 1 + size(max_chunk, 10),
            page_len: 1 + size(page_len, 20),
        };
        Self {
            shape,
            group: size(input.group, 5),
            paged: PagedCache::new(shape, size(input.pages, 40), 1 + size(input.page_len, 9)).expect("memory"),
            sequences: Vec::new(),
            in_place: KvCache::new(shape, 1, size(input.capacity, 160)).expect("memory"),
            in_place_tokens: Vec::new(),
            ring: RingCache::new(shape, 1, ring).expect("memory"),
            ring_tokens: Vec::new(),
            next: 0,
        }
    }

    fn fresh(&mut self, n: usize) -> Vec<u64> {
        self.next += n as u64;
        (self.next - n as u64..self.next).collect()
    }

    /// Calls `f` with keys and values of sequences of new tokens.
    fn with_tokens<R>(
        shape: KvShape,
        tokens: &[Vec<u64>],
        f: impl FnOnce(&Ragged<'_, f32>, &Ragged<'_, f32>) -> R,
    ) -> R {
        let mut starts = vec![0];
        tokens.iter().for_each(|tokens| starts.push(starts[starts.len() - 1] + tokens.len()));
        let (all, KvShape { num_kv_heads: heads, head_dim, head_dim_v }) = (tokens.concat(), shape);
        let (k, v) = (rows(&all, heads * head_dim, 0), rows(&all, heads * head_dim_v, 1));
        let k = Ragged::packed(&k, [all.len(), heads, head_dim], &starts).expect("packed");
        let v = Ragged::packed(&v, [all.len(), heads, head_dim_v], &starts).expect("packed");
        f(&k, &v)
    }

    fn free(&self) -> usize {
        let mut used: Vec<_> = self.sequences.iter().flat_map(|sequence| &sequence.pages).map(Rc::as_ptr).collect();
        used.sort_unstable();
        used.dedup();
        self.paged.pages() - used.len()
    }

    /// Appends to some sequences; the model says whether there are enough pages.
    fn append(&mut self, at: &[usize], tokens: Vec<Vec<u64>>) {
        let (page_len, capacity, before) = (self.paged.page_len(), self.free(), self.sequences.clone());
        let ids: Vec<_> = at.iter().map(|&at| self.sequences[at].id).collect();
        let result = Self::with_tokens(self.shape, &tokens, |k, v| self.paged.append_all(&ids, k, v));
        let mut needed = 0;
        for (&at, tokens) in at.iter().zip(tokens) {
            let sequence = &mut self.sequences[at];
            let inside = !tokens.is_empty() && sequence.tokens.len() % page_len != 0;
            if let Some(page) = sequence.pages.last().filter(|_| inside) {
                let clones = before.iter().flat_map(|clone| &clone.pages).filter(|other| Rc::ptr_eq(page, other));
                if Rc::strong_count(page) - clones.count() > 1 {
                    sequence.pages.pop();
                    sequence.pages.push(Rc::new(()));
                    needed += 1;
                }
            }
            sequence.tokens.extend(tokens);
            let pages = sequence.tokens.len().div_ceil(page_len);
            needed += pages - sequence.pages.len();
            sequence.pages.resize_with(pages, Rc::default);
        }
        if needed > capacity {
            assert_eq!(result, Err(Error::Full { what: "pages", capacity, needed }));
            self.sequences = before;
        } else {
            assert_eq!(result, Ok(()));
        }
    }

    fn pick(&self, at: u8) -> Option<usize> {
        usize::from(at).checked_rem(self.sequences.len())
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Create if self.sequences.len() < 8 => {
                let id = self.paged.create().expect("memory");
                self.sequences.push(Sequence { id, tokens: Vec::new(), pages: Vec::new() });
            }
            Operation::Fork(at) if self.sequences.len() < 8 => {
                let Some(at) = self.pick(at) else { return };
                let id = self.paged.fork(self.sequences[at].id).expect("an id");
                self.sequences.push(Sequence { id, ..self.sequences[at].clone() });
            }
            Operation::Create | Operation::Fork(_) => {}
            Operation::Append(at, n) => {
                let Some(at) = self.pick(at) else { return };
                let tokens = self.fresh(usize::from(n % 64));
                self.append(&[at], vec![tokens]);
            }
            Operation::AppendAll(counts) => {
                let at: Vec<_> = (0..self.sequences.len()).collect();
                let tokens = at.iter().map(|&at| self.fresh(usize::from(counts[at] % 8))).collect();
                self.append(&at, tokens);
            }
            Operation::Truncate(at, len) => {
                let Some(at) = self.pick(at) else { return };
                let (sequence, page_len) = (&mut self.sequences[at], self.paged.page_len());
                self.paged.truncate(sequence.id, len.into()).expect("an id");
                sequence.tokens.truncate(len.into());
                sequence.pages.truncate(usize::from(len).div_ceil(page_len));
            }
            Operation::Remove(at) => {
                let Some(at) = self.pick(at) else { return };
                let gone = self.sequences.swap_remove(at).id;
                self.paged.remove(gone).expect("an id");
                assert_eq!(self.paged.remove(gone), Err(Error::UnknownSequence));
            }
            Operation::Attend(level, queries) => self.attend(level, usize::from(queries % 12)),
            fixed => self.apply_fixed(fixed),
        }
        assert_eq!(self.paged.free_pages(), self.free());
    }

    /// Operations on the caches of a fixed batch.
    fn apply_fixed(&mut self, operation: Operation) {
        match operation {
            Operation::InPlace(n) => {
                let tokens = self.fresh(usize::from(n % 64));
                let fits = self.in_place_tokens.len() + tokens.len() <= self.in_place.capacity();
                let new = [tokens];
                let result = Self::with_tokens(self.shape, &new, |k, v| self.in_place.append(0, k, v));
                assert_eq!(result.is_ok(), fits);
                self.in_place_tokens.extend(new[0].iter().filter(|_| fits));
            }
            Operation::TruncateInPlace(len) => {
                self.in_place.truncate(0, len.into()).expect("an item");
                self.in_place_tokens.truncate(len.into());
            }
            Operation::Ring(n) => {
                let new = [self.fresh(usize::from(n) % (self.ring.ring().max_chunk + 1))];
                Self::with_tokens(self.shape, &new, |k, v| self.ring.append_all(k, v)).expect("a chunk");
                self.ring_tokens.extend(&new[0]);
            }
            Operation::TruncateRing(back) => {
                let len = self.ring_tokens.len().saturating_sub(back.into());
                match self.ring.truncate(0, len) {
                    Ok(()) => self.ring_tokens.truncate(len),
                    Err(error) => assert!(matches!(error, Error::Overwritten { .. }), "{error}"),
                }
            }
            _ => {}
        }
        assert_eq!(self.in_place.lengths(), [self.in_place_tokens.len()]);
        assert_eq!(self.ring.lengths(), [self.ring_tokens.len()]);
    }

    fn attend(&self, level: u8, l: usize) {
        let levels = Level::available();
        let level = levels[usize::from(level) % levels.len()];
        let options = Options::new().causal(Diagonal::BottomRight).softmax_scale(0.5).level(level);
        let all: Vec<&[u64]> = self.sequences.iter().map(|sequence| &sequence.tokens[..]).collect();
        let ids: Vec<_> = self.sequences.iter().map(|sequence| sequence.id).collect();
        let mut table = BlockTable::new();
        let batch = self.paged.batch(&ids, &mut table).expect("ids");
        self.compare(&all, l, &options, |q, outputs| batch.attend_with(q, outputs, &options));
        let in_place = |q: &Heads<'_, f32>, outputs: Outputs<'_, f32>| self.in_place.attend_with(q, outputs, &options);
        self.compare(&[&self.in_place_tokens], l, &options, in_place);
        let Ring { window, keep_first, .. } = self.ring.ring();
        let window = Window { left: Some(window - 1), right: Some(0), diagonal: Diagonal::BottomRight };
        let ring = |q: &Heads<'_, f32>, outputs: Outputs<'_, f32>| self.ring.attend_with(q, outputs, &options);
        self.compare(&[&self.ring_tokens], l, &options.window(window).keep_first(keep_first), ring);
    }

    /// A call of `l` queries for each sequence against the reference over all its tokens.
    fn compare(
        &self,
        sequences: &[&[u64]],
        l: usize,
        options: &Options<'_>,
        call: impl FnOnce(&Heads<'_, f32>, Outputs<'_, f32>) -> Result<()>,
    ) {
        let KvShape { num_kv_heads: kv, head_dim: d, head_dim_v: dv } = self.shape;
        let (batch, heads) = (sequences.len(), kv * self.group);
        let q: Vec<f32> = (0..batch * heads * l * d).map(|i| value(i as u64 ^ self.next << 32)).collect();
        let (mut out, mut lse) = (vec![f32::NAN; batch * heads * l * dv], vec![f32::NAN; batch * heads * l]);
        let outputs = Outputs::new(HeadsMut::bhsd(&mut out, [batch, heads, l, dv]).expect("packed")).lse(&mut lse);
        match call(&Heads::bhsd(&q, [batch, heads, l, d]).expect("packed"), outputs) {
            Ok(()) => {}
            // More queries than a ring has windows for.
            Err(Error::Overwritten { needed, oldest }) => return assert!(needed < oldest),
            Err(error) => panic!("{error}"),
        }
        for (i, tokens) in sequences.iter().enumerate() {
            let (k, v) = (rows::<f32>(tokens, kv * d, 0), rows::<f32>(tokens, kv * dv, 1));
            let [k, v] = [k, v].map(|x| x.into_iter().map(T::from_f32_nearest).collect::<Vec<T>>());
            let k = Heads::bshd(&k, [1, tokens.len(), kv, d]).expect("packed");
            let v = Heads::bshd(&v, [1, tokens.len(), kv, dv]).expect("packed");
            let q = Heads::bhsd(&q[i * heads * l * d..][..heads * l * d], [1, heads, l, d]).expect("packed");
            let expected = reference::multi_head(&q, &k, &v, options).expect("a good call");
            close(&out[i * heads * l * dv..], &expected.out);
            close(&lse[i * heads * l..], &expected.lse);
        }
    }
}

fn close(ours: &[f32], theirs: &[f64]) {
    for (&x, &y) in ours.iter().zip(theirs) {
        assert!(f64::from(x) == y || (f64::from(x) - y).abs() <= 2e-5 * (1.0 + y.abs()), "{x} {y}");
    }
}

fn run<T: Element>(input: &Input) {
    let mut world = World::<T>::new(input);
    for &operation in input.operations.iter().take(64) {
        world.apply(operation);
    }
    world.attend(0, 2);
    for sequence in core::mem::take(&mut world.sequences) {
        world.paged.remove(sequence.id).expect("an id");
    }
    assert_eq!(world.paged.free_pages(), world.paged.pages());
}

fuzz_target!(|input: Input| match input.element % 3 {
    0 => run::<f32>(&input),
    1 => run::<f16>(&input),
    _ => run::<bf16>(&input),
});
