//! AMX: eight tiles of 16 rows of 64 bytes, and products of bf16 matrices on them. In assembly, as stable Rust has no intrinsics for
//! them, nor names for what to detect.
#![allow(unsafe_code, reason = "assembly, whose instructions the token proves")]
#![cfg_attr(polyhead_emulated_matrix, allow(dead_code, reason = "the imitation is used instead"))]

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use core::cell::Cell;
use core::marker::PhantomData;
use std::sync::OnceLock;

use super::Avx512;
use crate::kernel::matrix::{MAX_PRODUCTS, Matrix, MatrixOp, Multiply, Product, TILE, products};

/// Proof that the processor has AMX-TILE, AMX-BF16 and what [`Avx512`] asks for, and that the operating system lets this process use
/// tiles: only `new` makes one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

impl Amx {
    pub(crate) fn new() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| Avx512::new().is_some() && cpu_has_tiles() && permission()).then_some(Self(()))
    }
}

/// Intel's manual, volume 1, section 18.3: CPUID's bits, the state that XCR0 enables, and palette 1 as this file configures it.
/// Called where [`Avx512`] exists.
#[allow(unused_unsafe, reason = "CPUID is safe to call from Rust 1.94 on")]
fn cpu_has_tiles() -> bool {
    const TILE_STATES: u32 = 0b11 << 17;
    // SAFETY: every x86-64 processor has CPUID.
    let cpuid = |leaf, sub_leaf| unsafe { __cpuid_count(leaf, sub_leaf) };
    let features = cpuid(7, 0).edx;
    if cpuid(0, 0).eax < 0x1d || features & 1 << 22 == 0 || features & 1 << 24 == 0 {
        return false;
    }
    let enabled: u32;
    // SAFETY: AVX-512 was found, which needs XGETBV to be enabled; it reads a register and writes eax and edx.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack, preserves_flags)) };
    let palette = cpuid(0x1d, 1);
    let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    enabled & TILE_STATES == TILE_STATES && row_bytes == 64 && tiles >= 8 && rows >= 16
}

/// Linux enables tiles for a process that asks, as they make the state of its threads larger (`arch_prctl`,
/// `ARCH_REQ_XCOMP_PERM`). It may refuse.
#[cfg(target_os = "linux")]
fn permission() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the system call takes two integers and touches no memory of ours; it clobbers rcx and r11.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XTILEDATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permission() -> bool {
    false
}

/// What LDTILECFG reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All tiles of full size.
static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    /// Values of [`Configured`] that this thread has.
    static CONFIGURED: Cell<usize> = const { Cell::new(0) };
}

/// Proof that the tiles of this thread are configured, which it does not leave. The last one to be dropped, also by a panic,
/// releases them.
pub(crate) struct Configured(PhantomData<*const ()>);

