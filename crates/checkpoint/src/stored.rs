//! Tensors in files: their description, the comparison with expected tensors, and reading of any extent.

use crate::StoredDType;
use crate::error::{CheckpointError, Mismatch};
use crate::extent::{checked_num_elements, intersection, is_within, split};
use crate::files::{damaged, open_file, reading};
use crate::safetensors_file::readable_dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trireme_base::{Bf16, DType, F16};
use trireme_plan::{Extent, TensorPlacement, copy_runs};

const READ_BUFFER_BYTES: usize = 256 << 10;

/// Key in a `config.json` under which the quantization of the weights is described.
pub(crate) const QUANTIZATION_KEY: &str = "quantization_config";

/// Number of bytes that a fingerprint reads at each end of a part.
const SAMPLE_BYTES: usize = 4096;

/// Number of elements of two tensors that are compared at a time.
const COMPARED_ELEMENTS: usize = 4 << 20;

/// A tensor that is stored in files.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    pub(crate) dtype: StoredDType,
    pub(crate) shape: Vec<usize>,
    /// The parts, which together hold each element once.
    pub(crate) parts: Vec<StoredPart>,
}

/// A box of a tensor, stored row-major in one file.
#[derive(Debug, Clone)]
pub(crate) struct StoredPart {
    pub(crate) file: Arc<Path>,
    /// Position of the first byte in the file.
    pub(crate) offset: u64,
    pub(crate) extent: Extent,
    /// CRC-32 of the part's bytes, where it is known.
    pub(crate) crc32: Option<u32>,
}

impl StoredPart {
    fn num_bytes(&self, dtype: StoredDType) -> u64 {
        (self.extent.num_elements() as u64 * dtype.bitsize() as u64).div_ceil(8)
    }

    /// Reads the part's `num_bytes` bytes and compares their checksum. Without a recorded checksum, reads nothing.
    pub(crate) fn verify(&self, num_bytes: usize) -> Result<(), CheckpointError> {
        PartReader::open(self)?.finish(num_bytes)
    }

    /// Returns the CRC-32 of the first and the last [`SAMPLE_BYTES`] of the part.
    fn sample(&self, dtype: StoredDType) -> Result<u32, CheckpointError> {
        let (file, _) = open_file(&self.file)?;
        let num_bytes = self.num_bytes(dtype);
        let mut buffer = [0; SAMPLE_BYTES];
        let sample = &mut buffer[..num_bytes.min(SAMPLE_BYTES as u64) as usize];
        let mut checksum = crc32fast::Hasher::new();
        for start in [0, num_bytes - sample.len() as u64] {
            file.read_exact_at(sample, self.offset + start).map_err(reading(&self.file))?;
            checksum.update(sample);
        }
        Ok(checksum.finalize())
    }
}

impl StoredTensor {
    /// Shape of the full tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type in the files.
    pub fn stored_dtype(&self) -> StoredDType {
        self.dtype
    }

    /// Element type that [`StoredTensors::read_into`] returns: F16 and BF16 are read as f32. `None` if the stored dtype cannot be read.
    pub fn dtype(&self) -> Option<DType> {
        readable_dtype(self.dtype)
    }

    /// Size of the tensor in the files, in bytes.
    #[expect(clippy::missing_panics_doc, reason = "shapes are checked when the files are opened")]
    pub fn stored_bytes(&self) -> u64 {
        let num_elements = checked_num_elements(&self.shape).expect("the shape was checked on opening");
        (num_elements as u64 * self.dtype.bitsize() as u64).div_ceil(8)
    }

    /// Returns each part with its size in bytes.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&StoredPart, u64)> {
        self.parts.iter().map(|part| (part, part.num_bytes(self.dtype)))
    }

    /// Returns whether all of the tensor is in `file`.
    pub(crate) fn is_stored_in(&self, file: &Path) -> bool {
        self.parts.iter().all(|part| *part.file == *file)
    }

    /// Number of parts that the tensor is stored in.
    pub fn num_parts(&self) -> usize {
        self.parts.len()
    }
}

