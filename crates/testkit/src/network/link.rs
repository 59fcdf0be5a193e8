use super::namespace::{BRIDGE, DEVICE, Namespace};
use super::traffic::Traffic;
use std::sync::Arc;

/// Bytes of headers in a TCP packet over IPv4: Ethernet 14, IPv4 20, TCP 20, and TCP timestamps 12.
pub const IPV4_TCP_HEADER_BYTES: u64 = 66;
/// Bytes of headers in a TCP packet over IPv6, whose own header has 40.
pub const IPV6_TCP_HEADER_BYTES: u64 = 86;

/// Minimum number of bytes that may pass at once, however low the rate: ten full frames.
const BURST_BYTES_MIN: u64 = 16 << 10;
/// Maximum time that a frame waits if the rate is exceeded. Frames that would wait longer are dropped.
const QUEUE_MILLISECONDS: u64 = 100;

/// The link between a [`Host`](super::Host) and the switch of its network.
#[derive(Debug)]
pub struct Link {
    pub(super) host: Namespace,
    pub(super) switch: Arc<Namespace>,
    pub(super) port: String,
}

impl Link {
    /// Limits the rate of each direction separately, by a token bucket (`tc-tbf`). The bucket holds the bytes of 4 ms, and at least 16 KiB.
    /// Frames that would wait for more than 100 ms are dropped, as in a switch.
    pub fn shape(&self, bits_per_second: u64) {
        // The bucket must hold the bytes that pass between two ticks of the kernel's timer, which has 250 a second.
        let burst = (bits_per_second / 8 / 250).max(BURST_BYTES_MIN);
        for (namespace, device) in self.ends() {
            namespace.run(&format!(
                "tc qdisc replace dev {device} root tbf rate {bits_per_second}bit burst {burst} latency \
                 {QUEUE_MILLISECONDS}ms"
            ));
        }
    }

    /// Removes the limit of [`shape`](Link::shape).
    pub fn unshape(&self) {
        for (namespace, device) in self.ends() {
            namespace.run(&format!("tc qdisc del dev {device} root"));
        }
    }

    /// Drops every frame from now on, in both directions, without notice to either side. To a host, this looks like a failure further away:
    /// connections get no error until one of their timeouts passes.
    pub fn cut(&self) {
        self.switch.run(&format!("ip link set {} nomaster", self.port));
    }

    /// Unplugs the link: as [`cut`](Link::cut), but the host's device also loses its carrier.
    pub fn unplug(&self) {
        self.switch.run(&format!("ip link set {} down", self.port));
    }

    /// Restores a link that was cut or unplugged.
    pub fn restore(&self) {
        self.switch.run(&format!("ip link set {} master {BRIDGE} up", self.port));
    }

    /// Returns the traffic since the host was created, as counted by its device.
    pub fn traffic(&self) -> Traffic {
        let [devices, protocols] = ["dev", "snmp"].map(|name| {
            let path = format!("/proc/{}/net/{name}", self.host.id());
            std::fs::read_to_string(path).expect("the host's process lives")
        });
        Traffic::read(&devices, DEVICE, &protocols).expect("the host has its device")
    }

    pub(super) fn ends(&self) -> [(&Namespace, &str); 2] {
        [(&self.host, DEVICE), (&self.switch, &self.port)]
    }
}

#[cfg(test)]
mod tests {
    use crate::network::Network;
    use crate::or_skip;

    #[test]
    fn both_ends_are_shaped() {
        let Some(()) = or_skip("networks of hosts", Network::available()) else { return };
        let network = Network::new();
        let host = network.add_host();
        let rates = || {
            host.link().ends().map(|(namespace, device)| {
                let output = namespace.command("tc").args(["qdisc", "show", "dev", device]).output().unwrap();
                let text = String::from_utf8(output.stdout).unwrap();
                text.split_once("rate ").map(|(_, rate)| rate.split(' ').next().unwrap().to_owned())
            })
        };
        assert_eq!(rates(), [None, None]);
        host.link().shape(3_000_000);
        assert_eq!(rates(), [(); 2].map(|()| Some("3Mbit".to_owned())));
        host.link().unshape();
        assert_eq!(rates(), [None, None]);
    }
}
