use crate::operation::{Operation, OperationKind};
use serde::{Deserialize, Serialize};
use trireme_base::{DType, Rank, ReduceOp};

/// The fields of an operation in a JSON document.
#[derive(Serialize, Deserialize)]
pub(crate) struct OperationFields {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reduction: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<u32>,
    dtype: String,
    len: usize,
    /// For readers only; derived from the other fields.
    #[serde(default)]
    bytes: u64,
}

impl From<Operation> for OperationFields {
    fn from(operation: Operation) -> Self {
        let (dtype, len) = operation.elements();
        OperationFields {
            name: operation.name().to_owned(),
            reduction: operation.reduction().map(|op| op.to_string()),
            root: operation.root().map(|root| root.0 as u32),
            dtype: dtype.to_string(),
            len,
            bytes: operation.bytes(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("'{0}' with these fields is no operation")]
pub(crate) struct InvalidOperation(String);

impl TryFrom<OperationFields> for Operation {
    type Error = InvalidOperation;

    fn try_from(fields: OperationFields) -> Result<Self, InvalidOperation> {
        let op = fields.reduction.as_deref().and_then(ReduceOp::named);
        let root = fields.root.map(|root| Rank(root as usize));
        let dtype: Option<DType> = fields.dtype.parse().ok();
        let kind = OperationKind::named(&fields.name);
        let operation = kind
            .zip(dtype)
            .and_then(|(kind, dtype)| Operation::from_fields(kind, op, root, dtype, fields.len));
        operation.ok_or(InvalidOperation(fields.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_schedule::collective::CollectiveKind;

    #[test]
    fn operations_read_back_from_documents() {
        let (op, root, dtype, len) = (ReduceOp::Max, Rank(3), DType::Bf16, 7);
        for operation in [
            Operation::reduction_of(CollectiveKind::AllReduce.with_len(len), op, dtype),
            Operation::reduction_of(CollectiveKind::Reduce.with_root(root, len), op, dtype),
            Operation::of(CollectiveKind::Broadcast.with_root(root, len), dtype),
            Operation::of(CollectiveKind::AllGather.with_len(len), dtype),
            Operation::reduction_of(CollectiveKind::ReduceScatter.with_len(len), op, dtype),
            Operation::of(CollectiveKind::Gather.with_root(root, len), dtype),
            Operation::of(CollectiveKind::Scatter.with_root(root, len), dtype),
            Operation::of(CollectiveKind::AllToAll.with_len(len), dtype),
            Operation::all_to_all_variable(dtype),
            Operation::all_to_all_variable_by_hosts(dtype, len),
            Operation::ALL_GATHER_BYTES,
            Operation::BARRIER,
            Operation::message(dtype, len),
        ] {
            let text = serde_json::to_string(&operation).expect("a document");
            assert_eq!(serde_json::from_str::<Operation>(&text).expect("an operation"), operation, "{text}");
        }
        let text = serde_json::to_string(&Operation::message(dtype, len)).expect("a document");
        assert_eq!(text, r#"{"name":"message","dtype":"bf16","len":7,"bytes":14}"#);
        for wrong in [
            r#"{"name":"sum","dtype":"f32","len":1}"#,
            r#"{"name":"all_reduce","dtype":"f32","len":1}"#,
            r#"{"name":"all_reduce","reduction":"avg","dtype":"f32","len":1}"#,
            r#"{"name":"barrier","dtype":"f31","len":0}"#,
            r#"{"name":"broadcast","root":-1,"dtype":"f32","len":0}"#,
        ] {
            assert!(serde_json::from_str::<Operation>(wrong).is_err(), "{wrong}");
        }
    }
}
