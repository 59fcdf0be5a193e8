use crate::Operation;
use serde::{Deserialize, Serialize};
use trireme_base::{DType, Rank, ReduceOp};

/// An operation as documents have it.
#[derive(Serialize, Deserialize)]
pub(crate) struct OperationFields {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reduction: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<u32>,
    dtype: String,
    len: usize,
    /// For readers: follows from the others.
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

/// The fields describe no operation.
#[derive(Debug, thiserror::Error)]
#[error("'{0}' with these fields is no operation")]
pub(crate) struct NoOperation(String);

impl TryFrom<OperationFields> for Operation {
    type Error = NoOperation;

    fn try_from(fields: OperationFields) -> Result<Self, NoOperation> {
        const OPS: [ReduceOp; 5] =
            [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
        let reduction = fields.reduction.as_deref();
        let op = OPS.into_iter().find(|op| Some(&*op.to_string()) == reduction);
        let root = fields.root.map(|root| Rank(root as usize));
        let dtype: Option<DType> = fields.dtype.parse().ok();
        let len = fields.len;
        operation(&fields.name, op, root, dtype, len).ok_or(NoOperation(fields.name))
    }
}

fn operation(
    name: &str,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    dtype: Option<DType>,
    len: usize,
) -> Option<Operation> {
    let dtype = dtype?;
    Some(match name {
        "all_reduce" => Operation::AllReduce { op: op?, dtype, len },
        "reduce" => Operation::Reduce { op: op?, root: root?, dtype, len },
        "broadcast" => Operation::Broadcast { root: root?, dtype, len },
        "all_gather" => Operation::AllGather { dtype, len },
        "reduce_scatter" => Operation::ReduceScatter { op: op?, dtype, len },
        "gather" => Operation::Gather { root: root?, dtype, len },
        "scatter" => Operation::Scatter { root: root?, dtype, len },
        "all_to_all" => Operation::AllToAll { dtype, len },
        "all_to_all_variable" => Operation::AllToAllVariable { dtype },
        "all_to_all_variable_by_hosts" => Operation::AllToAllVariableByHosts { dtype, len },
        "all_gather_bytes" => Operation::AllGatherBytes,
        "barrier" => Operation::Barrier,
        "message" => Operation::Message { dtype, len },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_read_back_from_documents() {
        let (op, root, dtype, len) = (ReduceOp::Max, Rank(3), DType::Bf16, 7);
        for operation in [
            Operation::AllReduce { op, dtype, len },
            Operation::Reduce { op, root, dtype, len },
            Operation::Broadcast { root, dtype, len },
            Operation::AllGather { dtype, len },
            Operation::ReduceScatter { op, dtype, len },
            Operation::Gather { root, dtype, len },
            Operation::Scatter { root, dtype, len },
            Operation::AllToAll { dtype, len },
            Operation::AllToAllVariable { dtype },
            Operation::AllToAllVariableByHosts { dtype, len },
            Operation::AllGatherBytes,
            Operation::Barrier,
            Operation::Message { dtype, len },
        ] {
            let text = serde_json::to_string(&operation).expect("a document");
            assert_eq!(serde_json::from_str::<Operation>(&text).expect("an operation"), operation, "{text}");
        }
        let text = serde_json::to_string(&Operation::Message { dtype, len }).expect("a document");
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
