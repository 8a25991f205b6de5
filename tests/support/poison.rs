use core::fmt::Display;

use half::{bf16, f16};
use polyhead::{Element, Heads, HeadsMut, Matrix, MatrixMut};

/// Bits of an element, and two NaN that nothing else makes: one around inputs, one in and around outputs.
pub(crate) trait Bits: Element {
    const INPUT: Self;
    const OUTPUT: Self;
    fn bits(self) -> u32;
}

impl Bits for f32 {
    const INPUT: Self = f32::from_bits(0x7fc0_1bad);
    const OUTPUT: Self = f32::from_bits(0x7fd0_0bad);
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Bits for f16 {
    const INPUT: Self = f16::from_bits(0x7e5a);
    const OUTPUT: Self = f16::from_bits(0x7f3c);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Bits for bf16 {
    const INPUT: Self = bf16::from_bits(0x7fda);
    const OUTPUT: Self = bf16::from_bits(0x7fe5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// Where the elements of a (batch, heads, seq, dim) tensor lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// Packed (batch, heads, seq, dim).
    Bhsd,
    /// Packed (batch, seq, heads, dim).
    Bshd,
    /// Packed (batch, heads, dim, seq): the innermost stride is not 1.
    Bhds,
    /// As one of three operands in a packed projection (batch, seq, 3, heads, dim).
    PackedQkv,
    /// (batch, heads, seq, dim) with this many foreign elements after each row, and after each head.
    RowGaps(usize),
    /// (batch, heads, seq, dim) with elements this far apart.
    DimStride(usize),
    /// All heads are head 0, at stride 0. For inputs only.
    BroadcastHeads,
    /// All items are item 0, at stride 0. For inputs only.
    BroadcastBatch,
}

impl Arrangement {
    /// Those that an output can have too.
    pub(crate) const DISTINCT: [Self; 6] =
        [Self::Bhsd, Self::Bshd, Self::Bhds, Self::PackedQkv, Self::RowGaps(3), Self::DimStride(2)];
    /// All of them.
    pub(crate) const ALL: [Self; 8] = [
        Self::Bhsd,
        Self::Bshd,
        Self::Bhds,
        Self::PackedQkv,
        Self::RowGaps(3),
        Self::DimStride(2),
        Self::BroadcastHeads,
        Self::BroadcastBatch,
    ];

    fn strides(self, [_, h, s, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Bhsd => [h * s * d, s * d, d, 1],
            Self::Bshd => [s * h * d, d, h * d, 1],
            Self::Bhds => [h * d * s, d * s, 1, s],
            Self::PackedQkv => [s * 3 * h * d, d, 3 * h * d, 1],
            Self::RowGaps(gap) => [h * (s * (d + gap) + gap), s * (d + gap) + gap, d + gap, 1],
            Self::DimStride(step) => [h * s * d * step, s * d * step, d * step, step],
            Self::BroadcastHeads => [s * d, 0, d, 1],
            Self::BroadcastBatch => [0, s * d, d, 1],
        }
    }
}

/// Foreign elements before the view, an odd number so that no row is aligned, and after it, more than a vector or a
/// tile reads.
const BEFORE: usize = 7;
const AFTER: usize = 130;

/// Position of an element in the storage, and its index, in the order of a packed tensor.
fn positions(shape: [usize; 4], strides: [usize; 4]) -> impl Iterator<Item = usize> {
    let [b, h, s, d] = shape;
    (0..b * h * s * d).map(move |at| {
        let index = [at / d / s / h, at / d / s % h, at / d % s, at % d];
        BEFORE + index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>()
    })
}

fn storage_len(shape: [usize; 4], strides: [usize; 4]) -> usize {
    BEFORE + AFTER + positions(shape, strides).max().map_or(0, |last| last + 1 - BEFORE)
}

/// An input in some arrangement, with NaN between its elements, before and after.
#[derive(Clone, Debug)]
pub(crate) struct PoisonedInput<T> {
    storage: Vec<T>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<T: Bits> PoisonedInput<T> {
    /// From a packed (batch, heads, seq, dim) tensor. For a broadcast only the first head, or item, counts:
    /// [`packed`](Self::packed) gives the tensor that results.
    pub(crate) fn new(packed: &[T], shape: [usize; 4], arrangement: Arrangement) -> Self {
        assert_eq!(packed.len(), shape.iter().product::<usize>());
        let strides = arrangement.strides(shape);
        let mut storage = vec![T::INPUT; storage_len(shape, strides)];
        // Backwards: of several elements in one place the first stays.
        let places: Vec<usize> = positions(shape, strides).collect();
        for (&place, &value) in places.iter().zip(packed).rev() {
            storage[place] = value;
        }
        Self { storage, shape, strides }
    }

    pub(crate) fn view(&self) -> Heads<'_, T> {
        Heads::with_strides(&self.storage[BEFORE..], self.shape, self.strides).expect("the storage holds the view")
    }

    /// The storage from the view's first element on, and the view's strides.
    pub(crate) fn parts(&self) -> (&[T], [usize; 4]) {
        (&self.storage[BEFORE..], self.strides)
    }

    /// The first head.
    pub(crate) fn matrix(&self) -> Matrix<'_, T> {
        let ([_, _, s, d], [_, _, down, across]) = (self.shape, self.strides);
        Matrix::with_strides(&self.storage[BEFORE..], [s, d], [down, across]).expect("the storage holds the view")
    }

    /// The elements of the view, packed.
    pub(crate) fn packed(&self) -> Vec<T> {
        positions(self.shape, self.strides).map(|place| self.storage[place]).collect()
    }
}

/// An output in some arrangement, full of NaN that no arithmetic makes.
#[derive(Clone, Debug)]
pub(crate) struct PoisonedOutput<T> {
    storage: Vec<T>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<T: Bits> PoisonedOutput<T> {
    /// # Panics
    /// For a broadcast.
    pub(crate) fn new(shape: [usize; 4], arrangement: Arrangement) -> Self {
        let strides = arrangement.strides(shape);
        assert!(
            Arrangement::DISTINCT.iter().any(|a| core::mem::discriminant(a) == core::mem::discriminant(&arrangement))
        );
        Self { storage: vec![T::OUTPUT; storage_len(shape, strides)], shape, strides }
    }

    pub(crate) fn view(&mut self) -> HeadsMut<'_, T> {
        HeadsMut::with_strides(&mut self.storage[BEFORE..], self.shape, self.strides)
            .expect("the storage holds the view")
    }

    /// As [`PoisonedInput::parts`].
    pub(crate) fn parts(&mut self) -> (&mut [T], [usize; 4]) {
        (&mut self.storage[BEFORE..], self.strides)
    }

    /// The first head.
    pub(crate) fn matrix(&mut self) -> MatrixMut<'_, T> {
        let ([_, _, s, d], [_, _, down, across]) = (self.shape, self.strides);
        MatrixMut::with_strides(&mut self.storage[BEFORE..], [s, d], [down, across])
            .expect("the storage holds the view")
    }

    /// The elements of the view, packed.
    ///
    /// # Panics
    /// If one of them was not written, or anything outside the view was.
    #[track_caller]
    pub(crate) fn packed(&self, context: impl Display) -> Vec<T> {
        let mut outside = self.storage.clone();
        let untouched = T::OUTPUT.bits();
        let read = |(i, place): (usize, usize)| {
            assert_ne!(self.storage[place].bits(), untouched, "{context}: element {i} was not written");
            outside[place] = T::OUTPUT;
            self.storage[place]
        };
        let packed = positions(self.shape, self.strides).enumerate().map(read).collect();
        let touched = outside.iter().position(|x| x.bits() != untouched);
        assert_eq!(touched, None, "{context}: an element outside the view was written ({BEFORE} are before it)");
        packed
    }

    /// That nothing at all was written, as on an error.
    #[track_caller]
    pub(crate) fn assert_untouched(&self, context: impl Display) {
        let touched = self.storage.iter().position(|x| x.bits() != T::OUTPUT.bits());
        assert_eq!(touched, None, "{context}: written to");
    }
}
