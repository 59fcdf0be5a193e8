//! Transfers and reductions of device memory.

use crate::floats::{rounded, rounded_bf16, widened, widened_bf16};
use std::collections::VecDeque;
use std::ffi::c_int;

/// Bytes of device memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes {
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Bytes {
    pub(super) fn read(self) -> Vec<u8> {
        // SAFETY: `enqueue` has checked that these are device memory, which the stream may access while a job runs.
        unsafe { std::slice::from_raw_parts(self.start as *const u8, self.len) }.to_vec()
    }

    fn write(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "ranks send as much as others receive");
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start as *mut u8, self.len) };
    }
}

pub(super) type End = Box<dyn FnOnce(&mut VecDeque<Vec<u8>>) + Send>;

/// Transfers that run together.
#[derive(Default)]
pub(super) struct Transfers {
    /// All device memory that they access.
    pub(super) used: Vec<Bytes>,
    pub(super) sent: Vec<(usize, Bytes)>,
    /// The ranks from which frames are received, in this order.
    pub(super) received: Vec<usize>,
    /// Functions that take the received frames, in this order.
    pub(super) ends: Vec<End>,
}

impl Transfers {
    pub(super) fn send(&mut self, bytes: Bytes, to: usize) {
        self.used.push(bytes);
        self.sent.push((to, bytes));
    }

    pub(super) fn receive(&mut self, bytes: Bytes, from: usize) {
        self.used.push(bytes);
        self.received.push(from);
        self.ends.push(Box::new(move |frames| bytes.write(&frames.pop_front().expect("it has arrived"))));
    }

    /// Receives a frame of each other rank, and writes the reduction of these and of this rank's bytes.
    pub(super) fn reduce(
        &mut self,
        (rank, world_size): (usize, usize),
        own: Bytes,
        to: Bytes,
        reduction: Reduction,
    ) {
        self.used.extend([own, to]);
        self.received.extend((0..world_size).filter(|peer| *peer != rank));
        self.ends.push(Box::new(move |frames| {
            let all: Vec<Vec<u8>> = (0..world_size)
                .map(
                    |peer| {
                        if peer == rank { own.read() } else { frames.pop_front().expect("it has arrived") }
                    },
                )
                .collect();
            to.write(&reduction.of(&all));
        }));
    }
}

/// A reduction, in an order that differs from the canonical one: from the last rank to the first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reduction {
    dtype: c_int,
    op: c_int,
}

impl Reduction {
    pub(super) fn new(dtype: c_int, op: c_int) -> Option<Self> {
        (matches!(dtype, 6 | 7 | 9) && (0..4).contains(&op)).then_some(Reduction { dtype, op })
    }

    pub(super) fn size(self) -> usize {
        if self.dtype == 7 { 4 } else { 2 }
    }

    fn values(self, bytes: &[u8]) -> Vec<f32> {
        let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let value = |bytes: &[u8]| match self.dtype {
            7 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            6 => widened(half(bytes)),
            _ => widened_bf16(half(bytes)),
        };
        bytes.chunks(self.size()).map(value).collect()
    }

    fn bytes(self, value: f32) -> Vec<u8> {
        match self.dtype {
            7 => value.to_le_bytes().to_vec(),
            6 => rounded(value).to_le_bytes().to_vec(),
            _ => rounded_bf16(value).to_le_bytes().to_vec(),
        }
    }

    fn of(self, all: &[Vec<u8>]) -> Vec<u8> {
        let mut vectors = all.iter().rev().map(|bytes| self.values(bytes));
        let mut result = vectors.next().expect("a communicator has ranks");
        for values in vectors {
            for (result, value) in result.iter_mut().zip(values) {
                let reduced = match self.op {
                    0 => *result + value,
                    1 => *result * value,
                    2 => result.max(value),
                    _ => result.min(value),
                };
                let bytes = self.bytes(reduced);
                *result = self.values(&bytes)[0];
            }
        }
        result.iter().flat_map(|value| self.bytes(*value)).collect()
    }
}
