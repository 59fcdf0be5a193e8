//! A layout whose predicted memory is compared with the memory of real steps.

use super::*;

#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) options: ExecutorOptions,
    pub(super) optimizer: OptimizerOptions,
    pub(super) num_microbatches: usize,
    pub(super) num_shards: usize,
    pub(super) tensor_degree: usize,
    /// The degree of the context axis, and the number of its ranks that exchange heads.
    pub(super) context: (usize, usize),
    /// Number of ranks with different experts.
    pub(super) experts: usize,
    pub(super) keep: Keep,
    pub(super) state: StateLayout,
    /// The schedule of a pipeline, its number of ranks, and the stages of each rank.
    pub(super) pipeline: Option<(ScheduleKind, usize, usize)>,
    /// Sequences of a microbatch, and tokens of each.
    pub(super) shape: (usize, usize),
    /// Number of samples of a validation before the first step.
    pub(super) num_validated: Option<usize>,
    /// Number of threads of the rank, if there is one. [`check`](Case::check) gives each of several ranks one thread.
    pub(super) num_threads: usize,
}

impl Default for Case {
    fn default() -> Self {
        let (options, optimizer) = (OPTIONS, adamw());
        Case {
            options,
            optimizer,
            num_microbatches: 1,
            num_shards: 1,
            tensor_degree: 1,
            context: (1, 1),
            experts: 1,
            keep: Keep::All,
            state: StateLayout::UNSHARDED,
            pipeline: None,
            shape: (2, 17),
            num_validated: None,
            num_threads: 2,
        }
    }
}

