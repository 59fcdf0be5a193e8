//! Which run has which colour.

/// Hues in degrees; those of the first runs are furthest from each other.
const HUES: [u16; 10] = [212, 28, 145, 345, 275, 185, 55, 312, 0, 95];

/// How many runs can be told apart.
pub(super) const NUM_HUES: usize = HUES.len();

/// Attributes of an element that has the colour of a run.
pub(super) fn run_colour(run: usize) -> String {
    format!("class=\"run\" style=\"--hue:{}\"", HUES[run % NUM_HUES])
}
