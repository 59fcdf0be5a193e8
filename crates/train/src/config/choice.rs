//! Keys whose values are words.

use super::nearest;
use super::value::ConfigValue;
use std::path::PathBuf;
use toml::de::DeValue;
use trireme_codec::CodecName;
use trireme_comm::TransportChoice;
use trireme_data::InvalidUtf8;
use trireme_optim::{Decay, MuonScale, OptimizerName, StateDType};
use trireme_parallel::Determinism;
use trireme_schedule::ParseError;
use trireme_schedule::collective::Algorithm;
use trireme_schedule::pipeline::ScheduleKind;
use trireme_tensor::{CudaInstallation, Gpu, Precision};

/// Implements [`ConfigValue`] for an enum whose variants have names: a value is written as the name of its variant.
macro_rules! value_by_name {
    ($name:ident) => {
        impl ConfigValue for $name {
            fn expected() -> String {
                one_of(&Self::ALL.map(Self::name))
            }

            fn read(value: &DeValue<'_>) -> Result<Self, String> {
                let word = value.as_str();
                word.and_then(Self::named).ok_or_else(|| refuse_word(word, &Self::ALL.map(Self::name)))
            }

            fn write(&self) -> Option<toml::Value> {
                Some(self.name().into())
            }
        }
    };
}

value_by_name!(CodecName);
value_by_name!(Decay);
value_by_name!(Determinism);
value_by_name!(InvalidUtf8);
value_by_name!(ScheduleKind);
value_by_name!(MuonScale);
value_by_name!(OptimizerName);
value_by_name!(Precision);
value_by_name!(StateDType);
value_by_name!(TransportChoice);

