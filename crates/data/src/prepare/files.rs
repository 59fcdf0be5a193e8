//! Files in the folder of a prepared corpus.

/// The tokens to train on, in the folder of a prepared corpus.
pub const TRAIN_FILE: &str = "train.tokens";
/// The tokens held out for validation, in the folder of a prepared corpus.
pub const VALIDATION_FILE: &str = "validation.tokens";
/// What was prepared and how; written last, so a folder that has it is complete.
pub const REPORT_FILE: &str = "prepare.json";

/// Which of the tokens to train on count in the loss, in the folder of a prepared corpus: 1, or 0 for those that are only read.
pub const TRAIN_MASK_FILE: &str = "train.mask.tokens";
/// The same of those held out.
pub const VALIDATION_MASK_FILE: &str = "validation.mask.tokens";
