//! Operations on ranks of the tensor axis, compared with one rank.

use crate::threads::ThreadRank;
use std::sync::Arc;
use trireme_base::{AxisRank, AxisSplit, DType, RandomKey, UnitAxis};
use trireme_tensor::tape::{
    Add, CopyToRanks, Dropout, DryRunAxis, Embedding, ExchangeLog, InputActivation, Linear, LossHead, Mean,
    MeanLoss, Norm, PassAxes, Randomness, Recording, Scale, SplitRows, SquaredError, SumOverRanks,
    TensorAxis, WeightLayout,
};
use trireme_tensor::{
    Activation, BackendKind, Category, DetachedOptions, Device, DeviceError, DeviceOptions, Fp8Formats,
    Fp8Recipe, Fp8State, GradSink, GradTarget, Initial, Parameter, ParameterInfo, ParameterSpan,
    ParameterTable, Parameters, PassState, Precision, Tape,
};
use trireme_testkit::{TracedDevice, on_threads, test_gpu};

/// Gradients, and which of them are partial sums.
struct Grads {
    flat: Parameters,
    is_written: Vec<bool>,
    is_partial: Vec<bool>,
    are_partial: bool,
}

impl GradSink for Grads {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let view = self.flat.flat_mut(span.unit).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate: self.is_written[span.first.0] })
    }

    fn grad_ready(&mut self, span: &ParameterSpan) {
        self.is_written[span.first.0] = true;
        self.is_partial[span.first.0] = self.are_partial && span.shard.is_none();
    }

    fn expect_partial_grads(&mut self, are_partial: bool) {
        self.are_partial = are_partial;
    }
}

const BATCH: usize = 2;
const SEQ_LEN: usize = 6;
const HIDDEN: usize = 8;
const INNER: usize = 12;
/// Not divisible by the tested degrees.
const VOCABULARY: usize = 11;

/// The loss of a rank, and for each parameter its shard of the gradient, and whether the gradient is a partial sum.
type Found = (f64, Vec<(ParameterInfo, Vec<f32>, bool)>);