/// The tensors of a checkpoint or of a model directory, by name. Only their descriptions are in memory.
#[derive(Debug, Clone)]
pub struct StoredTensors {
    path: PathBuf,
    tensors: BTreeMap<String, StoredTensor>,
    /// Tensors that an index places in a file that does not contain them, with the path of that file.
    absent: BTreeMap<String, PathBuf>,
}

impl StoredTensors {
    pub(crate) fn new(path: &Path, tensors: BTreeMap<String, StoredTensor>) -> Self {
        StoredTensors { path: path.to_owned(), tensors, absent: BTreeMap::new() }
    }

    /// Sets the tensors that an index places in a file that does not contain them.
    pub(crate) fn with_absent(self, absent: BTreeMap<String, PathBuf>) -> Self {
        StoredTensors { absent, ..self }
    }

    /// Path of the checkpoint or model directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Iterates over the tensors with their names, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &StoredTensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Refuses quantized weights. Weights are quantized if `config` has a `quantization_config` and a tensor does not consist of
    /// floating-point numbers of 16 bits or more. Returns whether `config` has a `quantization_config`.
    ///
    /// # Errors
    /// [`CheckpointError::Quantized`], with the first such tensor.
    pub fn check_quantization(&self, config: &serde_json::Value) -> Result<bool, CheckpointError> {
        let quantization = &config[QUANTIZATION_KEY];
        if quantization.is_null() {
            return Ok(false);
        }
        let is_quantized = |tensor: &StoredTensor| !tensor.dtype().is_some_and(DType::is_float);
        match self.iter().find(|(_, tensor)| is_quantized(tensor)) {
            None => Ok(true),
            Some((name, tensor)) => Err(CheckpointError::Quantized {
                path: self.path.clone(),
                method: quantization["quant_method"].to_string(),
                name: name.to_owned(),
                dtype: tensor.dtype,
            }),
        }
    }

