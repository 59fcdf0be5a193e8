//! `cargo xtask slurm`: runs jobs under a real Slurm with two nodes on this machine. Whatever Slurm does to a run, the run must end with
//! the losses of an undisturbed one, and must not recompute a step that it has reported.

use crate::commands::{build, output};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const HELP: &str = "\
Starts munged, slurmctld and two slurmd on this machine, runs small jobs, and ends the daemons
again. Needs root, openssl, and the packages munge and slurm-wlm (Debian). Takes about two minutes: Slurm's
shortest time limit is one.";

/// Check how runs behave under Slurm: requeues, preemption, time limits, killed tasks.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct SlurmArgs {
    /// Run only the checks whose names contain this.
    filter: Option<String>,
}

/// Timeout of a wait, except for the end of a job at its time limit.
const TIMEOUT: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Number of steps of a run. They take longer than Slurm needs to preempt the job.
const STEPS: usize = 20_000;

/// Number of steps after which a run is disturbed.
const STEPS_BEFORE_DISTURBANCE: usize = 300;

const CONFIG: &str = r#"
model = { architecture = "gpt2", hidden_size = 32, num_layers = 1, num_heads = 2 }
data = { inputs = ["text.txt"], folder = "corpus" }
training = { local_batch_size = 2, global_batch_size = 8, seq_len = 16, threads = 1 }
metrics = { log_interval = 1000, tensorboard = false }
generate = { num_tokens = 0 }
"#;

/// The page whose first `sh` block is the job script.
const PAGE: &str = "docs/launchers/slurm.md";

const COMMAND: &str = "trireme train books.toml";

type Check = fn(&Cluster) -> Result<()>;

const CHECKS: [(&str, Check); 7] = [
    ("two tasks on nodes that only Slurm knows", |slurm| slurm.run("two", &["--ntasks=2"])),
    ("four tasks that are placed in turns", |slurm| {
        slurm.run("four", &["--ntasks=4", "--distribution=cyclic"])
    }),
    ("a job that is queued again", requeued),
    ("a job that makes way for another", preempted),
    ("a job that is canceled", canceled),
    ("a job whose time is over", out_of_time),
    ("a task that is killed", task_killed),
];

/// Runs `cargo xtask slurm`. Returns whether all checks passed.
pub(crate) fn run(args: &SlurmArgs, root: &Path) -> Result<bool> {
    let target = build(root)?;
    let cluster = Cluster::start(target.join("release/trireme"), script_of(&root.join(PAGE))?)?;
    let mut all_pass = true;
    for (name, check) in CHECKS {
        if args.filter.as_ref().is_some_and(|filter| !name.contains(filter.as_str())) {
            continue;
        }
        let began = Instant::now();
        let outcome = check(&cluster);
        let seconds = began.elapsed().as_secs();
        match &outcome {
            Ok(()) => println!("ok      {name} ({seconds} s)"),
            Err(error) => println!("FAILED  {name} ({seconds} s): {error:#}"),
        }
        all_pass &= outcome.is_ok();
        cluster.cancel_all()?;
    }
    Ok(all_pass)
}

/// A Slurm cluster on this machine. Its daemons end when this value is dropped.
struct Cluster {
    folder: tempfile::TempDir,
    trireme: PathBuf,
    /// The job script of the documentation.
    script: String,
    daemons: Vec<Child>,
}

