use super::{Backward, Node, Tape, Var};
use crate::device::DeviceError;
use crate::parameters::{ParameterSource, ParameterSpan};

/// Rows of a table by token id, plus rows of a second table by position.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// `[vocabulary, cols]`.
    pub tokens: ParameterSpan,
    /// `[positions, cols]`.
    pub positions: Option<ParameterSpan>,
}

#[derive(Debug)]
pub(super) struct EmbeddingNode {
    op: Embedding,
    ids: Var,
    seq_len: usize,
    y: Var,
}

impl Tape {
    /// Embeds `ids` (`[batch, seq_len]`, u32) into `[batch * seq_len, cols]`; sequences begin at `first_position`.
    pub fn embedding(
        &mut self,
        parameters: &dyn ParameterSource,
        op: &Embedding,
        ids: Var,
        first_position: usize,
    ) -> Result<Var, DeviceError> {
        let input = self.values.get(ids);
        let seq_len = input.shape().cols();
        let mut y = self.device.activation([input.shape().num_elements(), op.tokens.shape.cols()])?;
        let positions = op.positions.map(|positions| parameters.span(&positions));
        let table = parameters.span(&op.tokens);
        self.device.embedding(
            self.precision,
            input,
            table,
            positions,
            (seq_len, first_position),
            y.view_mut(),
        );
        let y = self.input(y);
        self.record(|| Node::Embedding(EmbeddingNode { op: *op, ids, seq_len, y }));
        Ok(y)
    }
}

impl EmbeddingNode {
    /// Tokens have no gradient: all of this is the weight half.
    pub(super) fn backward(self, cx: &mut Backward<'_>) -> Result<Var, DeviceError> {
        let dy = cx.take_grad(self.y);
        cx.write_grad(&self.op.tokens, |device, values, mut out, accumulate| {
            if !accumulate {
                out.f32s().fill(0.0);
            }
            device.embedding_backward(values.get(self.ids), dy.view(), out);
            Ok(())
        })?;
        if let Some(positions) = self.op.positions {
            cx.write_grad(&positions, |device, _, mut out, accumulate| {
                if !accumulate {
                    out.f32s().fill(0.0);
                }
                device.position_backward(dy.view(), self.seq_len, out);
                Ok(())
            })?;
        }
        Ok(self.y)
    }
}
