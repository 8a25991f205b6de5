//! Decoding: new tokens are projected, appended to a cache, and attend to all that it holds.

use super::forward::with_spare;
use super::inputs::order;
use super::rows::Rows;
use super::{Inputs, MultiHeadAttention, Workspace};
use crate::cache::{Cache, KvShape};
use crate::problem::check_shape;
use crate::{Diagonal, Element, Error, Matrices, MatricesMut, Options, Result};

impl<T: Element> MultiHeadAttention<T> {
    /// Heads and widths of a cache for this layer.
    pub fn kv_shape(&self) -> KvShape {
        let super::config::Sizes { num_kv_heads, head_dim, head_dim_v, .. } = self.sizes;
        KvShape { num_kv_heads, head_dim, head_dim_v }
    }

    /// One step of decoding, or a chunk of a prompt: `x` (batch, n, embed_dim) are the next `n` tokens of every sequence. They are
    /// appended to the cache, and `out` (batch, n, output_dim) is what they attend to: all tokens of their sequence up to
    /// themselves, unless the options have another rule of causality.
    ///
    /// A rotary embedding turns them by their positions in their sequences. Allocates nothing once the workspace is large enough.
    ///
    /// # Errors
    /// [`Error::Shape`] for sizes that do not fit the layer or the cache; the errors of the cache, and those of
    /// [`multi_head`](crate::multi_head) for options; [`Error::Unsupported`] for a layer with additional keys or with inputs of
    /// different widths. The cache is then as before, and nothing is written.
    ///
    /// ```
    /// use polyhead::cache::KvCache;
    /// use polyhead::layer::{Config, MultiHeadAttention, Rotary, Weights, Workspace};
    /// use polyhead::{Matrices, MatricesMut, Matrix, Options};
    /// let w = [0.125f32; 8 * 8];
    /// let w = Matrix::contiguous(&w, [8, 8])?;
    /// let config = Config::new(8, 2).rotary(Rotary::half_split(4, 10_000.0));
    /// let layer = MultiHeadAttention::new(config, &Weights::new(w, w, w, w))?;
    /// let mut cache = KvCache::<f32>::new(layer.kv_shape(), 1, 64)?;
    /// let (mut workspace, x, mut out) = (Workspace::new(), [1.0f32; 8], [0.0f32; 8]);
    /// for _token in 0..10 {
    ///     let (x, out) = (Matrices::contiguous(&x, [1, 1, 8])?, MatricesMut::contiguous(&mut out, [1, 1, 8])?);
    ///     layer.decode_into(x, &mut cache, out, &Options::new(), &mut workspace)?;
    /// }
    /// assert_eq!(cache.lengths(), [10]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    pub fn decode_into<A: Element, O: Element>(
        &self,
        x: Matrices<'_, A>,
        cache: &mut impl Cache,
        mut out: MatricesMut<'_, O>,
        options: &Options<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let [batch, n, _] = x.shape();
        let (inputs, sizes) = (Inputs::self_attention(x), self.sizes);
        inputs.check([sizes.embed_dim, sizes.kdim, sizes.vdim])?;
        check_shape("out", [batch, n, sizes.output_dim], out.shape(), ["batch", "seq", "dim"])?;
        self.check_cache(cache, batch)?;
        let mut options = self.options(options)?;
        options.causal = options.causal.or(Some(Diagonal::BottomRight));

        let projected = self.project(&inputs, &mut workspace.projected)?;
        for item in 0..batch {
            let position = cache.position(item)?;
            for (part, projected) in projected[..2].iter().enumerate() {
                self.rotate_run(part, projected, [item, position], 0..n, workspace)?;
            }
        }
        let Workspace { projected: buffers, heads, .. } = workspace;
        let data = buffers.each_mut().map(|buffer| &*buffer.as_mut_slice());
        let part = |part: usize| self.heads(part, n, &projected[part], data[projected[part].first]);
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let rows = Rows::new([batch, n], sizes.concat(), order(&out.layout()));
        heads.reserve(rows.len()?)?;
        cache.append_heads(&k, &v)?;
        let wanted = rows.heads_mut(heads.as_mut_slice(), [sizes.num_heads, sizes.head_dim_v])?;
        if let Err(error) = cache.attend_heads(&q, wanted, &options) {
            // What was appended last can always be taken back.
            for item in 0..batch {
                let len = cache.position(item)? - n;
                cache.truncate_item(item, len)?;
            }
            return Err(error);
        }
        self.project_heads(rows, heads, None, &mut out)
    }

    /// As [`decode_into`](Self::decode_into), with the output, packed (batch, n, output_dim), in a vector.
    ///
    /// # Errors
    /// As [`decode_into`](Self::decode_into).
    pub fn decode<A: Element>(
        &self,
        x: Matrices<'_, A>,
        cache: &mut impl Cache,
        options: &Options<'_>,
    ) -> Result<Vec<A>> {
        let [batch, n, _] = x.shape();
        let shape = [batch, n, self.sizes.output_dim];
        let mut out = super::forward::zeros("out", shape)?;
        let view = MatricesMut::contiguous(&mut out, shape)?;
        with_spare(|workspace| self.decode_into(x, cache, view, options, workspace))?;
        Ok(out)
    }

    fn check_cache(&self, cache: &impl Cache, batch: usize) -> Result<()> {
        if self.extra_keys() > 0 {
            return Err(Error::Unsupported { what: "decoding with add_bias_kv or add_zero_attn" });
        }
        let (expected, actual) = (self.kv_shape(), cache.kv_shape());
        let axes = [
            ("items", batch, cache.items()),
            ("heads", expected.num_kv_heads, actual.num_kv_heads),
            ("head_dim", expected.head_dim, actual.head_dim),
            ("head_dim_v", expected.head_dim_v, actual.head_dim_v),
        ];
        match axes.into_iter().find(|(_, expected, actual)| expected != actual) {
            Some((axis, expected, actual)) => Err(Error::Shape { operand: "cache", axis, expected, actual }),
            None => Ok(()),
        }
    }
}
