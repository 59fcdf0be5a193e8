//! Saving: every rank writes its shard into an unfinished folder, then rank 0 publishes the folder.

use crate::checkpoint::Checkpoint;
use crate::cleanup::{mark_latest_and_prune, try_all};
use crate::error::CheckpointError;
use crate::extent::intersection;
use crate::files::{ExtraFile, FileOperation, JSON_BYTES_MAX, is_plain_name, partial_suffix, remove};
use crate::folder::{FolderNames, step_name};
use crate::manifest::{FileEntry, MANIFEST_FILE, Manifest, PartEntry, TensorEntry};
use crate::publication::{Publication, begin_operations, leftover_removals};
use crate::safetensors_file::{SafetensorsWriter, to_stored_dtype};
use crate::save_plan::{PART_BYTES_MAX, WritePart, part_name, plan_save};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trireme_base::{Rank, with_sources};
use trireme_comm::Group;
use trireme_plan::{Extent, Mesh, TensorPlacement, row_major_index};

/// Provides the elements of a job's tensors that a rank holds. They need not be in memory all at once.
pub trait TensorSource {
    /// Calls `write` with the elements that this rank holds of tensor `index` of the snapshot: all its extents one after the other, each
    /// row-major. A save calls this once for each tensor of which the rank writes a part, in the order of decreasing element size, and
    /// among equal sizes in the order of the snapshot.
    ///
    /// # Errors
    /// The errors of `write`, and [`CheckpointError::Source`].
    fn with_bytes(&mut self, index: usize, write: WriteBytes<'_>) -> Result<(), CheckpointError>;
}

/// A callback that receives the bytes of a tensor.
pub type WriteBytes<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>;

/// Tensors in memory: for each, the bytes of the elements that this rank holds.
#[derive(Debug, Clone, Copy)]
pub struct InMemory<'a>(pub &'a [&'a [u8]]);

impl TensorSource for InMemory<'_> {
    fn with_bytes(&mut self, index: usize, write: WriteBytes<'_>) -> Result<(), CheckpointError> {
        write(self.0[index])
    }
}

/// The contents of a checkpoint, as one rank provides them. All ranks pass the same step, mesh and placements. State and files are taken
/// from rank 0.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Mesh of the ranks.
    pub mesh: &'a Mesh,
    /// Every tensor of the job with its placement on the mesh: weights under their Hugging Face names, optimizer state under names that
    /// begin with [`crate::OPTIMIZER_PREFIX`].
    pub tensors: &'a [TensorPlacement],
    /// Everything else that is needed to resume: sampler position, random state, metrics. Numbers that must be restored bit by bit belong
    /// here as integers.
    pub state: &'a serde_json::Value,
    /// Small files to store next to the tensors: the run's `config.toml`, the model's `config.json`, its `tokenizer.json`.
    pub files: &'a [ExtraFile<'a>],
}

/// A checkpoint that was saved.
#[derive(Debug)]
pub struct Saved {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Errors of the cleanup on rank 0, such as an old checkpoint that could not be removed. The checkpoint is complete all the same, and
    /// the next save tries again; report them to the user. Empty on other ranks.
    pub cleanup_errors: Vec<CheckpointError>,
}

