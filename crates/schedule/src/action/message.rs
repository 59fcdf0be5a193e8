use trireme_base::named;

named! {
    /// The content of a message between ranks of a pipeline. Its name follows `SEND_` or `RECV_` in programs. Messages with parameters have
    /// no microbatch.
    pub enum MessageKind {
        /// The output of the unit's forward, for the unit above.
        Activation = "F",
        /// The gradient of the unit's input, for the unit below.
        Gradient = "B",
        /// The contribution of a tied unit, which reads this unit's parameters, to the gradient of this unit.
        TiedGradient = "GRAD",
        /// The unit's parameters, for a tied unit that reads them.
        Parameters = "PARAM",
    }
}

impl MessageKind {
    /// Returns the name for messages to users.
    pub(super) const fn words(self) -> &'static str {
        match self {
            MessageKind::Activation => "activations",
            MessageKind::Gradient => "gradient",
            MessageKind::TiedGradient => "tied gradient",
            MessageKind::Parameters => "parameters",
        }
    }
}

/// A message between two ranks of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Message {
    pub kind: MessageKind,
    pub unit: usize,
    /// The microbatch; 0 for parameters.
    pub microbatch: usize,
}

impl Message {
    /// Creates a message with the output of a unit's forward.
    pub const fn activation(unit: usize, microbatch: usize) -> Message {
        Message { kind: MessageKind::Activation, unit, microbatch }
    }

    /// Creates a message with the gradient of a unit's input.
    pub const fn gradient(unit: usize, microbatch: usize) -> Message {
        Message { kind: MessageKind::Gradient, unit, microbatch }
    }

    /// Creates a message with the contribution of the tied unit to the gradient of `unit`, whose parameters the tied unit reads.
    pub const fn tied_gradient(unit: usize, microbatch: usize) -> Message {
        Message { kind: MessageKind::TiedGradient, unit, microbatch }
    }

    /// Creates a message with a unit's parameters.
    pub const fn parameters(unit: usize) -> Message {
        Message { kind: MessageKind::Parameters, unit, microbatch: 0 }
    }
}
