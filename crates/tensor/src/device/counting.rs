//! The backend of counting devices, which run nothing.

use super::DeviceError;
use crate::exchange_memory::ExchangeMemory;
use crate::kernels::backend::{Backend, HostCopy};
use crate::kernels::call::Call;
use crate::kernels::cpu::arena::Arena;
use crate::kernels::{Operand, OperandMut};
use std::panic::Location;
use std::sync::Arc;
use trireme_base::{
    Category, DType, DeviceCommunicator, DeviceCommunicatorId, DeviceMemory, DeviceTransport,
    DeviceTransportError, Event, Rank,
};

/// The transport of a device that only counts: allocates memory, but communicates nothing.
#[derive(Debug)]
struct CountingTransport(Arc<Arena>);

impl DeviceTransport for CountingTransport {
    fn create_id(&self) -> Result<DeviceCommunicatorId, DeviceTransportError> {
        unreachable!("dry groups do not communicate")
    }

    fn join(
        &self,
        _id: &DeviceCommunicatorId,
        _rank: Rank,
        _world_size: usize,
    ) -> Result<Box<dyn DeviceCommunicator>, DeviceTransportError> {
        unreachable!("dry groups do not communicate")
    }

    fn allocate(&self, num_bytes: usize) -> Result<Arc<dyn DeviceMemory>, DeviceTransportError> {
        let block = self.0.allocate(([num_bytes].into(), DType::U8), Category::Communication);
        let block = block.map_err(|error| DeviceTransportError::Device(error.to_string()))?;
        Ok(Arc::new(ExchangeMemory::new(Arc::new(block))))
    }

    fn can_reduce(&self, _dtype: DType) -> bool {
        true
    }
}

/// The backend of a device that only counts costs and memory.
#[derive(Debug)]
pub(super) struct Counting;

impl Backend for Counting {
    fn is_counting(&self) -> bool {
        true
    }

    fn run(&self, _call: Call) {}

    fn upload(&self, _from: &[u8], _to: OperandMut) {}

    fn download(&self, _from: Operand, _to: &mut [u8]) -> Result<(), String> {
        Ok(())
    }

    fn copy(&self, copy: HostCopy) -> Event {
        copy.after.wait();
        copy.host.return_to_owner();
        Event::DONE
    }

    fn record(&self) -> Event {
        Event::DONE
    }

    fn transport(
        self: Arc<Self>,
        arena: &Arc<Arena>,
    ) -> Result<Option<Arc<dyn DeviceTransport>>, DeviceError> {
        Ok(Some(Arc::new(CountingTransport(Arc::clone(arena)))))
    }

    fn wait_for(&self, event: &Event, _caller: &'static Location<'static>) {
        event.wait();
    }
}
