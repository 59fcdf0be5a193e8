//! Whether GPUs of the ranks exchange data by NCCL.

use crate::config::{Config, NcclUse};
use crate::device::LocalGpu;
use crate::error::TrainError;
use crate::observer::Observer;
use serde::{Deserialize, Serialize};
use trireme_base::Rank;
use trireme_comm::Group;
use trireme_tensor::{CudaInstallation, Device, DeviceError};

/// The GPU and the NCCL of a rank, as it tells the others.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    /// Identifier of the rank's GPU.
    gpu: [u8; 16],
    /// The version of NCCL, or why it cannot be used.
    nccl: Result<(i32, i32), String>,
}

/// Attaches the GPUs to the group if the config wants that and they can exchange data. Notifies the user if they cannot. Collective.
pub(crate) fn attach_gpus(
    config: &Config,
    group: &Group,
    device: &Device,
    gpu: &LocalGpu,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    if config.comm().nccl == NcclUse::Never {
        return Ok(());
    }
    let installation = CudaInstallation::from_environment().map_err(DeviceError::from)?;
    let nccl = installation.nccl_library().map(|found| found.version).map_err(ToString::to_string);
    let own = Offer { gpu: gpu.gpu.uuid, nccl };
    let own = serde_json::to_vec(&own).expect("numbers and texts are JSON");
    group.set_program_line(format_args!("comparing the GPUs of the ranks"));
    let offers = group.all_gather_bytes(&own).wait()?;
    let offers: Vec<Option<Offer>> = offers.iter().map(|offer| serde_json::from_slice(offer).ok()).collect();
    let host_of = |rank: usize| group.hosts().host_of(Rank(rank));
    match reason_against(&offers, host_of) {
        None => {
            if let Some(transport) = device.transport()? {
                group.attach_devices(transport);
            }
            Ok(())
        }
        Some(reason) if config.comm().nccl == NcclUse::Always => Err(TrainError::NoNccl { reason }),
        Some(reason) => {
            if group.rank() == Rank::ROOT {
                observer.notice(&format!(
                    "GPUs exchange data through the memory of their hosts, which is slower than NCCL: {reason}"
                ));
            }
            Ok(())
        }
    }
}

/// Returns why the ranks cannot use NCCL; `None` if they can.
fn reason_against(offers: &[Option<Offer>], host_of: impl Fn(usize) -> usize) -> Option<String> {
    let mut first_version = None;
    for (rank, offer) in offers.iter().enumerate() {
        let Some(offer) = offer else {
            return Some(format!("rank {rank} runs another version of this program"));
        };
        let version = match &offer.nccl {
            Ok(version) => *version,
            Err(reason) => return Some(format!("rank {rank}: {reason}")),
        };
        let first = *first_version.get_or_insert(version);
        if first != version {
            let [first, other] = [first, version].map(|(major, minor)| format!("{major}.{minor}"));
            return Some(format!(
                "rank 0 has version {first} and rank {rank} version {other}; install the same on all hosts"
            ));
        }
        let uses_gpu = |other: &usize| {
            host_of(*other) == host_of(rank)
                && offers[*other].as_ref().is_some_and(|other| other.gpu == offer.gpu)
        };
        if let Some(other) = (0..rank).find(uses_gpu) {
            return Some(format!("ranks {other} and {rank} share a GPU"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(gpu: u8, version: (i32, i32)) -> Option<Offer> {
        Some(Offer { gpu: [gpu; 16], nccl: Ok(version) })
    }

    #[test]
    fn gpus_use_nccl_if_all_have_the_same_version_and_none_is_shared() {
        let found = [offer(1, (2, 27)), offer(2, (2, 27)), offer(1, (2, 27))];
        assert_eq!(reason_against(&found, |rank| rank / 2), None);
        assert_eq!(reason_against(&found, |_| 0).unwrap(), "ranks 0 and 2 share a GPU");
        let found = [offer(1, (2, 27)), offer(2, (2, 21))];
        assert!(
            reason_against(&found, |_| 0)
                .unwrap()
                .starts_with("rank 0 has version 2.27 and rank 1 version 2.21")
        );
        let missing = Some(Offer { gpu: [3; 16], nccl: Err("it is not installed".to_owned()) });
        assert_eq!(
            reason_against(&[offer(1, (2, 27)), missing], |_| 0).unwrap(),
            "rank 1: it is not installed"
        );
        assert!(reason_against(&[offer(1, (2, 27)), None], |_| 0).is_some());
    }
}
