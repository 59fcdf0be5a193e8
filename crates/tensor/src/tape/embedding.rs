use super::{Backward, GradSink, Node, Tape, Var, write_grad};
use crate::device::DeviceError;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::tensor::Tensor;

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

/// Tokens have no gradient: all of an embedding's backward is the weight half.
#[derive(Debug)]
pub(super) struct EmbeddingWeights {
    node: EmbeddingNode,
    dy: Tensor,
}

impl EmbeddingNode {
    pub(super) fn backward(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<Var, DeviceError> {
        let (output, weights) = self.backward_input(cx);
        weights.run(cx, sink)?;
        Ok(output)
    }

    pub(super) fn backward_input(self, cx: &mut Backward<'_>) -> (Var, EmbeddingWeights) {
        let dy = cx.take_grad(self.y);
        (self.y, EmbeddingWeights { node: self, dy })
    }
}

impl EmbeddingWeights {
    pub(super) fn ids(&self) -> Var {
        self.node.ids
    }

    pub(super) fn run(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        let EmbeddingWeights { node, dy } = self;
        write_grad(sink, &node.op.tokens, |mut out, accumulate| {
            if !accumulate {
                out.f32s().fill(0.0);
            }
            cx.device.embedding_backward(cx.values.get(node.ids), dy.view(), out);
            Ok(())
        })?;
        if let Some(positions) = node.op.positions {
            write_grad(sink, &positions, |mut out, accumulate| {
                if !accumulate {
                    out.f32s().fill(0.0);
                }
                cx.device.position_backward(dy.view(), node.seq_len, out);
                Ok(())
            })?;
        }
        Ok(())
    }
}
