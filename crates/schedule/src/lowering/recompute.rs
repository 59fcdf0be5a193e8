use crate::action::{Action, Keep};
use crate::program::Program;

/// Makes forward of each unit keep the activations that its element of `keeps` selects, and recomputes the others before backward (Chen et
/// al., "Training deep nets with sublinear memory cost", 2016, section 4).
///
/// A segment is a unit that keeps its input, and the consecutive units above it that keep nothing. A unit that keeps its products is a
/// segment on its own. Before backward of a segment's last unit, the whole segment is recomputed, from its first unit to its last. Segments
/// end where pipeline stages end, because the input that a stage receives is kept.
///
/// # Panics
/// If `keeps` does not have one element per unit, or if the input of a unit that keeps nothing is not recomputed, because the unit below
/// has neither [`Keep::Input`] nor [`Keep::Nothing`].
pub fn recompute(program: Program, keeps: &[Keep]) -> Program {
    let Program { header, actions } = program;
    assert_eq!(keeps.len(), header.chain.num_units, "one choice for each unit");
    let is_stage_start = |unit: usize| header.stages.iter().any(|stage| stage.units.start == unit);
    let keep_received = |(unit, &keep): (usize, &Keep)| match keep {
        Keep::Nothing if is_stage_start(unit) => Keep::Input,
        keep => keep,
    };
    let keeps: Vec<Keep> = keeps.iter().enumerate().map(keep_received).collect();
    for (unit, keep) in keeps.iter().enumerate() {
        let below = unit.checked_sub(1).map(|below| keeps[below]);
        let is_recomputed = matches!(below, Some(Keep::Input | Keep::Nothing));
        assert!(*keep != Keep::Nothing || is_recomputed, "nothing makes the input of unit {unit} again");
    }
    let segment_start = |unit: usize| {
        let kept = (0..=unit).rev().find(|&unit| keeps[unit] != Keep::Nothing);
        kept.expect("the first unit keeps something")
    };
    let is_segment_end = |unit: usize| keeps.get(unit + 1) != Some(&Keep::Nothing);
    let mut lowered = Vec::with_capacity(2 * actions.len());
    for action in actions {
        match action {
            Action::Forward { unit, microbatch, .. } => {
                lowered.push(Action::Forward { unit, microbatch, keep: keeps[unit] });
            }
            Action::Backward { unit, microbatch } | Action::BackwardInput { unit, microbatch } => {
                if keeps[unit] != Keep::All && is_segment_end(unit) {
                    let segment = segment_start(unit)..=unit;
                    lowered.extend(segment.map(|unit| Action::Recompute { unit, microbatch }));
                }
                lowered.push(action);
            }
            other => lowered.push(other),
        }
    }
    Program { header, actions: lowered }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::UnitChain;
    use crate::single;

    #[test]
    fn a_segment_is_recomputed_from_its_first_input() {
        let keeps = [Keep::All, Keep::Input, Keep::Nothing, Keep::Products, Keep::All];
        let expected = "\
units 5 microbatches 1
F 0 0
F 1 0 keep input
F 2 0 keep nothing
F 3 0 keep products
F 4 0
B 4 0
REDUCE_GRAD 4
R 3 0
B 3 0
REDUCE_GRAD 3
R 1 0
R 2 0
B 2 0
REDUCE_GRAD 2
B 1 0
REDUCE_GRAD 1
B 0 0
REDUCE_GRAD 0
STEP 0
STEP 1
STEP 2
STEP 3
STEP 4
";
        assert_eq!(recompute(single::program(&UnitChain::of_units(5), 1), &keeps).to_string(), expected);
    }

    #[test]
    #[should_panic(expected = "nothing makes the input of unit 1 again")]
    fn an_input_that_nothing_makes_is_refused() {
        recompute(single::program(&UnitChain::of_units(2), 1), &[Keep::All, Keep::Nothing]);
    }
}
