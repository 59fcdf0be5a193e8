use trireme_tensor::UnitInfo;

/// A value for units without experts, and another one for units with experts if ranks hold different experts.
#[derive(Debug, Clone)]
pub(crate) struct DenseAndExpert<T> {
    pub(crate) dense: T,
    pub(crate) experts: Option<T>,
}

impl<T> DenseAndExpert<T> {
    pub(crate) fn of(&self, unit: &UnitInfo) -> &T {
        self.experts.as_ref().filter(|_| unit.has_experts()).unwrap_or(&self.dense)
    }

    pub(crate) fn of_mut(&mut self, unit: &UnitInfo) -> &mut T {
        self.experts.as_mut().filter(|_| unit.has_experts()).unwrap_or(&mut self.dense)
    }

    pub(crate) fn of_experts(&self) -> &T {
        self.experts.as_ref().unwrap_or(&self.dense)
    }

    /// Applies a fallible function to the values in turn.
    pub(crate) fn try_map<'a, U, E>(
        &'a self,
        mut map: impl FnMut(&'a T) -> Result<U, E>,
    ) -> Result<DenseAndExpert<U>, E> {
        Ok(DenseAndExpert { dense: map(&self.dense)?, experts: self.experts.as_ref().map(map).transpose()? })
    }
}
