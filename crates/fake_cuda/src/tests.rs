//! Mistakes that are planted in kernels and in programs, each of which must be found.

use crate::launch::{Index, Launch};
use crate::memory::GRANULARITY;
use crate::module::Module;
use crate::nvrtc::Program;
use crate::stream::{Driver, Job};
use cudarc::driver::sys::CUresult::{self, *};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mistake need not show itself in every order.
const NUM_SEEDS: u64 = 40;

/// Kernels run on one thread at a time.
fn lock() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether a test cannot run because the machine has no C++ compiler. Fails where no test may be skipped.
fn lacks_compiler() -> bool {
    let has_compiler = Command::new("c++").arg("--version").output().is_ok();
    let must_run = std::env::var("TRIREME_TESTS_SKIP_NOTHING").is_ok_and(|value| value == "1");
    assert!(has_compiler || !must_run, "this machine has no C++ compiler");
    !has_compiler
}

fn compile(source: &str) -> Result<&'static Module, Box<dyn std::error::Error>> {
    let mut program = Program::default();
    program.source = format!("typedef unsigned u32;\n{source}");
    program.compile()?;
    Module::of_image(&program.image)
}

/// A driver with a block of device memory.
struct Machine {
    driver: Driver,
    start: usize,
}

impl Machine {
    fn new(seed: u64) -> Self {
        let mut driver = Driver::with_seed(seed);
        driver.is_initialized = true;
        let start = driver.memory.reserve(GRANULARITY).unwrap();
        let handle = driver.memory.create(GRANULARITY);
        assert!(driver.memory.map(start, GRANULARITY, handle) && driver.memory.allow(start, GRANULARITY));
        Machine { driver, start }
    }

    fn write(&mut self, stream: u64, offset: usize, values: &[f32]) -> Result<(), CUresult> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.driver.push(stream, Job::Write { bytes, to: self.start + offset })
    }

    fn read(&mut self, stream: u64, offset: usize, num: usize) -> Result<Vec<f32>, CUresult> {
        let mut values = vec![0.0_f32; num];
        let (from, to, num_bytes) = (self.start + offset, values.as_mut_ptr() as usize, 4 * num);
        self.driver.push(stream, Job::Copy { from, to, num_bytes })?;
        self.driver.synchronize_stream(stream)?;
        Ok(values)
    }

    /// Issues `kernel(float* x, u32 num)` with one block of `num_threads`.
    fn launch(&mut self, stream: u64, module: &Module, num_threads: u32, num: u32) -> Result<(), CUresult> {
        let one = Index { x: 1, y: 1, z: 1 };
        self.driver.push(
            stream,
            Job::Launch(Box::new(Launch {
                name: "kernel".to_owned(),
                kernel: module.kernel("kernel").unwrap(),
                grid: one,
                block: Index { x: num_threads, ..one },
                shared_bytes: 1024,
                arguments: vec![vec![self.start as u128], vec![u128::from(num)]],
            })),
        )
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.driver.memory.unmap(self.start, GRANULARITY);
        self.driver.memory.free_addresses(self.start, GRANULARITY);
    }
}

/// Runs a kernel on `x[i] = i` for every seed. Returns the results.
fn run_all(source: &str, num_threads: u32, num: u32) -> Vec<Result<Vec<f32>, CUresult>> {
    let _lock = lock();
    let module = compile(source).unwrap();
    let run = |seed| {
        let mut machine = Machine::new(seed);
        let stream = machine.driver.create_stream();
        let values: Vec<f32> = (0..num_threads).map(|value| value as f32).collect();
        machine.write(stream, 0, &values)?;
        machine.launch(stream, module, num_threads, num)?;
        machine.read(stream, 0, num_threads as usize)
    };
    (0..NUM_SEEDS).map(run).collect()
}

