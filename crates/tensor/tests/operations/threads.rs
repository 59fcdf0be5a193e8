//! Ranks of an axis as threads of a test.

use std::collections::VecDeque;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use trireme_base::AxisPlace;
use trireme_tensor::tape::AxisOps;
use trireme_tensor::{Device, DeviceError, View, ViewMut};

/// Ranks as threads of the test, which exchange f32.
#[derive(Debug)]
pub(crate) struct Threads {
    place: AxisPlace,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    slots: Mutex<Vec<Vec<f32>>>,
    barrier: Barrier,
    /// For each rank, what was sent to it and has not arrived.
    sent: Mutex<Vec<VecDeque<Vec<f32>>>>,
    is_sent: Condvar,
}

impl Threads {
    /// The ranks of an axis.
    pub(crate) fn all(degree: usize) -> Vec<Arc<Threads>> {
        let shared = Arc::new(Shared {
            slots: Mutex::new(vec![Vec::new(); degree]),
            barrier: Barrier::new(degree),
            sent: Mutex::new(vec![VecDeque::new(); degree]),
            is_sent: Condvar::new(),
        });
        let rank = |place| Arc::new(Threads { place, shared: Arc::clone(&shared) });
        AxisPlace::all(degree).map(rank).collect()
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

impl AxisOps for Threads {
    fn place(&self) -> AxisPlace {
        self.place
    }

    fn all_reduce(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
        let sum = self.sum(device.read(values.as_view()));
        device.upload(&sum, values);
        Ok(())
    }

    fn all_gather(&self, device: &Device, part: View<'_>, whole: ViewMut<'_>) -> Result<(), DeviceError> {
        device.upload(&self.gather(device.read(part)).concat(), whole);
        Ok(())
    }

    fn reduce_scatter(&self, device: &Device, whole: View<'_>, part: ViewMut<'_>) -> Result<(), DeviceError> {
        let sum = self.sum(device.read(whole));
        let len = part.shape().num_elements();
        device.upload(&sum[self.place.rank * len..][..len], part);
        Ok(())
    }

    fn all_to_all(&self, device: &Device, from: View<'_>, to: ViewMut<'_>) -> Result<(), DeviceError> {
        let AxisPlace { rank, degree } = self.place;
        let len = from.shape().num_elements() / degree;
        let all = self.gather(device.read(from));
        let parts: Vec<f32> =
            all.iter().flat_map(|from| &from[rank * len..(rank + 1) * len]).copied().collect();
        device.upload(&parts, to);
        Ok(())
    }

    fn start_shift(&self, device: &Device, values: View<'_>) -> Result<(), DeviceError> {
        let next = (self.place.rank + 1) % self.place.degree;
        let values = device.read(values);
        self.shared.sent.lock().unwrap()[next].push_back(values);
        self.shared.is_sent.notify_all();
        Ok(())
    }

    fn finish_shift(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
        let sent = self.shared.sent.lock().unwrap();
        let mut sent = self.shared.is_sent.wait_while(sent, |sent| sent[self.place.rank].is_empty()).unwrap();
        let arrived = sent[self.place.rank].pop_front().unwrap();
        device.upload(&arrived, values);
        Ok(())
    }
}
