//! Gradients of tied parameters, which one unit of a pipeline (the reader) reads and another unit (the owner) holds.
//!
//! Several microbatches are in flight at a time. The reader's contribution for a microbatch is kept, or sent to the owner's rank, until the
//! owner completes its own gradient for the same microbatch. With [`Determinism::Run`](crate::Determinism::Run), a reader on another rank
//! accumulates its contributions of a step instead, and the owner adds their sum at the last microbatch.
//!
//! Without a pipeline, the reader writes into the owner's gradient directly, the owner adds to it, and the owner's unit is reduced last.

use crate::error::Result;
use crate::memory::{ExchangeVector, Pool};
use trireme_schedule::ProgramHeader;
use trireme_tensor::{GradTarget, ParameterSpan, Tie};

/// The reader's contributions to the owner's gradient, by microbatch.
pub(crate) struct TiedGradients {
    pub(crate) span: ParameterSpan,
    reader: usize,
    pub(super) pool: Pool,
    /// The microbatch under which contributions of a step are accumulated; `None` if they are kept by microbatch.
    sums_at: Option<usize>,
    /// The contribution that the reader's backward is writing.
    open: Option<OpenContribution>,
    contributions: Vec<Option<ExchangeVector>>,
}

struct OpenContribution {
    microbatch: usize,
    part: ExchangeVector,
    accumulates: bool,
}

impl TiedGradients {
    /// Creates the contributions to the tied parameters, if this pipeline rank runs the reader or the owner. Memory comes from `pool`.
    pub(crate) fn new(header: &ProgramHeader, tie: Option<Tie>, pool: &Pool) -> Option<Self> {
        let Tie { reader, span } = tie.filter(|_| !header.stages.is_empty())?;
        let is_here = header.holds(reader) || header.holds(span.unit);
        let parts = (0..header.num_microbatches).map(|_| None).collect();
        let is_summed = header.chain.accumulates_tied_gradients && !header.holds(span.unit);
        let sums_at = header.num_microbatches.checked_sub(1).filter(|_| is_summed);
        is_here.then(|| TiedGradients {
            span,
            reader,
            pool: pool.clone(),
            sums_at,
            open: None,
            contributions: parts,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.span.shape.num_elements()
    }

    /// Allocates memory for the contribution of `unit`'s backward, if `unit` is the reader.
    pub(crate) fn begin(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        if unit == self.reader {
            let microbatch = self.sums_at.unwrap_or(microbatch);
            let sum = self.contributions[microbatch].take();
            let accumulates = sum.is_some();
            let part = sum.map_or_else(|| self.pool.take(self.len()), Ok)?;
            self.open = Some(OpenContribution { microbatch, part, accumulates });
        }
        Ok(())
    }

    /// Returns the memory for the reader's contribution while its backward runs, or `None` for other parameters.
    pub(crate) fn target(&mut self, span: &ParameterSpan) -> Option<GradTarget<'_>> {
        let OpenContribution { part, accumulates, .. } =
            self.open.as_mut().filter(|_| span.unit == self.span.unit)?;
        debug_assert_eq!((span.offset, span.shape), (self.span.offset, self.span.shape), "one span is tied");
        Some(GradTarget { view: part.view_mut().into_part(0, span.shape), accumulate: *accumulates })
    }

    /// Ends the reader's contribution. Returns false if the parameters are not the tied ones, or if the reader's backward is not running.
    pub(crate) fn end(&mut self, span: &ParameterSpan) -> bool {
        let open = self.open.take_if(|_| span.unit == self.span.unit);
        let is_end = open.is_some();
        if let Some(OpenContribution { microbatch, part, .. }) = open {
            self.put(microbatch, part);
        }
        is_end
    }

    pub(crate) fn put(&mut self, microbatch: usize, part: ExchangeVector) {
        self.contributions[microbatch] = Some(part);
    }

    pub(crate) fn take_to_send(&mut self, microbatch: usize) -> ExchangeVector {
        self.contributions[microbatch].take().expect("the reader has run backward")
    }

    /// Takes the contribution of a microbatch that must be added to the gradient of `unit`, if `unit` is the owner.
    pub(crate) fn take(&mut self, unit: usize, microbatch: usize) -> Option<ExchangeVector> {
        self.contributions.get_mut(microbatch).filter(|_| unit == self.span.unit)?.take()
    }
}