impl Case {
    /// Returns the program of a rank of the pipeline.
    pub(super) fn program(&self, chain: &UnitChain, rank: usize) -> Program {
        let num_units = chain.num_units;
        let keep = |unit: usize| match self.keep {
            _ if !chain.keeps(unit) => Keep::All,
            Keep::Nothing if unit == 0 || unit % 2 == 1 => Keep::Input,
            keep => keep,
        };
        let keeps: Vec<Keep> = (0..num_units).map(keep).collect();
        let program = match self.pipeline {
            None => single::program(chain, self.num_microbatches),
            Some((kind, num_ranks, stages_per_rank)) => {
                let num_stages = num_ranks * stages_per_rank;
                let num_microbatches = self.num_microbatches;
                let num_steps = if kind.is_synchronous() { 1 } else { 3 };
                let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps };
                let costs = Costs::equal(num_stages, StageCosts::of(1, 1, 1)).unwrap();
                let schedule = generate(kind, sizes, &costs, None).unwrap();
                let units = partition_units(&vec![1; num_units], num_stages);
                programs(&schedule, &costs, &units, chain).swap_remove(rank)
            }
        };
        apply_layout(recompute(program, &keeps), self.state)
    }

    pub(super) fn build(
        &self,
        model: &dyn TestModel,
        device: &Device,
        place: ModelRank,
    ) -> Result<Model, ModelError> {
        Model::build_at(place, device, |device, table| model.build(self.shape, device, table))
    }

    pub(super) fn profile(
        &self,
        model: &dyn TestModel,
        place: ModelRank,
        context: ContextRank,
    ) -> ModelProfile {
        let build = |device: &Device| self.build(model, device, place);
        let specs = model.specs(self.shape).into_iter().map(|spec| spec.for_context_rank(context));
        let (specs, passes) = (specs.collect::<Vec<_>>(), self.options.pass_options(context));
        ModelProfile::of(build, self.device_options(None), passes, &specs).unwrap()
    }

    pub(super) fn pipeline_degree(&self) -> usize {
        self.pipeline.map_or(1, |(_, num_ranks, _)| num_ranks)
    }

    pub(super) fn device_options(&self, budget: Option<usize>) -> DeviceOptions {
        DeviceOptions { num_threads: self.num_threads, budget, ..DeviceOptions::default() }
    }

    pub(super) fn executor(
        &self,
        test_model: &dyn TestModel,
        group: Group,
        device: &Device,
        host: &Device,
    ) -> Result<Executor, ParallelError> {
        let (pipeline, shards, tensor) = (self.pipeline_degree(), self.num_shards, self.tensor_degree);
        let ((context, heads), experts) = (self.context, self.experts);
        let degrees = Degrees { pipeline, shards, context, heads, tensor, experts };
        let ranks = RankGrid::new(group, degrees)?;
        let model = self.build(test_model, device, ranks.model_rank())?;
        let profile = self.profile(test_model, ranks.model_rank(), ranks.context_rank());
        let program = self
            .program(&chain(model.table(), &profile, self.options.determinism), ranks.pipeline().rank().0);
        let folder = std::env::temp_dir();
        let offload = OffloadOptions { host: host.clone(), folder, ..OffloadOptions::none(device) };
        let (optimizer, options, offload) = (&self.optimizer, self.options, &offload);
        Executor::new(ExecutorSetup { model, profile, optimizer, ranks, device, program, options, offload })
    }

    pub(super) fn run(
        &self,
        subject: &dyn TestModel,
        group: Group,
        device: &Device,
        host: &Device,
    ) -> Result<(), ParallelError> {
        let mut executor = self.executor(subject, group, device, host)?;
        executor.initialize(1)?;
        if let Some(batches) = self.validation() {
            executor.allocate_validation_reports(&batches)?;
            let context = executor.ranks().context_rank();
            for round in batches.rounds(executor.ranks()) {
                let batch = round.batch.map(|index| {
                    let shape = (batches.batch(index).1, self.shape.1);
                    subject.batch(device, shape, 0, index, context)
                });
                executor.evaluate(batch)?;
            }
        }
        for step in 1..=4 {
            let context = executor.ranks().context_rank();
            let batch = |index| subject.batch(device, self.shape, step, index, context);
            let ProgramHeader { num_microbatches, .. } = executor.program().header;
            let batches: Vec<Batch> = (0..num_microbatches).map(batch).collect();
            let plan = StepPlan { step, lr: 1e-3, grad_norm: GradNorm::Measure, has_loss: true };
            let plans = vec![plan; executor.program().header.num_steps()];
            executor.run_steps(&plans, &mut batches.into_iter(), &mut Vec::new())?;
        }
        Ok(())
    }

    pub(super) fn validation(&self) -> Option<ValidationBatches> {
        self.num_validated.map(|num_samples| ValidationBatches::new(num_samples, self.shape.0))
    }

    /// Creates a dry executor of one rank.
    pub(super) fn dry_executor(
        &self,
        subject: &dyn TestModel,
        backend: BackendKind,
        hosts: &[usize],
        rank: usize,
    ) -> Executor {
        let options = DeviceOptions { backend, ..self.device_options(None) };
        let device = Device::counting(options).unwrap();
        let host = device.host().unwrap();
        let group =
            Group::dry(Rank(rank), Hosts::new(hosts), TransportKind::Inproc, &GroupOptions::default())
                .unwrap();
        self.executor(subject, group, &device, &host).unwrap()
    }

    /// Returns the memory that a rank is predicted to use on a backend, without computing.
    pub(super) fn dry_run(
        &self,
        subject: &dyn TestModel,
        backend: BackendKind,
        hosts: &[usize],
        rank: usize,
    ) -> MemoryUse {
        self.dry_executor(subject, backend, hosts, rank).dry_run(self.validation()).unwrap().0
    }

    /// Whether a rank reads batches of all sizes of the validation. The prediction is exact for such a rank.
    pub(super) fn reads_all_sizes(&self, ranks: &RankGrid) -> bool {
        self.validation().is_none_or(|batches| {
            let size = |index: usize| batches.batch(index).1;
            let own: Vec<usize> = batches.rounds(ranks).filter_map(|round| round.batch).map(size).collect();
            (0..batches.num_batches()).all(|index| own.contains(&size(index)))
        })
    }

    /// Compares the memory of a few steps with the prediction, to the byte.
    pub(super) fn check(&self, model: &dyn TestModel, world_size: usize) {
        self.check_on(model, &vec![0; world_size]);
    }

    /// Like [`check`](Case::check), with rank `r` on host `hosts[r]`.
    pub(super) fn check_on(&self, model: &dyn TestModel, hosts: &[usize]) {
        // More threads of several ranks would compete for the processors.
        let num_threads = if hosts.len() == 1 { self.num_threads } else { 1 };
        let case = Case { num_threads, ..self.clone() };
        case.check_backend(model, BackendKind::Cpu, hosts);
        // Larger worlds exchange in the same way on every backend.
        if hosts.len() <= 2 {
            case.check_backend(model, BackendKind::Detached(DetachedOptions::default()), hosts);
        }
    }

    pub(super) fn check_backend(&self, model: &dyn TestModel, backend: BackendKind, hosts: &[usize]) {
        run_ranks_on(hosts, |group| {
            let rank = group.rank().0;
            let device = Device::open(DeviceOptions { backend, ..self.device_options(None) }).unwrap();
            let host = device.host().unwrap();
            self.run(model, group, &device, &host).unwrap();
            let reads_all = self.reads_all_sizes(self.dry_executor(model, backend, hosts, rank).ranks());
            let dry = self.dry_run(model, backend, hosts, rank);
            let found = Category::ALL.map(|category| device.memory().usage(category).peak);
            if !reads_all {
                let is_enough = dry.peaks.0.iter().zip(found).all(|(dry, found)| *dry >= found);
                assert!(is_enough, "rank {rank} of {self:?} on {backend:?}: {:?} {found:?}", dry.peaks);
                return;
            }
            assert_eq!(dry.peaks, CategoryBytes(found), "rank {rank} of {self:?} on {backend:?}");
            let memory = device.memory();
            let pinned = if device.reaches_host() { 0 } else { device.staging().total().peak };
            let on_host = host.memory().total().peak + pinned;
            let measured = [memory.total().peak, memory.own().peak, on_host];
            let dry = [dry.total(), dry.own, dry.host];
            assert_eq!(dry, measured, "rank {rank} of {self:?} on {backend:?}");
        });
    }
}
