use super::namespace::{BRIDGE, DEVICE, Namespace};
use super::traffic::Traffic;
use std::sync::Arc;

/// Bytes of headers in a TCP packet over IPv4: Ethernet 14, IPv4 20, TCP 20, its timestamps 12.
pub const IPV4_TCP_HEADER_BYTES: u64 = 66;
/// The same over IPv6, whose header has 40.
pub const IPV6_TCP_HEADER_BYTES: u64 = 86;

/// What may pass at once, however low the rate: ten full frames.
const BURST_BYTES_MIN: u64 = 16 << 10;
/// How long a frame waits at most where the rate is exceeded; those that would wait longer are dropped.
const QUEUE_MILLISECONDS: u64 = 100;

/// What connects a [`Host`](super::Host) to the switch of its network.
#[derive(Debug)]
pub struct Link {
    pub(super) host: Namespace,
    pub(super) switch: Arc<Namespace>,
    pub(super) port: String,
}

impl Link {
    /// Limits the rate, in each direction on its own, by a token bucket (`tc-tbf`). The bucket holds what passes in 4 ms,
    /// and at least 16 KiB; as in a switch, what would wait for more than 100 ms is dropped.
    pub fn shape(&self, bits_per_second: u64) {
        // What the kernel's timer lets through between two of its ticks, at 250 a second, must fit into the bucket.
        let burst = (bits_per_second / 8 / 250).max(BURST_BYTES_MIN);
        for (namespace, device) in self.ends() {
            namespace.run(&format!(
                "tc qdisc replace dev {device} root tbf rate {bits_per_second}bit burst {burst} latency \
                 {QUEUE_MILLISECONDS}ms"
            ));
        }
    }

    /// Takes the limit of [`shape`](Link::shape) away.
    pub fn unshape(&self) {
        for (namespace, device) in self.ends() {
            namespace.run(&format!("tc qdisc del dev {device} root"));
        }
    }

    /// Loses every frame from now on, in both directions, and tells neither side: what a host sees of a failure further
    /// away. Connections get no error until a timeout of theirs passes.
    pub fn cut(&self) {
        self.switch.run(&format!("ip link set {} nomaster", self.port));
    }

    /// Takes the plug out: as [`cut`](Link::cut), but the host's device loses its carrier.
    pub fn unplug(&self) {
        self.switch.run(&format!("ip link set {} down", self.port));
    }

    /// Makes a link whole again that was cut or unplugged.
    pub fn restore(&self) {
        self.switch.run(&format!("ip link set {} master {BRIDGE} up", self.port));
    }

    /// What the host has sent and received since it was made, as its device counts it.
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
