//! Memory of operands and results: among foreign elements, or against a page that nobody may touch.
#![allow(dead_code, reason = "each test crate uses a part of it")]
#![allow(unsafe_code, reason = "pages without access come from the operating system")]

use core::fmt::{self, Debug, Display};
use core::ops::{Deref, DerefMut};

/// What lies around the elements of a [`Memory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Edges {
    /// Foreign elements on both sides: who reads them computes with NaN, who writes them is seen.
    #[default]
    Foreign,
    /// A page without access before the first element, foreign elements to the end of the last page.
    GuardBefore,
    /// A page without access after the last element, foreign elements from the start of the first page.
    GuardAfter,
}

impl Edges {
    pub(crate) const ALL: [Self; 3] = [Self::Foreign, Self::GuardBefore, Self::GuardAfter];

    /// All of them in turn, for tests that go through sizes.
    pub(crate) fn turn(n: usize) -> Self {
        Self::ALL[n % 3]
    }
}

/// Foreign elements before the memory, an odd number so that nothing is aligned, and after it, more than a vector or a tile
/// reads.
const BEFORE: usize = 7;
const AFTER: usize = 130;

/// Elements with [`Edges`]. As a slice it is what is there from the first element on, foreign elements behind it included.
#[derive(Clone)]
pub(crate) struct Memory<T> {
    store: Store<T>,
    edges: Edges,
    first: usize,
    len: usize,
}

#[derive(Clone)]
enum Store<T> {
    Heap(Vec<T>),
    Pages(Pages<T>),
}

impl<T: Copy> Memory<T> {
    /// `len` elements and those around them, all `fill`.
    pub(crate) fn new(edges: Edges, len: usize, fill: T) -> Self {
        let (store, first) = match edges {
            Edges::Foreign => (Store::Heap(vec![fill; BEFORE + len + AFTER]), BEFORE),
            Edges::GuardBefore => (Store::Pages(Pages::new(len, fill)), 0),
            Edges::GuardAfter => {
                let pages = Pages::new(len, fill);
                let first = pages.len() - len;
                (Store::Pages(pages), first)
            }
        };
        Self { store, edges, first, len }
    }

    /// A copy of some values.
    pub(crate) fn from(edges: Edges, values: &[T], fill: T) -> Self {
        let mut memory = Self::new(edges, values.len(), fill);
        memory.inner_mut().copy_from_slice(values);
        memory
    }

    /// Reads the element that is `offset` away from the first, which ends the process on a page without access.
    ///
    /// # Safety
    /// The element must be mapped, or the process expected to end.
    pub(crate) unsafe fn read_at(&self, offset: isize) -> T {
        // SAFETY: the caller's word.
        unsafe { self.as_ptr().wrapping_offset(offset).read_volatile() }
    }

    /// As [`read_at`](Self::read_at), but writes.
    ///
    /// # Safety
    /// As `read_at`.
    pub(crate) unsafe fn write_at(&mut self, offset: isize, value: T) {
        // SAFETY: the caller's word.
        unsafe { self.as_mut_ptr().wrapping_offset(offset).write_volatile(value) }
    }
}

impl<T> Memory<T> {
    /// The elements without foreign ones.
    pub(crate) fn inner(&self) -> &[T] {
        &self[..self.len]
    }

    pub(crate) fn inner_mut(&mut self) -> &mut [T] {
        let len = self.len;
        &mut self[..len]
    }

    /// All that may be touched, with the foreign elements before the first.
    pub(crate) fn all(&self) -> &[T] {
        match &self.store {
            Store::Heap(heap) => heap,
            Store::Pages(pages) => pages,
        }
    }

    /// Asserts that the foreign elements satisfy `untouched`.
    #[track_caller]
    pub(crate) fn assert_outside(&self, untouched: impl Fn(&T) -> bool, context: impl Display) {
        let outside = |&(i, _): &(usize, &T)| !(self.first..self.first + self.len).contains(&i);
        let touched = self.all().iter().enumerate().filter(outside).find(|(_, x)| !untouched(x));
        let touched = touched.map(|(i, _)| i as isize - self.first as isize);
        assert_eq!(
            touched, None,
            "{context}: written {touched:?} elements from the first of {} ({:?})",
            self.len, self.edges
        );
    }
}

