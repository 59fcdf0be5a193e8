use super::flat::{Own, distances};
use super::{Incoming, Outgoing, Span, Step, assert_member};
use std::ops::Range;
use trireme_base::Rank;

/// The partners of a rank, one after the other, so that each two ranks meet once and in the same round: a tournament
/// by the circle method. In round `k` those two ranks meet whose sum is `k` modulo the number of rounds, which is odd;
/// the rank that would meet itself meets the last one, if ranks are even in number, else nobody.
fn partners(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    let num_rounds = world_size - 1 + world_size % 2;
    let has_last = num_rounds < world_size;
    (0..num_rounds).filter_map(move |round| {
        if rank == num_rounds {
            // Half of the round: the rank that would meet itself.
            return Some(round * num_rounds.div_ceil(2) % num_rounds);
        }
        let partner = (round + num_rounds - rank) % num_rounds;
        if partner != rank { Some(partner) } else { has_last.then_some(num_rounds) }
    })
}

/// All-to-all in place by pairwise exchange: each two ranks swap the blocks they have for each other.
pub(super) fn pairwise(own: &Own, steps: &mut Vec<Step>) {
    let swap = |partner| {
        let block = own.blocks.of(partner);
        Step::both(Outgoing::new(partner, block.clone()), Incoming::copy(partner, block))
    };
    steps.extend(partners(own.rank, own.world_size()).map(swap));
}

/// All-to-all with blocks of any lengths by pairwise exchange, from [`Memory::Input`](super::Memory::Input) to
/// [`Memory::Vector`](super::Memory::Vector): `send_lens[r]` elements go to rank `r`, `receive_lens[r]` come from it. In
/// both memories the blocks lie one after the other, by rank.
///
/// Appends the steps of `rank` to `steps`: a copy and `N - 1` exchanges; the bytes are those of the blocks.
///
/// # Panics
/// If `rank` has no length, the two do not have one for each rank, or the rank's own two differ.
pub fn all_to_all_variable(rank: Rank, send_lens: &[usize], receive_lens: &[usize], steps: &mut Vec<Step>) {
    let world_size = send_lens.len();
    assert_member(rank, world_size);
    assert_eq!(receive_lens.len(), world_size, "one length to receive for each rank");
    assert_eq!(send_lens[rank.0], receive_lens[rank.0], "what a rank keeps has one length");
    let place = |lens: &[usize], of: usize| -> Range<usize> {
        let start = lens[..of].iter().sum();
        start..start + lens[of]
    };
    steps.push(Step::Copy {
        from: Span::input(place(send_lens, rank.0)),
        to: place(receive_lens, rank.0).into(),
    });
    for partner in partners(rank.0, world_size) {
        steps.push(Step::both(
            Outgoing::new(partner, Span::input(place(send_lens, partner))),
            Incoming::copy(partner, place(receive_lens, partner)),
        ));
    }
}

/// All-to-all in place in `ceil(log2 N)` messages (Bruck et al.: "Efficient algorithms for all-to-all communications in
/// multiport message-passing systems", 1997): a block that has to go `k` ranks further travels by the powers of two
/// that make up `k`, together with all others that take the same hop.
pub(super) fn bruck(own: &Own, steps: &mut Vec<Step>) {
    let world_size = own.world_size();
    if world_size == 1 {
        return;
    }
    let block_len = own.blocks.len / world_size;
    let elements = |blocks: Range<usize>| blocks.start * block_len..blocks.end * block_len;
    // In scratch: by distance to go, then what leaves in a round, then what arrives.
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
