use crate::{Buffer, CommError, Group, Outcome, PageSize, Untyped, Work};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use trireme_base::{DType, Pending, ReduceOp};

/// Reduces many short vectors together, as few long ones: tensor fusion (Sergeev, Del Balso, "Horovod: fast and easy
/// distributed deep learning in TensorFlow", 2018, section 5).
///
/// Vectors wait until they are as many elements as `len_max`, until one of them is waited for, or until
/// [`flush`](Fusion::flush). So none waits for what may never come, and when a batch leaves does not depend on time: all
/// ranks that issue and await the same vectors in the same order fuse the same ones. Each element is reduced as it
/// would be alone, so under [`keeps_order`](crate::GroupOptions::keeps_order) the bits are those of single operations.
///
/// Costs a copy of each vector into the batch and one back; longer ones than half of `len_max` go alone. Repeats allocate nothing.
#[derive(Clone)]
pub struct Fusion {
    group: Arc<Group>,
    op: ReduceOp,
    len_max: usize,
    state: Arc<Mutex<State>>,
}

struct State {
    open: Arc<Mutex<Batch>>,
    /// Batches whose vectors their owners have got back.
    free: Vec<Arc<Mutex<Batch>>>,
    spare: Vec<Buffer<Untyped>>,
}

struct Batch {
    memory: Progress,
    len: usize,
    /// Vectors whose owners have not got them back.
    num_vectors: usize,
}

enum Progress {
    /// Vectors are still taken in; there is no memory before the first.
    Open(Option<Buffer<Untyped>>),
    Issued(Work<Buffer<Untyped>>),
    Ended(Result<Buffer<Untyped>, CommError>),
    /// The last owner has taken the memory back.
    Spent,
}

/// A vector that is reduced alone or in a batch; `wait` gives it back.
#[must_use = "a vector's reduction, or its failure, is seen by waiting for it"]
pub struct FusedWork {
    part: Part,
}

enum Part {
    Alone(Work<Buffer<Untyped>>),
    OfBatch { fusion: Fusion, batch: Arc<Mutex<Batch>>, range: Range<usize>, vector: Buffer<Untyped> },
}

impl Fusion {
    /// Reductions of `group` by `op`, in batches of at most `len_max` elements, all of one type.
    pub fn new(group: Arc<Group>, op: ReduceOp, len_max: usize) -> Self {
        let state = State { open: Batch::new(), free: Vec::new(), spare: Vec::new() };
        Fusion { group, op, len_max, state: Arc::new(Mutex::new(state)) }
    }

    /// Memory for a batch of elements of `dtype`.
    fn memory(&self, dtype: DType) -> Result<Buffer<Untyped>, CommError> {
        self.group.buffer_of(dtype, self.len_max, PageSize::Base)
    }

    /// Allocates in advance the batches that vectors of `dtype` and these lengths make, in this order. Returns the bytes.
    ///
    /// # Errors
    /// [`CommError::Allocate`].
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

    /// Replaces each element by the reduction of all ranks' elements.
    ///
    /// # Errors
    /// From the work: [`CommError::Allocate`] if there is no memory for a batch, and whatever ends a group.
    ///
    /// # Panics
    /// If a vector short enough to be fused has another dtype than the vectors before it.
    pub fn all_reduce(&self, mut vector: Buffer<Untyped>) -> FusedWork {
        if !self.fuses(vector.len()) {
            self.close(&mut lock(&self.state));
            return self.group.all_reduce(vector, self.op).into();
        }
        // It is copied here and now.
        vector.wait();
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
        FusedWork { part: Part::OfBatch { fusion: self.clone(), batch, range, vector } }
    }

    /// Issues what waits for more. All ranks call it at the same place in the order of their operations.
    pub fn flush(&self) {
        self.close(&mut lock(&self.state));
    }

    fn put(&self, state: &mut State, batch: &mut Batch, vector: &Buffer<Untyped>) -> Result<(), CommError> {
        let Progress::Open(memory) = &mut batch.memory else {
            unreachable!("an open batch takes vectors in")
        };
        let memory = match memory {
            Some(memory) => memory,
            None => {
                let spare = state.spare.pop();
                let whole = spare.map_or_else(|| self.memory(vector.dtype()), Ok)?;
                memory.insert(whole)
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

    /// Issues the open batch, if anything is in it.
    fn close(&self, state: &mut State) {
        let mut batch = lock(&state.open);
        let Progress::Open(memory) = &mut batch.memory else { unreachable!("the open batch is open") };
        let Some(mut memory) = memory.take() else { return };
        memory.storage.shorten(batch.len * memory.dtype().size());
        batch.memory = Progress::Issued(self.group.all_reduce(memory, self.op));
        drop(batch);
        state.open = state.free.pop().unwrap_or_else(Batch::new);
    }

    /// The part of a batch that belongs to one vector, once the batch has ended.
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
        batch.memory = match std::mem::replace(&mut batch.memory, Progress::Spent) {
            Progress::Issued(work) => Progress::Ended(work.wait()),
            ended => ended,
        };
        let Progress::Ended(result) = &batch.memory else { unreachable!("a batch ends once it is closed") };
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
            && let Progress::Ended(Ok(mut memory)) = std::mem::replace(&mut batch.memory, Progress::Spent)
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
        Batch { memory: Progress::Open(None), len: 0, num_vectors: 0 }
    }
}

impl FusedWork {
    /// Blocks until the vector has been reduced.
    ///
    /// # Errors
    /// As [`Work::wait`].
    pub fn wait(self) -> Result<Buffer<Untyped>, CommError> {
        match self.part {
            Part::Alone(work) => work.wait(),
            Part::OfBatch { fusion, batch, range, vector } => fusion.finish(&batch, range, vector),
        }
    }

    /// As [`Work::into_pending`]. A vector of a batch is waited for here and now, because the host copies it.
    pub fn into_pending(self, dtype: DType, len: usize) -> (Pending<Buffer<Untyped>>, Outcome) {
        match self.part {
            Part::Alone(work) => work.into_pending(dtype, len),
            part @ Part::OfBatch { .. } => Work::ready(FusedWork { part }.wait()).into_pending(dtype, len),
        }
    }
}

/// A vector that travels alone.
impl From<Work<Buffer<Untyped>>> for FusedWork {
    fn from(work: Work<Buffer<Untyped>>) -> Self {
        FusedWork { part: Part::Alone(work) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it fuses")
}
