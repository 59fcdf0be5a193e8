//! The choice of an algorithm of cuBLASLt for each kind of matmul.
//!
//! The library proposes algorithms, first the one that it expects to be the fastest. If matmuls are timed, the fastest of its proposals is
//! kept in a file, for later runs and for the other workers of the host. Every worker that reads the file computes with the same bits.

use super::super::api::{BlasApi, call};
use super::super::context::{Context, TemporaryMemory, TimedEvent};
use super::super::error::CudaError;
use super::{Arrays, Blas, Description, Layout, MatmulKind};
use cudarc::cublaslt::sys as blas;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Number of proposals that are timed.
const NUM_PROPOSALS: usize = 8;

/// Number of times that each is run, after a first time that is not measured.
const NUM_RUNS: usize = 5;

/// Largest size of the file.
const FILE_BYTES_MAX: u64 = 1 << 24;

/// Time for which a worker waits for another one that measures, and how often it looks.
const LOCK_PATIENCE: Duration = Duration::from_secs(120);
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Copy)]
pub(super) struct Algorithm {
    pub(super) algorithm: blas::cublasLtMatmulAlgo_t,
    pub(super) workspace_bytes: usize,
}

/// A matmul, as the library describes it.
pub(super) struct Problem<'a> {
    pub(super) kind: MatmulKind,
    pub(super) description: &'a Description,
    /// Layouts of the library's operands, and of the result.
    pub(super) layouts: [&'a Layout; 3],
    pub(super) arrays: &'a Arrays,
    pub(super) stream: blas::cudaStream_t,
}

impl Problem<'_> {
    fn layout_handles(&self) -> [blas::cublasLtMatrixLayout_t; 3] {
        self.layouts.map(|layout| layout.0)
    }
}

/// The file with the fastest algorithm of each kind of matmul, for a GPU and a version of the library.
#[derive(Debug)]
pub(super) struct AlgorithmFile(PathBuf);

impl AlgorithmFile {
    pub(super) fn new(context: &Context) -> Self {
        let installation = context.installation;
        let name = context.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let version = installation.blas.version();
        AlgorithmFile(installation.cache.join(format!("matmuls-{name}-{version}.txt")))
    }

    /// Opens the file, once no other worker has it open.
    fn lock(&self) -> std::io::Result<LockedFile> {
        if let Some(folder) = self.0.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut file = File::options().read(true).append(true).create(true).open(&self.0)?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        while let Err(error) = file.try_lock() {
            match error {
                TryLockError::WouldBlock if Instant::now() < deadline => std::thread::sleep(LOCK_INTERVAL),
                TryLockError::WouldBlock => return Err(ErrorKind::TimedOut.into()),
                TryLockError::Error(error) => return Err(error),
            }
        }
        if file.metadata()?.len() > FILE_BYTES_MAX {
            return Err(ErrorKind::FileTooLarge.into());
        }
        let mut text = String::new();
        (&mut file).take(FILE_BYTES_MAX).read_to_string(&mut text)?;
        Ok(LockedFile { file, text })
    }

    fn error(&self, source: std::io::Error) -> CudaError {
        CudaError::AlgorithmFile { path: self.0.clone(), source }
    }
}

/// The file while other workers wait for it. Each line has a kind of matmul and an algorithm.
struct LockedFile {
    file: File,
    text: String,
}

impl LockedFile {
    /// Returns the algorithm of the last line with this kind, which may be damaged.
    fn find(&self, kind: &str) -> Option<blas::cublasLtMatmulAlgo_t> {
        let line = self.text.lines().rev().find_map(|line| line.strip_prefix(kind)?.strip_prefix(": "))?;
        let mut data = [0; 8];
        let mut words = line.split(' ');
        for word in &mut data {
            *word = u64::from_str_radix(words.next()?, 16).ok()?;
        }
        words.next().is_none().then_some(blas::cublasLtMatmulAlgo_t { data })
    }

    fn append(&mut self, kind: &str, algorithm: &blas::cublasLtMatmulAlgo_t) -> std::io::Result<()> {
        let words = algorithm.data.map(|word| format!("{word:x}")).join(" ");
        // A line that a full disk has cut is not continued.
        let separator = if self.text.is_empty() || self.text.ends_with('\n') { "" } else { "\n" };
        self.file.write_all(format!("{separator}{kind}: {words}\n").as_bytes())
    }
}

impl Blas {
    /// Returns the algorithm for a kind of matmul, which stays the same within a run. `None` if the library has none.
    pub(super) fn algorithm(&self, problem: &Problem<'_>) -> Result<Option<Algorithm>, CudaError> {
        let mut algorithms = self.lock();
        if let Some(algorithm) = algorithms.get(&problem.kind) {
            return Ok(*algorithm);
        }
        let algorithm = match &self.file {
            Some(file) => self.fastest(file, problem)?,
            None => self.proposals(problem, 1)?.first().copied(),
        };
        algorithms.insert(problem.kind, algorithm);
        Ok(algorithm)
    }

