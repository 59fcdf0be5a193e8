use std::time::{Duration, Instant};
use trireme_base::Pending;
use trireme_comm::{Buffer, CommError, Element, FusedWork, Outcome, Work};
use trireme_tensor::Device;

/// How long a rank waits for communication with nothing else to do, and what came of operations that its kernels wait for in its place.
#[derive(Default)]
pub(crate) struct Waiting {
    waited: Duration,
    outcomes: Vec<Outcome>,
}

impl Waiting {
    /// Waits for an operation.
    pub(crate) fn wait<T>(&mut self, work: Work<T>) -> Result<T, CommError> {
        self.during(|| work.wait())
    }

    /// Waits for a vector, which may be reduced with others and of which kernels do not read anything.
    pub(crate) fn wait_fused<T: Element>(&mut self, work: FusedWork<T>) -> Result<Buffer<T>, CommError> {
        self.during(|| work.wait())
    }

    /// A vector of `len` elements, for kernels of `device`. Those of a device that works later wait for the operation themselves; that
    /// it has failed is known when the outcomes are [settled](Waiting::settle).
    pub(crate) fn pass_on<T: Element>(
        &mut self,
        work: impl Into<FusedWork<T>>,
        len: usize,
        device: &Device,
    ) -> Result<Pending<Buffer<T>>, CommError> {
        let work = work.into();
        // Of a vector without elements nothing comes.
        if device.reaches_host() || len == 0 {
            return self.wait_fused(work).map(here);
        }
        let (vector, outcome) = self.during(|| work.into_pending(len));
        self.outcomes.push(outcome);
        Ok(vector)
    }

    /// Waits for the operations whose vectors were passed on. Until then kernels may work with zeros in the place of what did not
    /// come: nothing that outlasts a step is made of it before.
    ///
    /// # Errors
    /// What the first of them that has failed did.
    pub(crate) fn settle(&mut self) -> Result<(), CommError> {
        let outcomes = std::mem::take(&mut self.outcomes);
        self.during(|| outcomes.into_iter().try_for_each(Outcome::wait))
    }

    fn during<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = wait();
        self.waited += began.elapsed();
        result
    }

    /// Adds what another one has counted.
    pub(crate) fn add(&mut self, mut other: Waiting) {
        self.waited += other.waited;
        self.outcomes.append(&mut other.outcomes);
    }

    /// How long it was, all in all.
    pub(crate) fn total(&self) -> Duration {
        self.waited
    }
}

/// A vector that its operation has given back, for copies of devices.
pub(crate) fn here<T: Element>(mut vector: Buffer<T>) -> Pending<Buffer<T>> {
    // A group of one rank does not touch it.
    vector.wait();
    Pending::new(vector)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::{Rank, ReduceOp};
    use trireme_tensor::{Backend, DetachedOptions, DeviceOptions};
    use trireme_testkit::run_ranks;

    #[test]
    fn a_failure_is_known_when_it_is_settled() {
        run_ranks(2, |group| {
            let backend = Backend::Detached(DetachedOptions::default());
            let device = Device::open(DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() });
            let (device, mut waiting) = (device.unwrap(), Waiting::default());
            let mut sum = || {
                let vector = group.buffer::<f32>(10).unwrap();
                waiting.pass_on(group.all_reduce(vector, ReduceOp::Sum), 10, &device).unwrap();
                waiting.settle()
            };
            sum().unwrap();
            if group.rank() == Rank::ROOT {
                sum().expect_err("the peer has left");
            }
        });
    }
}
