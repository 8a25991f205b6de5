//! Rotary position embedding (Su et al. 2021, section 3.2.2): pairs of a head's elements turned by an angle that grows with the
//! token's position.

use crate::{Error, Result};
use core::ops::Range;

/// Which elements of a head make a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryStyle {
    /// `2i` and `2i + 1`: the paper, GPT-J, Llama's original code.
    Interleaved,
    /// `i` and `i + dim / 2`: GPT-NeoX, Hugging Face's models ("rotate half").
    HalfSplit,
}

/// Rotary position embedding: pair `i` of the first `dim` elements of every query and key head is turned by
/// `position * base^(-2i / dim)`. The other elements of a head stay as they are.
///
/// The position of a sequence's first token is that of [`Inputs::first_position`](super::Inputs::first_position), or the number of
/// tokens that a cache has had.
///
/// ```
/// use polyhead::layer::Rotary;
/// let llama = Rotary::half_split(128, 10_000.0);
/// let gpt_j = Rotary::interleaved(64, 10_000.0); // 64 of 256 elements
/// # let _ = (llama, gpt_j);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Elements of a head that are turned: an even number, at most `head_dim`.
    pub dim: usize,
    /// Ratio of the wavelengths of the last pair and the first, nearly; 10,000 in the paper.
    pub base: f64,
    /// Which elements make a pair.
    pub style: RotaryStyle,
}

impl Rotary {
    /// Pairs `2i`, `2i + 1`.
    pub fn interleaved(dim: usize, base: f64) -> Self {
        Self { dim, base, style: RotaryStyle::Interleaved }
    }

    /// Pairs `i`, `i + dim / 2`.
    pub fn half_split(dim: usize, base: f64) -> Self {
        Self { dim, base, style: RotaryStyle::HalfSplit }
    }

    pub(super) fn check(&self, head_dim: usize) -> Result<()> {
        let wrong = |option, expected, actual| Err(Error::Value { option, expected, actual });
        if self.dim > head_dim || !self.dim.is_multiple_of(2) {
            return wrong("rotary dim", "even, at most head_dim", self.dim as f64);
        }
        if !(self.base.is_finite() && self.base > 0.0) {
            return wrong("rotary base", "positive and finite", self.base);
        }
        Ok(())
    }

    /// Turns one head of one token. `turns` are the cosines of the pairs, then their sines.
    fn turn(&self, head: &mut [f32], turns: &[f32]) {
        let head = &mut head[..self.dim];
        let (cos, sin) = turns.split_at(self.dim / 2);
        match self.style {
            RotaryStyle::Interleaved => {
                for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                    (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
                }
            }
            RotaryStyle::HalfSplit => {
                let (first, second) = head.split_at_mut(self.dim / 2);
                for ((x, y), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                    (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
                }
            }
        }
    }
}

/// Cosines and sines of a run of positions, kept from call to call.
#[derive(Debug, Default)]
pub(super) struct Turns {
    rotary: Option<Rotary>,
    positions: Range<usize>,
    /// For each position `dim / 2` cosines, then as many sines.
    table: Vec<f32>,
}

impl Turns {
    /// Makes sure of `positions`. Angles are computed in `f64`, so that they are good to the last position.
    pub(super) fn reserve(&mut self, rotary: &Rotary, positions: Range<usize>) -> Result<()> {
        let covered = self.positions.start <= positions.start && positions.end <= self.positions.end;
        if self.rotary.as_ref() == Some(rotary) && covered {
            return Ok(());
        }
        let len = positions.len().saturating_mul(rotary.dim);
        let memory = |_| Error::Memory { bytes: len.saturating_mul(size_of::<f32>()) };
        self.table.clear();
        self.table.try_reserve(len).map_err(memory)?;
        for position in positions.clone() {
            let angle = |pair: usize| position as f64 * rotary.base.powf(-2.0 * pair as f64 / rotary.dim as f64);
            self.table.extend((0..rotary.dim / 2).map(|pair| angle(pair).cos() as f32));
            self.table.extend((0..rotary.dim / 2).map(|pair| angle(pair).sin() as f32));
        }
        (self.rotary, self.positions) = (Some(*rotary), positions);
        Ok(())
    }

    /// Turns the heads, `head_dim` apart, of the token at a position that is in reserve.
    pub(super) fn apply(&self, position: usize, heads: &mut [f32], head_dim: usize) {
        let Some(rotary) = self.rotary.as_ref().filter(|rotary| rotary.dim > 0) else { return };
        let turns = &self.table[(position - self.positions.start) * rotary.dim..][..rotary.dim];
        for head in heads.chunks_exact_mut(head_dim) {
            rotary.turn(head, turns);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.capacity() * size_of::<f32>()
    }
}
