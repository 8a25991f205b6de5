//! Products of tiles that are taken step by step: other work can go on between the steps, and hides behind them.

use core::ops::Range;

use super::{MAX_TERMS, Multiply, SIDE, STEP, TILE};

/// Which terms of `a` and `b` are multiplied with each other.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// Where the terms of `a` and `b` begin, product by product, smallest first, so that few bits are lost; and how many there are.
    offsets: [[usize; 2]; MAX_PRODUCTS],
    products: usize,
    /// Steps that are multiplied in all products before the next ones.
    at_once: usize,
}

const MAX_PRODUCTS: usize = 6;

impl Plan {
    /// For so many terms of `a` and `b`, from term to term so many floats.
    pub(crate) fn new(terms: [usize; 2], strides: [usize; 2]) -> Self {
        assert!(terms.iter().all(|terms| (1..=MAX_TERMS).contains(terms)));
        let (mut offsets, mut products) = ([[0; 2]; MAX_PRODUCTS], 0);
        for [a, b] in pairs(terms) {
            offsets[products] = [a * strides[0], b * strides[1]];
            products += 1;
        }
        Self { offsets, products, at_once: steps_at_once(terms) }
    }
}

/// The products of terms that are summed.
fn pairs([a, b]: [usize; 2]) -> impl Iterator<Item = [usize; 2]> {
    let all: [_; MAX_PRODUCTS] = [[2, 0], [1, 1], [0, 2], [1, 0], [0, 1], [0, 0]];
    all.into_iter().filter(move |&[i, j]| i < a && j < b && i + j < a.max(b))
}

/// Steps whose tiles of `a` and `b` are multiplied in all their products before others come: they take up to half of L1 where there are
/// tiles, 24 KiB, and come from L2 once instead of twice or three times. As many for two terms as for three: operands of a type give
/// the bits of the same operands in a wider one, whose other terms are 0.
pub(super) fn steps_at_once(terms: [usize; 2]) -> usize {
    if terms == [1, 1] { 6 } else { 2 }
}

/// `c = sum of a_i b_j` over some terms of `a` and `b` and all steps.
pub(crate) struct Product<'a> {
    pub(crate) plan: &'a Plan,
    /// Steps, each of [`STEP`] elements.
    pub(crate) depth: usize,
    /// One tile of columns, or two.
    pub(crate) columns: usize,
    /// Blocks of two tiles of rows, each `[terms][depth][2]` tiles of `[row][pair]`, from block to block `a_block` floats.
    pub(crate) a: &'a [f32],
    pub(crate) a_block: usize,
    /// `[terms][depth][columns / SIDE]` tiles of `[pair][column]`.
    pub(crate) b: &'a [f32],
    /// `[2 * SIDE][columns]` for every block.
    pub(crate) c: &'a mut [f32],
    /// Whether the sums are added to what `c` holds.
    pub(crate) more: bool,
}

impl<'a> Product<'a> {
    /// All of it, at once.
    pub(crate) fn run<M: Multiply>(self, matrix: M, configured: &M::Configured) {
        let mut running = Running::new(self);
        while running.step(matrix, configured) {}
    }

    /// A product of no steps.
    pub(super) fn nothing(plan: &'a Plan) -> Self {
        Self { plan, depth: 1, columns: SIDE, a: &[], a_block: 0, b: &[], c: &mut [], more: false }
    }
}

/// A product of which some steps are taken.
struct Running<'a> {
    op: Product<'a>,
    /// Blocks that are left, and where the first of them begins in `a` and `c`.
    blocks: usize,
    a: usize,
    c: usize,
    /// The next step, and those that it is among.
    product: usize,
    step: usize,
    among: Range<usize>,
}

impl<'a> Running<'a> {
    #[inline(always)]
    fn new(op: Product<'a>) -> Self {
        assert!(op.depth > 0);
        let (blocks, among) = (op.c.len() / (STEP * op.columns), 0..op.plan.at_once.min(op.depth));
        Self { op, blocks, a: 0, c: 0, product: 0, step: 0, among }
    }

    fn steps(&self) -> usize {
        self.blocks * self.op.plan.products * self.op.depth
    }

