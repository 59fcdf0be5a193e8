//! Keys whose values are words.

use super::nearest;
use super::value::Value;
use std::path::PathBuf;
use toml::de::DeValue;
use trireme_codec::CodecName;
use trireme_comm::TransportChoice;
use trireme_data::InvalidUtf8;
use trireme_optim::{Decay, MuonScale, OptimizerName, StateDType};
use trireme_parallel::Determinism;
use trireme_schedule::ParseError;
use trireme_schedule::collective::Algorithm;
use trireme_schedule::pipeline::Kind;
use trireme_tensor::Precision;

/// Makes an enum whose variants have names a value that is written as one of them.
macro_rules! value_by_name {
    ($name:ident) => {
        impl Value for $name {
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
value_by_name!(Kind);
value_by_name!(MuonScale);
value_by_name!(OptimizerName);
value_by_name!(Precision);
value_by_name!(StateDType);
value_by_name!(TransportChoice);

/// Defines an enum of which each variant is written as one word.
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
    /// How log lines are written.
    LogFormat {
        /// For people.
        Text = "text",
        /// For programs.
        Json = "json",
    }
}

config_choice! {
    /// How workers are bound to cores.
    Bind {
        /// Each to its own cores, unless the launcher has chosen cores, workers outnumber CPUs, a control group limits CPU time, or the load average is above
        /// half the CPUs.
        Auto = "auto",
        /// Each to its own cores, even if other programs use the host.
        Cores = "cores",
        /// Not at all: the system chooses.
        None = "none",
    }
}

config_choice! {
    /// Pages of 2 MiB for memory.
    HugePages {
        /// As far as the system has and gives them (`/sys/kernel/mm/transparent_hugepage`).
        Transparent = "transparent",
        /// From the pool that the host has set aside (`vm.nr_hugepages`, Kubernetes' `hugepages-2Mi`): the pool must hold all memory of the device.
        Reserved = "reserved",
        /// None, even where the system would give them.
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
        /// The CPU.
        Cpu = "cpu",
        /// A CPU that behaves like an accelerator.
        Detached = "detached",
    }
}

impl DeviceName {
    /// Devices of this kind that a host has.
    pub fn num_devices(self) -> usize {
        match self {
            DeviceName::Cpu | DeviceName::Detached => 1,
        }
    }
}

config_choice! {
    /// What the blocks' linear layers multiply.
    Fp8 {
        /// Numbers of the training's dtype.
        Off = "off",
        /// Those rounded to 4 bits of exponent and 3 of fraction.
        E4m3 = "e4m3",
        /// The same, but gradients to 5 bits of exponent and 2 of fraction.
        Hybrid = "hybrid",
    }
}

config_choice! {
    /// What gradients are summed as.
    QuantizedGradients {
        /// Floats, of `reduce_dtype`.
        None = "none",
        /// 8-bit integers in blocks that share a scale.
        Int8 = "int8",
        /// 4-bit integers in blocks that share a scale.
        Int4 = "int4",
    }
}

config_choice! {
    /// What the forward pass keeps for the backward pass.
    ActivationCheckpointMode {
        /// All.
        None = "none",
        /// Results of products and attention.
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
    /// Where state lives.
    Tier {
        /// On the device.
        Device = "device",
        /// In the memory of the host.
        Host = "host",
        /// On a disk.
        Disk = "disk",
        /// On the nearest of these places at which all of it fits.
        Auto = "auto",
    }
}

config_choice! {
    /// What may differ between a run that resumes and the checkpoint that it resumes from.
    Change {
        /// The optimizer: its state begins anew.
        Optimizer = "optimizer",
        /// Settings of the model, as far as its parameters have the same names and shapes.
        Model = "model",
        /// The samples, their order or their tokenizer.
        Data = "data",
    }
}

config_choice! {
    /// How tokens become sequences.
    Packing {
        /// Documents, where only some of the tokens are learned; else a stream.
        Auto = "auto",
        /// Sequences follow each other without a gap, wherever documents end.
        Stream = "stream",
        /// Whole documents, as many as fit; the rest of a sequence is padding, which is not learned.
        Documents = "documents",
    }
}

/// What turns text into tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokenizer {
    /// That of the model that the run begins with; bytes if it begins with none.
    Auto,
    /// Each byte is a token.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File(PathBuf),
}

impl Value for Tokenizer {
    fn expected() -> String {
        "\"auto\", \"bytes\" or the path of a tokenizer.json".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("auto") => Ok(Tokenizer::Auto),
            Some("bytes") => Ok(Tokenizer::Bytes),
            // The ending tells a path from a misspelt word.
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

/// Which checkpoint a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest complete one in the run's folder, or none if there is none.
    Auto,
    /// None: the run must be new.
    Never,
    /// The one in this folder, or the newest one of the run in this folder.
    From(PathBuf),
}

impl Value for Resume {
    fn expected() -> String {
        "\"auto\", \"never\" or the path of a checkpoint or of a run's folder, with a '/' in it".to_owned()
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("auto") => Ok(Resume::Auto),
            Some("never") => Ok(Resume::Never),
            // The slash tells a path from a misspelt word.
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

impl Value for Algorithm {
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
