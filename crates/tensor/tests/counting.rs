//! Many counting devices in one process. A separate test binary, because each device reserves much address space.

use trireme_base::DType;
use trireme_tensor::{Category, Device, DeviceOptions};

#[test]
fn many_devices_count_at_once() {
    // The first device may map 32 TiB of addresses. Four such mappings would exhaust the address space, so later ones must be smaller.
    let devices: Vec<Device> = (0..12).map(|_| Device::counting(DeviceOptions::default()).unwrap()).collect();
    for device in &devices {
        let tensor = device.empty([1 << 30].into(), DType::F32, Category::Activations).unwrap();
        assert_eq!(device.memory().total().current, tensor.num_bytes());
    }
}
