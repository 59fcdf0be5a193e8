use super::*;
use proptest::prelude::*;
use std::convert::Infallible;
use trireme_base::{Category, CategoryBytes, Cost};
use trireme_schedule::{Program, UnitChain, lowering, single};

fn cost(num_operations: usize) -> Cost {
    Cost::others(&[num_operations])
}

fn program(keeps: &[Keep]) -> Program {
    lowering::recompute(single::program(&UnitChain::of_units(keeps.len()), 1), keeps)
}

/// Bytes of each batch tensor. The first and the last unit read one each.
const TENSOR_BYTES: usize = 3;

fn batch(passes: &[UnitPasses]) -> Vec<BatchTensorSize> {
    [0, passes.len() - 1].map(|unit| BatchTensorSize { bytes: TENSOR_BYTES, readers: vec![unit] }).into()
}

/// Simulates the activation memory of a rank without parameters.
fn run(passes: &[UnitPasses], keeps: &[Keep]) -> DryRun {
    let program = program(keeps);
    let (mut current, mut output, mut grad) = (2 * TENSOR_BYTES, 0, 0);
    let mut action_peaks = Vec::new();
    for &action in &program.actions {
        let unit = action.unit();
        let unit_passes = &passes[unit];
        let mut peak = current;
        let mut record = |current: &mut usize, output: &mut usize| {
            peak = peak.max(*current + unit_passes.forward_peak - *output);
            *current += unit_passes.saved + unit_passes.output - *output;
            *output = unit_passes.output;
        };
        match (action, keeps[unit]) {
            (Action::Forward { keep, .. }, _) => {
                record(&mut current, &mut output);
                current -= unit_passes.saved - keep.kept_bytes(unit_passes);
            }
            (Action::Recompute { .. }, Keep::Products) => {
                peak = peak.max(current + unit_passes.recompute_peak - unit_passes.products);
                current += unit_passes.saved - unit_passes.products;
            }
            (Action::Recompute { .. }, keep) => {
                if keep == Keep::Input {
                    output = unit_passes.input;
                }
                record(&mut current, &mut output);
            }
            (Action::Backward { .. }, _) => {
                current -= std::mem::take(&mut output);
                let before = unit_passes.saved + grad;
                peak = peak.max(current + unit_passes.backward_peak - before);
                current = current + unit_passes.input_grad - before;
                grad = unit_passes.input_grad;
                if [0, passes.len() - 1].contains(&unit) {
                    current -= TENSOR_BYTES;
                }
            }
            _ => (),
        }
        action_peaks.push(activation_bytes(peak.max(current)));
    }
    let most = action_peaks.iter().map(CategoryBytes::total).max().unwrap();
    let prediction = MemoryUse { at_peak: activation_bytes(most), own: most, ..MemoryUse::default() };
    DryRun { program, memory: prediction, action_peaks }
}

fn activation_bytes(num_bytes: usize) -> CategoryBytes {
    let bytes = |category| if category == Category::Activations { num_bytes } else { 0 };
    CategoryBytes(Category::ALL.map(bytes))
}

/// Returns consistent sizes: during a pass, its inputs and its results are in memory at the same time.
fn sizes(numbers: &[[usize; 8]]) -> Vec<UnitPasses> {
    let mut passes: Vec<UnitPasses> = Vec::new();
    for (unit, &[output, inner, products, extra, recompute, backward, grad, operations]) in
        numbers.iter().enumerate()
    {
        let is_last = unit + 1 == numbers.len();
        let (input, input_grad) = passes.last().map_or((0, 0), |below| (below.output, grad));
        let output = if is_last { 0 } else { output };
        let products = input + products.min(inner);
        let record = input + inner;
        let (renewal_peak, forward_peak) = (record + recompute, record + output + extra);
        passes.push(UnitPasses {
            input,
            output,
            input_grad,
            saved: record,
            products,
            forward_peak,
            recompute_peak: renewal_peak,
            // The gradient of the output has the size of the input gradient of the unit above; the loop below adds it.
            backward_peak: record + backward.max(input_grad),
            forward_cost: cost(10 + operations),
            backward_cost: cost(20 + 2 * operations),
            recompute_cost: cost(operations % 10),
            ..UnitPasses::default()
        });
    }
    for unit in 1..passes.len() {
        let grad = passes[unit].input_grad;
        passes[unit - 1].backward_peak += grad;
    }
    passes
}

