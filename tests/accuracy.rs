//! What the example `accuracy` computes with, by the tests of its own modules: the measures of an error, and the inputs.

#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/accuracy/errors.rs"]
mod errors;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/accuracy/inputs.rs"]
mod inputs;
