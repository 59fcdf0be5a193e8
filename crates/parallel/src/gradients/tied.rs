//! Gradients of parameters that a unit of a pipeline reads, and another one has.
//!
//! Several microbatches are under way at a time, so what the reader has for a microbatch waits until the owner completes its
//! gradient for the same one: within the rank, or after a message. Where sums may have another order than on one rank, a reader on another rank
//! sums its parts of a step, which wait for the last microbatch.

use crate::error::Result;
use crate::memory::{Exchanged, Pool};
use trireme_schedule::Outline;
use trireme_tensor::{GradTarget, ParameterSpan, Tie};

/// What the reader of a tie has for the owner's gradient, by microbatch.
pub(crate) struct TiedGradients {
    pub(crate) span: ParameterSpan,
    reader: usize,
    pub(super) pool: Pool,
    /// The microbatch for which parts of a step are summed, if they are.
    sums_at: Option<usize>,
    /// Being written by backward of the reader for this microbatch, or added to.
    open: Option<Open>,
    parts: Vec<Option<Exchanged>>,
}

struct Open {
    microbatch: usize,
    part: Exchanged,
    accumulates: bool,
}

impl TiedGradients {
    /// For the parameters of the tie, if this rank of the pipeline has to do with it. Memory comes from the pool of messages.
    pub(crate) fn new(outline: &Outline, tie: Option<Tie>, pool: &Pool) -> Option<Self> {
        let Tie { reader, span } = tie.filter(|_| !outline.stages.is_empty())?;
        let is_here = outline.holds(reader) || outline.holds(span.unit);
        let parts = (0..outline.num_microbatches).map(|_| None).collect();
        let is_summed = outline.chain.sums_ties && !outline.holds(span.unit);
        let sums_at = outline.num_microbatches.checked_sub(1).filter(|_| is_summed);
        is_here.then(|| TiedGradients { span, reader, pool: pool.clone(), sums_at, open: None, parts })
    }

    pub(crate) fn len(&self) -> usize {
        self.span.shape.num_elements()
    }

    /// Makes room for what backward of `unit` has, if it is the reader.
    pub(crate) fn begin(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        if unit == self.reader {
            let microbatch = self.sums_at.unwrap_or(microbatch);
            let sum = self.parts[microbatch].take();
            let accumulates = sum.is_some();
            let part = sum.map_or_else(|| self.pool.take(self.len()), Ok)?;
            self.open = Some(Open { microbatch, part, accumulates });
        }
        Ok(())
    }

    /// Where the reader's backward writes, while it runs.
    pub(crate) fn target(&mut self, span: &ParameterSpan) -> Option<GradTarget<'_>> {
        let Open { part, accumulates, .. } = self.open.as_mut().filter(|_| span.unit == self.span.unit)?;
        debug_assert_eq!((span.offset, span.shape), (self.span.offset, self.span.shape), "one span is tied");
        Some(GradTarget { view: part.view_mut().into_part(0, span.shape), accumulate: *accumulates })
    }

    /// The reader has written its part; whether that was it.
    pub(crate) fn end(&mut self, span: &ParameterSpan) -> bool {
        let open = self.open.take_if(|_| span.unit == self.span.unit);
        let is_end = open.is_some();
        if let Some(Open { microbatch, part, .. }) = open {
            self.put(microbatch, part);
        }
        is_end
    }

    pub(crate) fn put(&mut self, microbatch: usize, part: Exchanged) {
        self.parts[microbatch] = Some(part);
    }

    pub(crate) fn take_to_send(&mut self, microbatch: usize) -> Exchanged {
        self.parts[microbatch].take().expect("the reader has run backward")
    }

    /// The part of a microbatch, to be added to the gradient of `unit`, if that is the owner.
    pub(crate) fn take(&mut self, unit: usize, microbatch: usize) -> Option<Exchanged> {
        self.parts.get_mut(microbatch).filter(|_| unit == self.span.unit)?.take()
    }
}
