//! Runs the threads of a block as coroutines on one thread of the host.

use crate::launch::{CompiledKernel, Index, Kernel, Launch, Thread, WARP};
use crate::memory::DeviceMemory;
use crate::ptx;
use crate::random::Random;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::ManuallyDrop;

/// Bytes of a thread's stack.
const STACK_BYTES: usize = 64 << 10;

/// Largest value that a lane can pass to the others.
const EXCHANGED_BYTES_MAX: usize = 64;

/// `FakeRuntime` of `device.h`.
#[repr(C)]
#[derive(Debug)]
pub struct Runtime {
    barrier: extern "C" fn(),
    exchange: extern "C" fn(u32, *const c_void, usize) -> *const c_void,
    dynamic_shared: extern "C" fn() -> *mut c_void,
    trap: extern "C" fn(),
}

/// The functions that kernels call.
pub static RUNTIME: Runtime = Runtime { barrier, exchange, dynamic_shared, trap };

/// Why a thread has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Barrier,
    /// An operation of a warp, by the lanes of a mask, with values of a size.
    Exchange(u32, usize),
    Trap,
}

/// State of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    Stopped(Stop),
    Done,
}

/// The values that the lanes of a warp pass to each other. There are two: a lane may be one exchange ahead of others, which still read the
/// values of the one before.
struct Exchange {
    buffers: [[u8; WARP * EXCHANGED_BYTES_MAX]; 2],
    num_completed: usize,
}

/// The thread that runs now, as the functions of the runtime need it.
struct Running {
    yielder: *const Yielder<(), Stop>,
    exchange: *mut Exchange,
    lane: usize,
    shared: *mut u8,
}

struct RunningCell(UnsafeCell<Running>);

// SAFETY: only the thread that runs jobs, which holds the lock of the driver, accesses the cell.
unsafe impl Sync for RunningCell {}

static RUNNING: RunningCell = RunningCell(UnsafeCell::new(Running {
    yielder: std::ptr::null(),
    exchange: std::ptr::null_mut(),
    lane: 0,
    shared: std::ptr::null_mut(),
}));

fn running() -> *mut Running {
    RUNNING.0.get()
}

fn stop(reason: Stop) {
    // SAFETY: kernels call the functions of the runtime from a coroutine of `run_block`, which has set the yielder.
    unsafe { (*(*running()).yielder).suspend(reason) };
}

extern "C" fn barrier() {
    stop(Stop::Barrier);
}

extern "C" fn exchange(mask: u32, own: *const c_void, size: usize) -> *const c_void {
    // SAFETY: `run_block` has set the fields for this thread; `own` are `size` bytes by the promise of `device.h`.
    unsafe {
        let (exchange, lane) = ((*running()).exchange, (*running()).lane);
        if size > EXCHANGED_BYTES_MAX || mask >> lane & 1 == 0 {
            trap();
        }
        let buffer = (*exchange).num_completed % 2;
        let values = (&raw mut (*exchange).buffers[buffer]).cast::<u8>();
        if size > 0 {
            std::ptr::copy_nonoverlapping(own.cast(), values.add(lane * size), size);
        }
        stop(Stop::Exchange(mask, size));
        values.cast()
    }
}

extern "C" fn dynamic_shared() -> *mut c_void {
    // SAFETY: as in `exchange`.
    unsafe { (*running()).shared.cast() }
}

extern "C" fn trap() {
    stop(Stop::Trap);
}

/// Stacks and values that are used again.
#[derive(Default)]
pub(crate) struct Blocks {
    stacks: Vec<DefaultStack>,
}

type Fiber = Coroutine<(), Stop, (), DefaultStack>;

impl Blocks {
    /// Runs all blocks of a launch, in random order. Returns a description of the failure if a thread traps, or if threads wait for
    /// others that never come.
    pub(crate) fn run(
        &mut self,
        launch: &Launch,
        memory: &DeviceMemory,
        random: &mut Random,
    ) -> Result<(), String> {
        let arguments: Vec<*const c_void> =
            launch.arguments.iter().map(|argument| argument.as_ptr().cast()).collect();
        let mut shared = vec![0_u128; launch.shared_bytes.div_ceil(16)];
        // A random start and stride visit all blocks without a list of them.
        let num_blocks = launch.grid.num();
        let first = random.below(num_blocks as usize) as u64;
        let is_reversed = random.below(2) == 1;
        for position in 0..num_blocks {
            let position = if is_reversed { num_blocks - 1 - position } else { position };
            let block = launch.grid.at((first + position) % num_blocks);
            match &launch.kernel {
                Kernel::Compiled(kernel) => {
                    shared.fill(u128::MAX);
                    let shared = shared.as_mut_ptr().cast();
                    self.run_block(*kernel, launch, block, &arguments, shared, random)?;
                }
                Kernel::Ptx(kernel) => {
                    let has = |start, num_bytes| memory.contains(start, num_bytes);
                    ptx::run_block(kernel, launch, block, &has, random)?;
                }
            }
        }
        Ok(())
    }

