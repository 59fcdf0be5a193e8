//! The safetensors file format: eight bytes with the length of a JSON header, the header, and the tensors' bytes without gaps
//! (<https://github.com/huggingface/safetensors>).

use crate::StoredDType;
use crate::error::CheckpointError;
use crate::extent::checked_num_elements;
use crate::files::{damaged, open_file, reading, writing};
use crate::manifest::FileEntry;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use trireme_base::DType;

/// Key of the header's only member that is not a tensor.
pub(crate) const METADATA_KEY: &str = "__metadata__";

/// Maximum length of a header in bytes, the same as in the reference implementation.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Maximum number of tensors in a file: several times as many as the largest models have in all of their files.
const TENSORS_MAX: usize = 1 << 18;

const LENGTH_BYTES: u64 = 8;

const WRITE_BUFFER_BYTES: usize = 1 << 20;
/// Number of bytes after which the writer syncs to the disk. A sync after gigabytes would take minutes on a slow disk, without a sign of
/// progress.
const SYNC_BYTES: u64 = 256 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeaderEntry {
    pub(crate) dtype: StoredDType,
    pub(crate) shape: Vec<usize>,
    /// Position of the first byte, counted from the beginning of the file.
    pub(crate) offset: u64,
}

#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) entries: BTreeMap<String, HeaderEntry>,
    /// Notes next to the tensors: the members of `__metadata__`.
    pub(crate) metadata: HashMap<String, String>,
}

