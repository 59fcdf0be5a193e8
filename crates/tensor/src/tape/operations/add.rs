use crate::device::{Expr, Result};
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use trireme_base::DType;

/// `left + right` for float values of one shape. The result has their dtype, or f32 if the dtypes differ.
#[derive(Debug)]
pub struct Add;

impl Operation for Add {
    declares! { inputs: 2..=2, accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        fn sum<'f>(left: Expr<'f>, right: Expr<'f>) -> Expr<'f> {
            left + right
        }
        let dtypes = [0, 1].map(|index| cx.input(index).dtype());
        let dtype = if dtypes[0] == dtypes[1] { dtypes[0] } else { DType::F32 };
        let wide = [0, 1].into_iter().filter(|&index| dtypes[index] == dtype);
        let taken = { wide }.find_map(|index| Some((cx.take_input(index)?, 1 - index)));
        let y = match taken {
            Some((mut y, other)) => {
                cx.device().zip_in_place(y.view_mut(), cx.input(other), 1, sum);
                y
            }
            None => {
                let mut y = cx.empty(cx.input(0).shape(), dtype)?;
                if dtypes[0] == dtypes[1] {
                    cx.device().zip(cx.input(0), cx.input(1), y.view_mut(), 1, sum);
                } else {
                    cx.device().convert(cx.input(0), y.view_mut());
                    cx.device().zip_in_place(y.view_mut(), cx.input(1), 1, sum);
                }
                y
            }
        };
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        cx.pass_grad(0);
        cx.pass_grad(1);
        Ok(())
    }
}
