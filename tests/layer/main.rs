//! The layer: PyTorch's and Keras' numbers, weights included, and its promises.

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "safetensors")]
mod checkpoints;
mod errors;
mod golden;
mod naive;
mod promises;