impl Drop for Configured {
    fn drop(&mut self) {
        let left = CONFIGURED.get() - 1;
        CONFIGURED.set(left);
        if left == 0 {
            // SAFETY: `configure` has found AMX, and nothing on this thread relies on the tiles any more.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }
}

impl Matrix for Amx {
    #[inline(always)]
    fn run<O: MatrixOp>(self, op: O) -> O::Output {
        op.run(self)
    }
}

impl Multiply for Amx {
    type Configured = Configured;

    fn configure(self) -> Configured {
        CONFIGURED.set(CONFIGURED.get() + 1);
        // SAFETY: `self` exists, so AMX was found and permitted; `CONFIG` is 64 bytes that are valid for palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(readonly, nostack, preserves_flags)) };
        Configured(PhantomData)
    }

    fn product<const NB: usize>(self, _: &Configured, op: Product<'_>) {
        op.check::<NB>();
        // Distances of the terms' tiles in bytes, product by product.
        let (mut offsets, mut count) = ([[0usize; 2]; MAX_PRODUCTS], 0);
        for [a, b] in products(op.terms) {
            offsets[count] = [a * op.a_term * size_of::<f32>(), b * op.b_term * size_of::<f32>()];
            count += 1;
        }
        let (a, b, c) = (op.a.as_ptr(), op.b.as_ptr(), op.c.as_mut_ptr());
        let (offsets, products) = (offsets.as_ptr(), count);
        // SAFETY: tiles are configured on this thread, as a `Configured` proves. There is at least one product and one step; `check`
        // has found all tiles of `a` and `b` that the steps of these products have, and `c`, within their slices. What the assembly
        // leaves in tiles is read by nobody.
        unsafe {
            match NB {
                1 => narrow(a, b, c, offsets, products, op.depth),
                2 => wide(a, b, c, offsets, products, op.depth),
                _ => unreachable!("products have one or two columns of tiles"),
            }
        }
    }
}

const BYTES: usize = TILE * size_of::<f32>();

/// 32 x 32: two tiles by two.
///
/// # Safety
/// The tiles are configured. `products > 0`, `depth > 0`. From `a` and from `b`, at the distance that each of `offsets` has for them,
/// `depth` steps of two tiles can be read; 32 rows of 32 floats can be written to `c`.
unsafe fn wide(a: *const f32, b: *const f32, c: *mut f32, offsets: *const [usize; 2], products: usize, depth: usize) {
    // SAFETY: the caller's; flags and registers are declared, and only this file uses tiles.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "mov {pa}, [{offsets}]",
            "mov {pb}, [{offsets} + 8]",
            "add {pa}, {a}",
            "add {pb}, {b}",
            "mov {k}, {depth}",
            "3:",
            "tileloadd tmm4, [{pa} + {row}*1]",
            "tileloadd tmm6, [{pb} + {row}*1]",
            "tileloadd tmm7, [{pb} + {row}*1 + {tile}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{pa} + {row}*1 + {tile}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {pa}, {step}",
            "add {pb}, {step}",
            "dec {k}",
            "jnz 3b",
            "add {offsets}, 16",
            "dec {products}",
            "jnz 2b",
            "tilestored [{c} + {row}*2], tmm0",
            "tilestored [{c} + {row}*2 + 64], tmm1",
            "tilestored [{c} + {row}*2 + 2048], tmm2",
            "tilestored [{c} + {row}*2 + 2112], tmm3",
            a = in(reg) a,
            b = in(reg) b,
            c = in(reg) c,
            offsets = inout(reg) offsets => _,
            products = inout(reg) products => _,
            depth = in(reg) depth,
            row = in(reg) 64usize,
            pa = out(reg) _,
            pb = out(reg) _,
            k = out(reg) _,
            tile = const BYTES,
            step = const 2 * BYTES,
            options(nostack)
        );
    }
}

/// 32 x 16: two tiles by one.
///
/// # Safety
/// As [`wide`], but for steps of one tile of `b` and rows of 16 floats of `c`.
unsafe fn narrow(a: *const f32, b: *const f32, c: *mut f32, offsets: *const [usize; 2], products: usize, depth: usize) {
    // SAFETY: the caller's; flags and registers are declared, and only this file uses tiles.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm2",
            "2:",
            "mov {pa}, [{offsets}]",
            "mov {pb}, [{offsets} + 8]",
            "add {pa}, {a}",
            "add {pb}, {b}",
            "mov {k}, {depth}",
            "3:",
            "tileloadd tmm4, [{pa} + {row}*1]",
            "tileloadd tmm6, [{pb} + {row}*1]",
            "tileloadd tmm5, [{pa} + {row}*1 + {tile}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "add {pa}, {step}",
            "add {pb}, {tile}",
            "dec {k}",
            "jnz 3b",
            "add {offsets}, 16",
            "dec {products}",
            "jnz 2b",
            "tilestored [{c} + {row}*1], tmm0",
            "tilestored [{c} + {row}*1 + {tile}], tmm2",
            a = in(reg) a,
            b = in(reg) b,
            c = in(reg) c,
            offsets = inout(reg) offsets => _,
            products = inout(reg) products => _,
            depth = in(reg) depth,
            row = in(reg) 64usize,
            pa = out(reg) _,
            pb = out(reg) _,
            k = out(reg) _,
            tile = const BYTES,
            step = const 2 * BYTES,
            options(nostack)
        );
    }
}

#[cfg(all(test, not(polyhead_emulated_matrix)))]
mod tests {
    use super::*;
    use crate::kernel::matrix::{SIDE, STEP};

