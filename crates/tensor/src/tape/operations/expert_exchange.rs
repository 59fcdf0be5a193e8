//! Rows of tokens on their way to the ranks that have their experts, and back (Lepikhin et al., "GShard", 2020, section 3.3), without padding.

use super::experts::Capacity;
use crate::device::{Device, DeviceError};
use crate::shape::Shape;
use crate::tape::{
    AxisOps, BackwardContext, ExchangedRuns, ForwardContext, Operation, OperationContext, ReadBy, Runs,
    has_no_gradient,
};
use crate::tensor::{Tensor, View};
use smallvec::SmallVec;
use std::iter;
use std::ops::RangeInclusive;
use trireme_base::{AxisPlace, DType};

/// Tells all ranks of the expert axis how many choices each expert has. The inputs are the first and the last output of [`GroupRows`](crate::tape::GroupRows); of the
/// last one only the shape is read. The outputs, all u32, are:
///
/// - how many choices of each expert each rank has (`[degree, num_experts]`);
/// - where the rows of each of this rank's experts begin, and where the last ones end (`[own_experts + 1]`);
/// - where the rows of each rank begin among those (`[own_experts * degree + 1]`): rows are ordered by expert, and those of an expert by the rank
///   that has sent them.
///
/// Ranks have equally many experts, in their order. On a device that only counts, experts have equally many choices, rounded up, so that all ranks
/// count the same.
///
/// Cost: the host reads the numbers of choices of this rank, and one all-gather of `4 num_experts` bytes a rank.
#[derive(Debug)]
pub struct GatherLoads;

/// Sends rows, ordered by expert (`[1, num_choices, cols]`), to the ranks that have their experts. The output has the rows for this rank's
/// experts, ordered by expert: `[1, num_rows, cols]`. The other inputs are the first output of [`GatherLoads`] and the last one of
/// [`GroupRows`](crate::tape::GroupRows), of which only the shape is read.
///
/// Where experts have a [`Capacity`], there are as many rows as they can take from all ranks, or as those can have: so memory does not depend on
/// loads. Rows that did not come are zeros at the end.
///
/// Cost: the host reads the numbers of choices; an exchange of the rows, and one of their gradients. Rows are copied from where they are to what is sent, and from what comes
/// to where they belong.
#[derive(Debug)]
pub struct DispatchRows {
    /// That of [`GroupRows`](crate::tape::GroupRows).
    pub capacity: Option<Capacity>,
}

/// Sends the rows of this rank's experts back to the ranks that have sent them: the reverse of [`DispatchRows`], with the first output of [`GatherLoads`] and,
/// as the last input, the choice at each place on this rank. Choices that were dropped have zeros.
#[derive(Debug)]
pub struct ReturnRows;

/// How many choices of each expert each rank has.
struct Loads {
    /// One rank's after the other.
    numbers: Vec<u32>,
    place: AxisPlace,
}

impl Loads {
    /// Reads those of this rank from the device, and gathers those of the others. On a device that only counts, experts have equally many.
    fn gather(cx: &OperationContext<'_>, starts: View<'_>, num_choices: usize) -> Result<Self, DeviceError> {
        let (axis, num_experts) = (expert_axis(cx), starts.shape().num_elements() - 1);
        let own: Vec<u32> = match cx.device().is_counting() {
            true => vec![num_choices.div_ceil(num_experts) as u32; num_experts],
            false => cx.device().read::<u32>(starts).windows(2).map(|pair| pair[1] - pair[0]).collect(),
        };
        Ok(Loads { numbers: axis.gather_numbers(&own)?, place: axis.place() })
    }

    /// Reads those of all ranks from the device; `None` from one that only counts.
    fn read(cx: &OperationContext<'_>, numbers: View<'_>) -> Option<Self> {
        let place = expert_axis(cx).place();
        (!cx.device().is_counting()).then(|| Loads { numbers: cx.device().read(numbers), place })
    }

    fn num_experts(&self) -> usize {
        self.numbers.len() / self.place.degree
    }

    fn num_own(&self) -> usize {
        self.num_experts() / self.place.degree
    }

    /// The choices on rank `from` of the experts of rank `of`.
    fn of(&self, from: usize, of: usize) -> &[u32] {
        &self.numbers[from * self.num_experts() + of * self.num_own()..][..self.num_own()]
    }

    /// Rows that rank `from` has for rank `of`.
    fn num_rows(&self, from: usize, of: usize) -> usize {
        self.of(from, of).iter().map(|&number| number as usize).sum()
    }

    /// Where the rows of each own expert begin, and of each rank among them.
    fn starts(&self) -> [Vec<u32>; 2] {
        let AxisPlace { rank, degree } = self.place;
        let (mut starts, mut segments) = (vec![0], vec![0]);
        let mut end = 0;
        for expert in 0..self.num_own() {
            for from in 0..degree {
                end += self.of(from, rank)[expert];
                segments.push(end);
            }
            starts.push(end);
        }
        [starts, segments]
    }

