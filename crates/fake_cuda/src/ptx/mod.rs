//! An interpreter of PTX, NVIDIA's assembly language, for what NVRTC makes of the kernels ("PTX ISA").
//!
//! It sees what kernels that are compiled as C++ do not: inline assembly, and the compiler's own instructions. It knows those instructions
//! that occur, and refuses others by name. Accesses beyond the memory of an array's space, and at addresses that are not a multiple of
//! their size, end a kernel.
//!
//! Differences from hardware: approximations (`ex2.approx`, `rcp.approx`) are exact, and the sums of `mma` are rounded after each term.

mod arithmetic;
mod instruction;
mod parse;
mod run;
#[cfg(test)]
mod tests;

pub use instruction::PtxKernel;
pub(crate) use parse::parse;
pub(crate) use run::run_block;
