use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn parts(step: &Step) -> (Option<&Outgoing>, Option<&Incoming>) {
    match step {
        Step::Exchange { send, receive } => (send.as_ref(), receive.as_ref()),
        Step::Copy { .. } => (None, None),
    }
}

/// Runs the steps of all ranks with messages that queue without bound, and returns the number of
/// elements each rank sent. Panics if a rank waits for a message that is never sent, or if one is left
/// over.
fn interpret(
    programs: &[Vec<Step>],
    buffers: &mut [Vec<f64>],
    combine: impl Fn(f64, f64) -> f64,
) -> Vec<usize> {
    let world_size = programs.len();
    let mut wires = vec![VecDeque::<Vec<f64>>::new(); world_size * world_size];
    let mut next = vec![0; world_size];
    let mut sent_already = vec![false; world_size];
    let mut num_sent = vec![0; world_size];
    loop {
        let mut moved = false;
        for rank in 0..world_size {
            let Some(step) = programs[rank].get(next[rank]) else { continue };
            let (send, receive) = parts(step);
            if let (Some(send), false) = (send, sent_already[rank]) {
                let range = send.span.range.clone();
                num_sent[rank] += range.len();
                wires[rank * world_size + send.to.0].push_back(buffers[rank][range].to_vec());
                sent_already[rank] = true;
                moved = true;
            }
            if let Some(receive) = receive {
                let Some(message) = wires[receive.from.0 * world_size + rank].pop_front() else { continue };
                let target = &mut buffers[rank][receive.span.range.clone()];
                assert_eq!(message.len(), target.len(), "rank {rank}, step {}", next[rank]);
                for (own, other) in target.iter_mut().zip(message) {
                    *own = match receive.action {
                        Action::Copy => other,
                        Action::Reduce { own: Side::Right } => combine(other, *own),
                        Action::Reduce { own: Side::Left } => combine(*own, other),
                    };
                }
            }
            next[rank] += 1;
            sent_already[rank] = false;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    for rank in 0..world_size {
        assert_eq!(next[rank], programs[rank].len(), "rank {rank} waits for a message that is never sent");
    }
    assert!(wires.iter().all(VecDeque::is_empty), "a message was sent that nobody receives");
    num_sent
}

/// Steps proceed even if a message can only be handed over while its receiver waits for it: a rank
/// goes on when its partners stand at the matching steps.
fn assert_needs_no_queue(programs: &[Vec<Step>]) {
    let mut next = vec![0; programs.len()];
    let mut done = vec![(false, false); programs.len()];
    loop {
        let mut moved = false;
        for rank in 0..programs.len() {
            let Some(step) = programs[rank].get(next[rank]) else { continue };
            if let (Some(send), false) = (parts(step).0, done[rank].0) {
                let to = send.to.0;
                let waiting = programs[to].get(next[to]).and_then(|step| parts(step).1);
                if waiting.is_some_and(|receive| receive.from.0 == rank) && !done[to].1 {
                    done[rank].0 = true;
                    done[to].1 = true;
                    moved = true;
                }
            }
        }
        for rank in 0..programs.len() {
            let Some(step) = programs[rank].get(next[rank]) else { continue };
            let (send, receive) = parts(step);
            if done[rank].0 == send.is_some() && done[rank].1 == receive.is_some() {
                next[rank] += 1;
                done[rank] = (false, false);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (rank, program) in programs.iter().enumerate() {
        assert_eq!(next[rank], program.len(), "rank {rank} is stuck without queues");
    }
}

fn programs(world_size: usize, make: impl Fn(Rank, &mut Vec<Step>)) -> Vec<Vec<Step>> {
    (0..world_size)
        .map(|rank| {
            let mut steps = Vec::new();
            make(Rank(rank), &mut steps);
            steps
        })
        .collect()
}

fn vectors(world_size: usize, len: usize) -> Vec<Vec<f64>> {
    // Not exactly summable, so that another order gives other bits.
    let value = |rank: usize, index: usize| 1.0 / (3.0 + (rank * 7919 + index * 104_729) as f64 % 1009.0);
    (0..world_size).map(|rank| (0..len).map(|index| value(rank, index)).collect()).collect()
}

fn canonical(buffers: &[Vec<f64>], combine: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let merge =
        |left: Vec<f64>, right: &[f64]| left.iter().zip(right).map(|(&a, &b)| combine(a, b)).collect();
    let mut stack: Vec<Vec<f64>> = Vec::new();
    for term in canonical_terms(buffers.len()) {
        match term {
            Term::Load(rank) => stack.push(buffers[rank.0].clone()),
            Term::Reduce(rank) => {
                let top = stack.pop().expect("something to reduce");
                stack.push(merge(top, &buffers[rank.0]));
            }
            Term::Combine => {
                let right = stack.pop().expect("a right operand");
                let left = stack.pop().expect("a left operand");
                stack.push(merge(left, &right));
            }
        }
        assert!(stack.len() <= num_partials(buffers.len()));
    }
    assert_eq!(stack.len(), 1);
    stack.remove(0)
}

/// The canonical order spelled by hand, as text.
fn spelled(world_size: usize) -> String {
    let mut stack: Vec<String> = Vec::new();
    for term in canonical_terms(world_size) {
        match term {
            Term::Load(rank) => stack.push(rank.to_string()),
            Term::Reduce(rank) => {
                let left = stack.pop().expect("something to reduce");
                stack.push(format!("({left}+{rank})"));
            }
            Term::Combine => {
                let right = stack.pop().expect("a right operand");
                let left = stack.pop().expect("a left operand");
                stack.push(format!("({left}+{right})"));
            }
        }
    }
    stack.concat()
}

#[test]
fn the_canonical_order_pairs_neighbours() {
    assert_eq!(spelled(1), "0");
    assert_eq!(spelled(2), "(0+1)");
    assert_eq!(spelled(3), "((0+1)+2)");
    assert_eq!(spelled(4), "((0+1)+(2+3))");
    assert_eq!(spelled(5), "(((0+1)+2)+(3+4))");
    assert_eq!(spelled(6), "(((0+1)+(2+3))+(4+5))");
    assert_eq!(spelled(8), "(((0+1)+(2+3))+((4+5)+(6+7)))");
}

#[test]
fn halving_doubling_sends_what_its_formula_says() {
    for world_size in 1..=17_usize {
        let num_leaves = 1 << world_size.ilog2();
        let extra = world_size - num_leaves;
        let len = 5 * num_leaves;
        let programs =
            programs(world_size, |rank, steps| all_reduce_halving_doubling(rank, world_size, len, steps));
        let sent = interpret(&programs, &mut vectors(world_size, len), |a, b| a + b);
        for (rank, &sent) in sent.iter().enumerate() {
            let among_leaves = 2 * len * (num_leaves - 1) / num_leaves;
            let expected = match (rank < 2 * extra, rank % 2) {
                (false, _) => among_leaves,
                (true, 0) => among_leaves + len,
                (true, _) => len,
            };
            assert_eq!(sent, expected, "rank {rank} of {world_size}");
        }
        let longest = programs.iter().map(Vec::len).max().unwrap_or(0);
        assert_eq!(longest, 2 * num_leaves.ilog2() as usize + if extra > 0 { 2 } else { 0 });
    }
}

#[test]
fn the_smaller_patterns_send_what_their_formulas_say() {
    for world_size in 1..=17_usize {
        let len = 3;
        let rounds = world_size.next_power_of_two().ilog2() as usize;
        let gathered: Vec<_> = (0..world_size).map(|rank| rank * len..(rank + 1) * len).collect();

        let gather = programs(world_size, |rank, steps| all_gather_pairwise(rank, &gathered, steps));
        let sent = interpret(&gather, &mut vectors(world_size, len * world_size), |a, b| a + b);
        assert!(sent.iter().all(|&sent| sent == len * (world_size - 1)));

        let broadcast =
            programs(world_size, |rank, steps| broadcast_binomial(rank, world_size, Rank(0), len, steps));
        let sent = interpret(&broadcast, &mut vectors(world_size, len), |a, b| a + b);
        assert_eq!(sent.iter().sum::<usize>(), len * (world_size - 1));
        assert_eq!(sent[0], len * rounds);

        let barrier = programs(world_size, |rank, steps| barrier_dissemination(rank, world_size, steps));
        interpret(&barrier, &mut vectors(world_size, 0), |a, b| a + b);
        assert!(barrier.iter().all(|steps| steps.len() == rounds));
    }
}

/// Who has heard from whom when the barrier ends: everyone from everyone.
#[test]
fn the_barrier_hears_from_every_rank() {
    for world_size in 1..=17 {
        let programs = programs(world_size, |rank, steps| barrier_dissemination(rank, world_size, steps));
        let mut heard: Vec<Vec<bool>> =
            (0..world_size).map(|rank| (0..world_size).map(|other| other == rank).collect()).collect();
        let num_rounds = programs[0].len();
        for round in 0..num_rounds {
            let before = heard.clone();
            for (rank, steps) in programs.iter().enumerate() {
                let receive = parts(&steps[round]).1.expect("every round receives");
                for other in 0..world_size {
                    heard[rank][other] |= before[receive.from.0][other];
                }
            }
        }
        assert!(heard.iter().flatten().all(|&heard| heard), "{world_size}");
    }
}

proptest! {
    #[test]
    fn every_all_reduce_gives_the_canonical_bits(world_size in 1..20_usize, len in 0..70_usize) {
        let expected = canonical(&vectors(world_size, len), |a, b| a + b);
        for algorithm in [all_reduce_halving_doubling, all_reduce_recursive_doubling] {
            let programs = programs(world_size, |rank, steps| algorithm(rank, world_size, len, steps));
            assert_needs_no_queue(&programs);
            let mut buffers = vectors(world_size, len);
            interpret(&programs, &mut buffers, |a, b| a + b);
            for buffer in &buffers {
                prop_assert!(buffer.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }

    #[test]
    fn the_left_operand_is_the_lower_rank(world_size in 1..20_usize) {
        // Keeps the left operand: only rank 0 survives.
        for algorithm in [all_reduce_halving_doubling, all_reduce_recursive_doubling] {
            let programs = programs(world_size, |rank, steps| algorithm(rank, world_size, 5, steps));
            let mut buffers: Vec<_> = (0..world_size).map(|rank| vec![rank as f64; 5]).collect();
            interpret(&programs, &mut buffers, |left, _| left);
            prop_assert!(buffers.iter().flatten().all(|&value| value == 0.0));
        }
    }

    #[test]
    fn a_broadcast_reaches_all_from_any_root(
        world_size in 1..20_usize,
        root in 0..20_usize,
        len in 0..9_usize,
    ) {
        let root = Rank(root % world_size);
        let programs =
            programs(world_size, |rank, steps| broadcast_binomial(rank, world_size, root, len, steps));
        assert_needs_no_queue(&programs);
        let mut buffers = vectors(world_size, len);
        let expected = buffers[root.0].clone();
        interpret(&programs, &mut buffers, |a, b| a + b);
        prop_assert!(buffers.iter().all(|buffer| *buffer == expected));
    }

    #[test]
    fn an_all_gather_fills_every_block(lens in proptest::collection::vec(0..5_usize, 1..12)) {
        let mut end = 0;
        let blocks: Vec<_> = lens.iter().map(|len| { end += len; end - len..end }).collect();
        let programs = programs(lens.len(), |rank, steps| all_gather_pairwise(rank, &blocks, steps));
        assert_needs_no_queue(&programs);
        let whole: Vec<f64> = (0..end).map(|index| index as f64).collect();
        let own_block = |block: &std::ops::Range<usize>| {
            let known = |index: usize| if block.contains(&index) { whole[index] } else { -1.0 };
            (0..end).map(known).collect()
        };
        let mut buffers: Vec<Vec<f64>> = blocks.iter().map(own_block).collect();
        interpret(&programs, &mut buffers, |a, b| a + b);
        prop_assert!(buffers.iter().all(|buffer| *buffer == whole));
    }

    #[test]
    fn owned_ranges_tile_the_vector(world_size in 1..20_usize, len in 0..300_usize, granule in 1..20_usize) {
        let mut end = 0;
        for rank in 0..world_size {
            let range = owned_range(Rank(rank), world_size, len, granule);
            prop_assert_eq!(range.start, end);
            prop_assert!(range.end == len || range.end.is_multiple_of(granule));
            prop_assert!(range.len() <= len.div_ceil(granule).div_ceil(world_size) * granule);
            end = range.end;
        }
        prop_assert_eq!(end, len);
    }
}
