//! Copies, functions of elements, and Rust functions as kernels.

use super::{Device, DeviceError, Result};
use crate::kernels::call::{ElementwiseCall, ExpressionCall, ExpressionInput, per_element_cost};
use crate::kernels::expression::{Expr, Expression, InputLayout};
use crate::view::{View, ViewMut};
use std::any::type_name;
use trireme_base::Cost;

impl Device {
    /// Computes `y = x` elementwise for equal dtypes.
    ///
    /// # Panics
    /// If the shapes or the dtypes differ.
    pub fn copy(&self, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!((x.dtype(), x.shape()), (y.dtype(), y.shape()));
        if x.dtype().size() < 8 && x.dtype().is_float() {
            return self.convert(x, y);
        }
        self.issue(ElementwiseCall::Copy { x: x.operand(), y: y.into_operand() });
    }

    /// Computes `y = function(x)` elementwise in f32, rounded to the dtype of `y`. `operations` is the number of operations of
    /// `function`, for the [cost](Device::cost). Reductions of [`Expr`] are over the last dim.
    ///
    /// # Panics
    /// If the shapes differ, or a tensor is not of a float type.
    pub fn map(
        &self,
        x: View<'_>,
        y: ViewMut<'_>,
        operations: usize,
        function: impl for<'f> FnOnce(Expr<'f>) -> Expr<'f>,
    ) {
        assert_eq!(x.shape(), y.shape());
        let cost = per_element_cost(x.shape(), operations).reads(x.num_bytes()).writes(y.num_bytes());
        self.issue_expression("map", cost, [RowInput::Elements(x)], y, |[x]| function(x));
    }

    /// Computes `y = function(left, right)` elementwise, like [`map`](Device::map).
    ///
    /// # Panics
    /// If the shapes differ, or a tensor is not of a float type.
    pub fn zip(
        &self,
        left: View<'_>,
        right: View<'_>,
        y: ViewMut<'_>,
        operations: usize,
        function: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>,
    ) {
        assert!(left.shape() == y.shape() && right.shape() == y.shape());
        let read_bytes = left.num_bytes() + right.num_bytes();
        let cost = per_element_cost(left.shape(), operations).reads(read_bytes).writes(y.num_bytes());
        let inputs = [left, right].map(RowInput::Elements);
        self.issue_expression("zip", cost, inputs, y, |[left, right]| function(left, right));
    }

    /// Computes `y = function(y)` elementwise in place, like [`map`](Device::map).
    pub fn map_in_place(
        &self,
        y: ViewMut<'_>,
        operations: usize,
        function: impl for<'f> FnOnce(Expr<'f>) -> Expr<'f>,
    ) {
        let cost = per_element_cost(y.shape(), operations).updates(y.num_bytes());
        self.issue_expression("map_in_place", cost, [RowInput::Output], y, |[y]| function(y));
    }

    /// Computes `y = function(y, x)` elementwise in place, like [`map`](Device::map).
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn zip_in_place(
        &self,
        y: ViewMut<'_>,
        x: View<'_>,
        operations: usize,
        function: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>,
    ) {
        assert_eq!(x.shape(), y.shape());
        let cost = per_element_cost(x.shape(), operations).reads(x.num_bytes()).updates(y.num_bytes());
        let inputs = [RowInput::Output, RowInput::Elements(x)];
        self.issue_expression("zip_in_place", cost, inputs, y, |[y, x]| function(y, x));
    }

    /// Computes `sums[row] = sum of function(left, right)` over the elements of each row. `sums` is f32.
    ///
    /// # Panics
    /// If the shapes of `left` and `right` differ, or the number of sums is not the number of rows.
    pub fn zip_sum_rows(
        &self,
        left: View<'_>,
        right: View<'_>,
        sums: ViewMut<'_>,
        operations: usize,
        function: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>,
    ) {
        assert_eq!(left.shape(), right.shape());
        let num_rows = sums.shape().num_elements();
        let read_bytes = left.num_bytes() + right.num_bytes();
        let cost = per_element_cost(left.shape(), operations + 1).reads(read_bytes).writes(sums.num_bytes());
        let (inputs, sums) = ([left, right].map(RowInput::Elements), sums.into_part(0, [num_rows, 1].into()));
        self.issue_expression("zip_sum_rows", cost, inputs, sums, |[left, right]| {
            function(left, right).row_sum()
        });
    }

    /// Computes each element of `out` from the elements of `inputs` in its row, which [`Expr`] can reduce. `out` is f32, bf16 or f16,
    /// `[rows, cols]` or `[rows, 1]`. `operations` is the number of operations per element of `out`, for the [cost](Device::cost).
    ///
    /// # Panics
    /// If the number of elements of an input does not match, if a tensor is not of a float type, or if an input that is not the first one
    /// is [`RowInput::Output`].
    pub fn map_rows<const N: usize>(
        &self,
        inputs: [RowInput<'_>; N],
        out: ViewMut<'_>,
        operations: usize,
        function: impl for<'f> FnOnce([Expr<'f>; N]) -> Expr<'f>,
    ) {
        let read_bytes = inputs.iter().filter_map(RowInput::view).map(|view| view.num_bytes()).sum();
        let cost = per_element_cost(out.shape(), operations).reads(read_bytes).writes(out.num_bytes());
        self.issue_expression("map_rows", cost, inputs, out, function);
    }

    /// Records a function and issues it as a kernel.
    fn issue_expression<const N: usize>(
        &self,
        name: &'static str,
        cost: Cost,
        inputs: [RowInput<'_>; N],
        output: ViewMut<'_>,
        function: impl for<'f> FnOnce([Expr<'f>; N]) -> Expr<'f>,
    ) {
        let (num_rows, out_cols) = (output.shape().rows(), output.shape().cols());
        let cols = inputs.iter().find_map(RowInput::num_cols).unwrap_or(out_cols);
        assert!(out_cols == cols || out_cols == 1, "{out_cols} columns for rows of {cols}");
        for input in &inputs {
            let (len, expected) = match input {
                RowInput::Elements(view) => (view.shape().num_elements(), num_rows * cols),
                RowInput::Columns(view) => (view.shape().num_elements(), cols),
                RowInput::Rows(Some(view)) => (view.shape().num_elements(), num_rows),
                RowInput::Rows(None) | RowInput::Output => continue,
            };
            assert_eq!(len, expected, "an input of {num_rows} rows of {cols} columns");
        }
        let mut later = inputs.iter().skip(1);
        assert!(
            !later.any(|input| matches!(input, RowInput::Output)),
            "only the first input can be the output"
        );
        let reads_output = matches!(inputs.first(), Some(RowInput::Output));
        assert!(!reads_output || out_cols == cols, "{out_cols} columns, read as rows of {cols}");
        let is_given = inputs.each_ref().map(|input| !matches!(input, RowInput::Rows(None)));
        let call = ExpressionCall {
            name,
            cost,
            expression: Expression::record(is_given, function),
            reads_output,
            inputs: inputs.iter().filter_map(|input| input.argument(cols)).collect(),
            cols,
            output: output.into_operand(),
        };
        self.issue(call);
    }

    /// Runs a Rust function as a kernel: `compute` writes each row of `out`, given the elements of `inputs` and the row's index, on any
    /// thread. All tensors are f32. `operations` is the number of operations per element of `out`, for the [cost](Device::cost). Use
    /// [`map_rows`](Device::map_rows) where it suffices.
    ///
    /// # Errors
    /// On a GPU, which cannot run Rust. The error names the function that contains `compute`.
    ///
    /// # Panics
    /// If a tensor is not f32.
    pub fn for_each_row<const N: usize, F>(
        &self,
        inputs: [View<'_>; N],
        out: ViewMut<'_>,
        operations: usize,
        compute: F,
    ) -> Result<()>
    where
        F: Fn([&[f32]; N], usize, &mut [f32]) + Send + Sync + 'static,
    {
        if self.is_gpu {
            let name = type_name::<F>().trim_end_matches("::{{closure}}");
            return Err(DeviceError::RustFunction { name });
        }
        let read_bytes = inputs.iter().map(View::num_bytes).sum();
        let cost = per_element_cost(out.shape(), operations).reads(read_bytes).writes(out.num_bytes());
        self.issue_function("for_each_row", cost, inputs, out, move |cpu, inputs, mut out| {
            let (inputs, cols) = (inputs.map(|input| input.f32s(cpu)), out.shape().cols());
            cpu.for_each_row(out.f32s(cpu), cols, |row, out| compute(inputs, row, out));
        });
        Ok(())
    }
}

