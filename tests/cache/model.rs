//! Random operations on a paged cache against vectors of tokens and counted pages, which say what it holds, what is
//! free and what must fail.

use std::rc::Rc;

use polyhead::cache::SequenceId;
use proptest::prelude::*;

use super::{Rng, *};

#[derive(Clone, Debug)]
enum Operation {
    Create,
    Fork(usize),
    Append(usize, usize),
    /// To all sequences, up to so many tokens each.
    AppendAll(usize),
    Truncate(usize, usize),
    Remove(usize),
    Attend,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        2 => Just(Operation::Create),
        3 => any::<usize>().prop_map(Operation::Fork),
        6 => (any::<usize>(), 0..14usize).prop_map(|(at, n)| Operation::Append(at, n)),
        3 => (1..6usize).prop_map(Operation::AppendAll),
        3 => (any::<usize>(), 0..30usize).prop_map(|(at, len)| Operation::Truncate(at, len)),
        2 => any::<usize>().prop_map(Operation::Remove),
        1 => Just(Operation::Attend),
    ]
}

#[derive(Clone)]
struct Sequence {
    id: SequenceId,
    tokens: Tokens,
    /// One count for each page, shared as it is.
    pages: Vec<Rc<()>>,
}

struct Model {
    page_len: usize,
    pages: usize,
    sequences: Vec<Sequence>,
    rng: Rng,
}

impl Model {
    fn free(&self) -> usize {
        let mut used: Vec<_> = self.sequences.iter().flat_map(|sequence| &sequence.pages).map(Rc::as_ptr).collect();
        used.sort_unstable();
        used.dedup();
        self.pages - used.len()
    }

    /// Appends to sequences; the pages they needed, or an error if there were too few, and then nothing is changed.
    fn append(&mut self, at: &[usize], chunk: &Chunk) -> Result<()> {
        let (before, capacity) = (self.sequences.clone(), self.free());
        let mut needed = 0;
        for (&at, new) in at.iter().zip(&chunk.tokens) {
            let sequence = &mut self.sequences[at];
            let len = sequence.tokens.len();
            // The clone of all sequences holds each page of each of them once more, whatever they do.
            let holders = |page: &Rc<()>, clones: &[Sequence]| {
                let clones = clones.iter().flat_map(|clone| &clone.pages).filter(|other| Rc::ptr_eq(page, other));
                Rc::strong_count(page) - clones.count()
            };
            let inside = new.len() > 0 && !len.is_multiple_of(self.page_len);
            if inside && sequence.pages.last().is_some_and(|page| holders(page, &before) > 1) {
                sequence.pages.pop();
                sequence.pages.push(Rc::new(()));
                needed += 1;
            }
            sequence.tokens.extend(new);
            let pages = sequence.tokens.len().div_ceil(self.page_len);
            needed += pages - sequence.pages.len();
            sequence.pages.resize_with(pages, Rc::default);
        }
        if needed <= capacity {
            return Ok(());
        }
        self.sequences = before;
        Err(Error::Full { what: "pages", capacity, needed })
    }

