//! Pieces: ranges of elements with a common update rule.

use super::rules::Update;
use super::state::{BLOCK_LEN, PieceState, StateSlice, num_blocks};
use crate::kernels::cpu::simd::SimdLevel;
use crate::kernels::cpu::{Cpu, SharedSlice, TASK_ELEMENTS};
use std::ops::Range;

/// Consecutive elements of one parameter with the same update. The sums of an update are computed separately for each piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First element within the unit's full flat buffer, even if only a part of it is stored.
    pub position: usize,
    /// First element within the buffers of parameters and gradients.
    pub start: usize,
    /// First element within the state.
    pub state: usize,
    /// Number of elements.
    pub len: usize,
    /// Index of the update rule.
    pub update: usize,
}

/// Pieces in order, assigned to tasks by their lengths alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces {
    pieces: Vec<Piece>,
    /// For each piece, its first block of 8-bit state.
    first_blocks: Vec<usize>,
    tasks: Vec<Range<usize>>,
    num_blocks: usize,
}

impl Pieces {
    /// Maximum length of a piece, for load balancing. Pieces whose update computes no sums and has no 8-bit state may be split anywhere.
    pub const LEN_MAX: usize = TASK_ELEMENTS;

    /// Creates pieces, given in the order of memory.
    ///
    /// # Panics
    /// If two pieces overlap, in the buffers or in the state, or are out of order, because tasks write to pieces concurrently.
    pub fn new(pieces: Vec<Piece>) -> Self {
        for pair in pieces.windows(2) {
            let (first, second) = (pair[0], pair[1]);
            let is_after = |first: usize, len, second| first.saturating_add(len) <= second;
            let is_separate = is_after(first.start, first.len, second.start)
                && is_after(first.state, first.len, second.state);
            assert!(is_separate, "{first:?} and {second:?} overlap");
        }
        let mut tasks = Vec::new();
        let (mut first, mut num_elements) = (0, 0);
        for (index, piece) in pieces.iter().enumerate() {
            if num_elements >= TASK_ELEMENTS {
                tasks.push(first..index);
                (first, num_elements) = (index, 0);
            }
            num_elements += piece.len;
        }
        if first < pieces.len() {
            tasks.push(first..pieces.len());
        }
        let mut num_blocks_before = 0;
        let mut count = |piece: &Piece| {
            let first = num_blocks_before;
            num_blocks_before += num_blocks(piece.len);
            first
        };
        let blocks = pieces.iter().map(&mut count).collect();
        Pieces { pieces, first_blocks: blocks, tasks, num_blocks: num_blocks_before }
    }

    /// Splits `len` elements into pieces that all use the first update rule.
    pub fn whole(len: usize) -> Self {
        let piece = |start| Piece {
            position: start,
            start,
            state: start,
            len: Self::LEN_MAX.min(len - start),
            update: 0,
        };
        Pieces::new((0..len).step_by(Self::LEN_MAX).map(piece).collect())
    }

    /// Returns the pieces.
    pub fn as_slice(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns the first block of 8-bit state of a piece.
    pub(crate) fn first_block(&self, piece: usize) -> usize {
        self.first_blocks[piece]
    }

    /// Returns the number of blocks of 8-bit state. Blocks do not span pieces.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Returns the number of elements of all pieces.
    pub fn num_elements(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }
}

/// One pass of updates over pieces.
pub(crate) struct PieceUpdates<'a> {
    pub(crate) pieces: &'a Pieces,
    /// The update rules. Each piece has the index of its rule.
    pub(crate) updates: &'a [Update],
    /// A factor of the learning rate per update, or empty.
    pub(crate) scales: &'a [f32],
    /// Seed of the rounding of states narrower than f32, combined with the element's position.
    pub(crate) rounding_seed: u32,
    /// Receives the two sums of each piece.
    pub(crate) sums: Option<&'a mut [[f64; 2]]>,
}

impl Cpu {
    /// Runs `task(index of the piece, piece)` over all pieces.
    pub(super) fn for_pieces(&self, pieces: &Pieces, task: impl Fn(usize, &Piece) + Sync) {
        self.threads.run(pieces.tasks.len(), &|index| {
            for index in pieces.tasks[index].clone() {
                task(index, &pieces.pieces[index]);
            }
        });
    }

