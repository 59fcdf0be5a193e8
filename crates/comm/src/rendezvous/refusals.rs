use crate::{JoinOptions, OnRefusal, Refusal};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of refusals that are reported and kept. The next one is reported as the last. The rest are only counted, so that a flood
/// of connections does not become a flood of warnings.
const NUM_REPORTED_MAX: usize = 16;

/// The connections that were refused while this rank joined.
pub(super) struct Refusals {
    listener: Option<OnRefusal>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    texts: Vec<String>,
    num_more: usize,
}

impl Refusals {
    pub(super) fn new(options: &JoinOptions) -> Self {
        Refusals { listener: options.on_refusal.clone(), kept: Mutex::default() }
    }

    /// Refusals that are not reported.
    pub(super) fn silent() -> Self {
        Refusals { listener: None, kept: Mutex::default() }
    }

    pub(super) fn add(&self, address: Option<SocketAddr>, reason: &str) {
        let mut kept = self.kept();
        let mut refusal = Refusal { address, reason: reason.to_owned() };
        if kept.texts.len() == NUM_REPORTED_MAX {
            kept.num_more += 1;
            if kept.num_more > 1 {
                return;
            }
            refusal.reason.push_str("; further refused connections are not reported");
        } else {
            kept.texts.push(refusal.to_string());
        }
        drop(kept);
        if let Some(listener) = &self.listener {
            listener.notify(&refusal);
        }
    }

    /// One text per kept refusal, and one with the number of others.
    pub(super) fn texts(&self) -> Vec<String> {
        let kept = self.kept();
        let more = (kept.num_more > 0).then(|| format!("and {} more", kept.num_more));
        kept.texts.iter().cloned().chain(more).collect()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Poisoning is ignored: every change of the state is a single assignment.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use trireme_base::Rank;

    #[test]
    fn a_flood_of_refusals_is_reported_in_a_few_lines() {
        let num_told = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&num_told);
        let on_refusal = OnRefusal::new(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let options = JoinOptions { on_refusal: Some(on_refusal), ..JoinOptions::new(Rank(0), 2) };
        let refusals = Refusals::new(&options);
        (0..1000).for_each(|_| refusals.add(None, "it said nothing"));
        assert_eq!(num_told.load(Ordering::Relaxed), NUM_REPORTED_MAX + 1);
        let texts = refusals.texts();
        assert_eq!(texts.len(), NUM_REPORTED_MAX + 1);
        assert_eq!(texts[NUM_REPORTED_MAX], "and 984 more");
    }
}
