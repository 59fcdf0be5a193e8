//! Reads the text of a module.

use super::instruction::{
    Binary, Comparison, FIRST_ADDRESS, Instruction, Operand, Operation, PtxKernel, Rounding, Space, Special,
    Type, Unary, Value, WarpOperation,
};
use std::collections::HashMap;
use std::sync::Arc;

/// Reads all kernels of a module. Fails with the line that is not understood.
pub(crate) fn parse(text: &str) -> Result<Vec<Arc<PtxKernel>>, String> {
    let mut kernels = Vec::new();
    let mut shared = Memory::default();
    let mut lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    while let Some(line) = lines.next() {
        if line.starts_with(".shared") || line.starts_with(".extern .shared") {
            shared.declare(line)?;
        } else if let Some(name) = line.strip_prefix(".visible .entry ") {
            let mut kernel = Kernel::new(name.trim_end_matches(['(', ')']), &shared);
            if !name.ends_with(')') {
                for line in lines.by_ref().take_while(|line| *line != ")") {
                    kernel.parameter(line)?;
                }
            }
            let body: Vec<&str> = lines.by_ref().take_while(|line| *line != "}").collect();
            kernels.push(Arc::new(kernel.finish(&body)?));
        }
    }
    Ok(kernels)
}

/// The variables of an address space.
#[derive(Debug, Default, Clone)]
struct Memory {
    num_bytes: usize,
    offsets: HashMap<String, usize>,
}

impl Memory {
    /// Reads a declaration such as `.shared .align 16 .b8 name[9216];`. Returns the offset of the variable.
    fn declare(&mut self, line: &str) -> Result<usize, String> {
        let words: Vec<&str> = line.trim_end_matches([';', ',']).split_whitespace().collect();
        let refuse = || format!("unknown declaration: {line}");
        let declared = words.last().ok_or_else(refuse)?;
        let of_type = words.iter().rev().find_map(|word| Type::named(word.strip_prefix('.')?));
        let size = of_type.ok_or_else(refuse)?.num_bytes();
        let align = words.iter().position(|word| *word == ".align").and_then(|at| words.get(at + 1));
        let align: usize = align.map_or(Ok(size), |text| text.parse()).map_err(|_| refuse())?;
        let (name, len) = match declared.split_once('[') {
            // Dynamic shared memory follows what is declared.
            Some((name, "]")) => (name, 0),
            Some((name, len)) => (name, len.trim_end_matches(']').parse().map_err(|_| refuse())?),
            None => (*declared, 1),
        };
        let start = self.num_bytes.next_multiple_of(align);
        self.num_bytes = start + len * size;
        self.offsets.insert(name.to_owned(), start);
        Ok(start)
    }
}

/// A kernel that is being read.
struct Kernel {
    name: String,
    sizes: Vec<usize>,
    parameters: Memory,
    parameter_offsets: Vec<usize>,
    shared: Memory,
    local: Memory,
    registers: HashMap<String, usize>,
}

impl Kernel {
    fn new(name: &str, shared: &Memory) -> Self {
        Kernel {
            name: name.to_owned(),
            sizes: Vec::new(),
            parameters: Memory::default(),
            parameter_offsets: Vec::new(),
            shared: shared.clone(),
            local: Memory::default(),
            registers: HashMap::new(),
        }
    }

    fn parameter(&mut self, line: &str) -> Result<(), String> {
        let start = self.parameters.declare(line)?;
        self.parameter_offsets.push(start);
        self.sizes.push(self.parameters.num_bytes - start);
        Ok(())
    }

    fn finish(mut self, body: &[&str]) -> Result<PtxKernel, String> {
        let mut statements = Vec::new();
        let mut labels = HashMap::new();
        for &line in body {
            if line.starts_with(".shared") {
                self.shared.declare(line)?;
            } else if line.starts_with(".local") {
                self.local.declare(line)?;
            } else if let Some(label) = line.strip_suffix(':') {
                labels.insert(label, statements.len());
            } else if !line.is_empty() && !line.starts_with(['.', '{', '}']) {
                statements.push(line);
            }
        }
        statements.iter().for_each(|line| self.number_registers(line));
        let parse = |line: &&str| {
            self.instruction(line, &labels).map_err(|error| format!("{}: {line}: {error}", self.name))
        };
        let instructions = statements.iter().map(parse).collect::<Result<_, _>>()?;
        Ok(PtxKernel {
            instructions,
            num_registers: self.registers.len(),
            shared_bytes: self.shared.num_bytes,
            local_bytes: self.local.num_bytes,
            name: self.name,
            sizes: self.sizes,
            parameter_offsets: self.parameter_offsets,
        })
    }

