//! `trace.json` in Chrome's trace format (Google, "Trace Event Format", the JSON object form), with a process for each rank and a thread
//! for each stream, and one for kernels on a GPU. An event is named by the text of its action, such as `F 1 0`. `otherData` has the header
//! of each rank's program, and the duration of each step.

use super::{RankPlace, RankTimeline, TRACE_FILE, TracedAction, TracedStep};
use crate::error::TrainError;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use trireme_base::{read_at_most, replace_file};
use trireme_schedule::{Action, ProgramHeader, Stream};

/// The version of the format that is written and read.
const FORMAT: u32 = 4;
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Maximum number of steps. No run writes as many.
const STEPS_MAX: usize = 64;
/// Maximum number of units times microbatches.
const PASSES_MAX: usize = 1 << 22;
/// The maximum world size.
const RANKS_MAX: usize = 1 << 16;
/// Upper bound of times in microseconds: a year.
const MICROSECONDS_MAX: f64 = 3.2e13;
/// Maximum duration of a step: a day. A sum over [`RANKS_MAX`] ranks does not overflow.
const STEP_NANOSECONDS_MAX: u64 = 86_400_000_000_000;
/// Category of events that are not actions, but the wait before an action.
const WAITING: &str = "waiting";
/// Category of events for the kernels of an action on a GPU.
const KERNELS: &str = "kernels";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    display_time_unit: Cow<'a, str>,
    other_data: Header,
    trace_events: Vec<Event<'a>>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: u32,
    ranks: Vec<HeaderRank>,
    steps: Vec<HeaderStep>,
}

#[derive(Serialize, Deserialize)]
struct HeaderStep {
    step: u64,
    model_flops: f64,
    /// Duration of the step on each rank, in nanoseconds.
    durations: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
struct HeaderRank {
    #[serde(flatten)]
    place: RankPlace,
    outline: String,
    peak_flops: Option<f64>,
}

#[derive(Serialize, Deserialize)]
struct Event<'a> {
    name: Cow<'a, str>,
    #[serde(default)]
    cat: Cow<'a, str>,
    ph: Cow<'a, str>,
    /// The rank.
    pid: usize,
    /// The stream.
    tid: usize,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    args: Arguments<'a>,
}

#[derive(Default, Serialize, Deserialize)]
struct Arguments<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    microbatch: Option<usize>,
    /// The time in microseconds at which the rank reached the action.
    #[serde(skip_serializing_if = "Option::is_none")]
    issued: Option<f64>,
    /// Floating-point operations of the action's matrix products.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    product_flops: Option<u64>,
    /// The times in microseconds at which the action's kernels began and ended on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kernels: Option<[f64; 2]>,
}

const STREAMS: [(Stream, &str); 4] = [
    (Stream::Compute, "compute"),
    (Stream::DataParallel, "data-parallel communication"),
    (Stream::Pipeline, "pipeline"),
    (Stream::Offload, "offload"),
];

/// The thread of kernels on a GPU.
const KERNEL_THREAD: usize = STREAMS.len();

/// Writes steps to a file. An earlier file stays complete until it is replaced.
pub(super) fn write(path: &Path, steps: &[TracedStep]) -> io::Result<()> {
    replace_file(path, |file| {
        serde_json::to_writer(&mut *file, &document(steps))?;
        file.write_all(b"\n")
    })
}

fn document(steps: &[TracedStep]) -> Document<'static> {
    let ranks = steps.last().map_or(&[][..], |step| &step.ranks);
    let header = |rank: &RankTimeline| HeaderRank {
        place: rank.place,
        outline: rank.header.to_string(),
        peak_flops: rank.peak_flops,
    };
    let header_step = |step: &TracedStep| HeaderStep {
        step: step.step,
        model_flops: step.model_flops,
        durations: step.ranks.iter().map(|rank| rank.duration).collect(),
    };
    let origin = steps.first().map_or(0, |step| step.began);
    let mut events = Vec::new();
    for RankTimeline { place, actions, .. } in ranks {
        let RankPlace { rank, pipeline_rank, data_rank, .. } = place;
        let name = format!("rank {rank} (pipeline {pipeline_rank}, data {data_rank})");
        events.push(named("process_name", *rank, 0, name));
        for (stream, name) in STREAMS {
            events.push(named("thread_name", *rank, stream as usize, name.to_owned()));
        }
        if actions.iter().any(|traced| traced.kernels.is_some()) {
            events.push(named("thread_name", *rank, KERNEL_THREAD, "kernels on the GPU".to_owned()));
        }
    }
    for step in steps {
        // The clocks of a run are monotonic.
        let began = step.began.saturating_sub(origin);
        for rank in &step.ranks {
            rank.actions
                .iter()
                .for_each(|traced| push_action(&mut events, step.step, began, rank.place.rank, traced));
        }
    }
    Document {
        display_time_unit: "ms".into(),
        other_data: Header {
            format: FORMAT,
            ranks: ranks.iter().map(header).collect(),
            steps: steps.iter().map(header_step).collect(),
        },
        trace_events: events,
    }
}

