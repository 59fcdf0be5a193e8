//! The filter `tojson` as transformers defines it: the output of Python's `json.dumps` without HTML escapes.

use super::marks::MARKS;
use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::Formatter;
use std::io::{self, Write};

/// Converts a value to JSON. Takes the keyword arguments of transformers' `tojson`: `ensure_ascii`, `indent`,
/// `separators` and `sort_keys`.
pub(super) fn to_json(value: Value, indent: Option<u8>, arguments: Kwargs) -> Result<String, Error> {
    let indent = indent.map_or_else(|| arguments.get::<Option<u8>>("indent"), |indent| Ok(Some(indent)))?;
    let (comma, colon) = match arguments.get::<Option<Vec<String>>>("separators")?.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "`separators` of tojson has two texts"));
        }
    };
    let ensure_ascii = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    arguments.assert_all_used()?;
    let failed = |error: serde_json::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    let mut json = Vec::new();
    let formatter =
        PythonFormatter { comma, colon, ensure_ascii, indent, depth: 0, is_container_empty: false };
    let mut serializer = serde_json::Serializer::with_formatter(&mut json, formatter);
    if sort_keys {
        let mut sorted = serde_json::to_value(&value).map_err(failed)?;
        sorted.sort_all_objects();
        sorted.serialize(&mut serializer).map_err(failed)?;
    } else {
        value.serialize(&mut serializer).map_err(failed)?;
    }
    Ok(String::from_utf8_lossy(&json).into_owned())
}

struct PythonFormatter {
    comma: String,
    colon: String,
    ensure_ascii: bool,
    /// Number of spaces per level; `None` writes everything on one line.
    indent: Option<u8>,
    depth: usize,
    is_container_empty: bool,
}

impl PythonFormatter {
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_container_empty = true;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_container_empty {
            self.new_line(writer)?;
        }
        self.is_container_empty = false;
        writer.write_all(bracket)
    }

    fn begin_element<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        self.is_container_empty = false;
        if !is_first {
            writer.write_all(self.comma.as_bytes())?;
        }
        self.new_line(writer)
    }

    /// Starts an indented line if indentation is on.
    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        write!(writer, "\n{:1$}", "", self.depth * usize::from(indent))
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.begin_element(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.begin_element(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.colon.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(text.as_bytes());
        }
        for c in text.chars() {
            match c {
                c if c.is_ascii() => writer.write_all(&[c as u8])?,
                // A mark is not part of the text, so it is not escaped.
                mark if MARKS.contains(&mark) => write!(writer, "{mark}")?,
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }
}
