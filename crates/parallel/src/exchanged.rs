//! Vectors that kernels work with and ranks exchange.

use crate::error::ParallelError;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::fmt;
use std::ops::Range;
use trireme_base::Held;
use trireme_comm::{Buffer, FusedWork, Group};
use trireme_tensor::{Category, Device, Tensor, View, ViewMut};

/// A vector that kernels work with and ranks exchange.
///
/// Where kernels reach the host's memory, it lies in memory of the group, and nothing is copied. Elsewhere it lies on the device, and
/// passes through memory of the group, to which and from which it is copied beside the kernels.
pub(crate) struct Exchanged<T> {
    /// The group's memory; none if the vector lies on the device and has nowhere to go.
    buffer: Held<Buffer<T>>,
    /// The device's memory, where the group's is not.
    own: Option<Tensor>,
}

/// What of a vector stays on the device while the rest is exchanged, and which elements come back.
pub(crate) struct Stay {
    own: Option<Tensor>,
    arriving: Range<usize>,
}

impl Stay {
    pub(crate) fn new(own: Option<Tensor>, arriving: Range<usize>) -> Self {
        Stay { own, arriving }
    }
}

/// A vector that is being exchanged.
pub(crate) struct UnderWay<T> {
    work: FusedWork<T>,
    stay: Stay,
}

/// A vector that was exchanged, and of which kernels have not seen what has come.
pub(crate) struct PassedOn<T> {
    buffer: Buffer<T>,
    own: Option<Tensor>,
}

impl<T> PassedOn<T> {
    /// Hands it to another group, which only reads it.
    pub(crate) fn pass_on(self) -> (Buffer<T>, Stay) {
        (self.buffer, Stay { own: self.own, arriving: 0..0 })
    }
}

impl<T: Stored> Exchanged<T> {
    pub(crate) fn new(buffer: Held<Buffer<T>>, own: Option<Tensor>) -> Self {
        Exchanged { buffer, own }
    }

    /// A vector that the host reads after each exchange.
    pub(crate) fn for_host(group: &Group, device: &Device, len: usize) -> Result<Self, ParallelError> {
        let is_apart = !device.reaches_host();
        let own =
            is_apart.then(|| device.zeros([len].into(), T::DTYPE, Category::Communication)).transpose()?;
        Ok(Exchanged { buffer: Held::new(group.buffer(len)?), own })
    }

    /// The group's memory; that of the device is given back.
    pub(crate) fn into_buffer(self) -> Held<Buffer<T>> {
        self.buffer
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match &self.own {
            Some(own) => own.shape().num_elements(),
            None => self.settled().len(),
        }
    }

    fn settled(&self) -> &Buffer<T> {
        self.buffer.get().expect("memory that kernels reach is not lent to copies")
    }

    /// All elements, for kernels.
    pub(crate) fn view(&self) -> View<'_> {
        match &self.own {
            Some(own) => own.view(),
            None => T::view(self.settled()),
        }
    }

    /// As [`view`](Exchanged::view), to write.
    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        match &mut self.own {
            Some(own) => own.view_mut(),
            None => {
                T::view_mut(self.buffer.get_mut().expect("memory that kernels reach is not lent to copies"))
            }
        }
    }

    /// Some elements, for kernels.
    pub(crate) fn part(&self, range: Range<usize>) -> View<'_> {
        self.view().part(range.start, [range.len()].into())
    }

    /// As [`part`](Exchanged::part), to write.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        self.view_mut().into_part(range.start, [range.len()].into())
    }

    /// Hands the vector to a group, which reads `leaving` after the kernels that were issued so far; `arriving` is what comes back.
    pub(crate) fn leave(
        self,
        device: &Device,
        leaving: Range<usize>,
        arriving: Range<usize>,
    ) -> (Buffer<T>, Stay) {
        let Exchanged { buffer, own } = self;
        let Some(own) = own else {
            return (buffer.wait(), Stay { own: None, arriving });
        };
        let has_buffer = buffer.get().is_none_or(|buffer| !buffer.is_empty());
        let len = if has_buffer { own.shape().num_elements() } else { 0 };
        let buffer = match has_buffer && !leaving.is_empty() {
            true => {
                let part = own.view().part(leaving.start, [leaving.len()].into());
                device.download_later(part, buffer, leaving.start * size_of::<T>())
            }
            false => buffer,
        };
        (Buffer::lent(buffer, len), Stay { own: Some(own), arriving })
    }

    /// Takes the vector back from a group. Kernels that are issued from now on read what has come.
    #[track_caller]
    pub(crate) fn arrive(mut buffer: Buffer<T>, stay: Stay, device: &Device) -> Self {
        let Stay { own, arriving } = stay;
        let Some(mut own) = own else { return Exchanged { buffer: Held::new(buffer), own: None } };
        buffer.settle();
        if buffer.is_empty() || arriving.is_empty() {
            return Exchanged { buffer: Held::new(buffer), own: Some(own) };
        }
        let part = own.view_mut().into_part(arriving.start, [arriving.len()].into());
        let buffer = device.upload_later(Held::new(buffer), arriving.start * size_of::<T>(), part);
        device.wait_for(&buffer.until());
        Exchanged { buffer, own: Some(own) }
    }

    /// Lets a group exchange the vector.
    pub(crate) fn exchange<W: Into<FusedWork<T>>>(
        self,
        device: &Device,
        leaving: Range<usize>,
        arriving: Range<usize>,
        start: impl FnOnce(Buffer<T>) -> W,
    ) -> UnderWay<T> {
        let (buffer, stay) = self.leave(device, leaving, arriving);
        UnderWay { work: start(buffer).into(), stay }
    }

    /// The elements on the host, after the kernels that were issued so far.
    pub(crate) fn on_host(&mut self, device: &Device) -> &mut [T] {
        let buffer = std::mem::replace(&mut self.buffer, Held::new(Buffer::empty()));
        let mut buffer = buffer.wait();
        if let Some(own) = &self.own {
            device.download(own.view(), &mut buffer);
        }
        self.buffer = Held::new(buffer);
        self.buffer.get_mut().expect("it was waited for")
    }

    /// The elements on the host, where [`on_host`](Exchanged::on_host) has brought them.
    pub(crate) fn host_mut(&mut self) -> &mut [T] {
        self.buffer.get_mut().expect("it is on the host")
    }

    /// Brings what the host has changed of [`on_host`](Exchanged::on_host) to the device.
    pub(crate) fn off_host(&mut self, device: &Device) {
        if let Some(own) = &mut self.own {
            device.upload(self.buffer.get().expect("it is on the host"), own.view_mut());
        }
    }
}

impl<T: Stored> UnderWay<T> {
    /// Waits for the exchange of a vector that is passed on to another group, not to kernels.
    pub(crate) fn wait_on_host(self, waiting: &mut Waiting) -> Result<PassedOn<T>, ParallelError> {
        let mut buffer = waiting.wait_fused(self.work)?;
        buffer.settle();
        Ok(PassedOn { buffer, own: self.stay.own })
    }

    /// Waits for the exchange, and takes the vector back.
    #[track_caller]
    pub(crate) fn wait(self, device: &Device, waiting: &mut Waiting) -> Result<Exchanged<T>, ParallelError> {
        let buffer = waiting.wait_fused(self.work)?;
        Ok(Exchanged::arrive(buffer, self.stay, device))
    }
}

impl<T> fmt::Debug for Exchanged<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.own.is_some() {
            "Exchanged(on the device)"
        } else {
            "Exchanged(in the group's memory)"
        })
    }
}
