//! Positions of parameter groups in the text of a config.

use super::reader::{Given, Loose};

/// The positions of parameter groups in the text, for mistakes that can be found only when the model is known. They are not part of the
/// config's value: configs with different positions are equal.
#[derive(Debug, Clone, Default)]
pub(super) struct GroupPlaces(pub(super) Vec<Given>);

impl PartialEq for GroupPlaces {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl GroupPlaces {
    /// Returns the positions of the groups of a config in which each group has a pattern.
    pub(super) fn of(loose: &Loose) -> Self {
        let place = |index| loose.given[&format!("optimizer.groups[{index}].match")].clone();
        GroupPlaces((0..loose.sections.optimizer.groups.len()).map(place).collect())
    }
}
