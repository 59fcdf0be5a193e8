//! Groups of parameters with their own settings.

/// Settings of the parameters whose names match a pattern.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterGroup {
    /// A name in which `*` stands for any text and `?` for any character.
    pub pattern: String,
    /// Whether the parameters are frozen: not updated, without state, and excluded from gradient norms.
    pub frozen: bool,
    /// Factor by which the learning rate is multiplied.
    pub lr_scale: f32,
    /// Weight decay; `None` uses the optimizer's.
    pub weight_decay: Option<f32>,
    /// First decay rate (`beta1`, or `momentum`); `None` uses the optimizer's.
    pub beta1: Option<f32>,
    /// Second decay rate; `None` uses the optimizer's.
    pub beta2: Option<f32>,
}

impl ParameterGroup {
    /// Returns whether the pattern matches the full name.
    pub fn matches(&self, name: &str) -> bool {
        matches(self.pattern.as_bytes(), name.as_bytes())
    }
}

/// Backtracks only to the last star, so that time is bounded by the product of the lengths.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[n] => (p, n) = (p + 1, n + 1),
            _ => match &mut star {
                Some((at, taken)) => {
                    *taken += 1;
                    (p, n) = (*at + 1, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

/// Settings that may differ between parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ParameterSettings {
    pub(crate) lr_scale: f32,
    pub(crate) weight_decay: f32,
    pub(crate) beta1: Option<f32>,
    pub(crate) beta2: Option<f32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_whole_names() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*.bias", "h.0.attn.bias", true),
            ("*.bias", "h.0.attn.bias2", false),
            ("h.?.*", "h.3.mlp", true),
            ("h.?.*", "h.13.mlp", false),
            ("*a*b", "aXbXab", true),
            ("*a*b", "aXbXa", false),
            ("wte", "wte.weight", false),
            ("", "a", false),
            ("**a**", "ba", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
        let (stars, name) = ("*a".repeat(2000), "a".repeat(1999));
        assert!(!matches(stars.as_bytes(), name.as_bytes()));
    }
}
