use super::board::Board;
use super::mapping::Mapping;
use super::ring::{RingReceiver, RingSender};
use super::ring_memory::{RING_BYTES, RingMemory};
use crate::GroupOptions;
use crate::transport::{CONTROL_BYTES_MAX, Purpose};
use std::sync::Arc;

const BOARD_BYTES: usize = 4096;
/// Bytes of each of the two stages (staging buffers). A vector of up to 256 KiB goes through a stage in one piece, a longer one window by
/// window.
pub(super) const STAGE_BYTES: usize = (1 << 20) + 4096;
const _: () = assert!(size_of::<Board>() <= BOARD_BYTES);
const _: () = assert!(size_of::<Board>() == 3 * 64, "what a rank says at a meeting takes one cache line");
const _: () = assert!(STAGE_BYTES >= CONTROL_BYTES_MAX + 8 && STAGE_BYTES >= GroupOptions::SHORT_BYTES_LIMIT);

/// Bytes of an area: the board, two stages, then two rings to each member.
pub(crate) fn area_bytes(num_members: usize) -> usize {
    rings_start() + 2 * num_members * RING_BYTES
}

fn rings_start() -> usize {
    BOARD_BYTES + 2 * STAGE_BYTES
}

/// The memory that one rank of a group reserves in its arena for the group's synchronization and transfers.
#[derive(Clone)]
pub(crate) struct Area {
    pub(super) mapping: Arc<Mapping>,
    offset: usize,
    num_members: usize,
}

impl Area {
    /// The area at `offset` of a rank's arena. `None` if it does not fit there.
    pub(crate) fn new(memory: Arc<Mapping>, offset: usize, num_members: usize) -> Option<Self> {
        let end = offset.checked_add(area_bytes(num_members))?;
        let is_inside = offset.is_multiple_of(BOARD_BYTES) && end <= memory.len();
        is_inside.then_some(Area { mapping: memory, offset, num_members })
    }

    pub(super) fn board(&self) -> &Board {
        let start = self.mapping.at(self.offset, size_of::<Board>());
        // SAFETY: the board is inside the mapping, which `self` keeps, and at the start of a page. It consists of atomics only, for which
        // any bits are valid.
        unsafe { &*start.cast::<Board>() }
    }

    /// The first `num_bytes` of the stage for use number `stage_number`. The two stages alternate.
    pub(super) fn stage(&self, stage_number: usize, num_bytes: usize) -> *mut u8 {
        assert!(num_bytes <= STAGE_BYTES, "{num_bytes} bytes fit into a stage");
        self.mapping.at(self.offset + BOARD_BYTES + stage_number % 2 * STAGE_BYTES, num_bytes)
    }

    /// The sending end of the ring to member `receiver`. For the owner of the area.
    pub(crate) fn sender(&self, purpose: Purpose, receiver: usize) -> RingSender {
        RingSender::new(self.ring(purpose, receiver))
    }

    /// The receiving end of the owner's ring to member `receiver`. For that member.
    pub(crate) fn receiver(&self, purpose: Purpose, receiver: usize) -> RingReceiver {
        RingReceiver::new(self.ring(purpose, receiver))
    }

    fn ring(&self, purpose: Purpose, receiver: usize) -> RingMemory {
        assert_ne!(purpose, Purpose::Control, "notices go over sockets");
        assert!(receiver < self.num_members, "member {receiver} is one of {}", self.num_members);
        let index = purpose as usize * self.num_members + receiver;
        RingMemory::new(Arc::clone(&self.mapping), self.offset + rings_start() + index * RING_BYTES)
    }
}