    /// Elements that are sent, which are ordered by expert, and received, by expert and rank; rows have `cols` elements. `most` bounds what one rank
    /// sends to another.
    fn runs(&self, cols: usize, most: usize) -> ExchangedRuns {
        let AxisPlace { rank, degree } = self.place;
        let after = |end: &mut usize, len: usize| {
            *end += len * cols;
            *end - len * cols..*end
        };
        let mut end = 0;
        let sent =
            (0..degree).map(|of| iter::once(after(&mut end, self.num_rows(rank, of))).collect()).collect();
        let mut received: SmallVec<[Runs; 8]> = (0..degree).map(|_| Runs::new()).collect();
        let mut end = 0;
        for expert in 0..self.num_own() {
            for (from, runs) in received.iter_mut().enumerate() {
                runs.push(after(&mut end, self.of(from, rank)[expert] as usize));
            }
        }
        ExchangedRuns { sent, received, most }
    }
}

fn expert_axis<'a>(cx: &'a OperationContext<'_>) -> &'a dyn AxisOps {
    cx.expert_axis().expect("only several ranks have different experts")
}

fn upload(device: &Device, numbers: &[u32], shape: &[usize]) -> Result<Tensor, DeviceError> {
    let mut tensor = device.activation_of(Shape::new(shape), DType::U32)?;
    device.upload(numbers, tensor.view_mut());
    Ok(tensor)
}

impl Operation for GatherLoads {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let loads = Loads::gather(cx, cx.input(0), cx.input(1).shape().num_elements())?;
        let (device, shape) = (cx.device(), [loads.place.degree, loads.num_experts()]);
        let [starts, segments] = loads.starts();
        let made = [
            upload(device, &loads.numbers, &shape)?,
            upload(device, &starts, &[starts.len()])?,
            upload(device, &segments, &[segments.len()])?,
        ];
        made.into_iter().for_each(|numbers| cx.output(numbers));
        Ok(())
    }

    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    has_no_gradient!();
}

/// What ranks send for their experts, of so many rows of this one; on a device that only counts, nothing but the most.
fn runs(cx: &OperationContext<'_>, numbers: View<'_>, [num_rows, cols]: [usize; 2]) -> ExchangedRuns {
    let most = num_rows * cols;
    let loads = Loads::read(cx, numbers);
    loads.map_or(ExchangedRuns { most, ..ExchangedRuns::default() }, |loads| loads.runs(cols, most))
}

/// Rows that come, in `shape`; those that nobody has sent are zeros at the end.
fn exchanged(
    cx: &OperationContext<'_>,
    runs: &ExchangedRuns,
    rows: View<'_>,
    shape: [usize; 3],
) -> Result<Tensor, DeviceError> {
    let device = cx.device();
    let mut received = cx.empty(shape, rows.dtype())?;
    expert_axis(cx).exchange_rows(device, runs, rows, received.view_mut())?;
    let (first, end) = (runs.num_received(), received.shape().num_elements());
    if first < end && !device.is_counting() {
        device.zero(received.view_mut().into_part(first, [end - first].into()));
    }
    Ok(received)
}

impl DispatchRows {
    /// Rows of the output, of which `runs` come.
    fn num_rows(&self, cx: &ForwardContext<'_>, runs: &ExchangedRuns) -> usize {
        let (ids, numbers) = (cx.input(2).shape(), cx.input(1).shape());
        let &[degree, num_experts] = numbers.dims() else { unreachable!("numbers of ranks and experts") };
        let num_own = num_experts / degree;
        match self.capacity {
            Some(capacity) => {
                degree * (num_own * capacity.num_rows(ids, num_experts)).min(ids.num_elements())
            }
            None if cx.device().is_counting() => degree * num_own * ids.num_elements().div_ceil(num_experts),
            None => runs.num_received() / cx.input(0).shape().cols(),
        }
    }
}

impl Operation for DispatchRows {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        3..=3
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (rows, numbers) = (cx.input(0), cx.input(1));
        let cols = rows.shape().cols();
        let runs = runs(cx, numbers, [rows.shape().rows(), cols]);
        let num_rows = self.num_rows(cx, &runs);
        let received = exchanged(cx, &runs, rows, [1, num_rows, cols])?;
        cx.output(received);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let (num_rows, cols) = (cx.input_shape(0).rows(), cx.grad().shape().cols());
        let runs = runs(cx, cx.input(1), [num_rows, cols]).reversed();
        let grad = exchanged(cx, &runs, cx.grad(), [1, num_rows, cols])?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}

impl Operation for ReturnRows {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        3..=3
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (num_rows, cols) = (cx.input(2).shape().num_elements(), cx.input(0).shape().cols());
        let runs = runs(cx, cx.input(1), [num_rows, cols]).reversed();
        let received = exchanged(cx, &runs, cx.input(0), [1, num_rows, cols])?;
        cx.output(received);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let (num_rows, cols) = (cx.input_shape(0).rows(), cx.grad().shape().cols());
        let runs = runs(cx, cx.input(1), [cx.grad().shape().rows(), cols]);
        let grad = exchanged(cx, &runs, cx.grad(), [1, num_rows, cols])?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}
