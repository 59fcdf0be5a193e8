//! Reads event files back with a decoder that shares no code with the writer.

use super::*;
use crate::metrics::MemoryPeakBytes;
use trireme_base::CategoryBytes;

/// Returns the payloads of a file of TFRecords, and verifies their checksums.
fn payloads(mut file: &[u8]) -> Vec<&[u8]> {
    let mut payloads = Vec::new();
    let unmask =
        |crc: &[u8]| u32::from_le_bytes(crc.try_into().unwrap()).wrapping_sub(0xa282_ead8).rotate_left(15);
    while !file.is_empty() {
        let (length, rest) = file.split_at(8);
        assert_eq!(unmask(&rest[..4]), crc32c::crc32c(length));
        let (payload, rest) = rest[4..].split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        assert_eq!(unmask(&rest[..4]), crc32c::crc32c(payload));
        payloads.push(payload);
        file = &rest[4..];
    }
    payloads
}

/// A field of a message: its field number, and its bytes or the bits of its value.
#[derive(Debug, PartialEq)]
enum Field<'a> {
    Bytes(u64, &'a [u8]),
    Number(u64, u64),
}

fn varint(message: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = message[0];
        *message = &message[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

fn fields(mut message: &[u8]) -> Vec<Field<'_>> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let fixed = |message: &mut &[u8], length: usize| {
            let (bytes, rest) = message.split_at(length);
            *message = rest;
            bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        fields.push(match key & 7 {
            0 => Field::Number(key >> 3, varint(&mut message)),
            1 => Field::Number(key >> 3, fixed(&mut message, 8)),
            5 => Field::Number(key >> 3, fixed(&mut message, 4)),
            2 => {
                let length = varint(&mut message) as usize;
                let (bytes, rest) = message.split_at(length);
                message = rest;
                Field::Bytes(key >> 3, bytes)
            }
            wire_type => panic!("wire type {wire_type}"),
        });
    }
    fields
}

/// Returns the tags and values of a summary.
fn scalars(summary: &[u8]) -> Vec<(String, f32)> {
    let value = |field| match field {
        Field::Bytes(1, value) => match fields(value)[..] {
            [Field::Bytes(1, tag), Field::Number(2, bits)] => {
                (String::from_utf8(tag.to_vec()).unwrap(), f32::from_bits(bits as u32))
            }
            ref other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    fields(summary).into_iter().map(value).collect()
}

fn written(resumed_step: u64, records: &[StepRecord]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let mut events =
        EventFile::create(folder.path(), Duration::from_secs(1_700_000_000), resumed_step).unwrap();
    for record in records {
        events.write(record, Duration::from_millis(1_700_000_000_500)).unwrap();
    }
    let name = events.file.path.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("events.out.tfevents.1700000000."), "{name}");
    assert!(name.ends_with(&format!(".{}.0", std::process::id())), "{name}");
    std::fs::read(&events.file.path).unwrap()
}

#[test]
fn checksums_are_the_published_ones() {
    // RFC 3720, B.4: 32 bytes of zeros, of ones, and rising.
    assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c::crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c::crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    assert_eq!(masked_crc(&[0; 32]), 0x8a91_36aa_u32.rotate_right(15).wrapping_add(0xa282_ead8));
}

#[test]
fn a_file_begins_with_its_version() {
    let file = written(0, &[]);
    let events = payloads(&file);
    assert_eq!(events.len(), 1);
    assert_eq!(
        fields(events[0]),
        [
            Field::Number(1, 1_700_000_000_f64.to_bits()),
            Field::Number(2, 0),
            Field::Bytes(3, b"brain.Event:2"),
        ]
    );
}

#[test]
fn a_step_is_one_event_with_all_its_scalars() {
    let mut record = StepRecord {
        step: 300,
        loss: 2.5,
        grad_norm: f64::NAN,
        memory_peak_bytes: MemoryPeakBytes { categories: CategoryBytes([0, 0, 0, 1 << 33, 0]), total: 0 },
        ..StepRecord::default()
    };
    let without = written(0, std::slice::from_ref(&record));
    record.validation_loss = Some(3.25);
    (record.loss_scale, record.skipped_steps) = (Some(1 << 16), Some(3));
    (record.compression_bytes_saved, record.compression_error_norm) = (Some(1 << 20), Some(0.5));
    let file = written(0, &[record]);
    let events = payloads(&file);
    let [Field::Number(1, wall_time), Field::Number(2, 300), Field::Bytes(5, summary)] =
        fields(events[1])[..]
    else {
        panic!("{:?}", fields(events[1]))
    };
    assert_eq!(f64::from_bits(wall_time), 1_700_000_000.5);
    let scalars = scalars(summary);
    let scalar = |tag: &str| scalars.iter().find(|(name, _)| name == tag).unwrap().1;
    assert_eq!(scalar("train/loss"), 2.5);
    assert!(scalar("train/grad_norm").is_nan());
    assert_eq!(scalar("memory_peak_bytes/activations"), 8_589_934_592.0);
    assert_eq!(scalar("validation/loss"), 3.25);
    assert_eq!((scalar("train/loss_scale"), scalar("train/skipped_steps")), (65_536.0, 3.0));
    assert_eq!(scalar("performance/compression_bytes_saved"), 1_048_576.0);
    assert_eq!(scalar("train/compression_error_norm"), 0.5);
    let without = String::from_utf8_lossy(&without);
    for name in ["validation/loss", "loss_scale", "compression"] {
        assert!(!without.contains(name), "{name}");
    }
}

#[test]
fn a_resumed_run_tells_readers_which_steps_to_discard() {
    let file = written(299, &[]);
    let events = payloads(&file);
    let start: &[u8] = &[1 << 3, 1];
    assert_eq!(fields(events[1])[1..], [Field::Number(2, 300), Field::Bytes(7, start)]);
}

#[test]
fn varints_have_the_length_that_is_announced() {
    for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
        let mut message = Vec::new();
        put_varint(&mut message, value);
        assert_eq!(message.len(), varint_length(value), "{value}");
        assert_eq!(varint(&mut &message[..]), value);
    }
}