    fn run_block(
        &mut self,
        kernel: CompiledKernel,
        launch: &Launch,
        block: Index,
        arguments: &[*const c_void],
        shared: *mut u8,
        random: &mut Random,
    ) -> Result<(), String> {
        let num_threads = launch.block.num() as usize;
        let of = |position: usize| Thread {
            thread: launch.block.at(position as u64),
            block,
            block_size: launch.block,
            grid_size: launch.grid,
        };
        let threads: Vec<Thread> = (0..num_threads).map(of).collect();
        let mut exchanges: Vec<Exchange> = (0..num_threads.div_ceil(WARP))
            .map(|_| Exchange { buffers: [[0; _]; 2], num_completed: 0 })
            .collect();
        let mut fibers: Vec<Option<Fiber>> = (0..num_threads).map(|_| None).collect();
        let mut yielders = vec![std::ptr::null(); num_threads];
        let mut states = vec![State::Ready; num_threads];
        let mut ready = Vec::with_capacity(num_threads);
        let mut failure = None;
        'block: loop {
            ready.clear();
            ready.extend((0..num_threads).filter(|position| states[*position] == State::Ready));
            random.shuffle(&mut ready);
            for &position in &ready {
                let yielder = &raw mut yielders[position];
                let fiber = fibers[position].get_or_insert_with(|| self.fiber(kernel, arguments, yielder));
                // SAFETY: no kernel runs now, and no other thread accesses the cell.
                unsafe {
                    *running() = Running {
                        yielder: yielders[position],
                        exchange: &raw mut exchanges[position / WARP],
                        lane: position % WARP,
                        shared,
                    };
                }
                (kernel.switch)(&threads[position]);
                states[position] = match fiber.resume(()) {
                    CoroutineResult::Yield(Stop::Trap) => {
                        let thread = threads[position].thread;
                        failure = Some(format!("a trap in block {block:?}, thread {thread:?}"));
                        break 'block;
                    }
                    CoroutineResult::Yield(reason) => State::Stopped(reason),
                    CoroutineResult::Return(()) => {
                        let stack = fibers[position].take().map(Coroutine::into_stack);
                        self.stacks.extend(stack);
                        State::Done
                    }
                };
            }
            if states.iter().all(|state| *state == State::Done) {
                break;
            }
            if !release(&mut states, &mut exchanges) {
                failure =
                    Some(format!("block {block:?}: threads wait for others that do not come: {states:?}"));
                break;
            }
        }
        for fiber in fibers.into_iter().flatten() {
            let mut fiber = ManuallyDrop::new(fiber);
            // SAFETY: kernels have no objects that must be dropped.
            unsafe { fiber.force_reset() };
            self.stacks.push(ManuallyDrop::into_inner(fiber).into_stack());
        }
        failure.map_or(Ok(()), Err)
    }

    /// Creates a coroutine that runs a thread of the kernel. It stores its yielder in `place` when it starts.
    fn fiber(
        &mut self,
        kernel: CompiledKernel,
        arguments: &[*const c_void],
        place: *mut *const Yielder<(), Stop>,
    ) -> Fiber {
        let stack = self.stacks.pop().unwrap_or_else(|| {
            DefaultStack::new(STACK_BYTES).expect("the host has memory for a thread's stack")
        });
        let arguments = arguments.as_ptr();
        Coroutine::with_stack(stack, move |yielder, ()| {
            // SAFETY: `run_block` keeps `place` as long as the coroutine, and no other thread accesses the cell.
            unsafe {
                *place = yielder;
                (*running()).yielder = yielder;
            }
            (kernel.call)(arguments);
        })
    }
}

/// Makes threads ready whose operation of a warp is complete or, if there are none, all threads at the barrier of the block. Returns
/// whether a thread is ready.
fn release(states: &mut [State], exchanges: &mut [Exchange]) -> bool {
    let mut is_any_ready = false;
    for (lanes, exchange) in states.chunks_mut(WARP).zip(exchanges) {
        let first = lanes.iter().find_map(|state| match state {
            State::Stopped(Stop::Exchange(mask, size)) => Some((*mask, *size)),
            _ => None,
        });
        let Some((mask, size)) = first else { continue };
        let expected = State::Stopped(Stop::Exchange(mask, size));
        let mut members = (0..lanes.len()).filter(|lane| mask >> lane & 1 == 1);
        // Lanes beyond the block, and those that have ended, take no part.
        if !members.all(|lane| lanes[lane] == expected || lanes[lane] == State::Done) {
            continue;
        }
        lanes.iter_mut().filter(|state| **state == expected).for_each(|state| *state = State::Ready);
        exchange.num_completed += 1;
        is_any_ready = true;
    }
    if is_any_ready {
        return true;
    }
    let is_at_barrier = |state: &State| matches!(state, State::Stopped(Stop::Barrier) | State::Done);
    if !states.iter().all(is_at_barrier) {
        return false;
    }
    states.iter_mut().filter(|state| **state != State::Done).for_each(|state| *state = State::Ready);
    true
}