/// Defines an enum for a key. Each variant is written as one word.
macro_rules! config_choice {
    (
        $(#[doc = $doc:literal])+
        $name:ident { $($(#[doc = $variant_doc:literal])+ $variant:ident = $word:literal,)+ }
    ) => {
        trireme_base::named! {
            $(#[doc = $doc])+
            pub enum $name {
                $($(#[doc = $variant_doc])+ $variant = $word,)+
            }
        }
        value_by_name!($name);
    };
}

pub(super) fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
    match quoted.as_slice() {
        [only] => format!("{only} (the only choice in this version)"),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
        [] => unreachable!("a choice has at least one word"),
    }
}

pub(super) fn refuse_word(found: Option<&str>, words: &[&str]) -> String {
    let hint = found.and_then(|found| nearest(found, words)).filter(|_| words.len() > 1);
    match hint {
        Some(word) => format!("{}; did you mean {word:?}?", one_of(words)),
        None => one_of(words),
    }
}

config_choice! {
    /// Whether GPUs of workers exchange data by NCCL.
    NcclUse {
        /// Uses NCCL if all hosts have it and no GPU is shared.
        Auto = "auto",
        /// Requires NCCL: a run that cannot use it is refused.
        Always = "always",
        /// Never uses NCCL.
        Never = "never",
    }
}

config_choice! {
    /// The format of log lines.
    LogFormat {
        /// Plain text for people.
        Text = "text",
        /// JSON for programs.
        Json = "json",
    }
}

config_choice! {
    /// The binding of workers to cores.
    Bind {
        /// Each worker to its own cores, unless the launcher has chosen cores, workers outnumber CPUs, a control group limits CPU time, or
        /// the load average is above half the CPUs.
        Auto = "auto",
        /// Each worker to its own cores, even if other programs use the host.
        Cores = "cores",
        /// No binding: the system chooses.
        None = "none",
    }
}

config_choice! {
    /// The use of 2 MiB pages for memory.
    HugePages {
        /// As far as the system provides them (`/sys/kernel/mm/transparent_hugepage`).
        Transparent = "transparent",
        /// From the pool that the host has reserved (`vm.nr_hugepages`, Kubernetes' `hugepages-2Mi`). The pool must hold all memory of the
        /// device.
        Reserved = "reserved",
        /// No huge pages, even where the system would provide them.
        Never = "never",
    }
}

config_choice! {
    /// The family a model belongs to.
    Architecture {
        /// Learned positions, LayerNorm, GELU.
        Gpt2 = "gpt2",
        /// Rotary positions, RMSNorm, SwiGLU, grouped-query attention.
        Llama = "llama",
    }
}

config_choice! {
    /// The hardware that workers compute on.
    DeviceName {
        /// An NVIDIA GPU if the machine has one that can be used, else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// An NVIDIA GPU for each worker.
        Cuda = "cuda",
        /// A CPU that behaves like an accelerator: kernels run asynchronously, and the host cannot read the device's memory.
        Detached = "detached",
    }
}

impl DeviceName {
    /// Replaces [`Auto`](DeviceName::Auto) by the device that it stands for on this machine.
    pub fn resolved(self) -> Self {
        let has_gpu = || CudaInstallation::from_environment().is_ok_and(|cuda| cuda.gpu(0).is_ok());
        match self {
            DeviceName::Auto if has_gpu() => DeviceName::Cuda,
            DeviceName::Auto => DeviceName::Cpu,
            device => device,
        }
    }

    /// Returns the number of devices of this kind that this host has: of GPUs, those before the first one that cannot be used. At least 1.
    pub fn num_devices(self) -> usize {
        match self {
            DeviceName::Auto | DeviceName::Cpu | DeviceName::Detached => 1,
            DeviceName::Cuda => {
                let gpus = CudaInstallation::from_environment().and_then(|cuda| cuda.gpus());
                let num_usable = |gpus: Vec<Gpu>| gpus.iter().take_while(|gpu| gpu.check().is_ok()).count();
                gpus.map_or(1, |gpus| num_usable(gpus).max(1))
            }
        }
    }
}

config_choice! {
    /// The data type of the inputs of the blocks' matrix multiplications.
    Fp8 {
        /// The training's dtype.
        Off = "off",
        /// Values rounded to E4M3: 4 bits of exponent and 3 of fraction.
        E4m3 = "e4m3",
        /// E4M3, but gradients rounded to E5M2: 5 bits of exponent and 2 of fraction.
        Hybrid = "hybrid",
    }
}

config_choice! {
    /// The data type in which gradients are summed.
    QuantizedGradients {
        /// Floats of the type `reduce_dtype`.
        None = "none",
        /// 8-bit integers in blocks that share a scale.
        Int8 = "int8",
        /// 4-bit integers in blocks that share a scale.
        Int4 = "int4",
    }
}

config_choice! {
    /// The activations that the forward pass keeps for the backward pass.
    ActivationCheckpointMode {
        /// All activations.
        None = "none",
        /// The results of matrix products and attention.
        Selective = "selective",
        /// The input of each block.
        Block = "block",
        /// The input of some blocks.
        EveryK = "every-k",
        /// The choice with the least recomputation that fits into a given memory.
        Auto = "auto",
    }
}

config_choice! {
    /// The place where a class of training state is stored between its uses.
    Tier {
        /// On the device.
        Device = "device",
        /// In the memory of the host.
        Host = "host",
        /// On a disk.
        Disk = "disk",
        /// On the nearest of these places that has room for all of it.
        Auto = "auto",
    }
}

config_choice! {
    /// A difference that is allowed between a resuming run and its checkpoint.
    Change {
        /// The optimizer. Its state starts from zero.
        Optimizer = "optimizer",
        /// Settings of the model that leave the names and shapes of its parameters unchanged.
        Model = "model",
        /// The samples, their order or their tokenizer.
        Data = "data",
    }
}

config_choice! {
    /// The method by which documents become sequences.
    Packing {
        /// `Documents` if only some of the tokens contribute to the loss, else `Stream`.
        Auto = "auto",
        /// Documents are concatenated and split wherever a sequence ends.
        Stream = "stream",
        /// As many whole documents as fit. The rest of the sequence is padding, which does not contribute to the loss.
        Documents = "documents",
    }
}

/// The source of the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokenizer {
    /// The tokenizer of the pretrained model that the run starts from, or bytes without one.
    Auto,
    /// Each byte is a token.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File(PathBuf),
}

impl ConfigValue for Tokenizer {
    fn expected() -> String {
        "\"auto\", \"bytes\" or the path of a tokenizer.json".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("auto") => Ok(Tokenizer::Auto),
            Some("bytes") => Ok(Tokenizer::Bytes),
            // The ending distinguishes a path from a misspelt word.
            Some(path) if path.ends_with(".json") => Ok(Tokenizer::File(path.into())),
            _ => Err(Self::expected()),
        }
    }

    fn write(&self) -> Option<toml::Value> {
        match self {
            Tokenizer::Auto => Some("auto".into()),
            Tokenizer::Bytes => Some("bytes".into()),
            Tokenizer::File(path) => path.write(),
        }
    }
}

/// The checkpoint that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest complete checkpoint in the run's folder, if there is one.
    Auto,
    /// No checkpoint: the run must be new.
    Never,
    /// The checkpoint in this folder, or the newest one if the folder is a run's.
    From(PathBuf),
}

impl ConfigValue for Resume {
    fn expected() -> String {
        "\"auto\", \"never\" or the path of a checkpoint or of a run's folder, with a '/' in it".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("auto") => Ok(Resume::Auto),
            Some("never") => Ok(Resume::Never),
            // The slash distinguishes a path from a misspelt word.
            Some(path) if path.contains('/') => Ok(Resume::From(path.into())),
            _ => Err(Self::expected()),
        }
    }

    fn write(&self) -> Option<toml::Value> {
        match self {
            Resume::Auto => Some("auto".into()),
            Resume::Never => Some("never".into()),
            Resume::From(path) => path.write(),
        }
    }
}

impl ConfigValue for Algorithm {
    fn expected() -> String {
        "the name of an algorithm, such as \"ring\" or \"hierarchical:all:direct:ring\"".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let word = value.as_str().ok_or_else(Self::expected)?;
        word.parse().map_err(|error: ParseError| error.to_string())
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.to_string().into())
    }
}
