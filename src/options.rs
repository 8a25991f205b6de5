//! Everything that may be asked of an attention call besides its operands.

use crate::{Bias, Diagonal, Level, Mask, Window};

/// How exactly products of `f32` operands are computed, with the names of PyTorch's `float32_matmul_precision`.
///
/// [`Level::Amx`] multiplies bf16: it takes an `f32` as a sum of three, two or one of them, and adds the six, three or one largest of
/// their products in `f32` (Henry, Tang and Heinecke 2019, section III), for sequences of 64 queries or more. All other levels,
/// and shorter sequences, compute every precision as `Highest`.
///
/// Operands of 16 bits are not asked: on tiles an f16 is the sum of two bf16, with the error of `High`; and where queries, keys
/// and values are bf16 (or the precision is `Medium`), probabilities are rounded to bf16, and the LSE has an error of up to 2^-13.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The accuracy of plain `f32` arithmetic: at most twice its error.
    #[default]
    Highest,
    /// A relative error of about 2^-16 is allowed: ten to twenty times that of plain `f32` arithmetic.
    High,
    /// Operands may be rounded to bf16.
    Medium,
}

/// Options of an attention call; `Options::new()` is plain attention with `softmax_scale = 1 / sqrt(head_dim)`.
///
/// All of them combine. The score of a query and a key is `softmax_scale * dot(q, k)`, then the softcap, then ALiBi and bias;
/// a key is seen only if causality, window, key length, mask and bias all allow it; then comes softmax, with a sink if given.
///
/// ```
/// use polyhead::{Diagonal, Options};
/// let lengths = [5, 3];
/// let options = Options::new().causal(Diagonal::TopLeft).key_lengths(&lengths).softcap(30.0);
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    pub(crate) softmax_scale: Option<f32>,
    pub(crate) causal: Option<Diagonal>,
    pub(crate) window: Option<Window>,
    pub(crate) keep_first: usize,
    pub(crate) key_lengths: Option<&'a [usize]>,
    pub(crate) masks: [Option<Mask<'a>>; 2],
    pub(crate) biases: [Option<Bias<'a>>; 2],
    pub(crate) alibi: Option<(&'a [f32], Diagonal)>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) precision: Precision,
    pub(crate) level: Option<Level>,
}

impl<'a> Options<'a> {
    /// Plain attention.
    pub fn new() -> Self {
        Self::default()
    }

    /// Factor of the scores; any finite value, 0 and negative ones too. Default `1 / sqrt(head_dim)`.
    pub fn softmax_scale(mut self, scale: f32) -> Self {
        self.softmax_scale = Some(scale);
        self
    }

    /// A query sees no key after its own position, which `diagonal` fixes.
    pub fn causal(mut self, diagonal: Diagonal) -> Self {
        self.causal = Some(diagonal);
        self
    }

    /// A query sees only keys near its own position.
    pub fn window(mut self, window: Window) -> Self {
        self.window = Some(window);
        self
    }

    /// A window does not hide the first `keys` keys of a sequence on its left side: the attention sinks of StreamingLLM (Xiao et
    /// al. 2023, section 3.2). Causality, key lengths, mask and bias hide them as any other key. Without a window it means
    /// nothing.
    pub fn keep_first(mut self, keys: usize) -> Self {
        self.keep_first = keys;
        self
    }

    /// Keys in use of each batch item, `0..=seqlen_k`; the others are hidden. Length `batch`.
    pub fn key_lengths(mut self, lengths: &'a [usize]) -> Self {
        self.key_lengths = Some(lengths);
        self
    }

    /// A boolean mask.
    pub fn mask(mut self, mask: Mask<'a>) -> Self {
        self.masks[0] = Some(mask);
        self
    }

    /// A second boolean mask: a key is seen only if both allow it. Such as one of the keys of each sequence
    /// ([`Mask::ignore_keys`]) beside one of queries and keys.
    pub fn and_mask(mut self, mask: Mask<'a>) -> Self {
        self.masks[1] = Some(mask);
        self
    }

    /// A bias added to the scores.
    pub fn bias(mut self, bias: Bias<'a>) -> Self {
        self.biases[0] = Some(bias);
        self
    }

    /// A second bias, added to the first one. A key is hidden if either of them is -inf there; the sum of two finite biases hides
    /// nothing.
    pub fn and_bias(mut self, bias: Bias<'a>) -> Self {
        self.biases[1] = Some(bias);
        self
    }

    /// Attention with linear biases: adds `-slope * |position of the query - key|`. One finite slope for each query head
    /// ([`alibi_slopes`](crate::alibi_slopes) gives the paper's).
    pub fn alibi(mut self, slopes: &'a [f32], diagonal: Diagonal) -> Self {
        self.alibi = Some((slopes, diagonal));
        self
    }

    /// Soft-caps the scaled scores: `cap * tanh(score / cap)`. Positive and finite.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// A sink logit for each query head, which joins the maximum and the sum of softmax as one more key without a value. It is
    /// taken as it is: not scaled, capped or biased. -inf is no sink.
    pub fn sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Precision of products of `f32` operands.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Runs on this level instead of the best one.
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }
}
