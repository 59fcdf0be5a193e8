use crate::Direction;
use crate::queue::Operation;
use io_uring::{IoUring, Probe, opcode, types};
use slab::Slab;
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;

/// An io_uring for reads and writes of one file, which the kernel executes asynchronously.
pub(crate) struct Ring {
    ring: IoUring,
    file: File,
    /// The operations in flight. The index of each is the `user_data` of its completion.
    in_flight: Slab<Operation>,
    depth: usize,
}

impl Ring {
    /// Creates a ring for at most `depth` operations in flight on `file`.
    ///
    /// # Errors
    /// If the kernel has no io_uring, does not support its reads and writes, or denies it to this process.
    pub(crate) fn new(file: File, depth: usize) -> io::Result<Self> {
        let ring = IoUring::new(depth as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::other("this kernel's io_uring does not support reads and writes"));
        }
        Ok(Ring { ring, file, in_flight: Slab::with_capacity(depth), depth })
    }

    /// Returns the maximum number of operations in flight.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn has_room(&self) -> bool {
        self.in_flight.len() < self.depth
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Submits an operation to the kernel.
    ///
    /// # Panics
    /// If there is no room.
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
        // SAFETY: the memory belongs to the part, and `in_flight` holds the only handle to the part. The part stays there untouched until
        // the kernel has completed the operation (`wait`), or forever (`drop`). `file` is open at submission, and the kernel keeps its own
        // reference to it until the operation has completed.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(index as u64)) };
        pushed.expect("the ring has an entry for each operation");
        self.ring.submit().map(|_| ())
    }

    /// Blocks until at least one operation has completed, and appends all completed ones to `ended`.
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
    /// Leaks the memory of operations in flight, because the kernel may still write to it.
    fn drop(&mut self) {
        self.in_flight.drain().for_each(mem::forget);
    }
}
