use std::ops::Range;
use trireme_base::Rank;

/// Memory that steps work on, in elements of the operation's dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    /// What the operation gives back. An operation in place finds its input here, too.
    Vector,
    /// What an operation out of place reads, and leaves as it is.
    Input,
    /// Memory of the executor, as long as [`scratch_len`] of a rank's steps; undefined at first.
    Scratch,
}

/// A range of elements of some memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Span {
    pub memory: Memory,
    pub range: Range<usize>,
}

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// At most one message out and one in at the same time. Elements are sent as they were before the step.
    Exchange {
        /// The message to send.
        send: Option<Outgoing>,
        /// The message to wait for.
        receive: Option<Incoming>,
    },
    /// Copies elements within the rank; the spans do not overlap.
    Copy {
        /// From here.
        from: Span,
        /// To here; as long as `from`.
        to: Span,
    },
}

/// A message out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Who gets it.
    pub to: Rank,
    /// The elements it carries; may be empty, and is sent all the same.
    pub span: Span,
}

/// A message in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Incoming {
    pub from: Rank,
    pub span: Span,
    pub action: Action,
}

/// What a received message does to the elements it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Replaces them.
    Copy,
    /// Is reduced with them.
    Reduce {
        /// On which side of the operation the elements already there stand.
        own: Side,
    },
}

/// A side of an operation with two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Side {
    Left,
    Right,
}

impl Span {
    /// Elements of [`Memory::Input`].
    pub fn input(range: Range<usize>) -> Self {
        Span { memory: Memory::Input, range }
    }

    /// Elements of [`Memory::Scratch`].
    pub fn scratch(range: Range<usize>) -> Self {
        Span { memory: Memory::Scratch, range }
    }
}

/// Elements of [`Memory::Vector`].
impl From<Range<usize>> for Span {
    fn from(range: Range<usize>) -> Self {
        Span { memory: Memory::Vector, range }
    }
}

impl Outgoing {
    /// A message out.
    pub fn new(to: usize, span: impl Into<Span>) -> Self {
        Outgoing { to: Rank(to), span: span.into() }
    }
}

impl Incoming {
    /// A message that replaces what was there.
    pub fn copy(from: usize, span: impl Into<Span>) -> Self {
        Incoming { from: Rank(from), span: span.into(), action: Action::Copy }
    }

    /// A message that is reduced with what is there; the value of the lower rank is the left operand.
    pub fn reduce(own: usize, from: usize, span: impl Into<Span>) -> Self {
        let own = if own < from { Side::Left } else { Side::Right };
        Incoming { from: Rank(from), span: span.into(), action: Action::Reduce { own } }
    }
}

impl Step {
    /// A message out only.
    pub fn send(send: Outgoing) -> Self {
        Step::Exchange { send: Some(send), receive: None }
    }

    /// A message in only.
    pub fn receive(receive: Incoming) -> Self {
        Step::Exchange { send: None, receive: Some(receive) }
    }

    /// A message out and one in.
    pub fn both(send: Outgoing, receive: Incoming) -> Self {
        Step::Exchange { send: Some(send), receive: Some(receive) }
    }

    /// Makes it the step that brings back what this one sends, and sends back what it receives.
    pub(super) fn undo(&mut self) {
        let Step::Exchange { send, receive } = self else { return };
        let back = receive.take().map(|receive| Outgoing { to: receive.from, span: receive.span });
        *receive = send.take().map(|send| Incoming { from: send.to, span: send.span, action: Action::Copy });
        *send = back;
    }

    /// Gives ranks other names, and moves elements of [`Memory::Vector`] `offset` elements on.
    pub(super) fn relabel(&mut self, name: impl Fn(Rank) -> Rank, offset: usize) {
        let shift = |span: &mut Span| {
            if span.memory == Memory::Vector {
                span.range = span.range.start + offset..span.range.end + offset;
            }
        };
        match self {
            Step::Exchange { send, receive } => {
                if let Some(send) = send {
                    send.to = name(send.to);
                    shift(&mut send.span);
                }
                if let Some(receive) = receive {
                    receive.from = name(receive.from);
                    shift(&mut receive.span);
                }
            }
            Step::Copy { from, to } => {
                shift(from);
                shift(to);
            }
        }
    }

    fn spans(&self) -> impl Iterator<Item = &Span> {
        let spans = match self {
            Step::Exchange { send, receive } => {
                [send.as_ref().map(|send| &send.span), receive.as_ref().map(|receive| &receive.span)]
            }
            Step::Copy { from, to } => [Some(from), Some(to)],
        };
        spans.into_iter().flatten()
    }
}

/// Elements of [`Memory::Scratch`] that a rank's steps use.
pub fn scratch_len(steps: &[Step]) -> usize {
    let scratch = steps.iter().flat_map(Step::spans).filter(|span| span.memory == Memory::Scratch);
    scratch.map(|span| span.range.end).max().unwrap_or(0)
}
