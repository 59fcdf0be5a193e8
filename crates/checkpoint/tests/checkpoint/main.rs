//! Checkpoints as users see them: some ranks save to a folder, others load from it.

mod common;
mod failures;
mod hugging_face;
mod save_and_load;
