//! Dry groups: simulated worlds without other ranks.

use trireme_base::{AsyncOperation, Journal, JournalEntry, Rank, ReduceOp};
use trireme_comm::{Group, GroupOptions, PageSize, TransportKind, inproc_world_on};
use trireme_schedule::collective::Hosts;

/// More elements than any machine has memory for.
const LEN: usize = 1 << 37;

fn shape(group: &Group) -> (Rank, usize, usize) {
    (group.rank(), group.world_size(), group.hosts().num_hosts())
}

#[test]
fn splits_of_a_dry_world_equal_those_of_a_real_one() {
    let hosts = [0, 1, 0, 1, 1, 0];
    let colors: [fn(Rank) -> u64; 3] = [|_| 7, |rank| rank.0 as u64 % 2, |rank| rank.0 as u64 / 2];
    let world = inproc_world_on(&hosts, &GroupOptions::default());
    std::thread::scope(|scope| {
        for real in world {
            scope.spawn(move || {
                let dry = Group::dry(
                    real.rank(),
                    Hosts::new(&hosts),
                    TransportKind::Inproc,
                    &GroupOptions::default(),
                )
                .unwrap();
                assert_eq!(shape(&dry), shape(&real));
                for color in colors {
                    let (real, dry) =
                        (real.split_by("part", color).unwrap(), dry.split_by("part", color).unwrap());
                    assert_eq!((shape(&dry), dry.transport()), (shape(&real), real.transport()));
                    assert_eq!(dry.hosts(), real.hosts());
                }
            });
        }
    });
}

#[test]
fn the_transport_of_a_part_follows_from_its_hosts() {
    let dry =
        Group::dry(Rank(1), Hosts::new(&[0, 0, 1, 1]), TransportKind::ShmAndTcp, &GroupOptions::default())
            .unwrap();
    let kind = |color: fn(Rank) -> u64| dry.split_by("part", color).unwrap().transport();
    assert_eq!(kind(|rank| rank.0 as u64 / 2), TransportKind::Shm);
    assert_eq!(kind(|rank| rank.0 as u64 % 2), TransportKind::ShmAndTcp);
    assert_eq!(kind(|rank| rank.0 as u64), TransportKind::Single);
    let part = dry.split_by("part", |rank| rank.0 as u64 / 2).unwrap();
    assert_eq!((dry.fixed_bytes(), dry.singleton().fixed_bytes()), (part.fixed_bytes(), 0));
    assert!(dry.fixed_bytes() > 0);
}

#[test]
fn operations_end_at_once_and_touch_no_memory() {
    let dry = Group::dry(Rank(0), Hosts::single(4), TransportKind::Tcp, &GroupOptions::default()).unwrap();
    let buffer = || dry.buffer::<f32>(LEN).unwrap();
    let buffer_of_all = dry.all_reduce(buffer(), ReduceOp::Sum).wait().unwrap();
    assert_eq!(buffer_of_all.len(), LEN);
    dry.all_gather(buffer_of_all).wait().unwrap();
    dry.all_to_all(buffer()).wait().unwrap();
    let (input, output) = (dry.buffer::<f32>(LEN / 4).unwrap(), buffer());
    dry.all_gather_into(input, output).wait().unwrap();
    dry.send(buffer(), Rank(3)).wait().unwrap();
    dry.receive(buffer(), Rank(2)).wait().unwrap();
    dry.barrier().wait().unwrap();
    assert!(dry.send(dry.buffer::<f32>(1).unwrap(), Rank(4)).wait().is_err(), "there is no such rank");
    assert_eq!(dry.all_gather_bytes(b"own").wait().unwrap(), vec![b"own"; 4]);
    assert_eq!(dry.statistics().payload_bytes, 0);
}

/// A journal entry has the number of elements that the rank sends or receives, whichever is larger.
#[test]
fn journal_entries_have_the_number_of_exchanged_elements() {
    let dry =
        Group::dry(Rank(1), Hosts::new(&[0, 0, 1, 1]), TransportKind::Tcp, &GroupOptions::default()).unwrap();
    let journal = Journal::default();
    dry.keep_journal(&journal);
    let buffer = |len| dry.buffer::<f32>(len).unwrap();
    let column: Vec<usize> = (0..16).map(|index| if index % 4 == 1 { 7 } else { 2 }).collect();
    let transposed: Vec<usize> = (0..16).map(|index| column[index % 4 * 4 + index / 4]).collect();
    for lens in [column, transposed] {
        dry.all_to_all_variable_by_hosts(buffer(40), buffer(40), lens.into()).wait().unwrap();
    }
    dry.all_to_all_variable(buffer(6), &[1, 2, 3, 0], buffer(4), &[1, 2, 1, 0]).wait().unwrap();
    let issued = journal.take().into_iter().filter_map(|(entry, _)| match entry {
        JournalEntry::Issue(_, AsyncOperation::Collective { operation, len, element_bytes: 4, members }) => {
            Some((operation, len, members.len()))
        }
        _ => None,
    });
    let by_hosts = ("all_to_all_variable_by_hosts", 28, 4);
    assert_eq!(issued.collect::<Vec<_>>(), [by_hosts, by_hosts, ("all_to_all_variable", 6, 4)]);
}

#[test]
fn a_rank_maps_its_part_of_peers_buffers() {
    let dry = Group::dry(Rank(0), Hosts::single(4), TransportKind::Shm, &GroupOptions::default()).unwrap();
    assert_eq!(dry.peer_bytes_mapped(4001), 3 * 1001);
    // A short buffer is mapped completely, a long one only in two blocks and the huge pages in which they begin and end.
    assert_eq!(dry.peer_bytes_mapped_in(4001, PageSize::Huge), 3 * 4001);
    let part = 100 * PageSize::HUGE_BYTES;
    assert_eq!(dry.peer_bytes_mapped_in(4 * part, PageSize::Huge), 3 * (2 * part + 4 * PageSize::HUGE_BYTES));
    let tcp = Group::dry(Rank(0), Hosts::single(4), TransportKind::Tcp, &GroupOptions::default()).unwrap();
    assert_eq!(tcp.peer_bytes_mapped_in(4 * part, PageSize::Huge), 0);
}