/// Returns all choices for which a program exists.
fn every_choice(passes: &[UnitPasses]) -> Vec<Vec<Keep>> {
    let mut choices: Vec<Vec<Keep>> = vec![Vec::new()];
    for passes in passes {
        let options = if passes.keeps_activations() { &Keep::ALL[..] } else { &[Keep::All][..] };
        let extend = |choice: &Vec<Keep>| {
            let is_recomputed = matches!(choice.last(), Some(Keep::Input | Keep::Nothing));
            let possible = options.iter().filter(|&&keep| keep != Keep::Nothing || is_recomputed);
            possible.map(|&keep| [&choice[..], &[keep]].concat()).collect::<Vec<_>>()
        };
        choices = choices.iter().flat_map(extend).collect();
    }
    choices
}

fn operations(passes: &[UnitPasses], keeps: &[Keep]) -> u64 {
    let of_unit = |(passes, keep): (&UnitPasses, &Keep)| match keep {
        Keep::All => 0,
        Keep::Products => passes.recompute_cost.operations(),
        Keep::Input | Keep::Nothing => passes.forward_cost.operations(),
    };
    passes.iter().zip(keeps).map(of_unit).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_choice_is_the_best_of_all(
        numbers in proptest::collection::vec(proptest::array::uniform8(0_usize..40), 2..7),
        part in 0.0_f64..1.1,
    ) {
        let passes = sizes(&numbers);
        let total = |keeps: &[Keep]| run(&passes, keeps).memory.total();
        let choices = every_choice(&passes);
        let smallest = choices.iter().map(|choice| total(choice)).min().unwrap();
        let largest = choices.iter().map(|choice| total(choice)).max().unwrap();
        let budget = smallest + ((largest - smallest) as f64 * part) as usize - usize::from(part < 0.05);
        let fitting = choices.iter().filter(|choice| total(choice) <= budget);
        let expected = fitting.map(|choice| operations(&passes, choice)).min();
        let bounds = MemoryBounds { device: budget, host: usize::MAX, machine: usize::MAX };
        let found = fit_keeps(&passes, &batch(&passes), bounds, |keeps| Ok::<_, Infallible>(run(&passes, keeps)));
        let (choice, found) = found.unwrap();
        prop_assert_eq!(found.total(), total(&choice.keeps));
        prop_assert_eq!(choice.operations, operations(&passes, &choice.keeps));
        let operations = (found.total() <= budget).then_some(choice.operations);
        prop_assert_eq!(operations, expected, "{:?}", choice);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Tests [`fit_keeps_in_flight`]. Its choice fits and uses the room, but need not be the best.
    #[test]
    fn choices_for_microbatches_in_flight_fit_and_use_the_room(
        numbers in proptest::collection::vec(proptest::array::uniform8(0_usize..40), 2..7),
        part in 0.0_f64..1.1,
    ) {
        let passes = sizes(&numbers);
        let total = |keeps: &[Keep]| run(&passes, keeps).memory.total();
        let given = vec![Keep::All; passes.len()];
        let (least, all) = (total(&inputs_only(&passes).keeps), total(&given));
        let budget = (least as f64 + (all as f64 - least as f64) * part) as usize;
        let bounds = MemoryBounds { device: budget, host: usize::MAX, machine: usize::MAX };
        let run = |keeps: &[Keep]| Ok::<_, Infallible>(run(&passes, keeps));
        let (choice, found) = fit_keeps_in_flight(&passes, &given, bounds, run).unwrap();
        prop_assert_eq!(found.total(), total(&choice.keeps));
        prop_assert_eq!(choice.operations, operations(&passes, &choice.keeps));
        prop_assert!(found.total() <= budget || budget < least, "{} of {}", found.total(), budget);
        prop_assert!(budget < all.max(least) || choice.operations == 0);
    }
}

#[test]
fn more_memory_means_less_recomputation() {
    let block = UnitPasses {
        input: 10,
        output: 10,
        input_grad: 10,
        saved: 100,
        products: 60,
        forward_peak: 120,
        recompute_peak: 100,
        backward_peak: 150,
        forward_cost: cost(1000),
        backward_cost: cost(2000),
        recompute_cost: cost(10),
        ..UnitPasses::default()
    };
    let embedding = UnitPasses { output: 10, forward_peak: 10, backward_peak: 10, ..UnitPasses::default() };
    let head = UnitPasses { output: 0, ..block };
    let mut passes = vec![block; 10];
    (passes[0], passes[9]) = (embedding, head);
    let operations = |total: usize| {
        let room = vec![PassBytes { forward: total, backward: total }; passes.len()];
        cheapest_keeps(&passes, &room).map(|choice| choice.operations)
    };
    assert_eq!(operations(8 * 100 + 150), Some(0));
    assert_eq!(operations(8 * 100 + 149), Some(10), "one block keeps its products");
    assert_eq!(operations(8 * 60 + 150), Some(80));
    assert_eq!(operations(8 * 60 + 149), Some(1060), "and what that leaves lets another keep all");
    assert_eq!(operations(7 * 10 + 160), Some(8000));
    assert_eq!(operations(150), None);
}

#[test]
fn the_largest_choice_that_fits_is_found_if_all_need_more_than_estimated() {
    let block = [10, 90, 30, 20, 5, 60, 10, 1000];
    let passes = sizes(&[block, [10, 70, 20, 20, 5, 60, 10, 900], [10, 50, 20, 20, 5, 60, 10, 700], block]);
    // Every choice but the first one needs some bytes more than the first dry run lets expect.
    let more_bytes = 13;
    let dry_run = |keeps: &[Keep]| {
        let mut found = run(&passes, keeps);
        if keeps != inputs_only(&passes).keeps {
            found.memory.at_peak = activation_bytes(found.memory.at_peak.total() + more_bytes);
        }
        found
    };
    let needs = |keeps: &[Keep]| dry_run(keeps).memory.total();
    let most = needs(&vec![Keep::All; passes.len()]);
    for device in needs(&inputs_only(&passes).keeps)..=most {
        let bounds = MemoryBounds { device, host: 0, machine: usize::MAX / 2 };
        let found = fit_keeps(&passes, &batch(&passes), bounds, |keeps| Ok::<_, Infallible>(dry_run(keeps)));
        let (choice, memory) = found.unwrap();
        let fitting = every_choice(&passes).into_iter().filter(|keeps| needs(keeps) <= device);
        let least = fitting.map(|keeps| operations(&passes, &keeps)).min();
        assert_eq!((bounds.excess(&memory), Some(choice.operations)), (0, least), "{device} bytes");
    }
}

#[test]
fn an_excess_that_recomputation_does_not_reduce_ends_the_search() {
    let passes = sizes(&[[5, 9, 4, 2, 3, 4, 5, 40]; 3]);
    let bounds = MemoryBounds { device: usize::MAX / 4, host: 0, machine: usize::MAX / 2 };
    // One byte too many in host memory, whatever units keep.
    let mut num_runs = 0;
    let dry_run = |keeps: &[Keep]| {
        num_runs += 1;
        let mut found = run(&passes, keeps);
        found.memory.host = 1;
        Ok::<_, Infallible>(found)
    };
    fit_keeps(&passes, &batch(&passes), bounds, dry_run).unwrap();
    assert!(num_runs <= 1 + ATTEMPTS_MAX, "{num_runs}");
}
