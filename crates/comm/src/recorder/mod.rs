//! The flight recorder: records the recent operations of this rank's groups, to explain failures and hangs.
//!
//! Every operation is recorded when it is issued, when its execution begins and when it ends, with three short locks and no allocation.
//! When an operation takes long or fails, or a peer reports a failure, the rank reports its place to its peers, and a separate thread
//! writes the records to a file. [`Diagnosis`] combines the reports of several ranks.

mod clock;
mod diagnosis;
mod file;
mod group_log;
mod group_recorder;
mod operation_fields;
mod options;
mod program_line;
mod report;
mod ring;
mod text;
mod writer;

pub use diagnosis::{Diagnosis, Difference, Disagreement, Finding, OperationVariant, Source};
pub use file::{ReadReportsError, read_reports, remove_reports, report_path};
pub(crate) use group_recorder::GroupRecorder;
pub(crate) use operation_fields::OperationFields;
pub use options::RecorderOptions;
pub use program_line::ProgramLine;
pub(crate) use report::ReportedPlace;
pub use report::{
    Direction, FailureReport, GroupReport, IssuedOperation, MessagePeer, Occasion, OperationReport,
    OperationState, Place, RankReport,
};
pub(crate) use ring::Issued;
pub(crate) use text::{GroupName, ProgramLineText};

use crate::CommError;
use crate::host_name::host_name;
use clock::Clock;
use group_log::GroupLog;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use trireme_base::{Heartbeat, Rank};
use writer::ReportWriter;

/// Number of dropped groups whose records are kept.
const NUM_DROPPED_KEPT: usize = 8;

/// A handle to the records of this rank's groups: its world and all groups split from it. It outlives the groups.
#[derive(Clone)]
pub struct FlightRecorder(Arc<Shared>);

struct Shared {
    rank: Rank,
    world_size: usize,
    groups: Mutex<Vec<Arc<GroupLog>>>,
    /// The worst occasion so far. Locked while a report is passed to the writer, so that the last report has the worst occasion.
    worst: Mutex<Occasion>,
    peer_reports_timeout: Duration,
    heartbeat: Heartbeat,
    /// Names of all ranks' hosts, once they are known.
    hosts: OnceLock<Vec<String>>,
    /// `None` if no reports are written.
    writer: Option<ReportWriter>,
}

impl FlightRecorder {
    /// Creates a recorder that writes no reports.
    pub(crate) fn new(rank: Rank, world_size: usize) -> Self {
        FlightRecorder::with(rank, world_size, Duration::ZERO, None)
    }

    /// Creates a recorder with the given options, and starts its writer.
    pub(crate) fn start(rank: Rank, world_size: usize, options: &RecorderOptions) -> Result<Self, CommError> {
        let writer = ReportWriter::start(rank, options)?;
        Ok(FlightRecorder::with(rank, world_size, options.peer_reports_timeout, writer))
    }

    fn with(
        rank: Rank,
        world_size: usize,
        peer_reports_timeout: Duration,
        writer: Option<ReportWriter>,
    ) -> Self {
        let (worst, heartbeat) = (Mutex::new(Occasion::Joined), Heartbeat::new());
        let (groups, hosts) = (Mutex::default(), OnceLock::new());
        FlightRecorder(Arc::new(Shared {
            rank,
            world_size,
            groups,
            worst,
            peer_reports_timeout,
            heartbeat,
            hosts,
            writer,
        }))
    }

    /// Starts the records of a group in which this rank is `own`. `members` are ranks of the world.
    pub(crate) fn group(&self, name: String, own: Rank, members: Vec<Rank>) -> GroupRecorder {
        let log = Arc::new(GroupLog::new(name, own, members));
        let mut groups = self.groups();
        let num_dropped = groups.iter().filter(|group| group.is_dropped()).count();
        if num_dropped >= NUM_DROPPED_KEPT {
            let oldest = groups.iter().position(|group| group.is_dropped());
            oldest.map(|oldest| groups.remove(oldest));
        }
        groups.push(Arc::clone(&log));
        drop(groups);
        GroupRecorder::new(self.clone(), log)
    }

    /// The heartbeat of this rank. Program lines and group operations beat it.
    pub(crate) fn heartbeat(&self) -> &Heartbeat {
        &self.0.heartbeat
    }

    /// Sets the host names of all ranks, for reports. Only the first call has an effect.
    pub fn name_hosts(&self, names: Vec<String>) {
        let _ = self.0.hosts.set(names);
    }

    /// A report of everything recorded.
    pub fn report(&self) -> RankReport {
        self.report_on(*self.worst())
    }

    /// Passes the report to the writer, if there is one.
    pub(crate) fn write(&self, occasion: Occasion) {
        let mut worst = self.worst();
        *worst = occasion.max(*worst);
        if let Some(writer) = &self.0.writer {
            writer.write(self.report_on(*worst));
        }
    }

    /// Blocks until the reports so far are written, or a time limit is reached, in case the file system hangs.
    pub(crate) fn flush(&self) {
        self.0.writer.iter().for_each(ReportWriter::flush);
    }

    pub(crate) fn add_stall(&self, line: String) {
        if let Some(writer) = &self.0.writer {
            writer.report_stall(line);
        }
        self.write(Occasion::Stalled);
    }

    pub(crate) fn peer_reports_timeout(&self) -> Duration {
        self.0.peer_reports_timeout
    }

    fn report_on(&self, occasion: Occasion) -> RankReport {
        let clock = Clock::now();
        let groups: Vec<Arc<GroupLog>> = self.groups().clone();
        RankReport {
            format: RankReport::FORMAT,
            rank: self.0.rank.0,
            world_size: self.0.world_size,
            host: host_name(),
            hosts: self.0.hosts.get().cloned().unwrap_or_default(),
            process_id: std::process::id(),
            occasion,
            written: clock.unix_now,
            groups: groups.iter().map(|group| group.report(&clock)).collect(),
        }
    }

    fn groups(&self) -> MutexGuard<'_, Vec<Arc<GroupLog>>> {
        self.0.groups.lock().expect("no thread panics while it holds the list of groups")
    }

    fn worst(&self) -> MutexGuard<'_, Occasion> {
        self.0.worst.lock().expect("no thread panics while it makes a report")
    }
}

impl fmt::Debug for FlightRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlightRecorder(rank {} of {})", self.0.rank, self.0.world_size)
    }
}