impl Cluster {
    fn start(trireme: PathBuf, script: String) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut cluster = Cluster { folder, trireme, script, daemons: Vec::new() };
        let host = output(&mut Command::new("hostname"))?;
        for name in ["state", "spool-n1", "spool-n2"] {
            fs::create_dir(cluster.path(name))?;
        }
        fs::DirBuilder::new().mode(0o700).create(cluster.path("munge"))?;
        let mut key = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o400)
            .open(cluster.path("munge/key"))?;
        key.write_all(&fs::read("/proc/sys/kernel/random/uuid")?)?;
        fs::write(cluster.path("slurm.conf"), cluster.config(host.trim()))?;
        fs::write(cluster.path("run.toml"), CONFIG)?;
        fs::write(cluster.path("text.txt"), text())?;
        let munge = |name: &str| cluster.path("munge").join(name).display().to_string();
        let munged = [
            "--foreground".to_owned(),
            "--force".to_owned(),
            format!("--socket={}", munge("socket")),
            format!("--key-file={}", munge("key")),
            format!("--pid-file={}", munge("pid")),
            format!("--log-file={}", munge("log")),
            format!("--seed-file={}", munge("seed")),
        ];
        cluster.daemon("munged", &munged.each_ref().map(String::as_str))?;
        let socket = cluster.path("munge/socket");
        wait_for("munged", TIMEOUT, || Ok(socket.exists()))?;
        cluster.daemon("slurmctld", &["-D"])?;
        cluster.daemon("slurmd", &["-D", "-N", "n1"])?;
        cluster.daemon("slurmd", &["-D", "-N", "n2"])?;
        let idle = || {
            let states = cluster.slurm("sinfo").args(["--noheader", "--Node", "--format=%T"]).output()?;
            let text = String::from_utf8_lossy(&states.stdout).into_owned();
            Ok(text.lines().count() > 1 && text.lines().all(|state| state.trim() == "idle"))
        };
        wait_for("idle nodes", TIMEOUT, idle)?;
        Ok(cluster)
    }

    fn config(&self, host: &str) -> String {
        let folder = self.folder.path().display();
        // No name service knows the names of these nodes.
        format!(
            "ClusterName=trireme\n\
             SlurmctldHost={host}(127.0.0.1)\n\
             SlurmUser=root\n\
             AuthInfo=socket={folder}/munge/socket\n\
             MpiDefault=none\n\
             ProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\n\
             SlurmctldPort=17817\n\
             SlurmctldPidFile={folder}/slurmctld.pid\n\
             SlurmdPidFile={folder}/slurmd-%n.pid\n\
             SlurmdSpoolDir={folder}/spool-%n\n\
             StateSaveLocation={folder}/state\n\
             SlurmctldLogFile={folder}/slurmctld.log\n\
             SlurmdLogFile={folder}/slurmd-%n.log\n\
             SlurmdParameters=config_overrides\n\
             SelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\n\
             KillWait=20\n\
             PreemptType=preempt/partition_prio\n\
             PreemptMode=REQUEUE\n\
             NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17901-17902] CPUs=2\n\
             PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 State=UP\n\
             PartitionName=high Nodes=ALL PriorityTier=10 State=UP\n"
        )
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn daemon(&mut self, program: &str, arguments: &[&str]) -> Result<()> {
        let log = fs::File::create(self.path(&format!("{program}-{}.out", self.daemons.len())))?;
        let mut daemon = self.slurm(program);
        daemon.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = daemon.spawn().with_context(|| {
            format!("cannot start {program}; install the packages munge and slurm-wlm, and run this as root")
        })?;
        self.daemons.push(child);
        Ok(())
    }

    /// Returns a Slurm command in the folder of the runs.
    fn slurm(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.path("slurm.conf")).current_dir(self.folder.path());
        command
    }

    /// Returns the command line of `trireme train` for a run of `steps` steps.
    fn train(&self, run: &str, steps: usize) -> String {
        let trireme = self.trireme.display();
        format!(
            "{trireme} train run.toml --set run.name={run} --set training.steps={steps} --set lr_scheduler.decay=constant \
             --set checkpoint.interval=100"
        )
    }

    /// Returns the losses of an undisturbed run, on workers that were not started by Slurm.
    fn undisturbed(&self, steps: usize) -> Result<Vec<u64>> {
        let run = format!("undisturbed-{steps}");
        if !self.path("runs").join(&run).exists() {
            let words = format!("{} --workers 2", self.train(&run, steps));
            let mut words = words.split_whitespace();
            let mut train = Command::new(words.next().expect("a program"));
            output(train.args(words).current_dir(self.folder.path()))?;
        }
        self.losses(&run)
    }

    /// Returns the bits of the losses that a run has reported so far, one for each step.
    fn losses(&self, run: &str) -> Result<Vec<u64>> {
        let path = self.path("runs").join(run).join("metrics.jsonl");
        let text = fs::read_to_string(&path).unwrap_or_default();
        // The last line may not be complete.
        let records = text.lines().map_while(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let mut losses = Vec::new();
        for record in records {
            let step = record["step"].as_u64().context("a record without a step")?;
            ensure!(step == losses.len() as u64 + 1, "step {step} follows {} steps in {run}", losses.len());
            losses.push(record["loss"].as_f64().context("a record without a loss")?.to_bits());
        }
        Ok(losses)
    }

    fn ensure_undisturbed(&self, run: &str, steps: usize) -> Result<()> {
        let (found, expected) = (self.losses(run)?, self.undisturbed(steps)?);
        ensure!(expected.len() == steps, "the undisturbed run has {} steps", expected.len());
        ensure!(found == expected, "the losses of {run} differ from those of an undisturbed run");
        Ok(())
    }

    /// Submits the job script of the documentation for a run of `steps` steps, with one task per node. Returns the job's number.
    fn submit(&self, run: &str, steps: usize, options: &[&str]) -> Result<String> {
        ensure!(self.script.contains(COMMAND), "{PAGE} has no `{COMMAND}`");
        let path = self.path(&format!("{run}.sh"));
        fs::write(&path, self.script.replace(COMMAND, &self.train(run, steps)))?;
        let mut sbatch = self.slurm("sbatch");
        // The script stores its secret in the home folder.
        sbatch.env("HOME", self.folder.path());
        sbatch.args(["--parsable", "--ntasks-per-node=1", "--cpus-per-task=1"]);
        sbatch.arg(format!("--output={run}.out")).args(options).arg(&path);
        Ok(output(&mut sbatch)?.trim().to_owned())
    }

    /// Runs 40 steps on both nodes, with these options of srun.
    fn run(&self, run: &str, options: &[&str]) -> Result<()> {
        let train = self.train(run, 40);
        output(self.slurm("srun").arg("--nodes=2").args(options).args(train.split_whitespace()))?;
        self.ensure_undisturbed(run, 40)
    }

    fn printed(&self, run: &str) -> String {
        fs::read_to_string(self.path(&format!("{run}.out"))).unwrap_or_default()
    }

    fn wait_for_steps(&self, run: &str, steps: usize) -> Result<()> {
        wait_for(&format!("{steps} steps of {run}"), TIMEOUT, || Ok(self.losses(run)?.len() >= steps))
    }

    /// Waits until a run was stopped, and checks that it has saved its last step. Returns this step.
    fn wait_for_stop(&self, run: &str, timeout: Duration) -> Result<usize> {
        let stop = || {
            self.printed(run).lines().find_map(|line| {
                line.strip_prefix("stopped after step ")?.split_once(' ')?.0.parse::<usize>().ok()
            })
        };
        wait_for(&format!("the stop of {run}"), timeout, || Ok(stop().is_some()))?;
        let step = stop().context("a step")?;
        let saved = self.path("runs").join(run).join(format!("checkpoints/step-{step}"));
        ensure!(saved.exists(), "{} does not exist", saved.display());
        Ok(step)
    }

    /// Waits for the end of a run that was stopped after `step` and queued again. Checks that the run resumed and lost nothing.
    fn wait_for_end(&self, run: &str, job: &str, step: usize) -> Result<()> {
        let is_over = || {
            // Otherwise Slurm would hold the requeued job back for two minutes.
            let mut start = self.slurm("scontrol");
            start.args(["update", &format!("JobId={job}"), "StartTime=now"]).output()?;
            Ok(self.losses(run)?.len() >= STEPS && self.printed(run).contains("last checkpoint: "))
        };
        wait_for(&format!("the end of {run}"), TIMEOUT, is_over)?;
        let resumed = format!("resuming after step {step} of ");
        ensure!(self.printed(run).contains(&resumed), "{run} did not resume after step {step}");
        self.wait_for_empty_queue()?;
        let secret = self.path(&format!(".trireme-{job}"));
        ensure!(!secret.exists(), "{run} has left {}", secret.display());
        self.ensure_undisturbed(run, STEPS)
    }

    /// Waits until a run was stopped. Checks that it has saved all steps that it has reported, and that its job is not queued again.
    fn wait_for_final_stop(&self, run: &str, timeout: Duration) -> Result<()> {
        let step = self.wait_for_stop(run, timeout)?;
        let (found, expected) = (self.losses(run)?, self.undisturbed(STEPS)?);
        ensure!(found.len() == step, "{} steps were reported, and {step} saved", found.len());
        let num_compared = found.len().min(expected.len());
        let is_same = found[..num_compared] == expected[..num_compared];
        ensure!(is_same, "the losses differ from those of an undisturbed run");
        self.wait_for_empty_queue()
    }

    fn wait_for_empty_queue(&self) -> Result<()> {
        let is_empty = || Ok(output(self.slurm("squeue").arg("--noheader"))?.trim().is_empty());
        wait_for("an empty queue", TIMEOUT, is_empty)
    }

    fn cancel_all(&self) -> Result<()> {
        output(self.slurm("scancel").args(["--user=root", "--signal=KILL"])).map(drop)?;
        output(self.slurm("scancel").arg("--user=root")).map(drop)?;
        self.wait_for_empty_queue()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Slurm's own daemons end their children, for which they need munged. munged was started first, so it is ended last.
        for daemon in self.daemons.iter_mut().rev() {
            let _ = kill_process(Pid::from_child(daemon), Signal::TERM);
            let _ = daemon.wait();
        }
    }
}

