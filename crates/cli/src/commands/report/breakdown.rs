//! The parts of a traced step's time, over all workers.

use std::collections::HashMap;
use trireme_schedule::{Action, Message, Stream};
use trireme_train::trace::{RankTimeline, TracedStep};

/// Parts of the time that all workers spend in a step. Each worker's time is weighted by its peak FLOP/s, so that hardware FLOPs
/// utilization is one of the parts. With equal peaks, the parts are means over the workers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Breakdown {
    pub(super) step: u64,
    /// Model and hardware FLOPs utilization: the operations of matrix products that the model needs, and those that were
    /// executed, relative to the peaks. `None` if a peak is unknown.
    pub(super) utilization: Option<Utilization>,
    /// Time in kernels of passes and updates.
    computing: f64,
    /// Time waiting for messages and transfers that are in flight, and issuing them.
    exposed_communication: f64,
    /// Time waiting for pipeline ranks that still compute the data to be sent.
    bubble: f64,
    /// Time reading samples, and time before and after the step's program.
    outside: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Utilization {
    pub(super) model: f64,
    pub(super) hardware: f64,
}

impl Breakdown {
    pub(super) fn of(step: &TracedStep) -> Self {
        let peaks: Option<Vec<f64>> = step.ranks.iter().map(|rank| rank.peak_flops).collect();
        let producers = Producers::of(step);
        let [mut all, mut computing, mut exposed, mut bubble, mut outside, mut flops] = [0.0; 6];
        for (index, rank) in step.ranks.iter().enumerate() {
            let weight = peaks.as_ref().map_or(1.0, |peaks| peaks[index]);
            let of_rank = |nanoseconds: u64| weight * nanoseconds as f64;
            all += of_rank(rank.duration);
            outside += of_rank(rank.duration.saturating_sub(rank.program_time()));
            for traced in &rank.actions {
                flops += traced.product_flops as f64;
                if traced.action.stream() != Stream::Compute {
                    exposed += of_rank(traced.end - traced.issued);
                    continue;
                }
                let produced = producers.data_ready_at(rank, traced.action).unwrap_or(traced.issued);
                let produced = produced.clamp(traced.issued, traced.start);
                bubble += of_rank(produced - traced.issued);
                exposed += of_rank(traced.start - produced);
                computing += of_rank(traced.end - traced.start);
            }
        }
        let part = |time: f64| time / f64::max(all, 1.0);
        // `all` is in FLOP/s times nanoseconds.
        let utilization = |flops: f64| part(1e9 * flops);
        let (model, hardware) = (utilization(step.model_flops), utilization(flops));
        Breakdown {
            step: step.step,
            utilization: peaks.map(|_| Utilization { model, hardware }),
            computing: part(computing),
            exposed_communication: part(exposed),
            bubble: part(bubble),
            outside: part(outside),
        }
    }

    /// Returns the parts with their names. They add up to 1.
    pub(super) fn parts(&self) -> Vec<(&'static str, f64)> {
        let Breakdown { utilization, computing, exposed_communication, bubble, outside, .. } = *self;
        let computing = match utilization {
            Some(Utilization { hardware, .. }) => vec![
                ("matrix products at the peak (HFU)", hardware),
                ("kernels below the peak", computing - hardware),
            ],
            None => vec![("kernels", computing)],
        };
        let others = [
            ("exposed communication", exposed_communication),
            ("pipeline bubble", bubble),
            ("outside of the step program", outside),
        ];
        computing.into_iter().chain(others).collect()
    }

    /// Formats a title line and a line for each part.
    pub(super) fn to_text(&self) -> String {
        let mut text = format!("time of step {}, all workers{}\n", self.step, self.mfu());
        for (name, part) in self.parts() {
            text += &format!("{:8.1} %  {name}\n", 100.0 * part);
        }
        text
    }

    /// Returns the MFU as the end of a title; empty if it is unknown.
    pub(super) fn mfu(&self) -> String {
        self.utilization
            .map_or_else(String::new, |Utilization { model, .. }| format!("; MFU {:.1} %", 100.0 * model))
    }
}

/// Times at which pipeline ranks had computed the data that other ranks wait for.
struct Producers {
    /// Start of each send, by data rank (which identifies the pipeline) and message.
    sends: HashMap<(usize, Message), u64>,
    /// End of the last pass of each pipeline, by data rank.
    last_passes: HashMap<usize, u64>,
}

