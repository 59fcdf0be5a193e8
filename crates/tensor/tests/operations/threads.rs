//! Ranks of an axis as threads of a test.

use std::collections::VecDeque;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use trireme_base::{AxisRank, DType, ExchangeKind};
use trireme_tensor::tape::{AxisOps, ExchangedRuns, PendingExchange};
use trireme_tensor::{Category, Device, DeviceError, View, ViewMut};

/// A rank that runs on a thread of the test. Ranks exchange f32 values and round sums once.
#[derive(Debug)]
pub(crate) struct ThreadRank {
    place: AxisRank,
    shared: Arc<Shared>,
    /// Result of each started exchange; `None` for a shift, whose result comes from the previous rank.
    results: Mutex<Vec<Option<Vec<f32>>>>,
}

#[derive(Debug)]
struct Shared {
    slots: Mutex<Vec<Vec<f32>>>,
    barrier: Barrier,
    /// For each rank, the vectors that were sent to it and not received yet.
    sent: Mutex<Vec<VecDeque<Vec<f32>>>>,
    is_sent: Condvar,
}

impl ThreadRank {
    /// Returns the ranks of an axis.
    pub(crate) fn all(degree: usize) -> Vec<Arc<ThreadRank>> {
        let shared = Arc::new(Shared {
            slots: Mutex::new(vec![Vec::new(); degree]),
            barrier: Barrier::new(degree),
            sent: Mutex::new(vec![VecDeque::new(); degree]),
            is_sent: Condvar::new(),
        });
        let rank =
            |place| Arc::new(ThreadRank { place, shared: Arc::clone(&shared), results: Mutex::default() });
        AxisRank::all(degree).map(rank).collect()
    }

    fn gather(&self, own: Vec<f32>) -> Vec<Vec<f32>> {
        self.shared.slots.lock().unwrap()[self.place.rank] = own;
        self.shared.barrier.wait();
        let all = self.shared.slots.lock().unwrap().clone();
        self.shared.barrier.wait();
        all
    }

    fn sum(&self, own: Vec<f32>) -> Vec<f32> {
        let sum =
            |sum: Vec<f32>, term: Vec<f32>| sum.iter().zip(&term).map(|(sum, term)| sum + term).collect();
        self.gather(own).into_iter().reduce(sum).unwrap()
    }
}

impl AxisOps for ThreadRank {
    fn axis_rank(&self) -> AxisRank {
        self.place
    }

    fn start(
        &self,
        device: &Device,
        kind: ExchangeKind,
        values: View<'_>,
    ) -> Result<PendingExchange, DeviceError> {
        let AxisRank { rank, degree } = self.place;
        let mut wide = device.empty(values.shape(), DType::F32, Category::Activations)?;
        device.convert(values, wide.view_mut());
        let values: Vec<f32> = device.read(wide.view()).unwrap();
        let own = rank * (values.len() / degree)..(rank + 1) * (values.len() / degree);
        let result = match kind {
            ExchangeKind::AllReduce => Some(self.sum(values)),
            ExchangeKind::AllGather => Some(self.gather(values).concat()),
            ExchangeKind::ReduceScatter => Some(self.sum(values)[own].to_vec()),
            ExchangeKind::AllToAll => {
                Some(self.gather(values).iter().flat_map(|from| &from[own.clone()]).copied().collect())
            }
            ExchangeKind::Shift => {
                self.shared.sent.lock().unwrap()[(rank + 1) % degree].push_back(values);
                self.shared.is_sent.notify_all();
                None
            }
        };
        let mut results = self.results.lock().unwrap();
        results.push(result);
        Ok(PendingExchange(results.len() - 1))
    }

    fn finish(
        &self,
        device: &Device,
        exchange: PendingExchange,
        result: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let found = self.results.lock().unwrap()[exchange.0].take();
        let found = found.unwrap_or_else(|| {
            let sent = self.shared.sent.lock().unwrap();
            let is_empty = |sent: &mut Vec<VecDeque<_>>| sent[self.place.rank].is_empty();
            let mut sent = self.shared.is_sent.wait_while(sent, is_empty).unwrap();
            sent[self.place.rank].pop_front().unwrap()
        });
        let mut wide = device.empty(result.shape(), DType::F32, Category::Activations)?;
        device.upload(&found, wide.view_mut());
        device.convert(wide.view(), result);
        Ok(())
    }

    fn gather_numbers(&self, _: &[u32]) -> Result<Vec<u32>, DeviceError> {
        unreachable!("operations of these tests exchange no rows");
    }

    fn start_rows(&self, _: &Device, _: ExchangedRuns, _: View<'_>) -> Result<PendingExchange, DeviceError> {
        unreachable!("operations of these tests exchange no rows");
    }

    fn send_rest(
        &self,
        _: &Device,
        _: &PendingExchange,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        unreachable!("operations of these tests exchange no rows");
    }

    fn finish_rows(&self, _: &Device, _: PendingExchange, _: ViewMut<'_>) -> Result<(), DeviceError> {
        unreachable!("operations of these tests exchange no rows");
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        let results = self.results.get_mut().unwrap();
        let are_finished = std::thread::panicking() || results.iter().all(Option::is_none);
        assert!(are_finished, "an exchange was started, and not finished");
    }
}
