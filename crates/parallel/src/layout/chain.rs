//! Converts a measured model to the description that step programs are generated from.

use crate::step::Determinism;
use trireme_base::PassExchanges;
use trireme_model::{Rehearsal, UnitRehearsal};
use trireme_schedule::{Chain, UnitExchanges};
use trireme_tensor::ParameterTable;

/// Returns the properties of a model that step programs depend on: its parameters are in `table`, and `rehearsal` describes its passes.
pub fn chain(table: &ParameterTable, rehearsal: &Rehearsal, determinism: Determinism) -> Chain {
    let those = |is_one: fn(&UnitRehearsal) -> bool| {
        let units = rehearsal.units.iter().enumerate().filter(|(_, unit)| is_one(unit));
        units.map(|(unit, _)| unit).collect()
    };
    Chain {
        num_units: rehearsal.units.len(),
        ties: table.tie().map(|tie| (tie.reader, tie.span.unit)).into_iter().collect(),
        sums_ties: table.tie().is_some() && determinism == Determinism::Run,
        unread: those(|unit| !unit.backward_reads),
        reread: those(|unit| unit.weight_half_reads),
        unkept: those(|unit| !unit.passes.keeps()),
        exchanges: exchanges(rehearsal),
    }
}

/// Returns the exchanges within units. Adjacent units with the same exchanges share an entry.
fn exchanges(rehearsal: &Rehearsal) -> Vec<UnitExchanges> {
    let mut found: Vec<UnitExchanges> = Vec::new();
    for (unit, rehearsed) in rehearsal.units.iter().enumerate() {
        let passes = &rehearsed.exchanges;
        match found.last_mut() {
            Some(last) if last.units.end == unit && last.passes == *passes => last.units.end = unit + 1,
            _ if *passes == PassExchanges::default() => (),
            _ => found.push(UnitExchanges { units: unit..unit + 1, passes: passes.clone() }),
        }
    }
    found
}
