//! JSON escapes of lone UTF-16 surrogates, which stand for no character.

use std::borrow::Cow;

/// The escape of U+FFFD.
const REPLACEMENT: &str = "\\ufffd";

/// Replaces escapes of UTF-16 surrogates without their other half, such as `\ud83d` alone. They are allowed in JSON but
/// cannot be represented in UTF-8. Adds their number to `num_replaced`.
pub(super) fn replace_lone_surrogates<'a>(json: &'a str, num_replaced: &mut u64) -> Cow<'a, str> {
    let mut replaced = String::new();
    let (mut next, mut copied) = (0, 0);
    while let Some(found) = json[next..].find('\\') {
        let escape = next + found;
        next = match [escape, escape + REPLACEMENT.len()].map(|at| surrogate(json, at)) {
            [Some(Surrogate::High), Some(Surrogate::Low)] => escape + 2 * REPLACEMENT.len(),
            [Some(_), _] => {
                let end = escape + REPLACEMENT.len();
                replaced += &json[copied..escape];
                replaced += REPLACEMENT;
                *num_replaced += 1;
                copied = end;
                end
            }
            // Skips the character after the backslash, which may be a backslash itself.
            [None, _] => escape + 1 + json[escape + 1..].chars().next().map_or(0, char::len_utf8),
        };
    }
    match copied {
        0 => Cow::Borrowed(json),
        _ => Cow::Owned(replaced + &json[copied..]),
    }
}

enum Surrogate {
    High,
    Low,
}

/// Returns the kind of surrogate whose escape is at byte `at`, if there is one.
fn surrogate(json: &str, at: usize) -> Option<Surrogate> {
    let digits = json.get(at..at + REPLACEMENT.len())?.strip_prefix("\\u")?;
    match u16::from_str_radix(digits, 16).ok()? {
        0xd800..=0xdbff => Some(Surrogate::High),
        0xdc00..=0xdfff => Some(Surrogate::Low),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lone_surrogates_become_the_replacement_character() {
        let replaced = |json: &str| {
            let mut num_replaced = 0;
            (replace_lone_surrogates(json, &mut num_replaced).into_owned(), num_replaced)
        };
        for (json, expected, count) in [
            (r#""a\ud83db""#, r#""a\ufffdb""#, 1),
            (r#""\uDE00\ud83d""#, r#""\ufffd\ufffd""#, 2),
            (r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#, 1),
            (r#""\ud83d\ude00 \\ud83d \n\u00e9 é\"#, r#""\ud83d\ude00 \\ud83d \n\u00e9 é\"#, 0),
            (r#""\ud83é""#, r#""\ud83é""#, 0),
            (r#""\\\ud83d"#, r#""\\\ufffd"#, 1),
        ] {
            assert_eq!(replaced(json), (expected.to_owned(), count), "{json}");
        }
    }
}
