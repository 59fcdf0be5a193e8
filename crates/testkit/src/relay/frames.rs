use super::control::{ControlledThread, ThreadControl};
use super::delay_queue::DelayQueue;
use super::firewall::Firewall;
use super::{Conditions, Direction, FrameLoss, tap};
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::io::{Read, Write};
use std::ops::RangeInclusive;
use std::time::Instant;

/// Buffer size for one frame. Larger than a frame of 1500 bytes with its headers.
const FRAME_BYTES_MAX: usize = 2048;
/// Maximum number of bytes in flight in one direction. Further frames are dropped, as in a switch.
const QUEUE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of frames that are read before others are delivered.
const NUM_FRAMES_AT_ONCE: usize = 64;

/// Forwards Ethernet frames between two devices of the kernel, on a thread that ends when this value is dropped.
#[derive(Debug)]
pub struct FrameRelay(ControlledThread<State>);

/// Counts of the frames in one direction of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameCounts {
    /// All frames that arrived: lost, overflowed, refused, delivered or in flight.
    pub num_sent: u64,
    /// Frames dropped by [`FrameLoss`].
    pub num_lost: u64,
    /// Frames dropped because a mebibyte was in flight.
    pub num_overflowed: u64,
    /// Dropped requests for connections that [are not let through](FrameRelay::allow_ports).
    pub num_refused: u64,
}

#[derive(Debug, Default)]
struct State {
    is_paused: bool,
    firewall: Firewall,
    counts: [FrameCounts; 2],
}

struct Forwarder {
    /// The devices: `ends[direction]` is the destination of a direction.
    ends: [File; 2],
    queues: [DelayQueue<Vec<u8>>; 2],
    loss: FrameLoss,
}

impl FrameRelay {
    /// Checks that the machine has what a relay needs in addition to a network.
    ///
    /// # Errors
    /// If something is missing. The error names it.
    pub fn available() -> Result<(), String> {
        let opened = File::options().read(true).write(true).open(tap::TUN_DEVICE_FILE);
        opened.map(drop).map_err(|error| format!("{}: {error}", tap::TUN_DEVICE_FILE))
    }

    pub(crate) fn start(ends: [File; 2], conditions: Conditions, loss: FrameLoss) -> Self {
        let lines = [(); 2].map(|()| DelayQueue::new(conditions));
        let forwarder = Forwarder { ends, queues: lines, loss };
        FrameRelay(ControlledThread::start(|steering| forwarder.run(steering)))
    }

    /// Holds all frames from the end of this call until [`resume`](FrameRelay::resume). Some thousand frames are kept.
    pub fn pause(&self) {
        self.0.update(|state| state.is_paused = true);
    }

    /// Delivers all frames that were held, and continues.
    pub fn resume(&self) {
        self.0.update(|state| state.is_paused = false);
    }

    /// From the end of this call, drops requests for TCP connections to ports outside of `ports`, in either direction.
    pub fn allow_ports(&self, ports: &[RangeInclusive<u16>]) {
        self.0.update(|state| state.firewall = Firewall::allowing(ports));
    }

    /// Returns the counts of the frames in this direction so far.
    pub fn counts(&self, towards: Direction) -> FrameCounts {
        self.0.with_state(|state| state.counts[towards as usize])
    }
}

impl Forwarder {
    fn run(mut self, control: &ThreadControl<State>) {
        loop {
            // The lock is held until everything is forwarded, so that nothing passes after a call of `FrameRelay::pause` has returned.
            let mut held = control.state();
            let Some(state) = &mut *held else { return };
            if state.is_paused {
                drop(held);
                control.wait(Vec::new(), None);
                continue;
            }
            for towards in Direction::BOTH {
                self.read_frames(towards, &state.firewall, &mut state.counts[towards as usize]);
                self.deliver(towards);
            }
            drop(held);
            let frames = self.ends.iter().map(|end| PollFd::new(end, PollFlags::IN)).collect();
            let next_arrival = self.queues.iter().filter_map(DelayQueue::next_arrival).min();
            control.wait(frames, next_arrival);
        }
    }

    fn read_frames(&mut self, towards: Direction, firewall: &Firewall, counts: &mut FrameCounts) {
        let line = &mut self.queues[towards as usize];
        let mut frame = [0; FRAME_BYTES_MAX];
        for _ in 0..NUM_FRAMES_AT_ONCE {
            let Ok(num_bytes) = self.ends[towards.source()].read(&mut frame) else { return };
            let index = counts.num_sent;
            counts.num_sent += 1;
            if firewall.refuses(&frame[..num_bytes]) {
                counts.num_refused += 1;
            } else if self.loss.loses(towards, index) {
                counts.num_lost += 1;
            } else if line.num_bytes() + num_bytes > QUEUE_BYTES_MAX {
                counts.num_overflowed += 1;
            } else {
                line.send(Instant::now(), num_bytes, frame[..num_bytes].to_vec());
            }
        }
    }

    fn deliver(&mut self, towards: Direction) {
        let now = Instant::now();
        while let Some(frame) = self.queues[towards as usize].receive(now) {
            // A device that is down, or whose host is busy, loses the frame, as any device does.
            let _ = self.ends[towards as usize].write(&frame);
        }
    }
}
