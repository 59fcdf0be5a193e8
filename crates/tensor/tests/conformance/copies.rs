//! Memory, copies and elementwise functions.

use super::{
    FLOATS, assert_near, empty, gpu_options, on_all, on_all_near, on_processors, random, rounded, rounding,
    shaped, tensor, wide,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use trireme_base::{DType, Event, EventCompleter, Pending};
use trireme_tensor::{
    BackendKind, DetachedOptions, Device, DeviceError, DeviceOptions, Expr, RowInput, Tensor,
};

#[test]
fn zeroed_memory_is_zero_and_other_elements_stay() {
    on_all(|device| {
        let zeros = device.zeros([3, 5].into(), DType::U32, trireme_tensor::Category::Optimizer).unwrap();
        assert_eq!(device.read::<u32>(zeros.view()).unwrap(), [0; 15]);
        let mut x = tensor(device, &random(77, "x"));
        device.zero(x.view_mut().into_part(7, [70].into()));
        let values: Vec<f32> = device.read(x.view()).unwrap();
        assert_eq!((&values[..7], &values[7..]), (&random(77, "x")[..7], &[0.0; 70][..]));
    });
}

#[test]
fn conversions_round_to_nearest_and_copies_are_exact() {
    for from in FLOATS {
        for to in FLOATS {
            let values = random(1000, "x");
            let found = on_all(|device| {
                let x = rounded(device, &values, from);
                let mut y = empty(device, [1000], to);
                device.convert(x.view(), y.view_mut());
                let mut same = empty(device, [1000], from);
                device.copy(x.view(), same.view_mut());
                assert_eq!(wide(device, &same), wide(device, &x));
                wide(device, &y)
            });
            let bound = rounding(from) + rounding(to);
            assert_near(&found, values.iter().map(|&x| f64::from(x)), 1.01 * bound, "element");
        }
    }
}

#[test]
fn stochastic_rounding_is_unbiased_and_depends_on_the_position_alone() {
    const LEN: usize = 1 << 16;
    let found = on_all(|device| {
        let values = [vec![1.0 + 2.0_f32.powi(-9); LEN], random(LEN, "x")].concat();
        let x = tensor(device, &values);
        let mut y = empty(device, [2 * LEN], DType::Bf16);
        device.round_stochastically(x.view(), 7, 5, y.view_mut());
        // The same elements in another part have the same bits.
        let mut part = empty(device, [1000], DType::Bf16);
        device.round_stochastically(x.view().part(3000, [1000].into()), 7, 3005, part.view_mut());
        assert_eq!(device.read_f32s(part.view()).unwrap(), device.read_f32s(y.view()).unwrap()[3000..4000]);
        let mut other = empty(device, [2 * LEN], DType::Bf16);
        device.round_stochastically(x.view(), 8, 5, other.view_mut());
        assert_ne!(device.read_f32s(other.view()).unwrap(), device.read_f32s(y.view()).unwrap());
        device.read_f32s(y.view()).unwrap()
    });
    // A quarter of the way from 1 to the next value.
    let up = found[..LEN].iter().filter(|&&y| y == 1.0 + 2.0_f32.powi(-7)).count();
    let down = found[..LEN].iter().filter(|&&y| y == 1.0).count();
    assert_eq!(up + down, LEN);
    assert!((up as f64 / LEN as f64 - 0.25).abs() < 0.01, "{up} of {LEN}");
    assert_near(&found[LEN..], random(LEN, "x").into_iter().map(f64::from), 2.0_f64.powi(-7), "element");
    on_all(|device| {
        let values =
            [0.0, -0.0, 1.5, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff), -f32::NAN];
        let mut y = empty(device, [values.len()], DType::Bf16);
        device.round_stochastically(tensor(device, &values).view(), 3, 0, y.view_mut());
        let found = device.read_f32s(y.view()).unwrap();
        assert!(found[5..].iter().all(|y| y.is_nan()));
        let bits = |values: &[f32]| values[..5].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found), bits(&values));
        found[..5].to_vec()
    });
}

