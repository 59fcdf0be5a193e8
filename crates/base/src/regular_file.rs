//! Opens, creates, reads and replaces regular files. Refuses a path that names anything else, such as a pipe, and never blocks on it.

use rustix::fs::OFlags;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// As [`open_regular_with`].
pub fn open_regular(path: &Path) -> io::Result<File> {
    open_regular_with(path, OpenOptions::new().read(true))
}

/// Opens or creates a regular file with these options. Never blocks on another process, as opening a pipe would.
///
/// # Errors
/// As [`OpenOptions::open`], and `InvalidInput` for a pipe, a device, a socket or a folder.
pub fn open_regular_with(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let refusal = || io::Error::new(ErrorKind::InvalidInput, "it is not a regular file");
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(refusal());
    }
    // Another process may replace the file after the check.
    let file = options.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(refusal()) }
}

/// Reads a regular file of at most `max` bytes.
///
/// # Errors
/// As [`open_regular`], and `FileTooLarge`, whose message states the file's length.
pub fn read_at_most(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let mut content = Vec::new();
    (&file).take(max + 1).read_to_end(&mut content)?;
    if content.len() as u64 > max {
        let what = format!("it has {} bytes, more than {max}", file.metadata()?.len());
        return Err(io::Error::new(ErrorKind::FileTooLarge, what));
    }
    Ok(content)
}

/// Creates a regular file, or truncates an existing one.
///
/// # Errors
/// As [`open_regular_with`].
pub fn create_regular(path: &Path) -> io::Result<File> {
    open_regular_with(path, OpenOptions::new().write(true).create(true).truncate(true))
}

/// Replaces a file atomically with the content that `write` writes. After a crash the file has either the old or the new content, never a
/// mixture.
///
/// The content is written to a hidden file in the same folder and synced to disk. Then the hidden file is renamed. If a step fails, the
/// hidden file is removed. Does not sync the folder.
///
/// # Errors
/// The error of `write`, or an error of creating, syncing or renaming the hidden file.
pub fn replace_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".partial");
    let partial = path.with_file_name(name);
    let written = create_regular(&partial).and_then(|file| {
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        file.into_inner()?.sync_all()
    });
    written.and_then(|()| fs::rename(&partial, path)).inspect_err(|_| drop(fs::remove_file(&partial)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        let failed = replace_file(&path, |file| {
            file.write_all(b"half of the new")?;
            Err(io::Error::other("it fails"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "it fails");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        replace_file(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_file_is_read_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "four").unwrap();
        assert_eq!(read_at_most(&path, 4).unwrap(), b"four");
        let error = read_at_most(&path, 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "it has 4 bytes, more than 2");
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let append = || OpenOptions::new().create(true).append(true).clone();
        io::Write::write_all(&mut open_regular_with(&file, &mut append()).unwrap(), b"text").unwrap();
        let mut text = String::new();
        open_regular(&file).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        assert_eq!(create_regular(&file).unwrap().metadata().unwrap().len(), 0);
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        for path in [&*pipe, folder.path(), Path::new("/dev/zero")] {
            assert_eq!(open_regular(path).unwrap_err().kind(), ErrorKind::InvalidInput);
            let error = open_regular_with(path, &mut append()).unwrap_err();
            assert_eq!(error.to_string(), "it is not a regular file");
            assert_eq!(create_regular(path).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        let missing = open_regular(&folder.path().join("missing")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
