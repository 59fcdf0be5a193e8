//! Devices that count, in a process of their own: each takes as many addresses as it can have.

use trireme_base::DType;
use trireme_tensor::{Category, Device, DeviceOptions};

#[test]
fn many_devices_count_at_once() {
    // Four that took what the first one takes would have all addresses of the process.
    let devices: Vec<Device> = (0..12).map(|_| Device::counting(DeviceOptions::default()).unwrap()).collect();
    for device in &devices {
        let tensor = device.empty([1 << 30].into(), DType::F32, Category::Activations).unwrap();
        assert_eq!(device.memory().total().current, tensor.num_bytes());
    }
}
