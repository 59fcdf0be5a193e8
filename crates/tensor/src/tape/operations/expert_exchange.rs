//! Rows of tokens on their way to the ranks that have their experts, and back (Lepikhin et al., "GShard", 2020, section 3.3), without padding.

use super::experts::Capacity;
use crate::device::{Device, DeviceError};
use crate::shape::Shape;
use crate::tape::{
    AxisOps, BackwardContext, ExchangedLens, ForwardContext, Operation, OperationContext, ReadBy,
};
use crate::tensor::{Tensor, View, ViewMut};
use std::ops::RangeInclusive;
use trireme_base::{AxisPlace, DType};

/// Tells all ranks of the expert axis how many choices each expert has, and plans the exchange of rows. The inputs are the first and the last output of
/// [`GroupRows`](crate::tape::GroupRows); of the last one only the shape is read. The outputs, all u32, are:
///
/// - how many choices of each expert each rank has (`[degree, num_experts]`);
/// - where the rows of each of this rank's experts begin, and where the last ones end (`[own_experts + 1]`);
/// - where the rows of each rank begin among those (`[own_experts * degree + 1]`): rows are ordered by expert, and those of an expert by the rank
///   that has sent them;
/// - for each row in this order, the place at which it arrives (`[num_rows]`), and the inverse (`[num_rows]`).
///
/// Where experts have a [`Capacity`], there are as many rows as they can take from all ranks, or as those can have: so memory does not depend on
/// loads. Rows that did not come are zeros at the end.
///
/// Ranks have equally many experts, in their order. On a device that only counts, experts have equally many choices, rounded up, so that all ranks
/// count the same.
///
/// Cost: the host reads the numbers of choices of this rank, and one all-gather of `4 num_experts` bytes a rank.
#[derive(Debug)]
pub struct GatherLoads {
    /// That of [`GroupRows`](crate::tape::GroupRows).
    pub capacity: Option<Capacity>,
}

/// Sends rows, ordered by expert (`[1, num_choices, cols]`), to the ranks that have their experts. The output has the rows for this rank's
/// experts, ordered by expert: `[1, num_rows, cols]`. The other inputs are outputs 0, 3 and 4 of [`GatherLoads`].
///
/// Cost: the host reads the numbers of choices; an exchange of the rows, and one of their gradients.
#[derive(Debug)]
pub struct DispatchRows;

/// Sends the rows of this rank's experts back to the ranks that have sent them: the reverse of [`DispatchRows`], with the same other inputs and, as
/// the last one, the choice at each place on this rank. Choices that were dropped have zeros.
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

    /// Elements that are sent and received, of rows of `cols`, of which a rank sends another one at most so many.
    fn lens(&self, cols: usize, most: usize) -> ExchangedLens {
        let AxisPlace { rank, degree } = self.place;
        ExchangedLens {
            most,
            sent: (0..degree).map(|of| self.num_rows(rank, of) * cols).collect(),
            received: (0..degree).map(|from| self.num_rows(from, rank) * cols).collect(),
        }
    }

    /// Where the rows of each own expert begin, and of each rank among them; and for each row in this order its place among those as they
    /// come.
    fn order(&self) -> [Vec<u32>; 3] {
        let AxisPlace { rank, degree } = self.place;
        let (mut starts, mut segments, mut order) = (vec![0], vec![0], Vec::new());
        let mut next: Vec<u32> = (0..degree)
            .scan(0, |start, from| {
                let own = *start;
                *start += self.num_rows(from, rank) as u32;
                Some(own)
            })
            .collect();
        for expert in 0..self.num_own() {
            for (from, next) in next.iter_mut().enumerate() {
                let end = *next + self.of(from, rank)[expert];
                order.extend(*next..end);
                *next = end;
                segments.push(order.len() as u32);
            }
            starts.push(order.len() as u32);
        }
        [starts, segments, order]
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
        let [starts, segments, mut order] = loads.order();
        if let Some(capacity) = self.capacity {
            let ids = cx.input(1).shape();
            let of_experts = loads.num_own() * capacity.num_rows(ids, loads.num_experts());
            let room = loads.place.degree * of_experts.min(ids.num_elements());
            // Where nothing but their number counts, even loads may be more.
            order.retain(|_| !device.is_counting());
            order.extend(order.len() as u32..room as u32);
        }
        let mut places = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(&place, index)| places[place as usize] = index);
        let made = [
            upload(device, &loads.numbers, &shape)?,
            upload(device, &starts, &[starts.len()])?,
            upload(device, &segments, &[segments.len()])?,
            upload(device, &order, &[order.len()])?,
            upload(device, &places, &[places.len()])?,
        ];
        made.into_iter().for_each(|numbers| cx.output(numbers));
        Ok(())
    }

    /// Numbers have no gradient.
    fn backward_input(&self, _: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::NEITHER
    }

    fn takes_positions(&self) -> bool {
        true
    }
}

