//! Vocabulary shared by every crate: ranks, dtypes, byte counts, what memory is for, what kernels cost, how dims are cut, which positions ranks have, whether they make progress, what they exchange
//! within units, what passes take, what ranks do, random numbers, formats of floats, enums with names, the texts of errors, JSON as Python writes it, SVG documents, and how files are opened and
//! threads are started.
//!
//! Apart from opening files and starting threads, nothing here does IO, and nothing here depends on another crate of the workspace.

mod axis_exchange;
mod bytes;
mod category;
mod cost;
mod cut;
mod dtype;
mod error_text;
mod event;
mod fp8;
mod half;
mod heartbeat;
mod journal;
mod json;
mod memory_use;
mod named;
mod passes;
mod positions;
mod printed;
mod random;
mod ranges;
mod rank;
mod regular_file;
mod svg;
mod threads;
mod ticks;

pub use axis_exchange::{AxisExchange, ExchangeKind, PassExchanges, UnitAxis};
pub use bytes::{Bytes, HUGE_PAGE_BYTES, ParseBytesError};
pub use category::Category;
pub use cost::{Cost, Traffic};
pub use cut::{AxisPlace, Cut, Segment};
pub use dtype::DType;
pub use error_text::with_sources;
pub use event::{Event, HostMemory, Latch, Pending};
pub use fp8::{Fp8Format, exponent, power_of_two};
pub use half::{Bf16, F16, Float};
pub use heartbeat::Heartbeat;
pub use journal::{Issued, Journal, JournalEntry, KernelCall, StepEntries};
pub use json::{json_text, parse_json, without_byte_order_mark};
pub use memory_use::{CategoryBytes, MemoryUse};
pub use named::UnknownName;
pub use passes::UnitPasses;
pub use positions::{ContextPlace, Positions};
pub use printed::{printable, quoted};
pub use random::{Random, RandomKey};
pub use ranges::{ranges, ranks};
pub use rank::{Rank, ReduceOp};
pub use regular_file::{create_regular, open_regular, open_regular_with, read_at_most, replace_file};
pub use svg::{Anchor, Svg, escape_markup};
pub use threads::{name_limits, spawn_scoped_thread, spawn_thread};
pub use ticks::Ticks;
