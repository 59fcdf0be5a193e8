use super::*;
use crate::device::DeviceOptions;
use crate::timing::NUM_RUNS_MIN;

const NO_TIME: Duration = Duration::ZERO;

fn device(simd_level_max: Option<SimdLevel>) -> Device {
    Device::cpu(DeviceOptions { num_threads: 2, simd_level_max, ..DeviceOptions::default() }).unwrap()
}

fn assert_sane(timing: Timing) {
    assert!(timing.best > 0.0 && timing.median >= timing.best && timing.median.is_finite(), "{timing:?}");
}

#[test]
fn levels_are_kept_below_a_maximum() {
    assert_eq!(device(None).simd_level(), SimdLevel::detect());
    for most in SimdLevel::ALL {
        assert_eq!(device(Some(most)).simd_level(), most.min(SimdLevel::detect()));
        assert_eq!(reason_unsupported(most).is_none(), most <= SimdLevel::detect());
    }
}

#[test]
fn every_product_kernel_is_timed() {
    let sizes = MatmulSizes { rows: 33, cols: 17, inner: 40 };
    assert_eq!((sizes.operations(), sizes.to_string().as_str()), (44880.0, "33x17x40"));
    for simd_level in SimdLevel::ALL.into_iter().filter(|level| *level <= SimdLevel::detect()) {
        let probe = Probe::new(&device(Some(simd_level)), NO_TIME);
        for precision in Precision::ALL {
            assert!(probe.peak(ExecutionUnit::of(simd_level, precision)) > 1e6);
            for transposes in Transposes::ALL {
                assert_sane(probe.matmul(precision, transposes, sizes).unwrap());
            }
        }
    }
}

#[test]
fn runs_are_repeated_after_one_that_is_not_counted() {
    let mut seconds = [9.0, 3.0, 0.0, 2.0].into_iter();
    let Ok(timing) = time_runs(NO_TIME, || Ok::<_, Infallible>(seconds.next().unwrap_or(0.0)));
    assert_eq!(timing, Timing { best: 1e-9, median: 2.0 });
    assert_eq!(seconds.len(), 3 - NUM_RUNS_MIN);
}
