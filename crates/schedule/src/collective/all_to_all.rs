use super::blocks::Blocks;
use super::{Incoming, Outgoing, Span, Step, assert_member};
use std::ops::Range;
use trireme_base::Rank;

/// The partners of a rank, one after the other, so that each two ranks meet once and in the same round: a tournament
/// by the circle method. In round `k` those two ranks meet whose sum is `k` modulo the number of rounds, which is odd;
/// the rank that would meet itself meets the last one, if ranks are even in number, else nobody.
fn partners(rank: Rank, world_size: usize) -> impl Iterator<Item = usize> {
    let num_rounds = world_size - 1 + world_size % 2;
    let has_last = num_rounds < world_size;
    (0..num_rounds).filter_map(move |round| {
        if rank.0 == num_rounds {
            // Half of the round: the rank that would meet itself.
            return Some(round * num_rounds.div_ceil(2) % num_rounds);
        }
        let partner = (round + num_rounds - rank.0) % num_rounds;
        if partner != rank.0 { Some(partner) } else { has_last.then_some(num_rounds) }
    })
}

/// All-to-all in place by pairwise exchange: each two ranks swap the blocks they have for each other.
pub(super) fn pairwise(rank: Rank, world_size: usize, blocks: &Blocks, steps: &mut Vec<Step>) {
    for partner in partners(rank, world_size) {
        let span = Span::vector(blocks.of(partner));
        steps.push(Step::both(Outgoing::new(partner, span.clone()), Incoming::copy(partner, span)));
    }
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
        to: Span::vector(place(receive_lens, rank.0)),
    });
    for partner in partners(rank, world_size) {
        steps.push(Step::both(
            Outgoing::new(partner, Span::input(place(send_lens, partner))),
            Incoming::copy(partner, Span::vector(place(receive_lens, partner))),
        ));
    }
}

/// All-to-all in place in `ceil(log2 N)` messages (Bruck et al.: "Efficient algorithms for all-to-all communications in
/// multiport message-passing systems", 1997): a block that has to go `k` ranks further travels by the powers of two
/// that make up `k`, together with all others that take the same hop.
pub(super) fn bruck(rank: Rank, world_size: usize, len: usize, steps: &mut Vec<Step>) {
    if world_size == 1 {
        return;
    }
    let block_len = len / world_size;
    let elements = |blocks: Range<usize>| blocks.start * block_len..blocks.end * block_len;
    // In scratch: by distance to go, then what leaves in a round, then what arrives.
    let outgoing_start = world_size;
    let incoming_start = world_size + world_size / 2;
    for distance in 0..world_size {
        let to = (rank.0 + distance) % world_size;
        steps.push(Step::Copy {
            from: Span::vector(elements(to..to + 1)),
            to: Span::scratch(elements(distance..distance + 1)),
        });
    }
    let mut hop = 1;
    while hop < world_size {
        let runs = || {
            let starts = (hop..world_size).step_by(2 * hop);
            starts.scan(0, move |packed, start| {
                let count = hop.min(world_size - start);
                *packed += count;
                Some((start..start + count, *packed - count..*packed))
            })
        };
        let at = |start: usize, range: Range<usize>| {
            Span::scratch(elements(start + range.start..start + range.end))
        };
        let mut num_packed = 0;
        for (run, packed) in runs() {
            num_packed = packed.end;
            steps.push(Step::Copy { from: at(0, run), to: at(outgoing_start, packed) });
        }
        steps.push(Step::both(
            Outgoing::new((rank.0 + hop) % world_size, at(outgoing_start, 0..num_packed)),
            Incoming::copy((rank.0 + world_size - hop) % world_size, at(incoming_start, 0..num_packed)),
        ));
        for (run, packed) in runs() {
            steps.push(Step::Copy { from: at(incoming_start, packed), to: at(0, run) });
        }
        hop *= 2;
    }
    for distance in 0..world_size {
        let from = (rank.0 + world_size - distance) % world_size;
        steps.push(Step::Copy {
            from: Span::scratch(elements(distance..distance + 1)),
            to: Span::vector(elements(from..from + 1)),
        });
    }
}
