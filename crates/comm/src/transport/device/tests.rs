//! Runs the steps of all ranks on memory of the host.

use super::steps::{DeviceSteps, needs_scratch};
use crate::call::BlockLens;
use crate::element::{combine_into, finish_mean};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use trireme_base::{DType, DeviceMemory, DeviceSpan, DeviceStep, DeviceTransfer, Rank, ReduceOp};
use trireme_schedule::collective::{Collective, CollectiveKind, StackInstruction, block, canonical_order};

/// Bytes of scratch memory, so that the longer vectors are exchanged in several segments.
const SCRATCH_BYTES: usize = 64;

const LENGTHS: [usize; 6] = [0, 1, 6, 12, 31, 60];

#[derive(Debug)]
struct TestMemory(Mutex<Vec<f32>>);

impl DeviceMemory for TestMemory {
    fn num_bytes(&self) -> usize {
        size_of_val(self.0.lock().unwrap().as_slice())
    }
}

fn memory(values: &[f32]) -> Arc<dyn DeviceMemory> {
    Arc::new(TestMemory(Mutex::new(values.to_vec())))
}

fn with_bytes<T>(span: &DeviceSpan, run: impl FnOnce(&mut [u8]) -> T) -> T {
    let memory: &dyn std::any::Any = &*span.memory;
    let memory: &TestMemory = memory.downcast_ref().unwrap();
    run(&mut bytemuck::cast_slice_mut(&mut memory.0.lock().unwrap())[span.range.clone()])
}

fn read(span: &DeviceSpan) -> Vec<u8> {
    with_bytes(span, |bytes| bytes.to_vec())
}

fn write(span: &DeviceSpan, from: &[u8]) {
    with_bytes(span, |bytes| bytes.copy_from_slice(from));
}

fn values(span: &DeviceSpan) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&read(span))
}

/// An element of a rank's input. Sums of several depend on their order.
fn element(rank: usize, index: usize) -> f32 {
    1.0 + ((rank * 31 + index * 17) % 23) as f32 / 7.0
}

fn elements(rank: usize, range: Range<usize>) -> Vec<f32> {
    range.map(|index| element(rank, index)).collect()
}

fn combined(left: &[f32], right: &[f32], op: ReduceOp) -> Vec<f32> {
    let mut out = vec![0.0; left.len()];
    let bytes = bytemuck::cast_slice_mut(&mut out);
    combine_into(bytes, bytemuck::cast_slice(left), bytemuck::cast_slice(right), DType::F32, op);
    out
}

fn reduced(op: ReduceOp, world_size: usize, index: usize) -> f32 {
    let mut partials = Vec::new();
    for instruction in canonical_order(world_size) {
        let right = match instruction {
            StackInstruction::Load(rank) => {
                partials.push(element(rank.0, index));
                continue;
            }
            StackInstruction::Reduce(rank) => element(rank.0, index),
            StackInstruction::Combine => partials.pop().unwrap(),
        };
        let left = partials.pop().unwrap();
        partials.push(combined(&[left], &[right], op)[0]);
    }
    finish_mean(bytemuck::cast_slice_mut(&mut partials), DType::F32, op, world_size);
    partials[0]
}

/// The program of a rank, and how far it is.
struct Program {
    steps: VecDeque<DeviceStep>,
    /// Whether the exchange at the front has sent what it sends.
    has_sent: bool,
}

/// Runs the steps of all ranks. Panics if they wait for each other forever, or if something was sent that no rank receives.
fn run(programs: Vec<Vec<DeviceStep>>) {
    let mut programs: Vec<Program> =
        programs.into_iter().map(|steps| Program { steps: steps.into(), has_sent: false }).collect();
    let mut sent: HashMap<(usize, usize), VecDeque<Vec<u8>>> = HashMap::new();
    while programs.iter().any(|program| !program.steps.is_empty()) {
        let mut has_advanced = run_collective(&mut programs);
        for (rank, program) in programs.iter_mut().enumerate() {
            has_advanced |= run_exchange(rank, program, &mut sent);
            while let Some(step) = program.steps.front() {
                if !run_alone(step) {
                    break;
                }
                program.steps.pop_front();
                has_advanced = true;
            }
        }
        assert!(has_advanced, "all ranks wait for others");
    }
    assert!(sent.values().all(VecDeque::is_empty), "all that was sent is received");
}

/// Runs a step that involves no other rank. Returns false for other steps.
fn run_alone(step: &DeviceStep) -> bool {
    match step {
        DeviceStep::Copy { from, to } => write(to, &read(from)),
        DeviceStep::Combine { left, right, out, op, .. } => {
            write(out, bytemuck::cast_slice(&combined(&values(left), &values(right), *op)));
        }
        DeviceStep::Divide { span, dtype, by } => {
            with_bytes(span, |sums| finish_mean(sums, *dtype, ReduceOp::Mean, *by));
        }
        _ => return false,
    }
    true
}

