//! Compares models with values computed by Hugging Face transformers in f32: see `tests/golden/README.md`.
//!
//! Set `TRIREME_GOLDEN` to a folder with a larger reference to compare with it as well.

use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trireme_base::DType;
use trireme_model::{
    Batch, Bundle, HostBatch, KvCache, LOGITS, Model, ModelConfig, TOKENS, UnitPass, set_window, token_specs,
};
use trireme_tensor::tape::{PendingMean, Recording};
use trireme_tensor::{
    Category, Device, DeviceError, DeviceOptions, GradSink, GradTarget, ParameterClass, ParameterInfo,
    ParameterSpan, ParameterTable, Parameters, PassState, Precision, Tape, Tensor,
};
use trireme_testkit::test_gpu;

const LOGITS_TOLERANCE: f64 = 1e-4;
const LOSS_TOLERANCE: f64 = 1e-5;
const GRAD_TOLERANCE: f64 = 1e-4;
const TRAIN_TOLERANCE: f64 = 1e-4;
/// Maximum relative distance between the gradients in 16 bits and in f32, over all parameters of a model together. The next constant is the
/// maximum for a single parameter.
const MIXED_GRAD_TOLERANCE: f64 = 1.2e-2;
/// As [`MIXED_GRAD_TOLERANCE`], on a GPU, which rounds other values than the CPU: Gemma 2 in bf16 has the largest distance, 1.35e-2.
const MIXED_GRAD_TOLERANCE_OF_GPU: f64 = 1.5e-2;
const MIXED_PARAMETER_TOLERANCE: f64 = 2.5e-2;
const MIXED_LOSS_TOLERANCE: f64 = 2e-3;

/// A sink that writes gradients into one flat buffer per unit.
struct FlatGrads {
    grads: Parameters,
    written: Vec<bool>,
}

impl FlatGrads {
    fn new(table: &Arc<ParameterTable>, device: &Device) -> Self {
        let grads = Parameters::zeros(table, device, Category::Gradients).unwrap();
        FlatGrads { grads, written: vec![false; table.parameters().len()] }
    }
}

impl GradSink for FlatGrads {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let accumulate = self.written[span.first.0];
        let view = self.grads.flat_mut(span.unit).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate })
    }

    fn grad_ready(&mut self, span: &ParameterSpan) {
        self.written[span.first.0..span.first.0 + span.num_parameters].fill(true);
    }
}

struct Golden {
    device: Device,
    config: ModelConfig,
    model: Model,
    parameters: Parameters,
    reference: Vec<u8>,
    train_losses: Vec<f64>,
}

impl Golden {
    /// Opens a reference. The model is built for sequences that are `num_left_out` tokens shorter than the reference's.
    fn open(folder: &Path, device: Device, num_left_out: usize) -> Self {
        let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
        let text = String::from_utf8(read("config.json")).unwrap();
        let mut config = ModelConfig::from_json(&text).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        if let Some(experts) = &mut config.experts {
            // transformers adds the balance loss only if the model returns router logits. It divides an expert's load by the number of
            // tokens, not by the number of choices, so its loss is `num_choices` times as large.
            let balances = json["output_router_logits"] == true;
            experts.balance_loss *= if balances { experts.num_choices as f32 } else { 0.0 };
        }
        let report: serde_json::Value = serde_json::from_slice(&read("reference.json")).unwrap();
        let seq_len = report["seq"].as_u64().unwrap() as usize - num_left_out;
        let model = config.build(seq_len, &device).unwrap();
        let mut parameters = Parameters::zeros(model.table(), &device, Category::Parameters).unwrap();
        let weights = read("model.safetensors");
        let weights = SafeTensors::deserialize(&weights).unwrap();
        parameters
            .load(|info, _, values| {
                let tensor = weights.tensor(&info.name).map_err(|error| format!("{}: {error}", info.name))?;
                assert_eq!(tensor.shape(), info.shape.dims(), "{}", info.name);
                values.copy_from_slice(&f32s(tensor.data()));
                Ok::<(), String>(())
            })
            .unwrap();
        let losses = report["train_losses"].as_array().unwrap();
        let train_losses = losses.iter().map(|loss| loss.as_f64().unwrap()).collect();
        Golden { device, config, model, parameters, reference: read("reference.safetensors"), train_losses }
    }

