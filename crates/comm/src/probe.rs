//! Measures communication costs with a few messages when a world is created.

use crate::{CommError, GivenCosts, Group};
use std::ops::Range;
use std::time::Instant;
use trireme_base::{Rank, ReduceOp};
use trireme_schedule::collective::{CostModel, DirectCost, LinkCost};

/// Round trips of each length after a first one. The fastest one counts, because disturbances only add time.
const NUM_ROUNDS: usize = 4;
const SHORT_BYTES: usize = 64;
/// Lengths of the messages that measure the bandwidth. A slow link skips the longer ones.
const LONGER_BYTES: [usize; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// If the first round trip of a length is slower, the second one is the last, and longer lengths are skipped. The shortest of
/// [`LONGER_BYTES`] is always measured.
const ROUND_SECONDS_MAX: f64 = 2e-3;
/// Bytes of the vector that is reduced in shared memory.
const DIRECT_BYTES: usize = 512 << 10;
/// Lower bound of a measured time, whatever the clock says.
const SECONDS_MIN: f64 = 1e-9;

/// Measures the costs that are not `given`. Costs that cannot be measured are taken from `unmeasured`. All ranks call it and get the same
/// result.
///
/// Takes a few milliseconds: a few round trips between two ranks of one host, and between two hosts.
pub(crate) fn measure(
    group: &Group,
    given: &GivenCosts,
    unmeasured: CostModel,
) -> Result<CostModel, CommError> {
    let within = ranks_on_one_host(group).filter(|_| given.within.is_none());
    let across = ranks_on_two_hosts(group).filter(|_| given.across.is_none());
    let shares_all = unmeasured.direct.is_some() && group.hosts().num_hosts() == 1;
    let has_direct = shares_all && given.direct.is_none();
    if within.is_none() && across.is_none() && !has_direct {
        return Ok(unmeasured);
    }
    let within = within.map(|pair| measure_link(group, pair)).transpose()?.flatten();
    let across = across.map(|pair| measure_link(group, pair)).transpose()?.flatten();
    let direct = has_direct.then(|| measure_direct(group)).transpose()?;
    // The values that this rank measured, 0 for the others.
    let [within, across] = [within, across].map(|cost| cost.map_or([0.0; 2], link_cost_to_array));
    let direct = direct.map_or([0.0; 2], |cost| [cost.synchronization_seconds, cost.seconds_per_byte]);
    let own: Vec<u8> =
        [within, across, direct].as_flattened().iter().flat_map(|value| value.to_le_bytes()).collect();
    let all = group.all_gather_bytes(&own).wait()?;
    // The largest measurement of any rank: ranks wait for the slowest.
    let largest = |range: Range<usize>| {
        let mut values = [0.0_f64; 2];
        for bytes in &all {
            let of_rank = bytes.get(range.clone()).unwrap_or_default().chunks_exact(8);
            for (value, bytes) in values.iter_mut().zip(of_rank) {
                *value = value.max(bytes.try_into().map_or(0.0, f64::from_le_bytes));
            }
        }
        (values[1] > 0.0).then_some(values)
    };
    let to_link =
        |[latency_seconds, seconds_per_byte]: [f64; 2]| LinkCost { latency_seconds, seconds_per_byte };
    let to_direct = |[synchronization_seconds, seconds_per_byte]: [f64; 2]| DirectCost {
        synchronization_seconds,
        seconds_per_byte,
    };
    Ok(CostModel {
        within: largest(0..16).map_or(unmeasured.within, to_link),
        across: largest(16..32).map_or(unmeasured.across, to_link),
        direct: unmeasured.direct.map(|own| largest(32..48).map_or(own, to_direct)),
        ..unmeasured
    })
}

fn link_cost_to_array(cost: LinkCost) -> [f64; 2] {
    [cost.latency_seconds, cost.seconds_per_byte]
}

/// Two ranks of the same host, if there are any.
fn ranks_on_one_host(group: &Group) -> Option<[Rank; 2]> {
    let hosts = group.hosts();
    let ranks = (0..hosts.num_hosts()).map(|host| hosts.ranks(host));
    ranks.into_iter().find_map(|ranks| ranks.first_chunk::<2>().copied())
}

/// Two ranks of different hosts, if there are any.
fn ranks_on_two_hosts(group: &Group) -> Option<[Rank; 2]> {
    let hosts = group.hosts();
    (hosts.num_hosts() > 1).then(|| [hosts.ranks(0)[0], hosts.ranks(1)[0]])
}

/// Measures the link between two ranks. Returns the result on the first of them.
fn measure_link(group: &Group, [sender, echoing]: [Rank; 2]) -> Result<Option<LinkCost>, CommError> {
    if group.rank() == echoing {
        echo(group, sender)?;
        return Ok(None);
    }
    if group.rank() != sender {
        return Ok(None);
    }
    let (short, _) = measure_round_trips(group, echoing, SHORT_BYTES, LONGER_BYTES[0])?;
    let mut cost = LinkCost { latency_seconds: short / 2.0, seconds_per_byte: SECONDS_MIN };
    for (index, &bytes) in LONGER_BYTES.iter().enumerate() {
        let next = LONGER_BYTES.get(index + 1).copied().unwrap_or(0);
        let (seconds, next_bytes) = measure_round_trips(group, echoing, bytes, next)?;
        cost.seconds_per_byte = (seconds - short).max(SECONDS_MIN) / (2 * (bytes - SHORT_BYTES)) as f64;
        if next_bytes == 0 {
            break;
        }
    }
    Ok(Some(cost))
}

/// Measures round trips of messages of `bytes` bytes with `echoing`. Returns the seconds of the fastest one, and the length of the messages
/// that follow: `next`, or 0 to stop if these messages were slow and longer than [`SHORT_BYTES`]. Each message contains the length of the
/// next message.
fn measure_round_trips(
    group: &Group,
    echoing: Rank,
    bytes: usize,
    next: usize,
) -> Result<(f64, usize), CommError> {
    let mut buffer = group.buffer::<u8>(bytes)?;
    let mut quickest = f64::INFINITY;
    let mut round = 0;
    loop {
        let is_slow = round > 0 && quickest > ROUND_SECONDS_MAX;
        let next_bytes = match (is_slow, round < NUM_ROUNDS) {
            (false, true) => bytes,
            (true, _) if bytes > SHORT_BYTES => 0,
            _ => next,
        };
        buffer[..8].copy_from_slice(&(next_bytes as u64).to_le_bytes());
        let start = Instant::now();
        buffer = group.send(buffer, echoing).wait()?;
        buffer = group.receive(buffer, echoing).wait()?;
        quickest = quickest.min(start.elapsed().as_secs_f64());
        if next_bytes != bytes {
            return Ok((quickest, next_bytes));
        }
        round += 1;
    }
}

/// Sends received messages back until one says that no more follow.
fn echo(group: &Group, sender: Rank) -> Result<(), CommError> {
    let mut buffer = group.buffer::<u8>(SHORT_BYTES)?;
    for _ in 0..(NUM_ROUNDS + 1) * (LONGER_BYTES.len() + 1) {
        buffer = group.receive(buffer, sender).wait()?;
        let next_bytes =
            u64::from_le_bytes(*buffer.first_chunk().expect("every message has a word")) as usize;
        buffer = group.send(buffer, sender).wait()?;
        if next_bytes != SHORT_BYTES && !LONGER_BYTES.contains(&next_bytes) {
            break;
        }
        if next_bytes != buffer.len() {
            buffer = group.buffer(next_bytes)?;
        }
    }
    Ok(())
}

/// Measures direct access to memory that all ranks share.
fn measure_direct(group: &Group) -> Result<DirectCost, CommError> {
    let mut quickest = f64::INFINITY;
    for _ in 0..=NUM_ROUNDS {
        let start = Instant::now();
        group.barrier().wait()?;
        quickest = quickest.min(start.elapsed().as_secs_f64());
    }
    let synchronization_seconds = quickest;
    let mut buffer = group.buffer::<f32>(DIRECT_BYTES / size_of::<f32>())?;
    let mut quickest = f64::INFINITY;
    for _ in 0..=NUM_ROUNDS {
        let start = Instant::now();
        buffer = group.all_reduce(buffer, ReduceOp::Max).wait()?;
        quickest = quickest.min(start.elapsed().as_secs_f64());
    }
    let world_size = group.world_size() as f64;
    let bytes = 2.0 * DIRECT_BYTES as f64 * (world_size - 1.0) / world_size;
    let seconds_per_byte = (quickest - 2.0 * synchronization_seconds).max(SECONDS_MIN) / bytes;
    Ok(DirectCost { synchronization_seconds, seconds_per_byte })
}
