//! Messages in memory of devices.
//!
//! Such a message has a frame on the link, too, by which ranks find that their messages differ. The first frame of a lane carries the
//! identifier of a communicator of the two ranks, and later ones carry nothing. When the frame is through, the devices transfer the
//! vector. Each direction has a communicator of its own, so that messages of both directions do not wait for each other.

use crate::control::REASON_WAIT;
use crate::recorder::Direction;
use std::time::Instant;
use trireme_base::{
    DeviceCommunicator, DeviceCommunicatorId, DeviceSpan, DeviceStep, DeviceTransfer, DeviceTransport,
    DeviceTransportError, Rank,
};

/// The ranks of a lane's communicator.
const SENDER: Rank = Rank(0);
const RECEIVER: Rank = Rank(1);

/// The messages from one rank to another, as one of the two sees them.
#[derive(Default)]
pub(super) struct DeviceLane {
    /// The payload of the first frame. Of the sender, `None` until it is created.
    id: Option<Box<DeviceCommunicatorId>>,
    communicator: Option<Box<dyn DeviceCommunicator>>,
    /// Whether the devices transfer the first message of the lane.
    pub(super) is_transferring: bool,
    /// A failure of the library, and when it was reported. It may be the loss of the peer, which the control connection tells soon.
    failure: Option<(Instant, DeviceTransportError)>,
}

impl DeviceLane {
    /// Returns the payload of the next frame: to send, or to fill.
    pub(super) fn frame(
        &mut self,
        direction: Direction,
        transport: &dyn DeviceTransport,
    ) -> Result<&mut [u8], DeviceTransportError> {
        if self.communicator.is_some() {
            return Ok(&mut []);
        }
        if self.id.is_none() {
            self.id = Some(Box::new(match direction {
                Direction::Send => transport.create_id()?,
                Direction::Receive => [0; _],
            }));
        }
        Ok(self.id.as_mut().expect("it was created").as_mut_slice())
    }

    /// Starts to transfer a vector whose frame is through.
    pub(super) fn begin(
        &mut self,
        direction: Direction,
        span: DeviceSpan,
        transport: &dyn DeviceTransport,
    ) -> Result<(), DeviceTransportError> {
        let (own, transfer) = match direction {
            Direction::Send => (SENDER, DeviceTransfer::Send { from: span, to: RECEIVER }),
            Direction::Receive => (RECEIVER, DeviceTransfer::Receive { to: span, from: SENDER }),
        };
        self.is_transferring = true;
        let begun = self.issue(own, DeviceStep::Exchange(Vec::from([transfer])), transport);
        begun.or_else(|failure| self.defer(failure))
    }

    /// Issues a step, as rank `own` of the lane's communicator, which is joined for the first one.
    fn issue(
        &mut self,
        own: Rank,
        step: DeviceStep,
        transport: &dyn DeviceTransport,
    ) -> Result<(), DeviceTransportError> {
        let communicator = match &mut self.communicator {
            Some(communicator) => communicator,
            None => {
                let id = self.id.take().expect("the first frame has it");
                self.communicator.insert(transport.join(&id, own, 2)?)
            }
        };
        communicator.issue(Vec::from([step]))
    }

    /// Keeps a failure of the library for a while, and returns others.
    fn defer(&mut self, failure: DeviceTransportError) -> Result<(), DeviceTransportError> {
        match failure {
            DeviceTransportError::Device(_) => Err(failure),
            DeviceTransportError::Library(_) => {
                self.failure = Some((Instant::now(), failure));
                Ok(())
            }
        }
    }

    /// Returns whether the transfer is complete.
    pub(super) fn is_done(&mut self) -> Result<bool, DeviceTransportError> {
        if let Some((since, failure)) = &self.failure {
            return if since.elapsed() < REASON_WAIT { Ok(false) } else { Err(failure.clone()) };
        }
        let communicator = self.communicator.as_mut().expect("a transfer was started");
        match communicator.poll() {
            Ok(is_done) => {
                self.is_transferring &= !is_done;
                Ok(is_done)
            }
            Err(failure) => self.defer(failure).map(|()| false),
        }
    }
}
