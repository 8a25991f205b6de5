//! One line of the tables: a case in one element type.

use polyhead::{Element, Level};

use crate::Result;
use crate::cases::{Case, Kind};
use crate::errors::Errors;
use crate::inputs::Dtype;
use crate::table::Table;
use crate::{attention, gemm, softmax};

/// Ours, on one level.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    /// What computed it: a level, perhaps with a precision.
    pub(crate) column: String,
    pub(crate) errors: Errors,
    /// What the errors may be.
    pub(crate) allowed: Errors,
}

impl Figure {
    pub(crate) fn is_allowed(&self) -> bool {
        let Errors { max, rms, sum } = self.allowed;
        let within =
            |error: Option<f64>, limit: Option<f64>| error.zip(limit).is_none_or(|(error, limit)| error <= limit);
        self.errors.max <= max && self.errors.rms <= rms && within(self.errors.sum, sum)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) pytorch: Errors,
    pub(crate) naive: Errors,
    pub(crate) ours: Vec<Figure>,
}

/// What a kind of case gives.
pub(crate) struct Measured {
    /// Of the inputs.
    pub(crate) checksum: String,
    pub(crate) naive: Errors,
    pub(crate) ours: Vec<Figure>,
}

impl Row {
    pub(crate) fn measure(case: &Case, dtype: Dtype, levels: &[Level], table: &Table) -> Result<Self> {
        let measured = match case.kind {
            Kind::Attention => attention::measure(case, dtype, levels),
            Kind::Softmax => softmax::measure(case, dtype, levels),
            Kind::Gemm => gemm::measure(case, dtype, levels),
        };
        let Measured { checksum, naive, ours } = measured.map_err(|error| format!("{}: {error}", case.path))?;
        let pytorch = table.errors(case.kind.name(), &case.name, dtype.name(), &checksum)?;
        Ok(Self { kind: case.kind, name: case.name.clone(), dtype, pytorch, naive, ours })
    }
}

/// `factor` times the naive errors. The largest one is of a single element, and the naive one may be small by luck: it may be
/// larger by one rounding to the type.
pub(crate) fn allowed(naive: Errors, factor: f64, dtype: Dtype) -> Errors {
    let with_rounding = |error: f64| factor * error + dtype.unit();
    Errors { max: with_rounding(naive.max), rms: factor * naive.rms, sum: naive.sum.map(with_rounding) }
}

/// What the precision `High` allows: 20 times the naive errors, or those of a single product, 2^-16 at most and 2^-18 rms.
pub(crate) fn allowed_high(naive: Errors, dtype: Dtype) -> Errors {
    let allowed = allowed(naive, 20.0, dtype);
    Errors { max: allowed.max.max(2f64.powi(-16)), rms: allowed.rms.max(2f64.powi(-18)), ..allowed }
}

/// Values of a type, from what they are as `f32`.
pub(crate) fn narrow<T: Element>(data: &[f32]) -> Vec<T> {
    data.iter().map(|&x| T::from_f32_nearest(x)).collect()
}

pub(crate) fn widen<T: Element>(data: Vec<T>) -> Vec<f32> {
    data.into_iter().map(T::to_f32).collect()
}

/// Calls a method that is generic over the element type.
macro_rules! with_type {
    ($dtype:expr, $object:ident, $method:ident($($argument:expr),*)) => {
        match $dtype {
            $crate::inputs::Dtype::F32 => $object.$method::<f32>($($argument),*),
            $crate::inputs::Dtype::F16 => $object.$method::<half::f16>($($argument),*),
            $crate::inputs::Dtype::Bf16 => $object.$method::<half::bf16>($($argument),*),
        }
    };
}
pub(crate) use with_type;
