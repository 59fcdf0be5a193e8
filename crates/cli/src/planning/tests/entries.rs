//! The journal of a dry step against the journal of a real one.

use super::*;
use std::collections::BTreeMap;
use trireme_base::{AsyncOperation, Journal, JournalEntry, KernelCall, StepEntries};

fn kernels<'a>(entries: impl IntoIterator<Item = &'a JournalEntry>) -> BTreeMap<KernelCall, usize> {
    let mut calls = BTreeMap::new();
    for entry in entries {
        if let JournalEntry::Kernel(call) = entry {
            *calls.entry(*call).or_default() += 1;
        }
    }
    calls
}

fn dry_entries(case: &Case, subject: &dyn TestModel, world_size: usize, rank: usize) -> StepEntries {
    let device = Device::counting(case.device_options(None)).unwrap();
    let host = device.host().unwrap();
    let group =
        Group::dry(Rank(rank), Hosts::single(world_size), TransportKind::Inproc, &GroupOptions::default())
            .unwrap();
    let executor = case.executor(subject, group, &device, &host).unwrap();
    executor.dry_run_entries().unwrap()
}

fn check(case: &Case, world_size: usize) {
    let subject = &medium_model();
    run_ranks(world_size, |group| {
        let rank = group.rank().0;
        let device = Device::cpu(case.device_options(None)).unwrap();
        let host = device.host().unwrap();
        let journal = Journal::default();
        device.keep_journal(&journal);
        host.keep_journal(&journal);
        let mut executor = case.executor(subject, group, &device, &host).unwrap();
        executor.initialize(1).unwrap();
        for step in 1..=3 {
            let num_microbatches = executor.program().header.num_microbatches;
            let context = executor.ranks().context_rank();
            let batches: Vec<Batch> = (0..num_microbatches)
                .map(|index| subject.batch(&device, case.shape, step, index, context))
                .collect();
            journal.take();
            let plan = StepPlan { step, lr: 1e-3, grad_norm: GradNorm::Measure, has_loss: true };
            executor.run(plan, &mut batches.into_iter()).unwrap();
        }
        let found: Vec<JournalEntry> = journal.take().into_iter().map(|(entry, _)| entry).collect();
        let dry = dry_entries(case, subject, world_size, rank);
        assert_eq!(kernels(dry.actions.iter().flatten()), kernels(&found), "rank {rank} of {case:?}");
    });
}

#[test]
fn a_dry_step_calls_the_kernels_of_a_real_one() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, reduce_dtype: Precision::Bf16, ..OPTIONS };
    for (options, num_microbatches) in [(OPTIONS, 1), (OPTIONS, 3), (bf16, 2)] {
        let case = Case { options, num_microbatches, ..Case::default() };
        check(&case, 1);
        check(&Case { keep: Keep::Products, ..case.clone() }, 2);
        for stage in [1, 2, 3] {
            check(
                &Case { state: StateLayout::zero(stage), num_shards: 2, keep: Keep::Input, ..case.clone() },
                2,
            );
        }
        let state = StateLayout::UNSHARDED.with_tier(StateClass::Activations, Tier::Host);
        check(&Case { state, ..case.clone() }, 1);
    }
    let pipeline = Some((ScheduleKind::ZeroBubbleH1, 2, 1));
    check(&Case { pipeline, num_microbatches: 4, ..Case::default() }, 2);
}

#[test]
fn operations_issued_in_a_dry_step_are_awaited_in_it_or_in_the_next() {
    for (stage, world_size) in [(0, 2), (1, 2), (2, 4), (3, 2)] {
        let num_shards = shards(stage, world_size);
        let case =
            Case { state: StateLayout::zero(stage), num_shards, num_microbatches: 2, ..Case::default() };
        let entries = dry_entries(&case, &medium_model(), world_size, 1);
        let (mut issued, mut awaited) = (Vec::new(), Vec::new());
        for entry in entries.actions.iter().flatten() {
            match entry {
                JournalEntry::Issue(number, what) => {
                    let AsyncOperation::Collective { members, .. } = what else { panic!("{what:?}") };
                    assert_eq!(members.len(), world_size);
                    issued.push(*number);
                }
                JournalEntry::Await(number) => awaited.push(*number),
                JournalEntry::Kernel(_) | JournalEntry::Pause => (),
            }
        }
        assert_eq!(issued.len(), entries.issued_per_step);
        let first = issued[0];
        assert!(issued.iter().copied().eq(first..first + entries.issued_per_step), "{issued:?}");
        // A number below `first` belongs to the previous step. Adding the number of operations in a step gives the number of the same
        // operation in this step.
        let mut numbers: Vec<usize> = awaited
            .iter()
            .map(|number| if *number < first { number + entries.issued_per_step } else { *number })
            .collect();
        numbers.sort_unstable();
        assert_eq!(numbers, issued, "stage {stage}");
    }
}
