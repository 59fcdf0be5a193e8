use crate::{ALIGNMENT, AlignedBuffer, SwapDescription, SwapError, SwapFile, SwapOptions, Transfer};
use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

/// How much is moved each way, in bytes, unless it takes longer than [`PASS_TIME`].
const PASS_BYTES: usize = 256 << 20;
/// What longer blocks are taken for: the system gets parts of them anyway.
const BLOCK_BYTES_MAX: usize = 64 << 20;
/// How long a pass goes on issuing transfers.
const PASS_TIME: Duration = Duration::from_millis(700);

/// How fast a folder's disk is in one direction alone. Transfers both ways share it: they take about the sum of the
/// times that each way takes.
#[derive(Debug, Clone)]
pub struct Bandwidth {
    /// Bytes read per second.
    pub read: f64,
    /// Bytes written per second.
    pub write: f64,
    /// Where and how it was measured.
    pub description: SwapDescription,
}

/// Measures how fast blocks of `block_bytes` get to the disk of `folder` and back, one direction at a time.
///
/// Writes all of a file of 256 MiB twice, the second time measured (the first gives blocks their place on disk),
/// and reads it once; a slow disk gets less to do. That takes some two seconds at the most. A disk with a cache of
/// that size looks faster than it is. Blocks of less than [`ALIGNMENT`] or more than 64 MiB are taken for such.
///
/// # Errors
/// As of [`SwapFile::create`] and [`Transfer::wait`].
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
    Ok(Bandwidth { read, write, description: swap.describe().clone() })
}

/// Buffers enough for the system to have all the parts it takes at a time, and as many to follow.
fn fill_buffers(
    swap: &SwapFile,
    block_bytes: usize,
    options: &SwapOptions,
) -> Result<VecDeque<AlignedBuffer>, SwapError> {
    let num_buffers = (2 * options.queue_depth * options.part_bytes).div_ceil(block_bytes);
    let num_buffers = num_buffers.clamp(2, PASS_BYTES.div_ceil(block_bytes));
    let fill = |_| {
        let mut buffer = swap.buffer(block_bytes)?;
        // Not zeros, which some disks do not store.
        buffer.iter_mut().zip((0..=250).cycle()).for_each(|(byte, value)| *byte = value);
        Ok(buffer)
    };
    (0..num_buffers).map(fill).collect()
}

/// Issues transfers of the first `num_blocks` blocks, as many at a time as there are buffers, until [`PASS_TIME`] is
/// over. How many those were, and bytes per second.
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
            None => pending.pop_front().map(Transfer::wait).expect("all buffers are under way")?,
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
