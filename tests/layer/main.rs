//! The layer: PyTorch's and Keras' numbers, weights included, and its promises.

#[path = "../support/mod.rs"]
mod support;

mod errors;
mod golden;
mod naive;
mod promises;
