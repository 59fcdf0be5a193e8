//! Sums that stay on the device.

use super::{empty, on_all, random, tensor};
use trireme_base::{Category, DType};
use trireme_tensor::ExactSum;

#[test]
fn sums_are_exact_to_the_rounding_of_their_terms() {
    let values = random(4321, "x");
    let [squares, mean] = on_all(|device| {
        let x = tensor(device, &values);
        let mut squares = device.zeros([ExactSum::LEN].into(), DType::F64, Category::Activations).unwrap();
        let mut mean = empty(device, [1], DType::F64);
        let half = x.view().part(0, [2000].into());
        let rest = x.view().part(2000, [2321].into());
        [half, rest].into_iter().for_each(|part| device.add_squares(part, squares.view_mut()));
        device.sum_elements(x.view(), 4321.0, mean.view_mut());
        let mut sum = ExactSum::default();
        sum.add(&device.read::<f64>(squares.view()).unwrap());
        [sum.value(), device.read::<f64>(mean.view()).unwrap()[0]]
    });
    let wide = || values.iter().map(|&x| f64::from(x));
    let expected: f64 = wide().map(|x| x * x).sum();
    assert!((squares - expected).abs() < 1e-6 * expected, "{squares} {expected}");
    // The sum of f32 terms in f64 has no visible rounding error here.
    assert_eq!(mean, wide().sum::<f64>() / 4321.0);
}
