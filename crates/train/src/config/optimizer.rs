//! The keys of `[optimizer]`, their effect for each optimizer, and the parameter groups.

use super::checks::{Checks, changed_keys};
use super::choice::one_of;
use super::mistake::{ConfigError, Mistake};
use super::section::{Key, KeyError, Section};
use super::value::{ConfigValue, expected_within, read_within};
use super::{Config, OptimizerGroup};
use toml::de::DeValue;
use trireme_optim::{MuonScale, OptimizerName, OptimizerSettings, ParameterGroup, Setting, SettingValue};

impl Section for OptimizerSettings {
    fn keys(&self) -> Vec<Key> {
        let mut settings = *self;
        let key = |Setting { name, docs, value }: Setting<'_>| {
            let (expected, value) = match value {
                SettingValue::Number(number, limits) => (expected_within(&limits), number.write()),
                SettingValue::Count(count, limits) => (expected_within(&limits), count.write()),
                SettingValue::Flag(flag) => (bool::expected(), flag.write()),
                SettingValue::MuonScale(scale) => (MuonScale::expected(), scale.write()),
            };
            Key { name, docs, attributes: &[], expected, value }
        };
        settings.list().into_iter().map(key).collect()
    }

    fn read_key(&mut self, name: &str, value: &DeValue<'_>) -> Result<(), KeyError> {
        let setting = self.list().into_iter().find(|setting| setting.name == name);
        let read = match setting.ok_or(KeyError::Unknown)?.value {
            SettingValue::Number(number, limits) => read_within(value, &limits).map(|read| *number = read),
            SettingValue::Count(count, limits) => read_within(value, &limits).map(|read| *count = read),
            SettingValue::Flag(flag) => bool::read(value).map(|read| *flag = read),
            SettingValue::MuonScale(scale) => MuonScale::read(value).map(|read| *scale = read),
        };
        read.map_err(KeyError::InvalidValue)
    }
}

/// Returns whether a key of `[optimizer]` has an effect for this optimizer.
pub(super) fn has_effect(name: OptimizerName, key: &str) -> bool {
    !OptimizerSettings::NAMES.contains(&key) || name.settings().contains(&key)
}

pub(super) fn check_optimizer(checks: &mut Checks<'_>) {
    let optimizer = &checks.unchecked.sections.optimizer;
    for key in changed_keys(optimizer).filter(|key| !has_effect(optimizer.name, key)) {
        let owners = OptimizerName::ALL.into_iter().filter(|&name| has_effect(name, key));
        let names: Vec<&str> = owners.map(OptimizerName::name).collect();
        let owners = match &names[..] {
            [only] => format!("{only:?}"),
            names => one_of(names),
        };
        let keys = [&format!("optimizer.{key}"), "optimizer.name"];
        checks.only_applies(false, &keys, &format!("name = {owners}"));
    }
    for (index, group) in optimizer.groups.iter().enumerate() {
        check_group(checks, optimizer.name, index, group);
    }
}

fn check_group(checks: &mut Checks<'_>, name: OptimizerName, index: usize, group: &OptimizerGroup) {
    let key = |key: &str| format!("optimizer.groups[{index}].{key}");
    let any = ["match", "lr_scale", "weight_decay", "beta1", "beta2"].map(key);
    checks.require(!group.pattern.is_empty(), &any.each_ref().map(String::as_str), || {
        "a group needs `match`, a pattern of parameter names such as \"*.bias\"".to_owned()
    });
    let decay = group.weight_decay.unwrap_or(0.0);
    checks.require(decay >= 0.0, &[&key("weight_decay")], || "expected a number, 0 or more".to_owned());
    for (beta, value) in [("beta1", group.beta1), ("beta2", group.beta2)] {
        let is_rate = value.is_none_or(|value| (0.0..1.0).contains(&value));
        checks.require(is_rate, &[&key(beta)], || "expected a number from 0 to below 1".to_owned());
        let has_one = has_effect(name, beta) || (beta == "beta1" && has_effect(name, "momentum"));
        checks.require(value.is_none() || has_one, &[&key(beta), "optimizer.name"], || {
            format!("{name} does not use this key; remove it")
        });
    }
}

impl Config {
    /// Returns the parameter groups of `[optimizer]` for a model with parameters of these names.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the line of every group to which no parameter belongs.
    pub(crate) fn parameter_groups(&self, names: &[&str]) -> Result<Vec<ParameterGroup>, ConfigError> {
        let group = |group: &OptimizerGroup| ParameterGroup {
            pattern: group.pattern.clone(),
            frozen: group.frozen,
            lr_scale: group.lr_scale as f32,
            weight_decay: group.weight_decay.map(|decay| decay as f32),
            beta1: group.beta1.map(|beta| beta as f32),
            beta2: group.beta2.map(|beta| beta as f32),
        };
        let groups: Vec<ParameterGroup> = self.optimizer().groups.iter().map(group).collect();
        let owner = |name: &&str| groups.iter().position(|group| group.matches(name));
        let owners: Vec<usize> = names.iter().filter_map(owner).collect();
        let mut mistakes = Vec::new();
        for (index, (group, given)) in groups.iter().zip(&self.group_origins.0).enumerate() {
            if owners.contains(&index) {
                continue;
            }
            let explanation = match names.iter().find(|name| group.matches(name)) {
                Some(name) => {
                    format!(
                        "all parameters that it matches, such as {name}, already belong to earlier groups"
                    )
                }
                None => format!("matches none of the model's parameters, such as {}", some_of(names)),
            };
            mistakes.push(Mistake {
                position: given.position.clone(),
                text: given.text.clone(),
                explanation,
            });
        }
        if mistakes.is_empty() { Ok(groups) } else { Err(ConfigError::Invalid { mistakes }) }
    }
}

/// Returns the first few names, as examples.
fn some_of(names: &[&str]) -> String {
    const SHOWN_MAX: usize = 4;
    names[..names.len().min(SHOWN_MAX)].join(", ")
}
