use super::super::Cuda;
use crate::kernels::call::SumCall;
use crate::kernels::cpu::cross_entropy::NUM_STATISTICS;

impl Cuda {
    pub(super) fn run_sum(&self, call: &SumCall) {
        match call {
            SumCall::ColumnSums { x, out, accumulate } => {
                let cols = out.shape().num_elements();
                let launch = self.kernel("column_sums", &[x.dtype()]).arg(x).arg(out).arg(accumulate);
                launch.arg(x.shape().num_elements() / cols.max(1)).over_columns(cols);
            }
            SumCall::AddSquares { x, sum } => {
                self.kernel("add_squares", &[]).arg(x).arg(sum).over_elements(x.shape());
                self.kernel("carry_sum", &[]).arg(sum).run(1);
            }
            SumCall::SumElements { x, divisor, out } => {
                let launch = self.kernel("sum_elements", &[]).arg(x).arg(divisor).arg(out);
                launch.arg(x.shape().num_elements()).run(1);
            }
            SumCall::SumLosses { statistics, weights, out } => {
                let launch = self.kernel("sum_losses", &[]).arg(statistics).arg(weights).arg(out);
                launch.arg(statistics.shape().num_elements() / NUM_STATISTICS).run(1);
            }
            SumCall::Hits { scores, classes, hits } => {
                let launch = self.kernel("hits", &[]).arg(scores).arg(classes).arg(hits);
                launch.arg(scores.shape().cols()).over_rows(scores.shape().rows());
            }
            SumCall::AddTerm { term, weight, ratio, out } => {
                let launch = self.kernel("add_term", &[]).arg(term).arg(weight).arg(ratio.is_some());
                launch.arg(ratio.unwrap_or_default()).arg(out).run(1);
            }
        }
    }
}
