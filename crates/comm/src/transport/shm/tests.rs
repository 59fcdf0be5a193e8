//! Tests of rings in an arena.

use super::arena::Arena;
use super::ring::{Corrupt, RingReceiver, RingSender};
use super::ring_memory::{RING_BYTES, RingMemory};
use std::sync::Arc;

const CAPACITY: usize = RingMemory::CAPACITY;

/// Creates an empty ring. Returns its arena and offset.
fn ring() -> (Arc<Arena>, usize) {
    let arena = Arena::new(2).expect("an arena");
    let region = arena.allocate_permanent(RING_BYTES).expect("memory");
    let offset = region.offset();
    (arena, offset)
}

fn sender((arena, offset): &(Arc<Arena>, usize)) -> RingSender {
    RingSender::new(RingMemory::new(Arc::clone(arena.mapping()), *offset))
}

fn receiver((arena, offset): &(Arc<Arena>, usize)) -> RingReceiver {
    RingReceiver::new(RingMemory::new(Arc::clone(arena.mapping()), *offset))
}

fn ends() -> (RingSender, RingReceiver) {
    let ring = ring();
    (sender(&ring), receiver(&ring))
}

#[test]
fn bytes_come_out_as_they_went_in_around_the_end() {
    let (mut sender, mut receiver) = ends();
    let message: Vec<u8> = (0..CAPACITY + 999).map(|index| (index % 251) as u8).collect();
    let (mut num_sent, mut received) = (0, Vec::new());
    let mut piece = vec![0; 7001];
    for round in 0.. {
        num_sent += sender.write(&message[num_sent..]).expect("a sound ring");
        let num_read = receiver.read(&mut piece).expect("a sound ring");
        received.extend_from_slice(&piece[..num_read]);
        if num_read == 0 && num_sent == message.len() {
            assert!(round > 10);
            break;
        }
    }
    assert!(received == message);
}

#[test]
fn a_full_ring_takes_no_more_and_an_empty_one_gives_nothing() {
    let (mut sender, mut receiver) = ends();
    assert_eq!(receiver.read(&mut [0; 8]), Ok(0));
    assert_eq!(sender.write(&vec![1; CAPACITY + 1]), Ok(CAPACITY));
    assert_eq!(sender.write(&[1]), Ok(0));
    assert_eq!(receiver.read(&mut [0; 8]), Ok(8));
    assert_eq!(sender.write(&[1; 9]), Ok(8));
}

#[test]
fn a_sleeper_is_woken_once() {
    let (mut sender, mut receiver) = ends();
    assert!(!sender.take_sleep_flag());
    assert_eq!(receiver.prepare_sleep(), Ok(false));
    assert_eq!(sender.write(&[1]), Ok(1));
    assert!(sender.take_sleep_flag());
    assert!(!sender.take_sleep_flag());
    assert_eq!(receiver.prepare_sleep(), Ok(true));
    receiver.end_sleep();
    assert!(!sender.take_sleep_flag());
    assert_eq!(receiver.read(&mut [0; 2]), Ok(1));
}

#[test]
fn impossible_counters_are_refused() {
    let ring = ring();
    let (mut early_sender, mut early_receiver) = (sender(&ring), receiver(&ring));
    assert_eq!(early_sender.write(&vec![1; CAPACITY]), Ok(CAPACITY));
    assert_eq!(early_receiver.read(&mut [0; 1]), Ok(1));
    assert_eq!(early_sender.write(&[1]), Ok(1));
    // To a new sender, the receiver has read bytes that were never written. To a new receiver, more bytes are unread than fit.
    assert_eq!(sender(&ring).write(&[1]), Err(Corrupt));
    assert_eq!(receiver(&ring).read(&mut [0; 1]), Err(Corrupt));
    assert_eq!(receiver(&ring).prepare_sleep(), Err(Corrupt));
}
