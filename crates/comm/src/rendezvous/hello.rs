use super::wire::{ip_to_words, words_to_ip};
use crate::{JoinOptions, words};
use std::net::{IpAddr, SocketAddr};

/// The first word of a hello: this protocol, first version.
pub(super) const HELLO_MAGIC: [u8; 8] = *b"TRIRJOI1";
const HELLO_WORDS: usize = 10;
/// Bytes of a hello on the wire.
pub(super) const HELLO_BYTES: usize = 8 * HELLO_WORDS;

/// How a rank introduces itself to rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: u64,
    pub(super) world_size: u64,
    /// Fingerprint of what must be the same on all ranks.
    pub(super) job: u64,
    /// Where the rank can be met.
    pub(super) place: Place,
}

/// Where the other ranks find one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The running system, the same for all processes of a host; 0 if unknown.
    pub(super) host: u128,
    /// Names the socket at which processes of the same host meet the rank.
    pub(super) meeting: u64,
    /// Where processes of other hosts connect.
    pub(super) address: SocketAddr,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let [host_high, host_low] = [(self.place.host >> 64) as u64, self.place.host as u64];
        let [ip_high, ip_low] = ip_to_words(self.place.address.ip());
        words::to_bytes([
            u64::from_le_bytes(HELLO_MAGIC),
            self.rank,
            self.world_size,
            self.job,
            host_high,
            host_low,
            self.place.meeting,
            ip_high,
            ip_low,
            u64::from(self.place.address.port()),
        ])
    }

    /// Reads a hello; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let [magic, rank, world_size, job, host_high, host_low, meeting, ip_high, ip_low, port] =
            words::from_bytes(bytes);
        if magic != u64::from_le_bytes(HELLO_MAGIC) {
            return None;
        }
        let ip: IpAddr = words_to_ip([ip_high, ip_low]);
        let address = SocketAddr::new(ip, u16::try_from(port).ok()?);
        let host = u128::from(host_high) << 64 | u128::from(host_low);
        Some(Hello { rank, world_size, job, place: Place { host, meeting, address } })
    }

    /// Why rank 0, with its own options, turns the sender away; `None` if it does not.
    pub(super) fn objection(&self, options: &JoinOptions) -> Option<String> {
        let expected = options.world_size as u64;
        if self.world_size != expected {
            return Some(format!(
                "it was started with world_size {}, rank 0 with world_size {expected}",
                self.world_size
            ));
        }
        if self.job != fingerprint(options) {
            return Some(
                "it belongs to another job, or its communication options differ from rank 0's".to_owned(),
            );
        }
        if self.rank == 0 {
            return Some("rank 0 is the rank that listens; a second one was started".to_owned());
        }
        (self.rank >= expected).then(|| format!("rank {} is outside of a world of {expected}", self.rank))
    }
}

/// What must be the same on all ranks, as one number (FNV-1a: finds mistakes, protects nothing).
pub(super) fn fingerprint(options: &JoinOptions) -> u64 {
    let JoinOptions { world_size, transport, job, group, .. } = options;
    let text = format!(
        "{world_size} {transport} {:?} {} {} {job}",
        group.timeout, group.short_bytes_max, group.chunk_bytes
    );
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use trireme_base::Rank;

    fn hello(rank: u64, options: &JoinOptions) -> Hello {
        let address = "127.0.0.1:9".parse().expect("an address");
        let place = Place { host: 1 << 100, meeting: 8, address };
        Hello { rank, world_size: options.world_size as u64, job: fingerprint(options), place }
    }

    #[test]
    fn a_hello_reads_back() {
        let mut hello = hello(3, &JoinOptions::new(Rank(0), 4));
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        hello.place.address = "[fe80::7]:65535".parse().expect("an address");
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    }

    #[test]
    fn only_the_missing_ranks_of_the_same_job_are_welcome() {
        let options = JoinOptions::new(Rank(0), 4);
        assert_eq!(hello(3, &options).objection(&options), None);
        for rank in [0, 4, u64::MAX] {
            assert!(hello(rank, &options).objection(&options).is_some(), "{rank}");
        }
        let other_world = JoinOptions::new(Rank(0), 3);
        assert!(hello(1, &other_world).objection(&options).is_some_and(|why| why.contains("world_size 3")));
        let other_job = JoinOptions { job: "other".to_owned(), ..options.clone() };
        assert!(hello(1, &other_job).objection(&options).is_some_and(|why| why.contains("job")));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), HELLO_BYTES)) {
            bytes[..8].copy_from_slice(&HELLO_MAGIC);
            let bytes: [u8; HELLO_BYTES] = bytes.try_into().expect("as many bytes as a hello");
            if let Some(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(Hello::decode(&hello.encode()), Some(hello));
            }
        }
    }
}
