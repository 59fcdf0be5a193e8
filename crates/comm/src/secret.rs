use crate::CommError;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

/// A secret that all workers of a job share. A process must know it to join.
///
/// The secret is never sent or printed. Choose it at random, like [`Secret::random`] and `openssl rand -hex 32` do: an eavesdropper who
/// records how a worker joins can try guesses offline.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Minimum length. A shorter secret could be guessed.
    pub const BYTES_MIN: usize = 16;
    /// Maximum length. A longer file is not a secret.
    pub const BYTES_MAX: usize = 4096;

    /// Creates a secret from `text`, without surrounding white space.
    ///
    /// # Errors
    /// [`CommError::SecretUnfit`] if the text is too short or too long.
    pub fn new(text: &str) -> Result<Self, CommError> {
        let text = text.trim();
        if !(Self::BYTES_MIN..=Self::BYTES_MAX).contains(&text.len()) {
            return Err(CommError::SecretUnfit { bytes: text.len() });
        }
        Ok(Secret(text.to_owned()))
    }

    /// Generates a secret of 256 random bits, as 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`CommError::Random`] if the system provides no random numbers.
    pub fn random() -> Result<Self, CommError> {
        let bytes: [u8; 32] =
            random_bytes().map_err(|source| CommError::Random { source: Arc::new(source) })?;
        Ok(Secret(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Reads a secret from a text file that only its owner may access.
    ///
    /// # Errors
    /// [`CommError::SecretFile`] if the file cannot be read, is too long, or others may access it; [`CommError::SecretUnfit`] as for
    /// [`Secret::new`].
    pub fn read(path: &Path) -> Result<Self, CommError> {
        // The line may end with a line feed.
        let text = read_private(path, Self::BYTES_MAX + 1)
            .map_err(|source| CommError::SecretFile { path: path.to_owned(), source: Arc::new(source) })?;
        Secret::new(&text)
    }

    /// The text of the secret, to be passed to a worker.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Reads a file that only its owner may access. Refuses a file of more than `bytes_max` bytes.
pub(crate) fn read_private(path: &Path, bytes_max: usize) -> io::Result<String> {
    let file = File::open(path)?;
    let mode = file.metadata()?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let why = format!("its mode is {mode:o}, so others may access it; run chmod 600");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let mut text = String::new();
    file.take(bytes_max as u64 + 1).read_to_string(&mut text)?;
    if text.len() > bytes_max {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {bytes_max} bytes"),
        ));
    }
    Ok(text)
}

/// Random bytes from the system, suitable for keys.
pub(crate) fn random_bytes<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let mut num_filled = 0;
    while num_filled < BYTES {
        num_filled += getrandom(&mut bytes[num_filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_and_not_shown() {
        let secret = Secret::new("  correct horse battery staple\n").expect("long enough");
        assert_eq!(secret.expose(), "correct horse battery staple");
        assert!(!format!("{secret:?}").contains("horse"));
        for unfit in ["", "0123456789abcde", "   0123456789abcde   ", &"x".repeat(4097)] {
            assert!(matches!(Secret::new(unfit), Err(CommError::SecretUnfit { .. })), "{unfit}");
        }
        let [one, other] = [(); 2].map(|()| Secret::random().expect("random numbers"));
        assert!(one.expose().len() == 64 && one.expose() != other.expose());
    }

    #[test]
    fn a_file_that_others_can_read_holds_no_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        std::fs::write(&path, "0123456789abcdef\n").expect("written");
        let set_mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode));
        set_mode(0o600).expect("an own file");
        assert_eq!(Secret::read(&path).expect("readable").expose(), "0123456789abcdef");
        for mode in [0o640, 0o604] {
            set_mode(mode).expect("an own file");
            assert!(matches!(Secret::read(&path), Err(CommError::SecretFile { .. })), "{mode:o}");
        }
        set_mode(0o600).expect("an own file");
        std::fs::write(&path, format!("0123456789abcdef{}more", " ".repeat(4096))).expect("written");
        assert!(matches!(Secret::read(&path), Err(CommError::SecretFile { .. })), "not cut");
        std::fs::remove_file(&path).expect("an own file");
        assert!(matches!(Secret::read(&path), Err(CommError::SecretFile { .. })));
    }
}
