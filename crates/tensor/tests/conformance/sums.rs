//! Sums that stay on the device.

use super::{empty, on_all, random, tensor};
use trireme_base::DType;

#[test]
fn sums_are_exact_to_the_rounding_of_their_terms() {
    let values = random(4321, "x");
    let [squares, mean] = on_all(|device| {
        let x = tensor(device, &values);
        let mut sums = empty(device, [2], DType::F64);
        device.sum_of_squares(x.view(), 0, 100, sums.view_mut().into_part(0, [1].into()));
        device.sum_elements(x.view(), 4321.0, sums.view_mut().into_part(1, [1].into()));
        let sums: Vec<f64> = device.read(sums.view());
        [sums[0], sums[1]]
    });
    let wide = || values.iter().map(|&x| f64::from(x));
    let expected: f64 = wide().map(|x| x * x).sum();
    assert!((squares - expected).abs() < 1e-6 * expected, "{squares} {expected}");
    // Terms are f32s, which f64 adds with errors that do not show.
    assert_eq!(mean, wide().sum::<f64>() / 4321.0);
}
