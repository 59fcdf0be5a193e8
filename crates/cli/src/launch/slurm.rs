//! Facts that only Slurm's controller knows.

use crate::timeout::run_with_timeout;
use std::net::ToSocketAddrs;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Maximum time for Slurm's controller to report the address of a node.
const SCONTROL_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the address of a node whose name only Slurm resolves (`NodeAddr`). Returns the name itself if the system resolves it, or if
/// Slurm does not know the address.
pub(super) fn node_address(name: &str) -> String {
    let is_known = (name, 0).to_socket_addrs().is_ok();
    let ask = |name: String| {
        let mut scontrol = Command::new("scontrol");
        scontrol.args(["--oneliner", "show", "node", &name]).stdin(Stdio::null()).stderr(Stdio::null());
        Some(String::from_utf8_lossy(&scontrol.output().ok()?.stdout).into_owned())
    };
    let reported = || {
        let owned = name.to_owned();
        node_addr(&run_with_timeout(SCONTROL_TIMEOUT, move || ask(owned)).ok()??)
    };
    if is_known { name.to_owned() } else { reported().unwrap_or_else(|| name.to_owned()) }
}

/// Returns `NodeAddr` from the output of `scontrol show node`.
fn node_addr(reported: &str) -> Option<String> {
    let address = reported.split_whitespace().find_map(|word| word.strip_prefix("NodeAddr="))?;
    (!address.is_empty()).then(|| address.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_node_is_among_its_words() {
        let reported = "NodeName=n1 Arch=x86_64 CPUTot=2 NodeAddr=10.0.0.7 NodeHostName=host Version=22.05.8 OS=Linux 6.1";
        assert_eq!(node_addr(reported).as_deref(), Some("10.0.0.7"));
        assert_eq!(node_addr("Node n9 not found"), None);
    }

    #[test]
    fn names_that_the_system_resolves_stay() {
        assert_eq!(node_address("127.0.0.1"), "127.0.0.1");
    }
}
