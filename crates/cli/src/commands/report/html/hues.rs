//! Colors of runs.

/// Hues in degrees. The hues of the first runs are furthest from each other.
const HUES: [u16; 10] = [212, 28, 145, 345, 275, 185, 55, 312, 0, 95];

/// Number of runs whose colors differ.
pub(super) const NUM_HUES: usize = HUES.len();

/// Returns the attributes of an element in the color of a run.
pub(super) fn run_color_attributes(run: usize) -> String {
    format!("class=\"run\" style=\"--hue:{}\"", HUES[run % NUM_HUES])
}
