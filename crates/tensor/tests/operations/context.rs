//! Operations on ranks of the context axis, compared with one rank.

use crate::no_parameters;
use crate::threads::ThreadRank;
use std::sync::Arc;
use trireme_base::{AxisRank, ContextRank, DType, Positions, RandomKey, UnitAxis};
use trireme_tensor::tape::{
    Attention, AxisOps, ContextAxis, Dropout, DryRunAxis, ExchangeLog, Mean, PassAxes, Randomness, Recording,
    RotaryTable, Softmax,
};
use trireme_tensor::{
    AttentionRule, BackendKind, Category, DetachedOptions, Device, DeviceOptions, Parameters, PassState,
    Precision, Shape, Tape, Tensor,
};
use trireme_testkit::{TracedDevice, on_threads, test_gpu};

const BATCH: usize = 2;
const LEN: usize = 24;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 6;
const COLS: usize = (HEADS + 2 * KV_HEADS) * DIM;
const OUT: usize = HEADS * DIM;

/// Settings of an attention operation.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    rule: AttentionRule,
    /// Number of keys of the first sequence.
    num_keys: Option<u32>,
    has_documents: bool,
    is_rotary: bool,
    is_separate: bool,
}

fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(1, name).fill_normal(&mut values, 1.0);
    values
}

/// Returns the rows of the positions `at`.
fn rows<T: Copy>(all: &[T], cols: usize, at: Positions) -> Vec<T> {
    let of_sequence = |sequence| (0..at.len()).map(move |index| sequence * LEN + at.at(index));
    let all_rows = (0..BATCH).flat_map(of_sequence);
    all_rows.flat_map(|row| all[row * cols..(row + 1) * cols].iter().copied()).collect()
}

fn no_parameter_values(device: &Device) -> Parameters {
    Parameters::zeros(&Arc::new(no_parameters()), device, Category::Parameters).unwrap()
}

fn tensor(device: &Device, dims: &[usize], values: &[f32]) -> Tensor {
    let mut tensor = device.empty(Shape::new(dims), DType::F32, Category::Activations).unwrap();
    device.upload(values, tensor.view_mut());
    tensor
}

fn converted(device: &Device, tensor: Tensor, dtype: DType) -> Tensor {
    let mut converted = device.empty(tensor.shape(), dtype, Category::Activations).unwrap();
    device.convert(tensor.view(), converted.view_mut());
    converted
}

fn ids(device: &Device, dims: &[usize], values: &[u32]) -> Tensor {
    let mut tensor = device.empty(Shape::new(dims), DType::U32, Category::Activations).unwrap();
    device.upload(values, tensor.view_mut());
    tensor
}

fn pass_of(context: Option<ContextAxis>) -> PassState {
    PassState { axes: PassAxes { context, ..PassAxes::default() }, ..Precision::F32.into() }
}

