//! Output of runs for people, and the exit codes of commands.

use crate::commands::report::RunsDiffer;
use crate::diagnostics::{DiagnosticOutput, LOG_TIMEOUT, print_diagnostic, set_log};
use crate::hang::DiagnosedFailure;
use crate::hints::hint;
use crate::launch::{self, LOST_PEER_EXIT_CODE, LaunchError, NotJoined};
use crate::log_line::LogLine;
use crate::numbers::{duration, with_noun};
use crate::timeout::run_with_timeout;
use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::SIGINT;
use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trireme_base::{Rank, open_regular_with, printable};
use trireme_comm::CommError;
use trireme_train::config::{LogFormat, Metrics};
use trireme_train::metrics::StepRecord;
use trireme_train::{Observer, RunInfo, TrainError};

/// Standard output, for the results of a command. A closed pipe is no error: a reader such as `head` has seen enough.
pub(crate) struct Output;

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        ignore_broken_pipe(io::stdout().write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        ignore_broken_pipe(io::stdout().flush(), ())
    }
}

fn ignore_broken_pipe<T>(result: io::Result<T>, done: T) -> io::Result<T> {
    result.or_else(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Ok(done),
        kind => Err(io::Error::new(kind, format!("cannot write to standard output: {error}"))),
    })
}

/// Returns the columns of a drawing: the value of COLUMNS if it is from 20 to 1000, else 120.
pub(crate) fn columns() -> usize {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    columns.filter(|columns| (20..=1000).contains(columns)).unwrap_or(120)
}

/// Reports an error with all its causes. Returns the exit code.
pub(crate) fn report_error(error: &anyhow::Error) -> u8 {
    if let Some(not_joined) = error.downcast_ref::<NotJoined>() {
        // The user is informed first: informing the other ranks may take seconds.
        let code = report_error(&not_joined.failure);
        not_joined.report_to_peers();
        return code;
    }
    let text = describe(error);
    // A launcher shows the end of the log, so an error in the log is not printed as well. Ctrl-C needs no message, and a stopped run and
    // runs that differ have been reported already.
    let is_reported = matches!(
        error.downcast_ref(),
        Some(LaunchError::Interrupted { signal: SIGINT } | LaunchError::Stopped { .. })
    ) || error.is::<RunsDiffer>();
    let line = || DiagnosticOutput::current().formatted(&text).into_owned();
    let is_logged = || launch::error_log().is_some_and(|log| append_to_log(log, line()));
    if !is_reported && !is_logged() {
        print_diagnostic(&text);
    }
    exit_code(error)
}

/// Formats the error and its causes, with further lines of a cause indented. Escapes control characters, so that text from outside cannot
/// steer the terminal.
fn describe(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // An error that includes the text of its cause shows it once.
        if !last.contains(&cause) {
            text.push_str(&format!("\n  because: {}", cause.replace('\n', "\n    ")));
        }
        last = cause;
    }
    if let Some(hint) = hint(error) {
        text.push_str(&format!("\n  hint: {hint}"));
    }
    printable(&text).into_owned()
}

/// Appends a line to a log, whose file system may hang. Returns whether that succeeded.
fn append_to_log(log: PathBuf, line: String) -> bool {
    let append = move || writeln!(open_regular_with(&log, OpenOptions::new().append(true))?, "{line}");
    matches!(run_with_timeout(LOG_TIMEOUT, append), Ok(Ok(())))
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let error = error.downcast_ref::<DiagnosedFailure>().map_or(error, |hang| &hang.failure);
    if let Some(error) = error.downcast_ref::<LaunchError>() {
        return error.exit_code();
    }
    if matches!(error.downcast_ref(), Some(TrainError::NoCheckpointChosen)) {
        return LOST_PEER_EXIT_CODE;
    }
    let lost_peer = error.downcast_ref::<TrainError>().and_then(TrainError::comm).or(error.downcast_ref());
    match lost_peer {
        Some(CommError::PeerLost { .. } | CommError::PeerLeft { .. } | CommError::PeerFailed { .. }) => {
            LOST_PEER_EXIT_CODE
        }
        _ => 1,
    }
}

/// The output of a run on one rank. Rank 0 shows a progress bar on a terminal, and lines elsewhere. Every rank has a log, with times.
pub(crate) struct Console {
    rank: Rank,
    /// Whether lines go to standard output: on rank 0, and on ranks whose standard output Trireme's launcher has redirected to their log.
    prints: bool,
    log_interval: u64,
    bar: Option<ProgressBar>,
    first_step_shown: bool,
    steps: u64,
    pace: Pace,
}

