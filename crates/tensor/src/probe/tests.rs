use super::*;
use crate::device::DeviceOptions;
use crate::kernels::AttentionShape;

const NO_TIME: Duration = Duration::ZERO;

fn device(features_max: Option<CpuFeatures>) -> Device {
    Device::cpu(DeviceOptions { num_threads: 2, features_max, ..DeviceOptions::default() }).unwrap()
}

fn assert_sane(timing: Timing) {
    assert!(timing.best > 0.0 && timing.median >= timing.best && timing.median.is_finite(), "{timing:?}");
}

#[test]
fn levels_are_kept_below_a_maximum() {
    assert_eq!(device(None).cpu_features(), CpuFeatures::detect());
    for most in CpuFeatures::ALL {
        assert_eq!(device(Some(most)).cpu_features(), most.min(CpuFeatures::detect()));
        assert_eq!(why_absent(most).is_none(), most <= CpuFeatures::detect());
    }
}

#[test]
fn every_product_kernel_is_timed() {
    let sizes = ProductSizes { rows: 33, cols: 17, inner: 40 };
    assert_eq!((sizes.operations(), sizes.to_string().as_str()), (44880.0, "33x17x40"));
    for features in CpuFeatures::ALL.into_iter().filter(|level| *level <= CpuFeatures::detect()) {
        let probe = Probe::new(&device(Some(features)), NO_TIME);
        for precision in Precision::ALL {
            assert!(probe.peak(Unit::of(features, precision)) > 1e6);
            for transposes in Transposes::ALL {
                assert_sane(probe.product(precision, transposes, sizes).unwrap());
            }
        }
    }
}

#[test]
fn runs_are_timed_from_where_they_say() {
    let probe = Probe::new(&device(None), NO_TIME);
    let mut num_runs = 0;
    let Ok(timing) = probe.time(|start| {
        num_runs += 1;
        *start = Instant::now() + Duration::from_secs(60);
    });
    // One to warm up. From an instant to come no time has passed.
    assert_eq!((num_runs, timing), (1 + NUM_RUNS_MIN, Timing { best: 1e-9, median: 1e-9 }));
}

#[test]
fn the_kernels_of_a_step_are_reported_with_their_work_and_bound() {
    let attention = AttentionShape {
        batch: 2,
        seq_len: 6,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        value_dim: 4,
        num_keys: 6,
    };
    for is_llama in [false, true] {
        let sizes = StepSizes {
            attention,
            hidden: 16,
            num_layers: 3,
            intermediate: 24,
            vocabulary: 31,
            is_llama,
            attention_bias: !is_llama,
            mlp_bias: !is_llama,
            is_tied: !is_llama,
        };
        for precision in [Precision::F32, Precision::Bf16] {
            let mut figures = Vec::new();
            let probe = Probe::new(&device(None), NO_TIME);
            probe
                .step(precision, probe.peaks(precision), &sizes, "", &mut |figure| figures.push(figure))
                .unwrap();
            for figure in &figures {
                assert_sane(figure.timing);
                assert!(figure.bound > 0.0 && figure.cost.traffic.moved() > 0, "{figure:?}");
            }
            // Two operations a weight and row in each of forward and the two gradients; attention's are apart.
            let mlp = if is_llama { 3 } else { 2 } * 16 * 24;
            let weights = 3 * (16 * 32 + 16 * 16 + mlp) + 31 * 16;
            let products: f64 = figures
                .iter()
                .filter(|figure| !figure.name.starts_with("attention: "))
                .map(|figure| figure.num_calls * figure.cost.product_operations as f64)
                .sum();
            assert_eq!(products, (6 * 12 * weights) as f64, "{figures:?}");
            let has = |name: &str| figures.iter().any(|figure| figure.name.starts_with(name));
            let mut names = Vec::new();
            let (peaks, only) = (probe.peaks(precision), "weight grad");
            probe.step(precision, peaks, &sizes, only, &mut |figure| names.push(figure.name)).unwrap();
            assert!(names.len() == 6 && names.iter().all(|name| name.contains(only)), "{names:?}");
            assert_eq!([has("swiglu"), has("gelu"), has("column sums")], [is_llama, !is_llama, !is_llama]);
        }
    }
}
