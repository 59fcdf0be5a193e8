//! Models of rings, and of the sockets that wake the ranks that sleep on them.

use super::ring::{RingReceiver, RingSender};
use super::ring_memory::RingMemory;
use crate::models::explore;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// A model of the socket of a ring's link: it stays readable until it is read.
#[derive(Default)]
struct Wakeup {
    is_readable: Mutex<bool>,
    became_readable: Condvar,
}

impl Wakeup {
    fn wake(&self) {
        *self.is_readable.lock().unwrap() = true;
        self.became_readable.notify_one();
    }

    fn poll(&self) {
        let mut is_readable = self.is_readable.lock().unwrap();
        while !*is_readable {
            is_readable = self.became_readable.wait(is_readable).unwrap();
        }
    }

    fn reset(&self) {
        *self.is_readable.lock().unwrap() = false;
    }
}

/// One rank's end of two rings, with the wakeups of both ranks.
struct Link {
    sender: RingSender,
    receiver: RingReceiver,
    wakeups: Arc<[Wakeup; 2]>,
    own: usize,
}

impl Link {
    /// Sends in pieces of at most `piece_len` bytes and receives at the same time, by the same steps as a `RingLink` and a thread that
    /// waits on it.
    fn exchange(&mut self, outgoing: &[u8], piece_len: usize, incoming: &mut [u8]) {
        let (own_wakeup, peer_wakeup) = (&self.wakeups[self.own], &self.wakeups[1 - self.own]);
        let (mut num_sent, mut num_received) = (0, 0);
        loop {
            let mut has_moved = false;
            if num_sent < outgoing.len() {
                let piece = &outgoing[num_sent..outgoing.len().min(num_sent + piece_len)];
                let num_written = self.sender.write(piece).expect("a sound ring");
                if num_written > 0 && self.sender.take_sleep_flag() {
                    peer_wakeup.wake();
                }
                num_sent += num_written;
                has_moved |= num_written > 0;
            }
            if num_received < incoming.len() {
                let num_read = self.receiver.read(&mut incoming[num_received..]).expect("a sound ring");
                if num_read > 0 && self.receiver.take_sleep_flag() {
                    peer_wakeup.wake();
                }
                num_received += num_read;
                has_moved |= num_read > 0;
            }
            let (sends, receives) = (num_sent < outgoing.len(), num_received < incoming.len());
            if !sends && !receives {
                return;
            }
            if has_moved {
                continue;
            }
            let mut is_ready = sends && self.sender.prepare_sleep().expect("a sound ring");
            is_ready |= receives && self.receiver.prepare_sleep().expect("a sound ring");
            if !is_ready {
                own_wakeup.poll();
            }
            if sends {
                self.sender.end_sleep();
                own_wakeup.reset();
            }
            if receives {
                self.receiver.end_sleep();
                own_wakeup.reset();
            }
        }
    }
}

/// Sends one message in each direction between two ranks.
fn exchange(messages: [&'static [u8]; 2], piece_len: usize) {
    let rings = [RingMemory::default(), RingMemory::default()];
    let wakeups: Arc<[Wakeup; 2]> = Arc::default();
    let exchange = move |own: usize| {
        let mut link = Link {
            sender: RingSender::new(rings[own].clone()),
            receiver: RingReceiver::new(rings[1 - own].clone()),
            wakeups: Arc::clone(&wakeups),
            own,
        };
        move || {
            let mut received = vec![0; messages[1 - own].len()];
            link.exchange(messages[own], piece_len, &mut received);
            assert_eq!(received, messages[1 - own]);
        }
    };
    let (mut here, there) = (exchange(0), exchange(1));
    let peer = thread::spawn(there);
    here();
    peer.join().unwrap();
}

/// Pieces wrap around the end of the ring, and the message is longer than the ring.
#[test]
fn loom_bytes_wrap_around_the_end_and_no_wakeup_is_lost() {
    explore(3, || exchange([&[1, 2, 3, 4, 5], &[]], 2));
}

#[test]
fn loom_a_ring_is_filled_and_emptied_at_once() {
    explore(3, || exchange([&[], &[1, 2, 3, 4]], 4));
}

/// Both ranks wait for room and for bytes, with one wake-up for both.
#[test]
fn loom_full_rings_in_both_directions_make_progress() {
    explore(2, || exchange([&[1, 2, 3, 4], &[5, 6, 7, 8]], 4));
}
