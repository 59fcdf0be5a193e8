//! Runs the threads of a block.

use super::arithmetic::{binary, compares, convert, extended, masked, multiply_add, unary};
use super::instruction::{
    Binary, FIRST_ADDRESS, Instruction, Operand, Operation, PtxKernel, Space, Special, Type, Unary, Value,
    WarpOperation,
};
use crate::floats::widened;
use crate::launch::{Index, Launch, WARP};
use crate::random::Random;

/// A thread.
struct Thread {
    index: Index,
    registers: Vec<u64>,
    local: Vec<u8>,
    /// The next instruction.
    at: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    AtBarrier,
    /// Waits for the lanes of a mask at an operation of the warp.
    AtWarpOperation(u32),
    Done,
}

/// A block that runs.
struct Block<'a> {
    kernel: &'a PtxKernel,
    launch: &'a Launch,
    block: Index,
    /// Returns whether device memory has these bytes.
    is_device_memory: &'a dyn Fn(usize, usize) -> bool,
    parameters: Vec<u8>,
    shared: Vec<u8>,
}

/// Runs a block. Returns a description of the failure if a thread fails, or waits for others that never come.
pub(crate) fn run_block(
    kernel: &PtxKernel,
    launch: &Launch,
    block: Index,
    is_device_memory: &dyn Fn(usize, usize) -> bool,
    random: &mut Random,
) -> Result<(), String> {
    let end = kernel.parameter_offsets.iter().zip(&kernel.sizes).map(|(start, size)| start + size).max();
    let mut parameters = vec![0; end.unwrap_or(0)];
    for ((&start, &size), argument) in
        kernel.parameter_offsets.iter().zip(&kernel.sizes).zip(&launch.arguments)
    {
        let bytes = argument.iter().flat_map(|word| word.to_le_bytes());
        parameters.splice(start..start + size, bytes.take(size));
    }
    let shared = vec![u8::MAX; kernel.shared_bytes + launch.shared_bytes];
    let mut running = Block { kernel, launch, block, is_device_memory, parameters, shared };
    let num_threads = launch.block.num();
    let mut threads: Vec<Thread> = (0..num_threads)
        .map(|position| Thread {
            index: launch.block.at(position),
            registers: vec![0; kernel.num_registers],
            local: vec![u8::MAX; kernel.local_bytes],
            at: 0,
            state: State::Ready,
        })
        .collect();
    let mut ready = Vec::with_capacity(threads.len());
    loop {
        ready.clear();
        ready.extend((0..threads.len()).filter(|position| threads[*position].state == State::Ready));
        random.shuffle(&mut ready);
        for &position in &ready {
            let thread = &mut threads[position];
            running.run_thread(thread).map_err(|error| {
                let text = &kernel.instructions[thread.at].text;
                format!("block {block:?}, thread {:?}, at {text}: {error}", thread.index)
            })?;
        }
        if threads.iter().all(|thread| thread.state == State::Done) {
            return Ok(());
        }
        let mut is_any_ready = false;
        for lanes in threads.chunks_mut(WARP) {
            is_any_ready |= running.finish_warp_operation(lanes)?;
        }
        if is_any_ready {
            continue;
        }
        let is_waiting = |thread: &Thread| matches!(thread.state, State::AtBarrier | State::Done);
        if !threads.iter().all(is_waiting) {
            return Err(format!("block {block:?}: threads wait for others that do not come"));
        }
        threads.iter_mut().filter(|thread| thread.state == State::AtBarrier).for_each(|thread| {
            thread.state = State::Ready;
        });
    }
}

