//! Images that are drawn when they are read.

use trireme::base::{DType, Random, RandomKey};
use trireme::model::TensorSpec;
use trireme::train::TrainError;
use trireme::{Dataset, Sample};

/// Side of an image in pixels.
pub(crate) const SIZE: usize = 12;

/// Number of classes: a square, a disc, a cross, and a frame.
pub(crate) const CLASSES: usize = 4;

/// Gray images with noise, each of one shape at a random place, of random size and brightness. The label is the shape.
pub(crate) struct Images {
    pub(crate) num_samples: u64,
    pub(crate) seed: u64,
    /// Name of the dataset. Datasets with different names have different images.
    pub(crate) name: &'static str,
}

impl Dataset for Images {
    fn sample(&self) -> Vec<TensorSpec> {
        vec![
            TensorSpec::new("image", &[SIZE * SIZE, 1], DType::F32),
            TensorSpec::new("label", &[], DType::U32),
        ]
    }

    fn num_samples(&self) -> u64 {
        self.num_samples
    }

    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError> {
        let key = RandomKey::new(self.seed, self.name).derived(index % self.num_samples);
        let mut random = Random::new(key, 0);
        let label = random.below(CLASSES as u64);
        let radius = 2.0 + 2.0 * random.next_f64();
        let mut coordinate = || radius + random.next_f64() * (SIZE as f64 - 1.0 - 2.0 * radius);
        let center = (coordinate(), coordinate());
        let brightness = 0.5 + 0.5 * random.next_f64() as f32;
        let image = sample.f32s("image");
        key.derived(1).fill_normal(image, 0.1);
        for (pixel, value) in image.iter_mut().enumerate() {
            let row = ((pixel / SIZE) as f64 - center.0).abs();
            let col = ((pixel % SIZE) as f64 - center.1).abs();
            let is_drawn = match label {
                0 => row.max(col) <= radius,
                1 => row.hypot(col) <= radius,
                2 => row.max(col) <= radius && row.min(col) < 1.0,
                _ => row.max(col) <= radius && row.max(col) > radius - 1.0,
            };
            if is_drawn {
                *value += brightness;
            }
        }
        sample.u32s("label")[0] = label as u32;
        Ok(())
    }
}