/// Returns the first `sh` block of a page.
fn script_of(page: &Path) -> Result<String> {
    let text = fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let block = text.split_once("```sh\n").and_then(|(_, rest)| rest.split_once("```\n"));
    Ok(block.with_context(|| format!("{} has no script", page.display()))?.0.to_owned())
}

fn requeued(cluster: &Cluster) -> Result<()> {
    let job = cluster.submit("requeued", STEPS, &[])?;
    cluster.wait_for_steps("requeued", STEPS_BEFORE_DISTURBANCE)?;
    output(cluster.slurm("scontrol").args(["requeue", &job]))?;
    let step = cluster.wait_for_stop("requeued", TIMEOUT)?;
    cluster.wait_for_end("requeued", &job, step)
}

fn preempted(cluster: &Cluster) -> Result<()> {
    let job = cluster.submit("preempted", STEPS, &[])?;
    cluster.wait_for_steps("preempted", STEPS_BEFORE_DISTURBANCE)?;
    let urgent = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"];
    output(cluster.slurm("sbatch").args(urgent))?;
    let step = cluster.wait_for_stop("preempted", TIMEOUT)?;
    cluster.wait_for_end("preempted", &job, step)
}

fn canceled(cluster: &Cluster) -> Result<()> {
    let job = cluster.submit("canceled", STEPS, &[])?;
    cluster.wait_for_steps("canceled", STEPS_BEFORE_DISTURBANCE)?;
    output(cluster.slurm("scancel").arg(&job))?;
    cluster.wait_for_final_stop("canceled", TIMEOUT)
}