/// Writes a checkpoint to `folder/step-N`. All ranks of `group` call it together and share `folder`. Afterwards only the newest
/// `keep_latest_k` checkpoints (0 keeps all) and the [best](crate::mark_best) are kept.
///
/// Each rank writes its parts of [`plan_save`] to one safetensors file in `step-N.partial-xxxxxxxx` and syncs it. Rank 0 adds the other
/// files and the manifest, syncs the folder, renames it to `step-N` and names it in `latest`. A crash at any moment leaves the complete
/// checkpoints in place. The next save or [`clean_up`](crate::clean_up) removes unfinished folders, so a folder of checkpoints belongs to
/// one run.
///
/// Cost: every byte of the state is written once, by one rank, and the ranks exchange small messages three times. Memory: the bytes that
/// `source` holds at a time.
///
/// A failure of the cleanup after the checkpoint is complete is not an error: see [`Saved::cleanup_errors`].
///
/// # Errors
/// A failure on one rank is an error on all ranks, each with the failing rank and the reason, and the unfinished folder is removed. A
/// complete checkpoint is never overwritten: the step must be newer than all complete ones in `folder`.
pub fn save(
    group: &Group,
    folder: &Path,
    snapshot: &Snapshot<'_>,
    source: &mut dyn TensorSource,
    keep_latest_k: usize,
) -> Result<Saved, CheckpointError> {
    let operation = SaveOperation { group, folder, snapshot };
    let partial_name = (group.rank() == Rank::ROOT).then(|| step_name(snapshot.step) + &partial_suffix());
    let result = operation.run(partial_name.as_deref(), source, keep_latest_k);
    if result.is_err() {
        // Best effort: the error to report is the first one, and the next save tries again.
        if let Some(name) = partial_name {
            let _ = remove(&folder.join(name), &|| group.heartbeat().beat());
        }
        // A rank that exits may end the others, so no rank returns before rank 0 has cleaned up.
        let _ = group.barrier().wait();
    }
    result
}

struct SaveOperation<'a> {
    group: &'a Group,
    folder: &'a Path,
    snapshot: &'a Snapshot<'a>,
}

