//! What a run takes before it runs.

mod setup;

#[cfg(test)]
mod tests;