/// Asserts that a kernel gives the expected values for every seed, and that the kernel without `part` does not for some seed.
fn assert_needs(source: &str, part: &str, num: u32, expected: impl Fn(usize) -> f32) {
    assert!(source.contains(part));
    let is_expected = |outcome: &Result<Vec<f32>, CUresult>| {
        let is_near = |(index, value): (usize, &f32)| *value == expected(index);
        outcome.as_ref().is_ok_and(|values| values.iter().enumerate().all(is_near))
    };
    assert!(run_all(source, 64, num).iter().all(is_expected), "{source}");
    let found = run_all(&source.replacen(part, "", 1), 64, num);
    assert!(!found.iter().all(is_expected), "without {part}: {source}");
}

const REVERSE: &str = "extern \"C\" __global__ void kernel(float* x, u32 num) {
    __shared__ float values[64];
    values[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = values[num - 1 - threadIdx.x];
}";

#[test]
fn a_missing_barrier_is_found() {
    if lacks_compiler() {
        return;
    }
    assert_needs(REVERSE, "__syncthreads();", 64, |index| (63 - index) as f32);
}

#[test]
fn a_missing_barrier_of_a_warp_is_found() {
    if lacks_compiler() {
        return;
    }
    let source =
        REVERSE.replace("__syncthreads", "__syncwarp").replace("num - 1 - threadIdx.x", "threadIdx.x ^ 1");
    assert_needs(&source, "__syncwarp();", 64, |index| (index ^ 1) as f32);
}

#[test]
fn a_second_use_of_shared_memory_needs_a_barrier() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        __shared__ float value;
        for (u32 turn = 0; turn < 2; ++turn) {
            if (threadIdx.x == turn) { value = x[turn] + 1; }
            __syncthreads();
            float own = value;
            __syncthreads(/* again */);
            if (turn == 0) { x[threadIdx.x] = own + threadIdx.x; }
        }
    }";
    assert_needs(source, "__syncthreads(/* again */);", 64, |index| (index + 1) as f32);
}

#[test]
fn a_wrong_bound_changes_the_elements_behind_it() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        if (threadIdx.x >= num) return;
        x[threadIdx.x] = -1;
    }";
    assert_needs(
        source,
        "if (threadIdx.x >= num) return;",
        40,
        |index| if index < 40 { -1.0 } else { index as f32 },
    );
}

#[test]
fn shared_memory_and_device_memory_hold_nan_until_they_are_written() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        DYNAMIC_SHARED(float, values);
        values[threadIdx.x] = 1;
        x[threadIdx.x] = values[threadIdx.x];
    }";
    assert_needs(source, "values[threadIdx.x] = 1;", 64, |_| 1.0);
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        x[1000 + threadIdx.x] = 2;
        x[threadIdx.x] = x[1000 + threadIdx.x];
    }";
    assert_needs(source, "x[1000 + threadIdx.x] = 2;", 64, |_| 2.0);
}

#[test]
fn threads_that_wait_for_each_other_at_different_places_fail() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        if (threadIdx.x % 2 == 0) { __syncthreads(); }
        x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
    }";
    let found = run_all(source, 64, 64);
    assert!(found.iter().all(|outcome| *outcome == Err(CUDA_ERROR_LAUNCH_FAILED)), "{found:?}");
}

#[test]
fn a_lane_outside_of_the_mask_fails() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        x[threadIdx.x] = __shfl_xor_sync(0xffffu, x[threadIdx.x], 1);
    }";
    assert!(run_all(source, 64, 64).iter().all(|outcome| *outcome == Err(CUDA_ERROR_LAUNCH_FAILED)));
}

#[test]
fn a_kernel_that_stops_fails_the_device() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) {
        if (x[threadIdx.x] == num) { __trap(); }
    }";
    assert!(run_all(source, 64, 5).iter().all(|outcome| *outcome == Err(CUDA_ERROR_LAUNCH_FAILED)));
}

#[test]
fn sums_of_floats_in_the_order_of_threads_do_not_compile() {
    if lacks_compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void kernel(float* x, u32 num) { atomicAdd(x, 1.0f); }";
    assert!(compile(source).is_err());
    assert!(compile(&source.replace("x, 1.0f", "reinterpret_cast<u32*>(x), 1u")).is_ok());
}