    fn number_registers(&mut self, line: &str) {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '%' || c == '.';
        for word in line.split(|c| !is_part(c)).filter(|word| word.starts_with('%')) {
            let next = self.registers.len();
            self.registers.entry(word.to_owned()).or_insert(next);
        }
    }

    fn instruction(&self, text: &str, labels: &HashMap<&str, usize>) -> Result<Instruction, String> {
        let line = text.trim_end_matches(';').trim();
        let (guard, line) = match line.strip_prefix('@') {
            None => (None, line),
            Some(rest) => {
                let (register, rest) = rest.split_once(char::is_whitespace).ok_or("no instruction")?;
                let (register, expected) = match register.strip_prefix('!') {
                    Some(register) => (register, false),
                    None => (register, true),
                };
                (Some((self.registers[register], expected)), rest.trim())
            }
        };
        let (name, operands) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let operation = operation(name).ok_or("an instruction that the interpreter does not know")?;
        let operands = split_operands(operands);
        let operands = operands.map(|operand| self.operand(operand, labels)).collect::<Result<_, _>>()?;
        Ok(Instruction { text: text.to_owned(), guard, operation, operands })
    }

    fn operand(&self, text: &str, labels: &HashMap<&str, usize>) -> Result<Operand, String> {
        if let Some(target) = labels.get(text) {
            return Ok(Operand::Target(*target));
        }
        if let Some(list) = text.strip_prefix('{') {
            let parts = list.trim_end_matches('}').split(',').map(|part| self.value(part.trim()));
            return parts.collect::<Result<_, _>>().map(Operand::Vector);
        }
        if let Some(address) = text.strip_prefix('[') {
            let address = address.trim_end_matches(']');
            let (base, offset) = address.split_once('+').unwrap_or((address, "0"));
            let offset = offset.parse().map_err(|_| format!("the offset {offset}"))?;
            return Ok(Operand::Address(self.value(base)?, offset));
        }
        // A shuffle returns a value, and a predicate that no kernel uses.
        self.value(text.split('|').next().unwrap_or(text)).map(Operand::Value)
    }

    fn value(&self, text: &str) -> Result<Value, String> {
        if let Some(special) = special(text) {
            return Ok(Value::Special(special));
        }
        if let Some(&register) = self.registers.get(text) {
            return Ok(Value::Register(register));
        }
        if let Some(&offset) = [&self.parameters, &self.shared, &self.local]
            .into_iter()
            .find_map(|memory| memory.offsets.get(text))
        {
            return Ok(Value::Constant(FIRST_ADDRESS + offset as u64));
        }
        let number = match (text.strip_prefix("0f"), text.strip_prefix("0d")) {
            (Some(bits), _) | (_, Some(bits)) => u64::from_str_radix(bits, 16).ok(),
            _ => text.parse::<i64>().map(|number| number as u64).or_else(|_| text.parse()).ok(),
        };
        number.map(Value::Constant).ok_or_else(|| format!("the operand {text}"))
    }
}

/// Splits operands at commas outside of braces.
fn split_operands(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let parts = text.split(move |c| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty())
}

fn special(text: &str) -> Option<Special> {
    let (name, dim) = text.strip_prefix('%')?.split_once('.')?;
    let dim = ["x", "y", "z"].iter().position(|own| *own == dim)?;
    Some(match name {
        "tid" => Special::ThreadId(dim),
        "ntid" => Special::BlockSize(dim),
        "ctaid" => Special::BlockId(dim),
        "nctaid" => Special::GridSize(dim),
        _ => return None,
    })
}

