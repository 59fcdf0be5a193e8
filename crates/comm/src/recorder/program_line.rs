use std::fmt;

/// A line of a rank's step program, as shown in reports.
#[derive(Debug, Clone, Copy)]
pub struct ProgramLine<'a> {
    /// The training step.
    pub step: u64,
    /// The rank's place in its pipeline, if it has one. Ranks at other places run other programs.
    pub pipeline_rank: Option<usize>,
    /// The line number in the program's text, from 1.
    pub line: usize,
    /// The line's action.
    pub action: fmt::Arguments<'a>,
}

const PIPELINE_RANK: &str = ", pipeline rank ";
const LINE: &str = ", line ";

impl fmt::Display for ProgramLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.step)?;
        if let Some(rank) = self.pipeline_rank {
            write!(f, "{PIPELINE_RANK}{rank}")?;
        }
        write!(f, "{LINE}{}: {}", self.line, self.action)
    }
}

/// Extracts the step and the pipeline rank from the text of a [`ProgramLine`], if it has a pipeline rank.
pub(super) fn step_and_pipeline_rank(line: &str) -> Option<(&str, &str)> {
    let (step, rest) = line.split_once(PIPELINE_RANK)?;
    Some((step, rest.split_once(LINE)?.0))
}

/// Whether two lines that should be equal differ. An unknown line equals every line. For lines of different pipeline programs, only the
/// steps are compared.
pub(super) fn differ(one: &str, other: &str) -> bool {
    if one.is_empty() || other.is_empty() {
        return false;
    }
    match (step_and_pipeline_rank(one), step_and_pipeline_rank(other)) {
        (Some((step, rank)), Some((other_step, other_rank))) if rank != other_rank => step != other_step,
        _ => one != other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_different_programs_of_a_pipeline_differ_only_in_the_step() {
        let text = |step, pipeline_rank, line| {
            ProgramLine { step, pipeline_rank, line, action: format_args!("STEP 0") }.to_string()
        };
        let lines = [text(5, Some(0), 9), text(5, Some(1), 7), text(6, Some(1), 7), text(5, None, 7)];
        assert_eq!(lines[1], "step 5, pipeline rank 1, line 7: STEP 0");
        assert_eq!(lines[3], "step 5, line 7: STEP 0");
        let differing = |other: &str| lines.iter().map(|line| differ(line, other)).collect::<Vec<_>>();
        assert_eq!(differing(&lines[0]), [false, false, true, true]);
        assert_eq!(differing(&lines[1]), [false, false, true, true]);
        assert_eq!(differing(&text(5, Some(1), 8)), [false, true, true, true]);
        assert_eq!(differing("step 5: checkpoint"), [true; 4]);
        assert_eq!(differing(""), [false; 4]);
    }
}