/// Kernels and copies overtake each other unless they wait.
#[test]
fn concurrent_copies_see_kernels_issued_before_them() {
    on_all(|device: &Device| {
        let mut found = Vec::new();
        let mut host = Pending::new(vec![0_u8; 4 * 300]);
        for round in 0..5 {
            let mut x = shaped(device, &random(300, "x"), [300]);
            device.map_in_place(x.view_mut(), 1, move |x| x + round as f32);
            device.download_async(x.view().part(100, [200].into()), &mut host, 400);
            device.download_async(x.view().part(0, [100].into()), &mut host, 0);
            // The memory of `x` is reused by the next tensor while the copies may still read it.
            drop(x);
            let mut y = empty(device, [300], DType::F32);
            device.zero(y.view_mut());
            device.upload_async(&mut host, 0, y.view_mut());
            device.wait_for(&host.event());
            device.map_in_place(y.view_mut(), 1, |y| 2.0 * y);
            found.push(device.read::<f32>(y.view()).unwrap());
            let values = random(300, "x");
            let expected = values.iter().map(|x| 2.0 * (f64::from(*x) + f64::from(round)));
            assert_near(&found[round as usize], expected, 1e-6, "element");
        }
        found
    });
}

#[test]
fn functions_are_applied_to_each_element_and_rounded_once() {
    for dtype in FLOATS {
        let (left, right) = (random(1234, "left"), random(1234, "right"));
        let [mapped, zipped, changed, added] = on_all(|device| {
            let (x, y) = (rounded(device, &left, dtype), rounded(device, &right, dtype));
            let mut out = [(); 4].map(|()| empty(device, [1234], dtype));
            let [mapped, zipped, changed, added] = &mut out;
            device.map(x.view(), mapped.view_mut(), 2, |x| 2.0 * x + 1.0);
            device.zip(x.view(), y.view(), zipped.view_mut(), 1, |x, y| x * y);
            device.copy(x.view(), changed.view_mut());
            device.zip_in_place(changed.view_mut(), y.view(), 1, |x, y| x - y);
            device.copy(x.view(), added.view_mut());
            device.add_assign(added.view_mut(), y.view());
            out.each_ref().map(|out| wide(device, out))
        });
        let [sums] = on_all_near(1e-5, |device| {
            let (x, y) = (rounded(device, &left, dtype), rounded(device, &right, dtype));
            let rows = |values: &[f32]| shaped(device, values, [2, 617]);
            let mut sums = empty(device, [2], DType::F32);
            let (x, y) = (rows(&wide(device, &x)), rows(&wide(device, &y)));
            device.zip_sum_rows(x.view(), y.view(), sums.view_mut(), 1, |x, y| x * y);
            [device.read(sums.view()).unwrap()]
        });
        // Expected values are computed from inputs rounded to the dtype.
        let device = &Device::cpu(DeviceOptions::default()).unwrap();
        let of = |values: &[f32]| wide(device, &rounded(device, values, dtype));
        let pairs = || of(&left).into_iter().map(f64::from).zip(of(&right).into_iter().map(f64::from));
        let bound = 2.02 * rounding(dtype);
        assert_near(&mapped, pairs().map(|(x, _)| 2.0 * x + 1.0), bound, "map");
        assert_near(&zipped, pairs().map(|(x, y)| x * y), bound, "zip");
        assert_near(&changed, pairs().map(|(x, y)| x - y), bound, "zip_in_place");
        assert_near(&added, pairs().map(|(x, y)| x + y), bound, "add_assign");
        let products: Vec<f64> = pairs().map(|(x, y)| x * y).collect();
        assert_near(&sums, products.chunks(617).map(|row| row.iter().sum()), 1e-4, "zip_sum_rows");
    }
}

/// Each operation of expressions, and conditions that a NaN does not fulfil.
#[test]
fn expressions_compute_their_functions() {
    let x = [-3.0_f32, -0.5, 0.0, 1e-4, 0.75, 2.0, 20.0, f32::NAN];
    type Pair = (for<'f> fn(Expr<'f>) -> Expr<'f>, fn(f64) -> f64);
    let functions: [Pair; 12] = [
        (|x| -x, |x| -x),
        (|x| x.exp(), f64::exp),
        (|x| (x * x).ln(), |x| (x * x).ln()),
        (|x| (x * x).ln_1p(), |x| (x * x).ln_1p()),
        (|x| (x * x).sqrt(), f64::abs),
        (|x| x.sigmoid(), |x| 1.0 / (1.0 + (-x).exp())),
        (|x| x.tanh(), f64::tanh),
        (|x| x.abs(), f64::abs),
        (|x| (1.0 - x) / (x - 0.25), |x| (1.0 - x) / (x - 0.25)),
        (|x| x.if_less(0.5, 2.0 * x, 7.0), |x| if x < 0.5 { 2.0 * x } else { 7.0 }),
        (|x| Expr::from(1.0).if_less(2.0, x + 3.0, 0.0), |x| x + 3.0),
        (|_| Expr::from(4.0).sqrt() * 3.0, |_| 6.0),
    ];
    for (index, (function, expected)) in functions.into_iter().enumerate() {
        let [found] = on_all_near(2e-6, |device| {
            let (x, mut y) = (tensor(device, &x), empty(device, [8], DType::F32));
            device.map(x.view(), y.view_mut(), 1, function);
            // NaN would not be near itself.
            device.map_in_place(y.view_mut(), 1, |y| (y - y).if_less(1.0, y, -99.0));
            [device.read(y.view()).unwrap()]
        });
        let expected = x.map(f64::from).map(expected);
        let expected = expected.map(|y| if y.is_finite() { y } else { -99.0 });
        assert_near(&found, expected, 2e-6, &format!("function {index}"));
    }
}