/// Runs sharded layers between replicated ones, forward and backward. In bf16, matmuls are quantized to fp8.
fn run(device: &Device, axis: Option<TensorAxis>, precision: Precision) -> Found {
    let place = axis.as_ref().map_or(AxisRank::ALONE, TensorAxis::axis_rank);
    let shards_rows = axis.as_ref().is_some_and(|axis| axis.shards_rows);
    let mut table = ParameterTable::for_rank(place);
    table.begin_unit("unit");
    let normal = Initial::Normal { standard_deviation: 0.5 };
    let matrix =
        |name: &str, dims: [usize; 2], cut: AxisSplit| Parameter::matrix(name, &dims, normal).with_split(cut);
    let rows = AxisSplit::along(0).padded();
    let tokens = table.add(matrix("tokens", [VOCABULARY, HIDDEN], rows));
    let positions = Some(table.add(Parameter::embedding("positions", &[SEQ_LEN, HIDDEN], normal)));
    let embedding = Arc::new(Embedding { tokens, positions });
    let norm = |table: &mut ParameterTable, name: &str| {
        let weight = table.add(Parameter::vector(name, HIDDEN, normal));
        Arc::new(Norm { weight, bias: None, weight_offset: 1.0, epsilon: 1e-5, is_centered: true })
    };
    let norms = ["before", "after"].map(|name| norm(&mut table, name));
    let wide = Arc::new(Linear {
        weight: table.add(matrix("wide", [HIDDEN, INNER], AxisSplit::along(1))),
        layout: WeightLayout::InputsFirst,
        bias: Some(table.add(Parameter::vector("wide.bias", INNER, normal).with_split(AxisSplit::along(0)))),
        activation: InputActivation::Identity,
    });
    let narrow = Arc::new(Linear {
        weight: table.add(matrix("narrow", [HIDDEN, INNER], AxisSplit::along(1))),
        layout: WeightLayout::OutputsFirst,
        bias: Some(table.add(Parameter::vector("narrow.bias", HIDDEN, normal))),
        activation: InputActivation::Elementwise(Activation::Gelu),
    });
    // One layer has an activated input; the input of the other one has no gradient.
    let columns = |table: &mut ParameterTable, name: &str, activation| {
        let weight = table.add(matrix(name, [INNER, HIDDEN], AxisSplit::along(0)));
        Arc::new(Linear { weight, layout: WeightLayout::OutputsFirst, bias: None, activation })
    };
    let activated = columns(&mut table, "activated", InputActivation::Elementwise(Activation::Gelu));
    let fixed = columns(&mut table, "fixed", InputActivation::Identity);
    let [after_activated, after_fixed] = ["after activated", "after fixed"].map(|name| {
        let weight = table.add(matrix(name, [INNER, HIDDEN], AxisSplit::along(0)));
        let (layout, activation) = (WeightLayout::InputsFirst, InputActivation::Identity);
        Arc::new(Linear { weight, layout, bias: None, activation })
    });
    let plain = Arc::new(Linear {
        weight: table.add(Parameter::matrix("plain", &[HIDDEN, HIDDEN], normal)),
        layout: WeightLayout::InputsFirst,
        bias: None,
        activation: InputActivation::Identity,
    });
    let head = Arc::new(LossHead {
        weight: table.add(matrix("head", [VOCABULARY, HIDDEN], rows)),
        soft_cap: Some(3.0),
    });
    let dropouts = ["rows", "inner"].map(|name| Arc::new(Dropout::new(name, 0.3)));
    let mean_of_ranks = Arc::new(Scale(1.0 / place.degree as f32));
    let table = Arc::new(table);
    let mut parameters = Parameters::zeros(&table, device, Category::Parameters).unwrap();
    let fill = |info: &ParameterInfo, held, values: &mut [f32]| {
        info.initialize(1, held, values);
        Ok::<_, DeviceError>(())
    };
    parameters.load(fill).unwrap();

    let fp8 = Fp8State::of_matrices(Fp8Recipe::new(Fp8Formats::Hybrid), &table, device).unwrap();
    let scales = (precision == Precision::Bf16).then(|| Arc::clone(fp8.scales()));
    let randomness = Randomness { seed: 1, step: 2, first_sample: 3, num_samples: BATCH };
    let axes = PassAxes { tensor: axis, ..PassAxes::default() };
    let pass = PassState { fp8: scales, axes, randomness, ..precision.into() };
    let mut tape = Tape::new(device, Recording::On, pass);
    let ids = |first: u32, tape: &mut Tape| {
        let ids: Vec<u32> =
            (0..(BATCH * SEQ_LEN) as u32).map(|i| (first + 7 * i) % VOCABULARY as u32).collect();
        let shape = [BATCH, SEQ_LEN].into();
        let mut tensor = device.empty(shape, DType::U32, Category::Activations).unwrap();
        device.upload(&ids, tensor.view_mut());
        tape.constant(tensor)
    };
    let (tokens, targets) = (ids(0, &mut tape), ids(3, &mut tape));
    let zeros = device.zeros([BATCH, 1, HIDDEN].into(), DType::F32, Category::Activations).unwrap();
    let zeros = tape.constant(zeros);
    let mut values = [0.0_f32; BATCH * SEQ_LEN * HIDDEN];
    RandomKey::new(0, "data").fill_normal(&mut values, 1.0);
    let empty = |dtype| device.empty([BATCH, SEQ_LEN, HIDDEN].into(), dtype, Category::Activations).unwrap();
    let (mut exact, mut data) = (empty(DType::F32), empty(precision.dtype()));
    device.upload(&values, exact.view_mut());
    device.convert(exact.view(), data.view_mut());
    let data = tape.constant(data);
    let record = || -> Result<(), DeviceError> {
        let mut recorder = tape.recorder(&parameters);
        let x = recorder.apply(&embedding, [tokens])?;
        let normed = recorder.apply(&norms[0], [&x])?;
        let inner = recorder.apply(&activated, [&normed])?;
        let x = recorder.apply(&after_activated, (inner, x))?;
        let inner = recorder.apply(&fixed, [&data])?;
        let x = recorder.apply(&after_fixed, (inner, x))?;
        let rows = if shards_rows { recorder.apply(&SplitRows, [data])? } else { data };
        let inner = recorder.apply(&fixed, [rows])?;
        let x = recorder.apply(&after_fixed, (inner, x))?;
        let inner = recorder.apply(&wide, [normed])?;
        let inner = recorder.apply(&dropouts[1], [inner])?;
        let x = recorder.apply(&narrow, (inner, x))?;
        let x = recorder.apply(&dropouts[0], [x])?;
        // Each rank computes on all rows, and the results are summed.
        let copy = recorder.apply(&CopyToRanks, [&x])?;
        let part = recorder.apply(&mean_of_ranks, [copy])?;
        let sum = recorder.apply(&SumOverRanks, [part])?;
        let turned = recorder.apply(&plain, [&x])?;
        let x = recorder.apply(&Add, (x, turned))?;
        let x = recorder.apply(&Add, (x, sum))?;
        // Needs all rows of a sequence.
        let mean = recorder.apply(&Mean { dim: 1 }, [&x])?;
        recorder.apply_loss(&MeanLoss(SquaredError), (mean, zeros), 0.5)?;
        let normed = recorder.apply(&norms[1], [x])?;
        recorder.apply_loss(&head, (normed, targets), 1.0)
    };
    record().unwrap();
    let flat = Parameters::zeros(&table, device, Category::Gradients).unwrap();
    let none = vec![false; table.parameters().len()];
    let mut sink = Grads { flat, is_written: none.clone(), is_partial: none, are_partial: false };
    tape.backward(&parameters, [], &mut sink).unwrap();
    let loss = tape.loss().unwrap().read(device).unwrap();
    let values = sink.flat.values(0).unwrap();
    let grads = table.parameters().iter().zip(&sink.is_partial);
    let grads = grads.map(|(info, is_term)| (info.clone(), values[info.range()].to_vec(), *is_term));
    (loss.sum / loss.num_rows as f64, grads.collect())
}

