use crate::{Buffer, CommError, Group, Outcome, PageSize, Untyped, Work};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use trireme_base::{DType, Pending, ReduceOp};

/// All-reduces many short vectors together in few batches: tensor fusion (Sergeev, Del Balso, "Horovod: fast and easy distributed deep
/// learning in TensorFlow", 2018, section 5).
///
/// A batch is issued when the next vector would exceed `len_max` elements, before a vector that is reduced alone, when one of its vectors
/// is waited for, or by [`flush`](Fusion::flush). Batching does not depend on time, so ranks that issue and wait for the same vectors in
/// the same order form the same batches, and no batch waits for a vector that is never issued. Each element is reduced as it would be
/// alone: under [`keeps_order`](crate::GroupOptions::keeps_order), the bits are the same as without fusion.
///
/// Fusion copies each vector into the batch and back. Vectors longer than half of `len_max`, and vectors on devices, are reduced alone.
/// Repeated use allocates nothing.
#[derive(Clone)]
pub struct Fusion {
    group: Arc<Group>,
    op: ReduceOp,
    len_max: usize,
    state: Arc<Mutex<State>>,
}

struct State {
    open: Arc<Mutex<Batch>>,
    /// Empty batches for reuse: reserved batches, and batches whose owners have all fetched their vectors.
    free: Vec<Arc<Mutex<Batch>>>,
    spare: Vec<Buffer<Untyped>>,
}

struct Batch {
    progress: Progress,
    len: usize,
    /// Number of vectors that their owners have not fetched.
    num_vectors: usize,
}

enum Progress {
    /// The batch accepts vectors. Memory is allocated for the first one.
    Open(Option<Buffer<Untyped>>),
    Issued(Work<Buffer<Untyped>>),
    Ended(Result<Buffer<Untyped>, CommError>),
    /// The state while it is being replaced, and the last state of a failed batch.
    Spent,
}

/// A vector that is being reduced, alone or in a batch. [`wait`](FusedWork::wait) returns it.
#[must_use = "a vector's reduction, or its failure, is seen by waiting for it"]
pub struct FusedWork {
    state: WorkState,
}

enum WorkState {
    Alone(Work<Buffer<Untyped>>),
    Batched { fusion: Fusion, batch: Arc<Mutex<Batch>>, range: Range<usize>, vector: Buffer<Untyped> },
}

impl Fusion {
    /// Creates a fusion of `group`'s all-reduces by `op`, in batches of at most `len_max` elements, all of one dtype.
    pub fn new(group: Arc<Group>, op: ReduceOp, len_max: usize) -> Self {
        let state = State { open: Batch::new(), free: Vec::new(), spare: Vec::new() };
        Fusion { group, op, len_max, state: Arc::new(Mutex::new(state)) }
    }

    /// Allocates the memory of a batch of `dtype`.
    fn memory(&self, dtype: DType) -> Result<Buffer<Untyped>, CommError> {
        self.group.buffer_of(dtype, self.len_max, PageSize::Base)
    }

    /// Preallocates the batches that vectors of `dtype` with these lengths form, in this order. Returns the bytes allocated.
    ///
    /// # Errors
    /// [`CommError::Allocate`] if there is not enough memory.
    pub fn reserve(&self, dtype: DType, lens: impl IntoIterator<Item = usize>) -> Result<usize, CommError> {
        let (mut num_batches, mut len_open) = (0, None);
        for len in lens {
            if !self.fuses(len) {
                len_open = None;
                continue;
            }
            len_open = Some(match len_open {
                Some(open) if open + len <= self.len_max => open + len,
                _ => {
                    num_batches += 1;
                    len
                }
            });
        }
        let mut state = lock(&self.state);
        for _ in 0..num_batches {
            let memory = self.memory(dtype)?;
            state.spare.push(memory);
            state.free.push(Batch::new());
        }
        Ok(num_batches * self.len_max * dtype.size())
    }

    fn fuses(&self, len: usize) -> bool {
        len <= self.len_max / 2 && self.len_max > 0
    }

    /// Replaces each element by the reduction of all ranks' elements. Waits until no device uses a vector that is fused.
    ///
    /// # Errors
    /// From the work: [`CommError::Allocate`] if there is no memory for a batch, and any failure that ends a group.
    ///
    /// # Panics
    /// If a vector that is short enough to be fused has another dtype than the vectors before it.
    pub fn all_reduce(&self, mut vector: Buffer<Untyped>) -> FusedWork {
        if !self.fuses(vector.len()) || vector.storage.is_on_device() {
            self.close(&mut lock(&self.state));
            return self.group.all_reduce(vector, self.op).into();
        }
        // The vector is copied right away.
        if vector.wait().is_err() {
            // The group fails, and with it the open batch, before peers could take a shorter batch for a mismatch.
            return self.group.all_reduce(vector, self.op).into();
        }
        let mut state = lock(&self.state);
        if lock(&state.open).len + vector.len() > self.len_max {
            self.close(&mut state);
        }
        let batch = Arc::clone(&state.open);
        let mut open = lock(&batch);
        let range = open.len..open.len + vector.len();
        if let Err(failure) = self.put(&mut state, &mut open, &vector) {
            return Work::ready(Err(failure)).into();
        }
        drop(open);
        FusedWork { state: WorkState::Batched { fusion: self.clone(), batch, range, vector } }
    }

