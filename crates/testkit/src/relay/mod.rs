//! Relays, which forward traffic and simulate bad links.
//!
//! [`FrameRelay`] forwards Ethernet frames between two devices, with delays and losses that TCP itself has to handle. It requires root.
//! [`TcpRelay`] forwards the bytes of TCP connections, and requires nothing.

mod control;
mod delay_queue;
mod firewall;
mod flow;
mod frames;
pub(crate) mod tap;
mod tcp;

pub use frames::{FrameCounts, FrameRelay};
pub use tcp::TcpRelay;

use std::time::Duration;
use trireme_base::{Random, RandomKey};

/// Delay and rate of a link, in each direction separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Conditions {
    /// Time from one end to the other: half of the round trip.
    pub delay: Duration,
    /// Maximum rate. `None` is unlimited.
    pub bits_per_second: Option<u64>,
}

/// A direction of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Towards the host behind the relay, or towards the client that connects to it.
    Near = 0,
    /// Towards the network, or towards the target.
    Far = 1,
}

impl Direction {
    const BOTH: [Direction; 2] = [Direction::Near, Direction::Far];

    /// Returns the index of the end where this direction starts. `self as usize` is the index of the end where it leads.
    fn source(self) -> usize {
        1 - self as usize
    }
}

/// Random loss of frames. A random number for each frame, which depends only on the seed, the direction and the frame's index, decides
/// whether the frame is lost.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FrameLoss {
    /// Fraction of frames that are lost in each direction, from 0 to 1.
    pub fraction: f64,
    /// Seed of the random numbers. The same seed loses the same frames.
    pub seed: u64,
}

impl FrameLoss {
    /// Returns whether the frame with this index, from 0, is lost in this direction.
    pub fn loses(&self, towards: Direction, index: u64) -> bool {
        let purpose = match towards {
            Direction::Near => "frames lost towards the near end",
            Direction::Far => "frames lost towards the far end",
        };
        Random::new(RandomKey::new(self.seed, purpose), 4 * index).next_f64() < self.fraction
    }
}
