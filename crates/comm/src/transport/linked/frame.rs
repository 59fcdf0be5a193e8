use crate::engine::Call;
use crate::operation::Operation;
use crate::words;

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
        words::to_bytes([MAGIC, self.sequence, first, second, self.payload_bytes])
    }

    /// Reads a header; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let [magic, sequence, first, second, payload_bytes] = words::from_bytes(bytes);
        let operation = Operation::decode([first, second]).filter(|_| magic == MAGIC)?;
        Some(Header { sequence, operation, payload_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Fuzzer;
    use proptest::prelude::*;

    #[test]
    fn a_header_reads_back_and_another_protocol_does_not() {
        let header = Header { sequence: 7, operation: Operation::Barrier, payload_bytes: 99 };
        assert_eq!(Header::decode(&header.encode()), Some(header));
        let mut other = header.encode();
        other[7] = b'2';
        assert_eq!(Header::decode(&other), None);
    }

    #[test]
    fn hostile_headers_are_read_or_refused() {
        let operation =
            Operation::Broadcast { root: trireme_base::Rank(1), dtype: trireme_base::DType::F32, len: 9 };
        let headers = [operation, Operation::Barrier]
            .map(|operation| Header { sequence: 7, operation, payload_bytes: 36 }.encode().to_vec());
        let mut fuzzer = Fuzzer::new("headers", headers.to_vec());
        let mut num_read = 0;
        for _ in 0..200_000 {
            let bytes = fuzzer.next_array();
            if let Some(header) = Header::decode(&bytes) {
                assert_eq!(header.encode(), bytes);
                num_read += 1;
            }
        }
        assert!((10_000..190_000).contains(&num_read), "{num_read}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            mut bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES),
            tag in 0..8_u8,
        ) {
            bytes[..8].copy_from_slice(b"TRIRFRM1");
            bytes[16..24].copy_from_slice(&[tag, 0, 0, 0, 0, 0, 0, 0]);
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().expect("as many bytes as a header");
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