/// Sends what the exchange at the front of a program sends, or completes it if all that it receives was sent.
fn run_exchange(
    rank: usize,
    program: &mut Program,
    sent: &mut HashMap<(usize, usize), VecDeque<Vec<u8>>>,
) -> bool {
    let Some(DeviceStep::Exchange(transfers)) = program.steps.front() else { return false };
    if !std::mem::replace(&mut program.has_sent, true) {
        for transfer in transfers {
            if let DeviceTransfer::Send { from, to } = transfer {
                sent.entry((rank, to.0)).or_default().push_back(read(from));
            }
        }
        return true;
    }
    let mut needed: HashMap<usize, usize> = HashMap::new();
    for transfer in transfers {
        if let DeviceTransfer::Receive { from, .. } = transfer {
            *needed.entry(from.0).or_default() += 1;
        }
    }
    let has_arrived =
        |(from, needed): (&usize, &usize)| sent.get(&(*from, rank)).is_some_and(|sent| sent.len() >= *needed);
    if !needed.iter().all(has_arrived) {
        return false;
    }
    for transfer in transfers {
        if let DeviceTransfer::Receive { to, from } = transfer {
            write(to, &sent.get_mut(&(from.0, rank)).unwrap().pop_front().unwrap());
        }
    }
    program.steps.pop_front();
    program.has_sent = false;
    true
}

/// Asserts that exchanges of two ranks with each other match one by one: what one sends in its first, the other receives in its first.
fn check_exchanges(programs: &[Vec<DeviceStep>]) {
    let exchanges = |rank: usize, peer: usize| -> Vec<[usize; 2]> {
        let num = |transfers: &[DeviceTransfer]| {
            let is_sent = |transfer: &&DeviceTransfer| matches!(transfer, DeviceTransfer::Send { to, .. } if to.0 == peer);
            let is_received = |transfer: &&DeviceTransfer| matches!(transfer, DeviceTransfer::Receive { from, .. } if from.0 == peer);
            [transfers.iter().filter(is_sent).count(), transfers.iter().filter(is_received).count()]
        };
        let all = programs[rank].iter().filter_map(|step| match step {
            DeviceStep::Exchange(transfers) => Some(num(transfers)),
            _ => None,
        });
        all.filter(|num| *num != [0, 0]).collect()
    };
    for rank in 0..programs.len() {
        for peer in 0..rank {
            let theirs: Vec<_> =
                exchanges(peer, rank).into_iter().map(|[sent, received]| [received, sent]).collect();
            assert_eq!(exchanges(rank, peer), theirs, "exchanges of ranks {rank} and {peer}");
        }
    }
}

/// Runs a collective of the library if all ranks are at it.
fn run_collective(programs: &mut [Program]) -> bool {
    let steps: Option<Vec<&DeviceStep>> = programs.iter().map(|program| program.steps.front()).collect();
    let Some(steps) = steps else { return false };
    let span_of = |step: &&DeviceStep| match step {
        DeviceStep::Broadcast { span, .. }
        | DeviceStep::AllGather { span }
        | DeviceStep::AllReduce { span, .. }
        | DeviceStep::ReduceScatter { span, .. } => Some(span.clone()),
        _ => None,
    };
    let spans: Option<Vec<_>> = steps.iter().map(span_of).collect();
    let Some(spans) = spans else { return false };
    let (num_bytes, num_ranks) = (spans[0].range.len(), spans.len());
    // All ranks call the library with the same arguments.
    let arguments = |step: &DeviceStep| match step {
        DeviceStep::Broadcast { span, root } => ("broadcast", span.range.len(), Some(*root), None),
        DeviceStep::AllGather { span } => ("all_gather", span.range.len(), None, None),
        DeviceStep::AllReduce { span, op, .. } => ("all_reduce", span.range.len(), None, Some(*op)),
        DeviceStep::ReduceScatter { span, op, .. } => ("reduce_scatter", span.range.len(), None, Some(*op)),
        step => unreachable!("{step:?} is of one rank"),
    };
    assert!(steps.iter().all(|step| arguments(step) == arguments(steps[0])), "{steps:?}");
    let own_block = |rank: usize| rank * num_bytes / num_ranks..(rank + 1) * num_bytes / num_ranks;
    let reduce = |op: ReduceOp| {
        let all = spans.iter().map(values).reduce(|left, right| combined(&left, &right, op));
        bytemuck::pod_collect_to_vec::<f32, u8>(&all.expect("there are ranks"))
    };
    match programs[0].steps.front().unwrap() {
        DeviceStep::Broadcast { root, .. } => {
            let sent = read(&spans[root.0]);
            spans.iter().for_each(|span| write(span, &sent));
        }
        DeviceStep::AllGather { .. } => {
            let all: Vec<u8> =
                (0..num_ranks).flat_map(|rank| read(&spans[rank].part(own_block(rank)))).collect();
            spans.iter().for_each(|span| write(span, &all));
        }
        DeviceStep::AllReduce { op, .. } => {
            let result = reduce(*op);
            spans.iter().for_each(|span| write(span, &result));
        }
        DeviceStep::ReduceScatter { op, .. } => {
            let result = reduce(*op);
            for (rank, span) in spans.iter().enumerate() {
                write(&span.part(own_block(rank)), &result[own_block(rank)]);
            }
        }
        step => unreachable!("{step:?} is of one rank"),
    }
    programs.iter_mut().for_each(|program| drop(program.steps.pop_front()));
    true
}

