//! The free bytes of an arena.

/// The free spans between blocks, in address order. Adjacent spans are merged.
#[derive(Debug)]
pub(super) struct FreeList {
    pub(super) spans: Vec<Span>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl FreeList {
    pub(super) fn new(len: usize) -> Self {
        // Capacity for far more spans than a step creates, so that the list does not grow in steady state.
        let mut spans = Vec::with_capacity(4096);
        spans.push(Span { offset: 0, len });
        FreeList { spans }
    }

    /// Allocates by best fit: the smallest span that is large enough, the lowest one of equals.
    pub(super) fn allocate(&mut self, len: usize) -> Option<usize> {
        let fitting = self.spans.iter().enumerate().filter(|(_, span)| span.len >= len);
        let (index, _) = fitting.min_by_key(|(_, span)| span.len)?;
        let span = &mut self.spans[index];
        let offset = span.offset;
        span.offset += len;
        span.len -= len;
        if span.len == 0 {
            self.spans.remove(index);
        }
        Some(offset)
    }

    pub(super) fn free(&mut self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let next = self.spans.partition_point(|span| span.offset < offset);
        let touches_next = self.spans.get(next).is_some_and(|span| span.offset == offset + len);
        let previous = next.checked_sub(1).filter(|&index| {
            let span = self.spans[index];
            span.offset + span.len == offset
        });
        match (previous, touches_next) {
            (Some(previous), true) => {
                self.spans[previous].len += len + self.spans[next].len;
                self.spans.remove(next);
            }
            (Some(previous), false) => self.spans[previous].len += len,
            (None, true) => {
                self.spans[next].offset = offset;
                self.spans[next].len += len;
            }
            (None, false) => self.spans.insert(next, Span { offset, len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_two_blocks_overlap_and_all_gaps_merge(
            requests in proptest::collection::vec((1_usize..50, any::<proptest::sample::Index>()), 1..60)
        ) {
            let mut list = FreeList::new(4096);
            let mut taken: Vec<Span> = Vec::new();
            for (len, index) in requests {
                let offset = list.allocate(len).unwrap();
                prop_assert!(taken.iter().all(|span| offset + len <= span.offset || span.offset + span.len <= offset));
                taken.push(Span { offset, len });
                if len % 3 == 0 {
                    let span = taken.swap_remove(index.index(taken.len()));
                    list.free(span.offset, span.len);
                }
            }
            for span in taken {
                list.free(span.offset, span.len);
            }
            prop_assert_eq!(list.spans, vec![Span { offset: 0, len: 4096 }]);
        }
    }
}
