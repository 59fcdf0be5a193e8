use super::PrepareOptions;
use super::decompress::FileCompression;
use super::report::Skipped;
use crate::DataError;
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// The whole file is one document.
    Text,
    /// A JSON Lines file or a JSON array; each record is a JSON object.
    JsonLines,
}

#[derive(Debug)]
pub(super) struct InputFile {
    pub(super) path: PathBuf,
    /// The path that is shown in messages.
    pub(super) display_path: PathBuf,
    pub(super) format: Format,
    pub(super) bytes: u64,
    /// Whether the user named this file itself, and not a folder that contains it. A binary file is then an error.
    /// Binary files in folders are skipped.
    pub(super) is_explicit: bool,
    /// Index of the input that the file belongs to.
    pub(super) source: usize,
    pub(super) compression: FileCompression,
    modified_nanoseconds: u128,
}

/// All files to read, in reading order: inputs in the given order, and the contents of folders sorted by name.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    pub(super) files: Vec<InputFile>,
    pub(super) bytes: u64,
    pub(super) skipped: Skipped,
    /// Index of the input whose files are being added.
    source: usize,
}

impl Inputs {
    pub(super) fn collect(options: &PrepareOptions) -> Result<Self, DataError> {
        if options.inputs.is_empty() {
            return Err(DataError::NoInput);
        }
        Self::of(&options.inputs, options)
    }

    pub(super) fn of(paths: &[PathBuf], options: &PrepareOptions) -> Result<Self, DataError> {
        let mut inputs = Inputs::default();
        // The output folder may be inside an input folder, and must not be read.
        let out = fs::canonicalize(&options.out).ok();
        for (source, path) in paths.iter().enumerate() {
            inputs.source = source;
            let metadata = match fs::metadata(path) {
                Ok(metadata) => metadata,
                Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                    return Err(DataError::InputMissing { path: path.clone() });
                }
                Err(source) => return Err(DataError::Read { path: path.clone(), source }),
            };
            if metadata.is_dir() {
                if out.is_some() && fs::canonicalize(path).ok() == out {
                    return Err(DataError::InputIsOutput { path: path.clone() });
                }
                inputs.add_folder(path, &options.extensions, out.as_deref())?;
            } else if metadata.is_file() {
                inputs.add_file(path.clone(), &metadata, true);
            } else {
                return Err(DataError::InputKind { path: path.clone() });
            }
        }
        Ok(inputs)
    }

    fn add_folder(
        &mut self,
        folder: &Path,
        extensions: &[String],
        out: Option<&Path>,
    ) -> Result<(), DataError> {
        let read = |source| DataError::Read { path: folder.to_owned(), source };
        if out.is_some() && fs::canonicalize(folder).ok().as_deref() == out {
            return Ok(());
        }
        let mut entries = fs::read_dir(folder).map_err(read)?.collect::<Result<Vec<_>, _>>().map_err(read)?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            // `metadata` does not follow symbolic links, so cyclic links are harmless.
            let metadata =
                entry.metadata().map_err(|source| DataError::Read { path: path.clone(), source })?;
            if name.as_encoded_bytes().starts_with(b".") {
                self.skipped.hidden += 1;
            } else if metadata.is_dir() && name == "target" {
                self.skipped.target_folders += 1;
            } else if metadata.is_dir() {
                self.add_folder(&path, extensions, out)?;
            } else if !metadata.is_file() {
                self.skipped.not_files += 1;
            } else if !extensions.is_empty() && !has_extension(FileCompression::of(&path).1, extensions) {
                self.skipped.other_extensions += 1;
            } else {
                self.add_file(path, &metadata, false);
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: PathBuf, metadata: &Metadata, named: bool) {
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let json_lines = ["jsonl", "ndjson", "json", "parquet"].map(str::to_owned);
        let (compression, name) = FileCompression::of(&path);
        let is_json_lines = has_extension(name, &json_lines);
        self.bytes += metadata.len();
        self.files.push(InputFile {
            format: if is_json_lines { Format::JsonLines } else { Format::Text },
            source: self.source,
            compression,
            display_path: path.clone(),
            path,
            bytes: metadata.len(),
            is_explicit: named,
            modified_nanoseconds: modified.map_or(0, |age| age.as_nanos()),
        });
    }

    /// Returns a text that identifies the files by paths, sizes and modification times. It is equal if no file was
    /// modified.
    pub(super) fn fingerprint(&self) -> String {
        let mut hasher = crc32fast::Hasher::new();
        for file in &self.files {
            hasher.update(file.path.as_os_str().as_encoded_bytes());
            hasher.update(&[0]);
            hasher.update(&file.bytes.to_le_bytes());
            hasher.update(&file.modified_nanoseconds.to_le_bytes());
        }
        format!("{:08x}-{}-{}", hasher.finalize(), self.files.len(), self.bytes)
    }
}

fn has_extension(path: &Path, extensions: &[String]) -> bool {
    path.extension().is_some_and(|own| extensions.iter().any(|wanted| own.eq_ignore_ascii_case(wanted)))
}
