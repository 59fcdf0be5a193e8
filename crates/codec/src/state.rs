//! Saving and loading the state of a compressor.

use super::error::Result;
use super::{CompressionError, Compressor};

const SECOND_MOMENT: &str = "second_moment";

/// A vector of a compressor's state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StateValues<'a> {
    /// Elements or factors.
    F32(&'a [f32]),
    /// Counts.
    U64(&'a [u64]),
}

impl<'a> StateValues<'a> {
    /// Returns the values as bytes in native byte order.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            StateValues::F32(values) => bytemuck::cast_slice(values),
            StateValues::U64(values) => bytemuck::cast_slice(values),
        }
    }
}

/// An owned copy of [`StateValues`].
#[derive(Debug, Clone, PartialEq)]
pub enum StateCopy {
    /// Elements or factors.
    F32(Vec<f32>),
    /// Counts.
    U64(Vec<u64>),
}

impl StateCopy {
    /// Borrows the values.
    pub fn values(&self) -> StateValues<'_> {
        match self {
            StateCopy::F32(values) => StateValues::F32(values),
            StateCopy::U64(values) => StateValues::U64(values),
        }
    }

    /// Returns the values as mutable bytes in native byte order.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            StateCopy::F32(values) => bytemuck::cast_slice_mut(values),
            StateCopy::U64(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

impl From<StateValues<'_>> for StateCopy {
    fn from(values: StateValues<'_>) -> Self {
        match values {
            StateValues::F32(values) => StateCopy::F32(values.to_vec()),
            StateValues::U64(values) => StateCopy::U64(values.to_vec()),
        }
    }
}

impl Compressor {
    /// Returns the named vectors that another compressor needs to continue with the same bits. Call it between two
    /// steps. `step` is always present, `residual` with error feedback, `velocity` with momentum, the factors `q` with
    /// `powersgd`, and `second_moment` with normalized gradients. All vectors except `step` and `q` differ between
    /// ranks.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, StateValues<'_>)> {
        let step = ("step", StateValues::U64(std::slice::from_ref(&self.state.step)));
        let residual = self.state.residual.as_deref().map(|values| ("residual", StateValues::F32(values)));
        let kept = self.codec.own_state().map(|(name, values)| (name, StateValues::F32(values)));
        let normalizer = self.state.normalizer.as_ref();
        let moment =
            normalizer.map(|normalizer| (SECOND_MOMENT, StateValues::F32(&normalizer.second_moment[..])));
        [Some(step), residual, kept, moment].into_iter().flatten()
    }

    /// Replaces the state by vectors that [`state`](Compressor::state) returned, in any order. A step in progress is
    /// discarded.
    ///
    /// After a change of the world size, ranks may start with any residuals whose sum over all ranks is the same: for
    /// example, the residuals of removed ranks may be added to those of other ranks. Without the residuals, the
    /// gradients that they hold are lost.
    ///
    /// # Errors
    /// [`CompressionError::State`] unless the vectors have the names, dtypes and lengths of
    /// [`state`](Compressor::state) and all numbers are finite. The state does not change then.
    pub fn load_state(&mut self, tensors: &[(&str, StateValues<'_>)]) -> Result<()> {
        for (index, (name, found)) in tensors.iter().enumerate() {
            let expected = self.state().find(|(expected, _)| expected == name);
            let fault = match (expected.map(|(_, values)| values), found) {
                (None, _) => Some("is not one of its tensors".to_owned()),
                _ if tensors[..index].iter().any(|(earlier, _)| earlier == name) => {
                    Some("occurs twice".to_owned())
                }
                (Some(StateValues::F32(own)), StateValues::F32(found)) => fault(own, found),
                (Some(StateValues::U64(own)), StateValues::U64(found)) => {
                    (own.len() != found.len()).then(|| wrong_len(own.len(), found.len()))
                }
                _ => Some("has another dtype".to_owned()),
            };
            if let Some(fault) = fault {
                return Err(self.refused(format!("'{name}' {fault}")));
            }
        }
        let missing = self.state().find(|(name, _)| !tensors.iter().any(|(found, _)| found == name));
        if let Some((name, _)) = missing {
            return Err(self.refused(format!("'{name}' is missing")));
        }
        tensors.iter().for_each(|(name, values)| self.set_vector(name, *values));
        self.begin_step();
        Ok(())
    }

    /// Copies a validated vector into the state.
    fn set_vector(&mut self, name: &str, values: StateValues<'_>) {
        match values {
            StateValues::U64(values) => self.state.step = values[0],
            StateValues::F32(values) => {
                let own = match &mut self.state.residual {
                    Some(residual) if name == "residual" => residual.as_mut_slice(),
                    _ if name == SECOND_MOMENT => {
                        let normalizer = self.state.normalizer.as_mut();
                        &mut normalizer.expect("the name is one of its tensors").second_moment
                    }
                    _ => self.codec.own_state_mut().expect("the name is one of its tensors").1,
                };
                own.copy_from_slice(values);
            }
        }
    }

    fn refused(&self, what: String) -> CompressionError {
        CompressionError::State { codec: self.compression().codec(), what }
    }
}

fn fault(own: &[f32], found: &[f32]) -> Option<String> {
    if own.len() != found.len() {
        return Some(wrong_len(own.len(), found.len()));
    }
    let broken = found.iter().position(|value| !value.is_finite())?;
    Some(format!("has {} as element {broken}", found[broken]))
}

fn wrong_len(own: usize, found: usize) -> String {
    format!("has {found} elements instead of {own}")
}
