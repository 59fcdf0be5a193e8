use std::ops::Range;
use trireme_base::Rank;

/// The memory that steps read and write, in elements of the operation's dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The result of the operation. An in-place operation also finds its input here.
    Vector,
    /// The input of an out-of-place operation, which leaves it unchanged.
    Input,
    /// Working memory of the executor, of [`scratch_len`] elements for a rank's steps. Undefined at first.
    Scratch,
}

/// A range of elements of a memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Span {
    pub memory: Memory,
    pub range: Range<usize>,
}

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// At most one outgoing and one incoming message at the same time. Elements are sent with their values from before the step.
    Exchange {
        /// The message to send.
        send: Option<Outgoing>,
        /// The message to wait for.
        receive: Option<Incoming>,
    },
    /// Copies elements within the rank. The spans do not overlap.
    Copy {
        /// The source.
        from: Span,
        /// The destination, as long as `from`.
        to: Span,
    },
}

/// An outgoing message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// The receiver.
    pub to: Rank,
    /// The elements to send. An empty message is sent all the same.
    pub span: Span,
}

/// An incoming message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Incoming {
    pub from: Rank,
    pub span: Span,
    pub action: ReceiveAction,
}

/// The effect of a received message on the elements of its span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveAction {
    /// Replaces the elements.
    Copy,
    /// Reduces the elements with the message.
    Reduce {
        /// The operand side of the elements that are already there.
        own_side: Side,
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
    /// Creates a span of [`Memory::Input`].
    pub fn input(range: Range<usize>) -> Self {
        Span { memory: Memory::Input, range }
    }

    /// Creates a span of [`Memory::Scratch`].
    pub fn scratch(range: Range<usize>) -> Self {
        Span { memory: Memory::Scratch, range }
    }
}

/// Creates a span of [`Memory::Vector`].
impl From<Range<usize>> for Span {
    fn from(range: Range<usize>) -> Self {
        Span { memory: Memory::Vector, range }
    }
}

impl Outgoing {
    /// Creates a message to rank `to`.
    pub fn new(to: usize, span: impl Into<Span>) -> Self {
        Outgoing { to: Rank(to), span: span.into() }
    }
}

impl Incoming {
    /// Creates a message that replaces the elements of its span.
    pub fn copy(from: usize, span: impl Into<Span>) -> Self {
        Incoming { from: Rank(from), span: span.into(), action: ReceiveAction::Copy }
    }

    /// Creates a message that is reduced with the elements of its span. The value of the lower of the ranks `own` and `from` is the left
    /// operand.
    pub fn reduce(own: usize, from: usize, span: impl Into<Span>) -> Self {
        let own = if own < from { Side::Left } else { Side::Right };
        Incoming { from: Rank(from), span: span.into(), action: ReceiveAction::Reduce { own_side: own } }
    }
}

impl Step {
    /// Creates a step that only sends.
    pub fn send(send: Outgoing) -> Self {
        Step::Exchange { send: Some(send), receive: None }
    }

    /// Creates a step that only receives.
    pub fn receive(receive: Incoming) -> Self {
        Step::Exchange { send: None, receive: Some(receive) }
    }

    /// Creates a step that sends and receives.
    pub fn both(send: Outgoing, receive: Incoming) -> Self {
        Step::Exchange { send: Some(send), receive: Some(receive) }
    }

    /// Turns an exchange into its reverse, which sends the received elements back and receives the sent ones. Leaves a copy unchanged.
    pub(super) fn undo(&mut self) {
        let Step::Exchange { send, receive } = self else { return };
        let back = receive.take().map(|receive| Outgoing { to: receive.from, span: receive.span });
        *receive =
            send.take().map(|send| Incoming { from: send.to, span: send.span, action: ReceiveAction::Copy });
        *send = back;
    }

    /// Maps the ranks by `name`, and shifts spans of [`Memory::Vector`] by `offset` elements.
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

/// Returns the number of elements of [`Memory::Scratch`] that a rank's steps need.
pub fn scratch_len(steps: &[Step]) -> usize {
    let scratch = steps.iter().flat_map(Step::spans).filter(|span| span.memory == Memory::Scratch);
    scratch.map(|span| span.range.end).max().unwrap_or(0)
}
