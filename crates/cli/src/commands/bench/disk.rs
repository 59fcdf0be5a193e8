use crate::console::Output;
use anyhow::Result;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use trireme_swap::{Bandwidth, SwapOptions, measure_bandwidth};

/// Time the disk that `[offload]` would use.
///
/// Writes an unnamed file of 256 MiB in blocks, then reads it back: the way training state moves to and from a disk.
/// Bypasses the page cache where the system allows it. Transfers in both directions at once share the disk and take
/// about the sum of both times. The file is deleted when the command exits.
#[derive(Debug, clap::Args)]
pub(crate) struct DiskArgs {
    /// Folder on the disk to measure.
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
    /// Block size in bytes; training state moves in blocks of 16 MiB.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20)]
    block_bytes: usize,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &DiskArgs) -> Result<()> {
    let Bandwidth { read, write, description } =
        measure_bandwidth(&args.folder, args.block_bytes, &SwapOptions::default())?;
    if args.json {
        let measurement = json!({
            "folder": args.folder.display().to_string(),
            "method": description.method.to_string(),
            "block_bytes": args.block_bytes,
            "read_bytes_per_second": read,
            "write_bytes_per_second": write,
        });
        return Ok(writeln!(Output, "{measurement}")?);
    }
    writeln!(Output, "{description}")?;
    Ok(writeln!(Output, "read {:.2} GB/s, write {:.2} GB/s", read / 1e9, write / 1e9)?)
}
