//! Tasks: the model of a run, and its samples.

use crate::config::Config;
use crate::dataset::Dataset;
use crate::error::TrainError;
use std::borrow::Cow;
use trireme_checkpoint::Checkpoint;
use trireme_model::{Model, ModelError};
use trireme_tensor::{Device, ParameterTable};

/// A model, and the samples on which it is trained. The config determines the rest of a run.
///
/// Every rank creates its own task. All of them must be equal.
pub trait Task: Send + Sync {
    /// Returns a description of the model for the user, such as `residual network of 4 blocks`.
    fn description(&self) -> String;

    /// Builds the model on `device`, which may be a device that only counts memory. Adds the model's parameters to `table`, which is
    /// empty. They have no values yet. If the tensor axis has several ranks, the table returns this rank's part of parameters that are
    /// [split](trireme_tensor::Parameter::with_split).
    ///
    /// # Errors
    /// If the model cannot be built ([`ModelError::Build`] with the reason), or there is no memory for its constants.
    fn build(&self, device: &Device, table: ParameterTable) -> Result<Model, ModelError>;

    /// Opens the training samples. `seed` is the seed of the run, for randomness in their order or contents. A run opens them more than
    /// once, so large contents that a dataset holds in memory should be shared.
    ///
    /// # Errors
    /// [`TrainError::Samples`] with the reason if the samples cannot be read.
    fn train_data(&self, seed: u64) -> Result<Box<dyn Dataset>, TrainError>;

    /// Opens the validation samples, if there are any.
    ///
    /// # Errors
    /// If they cannot be read.
    fn validation_data(&self) -> Result<Option<Box<dyn Dataset>>, TrainError> {
        Ok(None)
    }

    /// Returns whether dim 0 of each tensor of a sample is the position in a sequence. Context parallelism may then split this dim. Only
    /// [attention](trireme_tensor::tape::Attention) may combine positions, and the loss must be a mean over positions.
    fn has_positions(&self) -> bool {
        false
    }

    /// Returns notices for the user, which are shown before the run.
    fn notices(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns names and values that must be equal on all ranks, in addition to the config and the identity of the samples: the version of
    /// the program, for example.
    fn facts(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Returns the files that every checkpoint contains in addition to the weights.
    fn files(&self) -> Vec<TaskFile<'_>> {
        Vec::new()
    }

    /// Refuses to resume from a checkpoint of another model. The names and shapes of parameters are checked in any case.
    ///
    /// # Errors
    /// If the checkpoint's model differs.
    fn check(&self, _checkpoint: &Checkpoint) -> Result<(), TrainError> {
        Ok(())
    }
}

/// A file that every checkpoint contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFile<'a> {
    /// The file's name in the folder of the checkpoint.
    pub name: &'static str,
    /// The file's contents.
    pub contents: Cow<'a, [u8]>,
}

/// The samples of a task.
pub struct Samples {
    /// The training samples.
    pub train: Box<dyn Dataset>,
    /// The validation samples, if there are any.
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
