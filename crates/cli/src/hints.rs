//! Remedies for errors: keys of the config, environment variables and options, which libraries do not name.

use std::error::Error;
use trireme_checkpoint::{CONFIG_FILE, CheckpointError};
use trireme_comm::CommError;
use trireme_data::DataError;
use trireme_model::ModelError;
use trireme_parallel::ParallelError;
use trireme_tensor::DeviceError;
use trireme_train::TrainError;

/// Returns the remedy for an error, or for the first of its causes that has one.
pub(crate) fn hint(error: &anyhow::Error) -> Option<&'static str> {
    error.chain().find_map(of_cause)
}

fn of_cause(cause: &(dyn Error + 'static)) -> Option<&'static str> {
    cause
        .downcast_ref::<TrainError>()
        .and_then(train)
        .or_else(|| cause.downcast_ref().and_then(parallel))
        .or_else(|| cause.downcast_ref().and_then(model))
        .or_else(|| cause.downcast_ref().and_then(device))
        .or_else(|| cause.downcast_ref().and_then(comm))
        .or_else(|| cause.downcast_ref().and_then(data))
        .or_else(|| cause.downcast_ref().and_then(checkpoint))
}

fn train(error: &TrainError) -> Option<&'static str> {
    match error {
        TrainError::Parallel(error) => parallel(error),
        TrainError::Model(error) => model(error),
        TrainError::Device(error) => device(error),
        TrainError::Comm(error) => comm(error),
        TrainError::Data(error) => data(error),
        TrainError::Checkpoint(error) => checkpoint(error),
        _ => None,
    }
}

fn parallel(error: &ParallelError) -> Option<&'static str> {
    Some(match error {
        ParallelError::Device(error) => return device(error),
        ParallelError::Model(error) => return model(error),
        ParallelError::Comm(error) => return comm(error),
        ParallelError::NotFinite { .. } => {
            "try a lower [optimizer] lr, a longer [lr_scheduler] warmup_steps, or [training] max_norm"
        }
        ParallelError::LossScaleExhausted { .. } => {
            "try [training] dtype = \"bf16\", a lower [optimizer] lr, or loss_scale = 0 if it is set"
        }
        ParallelError::UnevenRanksPerHost { .. } => {
            "start the same number of workers on each host, or remove [parallelism] zero_quantized_weights, zero_hpz and \
             zero_quantized_gradients"
        }
        ParallelError::DifferentHostCounts { .. } => {
            "choose degrees that divide the number of workers of a host, or remove [parallelism] zero_quantized_weights, zero_hpz \
             and zero_quantized_gradients"
        }
        ParallelError::QuantizedLoadCounts { .. } => "remove [parallelism] zero_quantized_gradients",
        _ => return None,
    })
}

fn model(error: &ModelError) -> Option<&'static str> {
    if let ModelError::Device(error) = error { device(error) } else { None }
}

fn device(error: &DeviceError) -> Option<&'static str> {
    Some(match error {
        DeviceError::ReserveHuge(_) | DeviceError::HugePages(_) => {
            "set [memory] huge_pages = \"transparent\""
        }
        DeviceError::Threads { .. } => "lower [training] threads",
        DeviceError::RustFunction { .. } => "set [training] device = \"cpu\"",
        DeviceError::Unaddressable { .. } | DeviceError::OutOfMemory(_) => {
            "set a smaller [training] local_batch_size or seq_len"
        }
        DeviceError::IndivisibleRows { .. } => {
            "set another [training] seq_len, or [parallelism] sequence_parallel = false"
        }
        DeviceError::IndivisibleHeads { .. } => {
            "set [parallelism] context_parallel_heads_degree = 1, or another divisor"
        }
        DeviceError::NeedsAllPositions { .. } => "set [parallelism] context_parallel_degree = 1",
        DeviceError::Exchange(error) => return error.downcast_ref().and_then(parallel),
        _ => return None,
    })
}

/// Returns the remedy for the reason why a worker was refused.
pub(crate) fn refusal_hint(reason: &str) -> Option<&'static str> {
    reason.contains("secret").then_some("the secret is in TRIREME_SECRET or [comm] secret_file")
}

fn comm(error: &CommError) -> Option<&'static str> {
    Some(match error {
        CommError::SecretMissing { .. } => {
            "set TRIREME_SECRET or [comm] secret_file to the same random text on all workers (openssl rand -hex 32), or set \
             [comm] require_secret = false if anybody on that network may join"
        }
        CommError::Refused { reason, .. } => refusal_hint(reason)?,
        CommError::RanksMissing { refused, .. } => refused.iter().find_map(|reason| refusal_hint(reason))?,
        CommError::Split { reason, .. } if reason.contains("none of the ports") => "widen [comm] ports",
        CommError::TlsUnavailable => {
            "build this program with --features tls, or remove [comm] tls_certificate"
        }
        CommError::Interface { .. } => {
            "check [comm] interface, TRIREME_INTERFACE, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        }
        CommError::DeviceTransport { .. } => {
            "set NCCL_DEBUG=WARN to see NCCL's messages, or set [comm] nccl = \"never\" to exchange data through host memory"
        }
        CommError::ListenForPeers { .. } => "check [comm] interface, and widen [comm] ports if none is free",
        _ => return None,
    })
}

fn data(error: &DataError) -> Option<&'static str> {
    Some(match error {
        DataError::NoTokens => "to train a tokenizer on the text, set [data] train_bpe, or give --train-bpe",
        DataError::JsonField { .. } => "[data] field or --field names the field of the text",
        DataError::NoChatTemplate { .. } => {
            "set [data] chat_template, or give --chat-template: `chatml`, or a file"
        }
        _ => return None,
    })
}

fn checkpoint(error: &CheckpointError) -> Option<&'static str> {
    match error {
        CheckpointError::NothingToOpen { path, .. } if path.join(CONFIG_FILE).is_file() => {
            Some("to train the model from random weights, set [model] config")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use std::time::Duration;

    #[test]
    fn hints_are_found_through_all_that_wraps_an_error() {
        let lost = || CommError::TlsUnavailable;
        let wrapped = [
            anyhow::Error::from(lost()),
            ParallelError::from(lost()).into(),
            TrainError::from(ParallelError::from(lost())).into(),
            Err::<(), _>(TrainError::from(lost())).context("training").unwrap_err(),
            ParallelError::Device(DeviceError::from(ParallelError::from(lost()))).into(),
        ];
        for error in wrapped {
            assert!(hint(&error).is_some_and(|hint| hint.contains("tls_certificate")), "{error:?}");
        }
        assert_eq!(hint(&anyhow::anyhow!("something else")), None);
    }

    #[test]
    fn a_refusal_for_the_secret_names_its_keys_at_both_ends() {
        let reason = "it does not know the secret of this job, which all workers need";
        let (address, waited) = (String::new(), Duration::ZERO);
        let refused = [reason.to_owned()].into();
        let missing = CommError::RanksMissing { missing: Vec::new(), address, waited, refused };
        assert_eq!(comm(&missing), refusal_hint(reason));
        assert!(refusal_hint(reason).is_some() && refusal_hint("another job uses this port").is_none());
    }
}