/// Returns the outputs and gradients of a rank, in rows of its positions.
fn run(device: &Device, parameters: &Parameters, case: Case, axis: Option<ContextAxis>) -> [Vec<f32>; 3] {
    let place = axis.as_ref().map_or(ContextRank::ALONE, ContextAxis::context_rank);
    let (at, of_heads) = (place.positions(LEN), place.ring_positions(LEN));
    let rotary =
        case.is_rotary.then(|| Arc::new(RotaryTable::new(device, LEN, &[1.0, 0.4, 0.05], 1.0).unwrap()));
    let attention = Arc::new(Attention::new(HEADS, KV_HEADS, DIM, case.rule).with_rotary(rotary));
    let dropout = Arc::new(Dropout::new("dropout", 0.4));
    let randomness = Randomness { seed: 1, step: 2, first_sample: 3, num_samples: BATCH };
    let mut tape = Tape::new(device, Recording::On, PassState { randomness, ..pass_of(axis) });
    let qkv = random(BATCH * LEN * COLS, "qkv");
    let columns = |first: usize, last: usize| -> Vec<f32> {
        let own = rows(&qkv, COLS, at);
        own.chunks_exact(COLS).flat_map(|row| row[first..last].to_vec()).collect()
    };
    let len = at.len();
    let input = |first: usize, last: usize| {
        converted(device, tensor(device, &[BATCH, len, last - first], &columns(first, last)), case.dtype)
    };
    let mut values = if case.is_separate {
        vec![tape.input(input(0, OUT)), tape.input(input(OUT, COLS))]
    } else {
        vec![tape.input(input(0, COLS))]
    };
    let num_floats = values.len();
    let value_ids: Vec<_> = values.iter().map(|value| value.id()).collect();
    if let Some(num_keys) = case.num_keys {
        values.push(tape.constant(ids(device, &[BATCH], &[num_keys, LEN as u32])));
    }
    if case.has_documents {
        let start = |row: usize| [0, 5, 17][usize::from(row % LEN >= 5) + usize::from(row % LEN >= 17)];
        let starts: Vec<u32> = (0..BATCH * LEN).map(start).collect();
        values.push(tape.constant(ids(device, &[BATCH, of_heads.len()], &rows(&starts, 1, of_heads))));
    }
    let mut recorder = tape.recorder(parameters);
    let attended = recorder.apply(&attention, values).unwrap();
    let y = recorder.apply(&dropout, [attended]).unwrap();
    let y_id = y.id();
    let output = tape.take_output(&y).unwrap();
    let wide = |tensor: Tensor| device.read::<f32>(converted(device, tensor, DType::F32).view()).unwrap();
    let found = wide(output);
    let dy = rows(&random(BATCH * LEN * OUT, "dy"), OUT, at);
    let dy = converted(device, tensor(device, &[BATCH, len, OUT], &dy), case.dtype);
    tape.backward_input(parameters, [(y_id, dy)]).unwrap();
    let mut grads = value_ids.into_iter().map(|place| wide(tape.take_grad(place).unwrap()));
    let first = grads.next().unwrap();
    [found, first, if num_floats == 2 { grads.next().unwrap() } else { Vec::new() }]
}

/// Returns the joined results of all ranks.
fn run_ranks(backend: BackendKind, case: Case, degree: usize, heads: usize) -> [Vec<f32>; 3] {
    let options = DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() };
    let ring = degree / heads;
    let axes = |groups: usize, len: usize| (0..groups).map(|_| ThreadRank::all(len)).collect::<Vec<_>>();
    let (rings, all_heads) = (axes(heads, ring), axes(ring, heads));
    let devices: Vec<TracedDevice> = (0..degree).map(|_| TracedDevice::open(options).unwrap()).collect();
    let ranks: Vec<_> = AxisRank::all(degree).zip(&devices).collect();
    let found: Vec<[Vec<f32>; 3]> = on_threads(ranks, &|(place, device)| {
        let ContextRank { ring: on_ring, heads: of_heads } = ContextRank::new(place, heads);
        let ops = |axis: &Arc<ThreadRank>| Arc::clone(axis) as Arc<dyn AxisOps>;
        let axis = ContextAxis {
            ring: (ring > 1).then(|| ops(&rings[of_heads.rank][on_ring.rank])),
            heads: (heads > 1).then(|| ops(&all_heads[on_ring.rank][of_heads.rank])),
        };
        run(device, &no_parameter_values(device), case, (degree > 1).then_some(axis))
    });
    let widths = if case.is_separate { [OUT, OUT, COLS - OUT] } else { [OUT, COLS, 0] };
    [0, 1, 2].map(|index| {
        let cols = widths[index];
        let mut whole = vec![f32::NAN; BATCH * LEN * cols];
        for (place, found) in AxisRank::all(degree).zip(&found) {
            let at = ContextRank::new(place, heads).positions(LEN);
            let numbers: Vec<usize> = rows(&(0..BATCH * LEN).collect::<Vec<_>>(), 1, at);
            for (row, values) in numbers.into_iter().zip(found[index].chunks_exact(cols.max(1))) {
                whole[row * cols..][..cols].copy_from_slice(values);
            }
        }
        whole
    })
}