    fn reference(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.reference).unwrap()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        f32s(self.reference().tensor(name).unwrap().data())
    }

    /// Returns integers and their shape.
    fn ids(&self, name: &str) -> (Vec<u32>, Vec<usize>) {
        let reference = self.reference();
        let tensor = reference.tensor(name).unwrap();
        let ids =
            tensor.data().chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32);
        (ids.collect(), tensor.shape().to_vec())
    }

    /// Returns the parameters whose gradients are derivatives of the loss.
    fn differentiated(&self) -> impl Iterator<Item = &ParameterInfo> {
        let parameters = self.model.table().parameters().iter();
        parameters.filter(|info| info.class != ParameterClass::Balance)
    }

    fn logits(&self, ids: &[u32], shape: (usize, usize)) -> Vec<f32> {
        self.logits_after(None, ids, shape)
    }

    fn logits_after(&self, past: Option<&mut KvCache>, ids: &[u32], shape: (usize, usize)) -> Vec<f32> {
        let mut tokens =
            self.device.empty([shape.0, shape.1].into(), DType::U32, Category::Activations).unwrap();
        self.device.upload(ids, tokens.view_mut());
        let mut batch = [(TOKENS, tokens)].into_iter().collect();
        let (_, made) = self.forward(Recording::Off, Precision::F32, 1.0, &mut batch, past);
        self.device.read(made.get(LOGITS).unwrap().view()).unwrap()
    }

    /// Runs all units forward with one tape per unit, like the executor. Returns the passes and the last unit's outputs.
    fn forward(
        &self,
        recording: Recording,
        precision: Precision,
        loss_scale: f32,
        batch: &mut Batch,
        mut past: Option<&mut KvCache>,
    ) -> (Vec<UnitPass>, Bundle<Tensor>) {
        let (mut passes, mut x) = (Vec::new(), Bundle::new());
        for unit in 0..self.model.num_units() {
            let position = past.as_deref().map_or(0, KvCache::position);
            let pass = PassState { first_position: position, loss_scale, ..precision.into() };
            let tape = Tape::new(&self.device, recording, pass);
            let (unit, past) = (self.model.unit(unit), past.as_deref_mut());
            let (pass, made) = UnitPass::forward(unit, tape, &self.parameters, x, batch, past).unwrap();
            passes.push(pass);
            x = made;
        }
        (passes, x)
    }

    /// Returns the mean loss of predicting each token from those before it. Gradients go to `sink`, if there is one.
    fn loss(&self, ids: &[u32], shape: (usize, usize), sink: Option<&mut FlatGrads>) -> f64 {
        self.loss_in(Precision::F32, 1.0, ids, shape, sink)
    }

    /// Like [`Golden::loss`], in a given precision, with gradients multiplied by `loss_scale`.
    fn loss_in(
        &self,
        precision: Precision,
        loss_scale: f32,
        ids: &[u32],
        shape: (usize, usize),
        sink: Option<&mut FlatGrads>,
    ) -> f64 {
        let seq_len = shape.1 - 1;
        let mut samples = HostBatch::new(&token_specs(shape.0, seq_len));
        for (row, window) in ids.chunks_exact(shape.1).enumerate() {
            set_window(&mut samples, row, window);
        }
        let mut batch = samples.upload(&self.device).unwrap();
        let recording = if sink.is_some() { Recording::On } else { Recording::Off };
        let (mut passes, mut grads) = self.forward(recording, precision, loss_scale, &mut batch, None);
        if let Some(sink) = sink {
            for pass in passes.iter_mut().rev() {
                pass.backward(&self.parameters, grads, &mut batch, sink).unwrap();
                grads = pass.take_input_grads().unwrap();
            }
        }
        let loss = passes.last().and_then(UnitPass::loss).unwrap();
        assert_eq!(loss.num_rows, shape.0 * seq_len);
        let balance = passes.iter().filter_map(|pass| pass.reported(Some("balance_loss")));
        let weight = self.config.experts.as_ref().map_or(0.0, |experts| f64::from(experts.balance_loss));
        let mean = |mean: &PendingMean| mean.read(&self.device).unwrap().sum / mean.num_rows as f64;
        mean(loss) + weight * balance.map(mean).sum::<f64>()
    }
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn relative_distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = square(&mut found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / square(&mut expected.iter().map(|x| f64::from(*x)))
}

fn folders() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = std::fs::read_dir(own).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders.extend(std::env::var_os("TRIREME_GOLDEN").map(PathBuf::from));
    folders
}

fn cpu(num_threads: usize) -> Device {
    Device::cpu(DeviceOptions { num_threads, ..DeviceOptions::default() }).unwrap()
}

