use std::time::{Duration, Instant};

/// How long a thread without other work continues to poll when the spinning polls have failed. It yields the processor between these polls,
/// and sleeps after them.
const YIELDING_POLL_MAX: Duration = Duration::from_micros(100);
/// Maximum number of polls or tries that spin before a thread yields the processor, enough for a peer that is about to arrive on another
/// processor. `poll` starts with this number.
const NUM_POLLS_MAX: u32 = 400;
/// Minimum number of spinning polls, reached when they keep failing, perhaps because the peer needs this very processor.
const NUM_POLLS_MIN: u32 = 1;
/// Minimum number of spinning polls of a rank that also computes. Its thread then sleeps without yielding first: a sleeping thread is woken
/// at once, but a thread that yields to a computing one waits long for the processor.
const NUM_POLLS_COMPUTING_MIN: u32 = 100;

/// Number of yields between two reads of the clock.
const NUM_YIELDS: u32 = 4;

/// Number of additional tries by a thread without other work, which yields the processor between them. For links that must be tried to find
/// out whether they are ready.
const NUM_YIELDING_TRIES: u32 = 200;

/// Adaptive backoff: polls for peers before sleeping, for longer if recent polls succeeded.
pub(crate) struct Backoff {
    num_polls: u32,
    num_tries: u32,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Backoff { num_polls: NUM_POLLS_MAX, num_tries: 0 }
    }

    /// Polls `has_arrived` for a while, and returns whether it was true. `has_no_other_work` says whether this rank has no computation to
    /// do meanwhile.
    pub(crate) fn poll(&mut self, has_no_other_work: bool, mut has_arrived: impl FnMut() -> bool) -> bool {
        let num_polls =
            if has_no_other_work { self.num_polls } else { self.num_polls.max(NUM_POLLS_COMPUTING_MIN) };
        for _ in 0..num_polls {
            if has_arrived() {
                self.num_polls = (self.num_polls * 2).min(NUM_POLLS_MAX);
                return true;
            }
            std::hint::spin_loop();
        }
        self.num_polls = (self.num_polls / 2).max(NUM_POLLS_MIN);
        let since = Instant::now();
        while has_no_other_work && since.elapsed() < YIELDING_POLL_MAX {
            for _ in 0..NUM_YIELDS {
                std::thread::yield_now();
                if has_arrived() {
                    return true;
                }
            }
        }
        false
    }

    /// Returns whether to try again after a failed try, for links that must be tried to find out whether they are ready. Spins or yields
    /// before it returns true.
    pub(crate) fn should_retry(&mut self, has_no_other_work: bool) -> bool {
        self.num_tries += 1;
        let num_yielding_tries = if has_no_other_work { NUM_YIELDING_TRIES } else { 0 };
        if self.num_tries >= NUM_POLLS_MAX + num_yielding_tries {
            self.num_tries = 0;
            return false;
        }
        if self.num_tries < NUM_POLLS_MAX {
            std::hint::spin_loop()
        } else {
            std::thread::yield_now()
        }
        true
    }

    /// Records that a try succeeded.
    pub(crate) fn record_success(&mut self) {
        self.num_tries = 0;
    }
}
