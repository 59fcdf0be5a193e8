//! The pretrained model that a run starts from: its tokenizer, its chat template and its other files.

use crate::checkpointing::{TOKENIZER, samples_of};
use crate::config::{self, Config};
use crate::error::TrainError;
use crate::resume::resume_point;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trireme_base::read_at_most;
use trireme_checkpoint::{CONFIG_FILE, ModelSource};
use trireme_data::{
    BYTES_TOKENIZER_FILE, ChatTemplate, Corpus, DataError, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer,
    TokenizerChoice,
};

/// The name under which exported models note the [`Tokenizer::sha256`] of their tokenizer.
pub const TOKENIZER_NOTE: &str = "tokenizer_sha256";

/// Returns the tokenizer stored with a model, if there is one.
///
/// # Errors
/// If it cannot be read, or [`TrainError::TokenizerReplaced`] if it is not the tokenizer that was first stored with the model.
pub fn model_tokenizer(source: &ModelSource) -> Result<Option<Tokenizer>, TrainError> {
    let path = source.path();
    let read = |name: &str| source.read_file(name).map_err(TrainError::from);
    if read(TOKENIZER_FILE)?.is_none() && read(BYTES_TOKENIZER_FILE)?.is_none() {
        return Ok(None);
    }
    let tokenizer = Tokenizer::from_files(path, read)?;
    let noted = match source {
        ModelSource::Checkpoint { checkpoint, .. } => {
            samples_of(checkpoint).and_then(|mut samples| samples.remove(TOKENIZER))
        }
        ModelSource::HuggingFace(directory) => directory.note(TOKENIZER_NOTE).map(str::to_owned),
    };
    match noted {
        Some(noted) if noted != tokenizer.sha256()? => {
            Err(TrainError::TokenizerReplaced { path: path.to_owned() })
        }
        _ => Ok(Some(tokenizer)),
    }
}

/// The pretrained model that `[model] init_from` names.
pub(crate) struct Pretrained {
    /// The path in the config.
    path: PathBuf,
    source: ModelSource,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
}

impl Pretrained {
    /// Opens the pretrained model, if the config names one.
    pub(crate) fn open(config: &Config) -> Result<Option<Self>, TrainError> {
        let Some(path) = &config.model().init_from else { return Ok(None) };
        let source = ModelSource::open(path)?;
        let tokenizer = if config.model().allow_other_tokenizer && !uses_model_tokenizer(config) {
            None
        } else {
            model_tokenizer(&source)?.map(Arc::new)
        };
        Ok(Some(Pretrained { path: path.clone(), source, tokenizer }))
    }

    /// Returns the model's tokenizer, if it has this hash.
    pub(crate) fn tokenizer_with(&self, sha256: &str) -> Result<Option<&Arc<Tokenizer>>, TrainError> {
        let Some(tokenizer) = &self.tokenizer else { return Ok(None) };
        Ok((tokenizer.sha256()? == sha256).then_some(tokenizer))
    }

    /// Returns the files that describe the model and its tokenizer, except `config.json` and the tokenizer itself.
    pub(crate) fn files(&self) -> Result<Vec<(&'static str, Vec<u8>)>, TrainError> {
        let own = [CONFIG_FILE, TOKENIZER_FILE, BYTES_TOKENIZER_FILE];
        let files = self.source.model_files()?.into_iter();
        Ok(files.filter(|(name, _)| !own.contains(name)).collect())
    }

    /// Refuses tokens of another tokenizer, whose ids have other meanings than the ids that the weights were trained on.
    fn check(&self, what: &Path, sha256: &str) -> Result<(), TrainError> {
        match &self.tokenizer {
            Some(own) if own.sha256()? != sha256 => {
                Err(TrainError::OtherTokenizer { corpus: what.to_owned(), model: self.path.clone() })
            }
            _ => Ok(()),
        }
    }
}

fn uses_model_tokenizer(config: &Config) -> bool {
    let data = config.data();
    !data.inputs.is_empty() && data.tokenizer == config::Tokenizer::Auto && data.train_bpe == 0
}

/// Returns the tokenizer for the inputs of a config. Fails if it differs from the pretrained model's, or if the config leaves the choice to
/// a model without a tokenizer.
pub(crate) fn tokenizer_choice(
    config: &Config,
    model: Option<&Pretrained>,
) -> Result<TokenizerChoice, TrainError> {
    let data = config.data();
    let given = match (&data.tokenizer, data.train_bpe) {
        (config::Tokenizer::File(path), _) => Some(TokenizerChoice::File(path.clone())),
        (config::Tokenizer::Bytes, 0) => Some(TokenizerChoice::Bytes),
        (config::Tokenizer::Auto, 0) => None,
        (_, vocabulary_size) => Some(TokenizerChoice::TrainBpe { vocabulary_size }),
    };
    let Some(model) = model else { return Ok(given.unwrap_or(TokenizerChoice::Bytes)) };
    match (given, &model.tokenizer) {
        (None, Some(tokenizer)) => {
            Ok(TokenizerChoice::OfModel { model: model.path.clone(), tokenizer: Arc::clone(tokenizer) })
        }
        (None, None) => Err(TrainError::NoModelTokenizer { path: model.path.clone() }),
        (Some(choice), None) => Ok(choice),
        // A mismatch is reported before the text is read.
        (Some(choice), Some(_)) => {
            match &choice {
                TokenizerChoice::File(path) => model.check(path, &Tokenizer::from_file(path)?.sha256()?)?,
                TokenizerChoice::Bytes => model.check(&data.folder, &Tokenizer::bytes().sha256()?)?,
                _ => {
                    return Err(TrainError::OtherTokenizer {
                        corpus: data.folder.clone(),
                        model: model.path.clone(),
                    });
                }
            }
            Ok(choice)
        }
    }
}

