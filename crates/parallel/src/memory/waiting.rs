//! Waits for communication, on the host or on the device, and the failures of operations that kernels wait for.
//!
//! On a device that runs kernels asynchronously, kernels wait for the event of an operation, and the host waits for its outcome later. If
//! the operation fails, the event completes all the same and kernels read zeros ([`Work::into_pending`]), so that the failure does not
//! block the stream. Before a result reaches losses, norms, parameters or an evaluation, the executor therefore waits for all outcomes
//! (`Executor::await_operations`), and a failure is an error of the step.
//!
//! A rank reports its losses only when it knows that its operations have succeeded, and no rank updates before it has the reports of all
//! ranks. A pipeline that does not drain is the exception: a rank that saw no failure may have updated parameters with results that were
//! computed from zeros; the run then ends. Evaluation and generation know only the outcomes of their own rank, so a caller that uses the
//! results on several ranks must first agree with the other ranks that none has failed. For the validation loss, the sum over the ranks
//! does this.
//!
//! Kernels wait for the exchange of a whole vector between devices on the device's streams. The host waits until it was issued to them, and
//! before it gives the memory to others, until it is done. If it fails, kernels read data that has arrived in part. For messages between
//! devices and for exchanges within units, the host waits at once.
//!
//! The host waits at once for vectors that it reads or copies itself, such as fused vectors, compressed messages, losses and norms. It also
//! waits at once for parameters that are gathered as integers, for rows that are exchanged hierarchically, for the exchanges of an update,
//! for earlier sends, and for sends of tied parameters.

use crate::error::Result;
use std::time::{Duration, Instant};
use trireme_base::{DType, Pending};
use trireme_comm::{Buffer, CommError, FusedWork, Outcome, Untyped, Work};
use trireme_tensor::Device;

/// The time in which a rank only waited for communication, and the pending operations that its kernels wait for.
#[derive(Default)]
pub(crate) struct WaitTracker {
    pub(crate) waited: Duration,
    outcomes: Vec<Outcome>,
}

impl WaitTracker {
    pub(crate) fn wait<T>(&mut self, work: Work<T>) -> Result<T> {
        Ok(self.during(|| work.wait())?)
    }

    /// Waits for a vector that may have been reduced in a batch with others.
    pub(crate) fn wait_fused(&mut self, work: FusedWork) -> Result<Buffer<Untyped>> {
        Ok(self.during(|| work.wait())?)
    }

    /// Returns a vector of `len` elements of `dtype` for kernels of `device`. If the device runs kernels asynchronously, the kernels wait
    /// for the operation instead of the host, and [`await_operations`](WaitTracker::await_operations) returns its failure.
    pub(crate) fn wait_on_device(
        &mut self,
        work: impl Into<FusedWork>,
        dtype: DType,
        len: usize,
        device: &Device,
    ) -> Result<Pending<Buffer<Untyped>>> {
        let work = work.into();
        // The vector is empty if the group has no memory for it: kernels have nothing to wait for.
        if device.reaches_host() || len == 0 {
            return Ok(self.wait_fused(work)?.into_memory()?);
        }
        let (vector, outcome) = self.during(|| work.into_pending(dtype, len));
        self.outcomes.push(outcome);
        Ok(vector)
    }

    /// Waits for the operations that kernels wait for, and returns their first failure. Until then, kernels may read zeros in place of data
    /// that did not arrive, so no result that outlasts a step may be computed before this call.
    pub(crate) fn await_operations(&mut self) -> Result<(), CommError> {
        let outcomes = std::mem::take(&mut self.outcomes);
        self.during(|| outcomes.into_iter().try_for_each(Outcome::wait))
    }

    fn during<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = wait();
        self.waited += began.elapsed();
        result
    }

    pub(crate) fn add(&mut self, mut other: WaitTracker) {
        self.waited += other.waited;
        self.outcomes.append(&mut other.outcomes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::{Rank, ReduceOp};
    use trireme_comm::{GroupOptions, PageSize, inproc_world_on};
    use trireme_tensor::{BackendKind, DetachedOptions, DeviceOptions};
    use trireme_testkit::run_ranks;

    fn detached() -> Device {
        let backend = BackendKind::Detached(DetachedOptions::default());
        Device::open(DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() }).unwrap()
    }

    #[test]
    fn await_operations_returns_a_failure() {
        run_ranks(2, |group| {
            let (device, mut waiting) = (detached(), WaitTracker::default());
            let mut sum = || {
                let vector = group.buffer_of(DType::F32, 10, PageSize::Base).unwrap();
                waiting
                    .wait_on_device(group.all_reduce(vector, ReduceOp::Sum), DType::F32, 10, &device)
                    .unwrap();
                waiting.await_operations()
            };
            sum().unwrap();
            if group.rank() == Rank::ROOT {
                sum().expect_err("the peer has left");
            }
        });
    }

    /// The sender waits at a barrier for the receiver, which would time out if the host waited for the message first.
    #[test]
    fn wait_on_device_does_not_block_the_host() {
        let options = GroupOptions { timeout: Duration::from_secs(20), ..GroupOptions::default() };
        std::thread::scope(|scope| {
            for group in inproc_world_on(&[0, 0], &options) {
                scope.spawn(move || {
                    let vector = group.buffer_of(DType::F32, 10, PageSize::Base).unwrap();
                    if group.rank() != Rank::ROOT {
                        group.barrier().wait().unwrap();
                        group.send(vector, Rank::ROOT).wait().unwrap();
                        return;
                    }
                    let (device, mut waiting) = (detached(), WaitTracker::default());
                    waiting.wait_on_device(group.receive(vector, Rank(1)), DType::F32, 10, &device).unwrap();
                    group.barrier().wait().unwrap();
                    waiting.await_operations().unwrap();
                });
            }
        });
    }
}
