use super::{LinkTransport, Memories, reserve};
use crate::CommError;
use crate::call::Call;
use crate::control::Control;
use crate::transport::check_control_bytes;
use std::mem::ManuallyDrop;
use trireme_base::{DType, Rank};
use trireme_schedule::collective::all_gather_pairwise;

impl LinkTransport {
    /// Gathers control data of all ranks: first the lengths of all blocks, then the blocks.
    pub(super) fn gather_blocks(
        &mut self,
        call: &Call,
        blocks: &mut [Vec<u8>],
        control: &mut Control,
    ) -> Result<(), CommError> {
        if let Some(shared) = self.shared_by_all() {
            return shared.gather_blocks(call, blocks, control);
        }
        let own = self.rank.0;
        let mut lengths = vec![0_u64; self.world_size()];
        lengths[own] = blocks[own].len() as u64;
        let ranges: Vec<_> = (0..lengths.len()).map(|rank| 8 * rank..8 * (rank + 1)).collect();
        self.steps.clear();
        all_gather_pairwise(self.rank, &ranges, &mut self.steps);
        let bytes = bytemuck::cast_slice_mut(&mut lengths);
        self.run_steps(call, &mut Memories::new(bytes, DType::U8, None), control)?;

        let mut ranges = Vec::with_capacity(lengths.len());
        let mut end = 0;
        for (rank, &bytes) in lengths.iter().enumerate() {
            let len = check_control_bytes(Rank(rank), bytes)?;
            ranges.push(end..end + len);
            end += len;
        }
        let mut vector = ManuallyDrop::new(std::mem::take(&mut self.vector));
        let gathered = reserve(&mut vector, end)?;
        gathered[ranges[own].clone()].copy_from_slice(&blocks[own]);
        self.steps.clear();
        all_gather_pairwise(self.rank, &ranges, &mut self.steps);
        let result = self.run_steps(call, &mut Memories::new(gathered, DType::U8, None), control);
        if result.is_ok() {
            for (block, place) in blocks.iter_mut().zip(ranges) {
                *block = gathered[place].to_vec();
            }
        }
        self.vector = ManuallyDrop::into_inner(vector);
        result
    }
}
