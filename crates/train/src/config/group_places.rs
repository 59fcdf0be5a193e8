//! Where parameter groups stand in the text of a config.

use super::reader::{Given, Loose};

/// Where the groups stand in the text, for mistakes that show only when the model is known. It is no part of what a config
/// says: configs that differ in it are equal.
#[derive(Debug, Clone, Default)]
pub(super) struct GroupPlaces(pub(super) Vec<Given>);

impl PartialEq for GroupPlaces {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl GroupPlaces {
    /// Those of a config in which each group has a pattern.
    pub(super) fn of(loose: &Loose) -> Self {
        let place = |index| loose.given[&format!("optimizer.groups[{index}].match")].clone();
        GroupPlaces((0..loose.sections.optimizer.groups.len()).map(place).collect())
    }
}
