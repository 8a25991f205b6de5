use core::fmt;

use polyhead::{Bias, Diagonal, Mask, Options, Shape, View, Window};

use crate::support::{Arrangement, Bits, Edges, Memory, PoisonedInput, Rng};

/// A boolean mask, packed; its axes are 1 or those of the scores.
#[derive(Clone)]
pub(crate) struct MaskTable {
    pub(crate) values: Vec<bool>,
    pub(crate) shape: [usize; 4],
    /// The value that lets a key be seen.
    pub(crate) attend: bool,
}

/// A bias, packed; its axes are 1 or those of the scores.
#[derive(Clone)]
pub(crate) struct BiasTable {
    pub(crate) values: Vec<f32>,
    pub(crate) shape: [usize; 4],
}

// Tables are too long to read in a failure; seeds and rules say what they hold.
impl fmt::Debug for MaskTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mask {:?} attend {}", self.shape, self.attend)
    }
}

impl fmt::Debug for BiasTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bias {:?}", self.shape)
    }
}

/// Options that own what they need.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opts {
    pub(crate) scale: Option<f32>,
    pub(crate) causal: Option<Diagonal>,
    pub(crate) window: Option<Window>,
    pub(crate) keep_first: usize,
    pub(crate) key_lengths: Option<Vec<usize>>,
    pub(crate) mask: Option<MaskTable>,
    pub(crate) bias: Option<BiasTable>,
    pub(crate) alibi: Option<(Vec<f32>, Diagonal)>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Option<Vec<f32>>,
}

fn at(shape: [usize; 4], index: [usize; 4]) -> usize {
    (0..4).fold(0, |at, axis| at * shape[axis] + if shape[axis] == 1 { 0 } else { index[axis] })
}

/// The axes of the scores, some of them (by the bits of `broadcast`) of size 1.
pub(crate) fn table_shape(s: &Shape, broadcast: usize) -> [usize; 4] {
    let full = [s.batch, s.num_heads, s.seqlen_q, s.seqlen_k];
    core::array::from_fn(|axis| if broadcast >> axis & 1 == 1 { 1 } else { full[axis] })
}

impl MaskTable {
    /// Lets a share of the keys be seen.
    pub(crate) fn random(shape: [usize; 4], seen: f64, attend: bool, rng: &mut Rng) -> Self {
        let values = (0..shape.iter().product()).map(|_| rng.chance(seen) == attend).collect();
        Self { values, shape, attend }
    }

    /// A mask (true is seen) of the shape (1, 1, seqlen_q, seqlen_k).
    pub(crate) fn plane(l: usize, s: usize, seen: impl Fn(usize, usize) -> bool) -> Self {
        let values = (0..l * s).map(|at| seen(at / s, at % s)).collect();
        Self { values, shape: [1, 1, l, s], attend: true }
    }

    /// Storage with gaps between rows and between heads, which say "seen", and its strides.
    fn storage(&self, edges: Edges) -> (Memory<bool>, [usize; 4]) {
        const GAP: usize = 2;
        let [b, h, l, s] = self.shape;
        let row = s + GAP;
        let head = l * row + GAP;
        // Up to the last element.
        let len = if self.values.is_empty() { 0 } else { b * h * head - 2 * GAP };
        let mut storage = Memory::new(edges, len, self.attend);
        for (at, &value) in self.values.iter().enumerate() {
            storage[at / s / l * head + at / s % l * row + at % s] = value;
        }
        (storage, [h * head, head, row, 1])
    }
}

impl BiasTable {
    pub(crate) fn random(shape: [usize; 4], hidden: f64, rng: &mut Rng) -> Self {
        let mut value = || if rng.chance(hidden) { f32::NEG_INFINITY } else { 2.0 * rng.normal() };
        Self { values: (0..shape.iter().product()).map(|_| value()).collect(), shape }
    }

    pub(crate) fn plane(l: usize, s: usize, value: impl Fn(usize, usize) -> f32) -> Self {
        Self { values: (0..l * s).map(|at| value(at / s, at % s)).collect(), shape: [1, 1, l, s] }
    }
}

