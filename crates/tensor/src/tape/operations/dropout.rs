use crate::device::Result;
use crate::kernels::cpu::dropout::RandomWordRows;
use crate::tape::{
    BackwardContext, ForwardContext, Operation, OperationContext, Randomness, Sharding, TensorAxis, declares,
};
use crate::tensor::Tensor;
use trireme_base::{AxisRank, RandomKey};

/// Sets each element of a float value to 0 with a fixed probability, and scales the others to preserve the mean (Srivastava et al.,
/// "Dropout", 2014). Samples are equal in size and contiguous. Tapes that do not record leave the value unchanged.
///
/// Whether an element is kept is a function of seed, name, step, sample and place within the sample, independent of tensor and context
/// parallelism. Backward recomputes the mask.
#[derive(Debug, Clone)]
pub struct Dropout {
    name: String,
    rate: f32,
}

impl Dropout {
    /// Creates a dropout operation with a name that is unique in the model and a drop probability.
    ///
    /// # Panics
    /// If the probability is not at least 0 and less than 1.
    pub fn new(name: impl Into<String>, rate: f32) -> Self {
        assert!((0.0..1.0).contains(&rate), "a dropout of {rate}");
        Dropout { name: name.into(), rate }
    }

    /// Applies the mask in place: to `x` in forward, to the gradient in backward.
    fn apply_mask(&self, cx: &OperationContext<'_>, x: &mut Tensor, sharding: Sharding) {
        let Randomness { seed, step, first_sample, num_samples } = cx.randomness();
        let key = RandomKey::new(seed, &self.name).derived(step);
        let place = cx.tensor_axis().map_or(AxisRank::ALONE, TensorAxis::axis_rank);
        let (num_local, cols, num_samples) = (x.shape().num_elements(), x.shape().cols(), num_samples.max(1));
        // Maps local elements to the full value of all tensor-parallel ranks.
        let (degree, start, stride) = match sharding {
            Sharding::Replicated => (1, 0, cols),
            Sharding::Rows => (place.degree, place.rank * num_local, cols),
            Sharding::ByParameters => (place.degree, place.rank * cols, place.degree * cols),
        };
        let len = num_local * degree;
        assert!(len.is_multiple_of(num_samples), "{len} elements of {num_samples} samples");
        if cx.context_axis().is_none() {
            let first = first_sample.wrapping_mul((len / num_samples) as u64).wrapping_add(start as u64);
            cx.device().dropout(x.view_mut(), key, RandomWordRows { first, len: cols, stride }, self.rate);
            return;
        }
        // `position_len` and `row_start` refer to the full value of all tensor-parallel ranks. `at` has only the positions of this context
        // rank.
        let inner: usize = x.shape().dims()[2..].iter().product();
        let position_len = match sharding {
            // The second-last dim is sharded.
            Sharding::Rows if x.shape().dims().len() > 3 => inner * degree,
            _ => inner * stride / cols,
        };
        let at = cx.positions(len / num_samples / position_len);
        let sample_len = at.len() * cx.context_rank().degree() * position_len;
        let (row_start, col_start) = if sharding == Sharding::Rows { (start, 0) } else { (0, start) };
        for (sample, (index, run)) in
            (0..num_samples).flat_map(|sample| at.runs().map(move |run| (sample, run)))
        {
            // The intersection of the run with this rank's elements.
            let run_start = (sample * at.len() + index) * position_len;
            let begin = run_start.max(row_start);
            let end = (run_start + run.len() * position_len).min(row_start + num_local * stride / cols);
            if begin >= end {
                continue;
            }
            let first = first_sample.wrapping_add(sample as u64).wrapping_mul(sample_len as u64);
            let first = first.wrapping_add((run.start * position_len + begin - run_start + col_start) as u64);
            let [from, len] = [begin - row_start, end - begin].map(|elements| elements / stride * cols);
            let part = x.view_mut().into_part(from, [len / cols, cols].into());
            cx.device().dropout(part, key, RandomWordRows { first, len: cols, stride }, self.rate);
        }
    }
}

impl Operation for Dropout {
    declares! { accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.take_or_copy_input(0)?;
        if cx.is_recording() {
            self.apply_mask(cx, &mut y, cx.output_sharding());
        }
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut grad = cx.take_output_grad();
        self.apply_mask(cx, &mut grad, cx.output_sharding());
        cx.add_grad(0, grad)
    }
}
