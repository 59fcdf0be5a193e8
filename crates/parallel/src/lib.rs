//! Applies a layout to a model and runs its step program.
