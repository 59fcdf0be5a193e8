//! What passes between the host and the memory of a device.

use super::Device;
use crate::tensor::{View, ViewMut};
use bytemuck::{Pod, Zeroable};
use trireme_base::Cost;

impl Device {
    /// Copies values of the host into memory of the device: those of the element type, or the bytes of any.
    ///
    /// # Panics
    /// If they have not as many bytes.
    pub fn upload<T: Pod>(&self, values: &[T], mut to: ViewMut<'_>) {
        let num_bytes = size_of_val(values);
        assert_eq!(num_bytes, to.num_bytes(), "{num_bytes} bytes for {:?}", to.shape());
        self.count("upload", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        if !self.is_counting() {
            to.bytes_mut().copy_from_slice(bytemuck::cast_slice(values));
        }
    }

    /// Copies memory of the device into `to`, memory of the host: elements, or the bytes of any type.
    ///
    /// # Panics
    /// If it has not as many bytes.
    pub fn download<T: Pod>(&self, from: View<'_>, to: &mut [T]) {
        let num_bytes = size_of_val(to);
        assert_eq!(num_bytes, from.num_bytes(), "{num_bytes} bytes of {:?}", from.shape());
        self.count("download", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        if !self.is_counting() {
            bytemuck::cast_slice_mut(to).copy_from_slice(from.bytes());
        }
    }

    /// Lets `write` make values of zeros on the host, and uploads them.
    ///
    /// # Errors
    /// Those of `write`; nothing is uploaded then.
    ///
    /// # Panics
    /// If the elements of `to` are of another size.
    pub fn fill<T: Pod + Zeroable, E>(
        &self,
        to: ViewMut<'_>,
        write: impl FnOnce(&mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut values = vec![T::zeroed(); to.shape().num_elements()];
        write(&mut values)?;
        self.upload(&values, to);
        Ok(())
    }

    /// The elements of `from` in memory of the host; zeros if the device only counts.
    ///
    /// # Panics
    /// If the elements are of another size.
    pub fn read<T: Pod + Zeroable>(&self, from: View<'_>) -> Vec<T> {
        let mut values = vec![T::zeroed(); from.shape().num_elements()];
        self.download(from, &mut values);
        values
    }
}
