//! Inputs of public bug reports about attention on CPUs, elsewhere, and what is right for them.
//!
//! A test has the case's number and name; `tests/README.md` has the table. Each runs the reported input on every level
//! and then varies it: other sizes around block edges, other masks that mean the same, other element types. What is
//! right is the number in the report's table, or `polyhead::reference`, or the same call on packed copies.

#[path = "../support/mod.rs"]
mod support;

mod child;
mod operands;

mod broadcasts;
mod causal;
mod layouts;
mod masked_rows;
mod not_a_number;
mod options;
mod processors;
mod scores;
mod shapes;
mod stress;
mod table;
mod threads;
mod windows;