#[derive(Debug, Default)]
struct Pace {
    /// When the first step ended.
    first: Option<Instant>,
    /// Number of steps since then. Their time includes validations and checkpoints.
    num_steps: u64,
    /// Moving average of the tokens or samples per second.
    speed: Option<f64>,
}

impl Pace {
    /// Weight of a new step in the moving average.
    const NEW_STEP_WEIGHT: f64 = 0.1;

    fn add(&mut self, record: &StepRecord) {
        let mix =
            |old: Option<f64>, new: f64| old.map_or(new, |old| old + Self::NEW_STEP_WEIGHT * (new - old));
        self.speed = Some(mix(self.speed, record.speed().1));
        match self.first {
            None => self.first = Some(Instant::now()),
            Some(_) => self.num_steps += 1,
        }
    }

    /// Estimates the time for `num_steps` more steps from the mean since the first step. Validations are assumed to stay as frequent.
    fn time_left(&self, num_steps: u64) -> Option<Duration> {
        let elapsed = self.first.filter(|_| self.num_steps > 0)?.elapsed().as_secs_f64();
        Duration::try_from_secs_f64(elapsed / self.num_steps as f64 * num_steps as f64).ok()
    }
}

impl Console {
    /// Creates the console of one rank, which logs to `log_folder/rank-N.log`.
    pub(crate) fn new(rank: Rank, config: &Metrics, log_folder: &Path) -> anyhow::Result<Self> {
        let is_output_log = rank != Rank::ROOT && launch::is_under_launcher();
        let path = log_folder.join(format!("rank-{rank}.log"));
        let open = || {
            std::fs::create_dir_all(log_folder)?;
            open_regular_with(&path, OpenOptions::new().create(true).append(true))
        };
        let log = match (!is_output_log).then(open).transpose() {
            Err(source) if rank == Rank::ROOT => {
                return Err(TrainError::RunFolder { path, source }.into());
            }
            // Other ranks write nothing else to the folder, so they continue without a log.
            Err(error) => {
                print_diagnostic(&format!("warning: there is no log {}: {error}", path.display()));
                None
            }
            Ok(log) => log,
        };
        set_log(rank, log);
        Ok(Console {
            rank,
            prints: rank == Rank::ROOT || is_output_log,
            log_interval: config.log_interval,
            bar: None,
            first_step_shown: false,
            steps: 0,
            pace: Pace::default(),
        })
    }

    fn is_root(&self) -> bool {
        self.rank == Rank::ROOT
    }

    /// Prints a line, above the bar if there is one.
    pub(crate) fn line(&mut self, text: &str) {
        let channel = DiagnosticOutput::current();
        let text = channel.formatted(text);
        self.print(&text);
        channel.log(&text);
    }

    /// Writes a line to this rank's log alone.
    pub(crate) fn log(&mut self, text: &str) {
        let channel = DiagnosticOutput::current();
        let text = channel.formatted(text);
        if !self.is_root() {
            self.print(&text);
        }
        channel.log(&text);
    }

    fn print(&mut self, text: &str) {
        if !self.prints {
            return;
        }
        // The output of other ranks is a log, whose lines have times.
        let stamped = (!self.is_root()).then(|| DiagnosticOutput::current().stamped(text));
        let text = stamped.as_deref().unwrap_or(text);
        // A closed output does not end the run: the line is in the log as well.
        let print = || drop(writeln!(Output, "{text}"));
        match &self.bar {
            Some(bar) if !bar.is_finished() => bar.suspend(print),
            _ => print(),
        }
    }

    /// Prints the line of a step, shortened to the width of a terminal. The log has the full line.
    fn record(&mut self, line: LogLine<'_>) {
        let channel = DiagnosticOutput::current();
        if channel.format == LogFormat::Json {
            let object = channel.object("record", line.record);
            self.print(&object);
            return channel.log(&object);
        }
        if std::io::stdout().is_terminal() {
            self.print(&line.fitted(usize::from(Term::stdout().size().1)))
        } else {
            self.print(&line.plain())
        }
        channel.log(&line.plain());
    }

    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // An error message must begin on its own line.
        self.finish();
    }
}

/// Formats a number of parameters, in millions unless it is small.
pub(crate) fn parameters(number: usize) -> String {
    match number {
        0..10_000 => format!("{number} parameters"),
        _ => format!("{:.2} M parameters", number as f64 / 1e6),
    }
}