    /// The tiles of this machine; without them the tests here have nothing to look at, and say so.
    fn amx() -> Option<Amx> {
        let amx = Amx::new();
        if amx.is_none() {
            eprintln!("skipped: no AMX");
        }
        amx
    }

    /// Small integers: every product and sum is exact.
    fn integers(len: usize, mut seed: u32) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((seed >> 24) % 17) as f32 - 8.0
        };
        // Two a float: bf16 is the upper half of an `f32`.
        (0..len).map(|_| f32::from_bits(next().to_bits() >> 16 | next().to_bits() & 0xffff_0000)).collect()
    }

    fn halves(pair: f32) -> [f32; 2] {
        [f32::from_bits(pair.to_bits() << 16), f32::from_bits(pair.to_bits() & 0xffff_0000)]
    }

    fn check<const NB: usize>(amx: Amx, configured: &Configured, terms: [usize; 2], depth: usize) {
        let (a_term, b_term) = (depth * 2 * TILE + 32, depth * NB * TILE + 48);
        let (a, b) = (integers(terms[0] * a_term, 1), integers(terms[1] * b_term, 2));
        let mut c = vec![f32::NAN; STEP * NB * SIDE];
        amx.product::<NB>(configured, Product { terms, depth, a: &a, a_term, b: &b, b_term, c: &mut c });
        for (at, &c) in c.iter().enumerate() {
            let (row, column) = (at / (NB * SIDE), at % (NB * SIDE));
            let mut sum = 0.0;
            for [i, j] in products(terms) {
                for step in 0..depth {
                    let a = &a[i * a_term + (step * 2 + row / SIDE) * TILE + row % SIDE * SIDE..][..SIDE];
                    let b = &b[j * b_term + (step * NB + column / SIDE) * TILE + column % SIDE..];
                    for (pair, &a) in a.iter().enumerate() {
                        let ([a0, a1], [b0, b1]) = (halves(a), halves(b[pair * SIDE]));
                        sum += a0 * b0 + a1 * b1;
                    }
                }
            }
            assert_eq!(c, sum, "[{row}, {column}] of {terms:?} x {depth} x {NB}");
        }
    }

    #[test]
    fn products_are_those_of_matrices() {
        let Some(amx) = amx() else { return };
        let configured = amx.configure();
        for terms in [[1, 1], [1, 2], [2, 1], [2, 2], [3, 1], [1, 3], [3, 2], [2, 3], [3, 3]] {
            for depth in [1, 2, 5] {
                check::<1>(amx, &configured, terms, depth);
                check::<2>(amx, &configured, terms, depth);
            }
        }
    }

    #[test]
    #[should_panic(expected = "spans")]
    fn tiles_outside_of_a_slice_are_refused() {
        let Some(amx) = amx() else { panic!("spans: skipped") };
        let (a, b, mut c) = ([0.0; 2 * TILE], [0.0; TILE - 1], [0.0; STEP * SIDE]);
        let (a, b, c) = (&a[..], &b[..], &mut c[..]);
        amx.product::<1>(&amx.configure(), Product { terms: [1, 1], depth: 1, a, a_term: 0, b, b_term: 0, c });
    }

    #[test]
    fn tiles_stay_configured_while_anybody_needs_them() {
        let Some(amx) = amx() else { return };
        let outer = amx.configure();
        drop(amx.configure());
        check::<2>(amx, &outer, [3, 3], 2);
        let inner = amx.configure();
        drop(outer);
        check::<2>(amx, &inner, [3, 3], 2);
        let panicked = std::panic::catch_unwind(|| {
            let _configured = amx.configure();
            panic!("with tiles");
        });
        assert!(panicked.is_err());
        check::<1>(amx, &inner, [1, 1], 1);
        std::thread::spawn(move || check::<2>(amx, &amx.configure(), [2, 2], 3)).join().expect("another thread");
        check::<1>(amx, &inner, [2, 2], 1);
        drop(inner);
        assert_eq!(CONFIGURED.get(), 0);
        // A guard that nobody drops costs a release, no more.
        core::mem::forget(amx.configure());
        check::<2>(amx, &amx.configure(), [1, 1], 1);
        CONFIGURED.set(0);
    }
}