impl Producers {
    fn of(step: &TracedStep) -> Self {
        let (mut sends, mut last_passes) = (HashMap::new(), HashMap::new());
        for rank in &step.ranks {
            let pipeline = rank.place.data_rank;
            for traced in &rank.actions {
                match traced.action {
                    Action::Send(message) => drop(sends.insert((pipeline, message), traced.start)),
                    action if action.is_pass() => {
                        let last = last_passes.entry(pipeline).or_insert(0);
                        *last = traced.end.max(*last);
                    }
                    _ => (),
                }
            }
        }
        Producers { sends, last_passes }
    }

    /// Returns when other ranks of the pipeline had computed the data that an action of `rank` waits for; `None` if it waits for none.
    fn data_ready_at(&self, rank: &RankTimeline, action: Action) -> Option<u64> {
        let pipeline = rank.place.data_rank;
        match action {
            Action::Step { .. } if !rank.header.stages.is_empty() && rank.header.asynchronous.is_none() => {
                self.last_passes.get(&pipeline).copied()
            }
            _ => self.sends.get(&(pipeline, action.awaited_message()?)).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_schedule::Program;
    use trireme_train::trace::{RankPlace, TracedAction};

    /// Creates a rank whose program begins 10 ns after the step. Each action waits and then works for the given times; passes have 5
    /// operations per nanosecond of work.
    fn rank(index: usize, text: &str, peak: Option<f64>, times: &[(u64, u64)]) -> RankTimeline {
        let program: Program = text.parse().unwrap();
        let mut now = 10;
        let mut act = |(&action, &(waited, worked)): (&Action, &(u64, u64))| {
            let issued = now;
            now += waited + worked;
            let product_flops = if action.is_pass() { 5 * worked } else { 0 };
            TracedAction { action, issued, start: issued + waited, end: now, product_flops, kernels: None }
        };
        let actions: Vec<_> = program.actions.iter().zip(times).map(&mut act).collect();
        assert_eq!(actions.len(), program.actions.len());
        let place = RankPlace { rank: index, pipeline_rank: index, data_rank: 0, host: 0 };
        RankTimeline { place, header: program.header, peak_flops: peak, duration: 200, actions }
    }

    fn step(peaks: [Option<f64>; 2]) -> TracedStep {
        let ranks = vec![
            rank(
                0,
                "units 2 microbatches 1 rank 0 stage 0-1@0 stage 1-2@1\nF 0 0\nSEND_F 0 0\nRECV_B 1 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0",
                peaks[0],
                // The message is sent at 100, so 60 of the 72 are a bubble. The update waits only for a reduction.
                &[(0, 20), (0, 10), (0, 0), (72, 30), (0, 0), (10, 8)],
            ),
            rank(
                1,
                "units 2 microbatches 1 rank 1 stage 0-1@0 stage 1-2@1\nRECV_F 0 0\nF 1 0\nB 1 0\nSEND_B 1 0\nREDUCE_GRAD 1\nSTEP 1",
                peaks[1],
                // The message is sent at 30, so 20 of the 24 are a bubble. The other rank has passes until 142.
                &[(0, 0), (24, 26), (0, 40), (0, 0), (0, 0), (42, 8)],
            ),
        ];
        TracedStep { step: 7, began: 0, model_flops: 400.0, ranks }
    }

    #[test]
    fn the_time_of_all_workers_has_named_parts_that_add_up() {
        let found = Breakdown::of(&step([None; 2]));
        assert_eq!(found.utilization, None);
        let expected = [
            ("kernels", 20 + 30 + 8 + 26 + 40 + 8),
            ("exposed communication", 10 + 12 + 10 + 4),
            ("pipeline bubble", 60 + 20 + 42),
            ("outside of the step program", 50 + 60),
        ];
        let parts = found.parts();
        assert_eq!(parts, expected.map(|(name, time)| (name, f64::from(time) / 400.0)));
        assert!((parts.iter().map(|(_, part)| part).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn workers_are_weighted_by_their_peaks() {
        // 10 and 30 operations a nanosecond.
        let found = Breakdown::of(&step([Some(1e10), Some(3e10)]));
        let all = f64::from(10 * 200 + 30 * 200);
        let Utilization { model, hardware } = found.utilization.unwrap();
        assert_eq!((model, hardware), (400.0 / all, f64::from(5 * (20 + 30 + 26 + 40)) / all));
        let parts = found.parts();
        assert_eq!(parts[0].1, hardware);
        assert!((parts[1].1 - (f64::from(10 * 58 + 30 * 74) / all - hardware)).abs() < 1e-9);
        assert!((parts.iter().map(|(_, part)| part).sum::<f64>() - 1.0).abs() < 1e-9);
        let text = found.to_text();
        assert!(text.starts_with("time of step 7, all workers; MFU 5.0 %\n"), "{text}");
        assert!(text.contains("\n     7.2 %  matrix products at the peak (HFU)\n"), "{text}");
    }
}
