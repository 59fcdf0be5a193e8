use crate::call::Call;
use crate::operation::Operation;
use crate::words;

pub(super) const HEADER_BYTES: usize = 40;

pub(super) const CHECKSUM_BYTES: usize = 4;

/// `TRIRFRM1`: magic of a frame without a checksum, version 1 of the protocol.
const MAGIC: u64 = u64::from_le_bytes(*b"TRIRFRM1");
/// `TRIRFRC1`: magic of a frame with a checksum after the payload.
const MAGIC_WITH_CHECKSUM: u64 = u64::from_le_bytes(*b"TRIRFRC1");

/// The header before each message's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) operation: Operation,
    pub(super) payload_bytes: u64,
    /// Whether a [`Checksum`] follows the payload.
    pub(super) has_checksum: bool,
}

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4) of the bytes of a frame transferred so far, in order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Checksum(u32);

impl Header {
    pub(super) fn new(call: &Call, payload_bytes: usize, has_checksum: bool) -> Self {
        let payload_bytes = payload_bytes as u64;
        Header { sequence: call.sequence, operation: call.operation, payload_bytes, has_checksum }
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let [first, second] = self.operation.encode();
        let magic = if self.has_checksum { MAGIC_WITH_CHECKSUM } else { MAGIC };
        words::to_bytes([magic, self.sequence, first, second, self.payload_bytes])
    }

    /// Decodes a header. `None` if the bytes are not a valid header.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let [magic, sequence, first, second, payload_bytes] = words::from_bytes(bytes);
        let has_checksum = match magic {
            MAGIC => false,
            MAGIC_WITH_CHECKSUM => true,
            _ => return None,
        };
        let operation = Operation::decode([first, second])?;
        Some(Header { sequence, operation, payload_bytes, has_checksum })
    }
}

impl Checksum {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    pub(super) fn to_bytes(self) -> [u8; CHECKSUM_BYTES] {
        self.0.to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Fuzzer;
    use proptest::prelude::*;
    use trireme_schedule::collective::CollectiveKind;

    #[test]
    fn a_header_reads_back_and_another_protocol_does_not() {
        let header = |has_checksum| Header {
            sequence: 7,
            operation: Operation::BARRIER,
            payload_bytes: 99,
            has_checksum,
        };
        assert_eq!(Header::decode(&header(true).encode()), Some(header(true)));
        let header = header(false);
        assert_eq!(Header::decode(&header.encode()), Some(header));
        let mut other = header.encode();
        other[7] = b'2';
        assert_eq!(Header::decode(&other), None);
    }

    #[test]
    fn hostile_headers_are_read_or_refused() {
        let operation = Operation::of(
            CollectiveKind::Broadcast.with_root(trireme_base::Rank(1), 9),
            trireme_base::DType::F32,
        );
        let headers = [(operation, true), (Operation::BARRIER, false)].map(|(operation, has_checksum)| {
            Header { sequence: 7, operation, payload_bytes: 36, has_checksum }.encode().to_vec()
        });
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

    #[test]
    fn a_checksum_matches_the_standard_for_any_split() {
        // The check value of CRC-32C.
        let bytes = b"123456789";
        for cut in 0..=bytes.len() {
            let mut checksum = Checksum::default();
            checksum.add(&bytes[..cut]);
            checksum.add(&bytes[cut..]);
            assert_eq!(checksum.to_bytes(), 0xe306_9283_u32.to_le_bytes());
        }
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
