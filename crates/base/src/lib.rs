//! Types and helpers that every crate shares.
//!
//! - Numbers and formats: dtypes, 16-bit and 8-bit floats, byte counts, counter-based random numbers, enums with names.
//! - Parallelism: ranks, how dims are split among ranks, the positions of a sequence that a rank holds, exchanges within units, heartbeats,
//!   events, communication between devices.
//! - Accounting: memory by category, costs of kernels and of passes, the journal from which the time of a step is simulated.
//! - Text: error chains, JSON as Python writes it, SVG documents, axis ticks, printable and shell-quoted strings.
//! - System: opening, reading and replacing regular files, and starting threads.
//!
//! Only the helpers for regular files and for threads do IO. The crate depends on no other crate of the workspace.

mod axis_exchange;
mod axis_split;
mod bytes;
mod category;
mod cost;
mod device_transport;
mod dtype;
mod error_text;
mod escape;
mod event;
mod format_ranges;
mod fp8;
mod half;
mod heartbeat;
mod journal;
mod json;
mod memory_use;
mod named;
mod passes;
mod positions;
mod random;
mod rank;
mod regular_file;
mod svg;
mod threads;
mod ticks;

pub use axis_exchange::{AxisExchange, ExchangeKind, PassExchanges, UnitAxis};
pub use axis_split::{AxisRank, AxisSplit, Segment};
pub use bytes::{Bytes, HUGE_PAGE_BYTES, ParseBytesError};
pub use category::Category;
pub use cost::{Cost, Traffic};
pub use device_transport::{
    DeviceCommunicator, DeviceCommunicatorId, DeviceMemory, DeviceSpan, DeviceStep, DeviceTransfer,
    DeviceTransport, DeviceTransportError,
};
pub use dtype::DType;
pub use error_text::with_sources;
pub use escape::{printable, quoted};
pub use event::{Event, EventCompleter, HostMemory, Pending};
pub use format_ranges::{format_ranges, format_ranks};
pub use fp8::{E4m3Codes, E5m2Codes, Fp8Codes, Fp8Format, floor_log2, power_of_two};
pub use half::{Bf16, F16, Float};
pub use heartbeat::Heartbeat;
pub use journal::{AsyncOperation, Journal, JournalEntry, KernelCall, StepEntries};
pub use json::{json_text, parse_json, without_byte_order_mark};
pub use memory_use::{CategoryBytes, MemoryUse};
pub use named::UnknownName;
pub use passes::UnitPasses;
pub use positions::{ContextRank, Positions};
pub use random::{Random, RandomKey};
pub use rank::{Rank, ReduceOp};
pub use regular_file::{create_regular, open_regular, open_regular_with, read_at_most, replace_file};
pub use svg::{Anchor, Svg, escape_markup};
pub use threads::{spawn_scoped_thread, spawn_thread, with_resource_limits};
pub use ticks::Ticks;
