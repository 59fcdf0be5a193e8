//! The weight versions that passes read in a schedule without drains.

use super::pass::{Pass, PassKind};
use super::schedule::{Schedule, WeightVersions};

impl WeightVersions {
    /// Returns the version that forward of a microbatch reads, which its backward reads, too. A step has `num_microbatches` microbatches,
    /// and `newest` is the version that the stage's last update produced. A version is the number of updates since the last drain.
    pub fn read_by_forward(self, num_microbatches: usize, microbatch: usize, newest: usize) -> usize {
        match self {
            WeightVersions::Drained => 0,
            WeightVersions::Stashed => newest,
            WeightVersions::DoubleBuffered => (microbatch / num_microbatches).saturating_sub(1),
        }
    }
}

impl Schedule {
    /// Returns the version of the stage's weights that each pass of each rank reads, as the number of updates that produced it. An update
    /// reads the newest version. All versions are 0 in a schedule that drains.
    ///
    /// # Panics
    /// If a pass is outside the schedule's stages and microbatches; [`validate`](super::validate) refuses it.
    pub fn versions_read(&self) -> Vec<Vec<usize>> {
        let num_microbatches = self.total_microbatches();
        let mut newest = vec![0; self.num_stages()];
        let mut read_by_forward = vec![0; self.num_stages() * num_microbatches];
        let mut version = |pass: &Pass| {
            let newest = &mut newest[pass.stage];
            let read = &mut read_by_forward[pass.stage * num_microbatches + pass.microbatch];
            match pass.kind {
                PassKind::Forward => {
                    *read = self.weights.read_by_forward(self.num_microbatches, pass.microbatch, *newest);
                    *read
                }
                PassKind::Update => {
                    *newest += 1;
                    *newest - 1
                }
                PassKind::Backward | PassKind::BackwardInput | PassKind::BackwardWeight => *read,
            }
        };
        self.ranks.iter().map(|passes| passes.iter().map(&mut version).collect()).collect()
    }

    /// Returns the staleness of each stage: the maximum number of updates between the weights at which a gradient was computed and the
    /// weights to which it is applied.
    pub fn staleness(&self) -> Vec<usize> {
        let mut staleness = vec![0; self.num_stages()];
        let versions = self.versions_read();
        for (passes, versions) in self.ranks.iter().zip(&versions) {
            for (pass, version) in passes.iter().zip(versions) {
                if pass.kind != PassKind::Update && self.weights != WeightVersions::Drained {
                    let applied_to = pass.microbatch / self.num_microbatches;
                    let lag = applied_to.saturating_sub(*version);
                    staleness[pass.stage] = lag.max(staleness[pass.stage]);
                }
            }
        }
        staleness
    }

    /// Returns the number of weight versions that each stage keeps: from the newest back to the oldest that a later pass reads.
    pub fn versions_kept(&self) -> Vec<usize> {
        let mut kept = vec![1; self.num_stages()];
        let versions = self.versions_read();
        // While going backwards through the passes of a rank: the oldest version that this pass or a later pass of the stage reads.
        let mut oldest_needed = vec![usize::MAX; self.num_stages()];
        for (passes, versions) in self.ranks.iter().zip(&versions) {
            for (pass, &version) in passes.iter().zip(versions).rev() {
                let oldest = &mut oldest_needed[pass.stage];
                if pass.kind == PassKind::Update {
                    let newest = version + 1;
                    let behind = newest.saturating_sub((*oldest).min(newest));
                    kept[pass.stage] = (behind + 1).max(kept[pass.stage]);
                }
                *oldest = version.min(*oldest);
            }
        }
        kept
    }
}
