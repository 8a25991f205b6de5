//! Scratch memory: allocated by plans, reused by calls.
#![allow(unsafe_code, reason = "a slice of cache lines is seen as a slice of the floats they are made of")]

use crate::{Error, Result};

/// Makes a vector `len` long, if it is shorter; an allocator that refuses is an error, not an abort.
pub(crate) fn grow<T>(vec: &mut Vec<T>, len: usize, value: impl FnMut() -> T) -> Result<()> {
    if vec.len() < len {
        let bytes = len.saturating_mul(size_of::<T>());
        vec.try_reserve_exact(len - vec.len()).map_err(|_| Error::Memory { bytes })?;
        vec.resize_with(len, value);
    }
    Ok(())
}

/// Sixteen floats, one cache line: vector loads of scratch never cross a line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A buffer of floats that starts at a cache line and only grows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// At least `len` floats; what they hold is unspecified but initialised.
    pub(crate) fn reserve(&mut self, len: usize) -> Result<()> {
        grow(&mut self.0, len.div_ceil(16), Line::default)
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        let lines: &mut [Line] = &mut self.0;
        // SAFETY: a `Line` is sixteen `f32` without padding (repr(C), 64 bytes, checked below), borrowed for as long as the result.
        unsafe { core::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * 16) }
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        // SAFETY: as in `as_mut_slice`.
        unsafe { core::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 16) }
    }

    /// Bytes on the heap.
    pub(crate) fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<Line>()
    }
}

const _: () = assert!(size_of::<Line>() == 64 && align_of::<Line>() == 64);
