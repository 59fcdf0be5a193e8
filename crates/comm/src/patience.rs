use std::time::{Duration, Instant};

/// How long a thread with nothing else to do looks for a peer before it sleeps. It yields the processor between looks.
const WAITING_MAX: Duration = Duration::from_micros(100);
/// Looks in a row before that: what it takes a peer that is just about to come, on another processor.
const NUM_LOOKS_MAX: u32 = 400;
/// Where such looks were in vain, perhaps because the peer needs this very processor.
const NUM_LOOKS_MIN: u32 = 1;
/// Looks of a thread next to one that computes: it is woken at once, but does not soon regain a processor it gave away awake.
const NUM_LOOKS_BESIDE_MIN: u32 = 100;

/// From one look at the clock to the next.
const NUM_YIELDS: u32 = 4;

/// Tries of what only a try shows, by a thread that has nothing else to do; between them others may have the processor.
const NUM_PATIENT_TRIES: u32 = 200;

/// Looks out for peers before sleeping, for as long as that has helped lately.
pub(crate) struct Patience {
    num_looks: u32,
    num_tries: u32,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { num_looks: NUM_LOOKS_MAX, num_tries: 0 }
    }

    /// Looks for a while; whether `has_come` has said so. `has_nothing_else` is whether this rank computes nothing meanwhile.
    pub(crate) fn look(&mut self, has_nothing_else: bool, mut has_come: impl FnMut() -> bool) -> bool {
        let num_looks =
            if has_nothing_else { self.num_looks } else { self.num_looks.max(NUM_LOOKS_BESIDE_MIN) };
        for _ in 0..num_looks {
            if has_come() {
                self.num_looks = (self.num_looks * 2).min(NUM_LOOKS_MAX);
                return true;
            }
            std::hint::spin_loop();
        }
        self.num_looks = (self.num_looks / 2).max(NUM_LOOKS_MIN);
        let since = Instant::now();
        while has_nothing_else && since.elapsed() < WAITING_MAX {
            for _ in 0..NUM_YIELDS {
                std::thread::yield_now();
                if has_come() {
                    return true;
                }
            }
        }
        false
    }

    /// Whether to try once more what only a try shows, after one in vain.
    pub(crate) fn tries_again(&mut self, has_nothing_else: bool) -> bool {
        self.num_tries += 1;
        let num_patient_tries = if has_nothing_else { NUM_PATIENT_TRIES } else { 0 };
        if self.num_tries >= NUM_LOOKS_MAX + num_patient_tries {
            self.num_tries = 0;
            return false;
        }
        match self.num_tries < NUM_LOOKS_MAX {
            true => std::hint::spin_loop(),
            false => std::thread::yield_now(),
        }
        true
    }

    /// A try was not in vain.
    pub(crate) fn has_succeeded(&mut self) {
        self.num_tries = 0;
    }
}
