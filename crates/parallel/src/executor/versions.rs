//! Versions of parameters, for a pipeline that does not drain between updates.

use super::earlier_norms::EarlierNorms;
use crate::error::Result;
use crate::layout::RankGrid;
use crate::parameters::RankParameters;
use std::collections::VecDeque;
use trireme_codec::CompressionStatistics;
use trireme_comm::Buffer;
use trireme_optim::StepSettings;
use trireme_schedule::ProgramHeader;
use trireme_tensor::{Category, Device, ParameterSource, Tensor, View};

/// The versions of a rank's parameters, and the state of pending updates.
pub(super) struct AsynchronousUpdates {
    pub(super) units: Vec<UnitVersions>,
    /// The step of the most recent update, with the settings of the step's updates (`None` if it is skipped). `None` before the first
    /// update of a program.
    pub(super) settings: Option<(usize, Option<StepSettings>)>,
    /// For each step, the squared norm of this rank's gradients; `None` while they are summed over the pipeline.
    pub(super) squares: Option<Buffer<f64>>,
    pub(super) norms: EarlierNorms,
    /// For each step, whether `squares` is the squared norm of its gradients. It is not if the step was skipped, or if momentum may have
    /// been exchanged.
    pub(super) has_norms: Vec<bool>,
    pub(super) compression: Vec<Option<CompressionStatistics>>,
}

/// The versions of a unit's parameters. A version is the number of updates of the current program that have produced it.
#[derive(Default)]
pub(super) struct UnitVersions {
    pub(super) newest: usize,
    /// Copies of older versions, the oldest first.
    pub(super) stashed: VecDeque<(usize, Tensor)>,
    /// Memory of copies for reuse.
    pub(super) spare: Vec<Tensor>,
    /// For each microbatch, the version that its passes read.
    pub(super) read: Vec<usize>,
}

impl AsynchronousUpdates {
    /// Creates the versions for programs of `header`, or returns `None` if the pipeline drains between updates. Collective if it does not.
    pub(super) fn new(header: &ProgramHeader, ranks: &mut RankGrid) -> Result<Option<Self>> {
        if header.asynchronous.is_none() {
            return Ok(None);
        }
        let unit = |_| UnitVersions { read: vec![0; header.num_microbatches], ..UnitVersions::default() };
        let units = (0..header.chain.num_units).map(unit).collect();
        let squares = Some(ranks.pipeline().buffer(header.num_steps())?);
        let norms = EarlierNorms::new(header, ranks.split_pipeline("norms")?);
        let (has_norms, compression) = (vec![true; header.num_steps()], vec![None; header.num_steps()]);
        Ok(Some(AsynchronousUpdates { units, settings: None, squares, norms, has_norms, compression }))
    }

    pub(super) fn begin_forward(&mut self, unit: usize, microbatch: usize, header: &ProgramHeader) {
        let state = &mut self.units[unit];
        state.read[microbatch] = header.version_read(microbatch, state.newest);
    }

    pub(super) fn stash(&mut self, unit: usize, whole: View<'_>, device: &Device) -> Result<()> {
        let state = &mut self.units[unit];
        let mut copy = match state.spare.pop() {
            Some(copy) => copy,
            None => device.empty(whole.shape(), whole.dtype(), Category::Parameters)?,
        };
        device.convert(whole, copy.view_mut());
        state.stashed.push_back((state.newest, copy));
        Ok(())
    }

    /// Drops the oldest copy of a unit's parameters, and keeps its memory for reuse.
    pub(super) fn unstash(&mut self, unit: usize) {
        let state = &mut self.units[unit];
        let (_, copy) = state.stashed.pop_front().expect("a valid program has stashed one");
        state.spare.push(copy);
    }

    /// Returns the copy that passes of a unit for a microbatch read, or `None` if they read the newest version.
    fn copy(&self, unit: usize, microbatch: usize) -> Option<View<'_>> {
        let UnitVersions { newest, stashed, read, .. } = &self.units[unit];
        let version = read[microbatch];
        if version == *newest {
            return None;
        }
        let copy = stashed.iter().find(|(stashed, _)| *stashed == version);
        Some(copy.expect("a valid program has stashed it").1.view())
    }
}

/// The parameters that the passes of a unit for a microbatch read.
#[derive(Debug)]
pub(super) struct PassParameters<'a> {
    pub(super) newest: &'a RankParameters,
    pub(super) unit: usize,
    /// An older version of the unit, or `None` for the newest one.
    pub(super) copy: Option<View<'a>>,
}

impl<'a> PassParameters<'a> {
    pub(super) fn new(
        newest: &'a RankParameters,
        updates: Option<&'a AsynchronousUpdates>,
        unit: usize,
        microbatch: usize,
    ) -> Self {
        PassParameters { newest, unit, copy: updates.and_then(|updates| updates.copy(unit, microbatch)) }
    }
}

impl ParameterSource for PassParameters<'_> {
    fn unit(&self, unit: usize) -> View<'_> {
        match self.copy {
            Some(copy) if unit == self.unit => copy,
            _ => self.newest.unit(unit),
        }
    }
}
