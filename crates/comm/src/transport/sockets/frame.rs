use crate::engine::Call;
use crate::operation::Operation;

/// Bytes of a frame's header on the wire.
pub(super) const HEADER_BYTES: usize = 40;

/// `TRIRFRM1`: a frame of this protocol, first version.
const MAGIC: u64 = u64::from_le_bytes(*b"TRIRFRM1");

/// What stands before each message's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) operation: Operation,
    pub(super) payload_bytes: u64,
}

impl Header {
    pub(super) fn new(call: &Call, payload_bytes: usize) -> Self {
        Header { sequence: call.sequence, operation: call.operation, payload_bytes: payload_bytes as u64 }
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let [first, second] = self.operation.encode();
        let mut bytes = [0; HEADER_BYTES];
        let words = [MAGIC, self.sequence, first, second, self.payload_bytes];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |index: usize| {
            let chunk = bytes[8 * index..8 * (index + 1)].try_into().expect("a word has eight bytes");
            u64::from_le_bytes(chunk)
        };
        (word(0) == MAGIC).then_some(())?;
        let operation = Operation::decode([word(2), word(3)])?;
        Some(Header { sequence: word(1), operation, payload_bytes: word(4) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_header_reads_back_and_another_protocol_does_not() {
        let header = Header { sequence: 7, operation: Operation::Barrier, payload_bytes: 99 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        let mut other = header.encode();
        other[7] = b'2';
        assert_eq!(Header::decode(&other), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES), tag in 0..8_u8) {
            bytes[..8].copy_from_slice(b"TRIRFRM1");
            bytes[16..24].copy_from_slice(&[tag, 0, 0, 0, 0, 0, 0, 0]);
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().expect("as many bytes as a header");
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
