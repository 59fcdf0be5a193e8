//! Message authentication codes, by which members of a job authenticate each other: HMAC-SHA256 (RFC 2104, FIPS 198-1).

use crate::Secret;
use crate::secret::random_bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io;

pub(super) const TAG_BYTES: usize = 32;
pub(super) const NONCE_BYTES: usize = 32;

/// A message authentication code. Only holders of the key can compute and verify it.
pub(super) type Tag = [u8; TAG_BYTES];
/// A random number that is used once, so that no message is valid twice.
pub(super) type Nonce = [u8; NONCE_BYTES];

/// A key shared by members of a job. Tags of the same parts for different purposes differ.
#[derive(Clone)]
pub(super) struct Key(Hmac<Sha256>);

impl Key {
    /// The key derived from a job's secret. Without a secret, a fixed key that any process has.
    pub(super) fn of(secret: Option<&Secret>) -> Self {
        Key::new(secret.map_or(&[], |secret| secret.expose().as_bytes()))
    }

    /// Derives a key for one purpose. It reveals nothing about this key.
    pub(super) fn derive(&self, purpose: &str, parts: &[&[u8]]) -> Self {
        Key::new(&self.tag(purpose, parts))
    }

    pub(super) fn tag(&self, purpose: &str, parts: &[&[u8]]) -> Tag {
        self.mac_of(purpose, parts).finalize().into_bytes().into()
    }

    /// Whether `tag` is the tag of the parts. Takes constant time.
    pub(super) fn verify(&self, purpose: &str, parts: &[&[u8]], tag: &Tag) -> bool {
        self.mac_of(purpose, parts).verify_slice(tag).is_ok()
    }

    fn new(bytes: &[u8]) -> Self {
        Key(Hmac::new_from_slice(bytes).expect("a key of any length fits"))
    }

    fn mac_of(&self, purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut code = self.0.clone();
        // Lengths are included, so that different lists of parts are different bytes.
        for part in [purpose.as_bytes()].iter().chain(parts) {
            code.update(&(part.len() as u64).to_le_bytes());
            code.update(part);
        }
        code
    }
}

pub(super) fn nonce() -> io::Result<Nonce> {
    random_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hmac_gives_the_published_values() {
        // RFC 4231, test case 2.
        let code = Key::new(b"Jefe").0.chain_update(b"what do ya want for nothing?").finalize();
        let expected = [
            0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95, 0x75, 0xc7,
            0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27, 0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43,
        ];
        assert_eq!(<Tag>::from(code.into_bytes()), expected);
    }

    #[test]
    fn a_tag_fits_one_key_one_purpose_and_one_list_of_parts() {
        let secret = Secret::new("0123456789abcdef").expect("long enough");
        let key = Key::of(Some(&secret));
        let tag = key.tag("purpose", &[b"ab", b"c"]);
        assert!(key.verify("purpose", &[b"ab", b"c"], &tag));
        assert!(!key.verify("purpose", &[b"a", b"bc"], &tag));
        assert!(!key.verify("purpose", &[b"abc"], &tag));
        assert!(!key.verify("another", &[b"ab", b"c"], &tag));
        assert!(!Key::of(None).verify("purpose", &[b"ab", b"c"], &tag));
        assert!(!key.derive("purpose", &[]).verify("purpose", &[b"ab", b"c"], &tag));
        for bit in 0..8 * TAG_BYTES {
            let mut other = tag;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.verify("purpose", &[b"ab", b"c"], &other), "{bit}");
        }
    }
}
