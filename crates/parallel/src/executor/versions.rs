//! Versions of parameters, of a pipeline that does not drain between updates.

use super::earlier_norms::EarlierNorms;
use crate::error::Result;
use crate::layout::RankGrid;
use crate::parameters::RankParameters;
use std::collections::VecDeque;
use trireme_base::DType;
use trireme_codec::CompressionStatistics;
use trireme_comm::Buffer;
use trireme_optim::StepSettings;
use trireme_schedule::Outline;
use trireme_tensor::{Category, Device, ParameterSource, Tensor, View};

/// Versions of a rank's parameters, and updates under way.
pub(super) struct Updates {
    pub(super) units: Vec<UnitVersions>,
    /// The step whose gradients were reduced last, and how to update by them, unless the step is skipped.
    pub(super) settings: Option<(usize, Option<StepSettings>)>,
    /// By step, squares of the norms of this rank's gradients. Present while they are not being summed.
    pub(super) squares: Option<Buffer<f64>>,
    pub(super) norms: EarlierNorms,
    /// By step, whether its squares are those of gradients: momentum in their place has no norm.
    pub(super) has_norms: Vec<bool>,
    pub(super) compression: Vec<Option<CompressionStatistics>>,
}

/// Versions are counted by the updates of the program that made them.
#[derive(Default)]
pub(super) struct UnitVersions {
    pub(super) newest: usize,
    /// Copies of older ones, the oldest one first.
    pub(super) stashed: VecDeque<(usize, Tensor)>,
    /// Memory of copies that were given back.
    pub(super) spare: Vec<Tensor>,
    /// By microbatch: what its passes read.
    pub(super) read: Vec<usize>,
}

impl Updates {
    /// Of the programs of `outline`, if they do not drain between updates.
    pub(super) fn new(outline: &Outline, ranks: &mut RankGrid) -> Result<Option<Self>> {
        if outline.asynchronous.is_none() {
            return Ok(None);
        }
        let unit = |_| UnitVersions { read: vec![0; outline.num_microbatches], ..UnitVersions::default() };
        let units = (0..outline.chain.num_units).map(unit).collect();
        let squares = Some(ranks.pipeline().buffer(outline.num_steps())?);
        let norms = EarlierNorms::new(outline, ranks.split_pipeline("norms")?);
        let (has_norms, compression) = (vec![true; outline.num_steps()], vec![None; outline.num_steps()]);
        Ok(Some(Updates { units, settings: None, squares, norms, has_norms, compression }))
    }

    pub(super) fn begin_forward(&mut self, unit: usize, microbatch: usize, outline: &Outline) {
        let state = &mut self.units[unit];
        state.read[microbatch] = outline.version_read(microbatch, state.newest);
    }

    pub(super) fn stash(&mut self, unit: usize, whole: View<'_>, device: &Device) -> Result<()> {
        let state = &mut self.units[unit];
        let mut copy = match state.spare.pop() {
            Some(copy) => copy,
            None => device.empty(whole.shape(), DType::F32, Category::Parameters)?,
        };
        device.convert(whole, copy.view_mut());
        state.stashed.push_back((state.newest, copy));
        Ok(())
    }

    /// Gives the oldest copy of a unit's parameters back.
    pub(super) fn unstash(&mut self, unit: usize) {
        let state = &mut self.units[unit];
        let (_, copy) = state.stashed.pop_front().expect("a valid program has stashed one");
        state.spare.push(copy);
    }

    /// The copy that passes of a unit for a microbatch read; `None` if they read what is newest.
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

/// Parameters as the passes of a unit for a microbatch read them.
#[derive(Debug)]
pub(super) struct PassParameters<'a> {
    pub(super) newest: &'a RankParameters,
    pub(super) unit: usize,
    /// An older version of the unit.
    pub(super) copy: Option<View<'a>>,
}

impl<'a> PassParameters<'a> {
    pub(super) fn new(
        newest: &'a RankParameters,
        updates: Option<&'a Updates>,
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
