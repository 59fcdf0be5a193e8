//! Derives the chain of units, from which step programs are generated, from a model's profile.

use crate::step::Determinism;
use trireme_base::PassExchanges;
use trireme_model::{ModelProfile, UnitProfile};
use trireme_schedule::{UnitChain, UnitExchanges};
use trireme_tensor::ParameterTable;

/// Returns the chain of units of a model: the properties that step programs depend on. `table` has the model's parameters, and `profile`
/// describes its passes.
pub fn chain(table: &ParameterTable, profile: &ModelProfile, determinism: Determinism) -> UnitChain {
    let units_where = |is_one: fn(&UnitProfile) -> bool| {
        let units = profile.units.iter().enumerate().filter(|(_, unit)| is_one(unit));
        units.map(|(unit, _)| unit).collect()
    };
    UnitChain {
        num_units: profile.units.len(),
        ties: table.tie().map(|tie| (tie.reader, tie.span.unit)).into_iter().collect(),
        accumulates_tied_gradients: table.tie().is_some() && determinism == Determinism::Run,
        without_backward_reads: units_where(|unit| !unit.backward_reads),
        weight_half_readers: units_where(|unit| unit.weight_half_reads),
        without_activations: units_where(|unit| !unit.passes.keeps_activations()),
        exchanges: exchanges(profile),
    }
}

/// Returns the exchanges within units. Adjacent units with the same exchanges share an entry.
fn exchanges(profile: &ModelProfile) -> Vec<UnitExchanges> {
    let mut found: Vec<UnitExchanges> = Vec::new();
    for (unit, profile) in profile.units.iter().enumerate() {
        let passes = &profile.exchanges;
        match found.last_mut() {
            Some(last) if last.units.end == unit && last.passes == *passes => last.units.end = unit + 1,
            _ if *passes == PassExchanges::default() => (),
            _ => found.push(UnitExchanges { units: unit..unit + 1, passes: passes.clone() }),
        }
    }
    found
}
