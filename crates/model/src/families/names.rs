//! Older spellings of the names of tensors.

use std::collections::BTreeSet;
use trireme_tensor::ParameterTable;

/// The parameter of a model that a stored tensor is meant for, by the tensor's name; `None` for a tensor that is no parameter of
/// its own. A name that the model has stays.
///
/// The first GPT-2 checkpoints lack the leading `transformer.` and hold the causal mask; old llama checkpoints hold the rotary
/// frequencies; some files repeat a tied output layer.
pub fn canonical_names(table: &ParameterTable) -> impl Fn(&str) -> Option<String> + use<> {
    let own: BTreeSet<String> = table.parameters().iter().map(|info| info.name.clone()).collect();
    let is_tied = table.tie().is_some();
    move |name| {
        if own.contains(name) {
            return Some(name.to_owned());
        }
        let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        if is_mask || name.ends_with(".rotary_emb.inv_freq") || (is_tied && name == "lm_head.weight") {
            return None;
        }
        let whole = format!("transformer.{name}");
        Some(if own.contains(&whole) { whole } else { name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::{Initial, Parameter};

    #[test]
    fn names_of_old_files_become_those_of_today() {
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        for name in ["transformer.h.0.ln_1.weight", "transformer.wte.weight", "block.attn.bias", "h.1.weight"]
        {
            table.add(Parameter::vector(name, 1, Initial::ZEROS));
        }
        let canonical = canonical_names(&table);
        assert_eq!(canonical("h.0.ln_1.weight").as_deref(), Some("transformer.h.0.ln_1.weight"));
        assert_eq!(canonical("transformer.wte.weight").as_deref(), Some("transformer.wte.weight"));
        assert_eq!(canonical("h.0.attn.bias"), None);
        assert_eq!(canonical("model.layers.0.self_attn.rotary_emb.inv_freq"), None);
        assert_eq!(canonical("lm_head.weight").as_deref(), Some("lm_head.weight"));
        // What the model itself has is taken as it is.
        assert_eq!(canonical("block.attn.bias").as_deref(), Some("block.attn.bias"));
        assert_eq!(canonical("h.1.weight").as_deref(), Some("h.1.weight"));
        let span = table.add(Parameter::vector("tied", 1, Initial::ZEROS));
        table.begin_unit("head");
        table.add_tie(span);
        assert_eq!(canonical_names(&table)("lm_head.weight"), None);
    }
}