#[test]
fn context_parallel_attention_matches_one_rank() {
    let causal = AttentionRule::causal(DIM);
    let plain = Case {
        dtype: DType::F32,
        rule: causal,
        num_keys: None,
        has_documents: false,
        is_rotary: false,
        is_separate: false,
    };
    let cases = [
        Case { dtype: DType::Bf16, ..plain },
        Case { is_rotary: true, ..plain },
        Case { rule: AttentionRule { window: Some(7), ..causal }, ..plain },
        Case { has_documents: true, is_rotary: true, ..plain },
        Case {
            rule: AttentionRule { soft_cap: Some(2.0), ..AttentionRule::full(DIM) },
            num_keys: Some(9),
            ..plain
        },
        Case { is_separate: true, num_keys: Some(20), has_documents: true, ..plain },
    ];
    for backend in
        [BackendKind::Cpu, BackendKind::Detached(DetachedOptions::default())].into_iter().chain(test_gpu())
    {
        for case in cases {
            let expected = run_ranks(backend, case, 1, 1);
            for (degree, heads) in [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)] {
                let found = run_ranks(backend, case, degree, heads);
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let is_zero = |value: &f32| *value == 0.0;
                    assert_eq!(
                        found.iter().filter(|value| is_zero(value)).count(),
                        expected.iter().filter(|value| is_zero(value)).count(),
                        "{case:?} on {degree}: other elements are dropped"
                    );
                    let difference =
                        found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
                    let difference = difference.fold(0.0, f32::max);
                    let bound = if case.dtype == DType::F32 { 2e-5 } else { 0.03 };
                    assert!(
                        difference < bound,
                        "{case:?} on {degree}, {heads} of heads: {index} differs by {difference:e}"
                    );
                }
            }
        }
    }
}

fn dry_run_axis(heads: usize) -> ContextAxis {
    let noted = ExchangeLog::default();
    let alone = |axis, place| Arc::new(DryRunAxis::new(axis, place, &noted)) as Arc<dyn AxisOps>;
    match heads {
        1 => ContextAxis { ring: Some(alone(UnitAxis::Ring, AxisRank::new(0, 2))), heads: None },
        _ => ContextAxis { ring: None, heads: Some(alone(UnitAxis::Heads, AxisRank::new(0, heads))) },
    }
}

#[test]
fn mixing_positions_and_indivisible_heads_are_refused() {
    let device = Device::counting(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
    let parameters = no_parameter_values(&device);
    let mut tape = Tape::new(&device, Recording::On, pass_of(Some(dry_run_axis(1))));
    let x = tape.input(tensor(&device, &[1, 4, 2], &[0.0; 8]));
    let refused = tape.recorder(&parameters).apply(&Mean { dim: 1 }, [x]).unwrap_err().to_string();
    assert!(refused.contains("Mean { dim: 1 } mixes positions"), "{refused}");
    // Softmax over the last dim, which is the dim of positions here.
    let mut tape = Tape::new(&device, Recording::On, pass_of(Some(dry_run_axis(1))));
    let x = tape.input(tensor(&device, &[2, 4], &[0.0; 8]));
    let refused = tape.recorder(&parameters).apply(&Softmax, [x]).unwrap_err().to_string();
    assert!(refused.contains("fewer dims than [samples, positions, cols]"), "{refused}");
    let mut tape = Tape::new(&device, Recording::On, pass_of(Some(dry_run_axis(4))));
    let x = tape.input(tensor(&device, &[1, 4, COLS], &[0.0; 4 * COLS]));
    let attention = Arc::new(Attention::new(HEADS, KV_HEADS, DIM, AttentionRule::causal(DIM)));
    let refused = tape.recorder(&parameters).apply(&attention, [x]).unwrap_err().to_string();
    assert!(refused.contains("4 ranks cannot have equal parts of 2 heads"), "{refused}");
}