    /// Returns the tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// Returns a checksum by which ranks check that they have the same tensors. It covers all names, dtypes, shapes and parts. It covers
    /// the contents of a part by the recorded CRC-32 or, without one, by the first and last 4 KiB. It does not depend on the folder or the
    /// names of the files.
    ///
    /// Cost: two reads of at most 4 KiB for each part without a recorded CRC-32, whatever its size. If such parts differ only between the
    /// first and the last 4 KiB, the fingerprint is the same.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn fingerprint(&self) -> Result<u32, CheckpointError> {
        let mut checksum = crc32fast::Hasher::new();
        for (name, StoredTensor { dtype, shape, parts }) in &self.tensors {
            checksum.update(format!("{name:?} {dtype} {shape:?}").as_bytes());
            for part in parts {
                let contents = part.crc32.map_or_else(|| part.sample(*dtype), Ok)?;
                checksum.update(format!(" {:?} {contents:08x}", part.extent).as_bytes());
            }
        }
        Ok(checksum.finalize())
    }

    /// Returns the same tensors under the names that `rename` returns. Leaves out tensors for which it returns `None`.
    ///
    /// Callers use it for files with other names (without a leading `transformer.`), and to drop tensors that are not parameters
    /// (`attn.bias`, `rotary_emb.inv_freq`, a tied `lm_head.weight`).
    ///
    /// # Errors
    /// If two tensors get the same name.
    pub fn renamed(&self, rename: impl Fn(&str) -> Option<String>) -> Result<StoredTensors, CheckpointError> {
        let mut originals: BTreeMap<String, &String> = BTreeMap::new();
        for original in self.tensors.keys() {
            let Some(name) = rename(original) else { continue };
            if let Some(first) = originals.insert(name.clone(), original) {
                return Err(CheckpointError::SameName {
                    name,
                    first: first.clone(),
                    second: original.clone(),
                });
            }
        }
        let tensors = originals.into_iter().map(|(name, original)| (name, self.tensors[original].clone()));
        let absent = self.absent.iter().filter_map(|(name, file)| Some((rename(name)?, file.clone())));
        Ok(StoredTensors::new(&self.path, tensors.collect()).with_absent(absent.collect()))
    }

    /// Checks that every tensor that an index names is in the file where the index places it.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] with the first tensor that is missing and its file.
    pub(crate) fn check_index(&self) -> Result<(), CheckpointError> {
        match self.absent.first_key_value() {
            None => Ok(()),
            Some((name, file)) => {
                Err(damaged(file, format!("it lacks '{name}', which the index says it contains")))
            }
        }
    }

    /// Returns whether two tensors have the same shape and the same elements, compared in the dtypes that they are read in.
    ///
    /// Cost: reads both tensors up to the first difference. Memory: 4 Mi elements of each tensor, which are 16 MiB in f32.
    ///
    /// # Errors
    /// As [`read_into`](StoredTensors::read_into).
    pub fn are_equal(&self, first: &str, second: &str) -> Result<bool, CheckpointError> {
        let unknown =
            |name: &str| CheckpointError::NoSuchTensor { name: name.into(), path: self.path.clone() };
        let [a, b] = [first, second].map(|name| self.get(name).ok_or_else(|| unknown(name)));
        let (a, b) = (a?, b?);
        if a.shape != b.shape || a.dtype() != b.dtype() {
            return Ok(false);
        }
        let size = a.dtype().map_or(0, DType::size);
        let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
        for piece in split(&Extent::full(&a.shape), COMPARED_ELEMENTS) {
            for (name, elements) in [(first, &mut of_first), (second, &mut of_second)] {
                elements.resize(piece.num_elements() * size, 0);
                self.read_into(name, &piece, elements)?;
            }
            if of_first != of_second {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that exactly the tensors `expected` are stored, with the same shapes, and with dtypes that are read as the expected ones.
    /// Ignores the placements, because any layout can read what any layout wrote.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatches`] with all differences at once. Before that, [`CheckpointError::Damaged`] if a file lacks a tensor
    /// that an index places there.
    pub fn check_against(&self, expected: &[TensorPlacement]) -> Result<(), CheckpointError> {
        self.check_index()?;
        let mut mismatches = Vec::new();
        for TensorPlacement { name, shape, dtype, .. } in expected {
            let name = name.clone();
            let Some(stored) = self.tensors.get(&name) else {
                mismatches.push(Mismatch::Missing { name, shape: shape.clone() });
                continue;
            };
            if stored.shape != *shape {
                let (expected, stored) = (shape.clone(), stored.shape.clone());
                mismatches.push(Mismatch::Shape { name, expected, stored });
            } else if stored.dtype() != Some(*dtype) {
                mismatches.push(Mismatch::DType { name, expected: *dtype, stored: stored.dtype });
            }
        }
        let known: BTreeSet<&str> = expected.iter().map(|tensor| tensor.name.as_str()).collect();
        let extra = self.tensors.iter().filter(|(name, _)| !known.contains(name.as_str()));
        mismatches.extend(
            extra.map(|(name, tensor)| Mismatch::Extra { name: name.clone(), shape: tensor.shape.clone() }),
        );
        if mismatches.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Mismatches { path: self.path.clone(), mismatches })
    }

    /// Fills `out` with the elements of `extent` of tensor `name`, row-major, in its [`StoredTensor::dtype`].
    ///
    /// Cost: reads every part that shares elements with `extent`. A part with a recorded checksum is read entirely and verified; of any
    /// other part, only the bytes from the first to the last shared element are read. Memory: a buffer of 256 KiB.
    ///
    /// # Errors
    /// If the tensor is unknown, the extent is outside of it, the buffer has the wrong length, the dtype cannot be read, or a file has
    /// vanished or changed. After an error, the contents of `out` are unspecified.
    pub fn read_into(&self, name: &str, extent: &Extent, out: &mut [u8]) -> Result<(), CheckpointError> {
        let Some(tensor) = self.tensors.get(name) else {
            return Err(CheckpointError::NoSuchTensor { name: name.into(), path: self.path.clone() });
        };
        if !is_within(extent, &tensor.shape) {
            let (shape, extent) = (tensor.shape.clone(), extent.clone());
            return Err(CheckpointError::OutsideTensor { name: name.into(), shape, extent });
        }
        let Some(dtype) = tensor.dtype() else {
            return Err(CheckpointError::UnreadableDType { name: name.into(), dtype: tensor.dtype });
        };
        let expected = extent.num_elements() * dtype.size();
        if out.len() != expected {
            return Err(CheckpointError::WrongLength { name: name.into(), expected, found: out.len() });
        }
        for part in &tensor.parts {
            read_part(part, tensor.dtype, extent, out)?;
        }
        Ok(())
    }
}

/// Copies the elements that `part` and `extent` share to their place in `out`.
fn read_part(
    part: &StoredPart,
    dtype: StoredDType,
    extent: &Extent,
    out: &mut [u8],
) -> Result<(), CheckpointError> {
    let Some(shared) = intersection(&part.extent, extent) else { return Ok(()) };
    let stored_size = dtype.bitsize() / 8;
    let size = readable_dtype(dtype).expect("only readable dtypes are read").size();
    let mut reader = PartReader::open(part)?;
    for run in copy_runs(&shared, &part.extent, extent) {
        reader.skip_to(run.source * stored_size)?;
        let place = &mut out[run.destination * size..(run.destination + run.len) * size];
        match dtype {
            StoredDType::BF16 => reader.fill_widened(place, |bits| Bf16::from_bits(bits).to_f32())?,
            StoredDType::F16 => reader.fill_widened(place, |bits| F16::from_bits(bits).to_f32())?,
            _ => reader.fill(place)?,
        }
    }
    reader.finish(part.extent.num_elements() * stored_size)
}

/// A reader of one part from front to back. Verifies the part's checksum if one is recorded.
struct PartReader<'a> {
    part: &'a StoredPart,
    file: BufReader<File>,
    checksum: crc32fast::Hasher,
    /// Number of bytes of the part that were read or skipped.
    position: usize,
}