/// Returns the event that names a process or a thread.
fn named(what: &'static str, pid: usize, tid: usize, name: String) -> Event<'static> {
    let args = Arguments { name: Some(name.into()), ..Arguments::default() };
    Event { name: what.into(), cat: "".into(), ph: "M".into(), pid, tid, ts: 0.0, dur: 0.0, args }
}

fn push_action(events: &mut Vec<Event<'static>>, step: u64, began: u64, pid: usize, traced: &TracedAction) {
    let &TracedAction { action, issued, start, end, product_flops, kernels } = traced;
    let microseconds = |time: u64| (began + time) as f64 / 1e3;
    let name = action.to_string();
    let mut push = |name: String, cat: &'static str, from: u64, to: u64| {
        let is_action = cat != WAITING && cat != KERNELS;
        let args = Arguments {
            step: Some(step),
            unit: Some(action.unit()),
            microbatch: action.microbatch(),
            issued: (cat != KERNELS).then(|| microseconds(issued)),
            product_flops: Some(product_flops).filter(|flops| *flops > 0 && is_action),
            kernels: kernels.filter(|_| is_action).map(|times| times.map(microseconds)),
            name: None,
        };
        let (ts, dur) = (microseconds(from), (to - from) as f64 / 1e3);
        let tid = if cat == KERNELS { KERNEL_THREAD } else { action.stream() as usize };
        events.push(Event { name: name.into(), cat: cat.into(), ph: "X".into(), pid, tid, ts, dur, args });
    };
    // Waits of less than a microsecond are left out.
    if start - issued >= 1000 {
        push(format!("waits to {name}"), WAITING, issued, start);
    }
    if let Some([began, ended]) = kernels.filter(|[began, ended]| began < ended) {
        push(name.clone(), KERNELS, began, ended);
    }
    push(name, STREAMS[action.stream() as usize].1, start, end);
}

/// Reads the steps in the trace of a run's folder, in their order. Each has actions of every rank.
///
/// # Errors
/// [`TrainError::NoTrace`], [`TrainError::ReadTrace`], or [`TrainError::DamagedTrace`] if the file is not a trace: if times go back, if
/// ranks do not form a world, or if a program has more units, microbatches or steps than any run has.
pub fn read(folder: &Path) -> Result<Vec<TracedStep>, TrainError> {
    let path = folder.join(TRACE_FILE);
    let unreadable = |source: io::Error| match source.kind() {
        ErrorKind::NotFound => TrainError::NoTrace { folder: folder.to_owned() },
        _ => TrainError::ReadTrace { path: path.clone(), source },
    };
    let text = read_at_most(&path, FILE_BYTES_MAX).map_err(unreadable)?;
    steps(&text).map_err(|what| TrainError::DamagedTrace { path, what })
}

fn steps(text: &[u8]) -> Result<Vec<TracedStep>, String> {
    let document: Document<'_> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let Header { format, ranks, steps: headers } = document.other_data;
    if format != FORMAT {
        return Err(format!("its format is {format}, but this program reads {FORMAT}"));
    }
    if headers.len() > STEPS_MAX {
        return Err(format!("it has more than {STEPS_MAX} steps"));
    }
    // Each rank has an event with its name.
    if !(1..=RANKS_MAX.min(document.trace_events.len())).contains(&ranks.len()) {
        return Err(format!("it claims to have {} ranks", ranks.len()));
    }
    let ranks = check_ranks(ranks)?;
    let mut steps: BTreeMap<u64, Vec<Vec<TracedAction>>> = BTreeMap::new();
    for (index, event) in document.trace_events.iter().enumerate() {
        if event.ph != "X" || event.cat == WAITING || event.cat == KERNELS {
            continue;
        }
        let wrong = |what: &str| format!("event {index} ({:?}) {what}", event.name);
        let step = event.args.step.ok_or_else(|| wrong("has no step"))?;
        let actions = steps.entry(step).or_insert_with(|| vec![Vec::new(); ranks.len()]);
        let actions =
            actions.get_mut(event.pid).ok_or_else(|| wrong("belongs to a rank that does not exist"))?;
        let traced = traced(event).ok_or_else(|| wrong("is not an action with valid times"))?;
        if actions.last().is_some_and(|last| last.end > traced.issued) {
            return Err(wrong("begins before the previous one has ended"));
        }
        actions.push(traced);
        if steps.len() > STEPS_MAX {
            return Err(format!("it has more than {STEPS_MAX} steps"));
        }
    }
    let assembled = steps.into_iter().map(|(step, actions)| {
        let header = headers.iter().find(|header| header.step == step);
        let header = header.ok_or_else(|| format!("it does not tell how long step {step} took"))?;
        assemble(header, actions, &ranks)
    });
    assembled.collect()
}