impl Opts {
    /// Calls `f` with the options, their tables among foreign elements.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Options<'_>) -> R) -> R {
        self.within(Edges::Foreign, f)
    }

    /// Calls `f` with the options, their tables and lists in memory with these edges.
    pub(crate) fn within<R>(&self, edges: Edges, f: impl FnOnce(&Options<'_>) -> R) -> R {
        let mask = self.mask.as_ref().map(|mask| (mask.storage(edges), mask.shape, mask.attend));
        let bias = self.bias.as_ref();
        let bias = bias.map(|bias| PoisonedInput::within(edges, &bias.values, bias.shape, Arrangement::RowGaps(3)));
        let list = |values: &[f32]| Memory::from(edges, values, f32::INPUT);
        let lengths = self.key_lengths.as_ref().map(|lengths| Memory::from(edges, lengths, usize::MAX));
        let alibi = self.alibi.as_ref().map(|(slopes, diagonal)| (list(slopes), *diagonal));
        let sinks = self.sinks.as_ref().map(|sinks| list(sinks));
        let mut options = Options::new();
        if let Some(scale) = self.scale {
            options = options.softmax_scale(scale);
        }
        if let Some(diagonal) = self.causal {
            options = options.causal(diagonal);
        }
        if let Some(window) = self.window {
            options = options.window(window).keep_first(self.keep_first);
        }
        if let Some(lengths) = &lengths {
            options = options.key_lengths(lengths.inner());
        }
        if let Some(((storage, strides), shape, attend)) = &mask {
            let view = View::with_strides(storage, *shape, *strides).expect("the storage holds the mask");
            let mask = if *attend { Mask::attend(view) } else { Mask::ignore(view) };
            options = options.mask(mask.expect("four axes"));
        }
        if let Some(bias) = &bias {
            options = options.bias(Bias::new(bias.view()).expect("four axes"));
        }
        if let Some((slopes, diagonal)) = &alibi {
            options = options.alibi(slopes.inner(), *diagonal);
        }
        if let Some(cap) = self.softcap {
            options = options.softcap(cap);
        }
        if let Some(sinks) = &sinks {
            options = options.sinks(sinks.inner());
        }
        f(&options)
    }

    pub(crate) fn length(&self, shape: &Shape, batch: usize) -> usize {
        self.key_lengths.as_ref().map_or(shape.seqlen_k, |lengths| lengths[batch])
    }

    fn position(&self, shape: &Shape, diagonal: Diagonal, batch: usize, query: usize) -> i128 {
        let offset = match diagonal {
            Diagonal::TopLeft => 0,
            Diagonal::BottomRight => self.length(shape, batch) as i128 - shape.seqlen_q as i128,
            Diagonal::Offset(offset) => offset as i128,
        };
        query as i128 + offset
    }

    /// The rule of visibility without the bias.
    pub(crate) fn sees_without_bias(&self, shape: &Shape, [b, h, i, j]: [usize; 4]) -> bool {
        let after = |diagonal| j as i128 - self.position(shape, diagonal, b, i);
        let causal = self.causal.is_none_or(|diagonal| after(diagonal) <= 0);
        let window = self.window.is_none_or(|Window { left, right, diagonal }| {
            (j < self.keep_first || left.is_none_or(|left| after(diagonal) >= -(left as i128)))
                && right.is_none_or(|right| after(diagonal) <= right as i128)
        });
        let mask = self.mask.as_ref().is_none_or(|m| m.values[at(m.shape, [b, h, i, j])] == m.attend);
        j < self.length(shape, b) && causal && window && mask
    }

    pub(crate) fn sees(&self, shape: &Shape, index: [usize; 4]) -> bool {
        self.sees_without_bias(shape, index) && self.bias_at(index) != f32::NEG_INFINITY
    }

    pub(crate) fn bias_at(&self, index: [usize; 4]) -> f32 {
        self.bias.as_ref().map_or(0.0, |bias| bias.values[at(bias.shape, index)])
    }

    pub(crate) fn alibi_at(&self, shape: &Shape, [b, h, i, j]: [usize; 4]) -> f64 {
        self.alibi.as_ref().map_or(0.0, |(slopes, diagonal)| {
            -f64::from(slopes[h]) * (self.position(shape, *diagonal, b, i) - j as i128).unsigned_abs() as f64
        })
    }

    pub(crate) fn softmax_scale(&self, shape: &Shape) -> f64 {
        self.scale.map_or_else(|| (shape.head_dim as f64).sqrt().recip(), f64::from)
    }
}
