//! Transposed outputs, `[width][lanes]`.

use super::super::lanes::{Lanes, Op};

/// `o = alpha * o + product`, rows of `lanes`, or `o = product`.
pub(super) struct AddProduct<'a> {
    pub(super) o: &'a mut [f32],
    pub(super) product: &'a [f32],
    pub(super) lanes: usize,
    pub(super) alpha: Option<&'a [f32]>,
}

impl Op for AddProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { o, product, lanes, alpha } = self;
        let Some(alpha) = alpha else { return o.copy_from_slice(&product[..o.len()]) };
        for lane in (0..lanes).step_by(L::LANES) {
            let alpha = l.load(&alpha[lane..]);
            for (o, product) in o.chunks_exact_mut(lanes).zip(product.chunks_exact(lanes)) {
                let o = &mut o[lane..];
                l.store(l.fma(l.load(o), alpha, l.load(&product[lane..])), o);
            }
        }
    }
}

/// `o = alpha * o`, rows as long as `alpha`.
pub(super) struct Rescale<'a> {
    pub(super) o: &'a mut [f32],
    pub(super) alpha: &'a [f32],
}

impl Op for Rescale<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let lanes = self.alpha.len();
        for lane in (0..lanes).step_by(L::LANES) {
            let alpha = l.load(&self.alpha[lane..]);
            for o in self.o.chunks_exact_mut(lanes) {
                let o = &mut o[lane..];
                l.store(l.mul(l.load(o), alpha), o);
            }
        }
    }
}

/// `o[d][row] += p[row] * value[d]` where the row sees the key.
pub(super) struct AddValue<'a> {
    pub(super) o: &'a mut [f32],
    pub(super) value: &'a [f32],
    pub(super) p: &'a [f32],
    pub(super) seen: &'a [f32],
}

impl Op for AddValue<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let lanes = self.p.len();
        for lane in (0..lanes).step_by(L::LANES) {
            let (p, seen) = (l.load(&self.p[lane..]), l.lt(l.splat(0.0), l.load(&self.seen[lane..])));
            for (o, &value) in self.o.chunks_exact_mut(lanes).zip(self.value) {
                let o = &mut o[lane..];
                let old = l.load(o);
                l.store(l.select(seen, l.fma(p, l.splat(value), old), old), o);
            }
        }
    }
}

/// The subnormal elements, zeros for all others.
pub(super) struct Subnormals<'a> {
    pub(super) o: &'a [f32],
    pub(super) dst: &'a mut [f32],
}

impl Op for Subnormals<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for (x, dst) in self.o.chunks_exact(L::LANES).zip(self.dst.chunks_exact_mut(L::LANES)) {
            let x = l.load(x);
            l.store(l.select(l.lt(l.abs(x), l.splat(f32::MIN_POSITIVE)), x, l.splat(0.0)), dst);
        }
    }
}

/// `sums += more`.
pub(super) struct Add<'a> {
    pub(super) sums: &'a mut [f32],
    pub(super) more: &'a [f32],
}

impl Op for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for (x, y) in self.sums.chunks_exact_mut(L::LANES).zip(self.more.chunks_exact(L::LANES)) {
            l.store(l.add(l.load(x), l.load(y)), x);
        }
    }
}
