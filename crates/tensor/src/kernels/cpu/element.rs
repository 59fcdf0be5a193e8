//! The element types of activations.

use crate::precision::Precision;
use std::ops::Range;
use trireme_base::{Bf16, DType, F16, Float};

/// A float that kernels read and write; they compute in f32.
pub(crate) trait Element: Float {
    /// Precision of matmuls with such operands.
    const PRECISION: Precision;

    /// Wraps stored elements as a matmul operand.
    fn floats(values: &[Self]) -> Floats<'_>;

    /// Converts to bf16, rounded to nearest even.
    #[inline(always)]
    fn to_bf16(self) -> Bf16 {
        Bf16::from_f32(self.to_f32())
    }
}

impl Element for f32 {
    const PRECISION: Precision = Precision::F32;

    fn floats(values: &[Self]) -> Floats<'_> {
        Floats::F32(values)
    }
}

impl Element for Bf16 {
    const PRECISION: Precision = Precision::Bf16;

    fn floats(values: &[Self]) -> Floats<'_> {
        Floats::Bf16(values)
    }

    #[inline(always)]
    fn to_bf16(self) -> Bf16 {
        self
    }
}

impl Element for F16 {
    const PRECISION: Precision = Precision::F16;

    fn floats(values: &[Self]) -> Floats<'_> {
        Floats::F16(values)
    }
}

/// Evaluates an expression with `$element` as the Rust type of a dtype.
macro_rules! with_element {
    ($dtype:expr => |$element:ident| $body:expr) => {
        match $dtype {
            trireme_base::DType::F32 => {
                type $element = f32;
                $body
            }
            trireme_base::DType::Bf16 => {
                type $element = trireme_base::Bf16;
                $body
            }
            trireme_base::DType::F16 => {
                type $element = trireme_base::F16;
                $body
            }
            dtype => panic!("no kernel computes with {dtype}"),
        }
    };
}
pub(crate) use with_element;

/// Evaluates an expression with `$word` as the unsigned integer type of the size of a dtype, for kernels that only copy.
macro_rules! with_word {
    ($dtype:expr => |$word:ident| $body:expr) => {
        match $dtype.size() {
            1 => {
                type $word = u8;
                $body
            }
            2 => {
                type $word = u16;
                $body
            }
            4 => {
                type $word = u32;
                $body
            }
            size => panic!("elements of {size} bytes"),
        }
    };
}
pub(crate) use with_word;

/// A slice of any float element type.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [Bf16]),
    F16(&'a [F16]),
}

/// The mutable counterpart of [`Floats`].
#[derive(Debug)]
pub(crate) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [Bf16]),
    F16(&'a mut [F16]),
}

/// Evaluates an expression with the slice as `$x`, whatever its element type.
macro_rules! with_floats {
    ($floats:expr => |$x:ident| $body:expr) => {
        match $floats {
            $crate::kernels::cpu::element::Floats::F32($x) => $body,
            $crate::kernels::cpu::element::Floats::Bf16($x) => $body,
            $crate::kernels::cpu::element::Floats::F16($x) => $body,
        }
    };
}
pub(crate) use with_floats;

impl Floats<'_> {
    /// Returns an empty slice of a dtype; f32 unless the dtype is bf16 or f16.
    pub(crate) fn empty(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => Floats::Bf16(&[]),
            DType::F16 => Floats::F16(&[]),
            _ => Floats::F32(&[]),
        }
    }

    pub(crate) fn len(&self) -> usize {
        with_floats!(self => |x| x.len())
    }

    pub(crate) fn tail(&self, start: usize) -> Self {
        match *self {
            Floats::F32(x) => Floats::F32(&x[start..]),
            Floats::Bf16(x) => Floats::Bf16(&x[start..]),
            Floats::F16(x) => Floats::F16(&x[start..]),
        }
    }
}

impl FloatsMut<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            FloatsMut::F32(x) => x.len(),
            FloatsMut::Bf16(x) => x.len(),
            FloatsMut::F16(x) => x.len(),
        }
    }

    pub(crate) fn zero(&mut self) {
        match self {
            FloatsMut::F32(x) => x.fill(0.0),
            FloatsMut::Bf16(x) => x.fill(Bf16::default()),
            FloatsMut::F16(x) => x.fill(F16::default()),
        }
    }

    pub(crate) fn range(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        match self {
            FloatsMut::F32(x) => FloatsMut::F32(&mut x[range]),
            FloatsMut::Bf16(x) => FloatsMut::Bf16(&mut x[range]),
            FloatsMut::F16(x) => FloatsMut::F16(&mut x[range]),
        }
    }
}
