//! Small messages from all ranks of a group to all others.

use crate::error::TrainError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use trireme_base::Rank;
use trireme_comm::Group;

/// Gathers a value from each rank on all ranks, as JSON of at most [`CONTROL_BYTES_MAX`](trireme_comm::CONTROL_BYTES_MAX) bytes. Returns
/// the values in rank order. Collective.
///
/// # Errors
/// Failed communication, or [`TrainError::UnreadableMessage`] if the message of a rank is not a `T`.
///
/// # Panics
/// If JSON cannot represent `own`; a map whose keys are not strings, for example.
pub fn all_gather_json<T: Serialize + DeserializeOwned>(
    group: &Group,
    own: &T,
) -> Result<Vec<T>, TrainError> {
    let own = serde_json::to_vec(own).expect("a message is JSON");
    let gathered = group.all_gather_bytes(&own).wait()?;
    let read = |(rank, gathered): (usize, &Vec<u8>)| {
        serde_json::from_slice(gathered)
            .map_err(|source| TrainError::UnreadableMessage { rank: Rank(rank), source })
    };
    gathered.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_testkit::run_ranks;

    #[test]
    fn values_are_gathered_and_other_types_are_refused() {
        let gathered = run_ranks(3, |group| all_gather_json(&group, &(group.rank().0, Some(0.5))).unwrap());
        assert_eq!(gathered, vec![[0, 1, 2].map(|rank| (rank, Some(0.5))); 3]);
        let refused = run_ranks(2, |group| match group.rank() {
            Rank::ROOT => all_gather_json(&group, &[7, 8]).unwrap_err().to_string(),
            _ => all_gather_json(&group, &[[7; 2]; 2]).unwrap_err().to_string(),
        });
        assert!(refused[0].starts_with("rank 1 sent a message"), "{refused:?}");
        assert!(refused[1].starts_with("rank 0 sent a message"), "{refused:?}");
    }
}