/// Reads a file's header and checks that the tensors are in bounds, without gaps or overlap, and end with the file.
pub(crate) fn read_header(path: &Path) -> Result<Header, CheckpointError> {
    let (mut file, size) = open_file(path)?;
    if size < LENGTH_BYTES {
        return Err(damaged(path, format!("{size} bytes are too few for a safetensors file")));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(reading(path))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX || length > size - LENGTH_BYTES {
        return Err(damaged(path, format!("it claims a header of {length} bytes in a file of {size}")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(reading(path))?;
    // Each tensor is a JSON object, and no escape can replace its opening brace.
    if header.iter().filter(|&&byte| byte == b'{').count() > TENSORS_MAX {
        return Err(damaged(path, format!("its header describes more than {TENSORS_MAX} tensors")));
    }
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| damaged(path, format!("its header is invalid: {error}")))?;
    let data_start = LENGTH_BYTES + length;
    let held = size - data_start;
    if header.data_len() as u64 != held {
        let described = header.data_len();
        return Err(damaged(
            path,
            format!("its header describes {described} bytes of tensors, but the file contains {held}"),
        ));
    }
    let tensors = header.tensors();
    if let Some((name, _)) = tensors.iter().find(|(_, info)| checked_num_elements(&info.shape).is_none()) {
        return Err(damaged(path, format!("the shape of '{name}' has too many elements")));
    }
    let entry = |info: &TensorInfo| HeaderEntry {
        dtype: info.dtype,
        shape: info.shape.clone(),
        offset: data_start + info.data_offsets.0 as u64,
    };
    let entries = tensors.iter().map(|(name, info)| (name.clone(), entry(info))).collect();
    Ok(Header { entries, metadata: header.metadata().clone().unwrap_or_default() })
}

/// A writer that fills a safetensors file from front to back and computes checksums.
pub(crate) struct SafetensorsWriter {
    path: PathBuf,
    file: BufWriter<File>,
    checksum: crc32fast::Hasher,
    written: u64,
    /// Number of bytes since the last sync.
    unsynced: u64,
    size: u64,
}

impl SafetensorsWriter {
    /// Creates a file, which must not exist, for these tensors in this order, with notes in its metadata.
    pub(crate) fn create<'a>(
        path: &Path,
        tensors: impl IntoIterator<Item = (String, DType, &'a [usize])>,
        notes: &[(&str, &str)],
    ) -> Result<Self, CheckpointError> {
        let file = File::create_new(path).map_err(writing(path))?;
        let (header, data_len) = header(tensors, notes);
        let mut writer = SafetensorsWriter {
            path: path.to_owned(),
            file: BufWriter::with_capacity(WRITE_BUFFER_BYTES, file),
            checksum: crc32fast::Hasher::new(),
            written: 0,
            unsynced: 0,
            size: header.len() as u64 + data_len,
        };
        writer.write(&header)?;
        Ok(writer)
    }

    /// Appends bytes of tensors and returns their CRC-32.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<u32, CheckpointError> {
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(bytes);
        self.checksum.combine(&checksum);
        self.file.write_all(bytes).map_err(writing(&self.path))?;
        self.written += bytes.len() as u64;
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= SYNC_BYTES {
            self.unsynced = 0;
            self.file.get_ref().sync_data().map_err(writing(&self.path))?;
        }
        Ok(checksum.finalize())
    }

    /// Syncs the file to the disk. Returns its size and checksum.
    ///
    /// # Panics
    /// If the number of bytes written differs from the size of the tensors given to [`create`](Self::create).
    pub(crate) fn finish(self) -> Result<FileEntry, CheckpointError> {
        assert_eq!(self.written, self.size, "{} holds what its header announces", self.path.display());
        let file = self.file.into_inner().map_err(|error| writing(&self.path)(error.into_error()))?;
        file.sync_all().map_err(writing(&self.path))?;
        Ok(FileEntry { size: self.size, crc32: self.checksum.finalize() })
    }
}

/// Returns the bytes of a file up to its data, and the length of the data in bytes.
fn header<'a>(
    tensors: impl IntoIterator<Item = (String, DType, &'a [usize])>,
    notes: &[(&str, &str)],
) -> (Vec<u8>, u64) {
    let mut end = 0;
    let infos = tensors.into_iter().map(|(name, dtype, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size();
        (
            name,
            TensorInfo { dtype: to_stored_dtype(dtype), shape: shape.to_vec(), data_offsets: (start, end) },
        )
    });
    let infos = infos.collect();
    // PyTorch writes this note, and transformers refuses files without it.
    let notes = std::iter::once(&("format", "pt")).chain(notes);
    let notes = notes.map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let metadata = Metadata::new(Some(notes), infos).expect("tensors that follow each other are valid");
    // Converted to a JSON value first, because its members can be sorted.
    let mut value = serde_json::to_value(&metadata).expect("a header is JSON");
    value.sort_all_objects();
    let mut json = serde_json::to_vec(&value).expect("a header is JSON");
    // The data begins at a multiple of eight bytes.
    json.resize(json.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    (header, end as u64)
}

/// Returns the safetensors dtype of a dtype.
pub(crate) fn to_stored_dtype(dtype: DType) -> StoredDType {
    match dtype {
        DType::F32 => StoredDType::F32,
        DType::F64 => StoredDType::F64,
        DType::F16 => StoredDType::F16,
        DType::Bf16 => StoredDType::BF16,
        DType::U8 => StoredDType::U8,
        DType::U16 => StoredDType::U16,
        DType::U32 => StoredDType::U32,
        DType::U64 => StoredDType::U64,
        DType::I32 => StoredDType::I32,
        DType::I64 => StoredDType::I64,
    }
}

/// Returns the dtype that elements of a file are read as: f16 and bf16 are read as f32. `None` if they cannot be read.
pub(crate) fn readable_dtype(dtype: StoredDType) -> Option<DType> {
    match dtype {
        StoredDType::F32 | StoredDType::F16 | StoredDType::BF16 => Some(DType::F32),
        StoredDType::F64 => Some(DType::F64),
        StoredDType::U8 => Some(DType::U8),
        StoredDType::U16 => Some(DType::U16),
        StoredDType::U32 => Some(DType::U32),
        StoredDType::U64 => Some(DType::U64),
        StoredDType::I32 => Some(DType::I32),
        StoredDType::I64 => Some(DType::I64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn write_example(path: &Path) -> FileEntry {
        let tensors = [("b".to_owned(), DType::F32, &[2, 2][..]), ("a".to_owned(), DType::U8, &[3])];
        let mut writer = SafetensorsWriter::create(path, tensors, &[("author", "me")]).unwrap();
        writer.write(&[1; 10]).unwrap();
        writer.write(&[2; 9]).unwrap();
        writer.finish().unwrap()
    }

    #[test]
    fn written_files_are_readable_here_and_by_the_reference_implementation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.safetensors");
        let entry = write_example(&path);
        let contents = std::fs::read(&path).unwrap();
        assert_eq!(entry, FileEntry { size: contents.len() as u64, crc32: crc32fast::hash(&contents) });

        let Header { entries: header, metadata } = read_header(&path).unwrap();
        assert_eq!((&metadata["format"][..], &metadata["author"][..]), ("pt", "me"));
        assert_eq!(header["a"].shape, [3]);
        assert_eq!(contents[header["a"].offset as usize..], [2; 3]);
        assert_eq!(header["b"].offset % 8, 0);

        let reference = safetensors::SafeTensors::deserialize(&contents).unwrap();
        assert_eq!(reference.tensor("a").unwrap().data(), [2; 3]);
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&contents).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    }

    #[test]
    fn a_file_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.safetensors");
        write_example(&path);
        let again = SafetensorsWriter::create(&path, [("a".to_owned(), DType::U8, &[1][..])], &[]);
        assert!(matches!(again.err(), Some(CheckpointError::Write { .. })));
    }

    #[test]
    fn truncated_and_extended_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.safetensors");
        write_example(&path);
        let contents = std::fs::read(&path).unwrap();
        for length in 0..contents.len() {
            std::fs::write(&path, &contents[..length]).unwrap();
            assert!(matches!(read_header(&path), Err(CheckpointError::Damaged { .. })), "{length}");
        }
        std::fs::write(&path, [&contents[..], &[0]].concat()).unwrap();
        assert!(matches!(read_header(&path), Err(CheckpointError::Damaged { .. })));
    }

    #[test]
    fn hostile_headers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.safetensors");
        let tensor =
            |range: &str, shape: &str| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":{range}}}"#);
        for header in [
            "".to_owned(),
            "[]".to_owned(),
            "[".repeat(10_000),
            format!(r#"{{"a":{}}}"#, tensor("[0,8]", "[1]")),
            format!(r#"{{"a":{}}}"#, tensor("[4,8]", "[1]")),
            format!(r#"{{"a":{}}}"#, tensor("[8,0]", "[2]")),
            format!(r#"{{"a":{}}}"#, tensor("[0,8]", "[-2]")),
            format!(r#"{{"a":{}}}"#, tensor("[0,8]", "[4611686018427387904,8]")),
            format!(
                r#"{{"a":{},"b":{}}}"#,
                tensor("[0,0]", "[0,4294967296,4294967296]"),
                tensor("[0,8]", "[2]")
            ),
            format!(r#"{{"a":{},"b":{}}}"#, tensor("[0,8]", "[2]"), tensor("[4,8]", "[1]")),
            format!(r#"{{"a":{},"a":{}}}"#, tensor("[0,4]", "[1]"), tensor("[4,8]", "[1]")),
        ] {
            let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat();
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(read_header(&path), Err(CheckpointError::Damaged { .. })), "{header}");
        }
        // Parsing each of these entries would take some hundred bytes of memory, and microseconds.
        let entry = |index: usize| format!(r#""{index}":{}"#, tensor("[0,0]", "[0]"));
        let many = (0..=TENSORS_MAX).map(entry).collect::<Vec<_>>().join(",");
        let header = format!("{{{many}}}");
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        std::fs::write(&path, bytes).unwrap();
        let error = read_header(&path).unwrap_err().to_string();
        assert!(error.contains("more than 262144 tensors"), "{error}");
        std::fs::write(&path, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap();
        assert!(matches!(read_header(&path), Err(CheckpointError::Damaged { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read_but_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), json in "\\PC{0,40}") {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("f.safetensors");
            std::fs::write(&path, &bytes).unwrap();
            let _ = read_header(&path);
            std::fs::write(&path, [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &bytes].concat()).unwrap();
            let _ = read_header(&path);
        }
    }
}