impl<T> Deref for Memory<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.all()[self.first..]
    }
}

impl<T> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let all: &mut [T] = match &mut self.store {
            Store::Heap(heap) => heap,
            Store::Pages(pages) => pages,
        };
        &mut all[self.first..]
    }
}

impl<T: Debug> Debug for Memory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.edges, self.inner())
    }
}

#[cfg(all(unix, not(miri)))]
use pages::Pages;

/// Whole pages between two without access, full of numbers: nothing in them is ever dropped.
#[cfg(all(unix, not(miri)))]
mod pages {
    use core::ops::{Deref, DerefMut};
    use core::ptr::{self, NonNull};

    pub(super) struct Pages<T> {
        data: NonNull<T>,
        /// Elements in the pages.
        len: usize,
        page: usize,
    }

    // SAFETY: it owns its elements, as a `Vec` does.
    unsafe impl<T: Send> Send for Pages<T> {}
    // SAFETY: as above.
    unsafe impl<T: Sync> Sync for Pages<T> {}

    impl<T: Clone> Pages<T> {
        /// At least one page, and room for `least` elements.
        pub(super) fn new(least: usize, fill: T) -> Self {
            // SAFETY: it only reads a setting.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            let page = usize::try_from(page).expect("the system has pages");
            assert!(page.is_multiple_of(size_of::<T>()) && page.is_multiple_of(align_of::<T>()));
            let bytes = (least * size_of::<T>()).max(1).next_multiple_of(page);
            let len = bytes / size_of::<T>();
            let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
            // SAFETY: a new mapping, of which nobody knows; the pages between the first and the last are inside of it. They begin
            // aligned, as pages are, and every element is written before a reference to it is made.
            let data = unsafe {
                let map = libc::mmap(ptr::null_mut(), bytes + 2 * page, libc::PROT_NONE, kind, -1, 0);
                assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
                let inner = map.byte_add(page);
                assert_eq!(libc::mprotect(inner, bytes, access), 0, "{}", std::io::Error::last_os_error());
                let data: *mut T = inner.cast();
                (0..len).for_each(|i| data.add(i).write(fill.clone()));
                NonNull::new(data).expect("a mapping")
            };
            Self { data, len, page }
        }
    }

    impl<T> Deref for Pages<T> {
        type Target = [T];
        fn deref(&self) -> &[T] {
            // SAFETY: `len` elements, written in `new`, that this value owns.
            unsafe { core::slice::from_raw_parts(self.data.as_ptr(), self.len) }
        }
    }

    impl<T> DerefMut for Pages<T> {
        fn deref_mut(&mut self) -> &mut [T] {
            // SAFETY: as in `deref`.
            unsafe { core::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
        }
    }

    impl<T: Clone> Clone for Pages<T> {
        fn clone(&self) -> Self {
            let mut copy = Self::new(self.len, self[0].clone());
            copy.clone_from_slice(self);
            copy
        }
    }

    impl<T> Drop for Pages<T> {
        fn drop(&mut self) {
            // SAFETY: the whole mapping of `new`, whose elements nobody borrows any more.
            let unmapped = unsafe {
                let map = self.data.as_ptr().byte_sub(self.page);
                libc::munmap(map.cast(), self.len * size_of::<T>() + 2 * self.page)
            };
            debug_assert_eq!(unmapped, 0);
        }
    }
}

/// Where there are no such pages, an allocation of the exact size: Miri knows where it ends.
#[cfg(not(all(unix, not(miri))))]
#[derive(Clone)]
struct Pages<T>(Vec<T>);

#[cfg(not(all(unix, not(miri))))]
impl<T: Clone> Pages<T> {
    fn new(len: usize, fill: T) -> Self {
        Self(vec![fill; len])
    }
}

#[cfg(not(all(unix, not(miri))))]
impl<T> Deref for Pages<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

#[cfg(not(all(unix, not(miri))))]
impl<T> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}
