//! Messages of quantized integers.

use super::{FLOATS, assert_near, empty, on_all, random, rounding, tensor, wide};
use trireme_base::DType;
use trireme_tensor::IntegerFormat;

#[test]
fn dequantized_values_are_within_half_a_step() {
    for (format, levels) in [(IntegerFormat::Int8, 127.0), (IntegerFormat::Int4, 7.0)] {
        let values = random(1000, "x");
        let largest = values.iter().fold(0.0_f64, |most, &x| most.max(f64::from(x).abs()));
        for dtype in FLOATS {
            let [found, added] = on_all(|device| {
                let x = tensor(device, &values);
                // Messages of several ranks follow each other, whatever their lengths.
                let mut messages = empty(device, [3 + format.num_bytes(1000)], DType::U8);
                let shape = [format.num_bytes(1000)].into();
                device.quantize(x.view(), format, messages.view_mut().into_part(3, shape));
                let message = messages.view().part(3, shape);
                let mut y = empty(device, [1000], dtype);
                device.dequantize(message, format, y.view_mut());
                let mut sum = tensor(device, &values);
                device.add_dequantized(message, format, sum.view_mut());
                [wide(device, &y), device.read(sum.view()).unwrap()]
            });
            let bound = 0.51 * largest / levels + 2.0 * rounding(dtype) * largest;
            assert_near(&found, values.iter().map(|&x| f64::from(x)), bound, "value");
            let bound = 0.51 * largest / levels + 1e-6;
            assert_near(&added, values.iter().map(|&x| 2.0 * f64::from(x)), bound, "sum");
        }
    }
}
