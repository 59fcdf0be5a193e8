//! Decoder of the AMX instructions: a VEX prefix of three bytes, the opcode, ModRM, and for memory operands SIB and displacement if present
//! (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, sections 2.1 and 2.3).

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instruction {
    LoadConfig { address: u64 },
    Release,
    Zero { tile: usize },
    Load { tile: usize, rows: Rows },
    Store { tile: usize, rows: Rows },
    DotProduct { sum: usize, left: usize, right: usize },
}

/// Addresses of a tile's rows in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) first: u64,
    pub(super) stride: u64,
}

/// The registers from which addresses are computed.
#[derive(Debug)]
pub(super) struct Registers {
    /// General registers, by their numbers in instructions.
    pub(super) general: [u64; 16],
    pub(super) instruction: u64,
}

/// Decodes the instruction at `registers.instruction`. Returns it with the address of the next one, or `None` if it is not an
/// [`Instruction`].
///
/// Calls `byte_at` only for bytes of the instruction, up to the first byte that cannot belong to an AMX instruction.
pub(super) fn decode(registers: &Registers, byte_at: impl Fn(u64) -> u8) -> Option<(Instruction, u64)> {
    const VEX_OF_THREE_BYTES: u8 = 0xc4;
    const OPCODE_MAP: u8 = 2;
    let mut code = ByteReader { next: registers.instruction, byte_at };
    if code.byte() != VEX_OF_THREE_BYTES {
        return None;
    }
    let (first, second) = (code.byte(), code.byte());
    // Bits W and L are clear in all of these instructions.
    if first & 0x1f != OPCODE_MAP || second & 0x84 != 0 {
        return None;
    }
    let opcode = code.byte();
    if !matches!(opcode, 0x49 | 0x4b | 0x5c) {
        return None;
    }
    let mod_rm = ModRm::new(code.byte(), first);
    // Only the dot product of tiles has a third register operand; the other instructions leave its field unused. The field is stored
    // inverted, and so are R, X and B.
    let third = usize::from(!second >> 3 & 0xf);
    if opcode != 0x5c && third != 0 {
        return None;
    }
    let in_registers = mod_rm.mode == 3;
    let memory = (!in_registers).then(|| code.memory(registers, &mod_rm));
    let (register, operand) = (mod_rm.register, mod_rm.operand);
    let instruction = match (second & 3, opcode, memory) {
        (0, 0x49, Some(memory)) if register == 0 => {
            Instruction::LoadConfig { address: memory.rows.first.wrapping_add(memory.rows.stride) }
        }
        (0, 0x49, None) if register == 0 && operand == 0 => Instruction::Release,
        (3, 0x49, None) if operand == 0 => Instruction::Zero { tile: tile(register)? },
        (1 | 3, 0x4b, Some(Memory { rows, has_sib: true })) => {
            Instruction::Load { tile: tile(register)?, rows }
        }
        (2, 0x4b, Some(Memory { rows, has_sib: true })) => Instruction::Store { tile: tile(register)?, rows },
        (2, 0x5c, None) => {
            Instruction::DotProduct { sum: tile(register)?, left: tile(operand)?, right: tile(third)? }
        }
        _ => return None,
    };
    Some((instruction, code.next))
}

/// Returns the number if it names one of the eight tiles.
fn tile(number: usize) -> Option<usize> {
    (number < 8).then_some(number)
}

/// The byte that names two operands, with the bits that the prefix adds.
struct ModRm {
    mode: u8,
    /// Number of the operand without the prefix's bit. These three bits alone select the special forms of addresses.
    low_operand: u8,
    register: usize,
    operand: usize,
    /// Bits that the prefix adds to the numbers of the index and base registers.
    index_high: usize,
    base_high: usize,
}

impl ModRm {
    fn new(byte: u8, prefix: u8) -> Self {
        let high = |bit: u8| usize::from(!prefix >> bit & 1) << 3;
        ModRm {
            mode: byte >> 6,
            low_operand: byte & 7,
            register: usize::from(byte >> 3 & 7) | high(7),
            operand: usize::from(byte & 7) | high(5),
            index_high: high(6),
            base_high: high(5),
        }
    }
}

