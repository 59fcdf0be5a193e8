use crate::Direction;
use crate::queue::Operation;
use io_uring::{IoUring, Probe, opcode, types};
use slab::Slab;
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;

/// Reads and writes of one file that the kernel executes while the thread does something else.
pub(crate) struct Ring {
    ring: IoUring,
    file: File,
    /// The operations that the kernel has, each at the index that its completion will name.
    in_flight: Slab<Operation>,
    depth: usize,
}

impl Ring {
    /// A ring for at most `depth` operations at a time on `file`.
    ///
    /// # Errors
    /// The kernel has no io_uring, not its reads and writes, or denies it to this process.
    pub(crate) fn new(file: File, depth: usize) -> io::Result<Self> {
        let ring = IoUring::new(depth as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::other("this kernel's io_uring does not support reads and writes"));
        }
        Ok(Ring { ring, file, in_flight: Slab::with_capacity(depth), depth })
    }

    /// How many operations it takes at a time.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn has_room(&self) -> bool {
        self.in_flight.len() < self.depth
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Hands an operation to the kernel, for which there must be room.
    pub(crate) fn submit(&mut self, operation: Operation) -> io::Result<()> {
        assert!(self.has_room(), "the ring has room");
        let index = self.in_flight.insert(operation);
        let operation = &mut self.in_flight[index];
        let file = types::Fd(self.file.as_raw_fd());
        let (len, memory) = (operation.part.len() as u32, operation.part.as_mut_ptr());
        let offset = operation.access.offset;
        let entry = match operation.access.direction {
            Direction::Read => opcode::Read::new(file, memory, len).offset(offset).build(),
            Direction::Write => opcode::Write::new(file, memory, len).offset(offset).build(),
        };
        // SAFETY: the memory is the part's, of which `in_flight` has the only handle. It is left alone there until
        // the kernel has said that it is done with it (`wait`), or for ever (`drop`). `file` is open as long.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(index as u64)) };
        pushed.expect("the ring has an entry for each operation");
        self.ring.submit().map(|_| ())
    }

    /// Waits until the kernel has ended at least one operation, and appends those that have to `ended`.
    pub(crate) fn wait(&mut self, ended: &mut Vec<(Operation, io::Result<usize>)>) -> io::Result<()> {
        while let Err(error) = self.ring.submit_and_wait(1) {
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        for completion in self.ring.completion() {
            let index = completion.user_data() as usize;
            let operation =
                self.in_flight.try_remove(index).expect("the kernel ends what was submitted, once");
            let result = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            ended.push((operation, result));
        }
        Ok(())
    }
}

impl Drop for Ring {
    /// What the kernel has not ended may still be written to: its memory is never given back.
    fn drop(&mut self) {
        self.in_flight.drain().for_each(mem::forget);
    }
}
