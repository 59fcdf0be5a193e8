//! The time by which a run must end.

use super::LaunchError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trireme_train::config::Config;

/// Environment variable with the end of a Slurm job, as a Unix time in seconds.
const SLURM_END: &str = "SLURM_JOB_END_TIME";

/// Returns when a command that started at `started` must end: at the limit of its config or at the end of its job, whichever comes first. A
/// job end in the past is ignored, because Slurm may let jobs run longer. The job end is also ignored without checkpoints, because such a
/// run has nothing to save.
pub(crate) fn run_end(
    config: &Config,
    started: Instant,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Instant>, LaunchError> {
    let limit = config.training().time_limit;
    if config.checkpoint().enable {
        first_end(limit, started, lookup)
    } else {
        Ok(limit.and_then(|limit| started.checked_add(limit)))
    }
}

fn first_end(
    limit: Option<Duration>,
    started: Instant,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Instant>, LaunchError> {
    let of_config = limit.and_then(|limit| started.checked_add(limit));
    let of_job =
        lookup(SLURM_END).filter(|value| !value.is_empty()).map(|value| job_end(&value)).transpose()?;
    Ok([of_config, of_job.flatten()].into_iter().flatten().min())
}

fn job_end(value: &str) -> Result<Option<Instant>, LaunchError> {
    let seconds = value.trim().parse().map_err(|_| LaunchError::InvalidVariable {
        variable: SLURM_END,
        value: value.to_owned(),
        expected: "seconds since 1970".to_owned(),
    })?;
    let end = UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    let left = end.and_then(|end| end.duration_since(SystemTime::now()).ok());
    Ok(left.and_then(|left| Instant::now().checked_add(left)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_counts() {
        let started = Instant::now();
        let now = UNIX_EPOCH.elapsed().unwrap().as_secs();
        let end = |limit, job: Option<u64>| {
            let lookup = |name: &str| job.filter(|_| name == SLURM_END).map(|end| end.to_string());
            let found = first_end(limit, started, &lookup).unwrap();
            // In minutes, rounded.
            found.map(|end| (end.duration_since(started).as_secs() + 30) / 60)
        };
        let minutes = |minutes: u64| Some(Duration::from_secs(60 * minutes));
        assert_eq!(end(None, None), None);
        assert_eq!(end(minutes(10), None), Some(10));
        assert_eq!(end(None, Some(now + 1200)), Some(20));
        assert_eq!(end(minutes(10), Some(now + 1200)), Some(10));
        assert_eq!(end(minutes(30), Some(now + 1200)), Some(20));
        assert_eq!(end(minutes(30), Some(now - 5)), Some(30));
        assert_eq!(end(None, Some(u64::MAX)), None);
        let error = first_end(None, started, &|_| Some("soon".to_owned())).unwrap_err().to_string();
        assert!(error.contains("SLURM_JOB_END_TIME is 'soon'; expected seconds since 1970"), "{error}");
    }
}
