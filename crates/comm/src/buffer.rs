use crate::element::has_element;
use crate::transport::shm::Region;
use crate::{BufferElement, CommError, Element, Untyped};
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use trireme_base::{DType, DeviceMemory, DeviceSpan, Event, HostMemory, Pending};

/// A vector that a group can communicate, in 64-byte-aligned memory. An operation takes the buffer, and its [`Work`](crate::Work) returns
/// it.
///
/// [`Group::buffer`](crate::Group::buffer) allocates it in the memory that suits the group's transport, [`Buffer::private`] on the heap.
/// Every group accepts a private buffer, but copies it if its ranks share memory.
pub struct Buffer<T> {
    pub(crate) storage: Storage,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Allocates a zeroed vector of `len` elements in this process's own memory.
    ///
    /// # Errors
    /// [`CommError::Allocate`] if there is not enough memory.
    pub fn private(len: usize) -> Result<Self, CommError> {
        Ok(Buffer::from_storage(Storage::heap(T::DTYPE, len)?))
    }
}

impl Buffer<Untyped> {
    /// Like [`private`](Buffer::private), with a `dtype` known at run time.
    ///
    /// # Errors
    /// As [`private`](Buffer::private).
    ///
    /// # Panics
    /// If `dtype` has no [`Element`].
    pub fn private_of(dtype: DType, len: usize) -> Result<Self, CommError> {
        assert!(has_element(dtype), "groups do not send {dtype}");
        Ok(Buffer::from_storage(Storage::heap(dtype, len)?))
    }

    /// The elements, which must have type `T`.
    ///
    /// # Panics
    /// If the vector has elements of another type.
    pub fn elements<T: Element>(&self) -> &[T] {
        assert_eq!(self.dtype(), T::DTYPE, "the type of the elements");
        bytemuck::cast_slice(self.storage.bytes())
    }

    /// The elements, mutably. Waits until no device uses the vector.
    ///
    /// # Panics
    /// As [`elements`](Buffer::elements).
    pub fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype(), T::DTYPE, "the type of the elements");
        bytemuck::cast_slice_mut(self.storage.bytes_mut())
    }
}

impl<T: BufferElement> Buffer<T> {
    /// Creates a vector of `len` elements of `dtype` from memory that a device may still use. A group accesses it only after the device's
    /// event.
    ///
    /// # Panics
    /// If the memory has another dtype or fewer elements. If a device still uses it, the check is made when the vector is waited for.
    pub fn pending(buffer: Pending<Buffer<T>>, dtype: DType, len: usize) -> Self {
        match buffer.try_take() {
            Ok(buffer) => {
                buffer.storage.check(dtype, len * dtype.size());
                buffer
            }
            Err(buffer) => {
                let event = buffer.event();
                let memory = PendingMemory { event, wait: Box::new(move || buffer.wait().storage) };
                Buffer::from_storage(Storage::new(Memory::Pending(memory), dtype, len * dtype.size()))
            }
        }
    }

    /// Creates a vector of `len` elements of `dtype` in memory of a device, for a group with a [device
    /// transport](crate::Group::set_device_transport).
    /// The caller must not access it during an operation.
    ///
    /// # Panics
    /// If the memory has another size, or if `dtype` has no [`Element`].
    pub fn on_device(memory: Arc<dyn DeviceMemory>, dtype: DType, len: usize) -> Self {
        assert!(has_element(dtype), "groups do not send {dtype}");
        let num_bytes = len * dtype.size();
        assert_eq!(memory.num_bytes(), num_bytes, "{len} elements of {dtype}");
        Buffer::from_storage(Storage::new(Memory::Device(memory, Event::DONE), dtype, num_bytes))
    }

    /// Makes the group wait for an event of the device before it accesses a vector [on a device](Buffer::on_device). Other vectors do not
    /// change.
    pub fn after(mut self, ready: Event) -> Self {
        if let Memory::Device(_, event) = &mut self.storage.memory {
            *event = ready;
        }
        self
    }

    /// Turns the vector into memory for device copies. Blocks until no device uses it.
    ///
    /// # Errors
    /// [`CommError::DeviceFailed`] if the device has failed.
    pub fn into_memory(mut self) -> Result<Pending<Buffer<T>>, CommError> {
        self.wait()?;
        Ok(Pending::new(self))
    }

    /// The memory, if it is [of a device](Buffer::on_device).
    pub fn device_memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        self.storage.device_span().map(|span| span.memory)
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.storage.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.storage.num_bytes() / self.dtype().size()
    }

    /// Whether the vector has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks until no device uses the vector. Call it before a [pending](Buffer::pending) vector is read. Methods that write to the vector
    /// wait automatically, and panic if the device has failed.
    ///
    /// # Errors
    /// [`CommError::DeviceFailed`] if the device has failed.
    pub fn wait(&mut self) -> Result<(), CommError> {
        self.storage.wait()
    }

    pub(crate) fn from_storage(storage: Storage) -> Self {
        Buffer { storage, element: PhantomData }
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(self.storage.bytes())
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.storage.bytes_mut())
    }
}

impl<T: BufferElement> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} x {})", self.dtype(), self.len())
    }
}

impl<T: BufferElement> HostMemory for Buffer<T> {
    fn bytes(&self) -> &[u8] {
        self.storage.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // A device calls this while it copies. Waiting for the event here could block the device that must complete it.
        assert!(self.storage.event().is_done(), "a copy runs when no other works with its memory");
        self.storage.bytes_mut()
    }
}

