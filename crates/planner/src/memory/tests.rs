use super::*;
use trireme_base::{Category, UnitPasses};
use trireme_schedule::{Chain, Keep, lowering, single};

fn peak(keep: Keep, block: UnitPasses) -> Prediction {
    let head = UnitPasses {
        input: 10,
        input_grad: 10,
        record: 10,
        forward_peak: 10,
        backward_peak: 20,
        ..UnitPasses::default()
    };
    let embedding = UnitPasses { output: 10, forward_peak: 10, backward_peak: 10, ..UnitPasses::default() };
    let setup = MemorySetup::of_passes(&[embedding, block, head], 0);
    let keeps = [Keep::All, keep, Keep::All];
    predict(&setup, &lowering::recompute(single::program(&Chain::of_units(3), 1), &keeps))
}

#[test]
fn a_peak_is_found_in_whichever_pass_it_is() {
    let block = UnitPasses {
        input: 10,
        output: 10,
        input_grad: 10,
        record: 50,
        products: 30,
        forward_peak: 60,
        renewal_peak: 50,
        backward_peak: 60,
        ..UnitPasses::default()
    };
    let found = |keep, block| {
        let prediction = peak(keep, block);
        let activations = prediction.peaks.get(Category::Activations);
        assert_eq!(prediction.total(), activations, "there is nothing else");
        (activations, prediction.line)
    };
    // F 0, F 1, F 2, B 2, REDUCE_GRAD 2 and, with recomputation, R 1 stand in lines 2 to 7.
    assert_eq!(found(Keep::All, UnitPasses { forward_peak: 99, ..block }), (99, 3));
    assert_eq!(found(Keep::All, UnitPasses { backward_peak: 99, ..block }), (99, 7));
    // Beside the output's gradient.
    assert_eq!(found(Keep::Products, UnitPasses { renewal_peak: 99, ..block }), (109, 7));
    assert_eq!(found(Keep::Products, UnitPasses { backward_peak: 99, ..block }), (99, 8));
    assert_eq!(found(Keep::Input, UnitPasses { forward_peak: 99, ..block }), (109, 7));
}

#[test]
fn memory_of_other_ranks_is_no_rank_s_own() {
    let passes = UnitPasses { forward_peak: 64, backward_peak: 64, ..UnitPasses::default() };
    let (len, num_units) = (1 << 10, 2);
    let mut setup = MemorySetup::of_passes(&vec![passes; num_units], 0);
    for unit in &mut setup.units {
        (unit.len, unit.padded_len, unit.shard_len, unit.optimizer_bytes) = (len, len, len, 8 * len);
    }
    let program = single::program(&Chain::of_units(num_units), 1);
    let state = num_units * 16 * len;
    let alone = predict(&setup, &program);
    assert_eq!((alone.own, alone.own_between_steps), (alone.total(), state));
    let (num_replicas, replicas_share_memory) = (2, true);
    let shared = predict(&MemorySetup { num_replicas, replicas_share_memory, ..setup }, &program);
    // Each of two replicas reduces half of the other's gradients where they lie.
    assert_eq!(shared.total() - alone.total(), num_units * 2 * len);
    assert_eq!((shared.own, shared.own_between_steps), (alone.own, state));
}
