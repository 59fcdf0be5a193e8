//! Kernel timing within a program, on the program's own operands.

use crate::device::DeviceError;
use crate::kernels::backend::Backend;
use crate::kernels::call::{Access, Call, Operands};
use crate::kernels::cuda::TimedEvent;
use crate::kernels::{Operand, OperandMut};
use crate::shape::Shape;
use crate::timing::{Timing, time_runs};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use trireme_base::Cost;

/// A timer of the kernels of a [timed device](super::Device::timed).
#[derive(Clone, Default)]
pub struct CallTimer(Arc<Mutex<Option<Timings>>>);

impl CallTimer {
    fn lock(&self) -> MutexGuard<'_, Option<Timings>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Times a call if the timer is started.
    pub(super) fn time(&self, call: &Call, backend: &dyn Backend) {
        if let Some(timings) = &mut *self.lock() {
            timings.time(call, backend);
        }
    }

    /// Starts timing kernels whose name and shapes contain `only`. The first call of each kernel with given shapes is repeated for
    /// `duration`, at least three times unless that takes over a second. Operands are restored after the repetitions, and the program then
    /// runs the call once. `report` is called after each timed call and must not use this timer. Kernels of [hosts](super::Device::host)
    /// are not timed.
    pub fn start(&self, duration: Duration, only: &str, report: impl FnMut(&TimedCall) + Send + 'static) {
        let (only, report) = (only.to_owned(), Box::new(report));
        *self.lock() = Some(Timings { duration, only, report, places: BTreeMap::new(), calls: Vec::new() });
    }

    /// Stops timing. Returns the timed kernels in the order of their first calls.
    pub fn finish(&self) -> Vec<TimedCall> {
        self.lock().take().map_or_else(Vec::new, |timings| timings.calls)
    }
}

/// Time of a kernel with operands of certain shapes.
#[derive(Debug, Clone)]
pub struct TimedCall {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Shapes of the operands that the kernel reads, and of the first one that it writes.
    pub shapes: String,
    /// Minimum work of a call: operations and memory traffic.
    pub cost: Cost,
    /// Calls since the timer was started.
    pub num_calls: usize,
    /// Seconds per call.
    pub timing: Timing,
}

/// An instant between two kernels, on the clock of a GPU.
#[derive(Debug)]
pub struct GpuInstant(TimedEvent);

impl GpuInstant {
    pub(super) fn record(backend: &dyn Backend) -> Option<Self> {
        backend.record_instant().map(GpuInstant)
    }

    /// Returns the time since `earlier`, an instant of the same device. Blocks until the kernels issued before have run.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn since(&self, earlier: &GpuInstant) -> Result<Duration, DeviceError> {
        let milliseconds = self.0.milliseconds_since(&earlier.0)?;
        Ok(Duration::from_secs_f64((f64::from(milliseconds) / 1e3).max(0.0)))
    }
}

struct Timings {
    duration: Duration,
    only: String,
    report: Box<dyn FnMut(&TimedCall) + Send>,
    /// Index in `calls` of each kernel, keyed by name, shapes and cost.
    places: BTreeMap<(&'static str, String, Cost), usize>,
    calls: Vec<TimedCall>,
}

impl Timings {
    /// Times a call, unless the device has failed.
    fn time(&mut self, call: &Call, backend: &dyn Backend) {
        let (kernel, shapes, cost) = (call.name(), shapes_of(call), call.cost());
        if !format!("{kernel} {shapes}").contains(&self.only) {
            return;
        }
        let place = self.places.entry((kernel, shapes.clone(), cost)).or_insert(self.calls.len());
        if let Some(known) = self.calls.get_mut(*place) {
            known.num_calls += 1;
            return;
        }
        let mut written: Vec<Operand> = Vec::new();
        call.for_each_operand(&mut |operand, access| {
            if access == Access::Write {
                written.push(*operand);
            }
        });
        let saved = |operand: Operand| {
            let mut bytes = vec![0; operand.num_bytes()];
            backend.download(operand, &mut bytes).map(|()| (operand, bytes))
        };
        let Ok(before) = written.into_iter().map(saved).collect::<Result<Vec<_>, _>>() else { return };
        let restore =
            || before.iter().for_each(|(operand, bytes)| backend.upload(bytes, OperandMut::new(*operand)));
        let reads_what_it_writes = cost.traffic.updated > 0;
        let timing = time_runs(self.duration, || {
            if reads_what_it_writes {
                restore();
            }
            // Cloned before the time begins.
            let mut call = Some(call.clone());
            backend.time(&mut || call.take().into_iter().for_each(|call| backend.run(call)))
        });
        restore();
        let Ok(timing) = timing else { return };
        let timed = TimedCall { kernel, shapes, cost, num_calls: 1, timing };
        (self.report)(&timed);
        self.calls.push(timed);
    }
}

/// Formats the shapes of a call's read operands and of the first written one.
fn shapes_of(call: &Call) -> String {
    let text = |shape: Shape| {
        let dims: Vec<String> = shape.dims().iter().map(usize::to_string).collect();
        dims.join("x")
    };
    let (mut read, mut written) = (Vec::new(), None);
    call.for_each_operand(&mut |operand, access| match access {
        Access::Read => read.push(text(operand.shape())),
        Access::Write => written = written.take().or_else(|| Some(text(operand.shape()))),
    });
    let shapes = [read.join(", "), written.unwrap_or_default()];
    shapes.into_iter().filter(|shapes| !shapes.is_empty()).collect::<Vec<_>>().join(" -> ")
}

impl fmt::Debug for CallTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallTimer").finish_non_exhaustive()
    }
}
