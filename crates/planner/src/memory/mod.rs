//! How many bytes are in use at each line of a program: the same takings and givings as the executor's, as numbers.

mod gradients;
mod hierarchy;
mod host;
mod messages;
mod parameters;
mod passes;
mod pool;
mod updates;

use crate::setup::MemorySetup;
use crate::usage::{CategoryBytes, Prediction, Usage};
use gradients::Gradients;
use host::Host;
pub(crate) use host::state_bytes;
use messages::Messages;
use parameters::Parameters;
use passes::Passes;
pub(crate) use passes::kept;
use trireme_schedule::{Action, Program, StateClass, StateOf};
use updates::Updates;

#[cfg(test)]
mod tests;

/// Steps that are gone through: what the first one takes for later ones is there in the second.
const NUM_STEPS: usize = 2;

/// What a rank takes at most while it repeats `program`. Cost: some operations an action.
///
/// # Panics
/// If the program is not valid, or has another number of units.
pub fn predict(setup: &MemorySetup, program: &Program) -> Prediction {
    walk(setup, program, |_, _| ())
}

/// As [`predict`]; `see` is told what each category takes at most during each action.
pub(crate) fn walk(
    setup: &MemorySetup,
    program: &Program,
    mut see: impl FnMut(Action, CategoryBytes),
) -> Prediction {
    assert_eq!(setup.units.len(), program.outline.chain.num_units, "the program is for these units");
    let mut usage = Usage::new();
    let mut parameters = Parameters::new(setup, &program.outline, &mut usage);
    let mut gradients = Gradients::new(setup, &program.outline, &mut usage);
    let mut passes = Passes::new(setup, program.outline.num_microbatches);
    let mut updates = Updates::new(setup);
    let mut host = Host::new(setup, &program.outline);
    let mut messages = Messages::new(setup, &program.outline);
    for _ in 0..NUM_STEPS {
        passes.begin(&program.outline, &mut usage);
        let mut is_finished = false;
        for (index, &action) in program.actions.iter().enumerate() {
            // As in the program's text, which begins with a line of sizes.
            usage.set_line(index + 2);
            parameters.await_units(action, &program.outline, &mut usage);
            host.begin(action);
            if action.uses() == [StateClass::Activations] {
                let state = action.state(StateClass::Activations);
                host.restore_activations(state, passes.restore(state.unit, state.microbatch, &mut usage));
            }
            if messages.begin(action) {
                passes.arrive(action, &mut usage);
            }
            match action {
                Action::Send(message) => {
                    messages.send(message, &mut usage);
                    passes.leave_sent(message, &mut usage);
                }
                Action::Receive(message) => messages.receive(message, &mut usage),
                Action::Forward { unit, microbatch, keep } => {
                    passes.forward(unit, microbatch, keep, &mut usage);
                }
                Action::Recompute { unit, microbatch } => passes.recompute(unit, microbatch, &mut usage),
                Action::Backward { unit, microbatch } => {
                    gradients.prepare(unit, &mut usage);
                    messages.complete(unit, &mut usage);
                    passes.leave_output(microbatch, &mut usage);
                    gradients.open(unit, &mut usage);
                    passes.backward(unit, microbatch, &mut usage);
                    gradients.close(unit, &mut usage);
                }
                Action::BackwardInput { unit, microbatch } => {
                    passes.leave_output(microbatch, &mut usage);
                    passes.backward_input(unit, microbatch, &mut usage);
                }
                Action::BackwardWeight { unit, microbatch } => {
                    gradients.prepare(unit, &mut usage);
                    messages.complete(unit, &mut usage);
                    gradients.open(unit, &mut usage);
                    passes.backward_weight(unit, microbatch, &mut usage);
                    gradients.close(unit, &mut usage);
                }
                Action::Unshard { unit } => parameters.unshard(unit, &mut usage),
                Action::Reshard { unit } => parameters.reshard(unit),
                Action::ReduceGrad { unit } => {
                    // Of the next step, if the pipeline does not drain between updates.
                    is_finished = false;
                    gradients.reduce(unit, &mut usage);
                }
                Action::Fetch(_) => (),
                Action::Evict(state @ StateOf { class, unit, microbatch }) => {
                    match class {
                        StateClass::Activations => {
                            host.evict_activations(passes.evict(unit, microbatch, &mut usage));
                        }
                        StateClass::Gradients if !is_finished => gradients.finish_ahead(unit, &mut usage),
                        _ => (),
                    }
                    host.evict(state);
                }
                Action::Step { unit } => {
                    if !std::mem::replace(&mut is_finished, true) {
                        gradients.finish(&mut usage);
                        if program.outline.asynchronous.is_none() {
                            messages.finish();
                        }
                    }
                    gradients.read(unit, &mut usage);
                    updates.step(unit, &mut usage);
                }
                Action::Stash { unit } => parameters.stash(unit, &mut usage),
                Action::Unstash { unit } => parameters.unstash(unit),
            }
            see(action, usage.line_peaks());
        }
        messages.finish();
    }
    Prediction { host: host.peak(), ..usage.found() }
}
