use super::super::Cuda;
use super::super::launch::{Argument, Words, pair};
use crate::kernels::call::LayerCall;
use crate::kernels::cpu::cross_entropy::{NUM_STATISTICS, VocabularyChunk};
use crate::kernels::cpu::norm::NormKind;
use crate::kernels::{Bags, Operand};
use crate::shape::Shape;
use trireme_base::Positions;

impl Argument for Positions {
    fn append(&self, to: &mut Words) -> usize {
        self.to_array().append(to)
    }
}

/// `Chunk` of `sources/layers.cu`.
impl Argument for VocabularyChunk {
    fn append(&self, to: &mut Words) -> usize {
        [self.vocabulary_start + self.first, self.len].append(to)
    }
}

/// `Bags` of `sources/layers.cu`, with the number of rows of the table.
impl Argument for (&Bags<Operand>, usize) {
    fn append(&self, to: &mut Words) -> usize {
        let (bags, num_rows) = self;
        let (start, len) = bags.shard.unwrap_or((0, *num_rows));
        let flags = pair(bags.is_mean.into(), bags.shard.is_some().into());
        bags.ids.append(to) + bags.lens.append(to) + [bags.bag_len, start, len].append(to) + flags.append(to)
    }
}

impl Cuda {
    pub(super) fn run_layer(&self, call: &LayerCall) {
        match call {
            LayerCall::Norm { x, weight, bias, y, statistics, kind: NormKind { epsilon, is_centered } } => {
                let launch = self.kernel("norm", &[y.dtype()]).arg(x).arg(weight).arg(bias).arg(epsilon);
                let launch = launch.arg(is_centered).arg(y).arg(statistics);
                let cols = weight.shape().num_elements();
                launch.arg(cols).over_rows(x.shape().num_elements() / cols);
            }
            LayerCall::NormBackwardInput { rows, kind, dy, dx, accumulate } => {
                let launch = self.kernel("norm_backward_input", &[dy.dtype()]).arg(rows.x).arg(rows.weight);
                let launch =
                    launch.arg(rows.statistics).arg(kind.is_centered).arg(dy).arg(dx).arg(accumulate);
                let cols = rows.weight.shape().num_elements();
                launch.arg(cols).over_rows(rows.x.shape().num_elements() / cols);
            }
            LayerCall::NormBackwardWeight { x, dy, statistics, d_weight, accumulate } => {
                let cols = d_weight.shape().num_elements();
                let launch =
                    self.kernel("norm_backward_weight", &[dy.dtype()]).arg(x).arg(dy).arg(statistics);
                let launch = launch.arg(d_weight).arg(accumulate).arg(x.shape().num_elements() / cols);
                launch.over_columns(cols);
            }
            LayerCall::Round { x, y, precision } => {
                let launch = self.kernel("round", &[x.dtype(), precision.dtype()]);
                launch.arg(x).arg(y).over_elements(x.shape());
            }
            LayerCall::Embedding { ids, table, position_table, out, precision, row_positions } => {
                let num_positions = position_table.map_or(0, |table| table.shape().rows());
                let launch = self.kernel("embedding", &[table.dtype(), precision.dtype()]).arg(ids);
                let launch =
                    launch.arg(table).arg(table.shape().rows()).arg(position_table).arg(num_positions);
                let cols = out.shape().num_elements() / ids.shape().num_elements();
                launch.arg(row_positions).arg(out).arg(cols).over_elements(out.shape());
            }
            LayerCall::AddPositions { x, table, first_row, row_positions, out } => {
                let launch = self.kernel("add_positions", &[]).arg(x).arg(table).arg(table.shape().rows());
                let launch = launch.arg(first_row).arg(row_positions).arg(out);
                launch.arg(out.shape().cols()).over_elements(out.shape());
            }
            LayerCall::EmbeddingBag { bags, table, out, precision } => {
                let launch = self.kernel("embedding_bag", &[table.dtype(), precision.dtype()]);
                let launch = launch.arg((bags, table.shape().rows())).arg(table).arg(out);
                launch.arg(out.shape().cols()).over_elements(out.shape());
            }
            LayerCall::EmbeddingBagBackward { bags, dy, d_table } => {
                let launch = self.kernel("embedding_bag_backward", &[]);
                let launch = launch.arg((bags, d_table.shape().rows())).arg(dy).arg(d_table);
                launch.arg(dy.shape().cols()).over_rows(bags.ids.shape().num_elements());
            }
            LayerCall::PositionBackward { dy, d_positions, row_positions } => {
                let cols = dy.shape().cols();
                let num_sequences = dy.shape().rows() / row_positions.len();
                let launch = self.kernel("position_backward", &[]).arg(dy).arg(num_sequences);
                let launch = launch.arg(row_positions).arg(d_positions).arg(cols);
                launch.over_elements(Shape::from([row_positions.len(), cols]));
            }
            LayerCall::SoftmaxStatistics { logits, targets, statistics, chunk } => {
                let launch = self.kernel("softmax_statistics", &[]).arg(logits).arg(targets).arg(chunk);
                let launch = launch.arg(chunk.first == 0).arg(statistics);
                launch.over_rows(targets.shape().num_elements());
            }
            LayerCall::MergeStatistics { parts, statistics } => {
                let len = statistics.shape().num_elements();
                let launch = self.kernel("merge_statistics", &[]).arg(parts);
                let launch = launch.arg(parts.shape().num_elements() / len).arg(statistics);
                launch.over_elements(Shape::from([len / NUM_STATISTICS]));
            }
            LayerCall::CrossEntropyGradient { logits, targets, chunk, statistics, factors, gradient } => {
                let launch =
                    self.kernel("cross_entropy_gradient", &[gradient.dtype()]).arg(logits).arg(targets);
                let launch = launch.arg(chunk).arg(statistics).arg(factors.scale).arg(factors.weights);
                launch.arg(gradient).over_elements(gradient.shape());
            }
        }
    }
}
