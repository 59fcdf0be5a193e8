//! Arguments of `trireme bench collectives`.

use super::number::Dtype;
use super::operation::Op;
use super::vectors::BufferMemory;
use crate::commands::costs::CostArgs;
use crate::numbers::size_with_unit;
use std::time::Duration;
use trireme_comm::TransportChoice;
use trireme_schedule::collective::Algorithm;

const HELP: &str = "\
How to read it:
  Each line shows the median time of an operation on vectors of one size. The
  first bandwidth is the size divided by the time. The second, the bus bandwidth,
  applies the factors of nccl-tests, so it compares with the hardware's: with W
  workers, 2 (W - 1) / W for all_reduce, 1 for broadcast, reduce and send, and
  (W - 1) / W for the others. The last column is the algorithm that the group
  chose; it is empty where there is no choice.

  Sizes are counted as in nccl-tests: the whole buffer of all_reduce, broadcast
  and reduce; the gathered output of all_gather and of gather's root; the input
  of reduce_scatter and of scatter's root; the send buffer of both all_to_alls;
  one message of send. A barrier has no size and is timed once.

  In all_to_all_variable, a worker sends a block of 1 to W units to each worker,
  each of a different length. All workers send the same amount in total.

Examples:
  trireme bench collectives
      Two workers on this host.
  trireme bench collectives --workers 4 --ops barrier,all_reduce --max-bytes 64K --dtype bf16
      Small messages between four workers.
  trireme bench collectives --algorithm ring --any-order --transport tcp
      One algorithm, to compare with the one chosen by default.
  trireme bench collectives --workers 8 --memory gpu --any-order --dtype bf16
      NCCL between eight GPUs of this host, with its own order of sums.
  srun --ntasks-per-node 4 trireme bench collectives --max-bytes 64M
      Workers started by another launcher: torchrun, srun and mpirun are supported.

If a worker dies or does not respond within --timeout, the command exits with a
table that shows where each worker was (docs/hangs.md).";

/// Time the collective operations of a group of workers.
///
/// Each operation runs once to check its result, then repeatedly between barriers. The time of the slowest worker counts.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct CollectivesArgs {
    /// Worker processes on this host. Ignored if another launcher started this process.
    #[arg(long, value_name = "W", default_value_t = 2)]
    pub(super) workers: usize,
    /// Transport for data: auto, shm, tcp or mpi.
    #[arg(long, default_value = "auto")]
    pub(super) transport: TransportChoice,
    /// Operations to time.
    #[arg(long, value_enum, value_delimiter = ',', num_args = 1.., default_values_t = Op::COMMON)]
    pub(super) ops: Vec<Op>,
    /// Data type of the elements.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub(super) dtype: Dtype,
    /// Where vectors are stored: in the memory that suits the group's transport best, in each worker's own memory, or in
    /// the memory of each worker's NVIDIA GPU. GPUs exchange vectors by NCCL, so --transport and --algorithm have no
    /// effect.
    #[arg(long, value_enum, default_value_t = BufferMemory::Arena)]
    pub(super) memory: BufferMemory,
    /// Algorithm to use where it applies, such as ring, halving_doubling or hierarchical:all:direct:ring. By default,
    /// the fastest one.
    #[arg(long, value_name = "NAME")]
    pub(super) algorithm: Option<Algorithm>,
    /// Allow sums in any order, as determinism = "run" does.
    #[arg(long)]
    pub(super) any_order: bool,
    /// TCP connections to each peer.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) sockets_per_peer: usize,
    /// Send a checksum with each message.
    #[arg(long)]
    pub(super) checksums: bool,
    /// Smallest size in bytes; suffixes K, M and G are allowed.
    #[arg(long, value_name = "BYTES", default_value = "4K", value_parser = size)]
    pub(super) min_bytes: usize,
    /// Largest size in bytes.
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = size)]
    pub(super) max_bytes: usize,
    /// Factor from one size to the next.
    #[arg(long, value_name = "F", default_value_t = 4)]
    pub(super) factor: usize,
    /// Maximum number of timed iterations per size.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(super) iters: usize,
    /// Target time per size.
    #[arg(long, default_value = "1", value_parser = crate::commands::bench::seconds, value_name = "SECONDS")]
    pub(super) seconds: Duration,
    /// Untimed iterations before the timed ones.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(super) warmup: usize,
    /// How long a worker waits for the others in one operation before it gives up.
    #[arg(long, default_value = "300", value_parser = crate::commands::bench::seconds, value_name = "SECONDS")]
    pub(super) timeout: Duration,
    /// Let the system move workers between cores. By default, each worker is bound to its share of the available
    /// cores, as with mpirun, if there are enough cores.
    #[arg(long)]
    pub(super) unbound: bool,
    /// Print one line of JSON per operation and size.
    #[arg(long)]
    pub(super) json: bool,
    // Last: its heading would cover all options after it.
    #[command(flatten)]
    pub(super) costs: CostArgs,
}

fn size(text: &str) -> Result<usize, &'static str> {
    let bytes = size_with_unit(text).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or("expected bytes, such as 4096, 4K or 64M")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(["0", "17", "4K", "3M", "2G"].map(size), [0, 17, 4096, 3 << 20, 2 << 30].map(Ok));
        for wrong in ["", "K", "4k", "4KK", "-1", "1.5M", "4 K", "99999999999999999999", "99999999999999G"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
