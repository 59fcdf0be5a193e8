use std::path::Path;
use trireme_data::{Corpus, bigram_baseline};
use trireme_train::CONFIG_TOML;
use trireme_train::config::Config;

/// What counting pairs of tokens achieves on the run's text, if that can be found from here.
pub(super) fn baseline(run_folder: &Path) -> Option<f64> {
    let path = Some(run_folder.join(CONFIG_TOML)).filter(|path| path.is_file())?;
    let config = Config::load(&path, &[], None).ok()?;
    let corpus = Corpus::open(&config.data().folder).ok()?;
    bigram_baseline(&corpus.train.tokens, &corpus.validation?.tokens).ok()
}
