use super::hosts::{Hosts, assert_member};
use super::rank_context::{RankContext, distances};
use super::{Incoming, Outgoing, Span, Step};
use std::ops::Range;
use trireme_base::Rank;

/// Returns the partners of a rank in order, so that any two ranks are partners once and in the same round: a round-robin tournament by the
/// circle method. In round `k`, two ranks are partners if their sum is `k` modulo the number of rounds, which is odd. The rank that would
/// be its own partner gets the last rank if the number of ranks is even, and no partner otherwise.
fn partners(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    let num_rounds = world_size - 1 + world_size % 2;
    let has_last = num_rounds < world_size;
    (0..num_rounds).filter_map(move |round| {
        if rank == num_rounds {
            // The rank `r` that would be its own partner: `2 r` is `round` modulo the number of rounds.
            return Some(round * num_rounds.div_ceil(2) % num_rounds);
        }
        let partner = (round + num_rounds - rank) % num_rounds;
        if partner != rank { Some(partner) } else { has_last.then_some(num_rounds) }
    })
}

/// Appends the steps of an in-place all-to-all by pairwise exchange: any two ranks swap the blocks that they have for each other.
pub(super) fn pairwise(own: &RankContext, steps: &mut Vec<Step>) {
    let swap = |partner| {
        let block = own.blocks.of(partner);
        Step::both(Outgoing::new(partner, block.clone()), Incoming::copy(partner, block))
    };
    steps.extend(partners(own.rank, own.world_size()).map(swap));
}

/// Appends the steps of `rank` in an all-to-all of blocks of any lengths by pairwise exchange, from [`Memory::Input`](super::Memory::Input)
/// to [`Memory::Vector`](super::Memory::Vector). Both memories hold their blocks in rank order: `send_lens[r]` elements for rank `r`, and
/// `receive_lens[r]` elements from rank `r`.
///
/// Costs one copy and `N - 1` exchanges for `N` ranks. Each block is sent once.
///
/// # Panics
/// If `rank` is not below `send_lens.len()`, the two lists differ in length, or their lengths for `rank` itself differ.
pub fn all_to_all_variable(rank: Rank, send_lens: &[usize], receive_lens: &[usize], steps: &mut Vec<Step>) {
    let world_size = send_lens.len();
    assert_member(rank, world_size);
    assert_eq!(receive_lens.len(), world_size, "one length to receive for each rank");
    assert_eq!(send_lens[rank.0], receive_lens[rank.0], "what a rank keeps has one length");
    steps.push(Step::Copy {
        from: Span::input(block_range(send_lens, rank.0)),
        to: block_range(receive_lens, rank.0).into(),
    });
    for partner in partners(rank.0, world_size) {
        steps.push(Step::both(
            Outgoing::new(partner, Span::input(block_range(send_lens, partner))),
            Incoming::copy(partner, block_range(receive_lens, partner)),
        ));
    }
}