/// Returns the results of the ranks of an axis, with shards of gradients joined and partial sums added.
fn run_ranks(
    backend: BackendKind,
    precision: Precision,
    degree: usize,
    shards_rows: bool,
) -> (f64, Vec<(String, Vec<f32>)>) {
    let options = DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() };
    let devices: Vec<TracedDevice> = (0..degree).map(|_| TracedDevice::open(options).unwrap()).collect();
    let ranks: Vec<_> = ThreadRank::all(degree).into_iter().zip(&devices).collect();
    let found: Vec<Found> = on_threads(ranks, &|(ops, device)| {
        run(device, (degree > 1).then(|| TensorAxis { ops, shards_rows }), precision)
    });
    assert!(found.iter().all(|(loss, _)| *loss == found[0].0), "ranks have one loss");
    let joined = |index: usize| {
        let mut whole = vec![0.0_f32; found[0].1[index].0.full_shape.num_elements()];
        for (info, grads, is_term) in found.iter().map(|(_, grads)| &grads[index]) {
            if !is_term && !info.is_first_replica() {
                continue;
            }
            for (first, run) in info.runs(0..grads.len()) {
                let run = &grads[run];
                whole[first..][..run.len()].iter_mut().zip(run).for_each(|(whole, grad)| *whole += grad);
            }
        }
        (found[0].1[index].0.name.clone(), whole)
    };
    (found[0].0, (0..found[0].1.len()).map(joined).collect())
}

