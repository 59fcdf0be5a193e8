use super::*;
use trireme_base::{Category, UnitPasses};
use trireme_schedule::{Keep, lowering, single};

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
    predict(&setup, &lowering::recompute(single::program(3, 1, &[]), &keeps))
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