fn out_of_time(cluster: &Cluster) -> Result<()> {
    cluster.submit("late", 1_000_000_000, &["--time=1"])?;
    // Slurm checks time limits every half minute.
    cluster.wait_for_final_stop("late", 3 * TIMEOUT)
}

fn task_killed(cluster: &Cluster) -> Result<()> {
    let train = cluster.train("killed", STEPS);
    let srun = |cluster: &Cluster| {
        let mut srun = cluster.slurm("srun");
        srun.args(["--nodes=2", "--ntasks=2", "--output=killed.out", "--open-mode=append"]);
        srun.args(train.split_whitespace());
        srun
    };
    let mut running = srun(cluster).spawn().context("cannot start srun")?;
    cluster.wait_for_steps("killed", STEPS_BEFORE_DISTURBANCE)?;
    kill_process(task(cluster, 1)?, Signal::KILL).context("cannot kill the task")?;
    let status = running.wait()?;
    ensure!(!status.success(), "srun ended well");
    let printed = cluster.printed("killed");
    ensure!(printed.contains("rank 1 was lost"), "the loss is not told: {printed}");
    output(&mut srun(cluster))?;
    cluster.ensure_undisturbed("killed", STEPS)
}

fn task(cluster: &Cluster, rank: usize) -> Result<Pid> {
    let wanted =
        [format!("SLURM_PROCID={rank}"), format!("SLURM_CONF={}", cluster.path("slurm.conf").display())];
    let program = fs::canonicalize(&cluster.trireme)?;
    for entry in fs::read_dir("/proc")?.flatten() {
        let is_program = fs::read_link(entry.path().join("exe")).is_ok_and(|path| path == program);
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let has = |variable: &String| {
            environment.split(|&byte| byte == 0).any(|found| found == variable.as_bytes())
        };
        let id = entry.file_name().to_str().and_then(|id| id.parse().ok()).and_then(Pid::from_raw);
        if let Some(id) = id.filter(|_| is_program && wanted.iter().all(has)) {
            return Ok(id);
        }
    }
    bail!("no process is task {rank}")
}

fn wait_for(what: &str, timeout: Duration, is_there: impl Fn() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !is_there()? {
        ensure!(began.elapsed() < timeout, "waited {} s for {what}", timeout.as_secs());
        sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Returns enough text for a byte-level model.
fn text() -> String {
    (0..4000)
        .map(|number: u32| format!("{number} times {number} is {}.\n", u64::from(number) * u64::from(number)))
        .collect()
}