/// An input of [`Device::map_rows`], f32, bf16 or f16, read as f32.
#[derive(Debug, Clone, Copy)]
pub enum RowInput<'a> {
    /// `[rows, cols]`: an element per row and column.
    Elements(View<'a>),
    /// `[cols]`: an element per column, the same for all rows.
    Columns(View<'a>),
    /// `[rows]`: an element per row, the same for all columns; 1 if it is absent.
    Rows(Option<View<'a>>),
    /// The output's content before the call. Only the first input can be this.
    Output,
}

impl<'a> RowInput<'a> {
    fn view(&self) -> Option<View<'a>> {
        match *self {
            RowInput::Elements(view) | RowInput::Columns(view) => Some(view),
            RowInput::Rows(view) => view,
            RowInput::Output => None,
        }
    }

    /// Returns the number of columns, if the input has columns.
    fn num_cols(&self) -> Option<usize> {
        match self {
            RowInput::Elements(view) => Some(view.shape().cols()),
            RowInput::Columns(view) => Some(view.shape().num_elements()),
            RowInput::Rows(_) | RowInput::Output => None,
        }
    }

    fn argument(&self, cols: usize) -> Option<ExpressionInput> {
        let (row_stride, col_stride) = match self {
            RowInput::Elements(_) | RowInput::Output => (cols, 1),
            RowInput::Columns(_) => (0, 1),
            RowInput::Rows(_) => (1, 0),
        };
        let layout = InputLayout { row_stride, col_stride };
        Some(ExpressionInput { operand: self.view()?.operand(), layout })
    }
}
