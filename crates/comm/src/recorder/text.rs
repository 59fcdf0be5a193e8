use std::fmt::{self, Write};

/// A short text, stored inline. Longer text is truncated at a character; control characters are removed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text<const BYTES: usize> {
    /// UTF-8, padded with zeros.
    bytes: [u8; BYTES],
}

/// The program line of an operation.
pub(crate) type ProgramLineText = Text<56>;

pub(crate) type GroupName = Text<24>;

impl<const BYTES: usize> Text<BYTES> {
    pub(crate) const EMPTY: Self = Text { bytes: [0; BYTES] };

    pub(crate) fn of(text: fmt::Arguments<'_>) -> Self {
        let mut written = Writer { text: Text::EMPTY, len: 0 };
        // Fails where the text is truncated.
        let _ = written.write_fmt(text);
        written.text
    }

    pub(crate) fn as_str(&self) -> &str {
        let len = self.bytes.iter().position(|&byte| byte == 0).unwrap_or(BYTES);
        std::str::from_utf8(&self.bytes[..len]).expect("a text is UTF-8")
    }

    /// Encodes the text as `words.len()` little-endian words.
    pub(crate) fn encode(&self, words: &mut [u64]) {
        assert_eq!(8 * words.len(), BYTES, "as many words as the text has");
        for (word, chunk) in words.iter_mut().zip(self.bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().expect("the chunks have eight bytes"));
        }
    }

    /// Decodes the words of [`encode`](Text::encode). `None` if they do not encode a text.
    pub(crate) fn decode(words: &[u64]) -> Option<Self> {
        assert_eq!(8 * words.len(), BYTES, "as many words as the text has");
        let mut text = Text::EMPTY;
        for (chunk, word) in text.bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        let len = text.bytes.iter().position(|&byte| byte == 0).unwrap_or(BYTES);
        let shown = std::str::from_utf8(&text.bytes[..len]).ok()?;
        let is_plain = !shown.contains(char::is_control) && text.bytes[len..].iter().all(|&byte| byte == 0);
        is_plain.then_some(text)
    }
}

impl<const BYTES: usize> fmt::Debug for Text<BYTES> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

struct Writer<const BYTES: usize> {
    text: Text<BYTES>,
    len: usize,
}

impl<const BYTES: usize> Write for Writer<BYTES> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars().filter(|character| !character.is_control()) {
            let rest = &mut self.text.bytes[self.len..];
            if character.len_utf8() > rest.len() {
                return Err(fmt::Error);
            }
            self.len += character.encode_utf8(rest).len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_at_characters_and_read_back() {
        let long = "é".repeat(40);
        for (given, kept) in [
            ("", ""),
            ("step 3, line 12: REDUCE_GRAD 1", "step 3, line 12: REDUCE_GRAD 1"),
            ("\x1b[31m\n\0red", "[31mred"),
            (&long, &long[..56]),
            (&format!("x{long}"), &format!("x{}", &long[..54])),
        ] {
            let text = ProgramLineText::of(format_args!("{given}"));
            assert_eq!(text.as_str(), kept);
            let mut words = [0; 7];
            text.encode(&mut words);
            assert_eq!(ProgramLineText::decode(&words), Some(text));
        }
    }

    #[test]
    fn invalid_text_is_refused() {
        for bytes in [*b"a\0b\0\0\0\0\0", *b"a\n\0\0\0\0\0\0", *b"\xff\0\0\0\0\0\0\0"] {
            assert_eq!(Text::<8>::decode(&[u64::from_le_bytes(bytes)]), None);
        }
    }
}