/// Appends the steps of `rank` in a two-level all-to-all of blocks of any lengths, from [`Memory::Input`](super::Memory::Input) to
/// [`Memory::Vector`](super::Memory::Vector). `lens[i * N + j]` elements go from rank `i` to rank `j` of `N`. Both memories hold their
/// blocks one after the other, in rank order (Rajbhandari et al.: "DeepSpeed-MoE: advancing mixture-of-experts inference and training to
/// power next-generation AI scale", 2022; Hwang et al.: "Tutel: adaptive mixture-of-experts at scale", 2023).
///
/// First, each rank passes every block to the rank of its own host that has the same local rank as the block's receiver. The blocks for one
/// host are then contiguous. Then ranks with the same local rank exchange the blocks for their hosts, with one message for each host.
///
/// On `H` hosts of `L` ranks, a rank has `H` copies, `H (L - 1)` exchanges within the host and `H - 1` across hosts. The pairwise algorithm
/// has `(H - 1) L` exchanges across hosts. With both algorithms, a block for another host crosses hosts once. Here, a block whose receiver
/// has a different local rank than its sender also travels within the sender's host: `1 - 1 / L` of all bytes if blocks are equally long.
/// If the ranks of a host are not consecutive, blocks received from other hosts are copied once more, by `N - L` copies.
///
/// On one host, on hosts of one rank, or on hosts of different numbers of ranks, the steps are the same as with [`all_to_all_variable`].
///
/// # Panics
/// If `rank` is outside the world of `hosts`, or `lens` does not have `N * N` elements.
pub fn all_to_all_variable_by_hosts(rank: Rank, hosts: &Hosts, lens: &[usize], steps: &mut Vec<Step>) {
    let world_size = hosts.world_size();
    assert_member(rank, world_size);
    assert_eq!(lens.len(), world_size * world_size, "one length for each rank to each rank");
    let send_lens = &lens[rank.0 * world_size..][..world_size];
    let receive_lens = Vec::from_iter(lens.iter().skip(rank.0).step_by(world_size).copied());
    if hosts.num_hosts() == 1 || hosts.ranks_per_host().is_none_or(|ranks_per_host| ranks_per_host == 1) {
        return all_to_all_variable(rank, send_lens, &receive_lens, steps);
    }
    let (own_host, local_rank) = (hosts.host_of(rank), hosts.local_rank(rank));
    let (neighbors, ranks_per_host) = (hosts.ranks(own_host), hosts.ranks(own_host).len());
    let with_local_rank = |local_rank: usize, host: usize| hosts.ranks(host)[local_rank].0;
    let of_host = |host: usize| host * ranks_per_host..(host + 1) * ranks_per_host;
    // Scratch holds the blocks that this host's ranks send to the ranks with this local rank, ordered by the host of the receiver. The
    // received blocks follow.
    let relay_len = |host: usize, from: &Rank| {
        if host == own_host { 0 } else { lens[from.0 * world_size + with_local_rank(local_rank, host)] }
    };
    let by_host = |host| neighbors.iter().map(move |from| relay_len(host, from));
    let relay_lens = Vec::from_iter((0..hosts.num_hosts()).flat_map(by_host));
    let arrival_start: usize = relay_lens.iter().sum();
    let relayed = |from: usize, host: usize| {
        if host == own_host {
            block_range(&receive_lens, neighbors[from].0).into()
        } else {
            Span::scratch(block_range(&relay_lens, of_host(host).start + from))
        }
    };
    // Within the host, blocks go from the input to the place from which they are sent on, so no packing is needed.
    steps.extend((0..hosts.num_hosts()).map(|host| Step::Copy {
        from: Span::input(block_range(send_lens, with_local_rank(local_rank, host))),
        to: relayed(local_rank, host),
    }));
    for partner in partners(local_rank, ranks_per_host) {
        let peer = neighbors[partner].0;
        steps.extend((0..hosts.num_hosts()).map(|host| {
            let block = block_range(send_lens, with_local_rank(partner, host));
            Step::both(Outgoing::new(peer, Span::input(block)), Incoming::copy(peer, relayed(partner, host)))
        }));
    }
    // Exchanges the blocks, which are contiguous by host, with the ranks of other hosts.
    for partner in partners(own_host, hosts.num_hosts()) {
        let peer = with_local_rank(local_rank, partner);
        let outgoing = Outgoing::new(peer, Span::scratch(blocks_range(&relay_lens, of_host(partner))));
        if hosts.are_consecutive() {
            let arrival = blocks_range(&receive_lens, of_host(partner));
            steps.push(Step::both(outgoing, Incoming::copy(peer, arrival)));
            continue;
        }
        let arrival_lens = Vec::from_iter(hosts.ranks(partner).iter().map(|from| receive_lens[from.0]));
        let arrival = |blocks| {
            let Range { start, end } = blocks_range(&arrival_lens, blocks);
            Span::scratch(arrival_start + start..arrival_start + end)
        };
        steps.push(Step::both(outgoing, Incoming::copy(peer, arrival(0..ranks_per_host))));
        steps.extend(hosts.ranks(partner).iter().enumerate().map(|(index, from)| Step::Copy {
            from: arrival(index..index + 1),
            to: block_range(&receive_lens, from.0).into(),
        }));
    }
}

/// Returns the range of block `of` if blocks of these lengths are stored one after the other.
fn block_range(lens: &[usize], of: usize) -> Range<usize> {
    blocks_range(lens, of..of + 1)
}

/// Returns the range of several consecutive blocks.
fn blocks_range(lens: &[usize], of: Range<usize>) -> Range<usize> {
    let start = lens[..of.start].iter().sum();
    start..start + lens[of].iter().sum::<usize>()
}

/// Appends the steps of an in-place all-to-all in `ceil(log2 N)` messages (Bruck et al.: "Efficient algorithms for all-to-all
/// communications in multiport message-passing systems", 1997). A block is forwarded over hops whose lengths are the powers of two that add
/// up to the distance between its sender and its receiver. Each message holds all blocks with the same hop.
pub(super) fn bruck(own: &RankContext, steps: &mut Vec<Step>) {
    let world_size = own.world_size();
    if world_size == 1 {
        return;
    }
    let block_len = own.blocks.len / world_size;
    let elements = |blocks: Range<usize>| blocks.start * block_len..blocks.end * block_len;
    // Scratch holds the blocks in the order of the distances to their receivers, then the blocks sent in a round, then the blocks received
    // in it.
    let (outgoing_start, incoming_start) = (world_size, world_size + world_size / 2);
    let at =
        |start: usize, range: Range<usize>| Span::scratch(elements(start + range.start..start + range.end));
    let waiting = |distance: usize| at(0, distance..distance + 1);
    let block = |rank: usize| elements(rank..rank + 1).into();
    let taken = |distance| Step::Copy { from: block(own.after(distance)), to: waiting(distance) };
    steps.extend((0..world_size).map(taken));
    for hop in distances(world_size) {
        let runs = || {
            let starts = (hop..world_size).step_by(2 * hop);
            starts.scan(0, move |packed, start| {
                let count = hop.min(world_size - start);
                *packed += count;
                Some((start..start + count, *packed - count..*packed))
            })
        };
        let num_packed = runs().last().map_or(0, |(_, packed)| packed.end);
        let pack = |(run, packed)| Step::Copy { from: at(0, run), to: at(outgoing_start, packed) };
        steps.extend(runs().map(pack));
        steps.push(Step::both(
            Outgoing::new(own.after(hop), at(outgoing_start, 0..num_packed)),
            Incoming::copy(own.before(hop), at(incoming_start, 0..num_packed)),
        ));
        let unpack = |(run, packed)| Step::Copy { from: at(incoming_start, packed), to: at(0, run) };
        steps.extend(runs().map(unpack));
    }
    let given = |distance| Step::Copy { from: waiting(distance), to: block(own.before(distance)) };
    steps.extend((0..world_size).map(given));
}
