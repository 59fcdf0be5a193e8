//! Alternative names of tensors in checkpoints.

use std::collections::BTreeSet;
use trireme_tensor::ParameterTable;

/// Name of the weight of an output layer that is not tied to the embedding.
pub(super) const OUTPUT_WEIGHT: &str = "lm_head.weight";

/// Name components that PyTorch's wrappers insert into parameter names: `torch.compile`, data parallelism, FSDP and activation
/// checkpointing. No family has modules of these names.
const WRAPPERS: [&str; 4] = ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Returns a function that maps the name of a stored tensor to the name of a parameter of the model. It returns `None` for known tensors
/// that are not parameters, and returns unknown names unchanged.
///
/// PyTorch's wrappers insert components such as `_orig_mod.` or `module.` into names. The first GPT-2 checkpoints lack the leading
/// `transformer.` and contain the causal mask. Old llama checkpoints contain the rotary frequencies. Some files repeat a tied output layer.
pub fn canonical_names(table: &ParameterTable) -> impl Fn(&str) -> Option<String> + use<> {
    let own: BTreeSet<String> = table.parameters().iter().map(|info| info.name.clone()).collect();
    let is_tied = table.tie().is_some();
    move |stored| {
        let name = &unwrapped(stored)[..];
        if let Some(own) = own.get(stored).or_else(|| own.get(name)) {
            return Some(own.clone());
        }
        let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        if is_mask || name.ends_with(".rotary_emb.inv_freq") || (is_tied && name == OUTPUT_WEIGHT) {
            return None;
        }
        let whole = format!("transformer.{name}");
        Some(if own.contains(&whole) { whole } else { stored.to_owned() })
    }
}

/// Returns the stored names of the embedding and of the output layer, if the model ties them and both are among the names `stored`.
pub fn tied_names<'a>(
    table: &ParameterTable,
    stored: impl IntoIterator<Item = &'a str>,
) -> Option<[&'a str; 2]> {
    let embedding = &table.parameters()[table.tie()?.span.first.0].name;
    let canonical = canonical_names(table);
    let (mut stored_embedding, mut stored_output) = (None, None);
    for name in stored {
        if unwrapped(name) == OUTPUT_WEIGHT {
            stored_output = Some(name);
        } else if canonical(name).as_ref() == Some(embedding) {
            stored_embedding = Some(name);
        }
    }
    Some([stored_embedding?, stored_output?])
}

/// Returns the name without the components in [`WRAPPERS`].
fn unwrapped(name: &str) -> String {
    name.split('.').filter(|part| !WRAPPERS.contains(part)).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::{Initial, Parameter};

    #[test]
    fn names_of_old_files_map_to_current_names() {
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
        // Names of the model's own parameters stay unchanged.
        assert_eq!(canonical("block.attn.bias").as_deref(), Some("block.attn.bias"));
        assert_eq!(canonical("h.1.weight").as_deref(), Some("h.1.weight"));
        let span = table.add(Parameter::vector("tied", 1, Initial::ZEROS));
        table.begin_unit("head");
        table.add_tie(span);
        assert_eq!(canonical_names(&table)("lm_head.weight"), None);
    }

    #[test]
    fn parts_that_wrappers_insert_are_left_out() {
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        for name in ["model.layers.0.mlp.up_proj.weight", "transformer.h.0.ln_1.weight", "module.own.weight"]
        {
            table.add(Parameter::vector(name, 1, Initial::ZEROS));
        }
        let canonical = canonical_names(&table);
        for (stored, expected) in [
            ("_orig_mod.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("module._orig_mod.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.layers.0._orig_mod.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("module.h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
            ("module.own.weight", "module.own.weight"),
            ("module.other.weight", "module.other.weight"),
        ] {
            assert_eq!(canonical(stored).as_deref(), Some(expected), "{stored}");
        }
        assert_eq!(canonical("_orig_mod.transformer.h.0.attn.bias"), None);
    }

    #[test]
    fn a_tied_output_layer_is_found_with_its_embedding() {
        let mut table = ParameterTable::default();
        table.begin_unit("embedding");
        let tokens = table.add(Parameter::vector("transformer.wte.weight", 1, Initial::ZEROS));
        table.begin_unit("head");
        table.add(Parameter::vector("transformer.ln_f.weight", 1, Initial::ZEROS));
        let names = |output| ["module.wte.weight", "transformer.ln_f.weight", output];
        assert_eq!(tied_names(&table, names("module.lm_head.weight")), None);
        table.add_tie(tokens);
        let found = tied_names(&table, names("module.lm_head.weight"));
        assert_eq!(found, Some(["module.wte.weight", "module.lm_head.weight"]));
        assert_eq!(tied_names(&table, names("other.weight")), None);
    }
}
