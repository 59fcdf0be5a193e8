//! The times at which the actions of a step ran.

use crate::error::Result;
use std::time::{Duration, Instant};
use trireme_tensor::{Device, DeviceError, GpuInstant};

/// The times of an action. All processes of a host read the same clock (`CLOCK_MONOTONIC`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActionTime {
    /// The time at which the rank reached this action: the end of the previous one.
    pub issued: Instant,
    /// The start of the action's work, after the rank has waited for the action's inputs and copied received messages. Waits during the
    /// work shift it later by their duration, so `end - start` is the time spent working.
    pub start: Instant,
    /// The end of the action. Operations that it has started may overlap with later actions.
    pub end: Instant,
    /// Number of operations in the matrix products that it has issued.
    pub product_operations: u64,
}

/// The times of the actions of the current or last step, in program order. An action costs two readings of the clock, and no memory, unless
/// the times of kernels on a GPU are recorded as well.
pub(super) struct Timeline {
    issued: Instant,
    start: Instant,
    /// Operations in matrix products since the start of the step.
    product_operations: u64,
    pub(super) actions: Vec<ActionTime>,
    pub(super) kernels: KernelTimeline,
}

/// The times between which kernels of the actions ran on a GPU.
#[derive(Default)]
pub(super) struct KernelTimeline {
    pub(super) is_enabled: bool,
    /// The same instant on the clocks of the host and the GPU.
    origin: Option<(Instant, GpuInstant)>,
    start: Option<GpuInstant>,
    actions: Vec<[GpuInstant; 2]>,
}

impl KernelTimeline {
    fn begin(&mut self, device: &Device) -> Result<()> {
        *self = KernelTimeline { is_enabled: self.is_enabled, ..KernelTimeline::default() };
        if self.is_enabled {
            // The idle GPU records the event immediately.
            device.record_event().outcome().map_err(DeviceError::Failed)?;
            self.origin = device.record_instant().map(|time| (Instant::now(), time));
        }
        Ok(())
    }

    fn start(&mut self, device: &Device) {
        if self.origin.is_some() {
            self.start = device.record_instant();
        }
    }

    fn end(&mut self, device: &Device) {
        if let Some(start) = self.start.take()
            && let Some(end) = device.record_instant()
        {
            self.actions.push([start, end]);
        }
    }

    /// Returns the times at which the kernels of each action began and ended; empty if they were not recorded. Blocks until they have run.
    pub(super) fn intervals(&self) -> Result<Vec<[Instant; 2]>> {
        let Some((began, origin)) = &self.origin else { return Ok(Vec::new()) };
        let on_host = |time: &GpuInstant| Ok::<_, DeviceError>(*began + time.since(origin)?);
        self.actions.iter().map(|[start, end]| Ok([on_host(start)?, on_host(end)?])).collect()
    }
}

impl Timeline {
    pub(super) fn new(num_actions: usize) -> Self {
        let now = Instant::now();
        let actions = Vec::with_capacity(num_actions);
        let kernels = KernelTimeline::default();
        Timeline { issued: now, start: now, product_operations: 0, actions, kernels }
    }

    pub(super) fn begin(&mut self, device: &Device) -> Result<()> {
        self.actions.clear();
        self.product_operations = 0;
        self.issued = Instant::now();
        self.kernels.begin(device)
    }

    /// Starts the work of the current action, whose inputs are complete.
    pub(super) fn start(&mut self, device: &Device) {
        self.start = Instant::now();
        self.kernels.start(device);
    }

    /// Excludes a wait of the current action from its work.
    pub(super) fn exclude_wait(&mut self, waited: Duration) {
        self.start += waited;
    }

    /// Ends the current action, and begins the next one. `product_operations` is the number of operations in matrix products since the
    /// start of the step.
    pub(super) fn end(&mut self, device: &Device, product_operations: u64) {
        self.kernels.end(device);
        let issued = std::mem::replace(&mut self.issued, Instant::now());
        let before = std::mem::replace(&mut self.product_operations, product_operations);
        let product_operations = product_operations - before;
        self.actions.push(ActionTime { issued, start: self.start, end: self.issued, product_operations });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;

    #[test]
    fn actions_are_contiguous_and_waits_are_not_work() {
        let device = Device::counting(DeviceOptions::default()).unwrap();
        let mut timeline = Timeline::new(2);
        for _ in 0..2 {
            timeline.begin(&device).unwrap();
            timeline.start(&device);
            timeline.end(&device, 6);
            timeline.start(&device);
            let started = timeline.start;
            timeline.exclude_wait(Duration::from_nanos(5));
            timeline.end(&device, 10);
            let [first, second] = timeline.actions[..] else { panic!("a step has two actions") };
            assert!(first.issued <= first.start && first.start <= first.end);
            assert_eq!(second.issued, first.end);
            assert_eq!([first, second].map(|action| action.product_operations), [6, 4]);
            assert_eq!(second.start, started + Duration::from_nanos(5));
            assert_eq!(timeline.actions.capacity(), 2);
        }
    }
}
