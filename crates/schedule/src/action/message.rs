use trireme_base::named;

named! {
    /// The content of a message between ranks of a pipeline; its name follows `SEND_` or `RECV_`. Parameters have no microbatch.
    pub enum MessageKind {
        /// What forward of the unit has made, for the unit above.
        Activation = "F",
        /// The gradient of the unit's input, for the unit below.
        Gradient = "B",
        /// The partial gradient of this unit's parameters from another unit that reads them, to be added to the gradient.
        TiedGradient = "GRAD",
        /// The unit's parameters, for another unit that reads them.
        Parameters = "PARAM",
    }
}

impl MessageKind {
    /// The name in words.
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
    /// Of which microbatch; 0 for parameters.
    pub microbatch: usize,
}

impl Message {
    /// What forward of a unit has made.
    pub const fn activation(unit: usize, microbatch: usize) -> Message {
        Message { kind: MessageKind::Activation, unit, microbatch }
    }

    /// The gradient of a unit's input.
    pub const fn gradient(unit: usize, microbatch: usize) -> Message {
        Message { kind: MessageKind::Gradient, unit, microbatch }
    }

    /// A part of a unit's gradient, made by the unit that reads its parameters.
    pub const fn tied_gradient(unit: usize, microbatch: usize) -> Message {
        Message { kind: MessageKind::TiedGradient, unit, microbatch }
    }

    /// A unit's parameters.
    pub const fn parameters(unit: usize) -> Message {
        Message { kind: MessageKind::Parameters, unit, microbatch: 0 }
    }
}