/// A collective with its reduction.
#[derive(Debug, Clone, Copy)]
struct Case {
    collective: Collective,
    op: Option<ReduceOp>,
    world_size: usize,
    keeps_order: bool,
    is_in_place: bool,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let worlds = (2..=6).flat_map(|world_size| LENGTHS.map(|len| (world_size, len)));
        let variants = worlds.flat_map(|(world_size, len)| {
            [(true, true), (true, false), (false, true), (false, false)].map(|flags| (world_size, len, flags))
        });
        variants.flat_map(|(world_size, len, (keeps_order, is_in_place))| {
            let equal = len / world_size * world_size;
            let roots = [Rank(0), Rank(world_size - 1)];
            let of = move |collective: Collective, op| Case {
                collective,
                op,
                world_size,
                keeps_order,
                is_in_place,
            };
            let mut cases = Vec::from([
                of(CollectiveKind::AllReduce.with_len(len), Some(ReduceOp::Sum)),
                of(CollectiveKind::AllReduce.with_len(len), Some(ReduceOp::Mean)),
                of(CollectiveKind::ReduceScatter.with_len(len), Some(ReduceOp::Sum)),
                of(CollectiveKind::ReduceScatter.with_len(len), Some(ReduceOp::Mean)),
                of(CollectiveKind::AllGather.with_len(len), None),
                of(CollectiveKind::AllToAll.with_len(equal), None),
            ]);
            for root in roots {
                cases.extend([
                    of(CollectiveKind::Reduce.with_root(root, len), Some(ReduceOp::Max)),
                    of(CollectiveKind::Reduce.with_root(root, len), Some(ReduceOp::Mean)),
                    of(CollectiveKind::Broadcast.with_root(root, len), None),
                    of(CollectiveKind::Gather.with_root(root, len), None),
                    of(CollectiveKind::Scatter.with_root(root, len), None),
                ]);
            }
            cases
        })
    }

    fn own_block(&self, rank: usize) -> Range<usize> {
        block(Rank(rank), self.world_size, self.collective.len)
    }

    /// The element that `rank` has at `index` of the full vector afterwards, if it is specified.
    fn result(&self, rank: usize, index: usize) -> Option<f32> {
        let Case { collective, op, world_size, .. } = *self;
        let owner = (0..world_size).find(|owner| self.own_block(*owner).contains(&index)).unwrap();
        let reduced = || reduced(op.unwrap(), world_size, index);
        let is_root = collective.root() == Some(Rank(rank));
        match collective.kind {
            CollectiveKind::AllReduce => Some(reduced()),
            CollectiveKind::ReduceScatter => (owner == rank).then(reduced),
            CollectiveKind::Reduce => is_root.then(reduced),
            CollectiveKind::Broadcast => Some(element(collective.root().unwrap().0, index)),
            CollectiveKind::AllGather => Some(element(owner, index)),
            CollectiveKind::Gather => is_root.then(|| element(owner, index)),
            CollectiveKind::Scatter => (owner == rank).then(|| element(collective.root().unwrap().0, index)),
            CollectiveKind::AllToAll => {
                let within = index - self.own_block(owner).start;
                Some(element(owner, self.own_block(rank).start + within))
            }
            CollectiveKind::Barrier => None,
        }
    }

    /// The input and the output of a rank, with the range of the full vector that the output holds.
    fn vectors(&self, rank: usize) -> (DeviceSpan, DeviceSpan, Range<usize>) {
        let len = self.collective.len;
        if self.is_in_place {
            let vector = DeviceSpan::all(&memory(&elements(rank, 0..len)));
            return (vector.clone(), vector, 0..len);
        }
        let [input_len, output_len] = self.collective.lens(Rank(rank), self.world_size);
        let range_of = |len_of: usize, is_block: bool| match len_of {
            0 => 0..0,
            _ if is_block => self.own_block(rank),
            _ => 0..len,
        };
        let is_block = |kinds: &[CollectiveKind]| kinds.contains(&self.collective.kind);
        let input = range_of(input_len, is_block(&[CollectiveKind::AllGather, CollectiveKind::Gather]));
        let output =
            range_of(output_len, is_block(&[CollectiveKind::ReduceScatter, CollectiveKind::Scatter]));
        let input = DeviceSpan::all(&memory(&elements(rank, input)));
        (input, DeviceSpan::all(&memory(&vec![-1.0; output_len])), output)
    }

    fn check(self) {
        let Case { collective, op, world_size, keeps_order, is_in_place } = self;
        let vectors: Vec<_> = (0..world_size).map(|rank| self.vectors(rank)).collect();
        let inputs: Vec<Vec<f32>> = vectors.iter().map(|(input, ..)| values(input)).collect();
        let steps = |rank: usize| {
            let has_scratch = needs_scratch(Some(collective), keeps_order, is_in_place, world_size);
            let scratch = has_scratch.then(|| memory(&[f32::NAN; SCRATCH_BYTES / 4]));
            let mut steps = steps_of(rank, world_size, scratch.as_ref());
            (steps.op, steps.keeps_order) = (op, keeps_order);
            let (input, output, _) = &vectors[rank];
            if is_in_place {
                steps.in_place(collective, input);
            } else {
                steps.out_of_place(collective, input, output);
            }
            steps.steps
        };
        let programs: Vec<Vec<DeviceStep>> = (0..world_size).map(steps).collect();
        check_exchanges(&programs);
        run(programs);
        for (rank, (input, output, range)) in vectors.iter().enumerate() {
            if !is_in_place {
                assert_eq!(values(input), inputs[rank], "{self:?}: the input of rank {rank}");
            }
            for (found, index) in values(output).into_iter().zip(range.clone()) {
                let Some(expected) = self.result(rank, index) else { continue };
                let is_equal = if keeps_order || op.is_none() {
                    found.to_bits() == expected.to_bits()
                } else {
                    (found - expected).abs() < 1e-5
                };
                assert!(is_equal, "{self:?}: rank {rank} has {found} in place of {expected} at {index}");
            }
        }
    }
}

