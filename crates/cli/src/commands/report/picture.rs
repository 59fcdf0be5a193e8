//! Step programs over time as passes of stages, for drawing.

use trireme_planner::StepTimeline;
use trireme_schedule::pipeline::{Pass, PassInterval, PassKind, Schedule, Timeline, WeightVersions};
use trireme_schedule::{Action, Program, ProgramHeader};

/// The passes of a step, when they ran, and the updates after them.
pub(super) struct StepPicture {
    pub(super) schedule: Schedule,
    pub(super) timeline: Timeline,
    /// Idle fraction of all ranks' time, as `Timeline::bubble` computes it. Updates after a drain do not count.
    pub(super) bubble: f64,
}

impl StepPicture {
    /// Builds the picture of the ranks of one pipeline. Consecutive passes of a stage's units become one pass.
    pub(super) fn new(programs: &[Program], timeline: &StepTimeline) -> Self {
        let header = &programs[0].header;
        let stage_ranks = match &header.stages[..] {
            [] => vec![0],
            stages => stages.iter().map(|stage| stage.rank).collect(),
        };
        let mut schedule = Schedule {
            num_microbatches: header.microbatches_per_step(),
            num_steps: header.num_steps(),
            weights: header.asynchronous.map_or(WeightVersions::Drained, |found| found.weights),
            stage_ranks,
            ranks: vec![Vec::new(); programs.len()],
        };
        let mut drawn = Timeline {
            ranks: vec![Vec::new(); programs.len()],
            makespan: timeline.makespan,
            busy: vec![0; programs.len()],
            activations_max: Vec::new(),
        };
        let mut push_all = |kinds: fn(PassKind) -> bool, drawn: &mut Timeline| {
            for (rank, (program, spans)) in programs.iter().zip(&timeline.ranks).enumerate() {
                let mut num_updates = vec![0; header.chain.num_units];
                for (&action, &span) in program.actions.iter().zip(spans) {
                    let pass = pass_of(action, header, &mut num_updates);
                    if let Some(pass) = pass.filter(|pass| kinds(pass.kind)) {
                        push(&mut schedule.ranks[rank], &mut drawn.ranks[rank], pass, span);
                        drawn.busy[rank] += span.ticks();
                    }
                }
            }
        };
        let is_drained = header.asynchronous.is_none();
        // Without a drain, updates run between the passes.
        push_all(if is_drained { |kind| kind != PassKind::Update } else { |_| true }, &mut drawn);
        let bubble = drawn.bubble();
        if is_drained {
            push_all(|kind| kind == PassKind::Update, &mut drawn);
        }
        StepPicture { schedule, timeline: drawn, bubble }
    }
}

/// Returns the pass of a stage that an action belongs to. `num_updates` counts the updates of each unit so far. Recomputation belongs to
/// backward.
fn pass_of(action: Action, header: &ProgramHeader, num_updates: &mut [usize]) -> Option<Pass> {
    let stage_of = |unit: usize| header.stages.iter().position(|stage| stage.units.contains(&unit));
    let stage = stage_of(action.unit()).unwrap_or(0);
    match action {
        Action::Forward { microbatch, .. } => Some(Pass::forward(stage, microbatch)),
        Action::Recompute { microbatch, .. } | Action::Backward { microbatch, .. } => {
            Some(Pass::backward(stage, microbatch))
        }
        Action::BackwardInput { microbatch, .. } => Some(Pass::backward_input(stage, microbatch)),
        Action::BackwardWeight { microbatch, .. } => Some(Pass::backward_weight(stage, microbatch)),
        Action::Step { unit } => {
            num_updates[unit] += 1;
            Some(Pass::update(stage, num_updates[unit] * header.microbatches_per_step() - 1))
        }
        _ => None,
    }
}

/// Appends a pass, or extends the last one if it is the same pass.
fn push(passes: &mut Vec<Pass>, spans: &mut Vec<PassInterval>, pass: Pass, span: PassInterval) {
    match (passes.last(), spans.last_mut()) {
        (Some(&last), Some(last_span)) if last == pass => last_span.end = span.end,
        _ => {
            passes.push(pass);
            spans.push(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_a_stage_are_one_pass_and_waits_are_no_work() {
        let program: Program = "units 3 microbatches 2\nF 0 0\nF 1 0\nF 2 0\nB 2 0\nR 1 0\nB 1 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0\nSTEP 1"
            .parse()
            .unwrap();
        let times = [
            (0, 10),
            (10, 20),
            (25, 40),
            (40, 60),
            (60, 70),
            (70, 90),
            (90, 100),
            (0, 500),
            (120, 130),
            (130, 140),
        ];
        let spans = times.map(|(start, end)| PassInterval { start, end }).to_vec();
        let timeline = StepTimeline { ranks: vec![spans], makespan: 140 };
        let picture = StepPicture::new(&[program], &timeline);
        assert_eq!(
            picture.schedule.ranks[0],
            [Pass::forward(0, 0), Pass::backward(0, 0), Pass::update(0, 1)]
        );
        let span = |start, end| PassInterval { start, end };
        assert_eq!(picture.timeline.ranks[0], [span(0, 40), span(40, 100), span(120, 140)]);
        assert_eq!(picture.bubble, 1.0 - 95.0 / 100.0);
    }

    #[test]
    fn updates_without_a_drain_are_between_the_passes() {
        let program: Program = "units 1 microbatches 2 steps 2 weights stashed\nF 0 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0\nF 0 1\nB 0 1\nREDUCE_GRAD 0\nSTEP 0"
            .parse()
            .unwrap();
        let spans = (0..8).map(|place| PassInterval { start: 10 * place, end: 10 * place + 10 }).collect();
        let picture = StepPicture::new(&[program], &StepTimeline { ranks: vec![spans], makespan: 80 });
        let passes =
            [0, 1].map(|step| [Pass::forward(0, step), Pass::backward(0, step), Pass::update(0, step)]);
        assert_eq!(picture.schedule.ranks[0], passes.concat());
    }
}
