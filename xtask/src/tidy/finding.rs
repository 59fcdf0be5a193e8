use std::fmt;

/// A violation of a rule, or a warning, at a place in the workspace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    path: String,
    /// Line number, from 1.
    line: usize,
    what: String,
    remedy: String,
    pub(crate) is_violation: bool,
}

impl Finding {
    /// Returns a violation, which must be fixed.
    pub(crate) fn violation(
        path: &str,
        line: usize,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (path, what, remedy) = (path.to_owned(), what.into(), remedy.into());
        Finding { path, line, what, remedy, is_violation: true }
    }

    /// Returns a warning, which may stay if there is a reason.
    pub(crate) fn warn(path: &str, line: usize, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Finding { is_violation: false, ..Finding::violation(path, line, what, remedy) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { path, line, what, remedy, is_violation: is_refused } = self;
        let kind = if *is_refused { "" } else { "warning: " };
        write!(f, "{path}:{line}: {kind}{what}; {remedy}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_says_where_what_and_what_to_do() {
        let refused = Finding::violation("a.rs", 3, "a tab", "use spaces");
        assert_eq!(refused.to_string(), "a.rs:3: a tab; use spaces");
        let warned = Finding::warn("a.rs", 1, "500 lines", "split it");
        assert_eq!(warned.to_string(), "a.rs:1: warning: 500 lines; split it");
        assert!(refused.is_violation && !warned.is_violation);
    }
}
