//! What Linux says about this process's memory, and how operands are allocated.

use std::fs;

use bytemuck::Zeroable;

use crate::Result;

/// A line of /proc/self/status, in KiB.
pub(crate) fn status_kib(name: &str) -> Result<i64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).ok_or("no such line")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// Sets the peak of resident memory back, and returns what is resident, in KiB.
pub(crate) fn reset_peak() -> Result<i64> {
    fs::write("/proc/self/clear_refs", "5")?;
    status_kib("VmRSS")
}

/// Zeros on huge pages where the system gives them to who asks, as numpy asks for its arrays: operands of all peers
/// then lie on pages of one kind.
pub(crate) fn huge_zeros<T: Zeroable + Clone>(len: usize) -> Vec<T> {
    const HUGE: usize = 1 << 21;
    let zeros = vec![T::zeroed(); len];
    let start = (zeros.as_ptr() as usize).next_multiple_of(HUGE);
    let end = (zeros.as_ptr() as usize + size_of_val(zeros.as_slice())) & !(HUGE - 1);
    if start < end {
        // SAFETY: start..end are whole pages inside the vector's allocation, and this advice leaves their contents as
        // they are. A failure changes nothing, so that it can be ignored.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
    zeros
}
