//! Verification: reads all of a checkpoint and compares the checksums, in one process or shared among ranks.
//!
//! Ranks divide the work by parts of tensors instead of files, because one rank may have written the full checkpoint to one file.

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::files::{damaged, open_file, reading};
use crate::manifest::FileEntry;
use crate::stored::StoredPart;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const BUFFER_BYTES: u64 = 256 << 10;

/// A unit of verification, assigned to one rank.
enum Piece<'a> {
    /// A part of a tensor.
    Part(Span<'a>),
    /// The bytes of a file outside of its parts. The parts are sorted by position.
    OutsideParts { path: PathBuf, entry: &'a FileEntry, parts: Vec<Span<'a>> },
}

/// A part and its range of bytes in its file.
#[derive(Clone)]
struct Span<'a> {
    part: &'a StoredPart,
    bytes: Range<u64>,
}

impl Checkpoint {
    /// Reads every byte and compares the checksums. Returns the first error of each file that fails. The list is empty if the checkpoint is
    /// intact.
    pub fn verify(&self) -> Vec<CheckpointError> {
        self.verify_share(0, 1, &|| {})
    }

    /// Verifies the share of `rank` among `num_ranks` ranks that [`verify`](Self::verify) the checkpoint together, and returns the first
    /// error of each file that fails. Each byte is read by one rank. The numbers of bytes that the ranks read differ by at most the largest
    /// piece: a part, or all bytes of a file outside of its parts. Calls `on_progress` for each part, and for each buffer that is read
    /// outside of parts.
    ///
    /// # Panics
    /// If `rank` is not less than `num_ranks`.
    pub fn verify_share(
        &self,
        rank: usize,
        num_ranks: usize,
        on_progress: &dyn Fn(),
    ) -> Vec<CheckpointError> {
        assert!(rank < num_ranks, "rank {rank} is one of {num_ranks}");
        let pieces = self.pieces();
        let ranks = assign_pieces(pieces.iter().map(Piece::num_bytes), num_ranks);
        let mut failures = BTreeMap::new();
        for (piece, _) in pieces.iter().zip(ranks).filter(|(_, owner)| *owner == rank) {
            if let Entry::Vacant(vacant) = failures.entry(piece.path())
                && let Err(failure) = piece.verify(on_progress)
            {
                vacant.insert(failure);
            }
        }
        failures.into_values().collect()
    }

    /// Splits the checkpoint into pieces, in the same order on every rank.
    fn pieces(&self) -> Vec<Piece<'_>> {
        let mut spans: BTreeMap<&Path, Vec<Span<'_>>> = BTreeMap::new();
        for (_, tensor) in self.tensors().iter() {
            for (part, num_bytes) in tensor.parts() {
                let bytes = part.offset..part.offset + num_bytes;
                spans.entry(&part.file).or_default().push(Span { part, bytes });
            }
        }
        let mut pieces = Vec::new();
        for (name, entry) in &self.files {
            let path = self.path().join(name);
            let mut parts = spans.remove(&*path).unwrap_or_default();
            parts.sort_by_key(|span| (span.bytes.start, span.bytes.end));
            let own = parts.clone().into_iter().map(Piece::Part);
            pieces.push(Piece::OutsideParts { path, entry, parts });
            pieces.extend(own);
        }
        pieces
    }
}

impl Piece<'_> {
    fn path(&self) -> &Path {
        match self {
            Piece::Part(span) => &span.part.file,
            Piece::OutsideParts { path, .. } => path,
        }
    }

    fn num_bytes(&self) -> u64 {
        let len = |span: &Span<'_>| span.bytes.end - span.bytes.start;
        match self {
            Piece::Part(span) => len(span),
            Piece::OutsideParts { entry, parts, .. } => {
                entry.size.saturating_sub(parts.iter().map(len).sum())
            }
        }
    }

    fn verify(&self, on_progress: &dyn Fn()) -> Result<(), CheckpointError> {
        on_progress();
        match self {
            Piece::Part(Span { part, bytes }) => part.verify((bytes.end - bytes.start) as usize),
            Piece::OutsideParts { path, entry, parts } => {
                verify_outside_parts(path, entry, parts, on_progress)
            }
        }
    }
}

/// Compares the checksum of a file. Reads only the bytes outside of the parts, and uses the recorded checksums of the parts, which are
/// verified as pieces of their own.
fn verify_outside_parts(
    path: &Path,
    entry: &FileEntry,
    parts: &[Span<'_>],
    on_progress: &dyn Fn(),
) -> Result<(), CheckpointError> {
    let (file, size) = open_file(path)?;
    let mut buffer = vec![0; BUFFER_BYTES.min(size) as usize];
    let mut checksum = crc32fast::Hasher::new();
    let mut position = 0;
    let mut read_up_to = |end: u64, position: &mut u64, checksum: &mut crc32fast::Hasher| {
        while *position < end {
            on_progress();
            let chunk = &mut buffer[..BUFFER_BYTES.min(end - *position) as usize];
            file.read_exact_at(chunk, *position).map_err(reading(path))?;
            checksum.update(chunk);
            *position += chunk.len() as u64;
        }
        Ok::<_, CheckpointError>(())
    };
    for Span { part, bytes } in parts {
        // Two tensors may share the same bytes, which count once.
        if let Some(crc32) = part.crc32.filter(|_| position <= bytes.start) {
            read_up_to(bytes.start, &mut position, &mut checksum)?;
            checksum.combine(&crc32fast::Hasher::new_with_initial_len(crc32, bytes.end - bytes.start));
            position = bytes.end;
        }
    }
    read_up_to(size, &mut position, &mut checksum)?;
    if (size, checksum.finalize()) == (entry.size, entry.crc32) {
        return Ok(());
    }
    let FileEntry { size: written, crc32 } = entry;
    Err(damaged(
        path,
        format!("it is not the file of {written} bytes with checksum {crc32:08x} that was written"),
    ))
}

/// Returns the rank of each piece, given the pieces' sizes in bytes. Each piece is assigned to the rank with the fewest bytes so far, so
/// the ranks' numbers of bytes differ by at most the largest piece.
fn assign_pieces(sizes: impl Iterator<Item = u64>, num_ranks: usize) -> Vec<usize> {
    let mut loads: BinaryHeap<Reverse<(u64, usize)>> =
        (0..num_ranks).map(|rank| Reverse((0, rank))).collect();
    let least_loaded = |size| {
        let mut least = loads.peek_mut().expect("there is a rank");
        let Reverse((load, rank)) = &mut *least;
        *load += size;
        *rank
    };
    sizes.map(least_loaded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_piece_goes_to_one_rank_and_the_ranks_read_about_as_much(
            sizes in prop::collection::vec(0..100_u64, 0..60), num_ranks in 1..9_usize,
        ) {
            let ranks = assign_pieces(sizes.iter().copied(), num_ranks);
            prop_assert_eq!(ranks.len(), sizes.len());
            let mut loads = vec![0; num_ranks];
            for (rank, size) in ranks.into_iter().zip(&sizes) {
                loads[rank] += size;
            }
            let largest = sizes.iter().copied().max().unwrap_or(0);
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= largest);
        }
    }
}
