//! What can be wrong with a call, said with the operand, the axis, and both values.

use core::fmt;

/// Result of every fallible function of this crate.
pub type Result<T> = core::result::Result<T, Error>;

/// A bad argument. Nothing has been written when a function returns one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// An axis of an operand has another size than the other operands ask for.
    Shape {
        /// Which operand, as the function's signature names it.
        operand: &'static str,
        /// Which axis of it.
        axis: &'static str,
        /// The size that the other operands imply.
        expected: usize,
        /// The size that was given.
        actual: usize,
    },
    /// `num_heads` is not a multiple of `num_kv_heads` (or the latter is 0 and the former is not).
    HeadGroups {
        /// Heads of the queries.
        num_heads: usize,
        /// Heads of the keys and values.
        num_kv_heads: usize,
    },
    /// A slice is shorter than its view (or, for a contiguous view or a list, of another length).
    Length {
        /// Which operand or option.
        operand: &'static str,
        /// How many elements it needs.
        expected: usize,
        /// How many it has.
        actual: usize,
    },
    /// Size times stride of an axis, or the sum over the axes, does not fit `isize` bytes.
    Overflow {
        /// Which operand.
        operand: &'static str,
        /// The axis at which the arithmetic overflows.
        axis: &'static str,
        /// Its size.
        size: usize,
        /// Its stride, in elements.
        stride: usize,
    },
    /// Two indices of an output view may name the same element.
    Overlap {
        /// Which operand.
        operand: &'static str,
        /// The axis whose stride is too small.
        axis: &'static str,
        /// The smallest stride at which no two elements can meet.
        expected: usize,
        /// The stride that was given.
        actual: usize,
    },
    /// An option has a value that means nothing.
    Value {
        /// Which option.
        option: &'static str,
        /// What is allowed.
        expected: &'static str,
        /// What was given.
        actual: f64,
    },
    /// The default `softmax_scale`, `1 / sqrt(head_dim)`, does not exist for `head_dim == 0`: give one.
    NoDefaultScale,
    /// This processor (or `POLYHEAD_MAX_LEVEL`) does not offer the level that was asked for.
    LevelUnavailable {
        /// Name of the level asked for.
        requested: &'static str,
        /// Name of the best level there is.
        best: &'static str,
    },
    /// The memory that the call or the cache needs cannot be had.
    Memory {
        /// Its size; `usize::MAX` if it is larger than that.
        bytes: usize,
    },
    /// The level does not implement this operation.
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// A cache has no room for what was to be appended.
    Full {
        /// What there is not enough of: tokens of an item, tokens of a chunk, pages.
        what: &'static str,
        /// How many there may be (of pages: are free).
        capacity: usize,
        /// How many are needed; `usize::MAX` if more than that.
        needed: usize,
    },
    /// A ring cache has overwritten a token that the call needs.
    Overwritten {
        /// Position of the first token that is needed.
        needed: usize,
        /// Position of the oldest token that is left, those kept from the beginning aside.
        oldest: usize,
    },
    /// No sequence of this cache has the id, or none has it any more.
    UnknownSequence,
    /// A tensor of a state dict has another shape than the layer's.
    TensorShape {
        /// Its name, prefix included.
        name: String,
        /// The shape that the layer has.
        expected: Vec<usize>,
        /// The shape that was found.
        actual: Vec<usize>,
    },
    /// A state dict lacks a tensor.
    MissingTensor {
        /// Its name, prefix included.
        name: String,
        /// The shape that the layer has; empty if any would do.
        expected: Vec<usize>,
    },
    /// A state dict has a tensor, under the layer's prefix, that the layer has no use for.
    UnexpectedTensor {
        /// Its name, prefix included.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor is of a type that is neither `f32`, `f16` nor `bf16`.
    TensorType {
        /// Its name, prefix included.
        name: String,
        /// Its type.
        actual: String,
    },
    /// A checkpoint is not what its format says.
    Checkpoint {
        /// What the format's own library has to say.
        reason: String,
    },
    /// A tensor has more or fewer axes than its place allows.
    Rank {
        /// Which operand.
        operand: &'static str,
        /// How many it may have.
        expected: &'static str,
        /// How many it has.
        actual: usize,
    },
    /// An argument is not there that another one needs.
    Missing {
        /// What is not there.
        argument: &'static str,
        /// What needs it.
        needed_by: &'static str,
    },
    /// Two arguments of which there may be only one.
    Conflict {
        /// One of them.
        argument: &'static str,
        /// The other.
        with: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { operand, axis, expected, actual } => {
                write!(f, "{operand}: axis {axis} has size {actual}, expected {expected}")
            }
            Self::HeadGroups { num_heads, num_kv_heads } => {
                write!(f, "num_heads ({num_heads}) is not a multiple of num_kv_heads ({num_kv_heads})")
            }
            Self::Length { operand, expected, actual } => {
                write!(f, "{operand}: {expected} elements are needed, the slice has {actual}")
            }
            Self::Overflow { operand, axis, size, stride } => {
                write!(f, "{operand}: axis {axis} of size {size} and stride {stride} overflows the address space")
            }
            Self::Overlap { operand, axis, expected, actual } => {
                write!(f, "{operand}: elements overlap, axis {axis} has stride {actual}, expected at least {expected}")
            }
            Self::Value { option, expected, actual } => write!(f, "{option} is {actual}, expected {expected}"),
            Self::NoDefaultScale => {
                write!(f, "softmax_scale: 1/sqrt(head_dim) is undefined for head_dim 0, set it explicitly")
            }
            Self::LevelUnavailable { requested, best } => {
                write!(f, "level {requested} is not available here, the best level is {best}")
            }
            Self::Memory { bytes } => write!(f, "{bytes} bytes cannot be allocated"),
            Self::Unsupported { what } => write!(f, "{what} is not supported"),
            Self::Full { what, capacity, needed } => {
                write!(f, "the cache is full: {needed} {what} are needed, there is room for {capacity}")
            }
            Self::Overwritten { needed, oldest } => {
                write!(f, "token {needed} is needed and has been overwritten, the oldest left is {oldest}")
            }
            Self::UnknownSequence => write!(f, "the cache has no sequence of this id"),
            Self::TensorShape { name, expected, actual } => {
                write!(f, "tensor {name} has shape {actual:?}, expected {expected:?}")
            }
            Self::MissingTensor { name, expected } if expected.is_empty() => write!(f, "tensor {name} is missing"),
            Self::MissingTensor { name, expected } => write!(f, "tensor {name} of shape {expected:?} is missing"),
            Self::UnexpectedTensor { name, shape } => {
                write!(f, "tensor {name} of shape {shape:?} is not one of this layer's")
            }
            Self::TensorType { name, actual } => {
                write!(f, "tensor {name} has type {actual}, expected f32, f16 or bf16")
            }
            Self::Checkpoint { reason } => write!(f, "the checkpoint cannot be read: {reason}"),
            Self::Rank { operand, expected, actual } => write!(f, "{operand} has {actual} axes, expected {expected}"),
            Self::Missing { argument, needed_by } => write!(f, "{argument} is missing, {needed_by} needs it"),
            Self::Conflict { argument, with } => write!(f, "{argument} and {with} exclude each other"),
        }
    }
}

impl core::error::Error for Error {}
