//! Names of the files in the folder of a prepared corpus.

/// Name of the training tokens' file in the folder of a prepared corpus.
pub const TRAIN_FILE: &str = "train.tokens";
/// Name of the validation tokens' file in the folder of a prepared corpus.
pub const VALIDATION_FILE: &str = "validation.tokens";
/// Name of the report, which says what was prepared and how. It is written last, so a folder that contains it is
/// complete.
pub const REPORT_FILE: &str = "prepare.json";

/// Name of the training tokens' loss mask in the folder of a prepared corpus: 1 for tokens that count in the loss, 0
/// for the others.
pub const TRAIN_MASK_FILE: &str = "train.mask.tokens";
/// Name of the validation tokens' loss mask in the folder of a prepared corpus.
pub const VALIDATION_MASK_FILE: &str = "validation.mask.tokens";
