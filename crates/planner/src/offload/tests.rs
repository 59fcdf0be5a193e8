use super::*;
use crate::sizes::UnitSizes;
use proptest::prelude::*;
use std::convert::Infallible;
use trireme_base::{CategoryBytes, UnitPasses};
use trireme_schedule::lowering::apply_layout;
use trireme_schedule::{UnitChain, single};

const CLASSES: [StateClass; 4] = StateClass::ALL;

/// Returns the sizes of an embedding, equal blocks and a head on one rank.
fn sizes(num_units: usize) -> ModelSizes {
    let block = UnitPasses {
        input: 64,
        output: 64,
        input_grad: 64,
        saved: 640,
        products: 320,
        forward_peak: 704,
        recompute_peak: 640,
        backward_peak: 768,
        ..UnitPasses::default()
    };
    let embedding = UnitPasses { output: 64, forward_peak: 64, backward_peak: 64, ..UnitPasses::default() };
    let head =
        UnitPasses { input: 64, input_grad: 64, saved: 128, forward_peak: 192, backward_peak: 256, ..block };
    let mut passes = vec![block; num_units];
    (passes[0], passes[num_units - 1]) = (embedding, UnitPasses { output: 0, ..head });
    let unit = |passes| UnitSizes { state: [256, 128, 128], shard_len: 32, passes };
    ModelSizes {
        units: passes.into_iter().map(unit).collect(),
        gathered_bytes_per_element: 4,
        gradient_bytes_per_element: 4,
    }
}

/// Predicts the memory of a rank. The device stores all state of the classes that reside on it, and the state of two units for each other
/// class.
fn predict(sizes: &ModelSizes, program: &Program) -> MemoryUse {
    let state = program.header.state;
    let (mut device, mut host) = (1000, 0);
    let mut add = |class: StateClass, moved: usize, stays: usize| {
        device += stays;
        host += match state.of(class).tier {
            Tier::Device => 0,
            Tier::Host => moved,
            Tier::Disk => moved.min(2 * 256),
        };
    };
    for class in [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients] {
        let all: usize = sizes.units.iter().map(|unit| unit.state[class as usize]).sum();
        let is_here = !state.is_offloaded(class);
        add(class, all, if is_here { all } else { 2 * sizes.units[0].state[class as usize] });
    }
    let is_offloaded = |unit: &usize| {
        let evicts = |action: &Action| matches!(action, Action::Evict(StateKey { class: StateClass::Activations, unit: own, .. }) if own == unit);
        program.actions.iter().any(evicts)
    };
    let blocks = 1..sizes.units.len() - 1;
    let num_moved = blocks.clone().filter(is_offloaded).count();
    add(StateClass::Activations, 640 * num_moved, 640 * (blocks.len() - num_moved));
    let mut at_peak = [0; 5];
    at_peak[0] = device;
    MemoryUse { at_peak: CategoryBytes(at_peak), own: device, host, ..MemoryUse::default() }
}

fn program(num_units: usize, state: StateLayout) -> Program {
    let ends = vec![0, num_units - 1];
    let chain = UnitChain { without_activations: ends, ..UnitChain::of_units(num_units) };
    apply_layout(single::program(&chain, 1), state)
}

/// Returns all combinations of tiers with all numbers of offloaded units.
fn every_choice(given: StateLayout, num_units: usize) -> Vec<StateLayout> {
    let blocks = |state: StateLayout| {
        (1..num_units).map(move |num_moved| StateLayout { num_offloaded_units: num_moved, ..state })
    };
    combinations(given, &CLASSES, 1).into_iter().flat_map(blocks).collect()
}

proptest! {
    #[test]
    fn no_other_choice_fits_and_moves_less(
        num_units in 2..7_usize, stage in 0..4_usize, device in 1_000..9_000_usize, host in 0..9_000_usize,
        machine in 1_000..18_000_usize,
    ) {
        let (sizes, given) = (sizes(num_units), StateLayout::zero(stage));
        let program = |state| program(num_units, state);
        let run = |state| Ok::<_, Infallible>(predict(&sizes, &program(state)));
        let bounds = MemoryBounds { device, host, machine };
        let search = Search { sizes: &sizes, bounds, open: &CLASSES, program: &program, run: &run };
        let all = every_choice(given, num_units).into_iter().map(|state| search.candidate(state).unwrap());
        let best = all.filter(|placing| bounds.admit(&placing.prediction)).map(|placing| placing.traffic.cost()).min();
        let found = fit_layout(&sizes, given, &CLASSES, bounds, program, run).unwrap();
        let cost = bounds.admit(&found.prediction).then(|| found.traffic.cost());
        prop_assert_eq!(cost, best);
    }
}

/// Chooses the tier of one class. The bound on device memory is `reduction` bytes below the rank's total, and the bound on host memory is
/// `host` bytes. Also returns whether the choice fits.
fn fit(
    num_units: usize,
    stage: usize,
    class: StateClass,
    reduction: usize,
    host: usize,
) -> (LayoutCandidate, bool) {
    let (sizes, given) = (sizes(num_units), StateLayout::zero(stage));
    let program = |state| program(num_units, state);
    let run = |state| Ok::<_, Infallible>(predict(&sizes, &program(state)));
    let all = run(given).unwrap().total();
    let bounds = MemoryBounds { device: all - reduction, host, machine: usize::MAX };
    let found = fit_layout(&sizes, given, &[class], bounds, program, run).unwrap();
    let holds = bounds.admit(&found.prediction);
    (found, holds)
}

#[test]
fn the_first_blocks_are_offloaded_and_no_more_than_needed() {
    let fit = |less| fit(8, 0, StateClass::Activations, less, usize::MAX);
    assert_eq!(fit(0).0.state.activations.tier, Tier::Device);
    let (found, _) = fit(640 + 1);
    assert_eq!((found.state.activations.tier, found.state.num_offloaded_units), (Tier::Host, 2));
    // Each block's activations are moved out and back.
    assert_eq!(found.traffic, OffloadTraffic { host: 2 * 2 * 640, disk: 0 });
    let (refused, holds) = fit(7 * 640);
    assert!(!holds && refused.state.activations.tier == Tier::Host);
}

#[test]
fn state_goes_to_disk_if_the_host_has_no_room() {
    let tier = |host| {
        let (found, holds) = fit(4, 1, StateClass::Optimizer, 1, host);
        holds.then_some(found.state.optimizer.tier)
    };
    let state = 256 * 4;
    assert_eq!(tier(state), Some(Tier::Host));
    assert_eq!(tier(state - 1), Some(Tier::Disk));
    assert_eq!(tier(0), None, "a disk's state passes through the host");
}
