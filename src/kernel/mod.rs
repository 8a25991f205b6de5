//! The algorithms, once, generic over the lanes of a level. Nothing here allocates, spawns or asks the processor.

pub(crate) mod blocking;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "what only matrix tiles use"))]
mod exp;
mod few;
mod few_softmax;
mod finish;
pub(crate) mod fused;
mod lanes;
mod mask_tile;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no other processor has matrix tiles here"))]
pub(crate) mod matrix;
mod online;
mod operand;
mod pack;
pub(crate) mod packed;
mod pieces;
pub(crate) mod row_softmax;
mod score;
pub(crate) mod scratch;
mod tile;

pub(crate) use exp::{exp, exp_nonpositive, exp2_nonpositive, tanh};
pub(crate) use lanes::{Lanes, Op};
pub(crate) use matrix::NoMatrix;