impl<'a> PartReader<'a> {
    fn open(part: &'a StoredPart) -> Result<Self, CheckpointError> {
        let (mut file, _) = open_file(&part.file)?;
        file.seek(SeekFrom::Start(part.offset)).map_err(reading(&part.file))?;
        let file = BufReader::with_capacity(READ_BUFFER_BYTES, file);
        Ok(PartReader { part, file, checksum: crc32fast::Hasher::new(), position: 0 })
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_exact(out).map_err(reading(&self.part.file))?;
        self.position += out.len();
        if self.part.crc32.is_some() {
            self.checksum.update(out);
        }
        Ok(())
    }

    /// Fills `out` with f32 elements, converted from 16-bit elements of the part.
    fn fill_widened(&mut self, out: &mut [u8], widen: impl Fn(u16) -> f32) -> Result<(), CheckpointError> {
        let mut scratch = [0; 4096];
        for chunk in out.chunks_mut(2 * scratch.len()) {
            let halves = &mut scratch[..chunk.len() / 2];
            self.fill(halves)?;
            for (half, value) in halves.chunks_exact(2).zip(chunk.chunks_exact_mut(4)) {
                value.copy_from_slice(&widen(u16::from_le_bytes([half[0], half[1]])).to_le_bytes());
            }
        }
        Ok(())
    }

    fn skip_to(&mut self, position: usize) -> Result<(), CheckpointError> {
        if self.part.crc32.is_none() {
            let distance = (position - self.position) as i64;
            self.position = position;
            return self.file.seek_relative(distance).map_err(reading(&self.part.file));
        }
        let mut scratch = [0; 4096];
        while self.position < position {
            let len = scratch.len().min(position - self.position);
            self.fill(&mut scratch[..len])?;
        }
        Ok(())
    }

    fn finish(mut self, part_bytes: usize) -> Result<(), CheckpointError> {
        let Some(expected) = self.part.crc32 else { return Ok(()) };
        self.skip_to(part_bytes)?;
        let found = self.checksum.finalize();
        if found == expected {
            return Ok(());
        }
        let (start, shape) = (&self.part.extent.start, &self.part.extent.shape);
        let reason = format!(
            "the part at byte {} (start {start:?}, shape {shape:?}) has checksum {found:08x}, but {expected:08x} was \
             written",
            self.part.offset
        );
        Err(damaged(&self.part.file, reason))
    }
}
