//! Relays, which stand in the middle of a line and do to what passes what bad lines do.
//!
//! [`FrameRelay`] passes on Ethernet frames between two devices, late or not at all, so that TCP itself deals with it;
//! it takes root. [`TcpRelay`] passes on the bytes of TCP connections, and takes nothing.

mod firewall;
mod flow;
mod frames;
mod line;
mod steering;
pub(crate) mod tap;
mod tcp;

pub use frames::{FrameCounts, FrameRelay};
pub use tcp::TcpRelay;

use std::time::Duration;
use trireme_base::{Random, RandomKey};

/// What a line does to all that passes, in each direction on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Conditions {
    /// How long everything takes from one end to the other: half the round trip.
    pub delay: Duration,
    /// What passes within a second at most; without it, all that comes.
    pub bits_per_second: Option<u64>,
}

/// A direction of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Towards {
    /// To the host behind the relay, or to who connects to it.
    Near = 0,
    /// To the network, or to the target.
    Far = 1,
}

impl Towards {
    const BOTH: [Towards; 2] = [Towards::Near, Towards::Far];

    /// The index of the end that it comes from; its own is where it goes to.
    fn source(self) -> usize {
        1 - self as usize
    }
}

/// Which frames are lost: a fraction of them, found by a random number for each that depends on the seed alone.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// From 0 to 1, in each direction.
    pub fraction: f64,
    /// The same seed loses the same frames.
    pub seed: u64,
}

impl Loss {
    /// Whether the frame of this index, from 0, is lost on its way.
    pub fn takes(&self, towards: Towards, index: u64) -> bool {
        let purpose = match towards {
            Towards::Near => "frames lost towards the near end",
            Towards::Far => "frames lost towards the far end",
        };
        Random::new(RandomKey::new(self.seed, purpose), 4 * index).next_f64() < self.fraction
    }
}
