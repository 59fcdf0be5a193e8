//! Generation, token by token, with a KV cache.

use super::in_flight::Purpose;
use super::parallelize::forward_program;
use super::{Executor, ExecutorSetup};
use crate::error::Result;
use crate::layout::{Degrees, RankGrid, chain};
use crate::offload::OffloadOptions;
use crate::step::{Determinism, ExecutorOptions};
use trireme_base::{Category, DType};
use trireme_model::{Batch, KvCache, LOGITS, Model, ModelProfile, TOKENS};
use trireme_optim::{OptimizerName, OptimizerOptions};
use trireme_schedule::ProgramHeader;
use trireme_tensor::{Device, Parameters};

impl Executor {
    /// Creates an executor of a single rank that evaluates and generates with `parameters` in f32, but does not train. It has neither
    /// gradients nor an optimizer, so it needs only the memory of a forward pass.
    ///
    /// # Errors
    /// Errors of the device, such as an exceeded budget.
    pub fn forward_only(
        model: Model,
        profile: ModelProfile,
        parameters: Parameters,
        device: &Device,
    ) -> Result<Self> {
        let header = ProgramHeader {
            chain: chain(model.table(), &profile, Determinism::Layout),
            ..ProgramHeader::default()
        };
        let mut executor = Executor::new(ExecutorSetup {
            model,
            profile,
            // The program never uses the optimizer.
            optimizer: &OptimizerOptions::new(OptimizerName::Sgd),
            ranks: RankGrid::new(trireme_comm::single(), Degrees::ONE)?,
            device,
            program: forward_program(&header)?,
            options: ExecutorOptions::PLAIN,
            offload: &OffloadOptions::none(device),
        })?;
        executor.parameters.set_all(parameters);
        Ok(executor)
    }
}

/// A sequence that is being generated, with its KV cache.
pub struct Generation<'a> {
    executor: &'a mut Executor,
    /// The KV cache; `None` after a failure.
    kv_cache: Option<KvCache>,
}

impl<'a> Generation<'a> {
    /// Begins a sequence of at most `capacity` tokens. The model must be a language model whose last unit computes logits without targets.
    ///
    /// # Panics
    /// If the units are split over several pipeline ranks.
    pub fn new(executor: &'a mut Executor, capacity: usize) -> Self {
        assert!(executor.program.header.stages.is_empty(), "one rank runs all units");
        let kv_cache = Some(KvCache::new(&executor.device, capacity));
        Generation { executor, kv_cache }
    }

    /// Appends `tokens` to the sequence, and returns the logits for the next token. Collective if parameters are sharded: all ranks must
    /// append the same tokens.
    ///
    /// # Errors
    /// Errors of the device, groups and disks. The sequence cannot be continued afterwards.
    ///
    /// # Panics
    /// If `tokens` is empty or exceeds the capacity, or after an error.
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let kv_cache = self.kv_cache.take().expect("a failure ends a sequence");
        let device = &self.executor.device;
        let mut ids = device.empty([1, tokens.len()].into(), DType::U32, Category::Activations)?;
        device.upload(tokens, ids.view_mut());
        let batch: Batch = [(TOKENS, ids)].into_iter().collect();
        let (purpose, outputs) = self.executor.run_forward(Purpose::Generation(kv_cache), Some(batch))?;
        let Purpose::Generation(mut kv_cache) = purpose else { unreachable!("a generation stays one") };
        kv_cache.advance(tokens.len());
        self.kv_cache = Some(kv_cache);
        let logits = outputs.expect("the last unit is here");
        Ok(self.executor.device.read(logits.get(LOGITS).expect("the model makes logits").view())?)
    }
}
