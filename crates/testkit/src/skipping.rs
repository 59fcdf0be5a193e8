use std::fmt::Display;

/// Environment variable that, set to 1, forbids skipping tests.
const VARIABLE: &str = "TRIREME_TESTS_SKIP_NOTHING";

/// Returns the resource of the machine that a test needs, or prints why the test is skipped and returns `None`. Every test that may be
/// skipped calls it.
///
/// # Panics
/// If the machine lacks the resource, and `TRIREME_TESTS_SKIP_NOTHING` is set to 1.
pub fn or_skip<T>(what: &str, found: Result<T, impl Display>) -> Option<T> {
    let may_skip = std::env::var(VARIABLE).map_or(true, |value| value != "1");
    or_skip_if(may_skip, what, found)
}

fn or_skip_if<T>(may_skip: bool, what: &str, found: Result<T, impl Display>) -> Option<T> {
    match found {
        Ok(found) => Some(found),
        Err(reason) if may_skip => {
            eprintln!("skipped: this machine has no {what}: {reason}");
            None
        }
        Err(reason) => panic!("{VARIABLE} is set, and this machine has no {what}: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_resources_are_returned() {
        assert_eq!([true, false].map(|may_skip| or_skip_if(may_skip, "x", Ok::<_, String>(7))), [Some(7); 2]);
        assert_eq!(or_skip_if::<u8>(true, "x", Err("none was made")), None);
    }

    #[test]
    #[should_panic(expected = "this machine has no x: none was made")]
    fn a_missing_required_resource_fails_the_test() {
        or_skip_if::<()>(false, "x", Err("none was made"));
    }
}
