//! Matrix tiles in plain code: what AMX computes, on machines that lack it. Only for tests, which ask for it by
//! `--cfg polyhead_emulated_matrix`.

use core::cell::RefCell;

use crate::kernel::matrix::{Matrix, MatrixOp, Multiply, SIDE, TILE};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Emulated;

impl Matrix for Emulated {
    fn run<O: MatrixOp>(self, op: O) -> O::Output {
        op.run(self)
    }
}

impl Multiply for Emulated {
    /// `[tile of rows][tile of columns]`.
    type Configured = RefCell<[[[f32; TILE]; 2]; 2]>;

    fn configure(self) -> Self::Configured {
        RefCell::new([[[f32::NAN; TILE]; 2]; 2])
    }

    fn clear(self, sums: &Self::Configured) {
        sums.replace([[[0.0; TILE]; 2]; 2]);
    }

    fn load(self, sums: &Self::Configured, c: &[f32]) {
        let columns = c.len() / (2 * SIDE);
        assert!(c.len() == 2 * TILE || c.len() == 4 * TILE);
        for (i, row) in c.chunks_exact(columns).enumerate() {
            for (tile, row) in sums.borrow_mut()[i / SIDE].iter_mut().zip(row.chunks_exact(SIDE)) {
                tile[i % SIDE * SIDE..][..SIDE].copy_from_slice(row);
            }
        }
    }

    fn add(self, sums: &Self::Configured, a: &[f32], b: &[f32]) {
        assert!(a.len() == 2 * TILE && (b.len() == TILE || b.len() == 2 * TILE));
        for (sums, a) in sums.borrow_mut().iter_mut().zip(a.chunks_exact(TILE)) {
            sums.iter_mut().zip(b.chunks_exact(TILE)).for_each(|(sum, b)| tile_product(a, b, sum));
        }
    }

    fn store(self, sums: &Self::Configured, c: &mut [f32]) {
        let columns = c.len() / (2 * SIDE);
        assert!(c.len() == 2 * TILE || c.len() == 4 * TILE);
        for (i, row) in c.chunks_exact_mut(columns).enumerate() {
            for (tile, row) in sums.borrow()[i / SIDE].iter().zip(row.chunks_exact_mut(SIDE)) {
                row.copy_from_slice(&tile[i % SIDE * SIDE..][..SIDE]);
            }
        }
    }
}

/// TDPBF16PS: the products of the even and of the odd elements of a step are summed by themselves; subnormals count as 0.
fn tile_product(a: &[f32], b: &[f32], c: &mut [f32]) {
    let flush = |x: f32| if x.is_subnormal() { 0.0 * x } else { x };
    let low = |x: f32| flush(f32::from_bits(x.to_bits() << 16));
    let high = |x: f32| flush(f32::from_bits(x.to_bits() & 0xffff_0000));
    for (row, a) in a.chunks_exact(SIDE).enumerate() {
        let (mut even, mut odd) = ([0.0f32; SIDE], [0.0f32; SIDE]);
        for (&a, b) in a.iter().zip(b.chunks_exact(SIDE)) {
            for i in 0..SIDE {
                even[i] += low(a) * low(b[i]);
                odd[i] += high(a) * high(b[i]);
            }
        }
        for (i, c) in c[row * SIDE..][..SIDE].iter_mut().enumerate() {
            *c = flush(*c + flush(even[i] + odd[i]));
        }
    }
}