    /// Takes the next step, if there is one.
    #[inline(always)]
    fn step<M: Multiply>(&mut self, matrix: M, configured: &M::Configured) -> bool {
        if self.blocks == 0 {
            return false;
        }
        let (columns, [a, b]) = (self.op.columns, self.op.plan.offsets[self.product]);
        let a = &self.op.a[self.a + a + self.step * 2 * TILE..][..2 * TILE];
        let b = &self.op.b[b + self.step * columns * SIDE..][..columns * SIDE];
        if self.product == 0 && self.step == 0 {
            match self.op.more {
                true => matrix.load(configured, &self.op.c[self.c..][..STEP * columns]),
                false => matrix.clear(configured),
            }
        }
        matrix.add(configured, a, b);
        self.step += 1;
        if self.step == self.among.end {
            (self.step, self.product) = (self.among.start, self.product + 1);
        }
        if self.product == self.op.plan.products {
            let mut first = self.among.end;
            if first == self.op.depth {
                matrix.store(configured, &mut self.op.c[self.c..][..STEP * columns]);
                (self.blocks, self.a, self.c) = (self.blocks - 1, self.a + self.op.a_block, self.c + STEP * columns);
                first = 0;
            }
            (self.product, self.step) = (0, first);
            self.among = first..self.op.depth.min(first + self.op.plan.at_once);
        }
        true
    }
}

/// Products one after the other, for work to run beside them.
pub(super) struct Beside<'a, M: Multiply> {
    matrix: M,
    configured: &'a M::Configured,
    queue: [Running<'a>; 2],
    /// Of which steps are taken.
    now: usize,
    steps: usize,
    /// Steps are spread over so many ticks, `more` of which come from other work than the first; what of one is due.
    ticks: usize,
    more: usize,
    due: usize,
}

