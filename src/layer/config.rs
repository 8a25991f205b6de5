//! Sizes and rules of a layer.

use super::Rotary;
use crate::{Error, Level, Options, Precision, Result, Window};

/// Sizes and rules of a [`MultiHeadAttention`](super::MultiHeadAttention) layer; what depends on the call is in
/// [`Options`](crate::Options).
///
/// ```
/// use polyhead::layer::{Config, Rotary};
/// // A decoder's layer: 32 query heads on 8 KV heads of 128, rotary positions.
/// let config = Config::new(4096, 32).num_kv_heads(8).rotary(Rotary::half_split(128, 10_000.0));
/// assert_eq!(config.sizes()?.head_dim, 128);
/// // A cross-attention layer whose inputs and output have widths of their own.
/// let config = Config::new(24, 4).kdim(10).vdim(14).head_dim(5).head_dim_v(9).output_dim(7);
/// assert_eq!(config.sizes()?.head_dim_v, 9);
/// assert!(Config::new(10, 4).sizes().is_err());
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    embed_dim: usize,
    num_heads: usize,
    num_kv_heads: Option<usize>,
    head_dim: Option<usize>,
    head_dim_v: Option<usize>,
    kdim: Option<usize>,
    vdim: Option<usize>,
    output_dim: Option<usize>,
    zero_attn: bool,
    softmax_scale: Option<f32>,
    softcap: Option<f32>,
    window: Option<Window>,
    rotary: Option<Rotary>,
    precision: Precision,
    level: Option<Level>,
}

/// Setters that take the field's value.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        $($(#[$doc])*
        pub fn $name(mut self, value: $type) -> Self {
            self.$name = Some(value);
            self
        })*
    };
}

impl Config {
    /// As PyTorch's `nn.MultiheadAttention(embed_dim, num_heads)`: heads of `embed_dim / num_heads`, keys, values and output as
    /// wide as the queries. Whether there are biases, or the key and value of `add_bias_kv`, the weights say.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: None,
            head_dim: None,
            head_dim_v: None,
            kdim: None,
            vdim: None,
            output_dim: None,
            zero_attn: false,
            softmax_scale: None,
            softcap: None,
            window: None,
            rotary: None,
            precision: Precision::Highest,
            level: None,
        }
    }

    setters! {
        /// Key and value heads, a divisor of `num_heads`. Default `num_heads`.
        num_kv_heads: usize;
        /// Width of a head's queries and keys (Keras' `key_dim`). Default `embed_dim / num_heads`, which must then be exact.
        head_dim: usize;
        /// Width of a head's values (Keras' `value_dim`). Default `head_dim`.
        head_dim_v: usize;
        /// Width of the key input. Default `embed_dim`.
        kdim: usize;
        /// Width of the value input. Default `embed_dim`.
        vdim: usize;
        /// Width of the output. Default `embed_dim`.
        output_dim: usize;
        /// Factor of the scores, as [`Options::softmax_scale`]. Default `1 / sqrt(head_dim)`.
        softmax_scale: f32;
        /// As [`Options::softcap`].
        softcap: f32;
        /// A sliding window in every call, as [`Options::window`].
        window: Window;
        /// Rotary position embedding of queries and keys.
        rotary: Rotary;
        /// Packs the weights for this level, and runs on it, instead of the best one.
        level: Level;
    }

    /// PyTorch's `add_zero_attn`: every sequence has one more key and value, of zeros, which every query sees.
    pub fn add_zero_attn(mut self, add: bool) -> Self {
        self.zero_attn = add;
        self
    }

    /// As [`Options::precision`].
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// All sizes, defaults filled in.
    ///
    /// # Errors
    /// [`Error::Value`] for no heads, for an `embed_dim` that `num_heads` does not divide where it has to, and for a rotary
    /// embedding wider than a head; [`Error::HeadGroups`] if `num_kv_heads` does not divide `num_heads`.
    pub fn sizes(&self) -> Result<Sizes> {
        let Self { embed_dim, num_heads, .. } = *self;
        let wrong = |option, expected, actual: usize| Err(Error::Value { option, expected, actual: actual as f64 });
        if num_heads == 0 {
            return wrong("num_heads", "at least 1", num_heads);
        }
        let num_kv_heads = self.num_kv_heads.unwrap_or(num_heads);
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(Error::HeadGroups { num_heads, num_kv_heads });
        }
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if embed_dim == 0 => return wrong("embed_dim", "at least 1", embed_dim),
            None if !embed_dim.is_multiple_of(num_heads) => {
                return wrong("embed_dim", "a multiple of num_heads, or head_dim given", embed_dim);
            }
            None => embed_dim / num_heads,
        };
        if let Some(rotary) = &self.rotary {
            rotary.check(head_dim)?;
        }
        let sizes = Sizes {
            embed_dim,
            kdim: self.kdim.unwrap_or(embed_dim),
            vdim: self.vdim.unwrap_or(embed_dim),
            output_dim: self.output_dim.unwrap_or(embed_dim),
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim_v: self.head_dim_v.unwrap_or(head_dim),
        };
        // With room for gaps between the parts.
        let columns = sizes.head_dim.max(sizes.head_dim_v).checked_mul(4).and_then(|dim| dim.checked_mul(num_heads));
        match columns.and_then(|columns| columns.checked_add(1024)) {
            Some(_) => Ok(sizes),
            None => Err(Error::Overflow { operand: "heads", axis: "dim", size: num_heads, stride: head_dim }),
        }
    }

    pub(super) fn zero_attn(&self) -> bool {
        self.zero_attn
    }

    pub(super) fn rotary_embedding(&self) -> Option<&Rotary> {
        self.rotary.as_ref()
    }

    pub(super) fn wanted_level(&self) -> Option<Level> {
        self.level
    }

    pub(super) fn wanted_precision(&self) -> Precision {
        self.precision
    }

    /// The options of a call, with what the layer adds to them. The call's own scale, softcap and window take precedence.
    pub(super) fn options<'a>(&self, options: &Options<'a>) -> Options<'a> {
        Options {
            softmax_scale: options.softmax_scale.or(self.softmax_scale),
            softcap: options.softcap.or(self.softcap),
            window: options.window.or(self.window),
            precision: self.precision,
            ..*options
        }
    }
}

/// What holds, defaults filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Width of the query input.
    pub embed_dim: usize,
    /// Width of the key input.
    pub kdim: usize,
    /// Width of the value input.
    pub vdim: usize,
    /// Width of the output.
    pub output_dim: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head's queries and keys.
    pub head_dim: usize,
    /// Width of a head's values.
    pub head_dim_v: usize,
}

impl Sizes {
    /// Widths of the queries, the keys and the values of all heads.
    pub(super) fn widths(&self) -> [usize; 3] {
        let Self { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = *self;
        [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim_v]
    }

    /// Width of the outputs of all heads.
    pub(super) fn concat(&self) -> usize {
        self.num_heads * self.head_dim_v
    }
}
