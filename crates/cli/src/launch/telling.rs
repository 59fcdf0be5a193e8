//! What the ranks of a world tell each other beside a run.

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use trireme_comm::Group;

/// Tells all ranks what this one has found; what each has told, in rank order. Collective.
pub(crate) fn tell_all<T: Serialize + DeserializeOwned>(group: &Group, own: &T) -> Result<Vec<T>> {
    let told = group.all_gather_bytes(&serde_json::to_vec(own)?).wait()?;
    let read = |(rank, told): (usize, &Vec<u8>)| {
        serde_json::from_slice(told).with_context(|| {
            format!(
                "rank {rank} sent a message that this program cannot read; run the same version everywhere"
            )
        })
    };
    told.iter().enumerate().map(read).collect()
}
