use crate::{ALIGNMENT, AlignedBuffer, SwapDescription, SwapError, SwapFile, SwapOptions, Transfer};
use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

/// Maximum number of bytes that a pass moves. A pass that takes longer than [`PASS_TIME`] moves less.
const PASS_BYTES: usize = 256 << 20;
/// Maximum block size of a measurement. Larger blocks have the same bandwidth, because transfers are split into parts.
const BLOCK_BYTES_MAX: usize = 64 << 20;
/// Duration after which a pass issues no more transfers.
const PASS_TIME: Duration = Duration::from_millis(700);

/// Bandwidth of a folder's disk in each direction, measured without traffic in the other one.
///
/// Reads and writes share the disk: concurrent transfers in both directions take about the sum of the times that each direction takes
/// alone.
#[derive(Debug, Clone)]
pub struct Bandwidth {
    /// Bytes read per second.
    pub read: f64,
    /// Bytes written per second.
    pub write: f64,
    /// The swap file of the measurement: its folder and method.
    pub description: SwapDescription,
}

/// Measures the bandwidth with which blocks of `block_bytes` are written to the disk of `folder` and read back, one direction at a time.
///
/// Writes all blocks of a 256 MiB file twice and then reads them once. The first write is not measured, because it allocates the blocks on
/// disk. On a slow disk, fewer blocks are used: the measurement takes about two seconds at most. The result is too high for a disk whose
/// cache holds 256 MiB. `block_bytes` is clamped to the range from [`ALIGNMENT`] to 64 MiB.
///
/// # Errors
/// The errors of [`SwapFile::create`], [`SwapFile::buffer`] and [`Transfer::wait`].
pub fn measure_bandwidth(
    folder: &Path,
    block_bytes: usize,
    options: &SwapOptions,
) -> Result<Bandwidth, SwapError> {
    let block_bytes = block_bytes.clamp(ALIGNMENT, BLOCK_BYTES_MAX);
    let blocks = vec![block_bytes; PASS_BYTES.div_ceil(block_bytes)];
    let swap = SwapFile::create(folder, &blocks, options)?;
    let mut buffers = fill_buffers(&swap, block_bytes, options)?;
    let (num_written, _) = pass(&mut buffers, blocks.len(), |block, buffer| swap.write(block, buffer))?;
    let (_, write) = pass(&mut buffers, num_written, |block, buffer| swap.write(block, buffer))?;
    let (_, read) = pass(&mut buffers, num_written, |block, buffer| swap.read(block, buffer))?;
    Ok(Bandwidth { read, write, description: swap.description().clone() })
}

/// Allocates buffers for twice as many parts as can be in flight, and fills them.
fn fill_buffers(
    swap: &SwapFile,
    block_bytes: usize,
    options: &SwapOptions,
) -> Result<VecDeque<AlignedBuffer>, SwapError> {
    let num_buffers = (2 * options.queue_depth * options.part_bytes).div_ceil(block_bytes);
    let num_buffers = num_buffers.clamp(2, PASS_BYTES.div_ceil(block_bytes));
    let fill = |_| {
        let mut buffer = swap.buffer(block_bytes)?;
        // The content is not zeros, because some disks do not store zeros.
        buffer.iter_mut().zip((0..=250).cycle()).for_each(|(byte, value)| *byte = value);
        Ok(buffer)
    };
    (0..num_buffers).map(fill).collect()
}

/// Issues transfers of the first `num_blocks` blocks until [`PASS_TIME`] is over, as many at a time as there are buffers. Returns the
/// number of transfers, and the bytes per second.
fn pass(
    buffers: &mut VecDeque<AlignedBuffer>,
    num_blocks: usize,
    issue: impl Fn(usize, AlignedBuffer) -> Transfer,
) -> Result<(usize, f64), SwapError> {
    let began = Instant::now();
    let mut pending = VecDeque::new();
    let mut num_issued = 0;
    let mut num_bytes = 0;
    while num_issued < num_blocks && (num_issued == 0 || began.elapsed() < PASS_TIME) {
        let buffer = match buffers.pop_front() {
            Some(buffer) => buffer,
            None => pending.pop_front().map(Transfer::wait).expect("all buffers are in flight")?,
        };
        num_bytes += buffer.len();
        pending.push_back(issue(num_issued, buffer));
        num_issued += 1;
    }
    for transfer in pending {
        buffers.push_back(transfer.wait()?);
    }
    Ok((num_issued, num_bytes as f64 / began.elapsed().as_secs_f64()))
}