    /// Updates parameters and states piece by piece. `grads` is empty if no update reads it.
    pub(crate) fn update(
        &self,
        pass: PieceUpdates<'_>,
        parameters: &mut [f32],
        grads: &[f32],
        states: [StateSlice<'_>; 2],
    ) {
        let PieceUpdates { pieces, updates, scales, rounding_seed, sums } = pass;
        let is_for_each = |sums: &&mut [[f64; 2]]| sums.len() == pieces.pieces.len();
        assert!(sums.as_ref().is_none_or(is_for_each), "sums for each piece");
        let (parameters, sums) = (SharedSlice::new(parameters), sums.map(SharedSlice::new));
        self.for_pieces(pieces, |index, piece| {
            // SAFETY: neither pieces nor their blocks overlap.
            let p = unsafe { parameters.range(piece.start, piece.len) };
            let states = states.map(|state| {
                // SAFETY: as above.
                unsafe { state.piece(piece.state..piece.state + piece.len, pieces.first_blocks[index]) }
            });
            let g = if grads.is_empty() { grads } else { &grads[piece.start..piece.start + piece.len] };
            let piece_states =
                PieceStates { simd_level: self.simd_level, states, rounding_seed, position: piece.position };
            let update = updates[piece.update];
            let update = scales.get(piece.update).map_or(update, |&scale| update.scaled(scale));
            let found = update.run(p, g, piece_states);
            if let Some(sums) = &sums {
                // SAFETY: each piece has its own sums.
                unsafe { sums.range(index, 1) }.copy_from_slice(&[found]);
            }
        });
    }
}

impl Pieces {
    /// Returns the elements and the blocks of the pieces `range` within a state. Panics if the pieces are not contiguous in the state.
    pub(crate) fn span(&self, range: Range<usize>) -> (Range<usize>, Range<usize>) {
        let Some(last) = range.clone().last() else { return (0..0, 0..0) };
        let (first, piece) = (range.start, self.pieces[last]);
        let blocks = self.first_blocks[first]..self.first_blocks[last] + num_blocks(piece.len);
        let elements = self.pieces[first].state..piece.state + piece.len;
        let num_elements: usize = self.pieces[range].iter().map(|piece| piece.len).sum();
        assert_eq!(elements.len(), num_elements, "the pieces of a state lie one after another");
        (elements, blocks)
    }

    /// Copies the state of the pieces `range` to f32s, contiguously. `state` starts with the first of these pieces.
    pub(crate) fn read_state(
        &self,
        simd_level: SimdLevel,
        range: Range<usize>,
        state: StateSlice<'_>,
        out: &mut [f32],
    ) {
        self.for_each_state(range, state, |_, place, state| {
            for (block, out) in out[place].chunks_mut(BLOCK_LEN).enumerate() {
                state.load(simd_level, block, out);
            }
        });
    }

    /// Sets the state of the pieces `range`. Values that were read from a state of the same dtype are restored exactly. `state` starts with
    /// the first of these pieces.
    pub(crate) fn write_state(
        &self,
        simd_level: SimdLevel,
        range: Range<usize>,
        state: StateSlice<'_>,
        values: &[f32],
    ) {
        self.for_each_state(range, state, |piece, place, mut state| {
            for (block, values) in values[place].chunks(BLOCK_LEN).enumerate() {
                state.store(simd_level, block, values, 0, piece.position + block * BLOCK_LEN);
            }
        });
    }

    /// Calls `visit` with each of the pieces `range`, its elements relative to the first piece, and its part of `state`.
    fn for_each_state(
        &self,
        range: Range<usize>,
        state: StateSlice<'_>,
        mut visit: impl FnMut(&Piece, Range<usize>, PieceState<'_>),
    ) {
        let (elements, blocks) = self.span(range.clone());
        for index in range {
            let piece = &self.pieces[index];
            let first = piece.state - elements.start;
            let place = first..first + piece.len;
            // SAFETY: the previous piece's reference was dropped.
            let state = unsafe { state.piece(place.clone(), self.first_blocks[index] - blocks.start) };
            visit(piece, place, state);
        }
    }
}

/// The state of a piece and the parameters of its rounding.
pub(super) struct PieceStates<'a> {
    pub(super) simd_level: SimdLevel,
    states: [PieceState<'a>; 2],
    rounding_seed: u32,
    position: usize,
}

impl PieceStates<'_> {
    /// Calls `run` with f32 states: once if the states are f32, otherwise block by block. Returns the sum of the results.
    pub(super) fn run(
        self,
        p: &mut [f32],
        g: &[f32],
        mut run: impl FnMut(&mut [f32], &[f32], &mut [f32], &mut [f32]) -> [f32; 2],
    ) -> [f64; 2] {
        let PieceStates { simd_level, states, rounding_seed, position } = self;
        let mut states = match states {
            [PieceState::Absent, PieceState::Absent] => return widen(run(p, g, &mut [], &mut [])),
            [PieceState::F32(first), PieceState::Absent] => return widen(run(p, g, first, &mut [])),
            [PieceState::F32(first), PieceState::F32(second)] => return widen(run(p, g, first, second)),
            states => states,
        };
        let mut buffers = [[0.0_f32; BLOCK_LEN]; 2];
        let mut total = [0.0; 2];
        for (block, p) in p.chunks_mut(BLOCK_LEN).enumerate() {
            let start = block * BLOCK_LEN;
            let g = if g.is_empty() { g } else { &g[start..start + p.len()] };
            let [first, second] = &mut buffers;
            let (first, second) = (&mut first[..p.len()], &mut second[..p.len()]);
            states[0].load(simd_level, block, first);
            states[1].load(simd_level, block, second);
            let sums = widen(run(p, g, first, second));
            (total[0], total[1]) = (total[0] + sums[0], total[1] + sums[1]);
            let position = position + start;
            states[0].store(simd_level, block, first, rounding_seed, position);
            // The second state uses other random numbers than the first.
            states[1].store(simd_level, block, second, !rounding_seed, position);
        }
        total
    }
}

fn widen(sums: [f32; 2]) -> [f64; 2] {
    sums.map(f64::from)
}