impl Observer for Console {
    fn notice(&mut self, text: &str) {
        if self.is_root() {
            self.line(&format!("note: {text}"));
        }
    }

    fn notice_of_worker(&mut self, rank: Rank, text: &str) {
        self.line(&format!("note: worker {rank}: {text}"));
    }

    fn initial_validation(&mut self, loss: f64) {
        if self.is_root() {
            self.line(&format!("validation loss before the first step: {loss:.4}"));
        }
    }

    fn begin(&mut self, facts: &RunInfo) {
        let RunInfo { model, num_parameters, world_size, num_threads, transport, .. } = facts;
        let threads = with_noun(*num_threads, "thread");
        let workers = match world_size {
            1 => format!("1 worker x {threads}"),
            _ => format!("{world_size} workers x {threads} over {transport}"),
        };
        self.steps = facts.steps;
        self.line(&format!("model: {model}; {}", parameters(*num_parameters)));
        let data = match facts.tokens_per_sample {
            Some(tokens) => format!(
                "{} of {tokens} tokens, {} tokens per step",
                with_noun(facts.num_samples as usize, "sample"),
                facts.samples_per_step * tokens
            ),
            None => format!("{} samples, {} per step", facts.num_samples, facts.samples_per_step),
        };
        self.line(&format!("data: {data}; {workers}"));
        match facts.resumed_step {
            0 => self.line(&format!("training {}", with_noun(facts.steps as usize, "step"))),
            step if step >= facts.steps => self.line(&format!(
                "the run is complete at step {step}; raise [training] steps to train longer, or start again with --resume never"
            )),
            step => self.line(&format!("resuming after step {step} of {}", facts.steps)),
        }
        let is_text = DiagnosticOutput::current().format == LogFormat::Text;
        let has_bar = self.is_root() && is_text && std::io::stderr().is_terminal();
        if has_bar && facts.resumed_step < facts.steps {
            let bar = progress_bar(Some(facts.steps), "{wide_bar} {pos}/{len}  {msg}");
            self.bar = Some(bar.with_position(facts.resumed_step));
        }
    }

    fn step(&mut self, record: &StepRecord) {
        if let (Some(seconds), false) = (record.seconds_to_first_step, self.first_step_shown) {
            self.first_step_shown = true;
            self.line(&format!("seconds_to_first_step: {seconds:.3}"));
        }
        let is_due = record.step.is_multiple_of(self.log_interval) || record.validation_loss.is_some();
        self.pace.add(record);
        let left = self.pace.time_left(self.steps.saturating_sub(record.step));
        let (unit, speed) = record.speed();
        let speed = self.pace.speed.unwrap_or(speed);
        if let Some(bar) = &self.bar {
            bar.set_position(record.step);
            let left = left.map(|left| format!("  {} left", duration(left))).unwrap_or_default();
            let loss =
                if record.loss.is_nan() { "no loss".to_owned() } else { format!("loss {:.4}", record.loss) };
            bar.set_message(format!("{loss}  {speed:.0} {unit}{left}"));
        }
        if is_due || record.seconds_to_first_step.is_some() {
            self.record(LogLine { record, speed, left });
        }
    }

    fn checkpoint(&mut self, step: u64, path: &Path) {
        if self.is_root() {
            self.line(&format!("checkpoint of step {step}: {}", path.display()));
        }
    }
}

/// Creates a progress bar on standard error. It is invisible if standard error is not a terminal.
pub(crate) fn progress_bar(len: Option<u64>, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the template is well formed");
    ProgressBar::with_draw_target(len, ProgressDrawTarget::stderr()).with_style(style)
}

/// A line on the terminal that names the current measurement. Invisible where there is no terminal.
pub(crate) struct MeasurementStatus(ProgressBar);

impl MeasurementStatus {
    pub(crate) fn new() -> Self {
        MeasurementStatus(progress_bar(None, "measuring {wide_msg}"))
    }

    pub(crate) fn show(&self, what: &str) {
        self.0.set_message(what.to_owned());
        self.0.tick();
    }
}

impl Drop for MeasurementStatus {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn a_log_that_cannot_be_written_does_not_delay_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert!(!append_to_log(log.clone(), "error: first".to_owned()));
        std::fs::write(&log, "").unwrap();
        assert!(append_to_log(log.clone(), "error: second".to_owned()));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "error: second\n");
        // Opening a pipe that no process reads would wait.
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(!append_to_log(pipe, "error: third".to_owned()));
    }
}
