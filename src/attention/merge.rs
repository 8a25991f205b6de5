//! Attention over pieces of the keys, joined.

use crate::problem::{check_shape, packed_len};
use crate::{Element, Error, Heads, HeadsMut, Result};

/// Columns that are summed at once.
const CHUNK: usize = 64;

/// Joins attention over pieces of the keys: what attention over all of their keys gives, within rounding.
///
/// `pieces` are outputs (batch, num_heads, seqlen_q, head_dim_v), each with its LSE, packed (batch, num_heads, seqlen_q), of
/// one set of queries over disjoint sets of keys: chunks of a cache, a shared prefix and what follows it, shards on several
/// machines. The joined LSE goes to `lse`, so that results can be joined again. A row's weight is `exp(lse)` (natural); one that
/// saw no key (LSE -inf) is not read, and if no piece saw any, output is 0 and LSE -inf. Pieces are added in order: the same
/// pieces give the same bits. With [`Options::sinks`](crate::Options::sinks), give the sinks to one piece alone.
///
/// Flash-Decoding (Dao et al. 2023) and Cascade Inference (Ye et al. 2024) are this.
///
/// # Errors
/// [`Error::Shape`] or [`Error::Length`] for a piece or an LSE that does not fit `out`; nothing is then written.
///
/// ```
/// use polyhead::{Heads, HeadsMut, attention};
/// // Over one key with value 1 and over three keys with value 2, all scores 0.
/// let (one, three) = ([1.0f32], [2.0f32]);
/// let (lse_one, lse_three) = ([0.0], [3f32.ln()]);
/// let pieces = [
///     (Heads::bhsd(&one, [1, 1, 1, 1])?, &lse_one[..]),
///     (Heads::bhsd(&three, [1, 1, 1, 1])?, &lse_three[..]),
/// ];
/// let (mut out, mut lse) = ([0.0f32], [0.0]);
/// attention::merge(&pieces, HeadsMut::bhsd(&mut out, [1, 1, 1, 1])?, &mut lse)?;
/// assert!((out[0] - 1.75).abs() < 1e-6 && (lse[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), polyhead::Error>(())
/// ```
pub fn merge<T: Element, O: Element>(
    pieces: &[(Heads<'_, T>, &[f32])],
    mut out: HeadsMut<'_, O>,
    lse: &mut [f32],
) -> Result<()> {
    let shape = out.shape();
    let [batch, heads, queries, _] = shape;
    let rows = packed_len("lse", [batch, heads, queries])?;
    let length =
        |actual| if actual == rows { Ok(()) } else { Err(Error::Length { operand: "lse", expected: rows, actual }) };
    length(lse.len())?;
    for (piece, piece_lse) in pieces {
        check_shape("piece", shape, piece.shape(), ["batch", "heads", "seq", "dim"])?;
        length(piece_lse.len())?;
    }
    let (layout, width) = (out.layout(), shape[3]);
    for (row, lse) in lse.iter_mut().enumerate() {
        let index = [row / queries / heads, row / queries % heads, row % queries, 0];
        // In f64, so that weights add no error of their own.
        let seen = || pieces.iter().filter(|(_, lses)| lses[row] != f32::NEG_INFINITY);
        let max = seen().fold(f64::NEG_INFINITY, |max, (_, lses)| max.max(lses[row].into()));
        let weight = |lses: &[f32]| (f64::from(lses[row]) - max).exp();
        let total: f64 = seen().map(|(_, lses)| weight(lses)).sum();
        *lse = if seen().next().is_none() { f32::NEG_INFINITY } else { (max + total.ln()) as f32 };
        let mut sums = [0.0f32; CHUNK];
        for first in (0..width).step_by(CHUNK) {
            let sums = &mut sums[..CHUNK.min(width - first)];
            sums.fill(0.0);
            for (piece, lses) in seen() {
                let (weight, from) = ((weight(lses) / total) as f32, piece.layout().offset(index));
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum += weight * piece.data()[from + (first + i) * piece.layout().strides[3]].to_f32();
                }
            }
            let to = layout.offset(index);
            for (i, &sum) in sums.iter().enumerate() {
                out.data_mut()[to + (first + i) * layout.strides[3]] = O::from_f32_nearest(sum);
            }
        }
    }
    Ok(())
}