fn operation(name: &str) -> Option<Operation> {
    use WarpOperation::{Ballot, Barrier, LoadMatrices, MultiplyMatrices, Shuffle};
    let warp = match name {
        "bar.warp.sync" => Some(Barrier),
        "shfl.sync.bfly.b32" => Some(Shuffle(true)),
        "shfl.sync.idx.b32" => Some(Shuffle(false)),
        "vote.sync.ballot.b32" => Some(Ballot),
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16" => Some(LoadMatrices { is_transposed: false }),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" => Some(LoadMatrices { is_transposed: true }),
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => Some(MultiplyMatrices { is_bf16: true }),
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => Some(MultiplyMatrices { is_bf16: false }),
        _ => None,
    };
    if let Some(warp) = warp {
        return Some(Operation::Warp(warp));
    }
    let parts: Vec<&str> = name.split('.').collect();
    let of_type = || Type::named(parts.last()?);
    let unary = |operation| Some(Operation::Unary(operation, of_type()?));
    let binary = |operation| Some(Operation::Binary(operation, of_type()?));
    let rounding = if parts.contains(&"rm") { Rounding::Down } else { Rounding::Nearest };
    match (parts[0], &parts[1..]) {
        ("mov" | "cvta", _) => unary(Unary::Move),
        ("not", _) => unary(Unary::Not),
        ("neg", _) => unary(Unary::Neg),
        ("abs", ["f32" | "f64"]) => unary(Unary::Abs),
        ("clz", _) => unary(Unary::Clz),
        ("popc", _) => unary(Unary::Popc),
        ("sqrt", ["rn", _]) => unary(Unary::Sqrt),
        ("rcp", _) => unary(Unary::Reciprocal),
        ("ex2", _) => unary(Unary::Exp2),
        ("add", [_] | ["rn", _]) => binary(Binary::Add),
        ("add", ["rz", "f32"]) => binary(Binary::AddToZero),
        ("sub", [_] | ["rn", _]) => binary(Binary::Sub),
        ("mul", ["lo" | "rn", _]) => binary(Binary::Mul),
        ("mul", ["wide", _]) => binary(Binary::MulWide),
        ("mul", ["hi", _]) => binary(Binary::MulHigh),
        ("div", [_] | ["rn", _]) => binary(Binary::Div),
        ("rem", _) => binary(Binary::Rem),
        ("min", [_]) => binary(Binary::Min),
        ("max", [_]) => binary(Binary::Max),
        ("and", _) => binary(Binary::And),
        ("or", _) => binary(Binary::Or),
        ("xor", _) => binary(Binary::Xor),
        ("shl", _) => binary(Binary::Shl),
        ("shr", _) => binary(Binary::Shr),
        ("copysign", _) => binary(Binary::CopySign),
        ("fma", ["rn" | "rm", _]) | ("mad", ["lo", _]) => Some(Operation::MultiplyAdd(of_type()?, rounding)),
        ("cvt", modifiers) => {
            let [.., to, from] = *modifiers else { return None };
            let rounding = match modifiers[..modifiers.len() - 2] {
                [] | ["rn" | "sat"] => Rounding::Nearest,
                ["rzi"] => Rounding::Zero,
                ["rmi"] => Rounding::Down,
                ["rpi"] => Rounding::Up,
                _ => return None,
            };
            let saturates = modifiers[0] == "sat";
            Some(Operation::Convert { to: Type::named(to)?, from: Type::named(from)?, rounding, saturates })
        }
        ("setp", [comparison, _]) => {
            let comparison = match *comparison {
                "lt" => Comparison::Less(false),
                "le" => Comparison::LessOrEqual(false),
                "eq" => Comparison::Equal(false),
                "ne" => Comparison::NotEqual(false),
                "ge" => Comparison::GreaterOrEqual(false),
                "gt" => Comparison::Greater(false),
                "ltu" => Comparison::Less(true),
                "leu" => Comparison::LessOrEqual(true),
                "equ" => Comparison::Equal(true),
                "neu" => Comparison::NotEqual(true),
                "geu" => Comparison::GreaterOrEqual(true),
                "gtu" => Comparison::Greater(true),
                "nan" => Comparison::IsNan,
                _ => return None,
            };
            Some(Operation::Compare(comparison, of_type()?))
        }
        ("selp", _) => Some(Operation::Select),
        ("prmt", ["b32"]) => Some(Operation::PermuteBytes),
        ("bfi", ["b32"]) => Some(Operation::InsertBits),
        ("ld", [space, ..]) => Some(Operation::Load(space_named(space)?, of_type()?)),
        ("st", [space, ..]) => Some(Operation::Store(space_named(space)?, of_type()?)),
        ("atom", ["global", "cas", _]) => Some(Operation::CompareAndSwap(of_type()?)),
        ("atom", ["global", "max", _]) => Some(Operation::AtomicMax(of_type()?)),
        ("bra", _) => Some(Operation::Branch),
        ("ret", []) => Some(Operation::Return),
        ("trap", []) => Some(Operation::Trap),
        ("bar", ["sync"]) => Some(Operation::BlockBarrier),
        _ => None,
    }
}

fn space_named(name: &str) -> Option<Space> {
    Some(match name {
        "global" => Space::Global,
        "shared" => Space::Shared,
        "local" => Space::Local,
        "param" => Space::Parameter,
        _ => return None,
    })
}