/// Returns each reference with the CPU, and with a GPU if there is one.
fn folders_and_devices() -> impl Iterator<Item = (PathBuf, Device)> {
    folders().into_iter().flat_map(|folder| {
        let gpu = test_gpu().map(|backend| {
            Device::open(DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() }).unwrap()
        });
        [Some(cpu(2)), gpu].into_iter().flatten().map(move |device| (folder.clone(), device))
    })
}

#[test]
fn configs_read_back_as_written() {
    for folder in folders() {
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let config = ModelConfig::from_json(&text).unwrap();
        assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config, "{folder:?}");
    }
}

#[test]
fn dynamic_scaling_begins_where_the_positions_of_pretraining_end() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama-dynamic");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let dynamic = ModelConfig::from_json(&text).unwrap();
    let plain = ModelConfig::from_json(&text.replace("\"dynamic\"", "\"default\"")).unwrap();
    assert_eq!((plain.max_positions(), dynamic.max_positions()), (24, 96));
    assert!(!dynamic.differences(&plain).is_empty());
    let mut golden = Golden::open(&folder, cpu(1), 0);
    let (ids, _) = golden.ids("input_ids");
    let mut logits = |config: &ModelConfig, len: usize| {
        golden.model = config.build(len, &golden.device).unwrap();
        golden.logits(&ids[..len], (1, len))
    };
    assert_eq!(logits(&dynamic, 24), logits(&plain, 24));
    assert_ne!(logits(&dynamic, 25), logits(&plain, 25));
}

