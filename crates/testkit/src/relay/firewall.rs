use std::ops::RangeInclusive;

/// Size of an Ethernet header in bytes. The last two bytes are the type of its payload.
const ETHERNET_BYTES: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
/// Bytes of an IPv6 header without extensions, which no host of a test adds.
const IPV6_BYTES: usize = 40;
/// Protocol number of TCP, in both IPv4 and IPv6.
const TCP: u8 = 6;
/// Flags of a TCP segment: the first of a connection has SYN and no ACK.
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// Drops TCP connection requests, in either direction, to ports outside the given ranges. Like most network policies, it does not reply.
#[derive(Debug, Clone, Default)]
pub(super) struct Firewall(Option<Vec<RangeInclusive<u16>>>);

impl Firewall {
    pub(super) fn allowing(ports: &[RangeInclusive<u16>]) -> Self {
        Firewall(Some(ports.to_vec()))
    }

    pub(super) fn refuses(&self, frame: &[u8]) -> bool {
        let Some(ports) = &self.0 else { return false };
        opened_port(frame).is_some_and(|port| !ports.iter().any(|range| range.contains(&port)))
    }
}

/// Returns the port to which the frame requests a connection. `None` if it requests none.
fn opened_port(frame: &[u8]) -> Option<u16> {
    let packet = frame.get(ETHERNET_BYTES..)?;
    let segment = match [frame[12], frame[13]] {
        IPV4 if *packet.get(9)? == TCP => packet.get(usize::from(packet[0] & 0xf) * 4..)?,
        IPV6 if *packet.get(6)? == TCP => packet.get(IPV6_BYTES..)?,
        _ => return None,
    };
    let is_first = segment.get(13)? & (SYN | ACK) == SYN;
    is_first.then(|| u16::from_be_bytes([segment[2], segment[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: [u8; 2], header: &[u8], port: u16, flags: u8) -> Vec<u8> {
        let mut segment = vec![0; 20];
        segment[2..4].copy_from_slice(&port.to_be_bytes());
        segment[13] = flags;
        [&[0; 12], &kind[..], header, &segment].concat()
    }

    #[test]
    fn refuses_connection_requests_to_other_ports() {
        let firewall = Firewall::allowing(&[80..=80, 4000..=4003]);
        let mut ipv4 = vec![0; 24];
        (ipv4[0], ipv4[9]) = (0x46, TCP);
        let mut ipv6 = vec![0; IPV6_BYTES];
        (ipv6[0], ipv6[6]) = (0x60, TCP);
        for (kind, header) in [(IPV4, ipv4), (IPV6, ipv6)] {
            let refused = |port, flags| firewall.refuses(&frame(kind, &header, port, flags));
            assert_eq!(
                [79, 80, 81, 3999, 4000, 4003, 4004].map(|port| refused(port, SYN)),
                [true, false, true, true, false, false, true]
            );
            assert!(!refused(79, SYN | ACK) && !refused(79, ACK));
            assert!(!Firewall::default().refuses(&frame(kind, &header, 79, SYN)));
            let whole = frame(kind, &header, 79, SYN);
            assert!((0..whole.len() - 6).all(|end| !firewall.refuses(&whole[..end])), "cut frames");
        }
        assert!(!firewall.refuses(&frame([8, 6], &[0; 20], 79, SYN)));
    }
}