impl Block<'_> {
    /// Runs a thread until it waits for others, or ends.
    fn run_thread(&mut self, thread: &mut Thread) -> Result<(), String> {
        let kernel = self.kernel;
        loop {
            let Some(instruction) = kernel.instructions.get(thread.at) else {
                thread.state = State::Done;
                return Ok(());
            };
            let is_skipped = instruction
                .guard
                .is_some_and(|(register, expected)| (thread.registers[register] != 0) != expected);
            if is_skipped {
                thread.at += 1;
                continue;
            }
            match instruction.operation {
                Operation::Branch => match instruction.operands[..] {
                    [Operand::Target(target)] => thread.at = target,
                    _ => return Err("a branch without a target".to_owned()),
                },
                Operation::Return => {
                    thread.state = State::Done;
                    return Ok(());
                }
                Operation::Trap => return Err("a trap".to_owned()),
                Operation::BlockBarrier => {
                    thread.state = State::AtBarrier;
                    thread.at += 1;
                    return Ok(());
                }
                Operation::Warp(operation) => {
                    let mask = match operation {
                        WarpOperation::LoadMatrices { .. } | WarpOperation::MultiplyMatrices { .. } => {
                            u32::MAX
                        }
                        _ => self.last_value(thread, instruction) as u32,
                    };
                    thread.state = State::AtWarpOperation(mask);
                    return Ok(());
                }
                _ => {
                    self.execute(thread, instruction)?;
                    thread.at += 1;
                }
            }
        }
    }

    fn value(&self, thread: &Thread, value: Value) -> u64 {
        let part = |index: Index, dim: usize| u64::from([index.x, index.y, index.z][dim]);
        match value {
            Value::Register(register) => thread.registers[register],
            Value::Constant(bits) => bits,
            Value::Special(Special::ThreadId(dim)) => part(thread.index, dim),
            Value::Special(Special::BlockSize(dim)) => part(self.launch.block, dim),
            Value::Special(Special::BlockId(dim)) => part(self.block, dim),
            Value::Special(Special::GridSize(dim)) => part(self.launch.grid, dim),
        }
    }

    /// Returns the bits of an operand. Those of a vector follow each other.
    fn operand(&self, thread: &Thread, instruction: &Instruction, index: usize) -> u64 {
        match &instruction.operands[index] {
            Operand::Value(value) => self.value(thread, *value),
            Operand::Vector(parts) => {
                let bits = part_bits(instruction, parts);
                let part = |(place, value): (usize, &Value)| {
                    masked(self.value(thread, *value), bits / 8) << (place * bits)
                };
                parts.iter().enumerate().map(part).fold(0, |all, part| all | part)
            }
            Operand::Address(base, offset) => self.value(thread, *base).wrapping_add_signed(*offset),
            Operand::Target(target) => *target as u64,
        }
    }

    fn last_value(&self, thread: &Thread, instruction: &Instruction) -> u64 {
        self.operand(thread, instruction, instruction.operands.len() - 1)
    }

    fn execute(&mut self, thread: &mut Thread, instruction: &Instruction) -> Result<(), String> {
        let of = |index: usize| self.operand(thread, instruction, index);
        let result = match instruction.operation {
            Operation::Unary(operation, of_type) => unary(operation, of_type, of(1)),
            Operation::Binary(operation, of_type) => binary(operation, of_type, [of(1), of(2)]),
            Operation::MultiplyAdd(of_type, rounding) => {
                multiply_add(of_type, rounding, [of(1), of(2), of(3)])
            }
            Operation::Convert { to, from, rounding, saturates } => {
                convert(to, from, rounding, saturates, of(1))
            }
            Operation::Compare(comparison, of_type) => {
                u64::from(compares(comparison, of_type, [of(1), of(2)]))
            }
            Operation::Select => of(if of(3) != 0 { 1 } else { 2 }),
            Operation::PermuteBytes => {
                let bytes = (of(1) & 0xffff_ffff) | of(2) << 32;
                let selector = of(3);
                if selector & 0x8888 != 0 {
                    return Err("a byte of signs".to_owned());
                }
                let byte = |place: u32| bytes >> (8 * (selector >> (4 * place) & 7)) & 0xff;
                (0..4).map(|place| byte(place) << (8 * place)).sum()
            }
            Operation::InsertBits => {
                let (first, len) = (of(3) as u32 & 0xff, of(4) as u32 & 0xff);
                let mask = (((1_u64 << len) - 1) << first) & 0xffff_ffff;
                (of(1) << first) & mask | of(2) & !mask & 0xffff_ffff
            }
            Operation::Load(space, of_type) => return self.load(thread, instruction, space, of_type),
            Operation::Store(space, of_type) => return self.store(thread, instruction, space, of_type),
            Operation::CompareAndSwap(of_type) | Operation::AtomicMax(of_type) => {
                let size = of_type.num_bytes();
                let (address, operand) = (of(1), of(2));
                let bytes = self.bytes(thread, Space::Global, address, size)?;
                let old = word_of(bytes);
                let new = match instruction.operation {
                    Operation::AtomicMax(_) => binary(Binary::Max, of_type, [old, operand]),
                    _ if old == masked(operand, size) => self.operand(thread, instruction, 3),
                    _ => old,
                };
                let bytes = self.bytes(thread, Space::Global, address, size)?;
                bytes.copy_from_slice(&new.to_le_bytes()[..size]);
                old
            }
            _ => return Err("not an instruction of one thread".to_owned()),
        };
        match &instruction.operands[0] {
            Operand::Value(Value::Register(register)) => thread.registers[*register] = result,
            Operand::Vector(parts) => {
                let bits = part_bits(instruction, parts);
                for (place, part) in parts.iter().enumerate() {
                    set(thread, *part, masked(result >> (place * bits), bits / 8));
                }
            }
            destination => return Err(format!("the destination {destination:?}")),
        }
        Ok(())
    }

    /// Returns memory of a thread. Fails beyond the end of its space, and at an address that is not a multiple of the size.
    fn bytes<'b>(
        &'b mut self,
        thread: &'b mut Thread,
        space: Space,
        address: u64,
        num_bytes: usize,
    ) -> Result<&'b mut [u8], String> {
        if !address.is_multiple_of(num_bytes as u64) {
            return Err(format!("{num_bytes} bytes at address {address:#x} of {space:?}"));
        }
        let memory = match space {
            Space::Global => {
                if !(self.is_device_memory)(address as usize, num_bytes) {
                    return Err(format!("{num_bytes} bytes at {address:#x} beyond the device's memory"));
                }
                // SAFETY: memory of the device, by the line above, which is accessible while jobs run; only this thread runs jobs.
                return Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, num_bytes) });
            }
            Space::Shared => &mut self.shared,
            Space::Local => &mut thread.local,
            Space::Parameter => &mut self.parameters,
        };
        let start = address.checked_sub(FIRST_ADDRESS).map(|start| start as usize);
        let bytes = start.and_then(|start| memory.get_mut(start..start.checked_add(num_bytes)?));
        bytes.ok_or_else(|| format!("{num_bytes} bytes at {address} of {space:?} memory"))
    }

    fn load(
        &mut self,
        thread: &mut Thread,
        instruction: &Instruction,
        space: Space,
        of_type: Type,
    ) -> Result<(), String> {
        let address = self.operand(thread, instruction, 1);
        let size = of_type.num_bytes();
        let destinations = values(&instruction.operands[0]);
        let bytes = self.bytes(thread, space, address, size * destinations.len())?;
        let mut words = [0; VECTOR_MAX];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(size)) {
            *word = word_of(bytes);
        }
        for (destination, word) in destinations.iter().zip(words) {
            set(thread, *destination, extended(word, of_type));
        }
        Ok(())
    }

    fn store(
        &mut self,
        thread: &mut Thread,
        instruction: &Instruction,
        space: Space,
        of_type: Type,
    ) -> Result<(), String> {
        let address = self.operand(thread, instruction, 0);
        let size = of_type.num_bytes();
        let sources = values(&instruction.operands[1]);
        let mut words = [0; VECTOR_MAX];
        for (word, source) in words.iter_mut().zip(sources) {
            *word = self.value(thread, *source);
        }
        let bytes = self.bytes(thread, space, address, size * sources.len())?;
        for (to, word) in bytes.chunks_exact_mut(size).zip(words) {
            to.copy_from_slice(&word.to_le_bytes()[..size]);
        }
        Ok(())
    }

    /// Runs an operation that all lanes of a warp have arrived at. Returns whether there was one.
    fn finish_warp_operation(&mut self, lanes: &mut [Thread]) -> Result<bool, String> {
        let waiting = |thread: &Thread| matches!(thread.state, State::AtWarpOperation(_));
        let Some(first) = lanes.iter().find(|thread| waiting(thread)) else { return Ok(false) };
        let (state, at) = (first.state, first.at);
        let State::AtWarpOperation(mask) = state else { unreachable!("the lane waits") };
        let members: Vec<usize> = (0..lanes.len()).filter(|lane| mask >> lane & 1 == 1).collect();
        let has_come = |&lane: &usize| {
            lanes[lane].state == State::Done || (lanes[lane].state == state && lanes[lane].at == at)
        };
        if !members.iter().all(has_come) {
            return Ok(false);
        }
        let line = &self.kernel.instructions[at].text;
        if lanes
            .iter()
            .enumerate()
            .any(|(lane, thread)| thread.state == state && thread.at == at && mask >> lane & 1 == 0)
        {
            return Err(format!("{line}: a lane is not in its mask"));
        }
        let instruction = &self.kernel.instructions[at];
        let Operation::Warp(operation) = instruction.operation else { unreachable!("the lane waits at one") };
        let is_live = |lane: usize| lanes[lane].state != State::Done;
        let is_aligned =
            matches!(operation, WarpOperation::LoadMatrices { .. } | WarpOperation::MultiplyMatrices { .. });
        if is_aligned && (lanes.len() < WARP || !(0..WARP).all(is_live)) {
            return Err(format!("{line}: a lane has ended"));
        }
        let results: Vec<Vec<u64>> = match operation {
            WarpOperation::Barrier => vec![Vec::new(); lanes.len()],
            WarpOperation::Ballot => {
                let votes = members
                    .iter()
                    .filter(|&&lane| is_live(lane) && self.operand(&lanes[lane], instruction, 1) != 0);
                let votes = votes.fold(0, |votes, lane| votes | 1 << lane);
                vec![vec![votes]; lanes.len()]
            }
            WarpOperation::Shuffle(is_butterfly) => {
                if self.operand(&lanes[members[0]], instruction, 3) != 31 {
                    return Err(format!("{line}: a shuffle within a part of the warp"));
                }
                let result = |lane: usize| {
                    let operand = self.operand(&lanes[lane], instruction, 2) as usize;
                    let from = if is_butterfly { lane ^ operand } else { operand % WARP };
                    let is_member = members.contains(&from) && is_live(from);
                    let value = || self.operand(&lanes[from], instruction, 1);
                    is_member.then(value).map(|value| vec![value])
                };
                let results = (0..lanes.len()).map(|lane| {
                    if members.contains(&lane) && is_live(lane) { result(lane) } else { Some(Vec::new()) }
                });
                results
                    .collect::<Option<_>>()
                    .ok_or_else(|| format!("{line}: reads a lane that has ended"))?
            }
            WarpOperation::LoadMatrices { is_transposed } => {
                let rows = self.rows_of_matrices(lanes, instruction)?;
                let of_lane = |lane: usize| {
                    let pair = |matrix: usize| {
                        let element = |place: usize| {
                            let (row, col) = (lane / 4, lane % 4 * 2 + place);
                            let (row, col) = if is_transposed { (col, row) } else { (row, col) };
                            u64::from(rows[matrix * 8 + row][col])
                        };
                        element(0) | element(1) << 16
                    };
                    (0..4).map(pair).collect()
                };
                (0..lanes.len()).map(of_lane).collect()
            }
            WarpOperation::MultiplyMatrices { is_bf16 } => {
                self.multiply_matrices(lanes, instruction, is_bf16)
            }
        };
        for (thread, result) in lanes.iter_mut().zip(results) {
            if thread.state == state && thread.at == at {
                let destinations = instruction.operands.first().map_or(&[][..], |operand| values(operand));
                for (destination, value) in destinations.iter().zip(result) {
                    set(thread, *destination, value);
                }
                thread.at += 1;
                thread.state = State::Ready;
            }
        }
        Ok(true)
    }

    /// Returns the rows of eight elements that `ldmatrix` reads, one per lane.
    fn rows_of_matrices(
        &mut self,
        lanes: &mut [Thread],
        instruction: &Instruction,
    ) -> Result<Vec<[u16; 8]>, String> {
        let row = |thread: &mut Thread| {
            let address = self.operand(thread, instruction, 1);
            let bytes = self.bytes(thread, Space::Shared, address & 0xffff_ffff, 16)?;
            let mut row = [0; 8];
            for (element, bytes) in row.iter_mut().zip(bytes.chunks_exact(2)) {
                *element = word_of(bytes) as u16;
            }
            Ok(row)
        };
        lanes.iter_mut().map(row).collect()
    }

    /// `mma.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type").
    fn multiply_matrices(&self, lanes: &[Thread], instruction: &Instruction, is_bf16: bool) -> Vec<Vec<u64>> {
        let register = |lane: usize, operand: usize, index: usize| {
            self.value(&lanes[lane], values(&instruction.operands[operand])[index])
        };
        let element = |lane: usize, operand: usize, index: usize| {
            let bits = (register(lane, operand, index / 2) >> (index % 2 * 16)) as u16;
            if is_bf16 { f32::from_bits(u32::from(bits) << 16) } else { widened(bits) }
        };
        let left = |row: usize, term: usize| {
            element(row % 8 * 4 + term % 8 / 2, 1, term / 8 * 4 + row / 8 * 2 + term % 2)
        };
        let right = |term: usize, col: usize| element(col * 4 + term % 8 / 2, 2, term / 8 * 2 + term % 2);
        let result = |lane: usize, index: usize| {
            let (row, col) = (lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2);
            let start = f32::from_bits(register(lane, 3, index) as u32);
            let sum = (0..16).fold(start, |sum, term| sum + left(row, term) * right(term, col));
            u64::from(sum.to_bits())
        };
        (0..lanes.len()).map(|lane| (0..4).map(|index| result(lane, index)).collect()).collect()
    }
}

/// Most values that an instruction loads or stores.
const VECTOR_MAX: usize = 4;

/// Returns the width of the parts of a vector that a move packs or unpacks.
fn part_bits(instruction: &Instruction, parts: &[Value]) -> usize {
    // `mov.b32` packs two halves of 16 bits.
    let is_half = instruction.operation == Operation::Unary(Unary::Move, Type::Bits(4));
    if is_half { 16 } else { 64 / parts.len() }
}

fn values(operand: &Operand) -> &[Value] {
    match operand {
        Operand::Value(value) => std::slice::from_ref(value),
        Operand::Vector(values) => values,
        Operand::Address(..) | Operand::Target(_) => &[],
    }
}

fn set(thread: &mut Thread, destination: Value, bits: u64) {
    if let Value::Register(register) = destination {
        thread.registers[register] = bits;
    }
}

fn word_of(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}
