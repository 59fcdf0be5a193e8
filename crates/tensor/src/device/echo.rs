//! A backend that says what it runs.

use crate::kernels::backend::{Backend, HostCopy};
use crate::kernels::call::Call;
use crate::kernels::cpu::Cpu;
use crate::kernels::{Operand, OperandMut};
use std::panic::Location;
use std::sync::Arc;
use trireme_base::Event;

/// The backend of a CPU that writes the name of each kernel to standard error before it runs.
#[derive(Debug)]
pub(super) struct Echo(pub(super) Arc<Cpu>);

impl Backend for Echo {
    fn run(&self, call: Call) {
        eprintln!("{}", call.name());
        self.0.run(call);
    }

    fn upload(&self, from: &[u8], to: OperandMut) {
        self.0.upload(from, to);
    }

    fn download(&self, from: Operand, to: &mut [u8]) {
        self.0.download(from, to);
    }

    fn copy(&self, copy: HostCopy) -> Event {
        self.0.copy(copy)
    }

    fn record(&self) -> Event {
        Event::DONE
    }

    fn wait_for(&self, event: &Event, caller: &'static Location<'static>) {
        self.0.wait_for(event, caller);
    }
}
