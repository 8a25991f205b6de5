//! ONNX's `Attention`: its own backend tests, the errors, and random nodes against the reference.

mod errors;
#[path = "../oracle/mod.rs"]
mod oracle;
mod properties;
#[path = "../support/mod.rs"]
mod support;
mod vectors;
mod wild;