/// Elements that ranks send for their experts, of so many rows of this one; on a device that only counts, no more than the most.
fn lens(cx: &OperationContext<'_>, numbers: View<'_>, [num_rows, cols]: [usize; 2]) -> ExchangedLens {
    let most = num_rows * cols;
    let loads = Loads::read(cx, numbers);
    loads.map_or(ExchangedLens { most, ..ExchangedLens::default() }, |loads| loads.lens(cols, most))
}

/// Rows that nobody has sent are zeros.
fn zero_rest(device: &Device, lens: &ExchangedLens, received: ViewMut<'_>) {
    let (first, end) = (lens.received.iter().sum::<usize>(), received.shape().num_elements());
    if first < end && !device.is_counting() {
        device.zero(received.into_part(first, [end - first].into()));
    }
}

/// To the ranks that have the experts, ordered by expert.
fn dispatch(
    cx: &OperationContext<'_>,
    rows: View<'_>,
    (numbers, order): (View<'_>, View<'_>),
) -> Result<Tensor, DeviceError> {
    let (device, cols) = (cx.device(), rows.shape().cols());
    let shape = [1, order.shape().num_elements(), cols];
    let mut received = cx.empty(shape, rows.dtype())?;
    let lens = lens(cx, numbers, [rows.shape().rows(), cols]);
    expert_axis(cx).exchange_rows(device, &lens, rows, received.view_mut())?;
    zero_rest(device, &lens, received.view_mut());
    let mut ordered = cx.empty(shape, rows.dtype())?;
    device.spread_rows(received.view(), (order, 1, None), ordered.view_mut());
    Ok(ordered)
}

/// Back to the ranks that have sent them, in their order; this one has sent `num_rows`.
fn give_back(
    cx: &OperationContext<'_>,
    rows: View<'_>,
    (numbers, places): (View<'_>, View<'_>),
    num_rows: usize,
) -> Result<Tensor, DeviceError> {
    let (device, cols) = (cx.device(), rows.shape().cols());
    let mut sent = cx.empty(rows.shape(), rows.dtype())?;
    device.spread_rows(rows, (places, 1, None), sent.view_mut());
    let lens = lens(cx, numbers, [num_rows, cols]).reversed();
    let mut received = cx.empty([1, num_rows, cols], rows.dtype())?;
    expert_axis(cx).exchange_rows(device, &lens, sent.view(), received.view_mut())?;
    zero_rest(device, &lens, received.view_mut());
    Ok(received)
}

impl Operation for DispatchRows {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        4..=4
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let rows = dispatch(cx, cx.input(0), (cx.input(1), cx.input(2)))?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let num_rows = cx.input_shape(0).rows();
        let grad = give_back(cx, cx.grad(), (cx.input(1), cx.input(3)), num_rows)?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 || input == 3 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}

impl Operation for ReturnRows {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        5..=5
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let num_rows = cx.input(4).shape().num_elements();
        let rows = give_back(cx, cx.input(0), (cx.input(1), cx.input(3)), num_rows)?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let grad = dispatch(cx, cx.grad(), (cx.input(1), cx.input(2)))?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 || input == 2 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}
