//! Whether GPUs of the ranks exchange data by NCCL.

use crate::all_gather_json::all_gather_json;
use crate::config::NcclUse;
use crate::device::LocalGpu;
use crate::error::TrainError;
use serde::{Deserialize, Serialize};
use trireme_base::Rank;
use trireme_comm::Group;
use trireme_tensor::{CudaInstallation, Device, DeviceError};

/// The GPU and the NCCL of a rank, which all ranks exchange.
#[derive(Debug, Serialize, Deserialize)]
struct NcclSupport {
    /// Place of the rank's GPU on PCI.
    gpu: [i32; 3],
    /// The version of NCCL, or why it cannot be used.
    nccl: Result<i32, String>,
}

/// Sets NCCL as the device transport of the group if `nccl_use` allows it and all GPUs can use it. `must_encrypt` says that data between
/// hosts must be encrypted. Returns why the GPUs do not use NCCL although they might; `None` if they do, or must not. Collective.
///
/// # Errors
/// If the GPUs must use NCCL but cannot, or if a rank fails.
pub fn connect_gpus(
    group: &Group,
    device: &Device,
    gpu: &LocalGpu,
    nccl_use: NcclUse,
    must_encrypt: bool,
) -> Result<Option<String>, TrainError> {
    if nccl_use == NcclUse::Never {
        return Ok(None);
    }
    let installation = CudaInstallation::from_environment().map_err(DeviceError::from)?;
    let nccl = installation.nccl_version().map_err(ToString::to_string);
    group.set_program_line(format_args!("comparing the GPUs of the ranks"));
    let all = all_gather_json(group, &NcclSupport { gpu: gpu.gpu.pci, nccl })?;
    let hosts = group.hosts();
    let obstacle = if must_encrypt && hosts.num_hosts() > 1 {
        Some("NCCL does not encrypt data between hosts, as tls_certificate demands".to_owned())
    } else {
        obstacle_to_nccl(&all, |rank| hosts.host_of(Rank(rank)))
    };
    match obstacle {
        None => {
            if let Some(transport) = device.transport()? {
                group.set_device_transport(transport);
            }
            Ok(None)
        }
        Some(reason) if nccl_use == NcclUse::Always => Err(TrainError::NoNccl { reason }),
        reason => Ok(reason),
    }
}

/// Returns the notice that GPUs do not use NCCL.
pub fn staging_notice(reason: &str) -> String {
    format!("GPUs exchange data through the memory of their hosts, which is slower than NCCL: {reason}")
}

/// Returns why the ranks cannot use NCCL; `None` if they can.
fn obstacle_to_nccl(all: &[NcclSupport], host_of: impl Fn(usize) -> usize) -> Option<String> {
    for (rank, NcclSupport { gpu, nccl }) in all.iter().enumerate() {
        if let Err(reason) = nccl {
            return Some(format!("rank {rank}: {reason}"));
        }
        if let (Ok(first), Ok(other)) = (&all[0].nccl, nccl)
            && first != other
        {
            let [first, other] = [first, other]
                .map(|version| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100));
            return Some(format!(
                "rank 0 has NCCL {first} and rank {rank} has NCCL {other}; install the same version on all hosts"
            ));
        }
        let shares_gpu = |other: &usize| host_of(*other) == host_of(rank) && all[*other].gpu == *gpu;
        if let Some(other) = (0..rank).find(shares_gpu) {
            return Some(format!("ranks {other} and {rank} share a GPU"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn support(gpu: i32, version: i32) -> NcclSupport {
        NcclSupport { gpu: [0, gpu, 0], nccl: Ok(version) }
    }

    #[test]
    fn gpus_use_nccl_if_all_have_the_same_version_and_none_is_shared() {
        let all = [support(1, 22_703), support(2, 22_703), support(1, 22_703)];
        assert_eq!(obstacle_to_nccl(&all, |rank| rank / 2), None);
        assert_eq!(obstacle_to_nccl(&all, |_| 0).unwrap(), "ranks 0 and 2 share a GPU");
        let all = [support(1, 22_703), support(2, 22_705)];
        assert!(
            obstacle_to_nccl(&all, |_| 0)
                .unwrap()
                .starts_with("rank 0 has NCCL 2.27.3 and rank 1 has NCCL 2.27.5")
        );
        let missing = NcclSupport { gpu: [0, 3, 0], nccl: Err("it is not installed".to_owned()) };
        assert_eq!(
            obstacle_to_nccl(&[support(1, 22_703), missing], |_| 0).unwrap(),
            "rank 1: it is not installed"
        );
    }
}
