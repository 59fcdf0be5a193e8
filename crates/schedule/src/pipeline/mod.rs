//! Pipeline parallelism: what each rank does in which order, as data.
//!
//! The units of a model are cut into *stages*, and stages lie on ranks, one or several each. A [`Schedule`] says in
//! which order a rank runs its stages' [`Pass`]es. [`generate`] makes one; [`simulate`] tells its times, its bubble
//! and its memory for given [`Costs`]; [`validate`] proves it; [`draw_text`] and [`draw_svg`] show it.
//!
//! `P` ranks, `M` microbatches, `V` stages a rank; `F`, `I`, `W` are the times of forward and of the two halves of
//! backward, `B = I + W`. The lost time is that of [`Timeline::lost`]; activations in flight are
//! counted by stages, the most of any rank. The bubble, as it is shown everywhere, is the idle part of all ranks' time
//! ([`Timeline::bubble`]): of GPipe and 1F1B `(P - 1) / (M + P - 1)`.
//!
//! | [`Kind`] | `V` | lost time | activations | holds for |
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
//! | `auto` | any | least of all these and of what it finds | as bounded | |

mod automatic;
mod breadth_first;
mod clock;
mod costs;
mod cut;
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
mod pass;
mod pipedream;
mod programs;
mod schedule;
mod shape;
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
pub use cut::cut;
pub use draw::{Picture, draw_error, draw_svg, draw_svg_together, draw_text, draw_text_together};
pub use error::{PassFault, Place, Ring, ScheduleError, Wait};
pub use generate::{GenerateError, generate};
pub use kind::Kind;
pub use pass::{Pass, PassKind};
pub use programs::programs;
pub use schedule::{PASSES_MAX, Placement, Schedule, WeightVersions};
pub use sizes::Sizes;
pub use timeline::{LostTime, Span, Timeline};
pub use validate::validate;