#[derive(Serialize, Deserialize)]
struct StartMessage {
    /// Checksum of everything that the ranks must agree on.
    fingerprint: u32,
    /// Name of the unfinished folder; set on rank 0 only.
    partial_name: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Shard {
    file: FileEntry,
    /// CRC-32 of each part, in the order of the plan.
    part_crc32s: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Failure {
    reason: String,
    is_out_of_space: bool,
}

impl Failure {
    fn of(error: &CheckpointError) -> Self {
        Failure { reason: with_sources(error), is_out_of_space: error.is_out_of_space() }
    }
}

impl SaveOperation<'_> {
    /// Runs the save on one rank. `partial_name` is set on rank 0 only.
    fn run(
        &self,
        partial_name: Option<&str>,
        source: &mut dyn TensorSource,
        keep_latest_k: usize,
    ) -> Result<Saved, CheckpointError> {
        let mut cleanup_errors = Vec::new();
        let planned = self.plan().and_then(|plan| {
            partial_name.map_or(Ok(()), |name| self.begin(name, &mut cleanup_errors))?;
            Ok(plan)
        });
        let fingerprint = self.fingerprint();
        let (plan, start_messages) = self.exchange_outcomes(planned, |_| StartMessage {
            fingerprint,
            partial_name: partial_name.map(str::to_owned),
        })?;
        if let Some(rank) =
            start_messages.iter().position(|message| message.fingerprint != start_messages[0].fingerprint)
        {
            return Err(CheckpointError::RanksDisagree { rank: Rank(rank) });
        }
        let agreed_name = start_messages[0].partial_name.as_deref().expect("rank 0 names the folder");
        let written = self.write_shard(&self.folder.join(agreed_name), &plan[self.group.rank().0], source);
        let (_, shards) = self.exchange_outcomes(written, Option::clone)?;
        let publish = |name| self.publish(name, &plan, &shards, keep_latest_k, &mut cleanup_errors);
        self.exchange_outcomes(partial_name.map_or(Ok(()), publish), |()| ())?;
        Ok(Saved { path: self.folder.join(step_name(self.snapshot.step)), cleanup_errors })
    }

    /// Exchanges the outcomes of all ranks. Returns the value of this rank and the messages of all ranks if all succeeded, and an error on
    /// every rank otherwise.
    fn exchange_outcomes<T, M: Serialize + DeserializeOwned>(
        &self,
        outcome: Result<T, CheckpointError>,
        message: impl Fn(&T) -> M,
    ) -> Result<(T, Vec<M>), CheckpointError> {
        let step = self.snapshot.step;
        let mine: Result<M, Failure> = outcome.as_ref().map(message).map_err(Failure::of);
        let mine = serde_json::to_vec(&mine).expect("messages are JSON");
        let gathered = self.group.all_gather_bytes(&mine).wait();
        let value = outcome.map_err(|error| {
            let (rank, source) = (self.group.rank(), Box::new(error));
            CheckpointError::SaveFailedHere { step, rank, source }
        })?;
        let gathered = gathered.map_err(|source| CheckpointError::Exchange { step, source })?;
        let messages = gathered.iter().enumerate().map(|(rank, bytes)| {
            let unreadable = |error| {
                Err(Failure {
                    reason: format!("its message cannot be read: {error}"),
                    is_out_of_space: false,
                })
            };
            let theirs: Result<M, Failure> = serde_json::from_slice(bytes).unwrap_or_else(unreadable);
            theirs.map_err(|Failure { reason, is_out_of_space }| {
                let rank = Rank(rank);
                CheckpointError::SaveFailedElsewhere { step, rank, reason, is_out_of_space }
            })
        });
        Ok((value, messages.collect::<Result<_, _>>()?))
    }

    fn fingerprint(&self) -> u32 {
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(format!("{} {:?}", self.snapshot.step, self.snapshot.mesh).as_bytes());
        for tensor in self.snapshot.tensors {
            checksum.update(format!("{tensor:?}").as_bytes());
        }
        checksum.finalize()
    }

    /// Checks the mesh and the files, and decides which rank writes which part.
    fn plan(&self) -> Result<Vec<Vec<WritePart>>, CheckpointError> {
        let Snapshot { mesh, tensors, files, .. } = *self.snapshot;
        if mesh.num_ranks() != self.group.world_size() {
            let group = self.group.world_size();
            return Err(CheckpointError::MeshSize { mesh: mesh.num_ranks(), group });
        }
        for (index, file) in files.iter().enumerate() {
            let repeated = files[..index].iter().any(|earlier| earlier.name == file.name);
            // The checkpoint itself may write files of these names.
            let is_own = file.name == MANIFEST_FILE || file.name.starts_with(SHARD_PREFIX);
            if !is_plain_name(file.name) || is_own || repeated {
                return Err(CheckpointError::FileName { name: file.name.to_owned() });
            }
        }
        plan_save(tensors, mesh, PART_BYTES_MAX)
    }

    /// Checks that no complete checkpoint of this or a newer step exists, and creates the unfinished folder. Rank 0 only.
    fn begin(
        &self,
        partial_name: &str,
        cleanup_errors: &mut Vec<CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let names = FolderNames::read(self.folder)?;
        let step = self.snapshot.step;
        for &other in names.steps.iter().filter(|&&other| other >= step) {
            let existing = self.folder.join(step_name(other));
            match Checkpoint::open(&existing) {
                Ok(_) => return Err(CheckpointError::NotNewer { step, existing }),
                Err(error) if !error.is_damage() => return Err(error),
                Err(_) => {}
            }
        }
        try_all(&leftover_removals(self.folder, &names.leftovers), cleanup_errors, &|| self.beat());
        self.execute(&begin_operations(self.folder, partial_name))
    }

    /// Writes and syncs this rank's file. Returns `None` if the rank has no parts to write.
    fn write_shard(
        &self,
        partial: &Path,
        parts: &[WritePart],
        source: &mut dyn TensorSource,
    ) -> Result<Option<Shard>, CheckpointError> {
        if parts.is_empty() {
            return Ok(None);
        }
        let rank = self.group.rank();
        let described = parts.iter().map(|part| {
            let TensorPlacement { name, shape, dtype, .. } = &self.snapshot.tensors[part.tensor];
            (part_name(name, shape, &part.extent), *dtype, part.extent.shape.as_slice())
        });
        let mut writer = SafetensorsWriter::create(&partial.join(shard_name(rank.0)), described, &[])?;
        let mut part_crc32s = Vec::with_capacity(parts.len());
        // The parts of a tensor are consecutive.
        for parts in parts.chunk_by(|a, b| a.tensor == b.tensor) {
            let index = parts[0].tensor;
            let TensorPlacement { name, dtype, .. } = &self.snapshot.tensors[index];
            let held = self.snapshot.tensors[index].extents(self.snapshot.mesh, rank)?;
            let expected = held.iter().map(Extent::num_elements).sum::<usize>() * dtype.size();
            source.with_bytes(index, &mut |bytes| {
                if bytes.len() != expected {
                    let (name, found) = (name.clone(), bytes.len());
                    return Err(CheckpointError::WrongLength { name, expected, found });
                }
                for part in parts {
                    self.beat();
                    let first = position_in_any(&held, &part.extent) * dtype.size();
                    let len = part.extent.num_elements() * dtype.size();
                    part_crc32s.push(writer.write(&bytes[first..first + len])?);
                }
                Ok(())
            })?;
        }
        self.beat();
        Ok(Some(Shard { file: writer.finish()?, part_crc32s }))
    }

    fn execute(&self, operations: &[FileOperation]) -> Result<(), CheckpointError> {
        operations.iter().try_for_each(|step| step.execute_with_progress(&|| self.beat()))
    }

    fn beat(&self) {
        self.group.heartbeat().beat();
    }

    /// Completes the folder, renames it to `step-N`, and removes old checkpoints. Rank 0 only.
    fn publish(
        &self,
        partial_name: &str,
        plan: &[Vec<WritePart>],
        shards: &[Option<Shard>],
        keep_latest_k: usize,
        cleanup_errors: &mut Vec<CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let manifest = self.manifest(plan, shards).to_text();
        if manifest.len() as u64 > JSON_BYTES_MAX {
            return Err(CheckpointError::ManifestTooLarge {
                bytes: manifest.len(),
                bytes_max: JSON_BYTES_MAX,
            });
        }
        let names = FolderNames::read(self.folder)?;
        let step = self.snapshot.step;
        let publication = Publication {
            folder: self.folder,
            partial_name,
            step,
            files: self.snapshot.files,
            manifest,
            damaged_exists: names.steps.contains(&step),
        };
        self.execute(&publication.operations())?;
        mark_latest_and_prune(self.folder, step, &names, keep_latest_k, cleanup_errors, &|| self.beat());
        Ok(())
    }

    fn manifest(&self, plan: &[Vec<WritePart>], shards: &[Option<Shard>]) -> Manifest {
        let entry = |tensor: &TensorPlacement| {
            let (dtype, shape) = (to_stored_dtype(tensor.dtype), tensor.shape.clone());
            (tensor.name.clone(), TensorEntry { dtype, shape, parts: Vec::new() })
        };
        let mut tensors: BTreeMap<_, _> = self.snapshot.tensors.iter().map(entry).collect();
        let extra = |file: &ExtraFile<'_>| {
            let (size, crc32) = (file.contents.len() as u64, crc32fast::hash(file.contents));
            (file.name.to_owned(), FileEntry { size, crc32 })
        };
        let mut files: BTreeMap<_, _> = self.snapshot.files.iter().map(extra).collect();
        for (rank, (parts, shard)) in plan.iter().zip(shards).enumerate() {
            let Some(shard) = shard else { continue };
            files.insert(shard_name(rank), shard.file.clone());
            for (part, &crc32) in parts.iter().zip(&shard.part_crc32s) {
                let name = &self.snapshot.tensors[part.tensor].name;
                let tensor = tensors.get_mut(name).expect("every tensor has an entry");
                let (file, extent) = (shard_name(rank), part.extent.clone());
                tensor.parts.push(PartEntry { file, extent, crc32 });
            }
        }
        Manifest::new(self.snapshot.step, self.snapshot.state.clone(), tensors, files)
    }
}

fn shard_name(rank: usize) -> String {
    format!("{SHARD_PREFIX}{rank:05}.safetensors")
}

const SHARD_PREFIX: &str = "shard-";

/// Returns the position of the first element of `part` among the elements of the boxes `held`, one of which contains the part.
fn position_in_any(held: &[Extent], part: &Extent) -> usize {
    let mut before = 0;
    for frame in held {
        if intersection(frame, part).as_ref() == Some(part) {
            return before + row_major_index(frame, &part.start);
        }
        before += frame.num_elements();
    }
    unreachable!("a rank writes parts of what it holds")
}