const ON_DEVICE: &str = "the host cannot access memory of a device";

/// The untyped memory of a [`Buffer`].
pub(crate) struct Storage {
    pub(crate) memory: Memory,
    dtype: DType,
    num_bytes: usize,
    /// Length in bytes before the storage was [shortened](Storage::shorten).
    full_bytes: usize,
}

pub(crate) enum Memory {
    Heap(Vec<CacheLine>),
    Shared(Region),
    /// A device may still use the memory.
    Pending(PendingMemory),
    /// Memory of a device, which the group may access after the event.
    Device(Arc<dyn DeviceMemory>, Event),
}

/// Memory that becomes available at a device event.
pub(crate) struct PendingMemory {
    event: Event,
    wait: Box<dyn FnOnce() -> Storage + Send + Sync>,
}

/// The unit and alignment of heap memory.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct CacheLine([u8; 64]);

impl CacheLine {
    /// Zeroed lines that hold at least `num_bytes`.
    pub(crate) fn zeroed(num_bytes: usize) -> Result<Vec<CacheLine>, CommError> {
        bytemuck::allocation::try_zeroed_vec(num_bytes.div_ceil(size_of::<CacheLine>())).map_err(|()| {
            CommError::Allocate {
                bytes: num_bytes,
                source: Arc::new(io::Error::from(io::ErrorKind::OutOfMemory)),
            }
        })
    }
}

impl Storage {
    pub(crate) fn heap(dtype: DType, len: usize) -> Result<Self, CommError> {
        let num_bytes = len.saturating_mul(dtype.size());
        Ok(Storage::new(Memory::Heap(CacheLine::zeroed(num_bytes)?), dtype, num_bytes))
    }

    pub(crate) fn new(memory: Memory, dtype: DType, num_bytes: usize) -> Self {
        Storage { memory, dtype, num_bytes, full_bytes: num_bytes }
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Whether the vector is in memory of a device.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self.memory, Memory::Device(..))
    }

    /// The vector, if it is in memory of a device.
    pub(crate) fn device_span(&self) -> Option<DeviceSpan> {
        let Memory::Device(memory, _) = &self.memory else { return None };
        Some(DeviceSpan::all(memory).part(0..self.num_bytes))
    }

    /// The event after which no device uses the memory.
    pub(crate) fn event(&self) -> Event {
        match &self.memory {
            Memory::Pending(pending) => pending.event.clone(),
            Memory::Device(_, ready) => ready.clone(),
            Memory::Heap(_) | Memory::Shared(_) => Event::DONE,
        }
    }

    /// Blocks until no device uses the memory.
    ///
    /// # Errors
    /// If the device has failed. The memory is lost.
    pub(crate) fn wait(&mut self) -> Result<(), CommError> {
        self.event().outcome().map_err(|cause| CommError::DeviceFailed { cause })?;
        self.memory = match std::mem::replace(&mut self.memory, Memory::Heap(Vec::new())) {
            Memory::Pending(pending) => {
                let ready = (pending.wait)();
                ready.check(self.dtype, self.num_bytes.max(self.full_bytes));
                ready.memory
            }
            Memory::Device(memory, _) => Memory::Device(memory, Event::DONE),
            memory => memory,
        };
        Ok(())
    }

    fn wait_or_panic(&mut self) {
        self.wait().unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Panics unless the storage has elements of `dtype` and at least `num_bytes` bytes.
    fn check(&self, dtype: DType, num_bytes: usize) {
        let capacity = self.num_bytes.max(self.full_bytes);
        assert_eq!(self.dtype, dtype, "the type of the elements");
        assert!(num_bytes <= capacity, "{num_bytes} bytes of {capacity}");
    }

    /// The address of the first byte. A raw pointer rather than a reference, because peers may access the bytes while it exists.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.wait_or_panic();
        match &mut self.memory {
            Memory::Pending(_) => unreachable!("it was waited for"),
            Memory::Heap(lines) => lines.as_mut_ptr().cast(),
            Memory::Shared(region) => region.as_mut_ptr(),
            Memory::Device(..) => panic!("{ON_DEVICE}"),
        }
    }

    /// Shortens the storage until it is [lengthened](Storage::lengthen). A device may still use it.
    pub(crate) fn shorten(&mut self, num_bytes: usize) {
        assert!(num_bytes <= self.num_bytes, "{num_bytes} of {} bytes", self.num_bytes);
        (self.num_bytes, self.full_bytes) = (num_bytes, self.num_bytes);
    }

    /// Restores the length from before [`shorten`](Storage::shorten), if the storage was shortened.
    pub(crate) fn lengthen(&mut self) {
        self.num_bytes = self.num_bytes.max(self.full_bytes);
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let all = match &self.memory {
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            Memory::Shared(region) => region.bytes(),
            Memory::Pending(_) => panic!("who reads a vector waits for it"),
            Memory::Device(..) => panic!("{ON_DEVICE}"),
        };
        &all[..self.num_bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.wait_or_panic();
        let all = match &mut self.memory {
            Memory::Pending(_) => unreachable!("it was waited for"),
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Memory::Shared(region) => region.bytes_mut(),
            Memory::Device(..) => panic!("{ON_DEVICE}"),
        };
        &mut all[..self.num_bytes]
    }
}
