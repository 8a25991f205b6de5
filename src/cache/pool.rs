//! Which pages are in use, and by how many.
//!
//! Sequences that share a page share all pages before it, so a page knows its predecessor and a sequence only its last
//! page: forking is one more reference to that, and a pool never allocates after it is made.

use crate::Result;
use crate::workspace::grow;

/// No page.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default)]
struct Page {
    /// The page before it in its sequences; of a free page, the next free one.
    previous: u32,
    /// Sequences of which it is the last page, and pages of which it is the predecessor.
    references: usize,
}

#[derive(Debug)]
pub(super) struct Pool {
    pages: Vec<Page>,
    first_free: u32,
    free: usize,
}

impl Pool {
    pub(super) fn new(count: usize) -> Result<Self> {
        let (mut pages, mut next) = (Vec::new(), 1..);
        grow(&mut pages, count, || Page { previous: next.next().unwrap_or(NONE), references: 0 })?;
        if let Some(last) = pages.last_mut() {
            last.previous = NONE;
        }
        Ok(Self { first_free: if count == 0 { NONE } else { 0 }, free: count, pages })
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Pages that nobody uses.
    pub(super) fn free(&self) -> usize {
        self.free
    }

    /// References to a page.
    pub(super) fn references(&self, page: u32) -> usize {
        self.pages[page as usize].references
    }

    /// The page before, or [`NONE`].
    pub(super) fn previous(&self, page: u32) -> u32 {
        self.pages[page as usize].previous
    }

    /// A free page, of which there must be one, to stand behind `previous`: the caller's reference to that becomes the
    /// page's.
    pub(super) fn take(&mut self, previous: u32) -> u32 {
        let taken = self.first_free;
        let page = &mut self.pages[taken as usize];
        self.first_free = page.previous;
        self.free -= 1;
        *page = Page { previous, references: 1 };
        taken
    }

    /// One more reference.
    pub(super) fn share(&mut self, page: u32) {
        if page != NONE {
            self.pages[page as usize].references += 1;
        }
    }

    /// One reference less; frees what has none left.
    pub(super) fn release(&mut self, mut page: u32) {
        while page != NONE {
            let Page { previous, references } = &mut self.pages[page as usize];
            *references -= 1;
            if *references > 0 {
                return;
            }
            let before = core::mem::replace(previous, self.first_free);
            self.first_free = page;
            self.free += 1;
            page = before;
        }
    }

    /// Makes a reference to a page one to its predecessor, which is returned.
    pub(super) fn step_back(&mut self, page: u32) -> u32 {
        let previous = self.previous(page);
        self.share(previous);
        self.release(page);
        previous
    }
}
