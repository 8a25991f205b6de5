//! Memory that calls of a layer reuse.

use super::extra_keys::Padded;
use super::rotary::Turns;
use crate::workspace::Buffer;

/// Memory for the intermediate results of layers: projected queries, keys and values, and attention outputs. It grows to what the
/// largest call needs; any number of layers may take turns with one.
///
/// ```
/// let mut workspace = polyhead::layer::Workspace::new();
/// # assert_eq!(workspace.bytes(), 0);
/// # workspace = Default::default();
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    /// Products of the inputs with their weights; those of the keys and of the values are empty where one product makes several.
    pub(super) projected: [Buffer; 3],
    /// Attention outputs, heads side by side.
    pub(super) heads: Buffer,
    pub(super) padded: Padded,
    pub(super) turns: Turns,
}

impl Workspace {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        let buffers = self.projected.iter().chain([&self.heads]).map(Buffer::bytes).sum::<usize>();
        buffers + self.padded.bytes() + self.turns.bytes()
    }
}