    /// Issues the open batch. All ranks call it at the same place in their order of operations.
    pub fn flush(&self) {
        self.close(&mut lock(&self.state));
    }

    fn put(&self, state: &mut State, batch: &mut Batch, vector: &Buffer<Untyped>) -> Result<(), CommError> {
        let Progress::Open(memory) = &mut batch.progress else {
            unreachable!("an open batch takes vectors in")
        };
        let memory = match memory {
            Some(memory) => memory,
            None => {
                let spare = state.spare.pop();
                let batch_memory = spare.map_or_else(|| self.memory(vector.dtype()), Ok)?;
                memory.insert(batch_memory)
            }
        };
        assert_eq!(vector.dtype(), memory.dtype(), "the vectors of a fusion have one element type");
        if !self.group.is_dry() {
            let vector = vector.storage.bytes();
            let first = batch.len * memory.dtype().size();
            memory.storage.bytes_mut()[first..first + vector.len()].copy_from_slice(vector);
        }
        batch.len += vector.len();
        batch.num_vectors += 1;
        Ok(())
    }

    /// Issues the open batch unless it is empty.
    fn close(&self, state: &mut State) {
        let mut batch = lock(&state.open);
        let Progress::Open(memory) = &mut batch.progress else { unreachable!("the open batch is open") };
        let Some(mut memory) = memory.take() else { return };
        memory.storage.shorten(batch.len * memory.dtype().size());
        batch.progress = Progress::Issued(self.group.all_reduce(memory, self.op));
        drop(batch);
        state.open = state.free.pop().unwrap_or_else(Batch::new);
    }

    /// Waits for the batch, and copies the reduced elements back to one vector.
    fn finish(
        &self,
        batch: &Arc<Mutex<Batch>>,
        range: Range<usize>,
        mut vector: Buffer<Untyped>,
    ) -> Result<Buffer<Untyped>, CommError> {
        let mut state = lock(&self.state);
        if Arc::ptr_eq(&state.open, batch) {
            self.close(&mut state);
        }
        drop(state);
        let shared = batch;
        let mut batch = lock(shared);
        batch.progress = match std::mem::replace(&mut batch.progress, Progress::Spent) {
            Progress::Issued(work) => Progress::Ended(work.wait()),
            ended => ended,
        };
        let Progress::Ended(result) = &batch.progress else { unreachable!("a batch ends once it is closed") };
        let outcome = match result {
            Ok(memory) => {
                if !self.group.is_dry() {
                    let size = memory.dtype().size();
                    let sums = &memory.storage.bytes()[range.start * size..range.end * size];
                    vector.storage.bytes_mut().copy_from_slice(sums);
                }
                Ok(vector)
            }
            Err(failure) => Err(failure.clone()),
        };
        batch.num_vectors -= 1;
        if batch.num_vectors == 0
            && let Progress::Ended(Ok(mut memory)) = std::mem::replace(&mut batch.progress, Progress::Spent)
        {
            memory.storage.lengthen();
            *batch = Batch::empty();
            drop(batch);
            let mut state = lock(&self.state);
            state.spare.push(memory);
            state.free.push(Arc::clone(shared));
        }
        outcome
    }
}

impl Batch {
    fn new() -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Batch::empty()))
    }

    fn empty() -> Self {
        Batch { progress: Progress::Open(None), len: 0, num_vectors: 0 }
    }
}

impl FusedWork {
    /// Blocks until the vector has been reduced.
    ///
    /// # Errors
    /// As [`Work::wait`].
    pub fn wait(self) -> Result<Buffer<Untyped>, CommError> {
        match self.state {
            WorkState::Alone(work) => work.wait(),
            WorkState::Batched { fusion, batch, range, vector } => fusion.finish(&batch, range, vector),
        }
    }

    /// Like [`Work::into_pending`]. Blocks for a fused vector, because the host copies it out of its batch.
    pub fn into_pending(self, dtype: DType, len: usize) -> (Pending<Buffer<Untyped>>, Outcome) {
        match self.state {
            WorkState::Alone(work) => work.into_pending(dtype, len),
            part @ WorkState::Batched { .. } => {
                Work::ready(FusedWork { state: part }.wait()).into_pending(dtype, len)
            }
        }
    }
}

impl From<Work<Buffer<Untyped>>> for FusedWork {
    fn from(work: Work<Buffer<Untyped>>) -> Self {
        FusedWork { state: WorkState::Alone(work) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it fuses")
}
