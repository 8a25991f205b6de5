//! Attention of one head, the 2-D convenience around [`multi_head`](crate::multi_head), and the joining of partial results.

mod merge;

pub use merge::merge;

use crate::{Element, Matrix, MatrixMut, Options, Outputs, Result, multi_head_with};

/// Scaled dot-product attention of one head: `q` (seqlen_q, head_dim), `k` (seqlen_k, head_dim), `v` (seqlen_k, head_dim_v),
/// `out` (seqlen_q, head_dim_v). Options, promises and threads as [`multi_head`](crate::multi_head) with one batch item and one
/// head.
///
/// # Errors
/// As [`multi_head`](crate::multi_head).
///
/// ```
/// use polyhead::{Diagonal, Matrix, MatrixMut, Options, attention};
/// let (q, k, v) = ([0.0f32; 3 * 2], [1.0f32; 3 * 2], [1.0f32, 2.0, 3.0]);
/// let mut out = [0.0f32; 3];
/// attention::sdpa(
///     &Matrix::contiguous(&q, [3, 2])?,
///     &Matrix::contiguous(&k, [3, 2])?,
///     &Matrix::contiguous(&v, [3, 1])?,
///     MatrixMut::contiguous(&mut out, [3, 1])?,
///     &Options::new().causal(Diagonal::TopLeft),
/// )?;
/// assert_eq!(out, [1.0, 1.5, 2.0]);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn sdpa<Q: Element, K: Element, V: Element, O: Element>(
    q: &Matrix<'_, Q>,
    k: &Matrix<'_, K>,
    v: &Matrix<'_, V>,
    out: MatrixMut<'_, O>,
    options: &Options<'_>,
) -> Result<()> {
    multi_head_with(&q.as_head(), &k.as_head(), &v.as_head(), Outputs::new(out.into_head()), options)
}

/// As [`sdpa`], with the natural logarithm of each row's sum of exponentials in `lse` (seqlen_q), the number by which partial
/// results over keys are joined.
///
/// # Errors
/// As [`multi_head`](crate::multi_head).
///
/// ```
/// use polyhead::{Matrix, MatrixMut, Options, attention};
/// let (q, kv) = ([0.0f32; 2], [1.0f32; 5 * 2]);
/// let (mut out, mut lse) = ([0.0f32; 2], [0.0f32; 1]);
/// let (q, kv) = (Matrix::contiguous(&q, [1, 2])?, Matrix::contiguous(&kv, [5, 2])?);
/// attention::sdpa_with_lse(&q, &kv, &kv, MatrixMut::contiguous(&mut out, [1, 2])?, &mut lse, &Options::new())?;
/// assert!((lse[0] - 5f32.ln()).abs() < 1e-6);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn sdpa_with_lse<Q: Element, K: Element, V: Element, O: Element>(
    q: &Matrix<'_, Q>,
    k: &Matrix<'_, K>,
    v: &Matrix<'_, V>,
    out: MatrixMut<'_, O>,
    lse: &mut [f32],
    options: &Options<'_>,
) -> Result<()> {
    multi_head_with(&q.as_head(), &k.as_head(), &v.as_head(), Outputs::new(out.into_head()).lse(lse), options)
}