fn steps_of(rank: usize, world_size: usize, scratch: Option<&Arc<dyn DeviceMemory>>) -> DeviceSteps<'_> {
    let (rank, dtype, steps) = (Rank(rank), DType::F32, Vec::new());
    let transfers = Vec::new();
    DeviceSteps { rank, world_size, dtype, op: None, keeps_order: true, scratch, transfers, steps }
}

#[test]
fn collectives_have_the_results_of_their_definitions() {
    Case::all().for_each(Case::check);
}

#[test]
fn blocks_of_different_lengths_reach_their_receivers() {
    let world_size = 4;
    let len = |from: usize, to: usize| (from * 3 + to) % 4;
    let start = |from: usize, to: usize| (0..to).map(|before| len(from, before)).sum::<usize>();
    let matrix: Arc<[usize]> =
        (0..world_size * world_size).map(|index| len(index / world_size, index % world_size)).collect();
    for by_hosts in [false, true] {
        let vectors: Vec<_> = (0..world_size)
            .map(|rank| {
                let received = (0..world_size).map(|from| len(from, rank)).sum();
                let input = memory(&elements(rank, 0..start(rank, world_size)));
                (DeviceSpan::all(&input), DeviceSpan::all(&memory(&vec![-1.0; received])))
            })
            .collect();
        let steps = |rank: usize| {
            let lens = |len_of: &dyn Fn(usize) -> usize| (0..world_size).map(len_of).collect::<Vec<_>>();
            let own = [lens(&|to| len(rank, to)), lens(&|from| len(from, rank))];
            let lens = if by_hosts { BlockLens::All(Arc::clone(&matrix)) } else { BlockLens::Own(own) };
            let mut steps = steps_of(rank, world_size, None);
            steps.all_to_all_variable(&vectors[rank].0, &vectors[rank].1, &lens);
            steps.steps
        };
        run((0..world_size).map(steps).collect());
        for (rank, (_, output)) in vectors.iter().enumerate() {
            let expected = (0..world_size)
                .flat_map(|from| elements(from, start(from, rank)..start(from, rank) + len(from, rank)));
            assert_eq!(values(output), expected.collect::<Vec<_>>(), "rank {rank}");
        }
    }
}
