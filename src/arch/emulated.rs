//! Matrix tiles in plain code: what AMX computes, on machines that lack it. Only for tests, which ask for it by
//! `--cfg polyhead_emulated_matrix`.

use crate::kernel::matrix::{Matrix, MatrixOp, Multiply, Product, SIDE, TILE, products};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Emulated;

impl Matrix for Emulated {
    fn run<O: MatrixOp>(self, op: O) -> O::Output {
        op.run(self)
    }
}

impl Multiply for Emulated {
    type Configured = ();

    fn configure(self) {}

    fn product<const NB: usize>(self, (): &(), op: Product<'_>) {
        op.check::<NB>();
        op.c.fill(0.0);
        for [a, b] in products(op.terms) {
            for step in 0..op.depth {
                for (i, j) in (0..2).flat_map(|i| (0..NB).map(move |j| (i, j))) {
                    let a = &op.a[a * op.a_term + (2 * step + i) * TILE..][..TILE];
                    let b = &op.b[b * op.b_term + (NB * step + j) * TILE..][..TILE];
                    tile_product(a, b, &mut op.c[i * SIDE * NB * SIDE + j * SIDE..], NB * SIDE);
                }
            }
        }
    }
}

/// TDPBF16PS: the products of the even and of the odd elements of a step are summed by themselves; subnormals count as 0.
fn tile_product(a: &[f32], b: &[f32], c: &mut [f32], stride: usize) {
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
        for (i, c) in c[row * stride..][..SIDE].iter_mut().enumerate() {
            *c = flush(*c + flush(even[i] + odd[i]));
        }
    }
}