/// An operand in memory. Base plus displacement is the first row, and index times scale is the stride.
struct Memory {
    rows: Rows,
    has_sib: bool,
}

/// A reader of a program's bytes, starting at an address.
struct ByteReader<F> {
    next: u64,
    byte_at: F,
}

impl<F: Fn(u64) -> u8> ByteReader<F> {
    fn byte(&mut self) -> u8 {
        let byte = (self.byte_at)(self.next);
        self.next += 1;
        byte
    }

    fn displacement(&mut self, num_bytes: usize) -> u64 {
        match num_bytes {
            0 => 0,
            1 => self.byte() as i8 as u64,
            _ => i32::from_le_bytes([(); 4].map(|()| self.byte())) as u64,
        }
    }

    fn memory(&mut self, registers: &Registers, mod_rm: &ModRm) -> Memory {
        let general = &registers.general;
        let has_sib = mod_rm.low_operand == 4;
        let (mut low_base, mut stride) = (mod_rm.low_operand, 0);
        if has_sib {
            let sib = self.byte();
            let index = usize::from(sib >> 3 & 7) | mod_rm.index_high;
            // The number of the stack pointer means that there is no index.
            stride = if index == 4 { 0 } else { general[index] << (sib >> 6) };
            low_base = sib & 7;
        }
        // Mode 0 has no displacement, except that base 5 stands for a long displacement without a base: absolute with SIB, and relative to
        // the next instruction without SIB.
        let has_base = mod_rm.mode != 0 || low_base != 5;
        let displacement = self.displacement(match mod_rm.mode {
            0 if has_base => 0,
            1 => 1,
            _ => 4,
        });
        let base = match (has_base, has_sib) {
            (true, _) => general[usize::from(low_base) | mod_rm.base_high],
            (false, true) => 0,
            (false, false) => self.next,
        };
        Memory { rows: Rows { first: base.wrapping_add(displacement), stride }, has_sib }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::arch::asm;

    /// Returns registers that all differ, with the instruction pointer at `instruction`.
    fn registers(instruction: u64) -> Registers {
        Registers { general: std::array::from_fn(|number| 0x1_0000 * (number as u64 + 1)), instruction }
    }

    /// Decodes an instruction that the compiler assembles here, and jumps over it.
    macro_rules! decode_assembled {
        ($text:literal) => {{
            let (start, end): (u64, u64);
            // SAFETY: computes two addresses.
            unsafe {
                asm!("lea {}, [rip + 2f]", "lea {}, [rip + 3f]", "jmp 3f", "2:", $text, "3:",
                    out(reg) start, out(reg) end, options(nomem, nostack))
            };
            // SAFETY: within the code above.
            let byte_at = |address| unsafe { *(address as *const u8) };
            let decoded = decode(&registers(start), |address| {
                assert!((start..end).contains(&address), "reads past {}", $text);
                byte_at(address)
            });
            decoded.map(|(instruction, next)| {
                assert_eq!(next, end, "the length of {}", $text);
                instruction
            })
        }};
    }

    const RAX: u64 = 0x1_0000;
    const RBX: u64 = 0x4_0000;
    const RSP: u64 = 0x5_0000;
    const RBP: u64 = 0x6_0000;
    const R12: u64 = 0xd_0000;
    const R13: u64 = 0xe_0000;
    const R15: u64 = 0x10_0000;

    #[test]
    fn every_form_of_an_address() {
        let load = |first, stride| Some(Instruction::Load { tile: 3, rows: Rows { first, stride } });
        assert_eq!(decode_assembled!("tileloadd tmm3, [rax + rbx*1]"), load(RAX, RBX));
        assert_eq!(decode_assembled!("tileloadd tmm3, [rax + rbx*8 + 64]"), load(RAX + 64, 8 * RBX));
        assert_eq!(decode_assembled!("tileloadd tmm3, [rsp + rbp*2 - 64]"), load(RSP - 64, 2 * RBP));
        assert_eq!(
            decode_assembled!("tileloadd tmm3, [rbp + r12*4 + 0x1234567]"),
            load(RBP + 0x123_4567, 4 * R12)
        );
        assert_eq!(decode_assembled!("tileloadd tmm3, [r13 + rax*1]"), load(R13, RAX));
        assert_eq!(decode_assembled!("tileloadd tmm3, [r12 + r15*1 - 4096]"), load(R12 - 4096, R15));
        assert_eq!(decode_assembled!("tileloadd tmm3, [r15]"), load(R15, 0));
        assert_eq!(decode_assembled!("tileloadd tmm3, [r13*4 + 0x100]"), load(0x100, 4 * R13));
        assert_eq!(decode_assembled!("tileloaddt1 tmm3, [rbp + rax*1]"), load(RBP, RAX));
        let config = |address| Some(Instruction::LoadConfig { address });
        assert_eq!(decode_assembled!("ldtilecfg [rax]"), config(RAX));
        assert_eq!(decode_assembled!("ldtilecfg [r12 + 8]"), config(R12 + 8));
        assert_eq!(decode_assembled!("ldtilecfg [r13 + r15*2 - 8]"), config(R13 + 2 * R15 - 8));
        assert_eq!(decode_assembled!("ldtilecfg [rbp]"), config(RBP));
        // Relative to the next instruction: `ldtilecfg [rip + 0x1234]`.
        let bytes = [0xc4, 0xe2, 0x78, 0x49, 0x05, 0x34, 0x12, 0, 0];
        let decoded = decode(&registers(0), |address| bytes[address as usize]);
        assert_eq!(decoded, Some((Instruction::LoadConfig { address: 9 + 0x1234 }, 9)));
    }

    #[test]
    fn every_instruction_and_register() {
        let stored = Instruction::Store { tile: 7, rows: Rows { first: RSP, stride: R15 } };
        assert_eq!(decode_assembled!("tilestored [rsp + r15*1], tmm7"), Some(stored));
        assert_eq!(decode_assembled!("tilerelease"), Some(Instruction::Release));
        assert_eq!(decode_assembled!("tilezero tmm5"), Some(Instruction::Zero { tile: 5 }));
        let product = |sum, left, right| Some(Instruction::DotProduct { sum, left, right });
        assert_eq!(decode_assembled!("tdpbf16ps tmm1, tmm2, tmm3"), product(1, 2, 3));
        assert_eq!(decode_assembled!("tdpbf16ps tmm6, tmm0, tmm7"), product(6, 0, 7));
    }

    #[test]
    fn other_instructions_are_left_alone() {
        assert_eq!(decode_assembled!("ud2"), None);
        assert_eq!(decode_assembled!("tdpbssd tmm1, tmm2, tmm3"), None);
        assert_eq!(decode_assembled!("sttilecfg [rax]"), None);
        assert_eq!(decode_assembled!("vpmulld xmm1, xmm2, [r9 + rax*2]"), None);
        assert_eq!(decode_assembled!("vfmadd231ps xmm1, xmm2, xmm3"), None);
        // Encodings that no assembler emits: a load without SIB, `tilezero` with a third register, and products with the bit W, with the
        // bit L, and of a tile that does not exist.
        for bytes in [
            [0xc4, 0xe2, 0x7b, 0x4b, 0x18],
            [0xc4, 0xe2, 0x73, 0x49, 0xe8],
            [0xc4, 0xe2, 0xe2, 0x5c, 0xca],
            [0xc4, 0xe2, 0x66, 0x5c, 0xca],
            [0xc4, 0xe2, 0x22, 0x5c, 0xca],
        ] {
            assert_eq!(decode(&registers(0), |address| bytes[address as usize]), None, "{bytes:x?}");
        }
    }
}
