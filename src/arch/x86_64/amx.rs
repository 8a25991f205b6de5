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
use crate::kernel::matrix::{Matrix, MatrixOp, Multiply, SIDE, TILE};

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

    #[inline(always)]
    fn clear(self, _: &Configured) {
        // SAFETY: tiles are configured on this thread, as a `Configured` proves; so below. Only this file uses tiles: the compiler
        // keeps nothing in them, and what one piece of assembly leaves there the next one finds.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nomem, nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn load(self, _: &Configured, c: &[f32]) {
        let (len, c) = (c.len(), c.as_ptr());
        match len {
            // SAFETY: `c` has two tiles, 32 rows of 64 bytes.
            WIDE => unsafe {
                asm!(
                    "tileloadd tmm0, [{c} + {row}*1]",
                    "tileloadd tmm2, [{c} + {row}*1 + {tile}]",
                    c = in(reg) c,
                    row = in(reg) ROW,
                    tile = const BYTES,
                    options(readonly, nostack, preserves_flags)
                );
            },
            // SAFETY: `c` has four tiles, 32 rows of 128 bytes.
            SQUARE => unsafe {
                asm!(
                    "tileloadd tmm0, [{c} + {row}*2]",
                    "tileloadd tmm1, [{c} + {row}*2 + {row_bytes}]",
                    "tileloadd tmm2, [{c} + {row}*2 + {below}]",
                    "tileloadd tmm3, [{c} + {row}*2 + {below} + {row_bytes}]",
                    c = in(reg) c,
                    row = in(reg) ROW,
                    row_bytes = const ROW,
                    below = const 2 * BYTES,
                    options(readonly, nostack, preserves_flags)
                );
            },
            _ => panic!("two tiles of sums, or four"),
        }
    }

    #[inline(always)]
    fn add(self, _: &Configured, a: &[f32], b: &[f32]) {
        let a = a[..2 * TILE].as_ptr();
        match b.len() {
            // SAFETY: `a` has two tiles, and `b` one.
            TILE => unsafe {
                asm!(
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm6, [{b} + {row}*1]",
                    "tileloadd tmm5, [{a} + {row}*1 + {tile}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    a = in(reg) a,
                    b = in(reg) b.as_ptr(),
                    row = in(reg) ROW,
                    tile = const BYTES,
                    options(readonly, nostack, preserves_flags)
                );
            },
            // SAFETY: `a` and `b` have two tiles each.
            WIDE => unsafe {
                asm!(
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm6, [{b} + {row}*1]",
                    "tileloadd tmm7, [{b} + {row}*1 + {tile}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{a} + {row}*1 + {tile}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    a = in(reg) a,
                    b = in(reg) b.as_ptr(),
                    row = in(reg) ROW,
                    tile = const BYTES,
                    options(readonly, nostack, preserves_flags)
                );
            },
            _ => panic!("one tile of columns, or two"),
        }
    }

    #[inline(always)]
    fn store(self, _: &Configured, c: &mut [f32]) {
        let (len, c) = (c.len(), c.as_mut_ptr());
        match len {
            // SAFETY: `c` has room for two tiles, 32 rows of 64 bytes.
            WIDE => unsafe {
                asm!(
                    "tilestored [{c} + {row}*1], tmm0",
                    "tilestored [{c} + {row}*1 + {tile}], tmm2",
                    c = in(reg) c,
                    row = in(reg) ROW,
                    tile = const BYTES,
                    options(nostack, preserves_flags)
                );
            },
            // SAFETY: `c` has room for four tiles, 32 rows of 128 bytes.
            SQUARE => unsafe {
                asm!(
                    "tilestored [{c} + {row}*2], tmm0",
                    "tilestored [{c} + {row}*2 + {row_bytes}], tmm1",
                    "tilestored [{c} + {row}*2 + {below}], tmm2",
                    "tilestored [{c} + {row}*2 + {below} + {row_bytes}], tmm3",
                    c = in(reg) c,
                    row = in(reg) ROW,
                    row_bytes = const ROW,
                    below = const 2 * BYTES,
                    options(nostack, preserves_flags)
                );
            },
            _ => panic!("two tiles of sums, or four"),
        }
    }
}

/// Bytes of a tile and of a row of it.
const BYTES: usize = TILE * size_of::<f32>();
const ROW: usize = SIDE * size_of::<f32>();

/// Floats of two tiles, and of four.
const WIDE: usize = 2 * TILE;
const SQUARE: usize = 4 * TILE;

#[cfg(all(test, not(polyhead_emulated_matrix)))]
mod tests {
    use super::*;
    use crate::kernel::matrix::{Plan, Product, STEP};

    /// The tiles of this machine; without them the tests here have nothing to look at, and say so.
    fn amx() -> Option<Amx> {
        let amx = Amx::new();
        if amx.is_none() {
            eprintln!("skipped: no AMX");
        }
        amx
    }

    /// That the tiles work: a product of ones.
    fn check(amx: Amx, configured: &Configured) {
        let (ones, mut c) = ([f32::from_bits(0x3f80_3f80); WIDE], [f32::NAN; SQUARE]);
        let op = Product {
            plan: &Plan::new([1, 1], [0, 0]),
            depth: 1,
            columns: 2 * SIDE,
            a: &ones,
            a_block: 0,
            b: &ones,
            c: &mut c,
            more: false,
        };
        op.run(amx, configured);
        assert_eq!(c, [STEP as f32; SQUARE]);
    }

    #[test]
    fn tiles_stay_configured_while_anybody_needs_them() {
        let Some(amx) = amx() else { return };
        let outer = amx.configure();
        drop(amx.configure());
        check(amx, &outer);
        let inner = amx.configure();
        drop(outer);
        check(amx, &inner);
        let panicked = std::panic::catch_unwind(|| {
            let _configured = amx.configure();
            panic!("with tiles");
        });
        assert!(panicked.is_err());
        check(amx, &inner);
        std::thread::spawn(move || check(amx, &amx.configure())).join().expect("another thread");
        check(amx, &inner);
        drop(inner);
        assert_eq!(CONFIGURED.get(), 0);
        // A guard that nobody drops costs a release, no more.
        core::mem::forget(amx.configure());
        check(amx, &amx.configure());
        CONFIGURED.set(0);
    }
}
