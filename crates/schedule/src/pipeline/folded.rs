use super::pass::Pass;
use std::collections::VecDeque;

/// The two stages of a rank in a folded pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chunk {
    /// The stage on the way from the first rank to the last.
    Down,
    /// The stage on the way back.
    Up,
}

/// Collects the passes of a rank with two stages. Each added pass is for the next microbatch of its stage. Passes of microbatches that do
/// not exist are left out.
pub(super) struct FoldedRank {
    stages: [usize; 2],
    num_microbatches: usize,
    num_forward: [usize; 2],
    num_backward: [usize; 2],
    /// Delayed weight halves, in the order of their input halves.
    held_back: VecDeque<(Chunk, usize)>,
    passes: Vec<Pass>,
}

impl FoldedRank {
    pub(super) fn new(rank: usize, num_ranks: usize, num_microbatches: usize) -> FoldedRank {
        FoldedRank {
            stages: [rank, 2 * num_ranks - 1 - rank],
            num_microbatches,
            num_forward: [0; 2],
            num_backward: [0; 2],
            held_back: VecDeque::new(),
            passes: Vec::new(),
        }
    }

    /// Returns the number of forward passes that were added for a stage, including those that were left out.
    pub(super) fn num_forward(&self, chunk: Chunk) -> usize {
        self.num_forward[chunk as usize]
    }

    /// Adds forward of a stage's next microbatch.
    pub(super) fn forward(&mut self, chunk: Chunk) {
        let microbatch = take_next(&mut self.num_forward[chunk as usize]);
        self.push(Pass::forward, chunk, microbatch);
    }

    /// Adds full backward of a stage's next microbatch.
    pub(super) fn backward(&mut self, chunk: Chunk) {
        let microbatch = take_next(&mut self.num_backward[chunk as usize]);
        self.push(Pass::backward, chunk, microbatch);
    }

    /// Adds the input half of backward of a stage's next microbatch, and delays its weight half.
    pub(super) fn backward_input(&mut self, chunk: Chunk) {
        let microbatch = take_next(&mut self.num_backward[chunk as usize]);
        self.push(Pass::backward_input, chunk, microbatch);
        self.held_back.push_back((chunk, microbatch));
    }

    /// Adds the weight half that was delayed first.
    pub(super) fn backward_weight(&mut self) {
        if let Some((chunk, microbatch)) = self.held_back.pop_front() {
            self.push(Pass::backward_weight, chunk, microbatch);
        }
    }

    /// Adds all delayed weight halves, and returns the passes.
    pub(super) fn finish(mut self) -> Vec<Pass> {
        while !self.held_back.is_empty() {
            self.backward_weight();
        }
        self.passes
    }

    fn push(&mut self, pass: fn(usize, usize) -> Pass, chunk: Chunk, microbatch: usize) {
        if microbatch < self.num_microbatches {
            self.passes.push(pass(self.stages[chunk as usize], microbatch));
        }
    }
}

fn take_next(counter: &mut usize) -> usize {
    *counter += 1;
    *counter - 1
}
