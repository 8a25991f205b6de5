use core::fmt::Display;

use half::{bf16, f16};
use polyhead::{Element, Heads, HeadsMut, Matrix, MatrixMut};

use super::guarded::{Edges, Memory};

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

/// Position of an element, counted from the first of the view, and its index, in the order of a packed tensor.
fn positions(shape: [usize; 4], strides: [usize; 4]) -> impl Iterator<Item = usize> {
    let [b, h, s, d] = shape;
    (0..b * h * s * d).map(move |at| {
        let index = [at / d / s / h, at / d / s % h, at / d % s, at % d];
        index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>()
    })
}

/// From the first element of the view to the last.
fn reach(shape: [usize; 4], strides: [usize; 4]) -> usize {
    positions(shape, strides).max().map_or(0, |last| last + 1)
}

/// An input in some arrangement, with NaN between its elements, and [`Edges`] around them.
#[derive(Clone, Debug)]
pub(crate) struct PoisonedInput<T> {
    storage: Memory<T>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<T: Bits> PoisonedInput<T> {
    /// From a packed (batch, heads, seq, dim) tensor. For a broadcast only the first head, or item, counts:
    /// [`packed`](Self::packed) gives the tensor that results.
    pub(crate) fn new(packed: &[T], shape: [usize; 4], arrangement: Arrangement) -> Self {
        Self::within(Edges::Foreign, packed, shape, arrangement)
    }

    /// As [`new`](Self::new), with edges of choice.
    pub(crate) fn within(edges: Edges, packed: &[T], shape: [usize; 4], arrangement: Arrangement) -> Self {
        assert_eq!(packed.len(), shape.iter().product::<usize>());
        let strides = arrangement.strides(shape);
        let mut storage = Memory::new(edges, reach(shape, strides), T::INPUT);
        // Backwards: of several elements in one place the first stays.
        let places: Vec<usize> = positions(shape, strides).collect();
        for (&place, &value) in places.iter().zip(packed).rev() {
            storage[place] = value;
        }
        Self { storage, shape, strides }
    }

    pub(crate) fn view(&self) -> Heads<'_, T> {
        Heads::with_strides(&self.storage, self.shape, self.strides).expect("the storage holds the view")
    }

    /// The storage from the view's first element on, and the view's strides.
    pub(crate) fn parts(&self) -> (&[T], [usize; 4]) {
        (&self.storage, self.strides)
    }

    /// The first head.
    pub(crate) fn matrix(&self) -> Matrix<'_, T> {
        let ([_, _, s, d], [_, _, down, across]) = (self.shape, self.strides);
        Matrix::with_strides(&self.storage, [s, d], [down, across]).expect("the storage holds the view")
    }

    /// The elements of the view, packed.
    pub(crate) fn packed(&self) -> Vec<T> {
        positions(self.shape, self.strides).map(|place| self.storage[place]).collect()
    }
}

/// An output in some arrangement, full of NaN that no arithmetic makes.
#[derive(Clone, Debug)]
pub(crate) struct PoisonedOutput<T> {
    storage: Memory<T>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<T: Bits> PoisonedOutput<T> {
    /// # Panics
    /// For a broadcast.
    pub(crate) fn new(shape: [usize; 4], arrangement: Arrangement) -> Self {
        Self::within(Edges::Foreign, shape, arrangement)
    }

    /// As [`new`](Self::new), with edges of choice.
    pub(crate) fn within(edges: Edges, shape: [usize; 4], arrangement: Arrangement) -> Self {
        let strides = arrangement.strides(shape);
        assert!(
            Arrangement::DISTINCT.iter().any(|a| core::mem::discriminant(a) == core::mem::discriminant(&arrangement))
        );
        Self { storage: Memory::new(edges, reach(shape, strides), T::OUTPUT), shape, strides }
    }

    pub(crate) fn view(&mut self) -> HeadsMut<'_, T> {
        HeadsMut::with_strides(&mut self.storage, self.shape, self.strides).expect("the storage holds the view")
    }

    /// As [`PoisonedInput::parts`].
    pub(crate) fn parts(&mut self) -> (&mut [T], [usize; 4]) {
        (&mut self.storage, self.strides)
    }

    /// The first head.
    pub(crate) fn matrix(&mut self) -> MatrixMut<'_, T> {
        let ([_, _, s, d], [_, _, down, across]) = (self.shape, self.strides);
        MatrixMut::with_strides(&mut self.storage, [s, d], [down, across]).expect("the storage holds the view")
    }

    /// The elements of the view, packed.
    ///
    /// # Panics
    /// If one of them was not written, or anything outside the view was.
    #[track_caller]
    pub(crate) fn packed(&self, context: impl Display) -> Vec<T> {
        let mut between = self.storage.inner().to_vec();
        let untouched = T::OUTPUT.bits();
        let read = |(i, place): (usize, usize)| {
            assert_ne!(self.storage[place].bits(), untouched, "{context}: element {i} was not written");
            between[place] = T::OUTPUT;
            self.storage[place]
        };
        let packed = positions(self.shape, self.strides).enumerate().map(read).collect();
        let touched = between.iter().position(|x| x.bits() != untouched);
        assert_eq!(touched, None, "{context}: an element between those of the view was written");
        self.storage.assert_outside(|x| x.bits() == untouched, context);
        packed
    }

    /// That nothing at all was written, as on an error.
    #[track_caller]
    pub(crate) fn assert_untouched(&self, context: impl Display) {
        let touched = self.storage.all().iter().position(|x| x.bits() != T::OUTPUT.bits());
        assert_eq!(touched, None, "{context}: written to");
    }
}

/// A slice in [`Edges`] to be written: NaN that no arithmetic makes.
#[derive(Clone, Debug)]
pub(crate) struct PoisonedList<T>(Memory<T>);

impl<T: Bits> PoisonedList<T> {
    pub(crate) fn new(edges: Edges, len: usize) -> Self {
        Self(Memory::new(edges, len, T::OUTPUT))
    }

    pub(crate) fn slice(&mut self) -> &mut [T] {
        self.0.inner_mut()
    }

    /// Its elements.
    ///
    /// # Panics
    /// If one of them was not written, or anything outside was.
    #[track_caller]
    pub(crate) fn packed(&self, context: impl Display) -> Vec<T> {
        let missing = self.0.inner().iter().position(|x| x.bits() == T::OUTPUT.bits());
        assert_eq!(missing, None, "{context}: an element was not written");
        self.0.assert_outside(|x| x.bits() == T::OUTPUT.bits(), context);
        self.0.inner().to_vec()
    }
    /// As [`PoisonedOutput::assert_untouched`].
    #[track_caller]
    pub(crate) fn assert_untouched(&self, context: impl Display) {
        let touched = self.0.all().iter().position(|x| x.bits() != T::OUTPUT.bits());
        assert_eq!(touched, None, "{context}: written to");
    }
}
