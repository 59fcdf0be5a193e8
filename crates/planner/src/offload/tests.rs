use super::*;
use crate::setup::UnitMemory;
use crate::usage::CategoryBytes;
use proptest::prelude::*;
use trireme_base::UnitPasses;
use trireme_schedule::lowering::{Sharding, offload, shard};
use trireme_schedule::{Chain, single};

const CLASSES: [StateClass; 4] = StateClass::ALL;

/// An embedding, alike blocks and a head on one rank.
fn setup(num_units: usize) -> MemorySetup {
    let block = UnitPasses {
        input: 64,
        output: 64,
        input_grad: 64,
        record: 640,
        products: 320,
        forward_peak: 704,
        renewal_peak: 640,
        backward_peak: 768,
        ..UnitPasses::default()
    };
    let embedding = UnitPasses { output: 64, forward_peak: 64, backward_peak: 64, ..UnitPasses::default() };
    let head =
        UnitPasses { input: 64, input_grad: 64, record: 128, forward_peak: 192, backward_peak: 256, ..block };
    let mut passes = vec![block; num_units];
    (passes[0], passes[num_units - 1]) = (embedding, UnitPasses { output: 0, ..head });
    let mut setup = MemorySetup::of_passes(&passes, 0);
    for unit in &mut setup.units {
        let len = 32;
        let passes = unit.passes;
        *unit = UnitMemory {
            len,
            padded_len: len,
            shard_len: len,
            optimizer_bytes: 8 * len,
            passes,
            ..UnitMemory::default()
        };
    }
    setup.fixed = CategoryBytes::default();
    setup
}

fn program(num_units: usize, zero_stage: ZeroStage, places: Offload) -> Program {
    let sharding = Sharding { zero_stage, prefetch: 1, keep_after_forward: false };
    let ends = vec![0, num_units - 1];
    let chain = Chain { unkept: ends, ..Chain::of_units(num_units) };
    offload(shard(single::program(&chain, 1), sharding), places)
}

/// Every choice with every number of blocks.
fn every_choice(outline: &Outline) -> Vec<Offload> {
    let blocks =
        |places: Offload| (1..outline.chain.num_units).map(move |num_units| Offload { num_units, ..places });
    combinations(Offload::default(), &CLASSES, outline).into_iter().flat_map(blocks).collect()
}

proptest! {
    #[test]
    fn no_other_choice_fits_and_moves_less(
        num_units in 2..7_usize, stage in 0..4_usize, device in 1_000..9_000_usize, host in 0..9_000_usize,
        machine in 1_000..18_000_usize,
    ) {
        let (setup, zero_stage) = (setup(num_units), ZeroStage::ALL[stage]);
        let program = |places| program(num_units, zero_stage, places);
        let bounds = MemoryBounds { device, host, machine };
        let search = Search { setup: &setup, bounds, program: &program };
        let outline = program(Offload::default()).outline;
        let all = every_choice(&outline).into_iter().map(|places| search.placing(places));
        let best = all.filter(|placing| bounds.hold(&placing.prediction)).map(|placing| placing.traffic.cost()).min();
        let found = fit_places(&setup, &CLASSES, bounds, program);
        let cost = bounds.hold(&found.prediction).then(|| found.traffic.cost());
        prop_assert_eq!(cost, best);
    }
}

#[test]
fn the_first_blocks_leave_and_no_more_than_needed() {
    let num_units = 8;
    let (setup, open) = (setup(num_units), [StateClass::Activations]);
    let program = |places| program(num_units, ZeroStage::Zero, places);
    let all = predict(&setup, &program(Offload::default())).total();
    let fit = |device| fit_places(&setup, &open, MemoryBounds { device, ..MemoryBounds::NONE }, program);
    assert_eq!(fit(all).places.activations, Tier::Device);
    let found = fit(all - 640 - 1);
    assert_eq!((found.places.activations, found.places.num_units), (Tier::Host, 2));
    // Each goes and comes back.
    assert_eq!(found.traffic, Traffic { host: 2 * 2 * 640, disk: 0 });
    let refused = fit(1);
    assert!(refused.prediction.total() < all && refused.places.activations == Tier::Host);
}

#[test]
fn what_the_host_has_no_room_for_goes_to_disk() {
    let num_units = 4;
    let (setup, open) = (setup(num_units), [StateClass::Optimizer]);
    let program = |places| program(num_units, ZeroStage::One, places);
    let all = predict(&setup, &program(Offload::default())).total();
    let tier = |host| {
        let bounds = MemoryBounds { device: all - 1, host, ..MemoryBounds::NONE };
        let found = fit_places(&setup, &open, bounds, program);
        bounds.hold(&found.prediction).then_some(found.places.optimizer)
    };
    let state = 8 * 32 * num_units;
    assert_eq!(tier(state), Some(Tier::Host));
    assert_eq!(tier(state - 1), Some(Tier::Disk));
    assert_eq!(tier(0), None, "a disk's state passes through the host");
}
