//! Operations on memory of devices, by communicators such as NCCL's.
//!
//! [`DeviceCollectives`] wraps the group's transport and passes vectors in host memory to it. Before an operation on device memory, the
//! wrapped transport runs a barrier. It detects ranks that issue different operations, and no device waits for a rank that is late. The
//! first such operation joins the communicator, unless the ranks have joined it before.

mod steps;
#[cfg(test)]
mod tests;

pub(crate) use steps::{SCRATCH_BYTES, needs_scratch};

use super::Transport;
use super::link_transport::LinkTransport;
use crate::CommError;
use crate::backoff::Backoff;
use crate::buffer::Storage;
use crate::call::{Call, Payload};
use crate::control::Control;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use steps::DeviceSteps;
use trireme_base::{
    DeviceCommunicator, DeviceCommunicatorId, DeviceMemory, DeviceSpan, DeviceStep, DeviceTransfer,
    DeviceTransport, DeviceTransportError, Rank,
};

/// Time between two checks whether devices have done their work.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The transport between the devices of a group's ranks, and its memory. The group and its threads share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceResources {
    /// Set once for a world and all of its groups.
    pub(crate) transport: Arc<OnceLock<Arc<dyn DeviceTransport>>>,
    /// Whether vectors in device memory will be exchanged.
    pub(crate) are_needed: Arc<AtomicBool>,
    /// Memory for intermediate results, of [`SCRATCH_BYTES`].
    pub(crate) scratch: Arc<OnceLock<Arc<dyn DeviceMemory>>>,
}

impl DeviceResources {
    /// The transport, which a group with vectors in device memory has.
    pub(crate) fn transport(&self) -> &dyn DeviceTransport {
        &**self.transport.get().expect("a vector in device memory is accepted only with a device transport")
    }

    /// The resources of a group that is split from this one.
    pub(crate) fn for_split_group(&self) -> Self {
        DeviceResources { transport: Arc::clone(&self.transport), ..DeviceResources::default() }
    }
}

/// A transport for vectors in memory of devices, and another one for vectors of the host.
pub(crate) struct DeviceCollectives {
    rank: Rank,
    world_size: usize,
    keeps_order: bool,
    host: LinkTransport,
    devices: DeviceResources,
    communicator: Option<Box<dyn DeviceCommunicator>>,
    backoff: Backoff,
}

impl DeviceCollectives {
    pub(crate) fn new(
        (rank, world_size): (Rank, usize),
        keeps_order: bool,
        host: LinkTransport,
        devices: DeviceResources,
    ) -> Self {
        let (communicator, backoff) = (None, Backoff::new());
        DeviceCollectives { rank, world_size, keeps_order, host, devices, communicator, backoff }
    }

    fn execute_on_devices(
        &mut self,
        call: &Call,
        payload: &Payload,
        control: &mut Control,
    ) -> Result<(), CommError> {
        self.host.execute(call, &mut Payload::Nothing, control)?;
        if self.communicator.is_none() {
            self.join(call, control)?;
        }
        let steps = self.steps(call, payload);
        control.call_statistics.payload_bytes += steps.iter().map(|step| self.bytes_sent(step)).sum::<u64>();
        let issued = self.communicator.as_mut().expect("it was joined").issue(steps);
        issued.map_err(|failure| reason_of_failure(call, control, failure))?;
        self.wait(call, control)
    }

    /// Joins the communicator of the group's ranks.
    fn join(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        let mut blocks = vec![Vec::new(); self.world_size];
        if self.rank == Rank::ROOT {
            let id = self.devices.transport().create_id();
            blocks[0] = id.map_err(|failure| reason_of_failure(call, control, failure))?.to_vec();
        }
        let mut blocks = Payload::Blocks(blocks);
        self.host.execute(call, &mut blocks, control)?;
        let Payload::Blocks(blocks) = blocks else {
            unreachable!("an operation gives back the payload it took")
        };
        let id = DeviceCommunicatorId::try_from(&*blocks[0]);
        let id = id.map_err(|_| call.protocol(Rank::ROOT, "its identifier of a communicator is invalid"))?;
        let joined = self.devices.transport().join(&id, self.rank, self.world_size);
        self.communicator = Some(joined.map_err(|failure| reason_of_failure(call, control, failure))?);
        self.wait(call, control)
    }

