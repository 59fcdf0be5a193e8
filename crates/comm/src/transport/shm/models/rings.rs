//! Rings, and the bells that wake the ranks that sleep at them.

use super::place::Place;
use super::ring::{RingReceiver, RingSender};
use crate::models::explore;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// The socket of a ring's link: it stays readable until somebody reads it.
#[derive(Default)]
struct Bell {
    is_rung: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.is_rung.lock().unwrap() = true;
        self.rung.notify_one();
    }

    fn poll(&self) {
        let mut is_rung = self.is_rung.lock().unwrap();
        while !*is_rung {
            is_rung = self.rung.wait(is_rung).unwrap();
        }
    }

    fn hear(&self) {
        *self.is_rung.lock().unwrap() = false;
    }
}

/// Sends pieces of at most `piece_len` bytes, in the steps of a `RingLink` and of a thread that waits at it.
fn send(sender: &mut RingSender, bytes: &[u8], piece_len: usize, own: &Bell, peer: &Bell) {
    let mut num_sent = 0;
    while num_sent < bytes.len() {
        let piece = &bytes[num_sent..bytes.len().min(num_sent + piece_len)];
        let num_written = sender.write(piece).expect("a sound ring");
        num_sent += num_written;
        if num_written > 0 {
            if sender.takes_waking() {
                peer.ring();
            }
            continue;
        }
        if !sender.prepare_sleep().expect("a sound ring") {
            own.poll();
        }
        sender.end_sleep();
        own.hear();
    }
}

fn receive(receiver: &mut RingReceiver, bytes: &mut [u8], own: &Bell, peer: &Bell) {
    let mut num_received = 0;
    while num_received < bytes.len() {
        let num_read = receiver.read(&mut bytes[num_received..]).expect("a sound ring");
        num_received += num_read;
        if num_read > 0 {
            if receiver.takes_waking() {
                peer.ring();
            }
            continue;
        }
        if !receiver.prepare_sleep().expect("a sound ring") {
            own.poll();
        }
        receiver.end_sleep();
        own.hear();
    }
}

/// Sends `message` from one thread to another.
fn carry(message: &'static [u8], piece_len: usize) {
    let place = Place::default();
    let bells: Arc<[Bell; 2]> = Arc::default();
    let (mut sender, mut receiver) = (RingSender::new(place.clone()), RingReceiver::new(place));
    let sending = thread::spawn({
        let bells = Arc::clone(&bells);
        move || send(&mut sender, message, piece_len, &bells[0], &bells[1])
    });
    let mut received = vec![0; message.len()];
    receive(&mut receiver, &mut received, &bells[1], &bells[0]);
    assert_eq!(received, message);
    sending.join().unwrap();
}

/// Pieces wrap around the end of the ring, and the message does not fit into it.
#[test]
fn loom_bytes_come_around_the_end_and_nobody_sleeps_on() {
    explore(3, || carry(&[1, 2, 3, 4, 5], 2));
}

#[test]
fn loom_a_ring_is_filled_and_emptied_at_once() {
    explore(3, || carry(&[1, 2, 3, 4], 4));
}
