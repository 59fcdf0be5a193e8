//! What a run trains.

use crate::config::Config;
use crate::dataset::Dataset;
use crate::error::TrainError;
use std::borrow::Cow;
use trireme_checkpoint::Checkpoint;
use trireme_model::{Model, ModelError};
use trireme_tensor::{Device, ParameterTable};

/// What a run trains: a model, and the samples that it learns from. The config says everything else.
///
/// Every rank creates its own task. All of them must be equal.
pub trait Task: Send + Sync {
    /// What the run shows of the model, such as `residual network of 4 blocks`.
    fn description(&self) -> String;

    /// Builds the model on `device`, which may be one that only counts memory. Its parameters go into `table`, which is empty; they have no
    /// values yet. If the tensor axis has several ranks, what the table returns is this rank's part of parameters that are
    /// [cut](trireme_tensor::Parameter::with_cut).
    ///
    /// # Errors
    /// If the model cannot be built ([`ModelError::Build`] with the reason), or there is no memory for its constants.
    fn build(&self, device: &Device, table: ParameterTable) -> Result<Model, ModelError>;

    /// Opens the samples to train on. `seed` is that of the run, for whatever is random in their order or contents. A run opens
    /// them more than once; large contents that a dataset holds in memory should be shared.
    ///
    /// # Errors
    /// If they cannot be read: [`TrainError::Samples`] with the reason.
    fn train_data(&self, seed: u64) -> Result<Box<dyn Dataset>, TrainError>;

    /// Opens the samples to validate on, if there are any.
    ///
    /// # Errors
    /// If they cannot be read.
    fn validation_data(&self) -> Result<Option<Box<dyn Dataset>>, TrainError> {
        Ok(None)
    }

    /// Whether dim 0 of each tensor of a sample is that of the positions of a sequence, of which workers may have parts: what is made of a
    /// position then depends on others by [attention](trireme_tensor::tape::Attention) alone, and the loss is a mean over positions.
    fn has_positions(&self) -> bool {
        false
    }

    /// What the user should know before the run.
    fn notices(&self) -> Vec<String> {
        Vec::new()
    }

    /// Names and values that must be equal on all ranks, beside the config and what identifies the samples: the version of the
    /// program, for example.
    fn facts(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Files that go into every checkpoint beside the weights.
    fn files(&self) -> Vec<TaskFile<'_>> {
        Vec::new()
    }

    /// Refuses to resume from a checkpoint of another model. That parameters have the same names and shapes is checked anyway.
    ///
    /// # Errors
    /// If the checkpoint's model differs.
    fn check(&self, _checkpoint: &Checkpoint) -> Result<(), TrainError> {
        Ok(())
    }
}

/// A file that goes into every checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFile<'a> {
    /// Its name in the folder of the checkpoint.
    pub name: &'static str,
    /// Its bytes.
    pub contents: Cow<'a, [u8]>,
}

/// The samples of a task.
pub struct Samples {
    /// To train on.
    pub train: Box<dyn Dataset>,
    /// To validate on, if there are any.
    pub validation: Option<Box<dyn Dataset>>,
}

impl Samples {
    /// Opens the samples for a run.
    ///
    /// # Errors
    /// If they cannot be opened, or there are none.
    pub fn open(task: &dyn Task, config: &Config) -> Result<Self, TrainError> {
        let (train, validation) = (task.train_data(config.training().seed)?, task.validation_data()?);
        for (purpose, samples) in [("training", Some(&train)), ("validation", validation.as_ref())] {
            if samples.is_some_and(|samples| samples.num_samples() == 0) {
                return Err(TrainError::NoSamples { purpose });
            }
        }
        Ok(Samples { train, validation })
    }
}