    /// Waits until the communicator has joined, and has run everything that was issued.
    fn wait(&mut self, call: &Call, control: &mut Control) -> Result<(), CommError> {
        let communicator = self.communicator.as_mut().expect("it was joined");
        loop {
            match communicator.poll() {
                Ok(true) => {
                    control.record_progress();
                    self.backoff.record_success();
                    return Ok(());
                }
                Ok(false) if self.backoff.should_retry(call.is_awaited) => {}
                Ok(false) => {
                    let since = Instant::now();
                    std::thread::sleep(POLL_INTERVAL);
                    control.call_statistics.waiting += since.elapsed();
                    control.tick(call)?;
                }
                Err(failure) => return Err(reason_of_failure(call, control, failure)),
            }
        }
    }

    fn steps(&self, call: &Call, payload: &Payload) -> Vec<DeviceStep> {
        let (dtype, _) = call.operation.elements();
        let mut steps = DeviceSteps {
            rank: self.rank,
            world_size: self.world_size,
            dtype,
            op: call.operation.reduction(),
            keeps_order: self.keeps_order,
            scratch: self.devices.scratch.get(),
            transfers: Vec::new(),
            steps: Vec::new(),
        };
        let span = |storage: &Storage| storage.device_span().expect("all vectors are in memory of devices");
        let collective = || call.operation.collective().expect("operations on vectors are collectives");
        match payload {
            Payload::Vector(vector) => steps.in_place(collective(), &span(vector)),
            Payload::Pair { input, output, lens: None } => {
                steps.out_of_place(collective(), &span(input), &span(output));
            }
            Payload::Pair { input, output, lens: Some(lens) } => {
                steps.all_to_all_variable(&span(input), &span(output), lens);
            }
            Payload::Nothing | Payload::JoinDevices | Payload::Blocks(_) => {
                unreachable!("the payload is in memory of devices")
            }
        }
        steps.steps
    }

    /// Bytes that this rank sends to other ranks in a step. For collectives of the library, the minimum, as of a ring.
    fn bytes_sent(&self, step: &DeviceStep) -> u64 {
        let len = |span: &DeviceSpan| span.range.len() as u64;
        let (others, all) = (self.world_size as u64 - 1, self.world_size as u64);
        match step {
            DeviceStep::Exchange(transfers) => {
                let sent = |transfer: &DeviceTransfer| match transfer {
                    DeviceTransfer::Send { from, .. } => len(from),
                    DeviceTransfer::Receive { .. } => 0,
                };
                transfers.iter().map(sent).sum()
            }
            DeviceStep::Broadcast { span, root } if *root == self.rank => len(span),
            DeviceStep::AllGather { span } | DeviceStep::ReduceScatter { span, .. } => {
                len(span) * others / all
            }
            DeviceStep::AllReduce { span, .. } => 2 * len(span) * others / all,
            _ => 0,
        }
    }
}

/// Returns the failure of an operation between devices, or the loss of a peer that has caused it.
fn reason_of_failure(call: &Call, control: &mut Control, failure: DeviceTransportError) -> CommError {
    match failure {
        DeviceTransportError::Device(_) => call.device_failure(failure),
        DeviceTransportError::Library(_) => {
            control.awaited_failure(None, call).unwrap_or_else(|| call.device_failure(failure))
        }
    }
}

impl Transport for DeviceCollectives {
    fn execute(
        &mut self,
        call: &Call,
        payload: &mut Payload,
        control: &mut Control,
    ) -> Result<(), CommError> {
        match payload {
            Payload::JoinDevices if self.communicator.is_none() => self.join(call, control),
            _ if payload.is_on_device() => self.execute_on_devices(call, payload, control),
            _ => self.host.execute(call, payload, control),
        }
    }

    fn abandon(&mut self, payload: &mut Payload) {
        if let Some(mut communicator) = self.communicator.take() {
            communicator.abort();
        }
        self.host.abandon(payload);
    }
}