    /// Returns the algorithm that the file has for a matmul, or measures which is the fastest and writes it to the file. Without memory for
    /// another result, chooses what the library expects to be the fastest. Fails if the file cannot be used, because other workers might
    /// then choose another algorithm.
    fn fastest(&self, file: &AlgorithmFile, problem: &Problem<'_>) -> Result<Option<Algorithm>, CudaError> {
        // Earlier jobs may wait for other workers, which must not wait for this one meanwhile.
        self.context.synchronize(problem.stream.cast())?;
        let mut locked = file.lock().map_err(|source| file.error(source))?;
        let kind = format!("{:?}", problem.kind);
        if let Some(known) = locked.find(&kind).and_then(|algorithm| self.checked(problem, algorithm)) {
            return Ok(Some(known));
        }
        let proposals = self.proposals(problem, NUM_PROPOSALS)?;
        let Some(first) = proposals.first() else { return Ok(None) };
        let mut fastest = (f32::INFINITY, *first);
        if let Ok(result) = TemporaryMemory::allocate(&self.context, problem.arrays.out.num_bytes()) {
            for proposal in proposals {
                let time = self.time(problem, &proposal, &result)?;
                if time < fastest.0 {
                    fastest = (time, proposal);
                }
            }
            if fastest.0.is_infinite() {
                // A GPU that was lost is an error, and not for lack of an algorithm.
                self.context.synchronize(problem.stream.cast())?;
                return Ok(None);
            }
        }
        locked.append(&kind, &fastest.1.algorithm).map_err(|source| file.error(source))?;
        Ok(Some(fastest.1))
    }

    /// Returns the milliseconds that an algorithm takes; infinity if it cannot run this matmul.
    fn time(
        &self,
        problem: &Problem<'_>,
        algorithm: &Algorithm,
        result: &TemporaryMemory,
    ) -> Result<f32, CudaError> {
        let run = || self.issue(problem, algorithm, result.start());
        if run().is_err() {
            return Ok(f32::INFINITY);
        }
        let stream = problem.stream.cast();
        let start = TimedEvent::record(&self.context, stream)?;
        for _ in 0..NUM_RUNS {
            run()?;
        }
        let end = TimedEvent::record(&self.context, stream)?;
        end.milliseconds_since(&start)
    }

    /// Returns an algorithm with the memory that it needs, if the library accepts it for this matmul.
    fn checked(&self, problem: &Problem<'_>, algorithm: blas::cublasLtMatmulAlgo_t) -> Option<Algorithm> {
        let api = self.api();
        let [first, second, out] = problem.layout_handles();
        let mut found = MaybeUninit::<blas::cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: handles of the library. Writes a result if it succeeds, of which only a field without invalid values is read.
        let workspace_bytes = unsafe {
            let checked = call!(
                api,
                cublasLtMatmulAlgoCheck(
                    self.handle,
                    problem.description.0,
                    first,
                    second,
                    out,
                    out,
                    &algorithm,
                    found.as_mut_ptr(),
                )
            );
            checked.ok()?;
            (&raw const (*found.as_ptr()).workspaceSize).read()
        };
        let fits = workspace_bytes <= problem.arrays.workspace.num_bytes();
        fits.then_some(Algorithm { algorithm, workspace_bytes })
    }

    /// Returns at most `num` algorithms, the one that the library expects to be the fastest first.
    fn proposals(&self, problem: &Problem<'_>, num: usize) -> Result<Vec<Algorithm>, CudaError> {
        use blas::cublasLtMatmulPreferenceAttributes_t as attributes;
        let api = self.api();
        let [first, second, out] = problem.layout_handles();
        let preference = Preference::new(api)?;
        let workspace_bytes_max = problem.arrays.workspace.num_bytes() as u64;
        preference.set(attributes::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes_max)?;
        let alignments = [
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, alignment) in alignments.into_iter().zip(problem.kind.alignments) {
            preference.set(attribute, alignment)?;
        }
        let mut found =
            [const { MaybeUninit::<blas::cublasLtMatmulHeuristicResult_t>::uninit() }; NUM_PROPOSALS];
        let mut num_found = 0;
        // SAFETY: handles of the library. Writes at most as many results as are asked for and there is room for, and their number.
        let status = unsafe {
            (api.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                problem.description.0,
                first,
                second,
                out,
                out,
                preference.0,
                num.min(NUM_PROPOSALS) as i32,
                found.as_mut_ptr().cast(),
                &mut num_found,
            )
        };
        use blas::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
        // Some versions call it invalid what their fp8 kernels cannot compute.
        let is_refused = status == CUBLAS_STATUS_NOT_SUPPORTED as u32
            || problem.kind.fp8.is_some() && status == CUBLAS_STATUS_INVALID_VALUE as u32;
        if is_refused {
            return Ok(Vec::new());
        }
        api.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        let of = |found: &MaybeUninit<blas::cublasLtMatmulHeuristicResult_t>| {
            let found = found.as_ptr();
            // SAFETY: written by the library. The fields have no invalid values, as a number in place of an enumeration has none.
            unsafe {
                let is_usable = (&raw const (*found).state).cast::<u32>().read() == 0;
                is_usable.then_some(Algorithm {
                    algorithm: (&raw const (*found).algo).read(),
                    workspace_bytes: (&raw const (*found).workspaceSize).read(),
                })
            }
        };
        let found: Vec<Algorithm> =
            found[..num_found.clamp(0, NUM_PROPOSALS as i32) as usize].iter().filter_map(of).collect();
        Ok(found)
    }
}

/// The memory and the alignments that algorithms may rely on.
struct Preference(blas::cublasLtMatmulPreference_t, &'static BlasApi);

impl Preference {
    fn new(api: &'static BlasApi) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(api, cublasLtMatmulPreferenceCreate(&mut handle))? };
        Ok(Preference(handle, api))
    }

    fn set<T: bytemuck::Pod>(
        &self,
        attribute: blas::cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let Preference(handle, api) = self;
        let address = (&raw const value).cast();
        // SAFETY: the value has the size of the attribute, and is read before the function returns.
        unsafe {
            call!(api, cublasLtMatmulPreferenceSetAttribute(*handle, attribute, address, size_of::<T>()))
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { (self.1.cublasLtMatmulPreferenceDestroy)(self.0) };
    }
}