/// Rows that are shorter and longer than blocks of elements, and inputs that repeat along rows or columns.
#[test]
fn functions_of_rows_reduce_their_elements() {
    for [rows, cols] in [[5, 3], [3, 700], [700, 1]] {
        let [x, columns, weights] =
            [("x", rows * cols), ("columns", cols), ("weights", rows)].map(|(name, len)| random(len, name));
        for has_weights in [false, true] {
            let [softmax, sums] = on_all_near(1e-5, |device| {
                let (mut x, columns) = (shaped(device, &x, [rows, cols]), tensor(device, &columns));
                let weights = tensor(device, &weights);
                let [mut softmax, mut sums] =
                    [[rows, cols], [rows, 1]].map(|shape| empty(device, shape, DType::F32));
                let weights = RowInput::Rows(has_weights.then(|| weights.view()));
                let inputs = [RowInput::Elements(x.view()), weights];
                device.map_rows(inputs, softmax.view_mut(), 9, |[x, weight]| {
                    let exp = (x - x.row_max()).exp();
                    weight * exp / exp.row_sum()
                });
                let inputs = [RowInput::Elements(x.view()), RowInput::Columns(columns.view()), weights];
                device.map_rows(inputs, sums.view_mut(), 3, |[x, column, weight]| {
                    (x * column * weight).row_sum() + 1.0
                });
                // In place, from the earlier content.
                device.map_in_place(x.view_mut(), 9, |x| {
                    let exp = (x - x.row_max()).exp();
                    exp / exp.row_sum()
                });
                if !has_weights {
                    assert_near(
                        &device.read::<f32>(x.view()).unwrap(),
                        device.read::<f32>(softmax.view()).unwrap().into_iter().map(f64::from),
                        1e-6,
                        "in place",
                    );
                }
                [device.read(softmax.view()).unwrap(), device.read(sums.view()).unwrap()]
            });
            let of = |row: usize| x[row * cols..(row + 1) * cols].iter().map(|&x| f64::from(x));
            let weight = |row: usize| if has_weights { f64::from(weights[row]) } else { 1.0 };
            let expected = (0..rows).flat_map(|row| {
                let total: f64 = of(row).map(f64::exp).sum();
                of(row).map(move |x| weight(row) * x.exp() / total)
            });
            assert_near(&softmax, expected, 1e-5, "softmax");
            let product = |row| of(row).zip(&columns).map(|(x, &column)| x * f64::from(column)).sum::<f64>();
            assert_near(&sums, (0..rows).map(|row| weight(row) * product(row) + 1.0), 1e-5, "sum");
        }
    }
}

#[test]
fn for_each_row_passes_the_row_index() {
    let x = random(60, "x");
    let run = |device: &Device| {
        assert!(device.read::<f32>(empty(device, [0], DType::F32).view()).unwrap().is_empty());
        let (x, mut y) = (shaped(device, &x, [12, 5]), empty(device, [12, 5], DType::F32));
        device.for_each_row([x.view()], y.view_mut(), 1, |[x], row, y| {
            y.iter_mut().zip(&x[row * 5..]).for_each(|(y, x)| *y = x + row as f32);
        })?;
        Ok::<_, DeviceError>(device.read::<f32>(y.view()).unwrap())
    };
    let found = on_processors(&|device: &Device| run(device).unwrap());
    if let Some(options) = gpu_options() {
        let refused = run(&Device::open(options).unwrap()).unwrap_err().to_string();
        let name = "conformance::copies::for_each_row_passes_the_row_index";
        assert!(
            refused.starts_with(&format!("the Rust function in {name} cannot run on a GPU")),
            "{refused}"
        );
    }
    let expected = x.iter().enumerate().map(|(index, x)| f64::from(*x) + (index / 5) as f64);
    assert_near(&found, expected, 1e-6, "element");
}

