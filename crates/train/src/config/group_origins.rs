//! Positions of parameter groups in the text of a config.

use super::reader::{KeyOrigin, UncheckedConfig};

/// The positions of parameter groups in the text, for mistakes that can be found only when the model is known. They are not part of the
/// config's value: configs with different positions are equal.
#[derive(Debug, Clone, Default)]
pub(super) struct GroupOrigins(pub(super) Vec<KeyOrigin>);

impl PartialEq for GroupOrigins {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl GroupOrigins {
    /// Returns the positions of the groups of a config in which each group has a pattern.
    pub(super) fn of(unchecked: &UncheckedConfig) -> Self {
        let place = |index| unchecked.origins[&format!("optimizer.groups[{index}].match")].clone();
        GroupOrigins((0..unchecked.sections.optimizer.groups.len()).map(place).collect())
    }
}
