use std::ops::Sub;

/// The traffic of a link, as counted by its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Traffic from the host to the others.
    pub sent: Volume,
    /// Traffic from the others to the host.
    pub received: Volume,
    /// Number of TCP segments that the host retransmitted, because they were lost or seemed to be, as on a busy machine. `sent` includes
    /// them.
    pub num_retransmitted_segments: u64,
}

/// The traffic in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Volume {
    /// Number of packets as the kernel counts them. If the device segments packets into frames, a packet has up to 64 KiB, and its headers
    /// count only once.
    pub num_packets: u64,
    /// Number of bytes, including the headers of Ethernet and of everything above.
    pub bytes: u64,
}

impl Volume {
    /// Returns the bytes without `header_bytes` of headers per packet, such as [`IPV4_TCP_HEADER_BYTES`](super::IPV4_TCP_HEADER_BYTES).
    ///
    /// For TCP connections without losses, this is the payload, plus at most some tens of bytes for every connection made, and minus some
    /// bytes for every packet of another kind (address resolution, some per minute). Retransmitted segments
    /// ([`num_retransmitted_segments`](Traffic::num_retransmitted_segments)) count again.
    pub fn payload_bytes(&self, header_bytes: u64) -> u64 {
        self.bytes.saturating_sub(self.num_packets * header_bytes)
    }
}

impl Traffic {
    /// Reads the row of `device` in `devices`, the kernel's `/proc/net/dev`, and the counters of TCP in `protocols`, its `/proc/net/snmp`.
    /// `None` if one of them is missing.
    pub(super) fn read(devices: &str, device: &str, protocols: &str) -> Option<Self> {
        let row =
            devices.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
        let numbers: Vec<u64> = row.split_whitespace().map_while(|number| number.parse().ok()).collect();
        let volume = |index: usize| {
            Some(Volume { bytes: *numbers.get(index)?, num_packets: *numbers.get(index + 1)? })
        };
        // A row of names, followed by a row of numbers.
        let mut rows =
            protocols.lines().filter_map(|line| line.strip_prefix("Tcp:")).map(str::split_whitespace);
        let (names, mut numbers) = (rows.next()?, rows.next()?);
        let num_resent = numbers.nth(names.into_iter().position(|name| name == "RetransSegs")?)?;
        Some(Traffic {
            received: volume(0)?,
            sent: volume(8)?,
            num_retransmitted_segments: num_resent.parse().ok()?,
        })
    }
}

/// Returns the traffic since `earlier`.
impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, earlier: Traffic) -> Traffic {
        Traffic {
            sent: self.sent - earlier.sent,
            received: self.received - earlier.received,
            num_retransmitted_segments: self.num_retransmitted_segments - earlier.num_retransmitted_segments,
        }
    }
}

/// Returns the traffic since `earlier`.
impl Sub for Volume {
    type Output = Volume;

    fn sub(self, earlier: Volume) -> Volume {
        Volume { num_packets: self.num_packets - earlier.num_packets, bytes: self.bytes - earlier.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0
  eth0:    1066       3    0    1    0     0          0         9   70066       2    0    0    0     0       0          0
";

    const PROTOCOLS: &str = "\
Ip: Forwarding DefaultTTL
Ip: 2 64
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn InSegs OutSegs RetransSegs InErrs
Tcp: 1 200 120000 -1 9 8 7 0
";

    #[test]
    fn counters_are_read_and_headers_are_taken_off() {
        let traffic = Traffic::read(DEVICES, "eth0", PROTOCOLS).unwrap();
        assert_eq!(traffic.received, Volume { num_packets: 3, bytes: 1066 });
        assert_eq!(traffic.sent.payload_bytes(66), 70066 - 2 * 66);
        assert_eq!(traffic.received.payload_bytes(1066), 0);
        assert_eq!(traffic.num_retransmitted_segments, 7);
        assert_eq!((traffic - traffic).sent, Volume { num_packets: 0, bytes: 0 });
        for (devices, device, protocols) in [
            (DEVICES, "eth", PROTOCOLS),
            ("eth0: 1 2 3", "eth0", PROTOCOLS),
            (DEVICES, "eth0", "Tcp: A\nTcp: 1"),
        ] {
            assert_eq!(Traffic::read(devices, device, protocols), None);
        }
    }
}
