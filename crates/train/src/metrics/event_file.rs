//! Writes TensorBoard's event files: protocol buffers of three message types, framed as TFRecords.
//!
//! A record is the payload's length (u64), a checksum of those eight bytes, the payload, and a checksum of the
//! payload, all little-endian (`tensorflow/core/lib/io/record_writer.h`). The messages are defined in
//! `event.proto` and `summary.proto`; only the fields below are used.

use super::record_file::RECORD_BYTES;
use super::record_file::{RecordFile, Unwritten};
use super::{MetricsError, StepRecord};
use std::fs::OpenOptions;
use std::path::Path;
use std::time::Duration;
use trireme_comm::host_name;

// The key of a field is its number in the message, then its wire type in the lowest three bits.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;
const EVENT_WALL_TIME: u8 = 1 << 3 | FIXED64;
const EVENT_STEP: u8 = 2 << 3 | VARINT;
const EVENT_FILE_VERSION: u8 = 3 << 3 | BYTES;
const EVENT_SUMMARY: u8 = 5 << 3 | BYTES;
const EVENT_SESSION_LOG: u8 = 7 << 3 | BYTES;
const SESSION_LOG_STATUS: u8 = 1 << 3 | VARINT;
const SUMMARY_VALUE: u8 = 1 << 3 | BYTES;
const VALUE_TAG: u8 = 1 << 3 | BYTES;
const VALUE_SIMPLE_VALUE: u8 = 2 << 3 | FIXED32;

/// `SessionLog.SessionStatus.START`.
const STATUS_START: u64 = 1;

/// One event file. The buffers are reused for every step, so writing does not allocate.
#[derive(Debug)]
pub(super) struct EventFile {
    pub(super) file: RecordFile,
    nested_message: Vec<u8>,
    event: Vec<u8>,
    record: Vec<u8>,
}

impl EventFile {
    /// Creates `events.out.tfevents.<seconds since 1970>.<host>.<process id>.<number>` in `folder`. The number distinguishes files that a
    /// process creates within one second.
    ///
    /// The file begins with the format's version. After a resume, an event follows that tells readers to discard the events of earlier
    /// files in the folder for steps after `resumed_step`.
    pub(super) fn create(
        folder: &Path,
        wall_time: Duration,
        resumed_step: u64,
    ) -> Result<Self, MetricsError> {
        let host = host_name().replace('/', "-");
        let name = format!("events.out.tfevents.{}.{host}.{}", wall_time.as_secs(), std::process::id());
        let mut number = 0;
        let (path, file) = loop {
            let path = folder.join(format!("{name}.{number}"));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => break (path, file),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(source) => return Err(MetricsError::Open { path, source }),
            }
        };
        let buffer = || Vec::with_capacity(RECORD_BYTES);
        let file = RecordFile::new(path, file, 0, RECORD_BYTES);
        let mut events = EventFile { file, nested_message: buffer(), event: buffer(), record: buffer() };
        events
            .write_event(wall_time, 0, |event, _| put_bytes(event, EVENT_FILE_VERSION, b"brain.Event:2"))
            .map_err(Unwritten::into_error)?;
        if resumed_step > 0 {
            events
                .write_event(wall_time, resumed_step + 1, |event, session_log| {
                    session_log.push(SESSION_LOG_STATUS);
                    put_varint(session_log, STATUS_START);
                    put_bytes(event, EVENT_SESSION_LOG, session_log);
                })
                .map_err(Unwritten::into_error)?;
        }
        Ok(events)
    }

    pub(super) fn write(&mut self, record: &StepRecord, wall_time: Duration) -> Result<(), Unwritten> {
        self.write_event(wall_time, record.step, |event, summary| {
            record.scalars(|group, name, value| put_scalar(summary, group, name, value as f32));
            put_bytes(event, EVENT_SUMMARY, summary);
        })
    }

    /// Writes one event. `fill` appends the event's fields, and receives an empty buffer for a nested message.
    fn write_event(
        &mut self,
        wall_time: Duration,
        step: u64,
        fill: impl FnOnce(&mut Vec<u8>, &mut Vec<u8>),
    ) -> Result<(), Unwritten> {
        self.event.clear();
        self.nested_message.clear();
        self.event.push(EVENT_WALL_TIME);
        self.event.extend_from_slice(&wall_time.as_secs_f64().to_le_bytes());
        self.event.push(EVENT_STEP);
        put_varint(&mut self.event, step);
        fill(&mut self.event, &mut self.nested_message);
        self.record.clear();
        put_record(&mut self.record, &self.event);
        self.file.append(&self.record)
    }
}

/// Adds a `Summary.Value` with the tag `group/name`.
fn put_scalar(summary: &mut Vec<u8>, group: &str, name: &str, value: f32) {
    let tag_length = group.len() + 1 + name.len();
    let value_length = 1 + varint_length(tag_length as u64) + tag_length + 1 + size_of::<f32>();
    summary.push(SUMMARY_VALUE);
    put_varint(summary, value_length as u64);
    summary.push(VALUE_TAG);
    put_varint(summary, tag_length as u64);
    summary.extend_from_slice(group.as_bytes());
    summary.push(b'/');
    summary.extend_from_slice(name.as_bytes());
    summary.push(VALUE_SIMPLE_VALUE);
    summary.extend_from_slice(&value.to_le_bytes());
}

fn put_bytes(message: &mut Vec<u8>, key: u8, bytes: &[u8]) {
    message.push(key);
    put_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

/// Appends a number in base 128, seven bits per byte, the lowest first. The highest bit of a byte says that more bytes follow.
fn put_varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

fn varint_length(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

fn put_record(record: &mut Vec<u8>, payload: &[u8]) {
    let length = (payload.len() as u64).to_le_bytes();
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(payload);
    record.extend_from_slice(&masked_crc(payload).to_le_bytes());
}

/// Returns the masked CRC-32C of TFRecords. The mask keeps a checksum strong if the data contains checksums.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
#[path = "event_file_tests.rs"]
mod tests;