/// A thread that waits for one device makes other devices run the jobs that it depends on.
#[test]
fn a_device_waits_for_the_copies_of_another() {
    let values = random(300, "x");
    for from in super::device_options() {
        for to in super::device_options() {
            let (from, to) = (Device::open(from).unwrap(), Device::open(to).unwrap());
            let x = shaped(&from, &values, [300]);
            let mut y = empty(&to, [300], DType::F32);
            let mut host = Pending::new(vec![0_u8; 4 * 300]);
            from.download_async(x.view(), &mut host, 0);
            to.upload_async(&mut host, 0, y.view_mut());
            to.wait_for(&host.event());
            assert_eq!(to.read::<f32>(y.view()).unwrap(), values);
        }
    }
}

#[test]
fn failures_reach_devices_that_wait() {
    let open = |seed| {
        let backend = BackendKind::Detached(DetachedOptions { seed, ignored_wait: None });
        Device::open(DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() }).unwrap()
    };
    for seed in 0..8 {
        let (from, to) = (open(seed), open(seed + 8));
        let mut x = shaped(&from, &[1.0], [1]);
        from.for_each_row([], x.view_mut(), 1, |[], _, _| panic!("a kernel fails")).unwrap();
        let mut host = Pending::new(vec![0_u8; 4]);
        from.download_async(x.view(), &mut host, 0);
        if seed % 2 == 0 {
            // The event fails before the other device waits for it.
            host.event().demand();
            while !host.event().is_done() {
                std::thread::yield_now();
            }
        }
        to.wait_for(&host.event());
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| to.synchronize()));
        assert_eq!(failed.unwrap_err().downcast_ref::<String>().unwrap(), "a kernel fails");
    }
}

#[test]
fn races_with_copies_are_detected() {
    let host_memory = |bytes: usize| Arc::new(Mutex::new(Some(vec![0_u8; bytes])));
    let works: [fn(&Device, &mut Tensor); 3] = [
        |device, x| device.zero(x.view_mut()),
        |device, x| device.upload(&[1.0_f32; 100], x.view_mut()),
        |device, x| device.download(x.view(), &mut [0.0_f32; 100]).unwrap(),
    ];
    for (work, is_awaited) in works.iter().flat_map(|work| [(work, true), (work, false)]) {
        for seed in 0..4 {
            let backend = BackendKind::Detached(DetachedOptions { seed, ignored_wait: None });
            let options = DeviceOptions { num_threads: 1, backend, ..DeviceOptions::default() };
            let device = Device::open(options).unwrap();
            let [mut x, mut other] = ["x", "other"].map(|name| tensor(&device, &random(100, name)));
            // The copy cannot run before `held` completes. `held` completes before the kernel is issued if `is_awaited`, otherwise after.
            let held = EventCompleter::new(|| ());
            let mut host = Pending::until(held.event(), host_memory(400));
            let run = AssertUnwindSafe(|| {
                device.upload_async(&mut host, 0, x.view_mut());
                // Waiting for a copy of other memory does not order the kernel after the first copy.
                let mut copied = Pending::until(Event::DONE, host_memory(400));
                device.download_async(other.view(), &mut copied, 0);
                device.wait_for(&copied.event());
                device.wait_for(&Event::DONE);
                if is_awaited {
                    held.complete(Ok(()));
                    device.wait_for(&host.event());
                }
                work(&device, &mut x);
            });
            assert_eq!(catch_unwind(run).is_ok(), is_awaited);
            held.complete(Ok(()));
            device.zero(other.view_mut());
        }
    }
}

/// The uploads have more bytes than the pinned buffers of a GPU together, and some have more than one of them.
#[test]
fn uploaded_values_may_be_overwritten() {
    let are_right = on_all(|device| {
        let mut tensors = Vec::new();
        for round in 0..9 {
            for len in [1, 20_000, 300_000, 1_500_000] {
                let value = (round * len) as f32;
                let mut values = vec![value; len];
                let mut tensor = empty(device, [len], DType::F32);
                device.upload(&values, tensor.view_mut());
                values.fill(f32::NAN);
                tensors.push((tensor, value));
            }
        }
        tensors
            .iter()
            .all(|(tensor, value)| device.read(tensor.view()).unwrap().iter().all(|read: &f32| read == value))
    });
    assert!(are_right);
}
