//! Recorded kernel calls.
//!
//! The planner records the calls of a dry run. It [replays](RecordedCalls::replay) them on new memory to time kernels that belong to no
//! pass and no update, such as sums and conversions.

use crate::kernels::call::Call;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::KernelCall;

/// The first call of each kernel and cost that devices have issued. Clones share the calls.
#[derive(Debug, Clone, Default)]
pub struct RecordedCalls(Arc<Mutex<BTreeMap<KernelCall, Call>>>);

impl RecordedCalls {
    pub(super) fn record(&self, call: &Call) {
        let key = KernelCall { kernel: call.name(), cost: call.cost() };
        self.lock().entry(key).or_insert_with(|| call.clone());
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<KernelCall, Call>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
