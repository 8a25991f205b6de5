//! Caches of keys and values for decoding: tokens are appended, and attention reads them where they lie.
//!
//! | cache | its sequences | a new token |
//! |---|---|---|
//! | [`KvCache`] | a fixed batch, each with room for `capacity` tokens | is refused when the room is full |
//! | [`RingCache`] | a fixed batch under a sliding window | overwrites what no window reaches any more |
//! | [`PagedCache`] | come, go and fork at run time, in pages of a pool | takes a page when the last one is full |
//!
//! All of them hold `f32`, [`f16`](half::f16) or [`bf16`](half::bf16), whatever the type of the tokens that are
//! appended; these are any [`Sequences`], so a batch may append as many tokens to each sequence as it likes. Keys and
//! values are in buffers of their own, (page, head, token, dim) in memory: those of a head lie side by side in a page,
//! which is what decoding reads. The kernels take them as [`Paged`](crate::Paged) operands, without a copy; the result
//! has the bits that the same tokens in a [`Heads`](crate::Heads) view give.
//!
//! Of `n` new tokens each sees itself and those before it if the options ask for `causal(Diagonal::BottomRight)`:
//! append first, then attend. (`Diagonal::TopLeft` would put the new queries at the oldest keys.)
//!
//! Everything is checked first: a call that returns an error has changed nothing. A decode loop in its stride allocates
//! nothing.
//!
//! ```
//! use polyhead::cache::{KvCache, KvShape};
//! use polyhead::{Diagonal, Heads, HeadsMut, Options};
//! let shape = KvShape { num_kv_heads: 2, head_dim: 8, head_dim_v: 8 };
//! let mut cache = KvCache::<half::bf16>::new(shape, 1, 64)?;
//! let options = Options::new().causal(Diagonal::BottomRight);
//! for tokens in [5, 1, 1] {
//!     let (q, kv) = (vec![0.5f32; 4 * tokens * 8], vec![0.25f32; 2 * tokens * 8]);
//!     let mut out = vec![0.0f32; q.len()];
//!     let kv = Heads::bshd(&kv, [1, tokens, 2, 8])?;
//!     cache.append_all(&kv, &kv)?;
//!     let (q, out) = (Heads::bshd(&q, [1, tokens, 4, 8])?, HeadsMut::bshd(&mut out, [1, tokens, 4, 8])?);
//!     cache.attend(&q, out, &options)?;
//! }
//! assert_eq!(cache.lengths(), [7]);
//! # Ok::<(), polyhead::Error>(())
//! ```

mod any;
mod block_table;
mod in_place;
mod paged;
mod pool;
mod ring;
mod store;

pub use any::{Cache, PagedSequences};
pub use block_table::{BlockTable, PagedBatch};
pub use in_place::KvCache;
pub use paged::{PagedCache, SequenceId};
pub use ring::{Ring, RingCache};
pub use store::KvShape;

use crate::{Error, Result, Sequences};

/// That a batch item exists.
fn check_item(item: usize, batch: usize) -> Result<()> {
    if item < batch {
        return Ok(());
    }
    Err(Error::Value { option: "item", expected: "an item of the batch", actual: item as f64 })
}

/// That sequences hold one for each of `batch` items.
fn check_batch(operand: &'static str, sequences: &dyn Sequences, batch: usize) -> Result<()> {
    let [actual, ..] = sequences.shape();
    if actual == batch { Ok(()) } else { Err(Error::Shape { operand, axis: "batch", expected: batch, actual }) }
}
