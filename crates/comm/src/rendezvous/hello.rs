use super::handshake::Introduction;
use super::key::Key;
use super::rank_address::{RANK_ADDRESS_WORDS, RankAddress};
use crate::{GroupOptions, JoinOptions, words};
use std::net::{Ipv4Addr, SocketAddr};

const WORDS: usize = 4 + NUM_OPTIONS + RANK_ADDRESS_WORDS;
/// Number of options that must be equal on all ranks.
const NUM_OPTIONS: usize = 13;
/// The introduction of a rank to rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: u64,
    pub(super) world_size: u64,
    /// Fingerprint of the job's name.
    pub(super) job: u64,
    /// Fingerprints of the [`shared_options`].
    pub(super) options: [u64; NUM_OPTIONS],
    pub(super) address: RankAddress,
}

impl Introduction for Hello {
    /// Version 5 of this protocol.
    const MAGIC: [u8; 8] = *b"TRIRJOI5";
    const BYTES: usize = 8 * WORDS;

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [magic, rank, world_size, job, rest @ ..]: [u64; WORDS] =
            words::from_bytes::<WORDS, { 8 * WORDS }>(bytes.try_into().ok()?);
        let (options, place) = rest.split_first_chunk()?;
        let place = RankAddress::from_words(place.try_into().ok()?)
            .filter(|_| magic == u64::from_le_bytes(Self::MAGIC))?;
        Some(Hello { rank, world_size, job, options: *options, address: place })
    }
}

impl Hello {
    pub(super) fn of(options: &JoinOptions, address: RankAddress) -> Self {
        Hello {
            rank: options.rank.0 as u64,
            world_size: options.world_size as u64,
            job: fingerprint("job", &options.job),
            options: shared_options(options).map(|(name, value)| fingerprint(name, &value)),
            address,
        }
    }

    /// The introduction of a rank that cannot join and will report why. Its job name may be unknown.
    pub(super) fn of_failed(options: &JoinOptions) -> Self {
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Hello::of(options, RankAddress { host: 0, socket_id: 0, address })
    }

    /// Whether the sender cannot join. Its address then has port 0.
    pub(super) fn has_failed(&self) -> bool {
        self.address.address.port() == 0
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let magic = u64::from_le_bytes(Self::MAGIC);
        let mut words = [0; WORDS];
        let parts =
            [&[magic, self.rank, self.world_size, self.job][..], &self.options, &self.address.to_words()];
        words.copy_from_slice(&parts.concat());
        words::to_bytes(words)
    }

    /// The reason why rank 0, with these `options`, refuses the sender. `None` if it does not.
    pub(super) fn objection(&self, options: &JoinOptions) -> Option<String> {
        let expected = options.world_size as u64;
        if self.world_size != expected {
            return Some(format!(
                "it was started with world_size {}, but rank 0 with world_size {expected}",
                self.world_size
            ));
        }
        if self.rank == 0 {
            return Some("rank 0 is the rank that listens, but a second one was started".to_owned());
        }
        if self.rank >= expected {
            return Some(format!("rank {} is outside a world of {expected} ranks", self.rank));
        }
        // The sender knows the secret, but perhaps not its job: it may have failed to read its config.
        let knows_no_job = self.job == fingerprint("job", "") && options.secret.is_some();
        if self.has_failed() && knows_no_job {
            return None;
        }
        if self.job != fingerprint("job", &options.job) {
            return Some(format!(
                "it belongs to a different job than rank 0, whose job is '{}'",
                options.job
            ));
        }
        let shared = shared_options(options).into_iter().zip(self.options);
        let differing: Vec<String> = shared
            .filter(|((name, value), found)| fingerprint(name, value) != *found)
            .map(|((name, value), _)| format!("{name} (rank 0 has {value})"))
            .collect();
        (!differing.is_empty()).then(|| {
            format!("its communication options differ from those of rank 0: {}", differing.join(", "))
        })
    }
}

