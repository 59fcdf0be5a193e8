//! Incremental reading of files that are one JSON array.

use std::io::{self, BufRead};

/// Splits a JSON array into its elements, holding one element in memory at a time. The contents of elements are not
/// checked.
#[derive(Debug, Default)]
pub(super) struct JsonArray {
    /// Whether the opening bracket of the array was read.
    is_open: bool,
    /// Whether the closing bracket of the array was read.
    is_closed: bool,
    /// Whether an element was read without the comma after it.
    has_element: bool,
}

/// A reason why an array cannot be split into elements.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ArrayError {
    /// The array is not well formed. The text describes the fault.
    Malformed(&'static str),
    TooLong,
}

impl JsonArray {
    /// Appends bytes of `input` to `raw` up to the end of the next element, and returns the element's start in `raw`,
    /// or `None` at the end of the file. The bytes before the element are separators.
    pub(super) fn read_element(
        &mut self,
        input: &mut impl BufRead,
        raw: &mut Vec<u8>,
        bytes_max: usize,
    ) -> io::Result<Result<Option<usize>, ArrayError>> {
        let mut element = None;
        loop {
            let bytes = input.fill_buf()?;
            if bytes.is_empty() {
                return Ok(if self.is_closed {
                    Ok(None)
                } else {
                    Err(ArrayError::Malformed("the array is not closed by `]`"))
                });
            }
            let mut num_taken = bytes.len();
            for (index, &byte) in bytes.iter().enumerate() {
                let Some((_, scan)) = &mut element else {
                    match self.consume_separator(byte) {
                        Err(reason) => return Ok(Err(ArrayError::Malformed(reason))),
                        Ok(true) => {}
                        Ok(false) => element = Some((raw.len() + index, ElementScan::of(byte))),
                    }
                    continue;
                };
                if scan.ends_before(byte) {
                    num_taken = index;
                    break;
                }
            }
            let is_end = num_taken < bytes.len();
            if raw.len() + num_taken > bytes_max {
                return Ok(Err(ArrayError::TooLong));
            }
            raw.extend_from_slice(&bytes[..num_taken]);
            input.consume(num_taken);
            if let Some((start, _)) = element.filter(|_| is_end) {
                self.has_element = true;
                return Ok(Ok(Some(start)));
            }
        }
    }

    /// Returns whether a byte between elements belongs to the separators. If it does not, it begins an element.
    fn consume_separator(&mut self, byte: u8) -> Result<bool, &'static str> {
        match byte {
            byte if byte.is_ascii_whitespace() => {}
            _ if self.is_closed => return Err("there is text after the end of the array"),
            b'[' if !self.is_open => self.is_open = true,
            b',' if self.has_element => self.has_element = false,
            b']' => self.is_closed = true,
            b',' => return Err("a value is missing before `,`"),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The state of scanning an element for its end.
#[derive(Debug, Clone, Copy)]
struct ElementScan {
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl ElementScan {
    /// Returns the state after the first byte of an element.
    fn of(byte: u8) -> Self {
        let mut scan = ElementScan { depth: 0, is_in_string: false, is_escaped: false };
        scan.ends_before(byte);
        scan
    }

    /// Returns whether the element ends before `byte`. If it does not, the byte is part of the element.
    fn ends_before(&mut self, byte: u8) -> bool {
        if self.is_in_string {
            self.is_in_string = self.is_escaped || byte != b'"';
            self.is_escaped = !self.is_escaped && byte == b'\\';
            return false;
        }
        match byte {
            b'"' => self.is_in_string = true,
            b'{' | b'[' => self.depth += 1,
            b',' | b']' if self.depth == 0 => return true,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    /// Reads all elements of a text through a buffer of `piece` bytes.
    fn elements(text: &str, piece: usize) -> Result<Vec<String>, ArrayError> {
        let mut input = BufReader::with_capacity(piece, text.as_bytes());
        let (mut array, mut found) = (JsonArray::default(), Vec::new());
        loop {
            let mut raw = Vec::new();
            let Some(start) = array.read_element(&mut input, &mut raw, 40).unwrap()? else {
                return Ok(found);
            };
            found.push(String::from_utf8(raw.split_off(start)).unwrap());
        }
    }

    #[test]
    fn elements_end_where_their_brackets_and_strings_do() {
        let text = r#" [{"a": "],[\"}"}, [1, [2]] ,"\\", 3
            ] "#;
        for piece in [1, 2, 7, 100] {
            assert_eq!(
                elements(text, piece).unwrap(),
                [r#"{"a": "],[\"}"}"#, "[1, [2]] ", r#""\\""#, "3\n            "]
            );
            assert_eq!(elements("[]", piece), Ok(Vec::new()));
        }
    }

    #[test]
    fn malformed_arrays_are_refused() {
        for (text, reason) in [
            ("[1, 2", "the array is not closed by `]`"),
            ("[", "the array is not closed by `]`"),
            ("[1,, 2]", "a value is missing before `,`"),
            ("[1] [2]", "there is text after the end of the array"),
        ] {
            assert_eq!(elements(text, 3), Err(ArrayError::Malformed(reason)), "{text}");
        }
        assert_eq!(elements(&format!("[{}]", "1".repeat(50)), 8), Err(ArrayError::TooLong));
    }
}