/// Maximum number of bytes of a chat template or of a tokenizer's settings.
const TOKENIZER_SETTINGS_BYTES_MAX: u64 = 16 << 20;

/// Returns the chat template `name`, which is `chatml` or a file. Without a name, returns the template of the tokenizer in `folder`, whose
/// files `read` returns by name. A template from a file gets the tokenizer's special tokens.
fn chosen_chat_template(
    name: Option<&Path>,
    folder: &Path,
    read: impl Fn(&str) -> Result<Option<Vec<u8>>, TrainError>,
) -> Result<Option<ChatTemplate>, TrainError> {
    match name {
        None => ChatTemplate::from_files(folder, read),
        Some(name) if name.as_os_str() == "chatml" => Ok(Some(ChatTemplate::chatml())),
        Some(name) => {
            let config = read(TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
            Ok(Some(ChatTemplate::from_file(name, &config)?))
        }
    }
}

/// Returns the chat template `name` (`chatml`, or a file, which gets the model's special tokens) or, without a name, the template of the
/// model.
///
/// # Errors
/// If it cannot be read, or is not valid.
pub fn chat_template_for(
    name: Option<&Path>,
    source: &ModelSource,
) -> Result<Option<ChatTemplate>, TrainError> {
    chosen_chat_template(name, source.path(), |file| Ok(source.read_file(file)?))
}

/// Returns the chat template `name` (`chatml`, or a file, which gets the tokenizer's special tokens) or, without a name, the template next
/// to a `tokenizer.json`.
///
/// # Errors
/// If it cannot be read, or is not valid.
pub fn chat_template_next_to(
    name: Option<&Path>,
    tokenizer: &Path,
) -> Result<Option<ChatTemplate>, TrainError> {
    let folder = tokenizer.parent().unwrap_or(Path::new(""));
    chosen_chat_template(name, folder, |name| {
        let path = folder.join(name);
        if !path.is_file() {
            return Ok(None);
        }
        let read = read_at_most(&path, TOKENIZER_SETTINGS_BYTES_MAX);
        Ok(Some(read.map_err(|source| DataError::Read { path, source })?))
    })
}

/// Returns the chat template with this name, `chatml` or a file, for a tokenizer without files of its own.
///
/// # Errors
/// If it cannot be read, or is not valid.
pub fn chat_template_without_files(name: Option<&Path>) -> Result<Option<ChatTemplate>, TrainError> {
    chosen_chat_template(name, Path::new(""), |_| Ok(None))
}

pub(crate) fn chat_template(
    config: &Config,
    model: Option<&Pretrained>,
) -> Result<Option<ChatTemplate>, TrainError> {
    let data = config.data();
    let name = data.chat_template.as_deref();
    match (&data.tokenizer, model) {
        (config::Tokenizer::File(path), _) => chat_template_next_to(name, path),
        (_, Some(model)) => chat_template_for(name, &model.source),
        (_, None) => chat_template_without_files(name),
    }
}

/// Refuses a corpus whose tokenizer differs from the pretrained model's, unless the run resumes: earlier versions let such runs begin.
pub(crate) fn check_tokenizer(
    config: &Config,
    model: Option<&Pretrained>,
    corpus: &Corpus,
) -> Result<(), TrainError> {
    let Some(model) = model else { return Ok(()) };
    match model.check(&corpus.folder, &corpus.tokenizer_sha256()?) {
        Err(TrainError::OtherTokenizer { .. }) if resume_point(config)?.is_some() => Ok(()),
        checked => checked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn settings_that_are_too_long_are_refused_and_not_cut() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = folder.path().join("tokenizer.json");
        let mut settings = r#"{"chat_template": "{{ messages }}"}"#.to_owned();
        std::fs::write(folder.path().join("tokenizer_config.json"), &settings).unwrap();
        assert!(chat_template_next_to(None, &tokenizer).unwrap().is_some());
        settings += &" ".repeat(TOKENIZER_SETTINGS_BYTES_MAX as usize);
        std::fs::write(folder.path().join("tokenizer_config.json"), &settings).unwrap();
        let error = chat_template_next_to(None, &tokenizer).unwrap_err();
        let TrainError::Data(DataError::Read { source, .. }) = error else { panic!("{error}") };
        assert_eq!(source.kind(), ErrorKind::FileTooLarge);
    }
}