/// The options that must be equal on all ranks, with their names.
fn shared_options(options: &JoinOptions) -> [(&'static str, String); NUM_OPTIONS] {
    let JoinOptions { transport, tls, orders_by_host, group, .. } = options;
    let GroupOptions {
        timeout,
        network_pause,
        short_bytes_max,
        chunk_bytes,
        keeps_order,
        algorithm,
        costs,
        checksums,
        sockets_per_peer,
        zero_copy,
    } = group;
    [
        ("transport", transport.to_string()),
        ("tls", tls.is_some().to_string()),
        ("orders_by_host", orders_by_host.to_string()),
        ("timeout", format!("{timeout:?}")),
        ("network_pause", format!("{network_pause:?}")),
        ("short_bytes_max", short_bytes_max.to_string()),
        ("chunk_bytes", chunk_bytes.to_string()),
        ("keeps_order", keeps_order.to_string()),
        ("algorithm", algorithm.as_ref().map_or("none".to_owned(), ToString::to_string)),
        ("costs", format!("{costs:?}")),
        ("checksums", checksums.to_string()),
        ("sockets_per_peer", sockets_per_peer.to_string()),
        ("zero_copy", zero_copy.to_string()),
    ]
}

/// A hash of a text that detects mismatches. It does not protect against attackers; the secret does.
pub(super) fn fingerprint(purpose: &str, text: &str) -> u64 {
    let tag = Key::of(None).tag(purpose, &[text.as_bytes()]);
    u64::from_le_bytes(*tag.first_chunk().expect("a tag has more than eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupOptions, Secret};
    use proptest::prelude::*;
    use trireme_base::Rank;

    fn hello(rank: u64, options: &JoinOptions) -> Hello {
        let address = "127.0.0.1:9".parse().expect("an address");
        Hello { rank, ..Hello::of(options, RankAddress { host: 1 << 100, socket_id: 8, address }) }
    }

    #[test]
    fn a_hello_reads_back() {
        let mut hello = hello(3, &JoinOptions::new(Rank(0), 4));
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        hello.address.address = "[fe80::7]:65535".parse().expect("an address");
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert_eq!(Hello::decode(&hello.encode()[1..]), None);
    }

    #[test]
    fn link_local_addresses_get_the_scope_of_rank_0() {
        let at = |address: &str| RankAddress {
            host: 0,
            socket_id: 0,
            address: address.parse().expect("an address"),
        };
        let root: SocketAddr = "[fe80::1%3]:29500".parse().expect("an address");
        let seen = |address| at(address).with_scope_of(root).address.to_string();
        assert_eq!(seen("[fe80::2]:7"), "[fe80::2%3]:7");
        assert_eq!(seen("[2001:db8::2]:7"), "[2001:db8::2]:7");
        assert_eq!(seen("192.0.2.2:7"), "192.0.2.2:7");
    }

    #[test]
    fn only_the_missing_ranks_of_the_same_job_are_welcome() {
        let options = JoinOptions::new(Rank(0), 4);
        assert_eq!(hello(3, &options).objection(&options), None);
        for rank in [0, 4, u64::MAX] {
            assert!(hello(rank, &options).objection(&options).is_some(), "{rank}");
        }
        let objects = |other: &JoinOptions, word: &str| {
            let objection = hello(1, other).objection(&options);
            assert!(objection.as_ref().is_some_and(|why| why.contains(word)), "{objection:?}");
        };
        objects(&JoinOptions::new(Rank(0), 3), "world_size 3");
        objects(&JoinOptions { job: "other".to_owned(), ..options.clone() }, "a different job");
        let group = GroupOptions { chunk_bytes: 64, ..options.group.clone() };
        objects(&JoinOptions { group, ..options.clone() }, "chunk_bytes (rank 0 has 65536)");
    }

    #[test]
    fn a_failed_rank_needs_the_secret_or_the_job() {
        let secret = Secret::new("0123456789abcdef").ok();
        let named = JoinOptions { job: "a".to_owned(), ..JoinOptions::new(Rank(0), 4) };
        let secured = JoinOptions { secret, ..named.clone() };
        let failed = |job: &str| {
            Hello::of_failed(&JoinOptions { job: job.to_owned(), ..JoinOptions::new(Rank(1), 4) })
        };
        let objection = |job: &str, options: &JoinOptions| {
            let hello = Hello::decode(&failed(job).encode()).expect("a hello");
            assert!(hello.has_failed());
            hello.objection(options)
        };
        assert_eq!(objection("", &secured), None);
        assert_eq!(objection("a", &named), None);
        assert!(objection("", &named).is_some() && objection("b", &secured).is_some());
        assert!(hello(1, &JoinOptions::new(Rank(1), 4)).objection(&secured).is_some(), "it has not failed");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), Hello::BYTES)) {
            bytes[..8].copy_from_slice(&Hello::MAGIC);
            if let Some(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(Hello::decode(&hello.encode()), Some(hello));
            }
        }
    }
}
