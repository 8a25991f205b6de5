//! Transposed outputs, `[width][lanes]`.

use super::super::lanes::{Lanes, Op};
use super::super::online::finite_or_zero;
use super::pack::with_terms;
use super::product::Beside;
use super::softmax::probability;
use super::{Multiply, STEP};

/// `o = alpha * o + product`, rows of `lanes`, or `o = product`.
pub(super) struct AddProduct<'a, 'b, M: Multiply> {
    pub(super) o: &'a mut [f32],
    pub(super) product: &'a [f32],
    pub(super) lanes: usize,
    pub(super) alpha: Option<&'a [f32]>,
    /// What goes on at the same time.
    pub(super) beside: &'a mut Beside<'b, M>,
}

impl<M: Multiply> AddProduct<'_, '_, M> {
    /// Ticks that it has, each about as much work as one of softmax.
    pub(super) fn ticks(len: usize, lanes: usize) -> usize {
        len.div_ceil(STEP * lanes)
    }
}

impl<M: Multiply> Op for AddProduct<'_, '_, M> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { o, product, lanes, alpha, beside } = self;
        let Some(alpha) = alpha else { return o.copy_from_slice(&product[..o.len()]) };
        for (o, product) in o.chunks_mut(STEP * lanes).zip(product.chunks(STEP * lanes)) {
            for lane in (0..lanes).step_by(L::LANES) {
                let alpha = l.load(&alpha[lane..]);
                for (o, product) in o.chunks_exact_mut(lanes).zip(product.chunks_exact(lanes)) {
                    let o = &mut o[lane..];
                    l.store(l.fma(l.load(o), alpha, l.load(&product[lane..])), o);
                }
            }
            beside.tick();
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

/// `o[d][row] += p[row] * value[d]` where the row sees the key, of which there are the scores.
pub(super) struct AddValue<'a> {
    pub(super) o: &'a mut [f32],
    pub(super) value: &'a [f32],
    pub(super) s: &'a [f32],
    pub(super) max: &'a [f32],
    pub(super) c: f32,
    /// That softmax makes of a probability.
    pub(super) terms: usize,
    pub(super) seen: &'a [f32],
}

impl Op for AddValue<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let lanes = self.s.len();
        for lane in (0..lanes).step_by(L::LANES) {
            let (s, max) = (l.load(&self.s[lane..]), l.load(&self.max[lane..]));
            let (shift, c) = (finite_or_zero(l, max), l.splat(self.c));
            let p = with_terms!(self.terms, TERMS => probability::<L, TERMS>(l, s, shift, c));
            let seen = l.lt(l.splat(0.0), l.load(&self.seen[lane..]));
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
