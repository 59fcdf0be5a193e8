//! Pipeline parallelism: the passes of each rank and their order, as data.
//!
//! The units of a model are partitioned into *stages*, and each rank holds one or several stages. A [`Schedule`] says in which order a rank
//! runs its stages' [`Pass`]es. [`generate`] generates a schedule; [`simulate`] computes its times, its bubble and its memory for given
//! [`Costs`]; [`validate`] checks it; [`draw_text`] and [`draw_svg`] draw it.
//!
//! Notation: `P` ranks, `M` microbatches, `V` stages per rank; `F`, `I`, `W` are the times of forward and of the input and weight halves of
//! backward, `B = I + W`. The lost time is [`Timeline::lost`]. Activations in flight are counted in stages, on the rank that holds the
//! most. The reported bubble is the idle part of all ranks' time ([`Timeline::bubble`]): `(P - 1) / (M + P - 1)` for GPipe and 1F1B.
//!
//! | [`ScheduleKind`] | `V` | lost time | activations | holds for |
//! |---|---|---|---|---|
//! | `gpipe` | 1 | `(P - 1) (F + B)` | `M` | |
//! | `1f1b` | 1 | `(P - 1) (F + B)` | `min(P, M)` | |
//! | `interleaved-1f1b` | 2 or more | `(P - 1) (F + B)`, of a stage | `min((V + 1) P - 1, V M)` if `P` divides `M` | `M >= P` |
//! | `breadth-first` | any | `(P - 1) (F + B)`, of a stage | `V M` | `M >= P` |
//! | `zb-h1` | 1 | `(P - 1) (F + I - W)` | `min(P, M)` | `M >= P`, `W <= min(F, I)` |
//! | `zb-h2` | 1 | `(P - 1) (F + I - 2 W)` | `min(2 P - 1, M)` | `M >= 2 P - 1`, `W <= min(F, I)` |
//! | `zb-v` | 2 | 0 for `F = I = W` | `2 P` | `M >= 2 P - 1` |
//! | `dualpipe-v` | 2 | `(P - 1) F` for `F = I = W` | `2 P + 1` | `M >= 2 P`, refused below |
//! | `pipedream` | 1 | none between steps | `P` | weight versions: `P` for `M = 1` |
//! | `pipedream-2bw` | 1 | none between steps | `P` | `M >= P`, refused below; weight versions: 2 |
//! | `auto` | any | from a search; never slower than the other synchronous schedules that fit | within the given bounds | |
//!
//! # Adding a schedule
//! A schedule is a generator in its own file, with source, lost time and memory, and a [`ScheduleKind`] with its specification in
//! `kind.rs`. A golden text and the properties in `tests/` check it.

mod automatic;
mod breadth_first;
mod clock;
mod costs;
mod draw;
mod dualpipe_v;
mod error;
mod folded;
mod generate;
mod gpipe;
mod interleaved;
mod kind;
mod messages;
mod one_f_one_b;
mod partition;
mod pass;
mod pipedream;
mod programs;
mod range_checks;
mod schedule;
mod sizes;
#[cfg(test)]
mod tests;
mod text;
mod timeline;
mod validate;
mod versions;
mod zero_bubble;
mod zero_bubble_v;

pub use clock::simulate;
pub use costs::{Costs, CostsError, StageCosts, TICKS_MAX};
pub use draw::{Picture, draw_error, draw_svg, draw_svg_together, draw_text, draw_text_together};
pub use error::{PassFault, PassIndex, ScheduleError, Wait, WaitChain};
pub use generate::{GenerateError, generate};
pub use kind::ScheduleKind;
pub use partition::partition_units;
pub use pass::{Pass, PassKind};
pub use programs::programs;
pub use schedule::{PASSES_MAX, Schedule, StagePlacement, WeightVersions};
pub use sizes::Sizes;
pub use timeline::{LostTime, PassInterval, Timeline};
pub use validate::validate;