/// Returns the tolerances of the loss and of gradients, relative to the largest element. In f32, sums have another order. In bf16, partial
/// sums are rounded before they are added, so that a few values are then rounded to other fp8 values.
fn bounds(precision: Precision) -> (f64, f32) {
    if precision == Precision::F32 { (1e-6, 1e-5) } else { (8e-3, 0.05) }
}

#[test]
fn sharded_layers_match_one_rank() {
    for backend in
        [BackendKind::Cpu, BackendKind::Detached(DetachedOptions::default())].into_iter().chain(test_gpu())
    {
        for precision in [Precision::F32, Precision::Bf16] {
            let (of_loss, of_grads) = bounds(precision);
            let (loss, grads) = run_ranks(backend, precision, 1, false);
            for (degree, shards_rows) in [(2, false), (2, true), (3, false), (3, true)] {
                let (found, found_grads) = run_ranks(backend, precision, degree, shards_rows);
                let layout = format!("{precision:?}, {degree} ranks, rows {shards_rows}");
                assert!((found / loss - 1.0).abs() < of_loss, "{layout}: {found} is not {loss}");
                for ((name, grad), (_, found)) in grads.iter().zip(&found_grads) {
                    let largest = grad.iter().fold(0.0_f32, |largest, grad| largest.max(grad.abs()));
                    let difference = grad.iter().zip(found).map(|(grad, found)| (grad - found).abs());
                    let difference = difference.fold(0.0, f32::max) / largest;
                    assert!(difference < of_grads, "{layout}: {name} differs by {difference:e}");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "reads what was not cut")]
fn row_parallel_layers_require_sharded_inputs() {
    let options = DeviceOptions { num_threads: 1, ..DeviceOptions::default() };
    let device = Device::counting(options).unwrap();
    let mut table = ParameterTable::for_rank(AxisRank::new(0, 2));
    table.begin_unit("unit");
    let weight = Parameter::matrix("weight", &[4, 4], Initial::ZEROS).with_split(AxisSplit::along(0));
    let linear = Arc::new(Linear {
        weight: table.add(weight),
        layout: WeightLayout::InputsFirst,
        bias: None,
        activation: InputActivation::Identity,
    });
    let parameters = Parameters::zeros(&Arc::new(table), &device, Category::Parameters).unwrap();
    let ops = Arc::new(DryRunAxis::new(UnitAxis::Tensor, AxisRank::new(0, 2), &ExchangeLog::default()));
    let axis = TensorAxis { ops, shards_rows: false };
    let axes = PassAxes { tensor: Some(axis), ..PassAxes::default() };
    let pass = PassState { axes, ..Precision::F32.into() };
    let mut tape = Tape::new(&device, Recording::On, pass);
    let x = tape.input(device.empty([1, 2, 2].into(), DType::F32, Category::Activations).unwrap());
    let _ = tape.recorder(&parameters).apply(&linear, [x]);
}

#[test]
fn rows_that_do_not_divide_are_refused() {
    let device = Device::counting(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
    let ops = Arc::new(DryRunAxis::new(UnitAxis::Tensor, AxisRank::new(0, 2), &ExchangeLog::default()));
    let axis = TensorAxis { ops, shards_rows: false };
    let axes = PassAxes { tensor: Some(axis), ..PassAxes::default() };
    let pass = PassState { axes, ..Precision::F32.into() };
    let mut tape = Tape::new(&device, Recording::On, pass);
    let x = tape.input(device.empty([1, 3, 2].into(), DType::F32, Category::Activations).unwrap());
    let mut table = ParameterTable::default();
    table.begin_unit("none");
    let none = Parameters::zeros(&Arc::new(table), &device, Category::Parameters).unwrap();
    let refused = tape.recorder(&none).apply(&SplitRows, [x]).unwrap_err().to_string();
    assert!(refused.contains("cannot have equal parts of dim 1 of [1, 3, 2]"), "{refused}");
}