/// Checks that the ranks form data-parallel pipelines, and that their program headers differ only in the rank. Returns their timelines
/// without actions.
fn check_ranks(ranks: Vec<HeaderRank>) -> Result<Vec<RankTimeline>, String> {
    let of_first = |rank: &&HeaderRank| rank.place.pipeline_rank == 0;
    let data_degree = ranks.iter().filter(of_first).count();
    let mut checked: Vec<RankTimeline> = Vec::with_capacity(ranks.len());
    for (index, HeaderRank { place, outline, peak_flops }) in ranks.into_iter().enumerate() {
        let header: ProgramHeader =
            outline.parse().map_err(|_| format!("rank {index} has an invalid outline {outline:?}"))?;
        let sizes = header.chain.num_units.checked_mul(header.num_microbatches);
        let has_sizes = sizes.is_some_and(|sizes| (1..=PASSES_MAX).contains(&sizes));
        let is_chain = header.chain.is_consistent();
        let first = checked.first().map_or(&header, |first| &first.header);
        let is_alike = ProgramHeader { rank: first.rank, ..header.clone() } == *first;
        let is_there = data_degree > 0
            && (place.rank, place.pipeline_rank, place.data_rank)
                == (index, index / data_degree, index % data_degree);
        // Without stages each rank is the only one of its pipeline.
        let is_placed = is_there && (header.rank == place.pipeline_rank);
        if !(has_sizes && is_chain && is_alike && is_placed) {
            return Err(format!(
                "rank {index}, with the outline \"{header}\", does not match the other ranks"
            ));
        }
        if peak_flops.is_some_and(|peak| !(peak.is_finite() && peak > 0.0)) {
            return Err(format!("rank {index} has an invalid peak"));
        }
        checked.push(RankTimeline { place, header, peak_flops, duration: 0, actions: Vec::new() });
    }
    Ok(checked)
}

fn traced(event: &Event<'_>) -> Option<TracedAction> {
    let nanoseconds =
        |time: f64| (0.0..MICROSECONDS_MAX).contains(&time).then(|| (time * 1e3).round() as u64);
    let action: Action = event.name.parse().ok()?;
    let (issued, start) = (nanoseconds(event.args.issued?)?, nanoseconds(event.ts)?);
    let end = start + nanoseconds(event.dur)?;
    let product_flops = event.args.product_flops.unwrap_or_default();
    let kernels = match event.args.kernels {
        Some([began, ended]) => Some([nanoseconds(began)?, nanoseconds(ended)?]),
        None => None,
    };
    let are_ordered =
        issued <= start && kernels.is_none_or(|[began, ended]| issued <= began && began <= ended);
    are_ordered.then_some(TracedAction { action, issued, start, end, product_flops, kernels })
}

fn assemble(
    header: &HeaderStep,
    actions: Vec<Vec<TracedAction>>,
    ranks: &[RankTimeline],
) -> Result<TracedStep, String> {
    let &HeaderStep { step, model_flops, ref durations } = header;
    let firsts = actions.iter().map(|actions| actions.first().map(|first| first.issued));
    let began = firsts.collect::<Option<Vec<u64>>>().and_then(|firsts| firsts.into_iter().min());
    let began = began.ok_or_else(|| format!("a rank has no actions in step {step}"))?;
    let ended = actions.iter().flatten().map(|traced| traced.end).max().unwrap_or(began);
    if (ended - began).max(durations.iter().copied().max().unwrap_or(0)) > STEP_NANOSECONDS_MAX {
        return Err(format!("step {step} takes longer than a day"));
    }
    if durations.len() != ranks.len() || !(model_flops.is_finite() && model_flops >= 0.0) {
        return Err(format!("what it tells of step {step} as a whole does not fit its ranks"));
    }
    let from_beginning = |traced: TracedAction| TracedAction {
        issued: traced.issued - began,
        start: traced.start - began,
        end: traced.end - began,
        kernels: traced.kernels.map(|times| times.map(|time| time - began)),
        ..traced
    };
    let rank = |((rank, &duration), actions): ((&RankTimeline, &u64), Vec<TracedAction>)| RankTimeline {
        duration,
        actions: actions.into_iter().map(from_beginning).collect(),
        ..rank.clone()
    };
    let ranks: Vec<RankTimeline> = ranks.iter().zip(durations).zip(actions).map(rank).collect();
    match ranks.iter().find(|rank| rank.duration < rank.program_time()) {
        Some(rank) => Err(format!("step {step} ends before the actions of rank {}", rank.place.rank)),
        None => Ok(TracedStep { step, began, model_flops, ranks }),
    }
}