    fn apply(&mut self, operation: &Operation, cache: &mut PagedCache<f32>) {
        let pick = |at: usize| at.checked_rem(self.sequences.len());
        match *operation {
            Operation::Create => {
                let id = cache.create().expect("memory");
                self.sequences.push(Sequence { id, tokens: Tokens::default(), pages: Vec::new() });
            }
            Operation::Fork(at) => {
                let Some(at) = pick(at) else { return };
                let id = cache.fork(self.sequences[at].id).expect("an id");
                self.sequences.push(Sequence { id, ..self.sequences[at].clone() });
            }
            Operation::Append(at, n) => {
                let Some(at) = pick(at) else { return };
                let chunk = Chunk::random(&[n], &mut self.rng);
                let result = chunk.tokens[0].with(|k, v| cache.append(self.sequences[at].id, k, v));
                assert_eq!(result, self.append(&[at], &chunk));
            }
            Operation::AppendAll(most) => {
                let all: Vec<usize> = (0..self.sequences.len()).collect();
                let counts: Vec<usize> = all.iter().map(|_| self.rng.below(most + 1)).collect();
                let chunk = Chunk::random(&counts, &mut self.rng);
                let ids: Vec<_> = self.sequences.iter().map(|sequence| sequence.id).collect();
                chunk.append::<f32>(|k, v| {
                    assert_eq!(cache.append_all(&ids, k, v), self.append(&all, &chunk));
                    Ok(())
                });
            }
            Operation::Truncate(at, len) => {
                let Some(at) = pick(at) else { return };
                let sequence = &mut self.sequences[at];
                cache.truncate(sequence.id, len).expect("an id");
                sequence.tokens.truncate(len);
                sequence.pages.truncate(len.div_ceil(self.page_len));
            }
            Operation::Remove(at) => {
                let Some(at) = pick(at) else { return };
                let gone = self.sequences.swap_remove(at).id;
                cache.remove(gone).expect("an id");
                assert_eq!(cache.len(gone), Err(Error::UnknownSequence));
            }
            Operation::Attend => self.attend(cache),
        }
        assert_eq!(cache.free_pages(), self.free());
    }

    /// The last queries of every sequence, against the reference.
    fn attend(&mut self, cache: &PagedCache<f32>) {
        let ids: Vec<_> = self.sequences.iter().map(|sequence| sequence.id).collect();
        let counts: Vec<usize> = ids.iter().map(|_| self.rng.below(4)).collect();
        let (chunk, level) = (Chunk::random(&counts, &mut self.rng), self.rng.pick(levels()));
        let options = Options::new().causal(Diagonal::BottomRight).level(level);
        let mut table = BlockTable::new();
        let batch = cache.batch(&ids, &mut table).expect("ids");
        let results = chunk.attend(|q, outputs| batch.attend_with(q, outputs, &options));
        for (i, sequence) in self.sequences.iter().enumerate() {
            let opts = Opts { causal: Some(Diagonal::BottomRight), ..Opts::default() };
            let call = chunk.call(i, &sequence.tokens, Dtype::F32, opts);
            call.expected().check(&call, level, &chunk.results(i, &results), format_args!("sequence {i}"));
        }
    }

    /// Every key and value of every sequence, bit for bit.
    fn check(&self, cache: &PagedCache<f32>) {
        let ids: Vec<_> = self.sequences.iter().map(|sequence| sequence.id).collect();
        let lengths: Vec<_> = self.sequences.iter().map(|sequence| sequence.tokens.len()).collect();
        let mut table = BlockTable::new();
        let batch = cache.batch(&ids, &mut table).expect("ids");
        let (k, v) = (read(&batch.keys(), &lengths), read(&batch.values(), &lengths));
        for (i, sequence) in self.sequences.iter().enumerate() {
            assert_same_bits(&k[i], &sequence.tokens.k, format_args!("keys of {i}"));
            assert_same_bits(&v[i], &sequence.tokens.v, format_args!("values of {i}"));
        }
    }
}

fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    // Failures are printed whole; they leave no file.
    ProptestConfig { cases: default.cases.div_ceil(2), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn paged_caches_are_vectors_of_tokens(
        operations in prop::collection::vec(operation(), 1..60),
        page_len in prop::sample::select(vec![1usize, 2, 3, 4, 8]),
        pages in 0..30usize,
        seed in any::<u64>(),
    ) {
        let mut cache = PagedCache::<f32>::new(KV, pages, page_len).expect("memory");
        let mut model = Model { page_len, pages, sequences: Vec::new(), rng: Rng::new(seed) };
        for operation in &operations {
            model.apply(operation, &mut cache);
            if matches!(operation, Operation::AppendAll(_) | Operation::Truncate(..)) {
                model.check(&cache);
            }
        }
        model.check(&cache);
        for sequence in model.sequences {
            cache.remove(sequence.id).expect("an id");
        }
        prop_assert_eq!(cache.free_pages(), pages);
    }
}