impl<'a, M: Multiply> Beside<'a, M> {
    #[inline(always)]
    pub(super) fn new(matrix: M, configured: &'a M::Configured, queue: [Product<'a>; 2], more: usize) -> Self {
        let [first, second] = queue;
        let queue = [Running::new(first), Running::new(second)];
        let steps = queue[0].steps() + queue[1].steps();
        Self { matrix, configured, queue, now: 0, steps, ticks: 1, more, due: 0 }
    }

    /// Spreads the steps over so many calls of [`tick`](Self::tick), and `more`.
    #[inline(always)]
    pub(super) fn spread(&mut self, ticks: usize) {
        self.ticks = (ticks + self.more).max(1);
    }

    /// Takes the steps that are due.
    #[inline(always)]
    pub(super) fn tick(&mut self) {
        self.due += self.steps;
        while self.due >= self.ticks {
            self.due -= self.ticks;
            self.step();
        }
    }

    /// Takes the steps that are left of the first product, and hands out what it has come to.
    pub(super) fn first(&mut self) -> &'a mut [f32] {
        while self.queue[0].step(self.matrix, self.configured) {}
        core::mem::take(&mut self.queue[0].op.c)
    }

    /// Takes the steps that are left.
    pub(super) fn finish(mut self) {
        while self.step() {}
    }

    #[inline(always)]
    fn step(&mut self) -> bool {
        while let Some(running) = self.queue.get_mut(self.now) {
            if running.step(self.matrix, self.configured) {
                return true;
            }
            self.now += 1;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use crate::kernel::matrix::{Matrix, MatrixOp};
    use crate::kernel::{Lanes, Op};

    /// Small integers, two a float: every product and sum is exact.
    fn integers(len: usize, mut seed: u32) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((seed >> 24) % 17) as f32 - 8.0
        };
        // bf16 is the upper half of an `f32`.
        (0..len).map(|_| f32::from_bits(next().to_bits() >> 16 | next().to_bits() & 0xffff_0000)).collect()
    }

    fn halves(pair: f32) -> [f32; 2] {
        [f32::from_bits(pair.to_bits() << 16), f32::from_bits(pair.to_bits() & 0xffff_0000)]
    }

    /// A product of some shape, with gaps between terms and blocks.
    struct Case {
        terms: [usize; 2],
        depth: usize,
        columns: usize,
        a: Vec<f32>,
        b: Vec<f32>,
        c: Vec<f32>,
        /// What is added to.
        before: Option<f32>,
    }

    impl Case {
        fn new(terms: [usize; 2], depth: usize, columns: usize, blocks: usize) -> Self {
            let before = (depth % 2 == 1).then_some(1000.0);
            let c = vec![before.unwrap_or(f32::NAN); blocks * STEP * columns];
            let mut case = Self { terms, depth, columns, a: vec![], b: vec![], c, before };
            case.a = integers(blocks * case.a_block(), 1);
            case.b = integers(terms[1] * case.b_term(), 2);
            case
        }

        fn a_term(&self) -> usize {
            self.depth * 2 * TILE + 32
        }

        fn a_block(&self) -> usize {
            self.terms[0] * self.a_term() + 16
        }

        fn b_term(&self) -> usize {
            self.depth * self.columns * SIDE + 48
        }

        fn plan(&self) -> Plan {
            Plan::new(self.terms, [self.a_term(), self.b_term()])
        }

        fn op<'a>(&'a mut self, plan: &'a Plan) -> Product<'a> {
            let a_block = self.a_block();
            let Self { depth, columns, ref a, ref b, ref mut c, before, .. } = *self;
            Product { plan, depth, columns, a, a_block, b, c, more: before.is_some() }
        }

        fn check(&self) {
            for (at, &c) in self.c.iter().enumerate() {
                let (block, row, column) = (at / (STEP * self.columns), at / self.columns % STEP, at % self.columns);
                let mut sum = self.before.unwrap_or(0.0);
                for [i, j] in pairs(self.terms) {
                    for step in 0..self.depth {
                        let a = block * self.a_block() + i * self.a_term() + (step * 2 + row / SIDE) * TILE;
                        let b = j * self.b_term() + (step * self.columns / SIDE + column / SIDE) * TILE;
                        for pair in 0..SIDE {
                            let a = halves(self.a[a + row % SIDE * SIDE + pair]);
                            let b = halves(self.b[b + pair * SIDE + column % SIDE]);
                            sum += a[0] * b[0] + a[1] * b[1];
                        }
                    }
                }
                assert_eq!(
                    c, sum,
                    "[{block}, {row}, {column}] of {:?} x {} x {}",
                    self.terms, self.depth, self.columns
                );
            }
        }
    }

    /// Runs `op` with the tiles of this machine; without them the tests here have nothing to look at, and say so.
    fn with_tiles(op: impl MatrixOp<Output = ()>) {
        struct Tiles<O>(O);
        impl<O: MatrixOp<Output = ()>> Op for Tiles<O> {
            type Output = ();
            fn run<L: Lanes>(self, l: L) {
                match l.matrix() {
                    Some(matrix) => matrix.run(self.0),
                    None => eprintln!("skipped: no matrix tiles"),
                }
            }
        }
        let best = Level::available().iter().copied().max_by_key(|&level| (level == Level::Amx, level.lanes()));
        best.expect("portable").dispatch(Tiles(op));
    }

    struct AllShapes;

    impl MatrixOp for AllShapes {
        type Output = ();
        fn run<M: Multiply>(self, matrix: M) {
            let configured = matrix.configure();
            for terms in [[1, 1], [1, 2], [2, 1], [2, 2], [3, 1], [1, 3], [3, 2], [2, 3], [3, 3]] {
                for (depth, columns, blocks) in [(1, 16, 1), (2, 32, 3), (5, 16, 2), (5, 32, 1)] {
                    let mut case = Case::new(terms, depth, columns, blocks);
                    let plan = case.plan();
                    case.op(&plan).run(matrix, &configured);
                    case.check();
                }
            }
        }
    }

    #[test]
    fn products_are_those_of_matrices() {
        with_tiles(AllShapes);
    }

    struct Spread;

    impl MatrixOp for Spread {
        type Output = ();
        fn run<M: Multiply>(self, matrix: M) {
            let configured = matrix.configure();
            for ticks in [0, 1, 3, 7, 1000] {
                for have in [[true, true], [true, false], [false, true], [false, false]] {
                    let mut cases = [Case::new([3, 3], 2, 32, 2), Case::new([1, 2], 3, 16, 1)];
                    let plans = cases.each_ref().map(Case::plan);
                    let [first, second] = &mut cases;
                    let mut queue = [first.op(&plans[0]), second.op(&plans[1])];
                    for (op, have) in queue.iter_mut().zip(have) {
                        if !have {
                            *op = Product::nothing(&plans[0]);
                        }
                    }
                    let mut beside = Beside::new(matrix, &configured, queue, 0);
                    beside.spread(ticks);
                    (0..ticks).for_each(|_| beside.tick());
                    assert!(ticks == 0 || !beside.step(), "steps are left after {ticks} ticks");
                    beside.finish();
                    for (case, have) in cases.iter().zip(have) {
                        if have {
                            case.check();
                        } else {
                            assert!(case.c.iter().all(|&c| c.is_nan() || case.before == Some(c)));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn steps_are_spread_over_ticks() {
        with_tiles(Spread);
    }

    struct TooShort;

    impl MatrixOp for TooShort {
        type Output = ();
        fn run<M: Multiply>(self, matrix: M) {
            let mut case = Case::new([1, 1], 1, 16, 1);
            case.b.truncate(TILE - 1);
            let plan = case.plan();
            let op = std::panic::AssertUnwindSafe(|| case.op(&plan).run(matrix, &matrix.configure()));
            assert!(std::panic::catch_unwind(op).is_err());
        }
    }

    #[test]
    fn tiles_outside_of_a_slice_are_refused() {
        with_tiles(TooShort);
    }
}