/// A copy of another stream overtakes the kernel unless it waits.
#[test]
fn a_missing_event_is_found() {
    if lacks_compiler() {
        return;
    }
    let _lock = lock();
    let module = compile(REVERSE).unwrap();
    let run = |seed, waits| {
        let mut machine = Machine::new(seed);
        let [kernels, copies] = [(); 2].map(|()| machine.driver.create_stream());
        let event = machine.driver.create_event(false);
        let values: Vec<f32> = (0..64).map(|value| value as f32).collect();
        machine.write(kernels, 0, &values).unwrap();
        machine.launch(kernels, module, 64, 64).unwrap();
        machine.driver.record(event, kernels).unwrap();
        if waits {
            machine.driver.wait_event(copies, event).unwrap();
        }
        machine.read(copies, 0, 64).unwrap()
    };
    let expected: Vec<f32> = (0..64).map(|index| (63 - index) as f32).collect();
    assert!((0..NUM_SEEDS).all(|seed| run(seed, true) == expected));
    assert!((0..NUM_SEEDS).any(|seed| run(seed, false) != expected));
}

#[test]
fn streams_that_wait_for_events_of_each_other_fail() {
    let _lock = lock();
    let mut machine = Machine::new(0);
    let [first, second] = [(); 2].map(|()| machine.driver.create_stream());
    let event = machine.driver.create_event(false);
    machine.driver.push(first, Job::Wait { event, recording: 1 }).unwrap();
    machine.driver.record(event, first).unwrap();
    machine.driver.wait_event(second, event).unwrap();
    assert_eq!(machine.driver.synchronize_stream(second), Err(CUDA_ERROR_LAUNCH_TIMEOUT));
}

#[test]
fn memory_that_a_copy_still_reads_cannot_be_unpinned() {
    let _lock = lock();
    let unpin = |waits: bool| {
        let mut machine = Machine::new(0);
        let stream = machine.driver.create_stream();
        let event = machine.driver.create_event(false);
        let values = [1.0_f32; 16];
        let from = values.as_ptr() as usize;
        machine.driver.pinned.insert(from, 64);
        // Holds back the copy.
        machine.driver.push(stream, Job::Wait { event, recording: 1 }).unwrap();
        machine.driver.push(stream, Job::Copy { from, to: machine.start, num_bytes: 64 }).unwrap();
        if waits {
            let other = machine.driver.create_stream();
            machine.driver.record(event, other).unwrap();
            machine.driver.synchronize_stream(stream).unwrap();
        }
        machine.driver.unpin(from)
    };
    assert_eq!([unpin(true), unpin(false)], [Ok(()), Err(CUDA_ERROR_ILLEGAL_ADDRESS)]);
}

#[test]
fn memory_of_which_a_part_is_pinned_cannot_be_copied() {
    let _lock = lock();
    let mut machine = Machine::new(0);
    let stream = machine.driver.create_stream();
    let values = [1.0_f32; 64];
    let start = values.as_ptr() as usize;
    machine.driver.pinned.insert(start + 64, 128);
    let mut copy = |offset: usize, num_bytes: usize| {
        // SAFETY: within the values.
        unsafe { machine.driver.copy_from_host(stream, start + offset, machine.start, num_bytes) }
    };
    assert_eq!([(0, 64), (64, 128), (80, 16), (192, 64)].map(|(at, len)| copy(at, len)), [Ok(()); 4]);
    let refused = Err(CUDA_ERROR_INVALID_VALUE);
    assert_eq!([(0, 65), (0, 256), (191, 2)].map(|(at, len)| copy(at, len)), [refused; 3]);
    machine.driver.synchronize_stream(stream).unwrap();
}

const CHILD: &str = "FAKE_CUDA_TEST_CHILD";

/// Reading ends the process, so a second one does it.
#[test]
fn the_host_cannot_read_device_memory() {
    if std::env::var_os(CHILD).is_some() {
        let machine = Machine::new(0);
        // SAFETY: not accessible, which is what the test shows.
        let value = unsafe { (machine.start as *const u8).read_volatile() };
        std::process::exit(i32::from(value));
    }
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new(program);
    child.args(["--exact", "tests::the_host_cannot_read_device_memory"]).env(CHILD, "1");
    let status = child.output().unwrap().status;
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(11), "{status}");
}
