use std::str;

trireme_base::named! {
    /// The treatment of bytes that are not valid UTF-8.
    #[derive(Default, serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum InvalidUtf8 {
        /// Replaces each invalid sequence by U+FFFD, and counts them.
        #[default]
        Replace = "replace",
        /// Treats the first invalid sequence as an error.
        Refuse = "refuse",
    }
}

/// An incremental UTF-8 decoder for pieces of any size.
#[derive(Debug)]
pub(super) struct Utf8Decoder {
    invalid: InvalidUtf8,
    /// The first bytes of an incomplete character at the end of the last piece.
    held: Vec<u8>,
    /// Number of bytes decoded, excluding those in `held`.
    offset: u64,
    /// Number of sequences that were replaced by U+FFFD.
    pub(super) num_replaced: u64,
}

impl Utf8Decoder {
    pub(super) fn new(invalid: InvalidUtf8, offset: u64) -> Self {
        Utf8Decoder { invalid, held: Vec::new(), offset, num_replaced: 0 }
    }

    /// Appends the decoded text of `bytes` to `out`. An incomplete character at the end is kept for the next piece,
    /// unless `bytes` are the `last` piece. The error is the offset of an invalid sequence that must be refused,
    /// counted like the offset given to [`new`](Self::new).
    pub(super) fn push(&mut self, bytes: &[u8], last: bool, out: &mut String) -> Result<(), u64> {
        let mut joined = std::mem::take(&mut self.held);
        let bytes = if joined.is_empty() {
            bytes
        } else {
            joined.extend_from_slice(bytes);
            &joined
        };
        if let Ok(text) = str::from_utf8(bytes) {
            out.push_str(text);
            self.offset += text.len() as u64;
            return Ok(());
        }
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            out.push_str(chunk.valid());
            self.offset += chunk.valid().len() as u64;
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                break;
            }
            if !last && chunks.peek().is_none() && is_unfinished(invalid) {
                self.held = invalid.to_vec();
                break;
            }
            if self.invalid == InvalidUtf8::Refuse {
                return Err(self.offset);
            }
            out.push(char::REPLACEMENT_CHARACTER);
            self.num_replaced += 1;
            self.offset += invalid.len() as u64;
        }
        Ok(())
    }
}

fn is_unfinished(bytes: &[u8]) -> bool {
    str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(bytes: &[u8], piece: usize, invalid: InvalidUtf8) -> Result<(String, u64), u64> {
        let mut decoder = Utf8Decoder::new(invalid, 0);
        let mut text = String::new();
        for bytes in bytes.chunks(piece) {
            decoder.push(bytes, false, &mut text)?;
        }
        decoder.push(&[], true, &mut text)?;
        Ok((text, decoder.num_replaced))
    }

    fn bytes_near_utf8() -> impl Strategy<Value = Vec<u8>> {
        let parts: Vec<&[u8]> = vec![
            b"a",
            "é".as_bytes(),
            "€".as_bytes(),
            "𝄞".as_bytes(),
            b"\xff",
            b"\xe2\x82",
            b"\xf0\x9d",
            b"\x80",
        ];
        prop::collection::vec(prop::sample::select(parts), 0..40).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn pieces_decode_as_the_whole(bytes in bytes_near_utf8(), piece in 1_usize..9) {
            let whole = String::from_utf8_lossy(&bytes);
            let (text, num_replaced) = decode(&bytes, piece, InvalidUtf8::Replace).unwrap();
            prop_assert_eq!(text.matches('\u{FFFD}').count() as u64, num_replaced);
            prop_assert_eq!(text, whole);
            let refused = decode(&bytes, piece, InvalidUtf8::Refuse).err();
            let invalid_at = str::from_utf8(&bytes).err().map(|error| error.valid_up_to() as u64);
            prop_assert_eq!(refused, invalid_at);
        }
    }
}