#[test]
fn logits_loss_and_every_gradient() {
    for (folder, device) in folders_and_devices() {
        let golden = Golden::open(&folder, device, 0);
        let (ids, shape) = golden.ids("input_ids");
        let shape = (shape[0], shape[1]);
        let expected = golden.floats("logits");
        let logits = golden.logits(&ids, shape);
        let worst = logits.iter().zip(&expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        assert!(worst < LOGITS_TOLERANCE, "{folder:?}: logits off by {worst}");

        let mut sink = FlatGrads::new(golden.model.table(), &golden.device);
        let loss = golden.loss(&ids, shape, Some(&mut sink));
        let expected = f64::from(golden.floats("loss")[0]);
        assert!((loss - expected).abs() < LOSS_TOLERANCE, "{folder:?}: loss {loss} instead of {expected}");
        assert!((golden.loss(&ids, shape, None) - loss).abs() < 1e-9, "both ways to the loss agree");

        let mut again = FlatGrads::new(golden.model.table(), &golden.device);
        assert_eq!(golden.loss(&ids, shape, Some(&mut again)), loss, "{folder:?}: the loss repeats its bits");
        let units = 0..golden.model.num_units();
        assert!(
            units
                .into_iter()
                .all(|unit| sink.grads.values(unit).unwrap() == again.grads.values(unit).unwrap()),
            "{folder:?}"
        );

        let mut worst = (0.0, "");
        for info in golden.differentiated() {
            let found = &sink.grads.values(info.unit).unwrap()[info.range()];
            let distance = relative_distance(found, &golden.floats(&format!("grad.{}", info.name)));
            assert!(distance < GRAD_TOLERANCE, "{folder:?}: gradient of {} off by {distance}", info.name);
            if distance > worst.0 {
                worst = (distance, &info.name);
            }
        }
        let is_grad = |name: &&str| name.starts_with("grad.") && !name.ends_with("e_score_correction_bias");
        let names = golden.reference().names().into_iter().filter(is_grad).count();
        assert_eq!(names, golden.differentiated().count(), "{folder:?}: every gradient was compared");
        println!("{folder:?}: worst gradient {worst:?}");
    }
}

#[test]
fn gradients_in_16_bits_are_close_to_those_in_f32() {
    for (folder, device) in folders_and_devices() {
        let grad_tolerance =
            if device.reaches_host() { MIXED_GRAD_TOLERANCE } else { MIXED_GRAD_TOLERANCE_OF_GPU };
        let golden = Golden::open(&folder, device, 0);
        let (ids, shape) = golden.ids("input_ids");
        let expected_loss = f64::from(golden.floats("loss")[0]);
        // Without the scale, small gradients would underflow in f16.
        for (precision, loss_scale) in [(Precision::Bf16, 1.0), (Precision::F16, 1024.0)] {
            let mut sink = FlatGrads::new(golden.model.table(), &golden.device);
            let loss = golden.loss_in(precision, loss_scale, &ids, (shape[0], shape[1]), Some(&mut sink));
            let error = (loss - expected_loss).abs();
            assert!(error < MIXED_LOSS_TOLERANCE, "{folder:?} {precision}: loss off by {error}");
            let (mut all_found, mut all_expected, mut worst) = (Vec::new(), Vec::new(), (0.0, ""));
            for info in golden.differentiated() {
                let unit = sink.grads.values(info.unit).unwrap();
                let found: Vec<f32> = unit[info.range()].iter().map(|x| x / loss_scale).collect();
                let expected = golden.floats(&format!("grad.{}", info.name));
                let distance = relative_distance(&found, &expected);
                let name = &info.name;
                assert!(distance > 0.0, "{precision} leaves no trace in the gradient of {name}");
                assert!(
                    distance < MIXED_PARAMETER_TOLERANCE,
                    "{folder:?} {precision}: {name} off by {distance}"
                );
                if distance > worst.0 {
                    worst = (distance, name);
                }
                all_found.extend(found);
                all_expected.extend(expected);
            }
            let distance = relative_distance(&all_found, &all_expected);
            println!(
                "{folder:?} {precision}: loss off by {error:.1e}, gradients by {distance:.1e}, worst {worst:?}"
            );
            assert!(distance < grad_tolerance, "{folder:?} {precision}: gradients off by {distance}");
        }
    }
}

#[test]
fn ten_adamw_steps() {
    for folder in folders() {
        // Training sequences of the reference exclude the last token, which is only a target.
        let mut golden = Golden::open(&folder, cpu(1), 1);
        let (ids, shape) = golden.ids("train.batches");
        let tokens = shape[1] * shape[2];
        let table = Arc::clone(golden.model.table());
        let zeros = || Parameters::zeros(&table, &golden.device, Category::Optimizer).unwrap();
        let (mut first, mut second) = (zeros(), zeros());
        for (index, expected) in golden.train_losses.clone().into_iter().enumerate() {
            let batch = &ids[index % 2 * tokens..][..tokens];
            let mut sink = FlatGrads::new(&table, &golden.device);
            let loss = golden.loss(batch, (shape[1], shape[2]), Some(&mut sink));
            assert!(
                (loss - expected).abs() < TRAIN_TOLERANCE,
                "{folder:?} step {index}: {loss} instead of {expected}"
            );
            let infos: Vec<ParameterInfo> = golden.differentiated().cloned().collect();
            for info in infos {
                let all = [&mut golden.parameters, &mut first, &mut second];
                adamw(&golden.device, all, &sink.grads, &info, index as i32 + 1);
            }
        }
    }
}

/// Updates a parameter by PyTorch's AdamW with learning rate 1e-3, betas 0.9 and 0.95, and weight decay 0.1 for all parameters.
fn adamw(device: &Device, state: [&mut Parameters; 3], grads: &Parameters, info: &ParameterInfo, step: i32) {
    let own = |values: &Parameters| values.values(info.unit).unwrap()[info.range()].to_vec();
    let [mut parameters, mut first, mut second] = state.each_ref().map(|values| own(values));
    let moments = first.iter_mut().zip(&mut second);
    for ((parameter, grad), (first, second)) in parameters.iter_mut().zip(own(grads)).zip(moments) {
        *first = 0.9 * *first + 0.1 * grad;
        *second = 0.95 * *second + 0.05 * grad * grad;
        let root = (*second / (1.0 - 0.95_f32.powi(step))).sqrt();
        *parameter *= 1.0 - 1e-3 * 0.1;
        *parameter -= 1e-3 * (*first / (1.0 - 0.9_f32.powi(step))) / (root + 1e-8);
    }
    for (to, values) in state.into_iter().zip([parameters, first, second]) {
        device.upload(&values, to.flat_mut(info.unit).into_part(info.offset, [values.len()].into()));
    }
}

#[test]
fn generation_with_a_cache_matches_one_pass() {
    for folder in folders() {
        let golden = Golden::open(&folder, cpu(2), 0);
        let (ids, shape) = golden.ids("input_ids");
        let (ids, len) = (&ids[..shape[1]], shape[1]);
        let expected = golden.logits(ids, (1, len));
        let vocab_size = golden.config.vocab_size;
        let mut past = KvCache::new(&golden.device, len);
        for num_tokens in [5, 1, 1, 7, len - 14] {
            let position = past.position();
            let logits =
                golden.logits_after(Some(&mut past), &ids[position..position + num_tokens], (1, num_tokens));
            past.advance(num_tokens);
            let expected = &expected[position * vocab_size..(position + num_tokens) * vocab_size];
            assert!(relative_distance(&logits, expected) < 1e-5, "{folder:?} at {position}");
        }
        assert_eq!(past.position(), len);
    }
}
