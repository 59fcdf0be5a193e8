use std::collections::BTreeMap;

/// Returns every key of a config file as `section.key`, with its value. Empty if `text` is no TOML.
pub(crate) fn file_values(text: &str) -> BTreeMap<String, String> {
    let document: toml::Table = text.parse().unwrap_or_default();
    let mut values = BTreeMap::new();
    for (section, keys) in &document {
        let keys = keys.as_table().into_iter().flatten();
        values.extend(keys.map(|(key, value)| (format!("{section}.{key}"), value.to_string())));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_names_of_their_sections_and_values_are_toml() {
        let values = file_values("[run]\nname = \"a\"\n[later]\nlr = 0.5\nlist = [1, 2]\n");
        let expected = [("later.list", "[1, 2]"), ("later.lr", "0.5"), ("run.name", "\"a\"")];
        let found: Vec<(&str, &str)> = values.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        assert_eq!(found, expected);
        assert!(file_values("no config").is_empty());
    }
}
