//! Models in the Hugging Face cache of this machine, which other programs have fetched from the hub.

use crate::error::CheckpointError;
use crate::model_files::missing_weights;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum size in bytes of `refs/main`, which contains the hash of a revision.
const REVISION_BYTES_MAX: u64 = 256;

/// Organizations that are tried for a model name without one.
const DEFAULT_ORGANIZATIONS: [&str; 3] = ["openai-community", "EleutherAI", "HuggingFaceTB"];

/// Returns `path` if it exists. Otherwise, returns the snapshot of the model of that name (`gpt2`, `Qwen/Qwen3-0.6B`) in the Hugging Face
/// cache, or `path` if there is no such model. Builds with the feature `hub` download missing models from the hub and complete interrupted
/// downloads, unless `HF_HUB_OFFLINE` is set to 1, on, yes or true.
///
/// The folder of the cache is the one that huggingface_hub uses: `HF_HUB_CACHE`, `HF_HOME/hub`, `XDG_CACHE_HOME/huggingface/hub`, or
/// `~/.cache/huggingface/hub`.
///
/// # Errors
/// If a model cannot be fetched.
pub fn resolve_model(path: &Path) -> Result<PathBuf, CheckpointError> {
    let Some(cache) = cache_folder().filter(|_| !path.exists()) else { return Ok(path.to_owned()) };
    let Some(name) = path.to_str().filter(|_| is_model_name(path)) else { return Ok(path.to_owned()) };
    Ok(resolve_in(&cache, name, |name| fetch(name, &cache))?.unwrap_or_else(|| path.to_owned()))
}

/// Returns the snapshot of a model in a cache, if there is one. Calls `fetch` for a model that is missing or incomplete; `fetch` returns
/// `None` if it cannot fetch models.
pub(crate) fn resolve_in(
    cache: &Path,
    name: &str,
    fetch: impl FnOnce(&str) -> Option<Result<PathBuf, CheckpointError>>,
) -> Result<Option<PathBuf>, CheckpointError> {
    let snapshot = snapshot_in(cache, name);
    let name = match &snapshot {
        Some(snapshot) if missing_weights(snapshot).is_ok_and(|missing| missing.is_none()) => {
            return Ok(Some(snapshot.clone()));
        }
        Some(snapshot) => cached_name(snapshot).unwrap_or_else(|| name.to_owned()),
        None => name.to_owned(),
    };
    fetch(&name).transpose().map(|fetched| fetched.or(snapshot))
}

#[cfg(feature = "hub")]
fn fetch(name: &str, cache: &Path) -> Option<Result<PathBuf, CheckpointError>> {
    (!crate::hub::is_offline()).then(|| crate::hub::fetch(name, cache, None))
}

#[cfg(not(feature = "hub"))]
fn fetch(_: &str, _: &Path) -> Option<Result<PathBuf, CheckpointError>> {
    None
}

/// Returns the name of the model, if `folder` is its snapshot in a Hugging Face cache.
pub(crate) fn cached_name(folder: &Path) -> Option<String> {
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let name = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(name.replacen("--", "/", 1))
}

pub(crate) fn is_model_name(path: &Path) -> bool {
    let is_part = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
    };
    let parts: Option<Vec<&str>> = path.to_str().map(|path| path.split('/').collect());
    parts.is_some_and(|parts| parts.len() <= 2 && parts.iter().all(|part| is_part(part)))
}

/// Returns the folder of the Hugging Face cache, if the environment determines one.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_home = || variable("HF_HOME").map(|home| home.join("hub"));
    let cache = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    variable("HF_HUB_CACHE").or_else(of_home).or_else(|| cache().map(|cache| cache.join("huggingface/hub")))
}

pub(crate) fn snapshot_in(cache: &Path, name: &str) -> Option<PathBuf> {
    if !is_model_name(Path::new(name)) {
        return None;
    }
    let folder = |name: &str| cache.join(format!("models--{}", name.replace('/', "--")));
    let with_organization =
        DEFAULT_ORGANIZATIONS.iter().map(|organization| folder(&format!("{organization}/{name}")));
    let candidates = std::iter::once(folder(name)).chain(with_organization.filter(|_| !name.contains('/')));
    candidates.into_iter().find_map(|folder| snapshot(&folder))
}

/// Returns the snapshot that `refs/main` names, else the last one in the order of names.
fn snapshot(model: &Path) -> Option<PathBuf> {
    let snapshots = model.join("snapshots");
    let revision = crate::files::read_bounded(&model.join("refs/main"), REVISION_BYTES_MAX).ok();
    let named = revision.and_then(|revision| {
        let revision = String::from_utf8(revision).ok()?;
        let is_plain = revision.trim().chars().all(|c| c.is_ascii_alphanumeric());
        (is_plain && !revision.trim().is_empty()).then(|| snapshots.join(revision.trim()))
    });
    if let Some(named) = named.filter(|snapshot| snapshot.is_dir()) {
        return Some(named);
    }
    let mut all: Vec<PathBuf> = fs::read_dir(snapshots).ok()?.flatten().map(|entry| entry.path()).collect();
    all.sort();
    all.pop()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HuggingFaceDirectory;

    #[test]
    fn an_interrupted_download_is_named_and_completed() {
        let cache = tempfile::tempdir().unwrap();
        let snapshot = cache.path().join("models--openai-community--gpt2/snapshots/0aa");
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        type Fetch<'a> = &'a dyn Fn(&str) -> Option<Result<PathBuf, CheckpointError>>;
        let resolve = |fetch: Fetch<'_>| resolve_in(cache.path(), "gpt2", fetch).unwrap();
        let refused = || HuggingFaceDirectory::open(&snapshot).unwrap_err().to_string();
        for file in ["model.safetensors", "b.safetensors"] {
            let message = refused();
            let expected = format!(
                "openai-community/gpt2 is incomplete in the Hugging Face cache: {}",
                snapshot.display()
            );
            assert!(message.contains(&expected) && message.contains(&format!("lacks {file}")), "{message}");
            assert_eq!(resolve(&|_| None), Some(snapshot.clone()));
            let other = PathBuf::from("other");
            let fetched = resolve(&|name| {
                assert_eq!(name, "openai-community/gpt2");
                Some(Ok(PathBuf::from("other")))
            });
            assert_eq!(fetched, Some(other));
            let index = r#"{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}"#;
            fs::write(snapshot.join("model.safetensors.index.json"), index).unwrap();
            fs::write(snapshot.join("a.safetensors"), "").unwrap();
        }
        fs::write(snapshot.join("b.safetensors"), "").unwrap();
        assert_eq!(resolve(&|_| panic!("all is there")), Some(snapshot.clone()));
        fs::remove_file(snapshot.join("model.safetensors.index.json")).unwrap();
        fs::write(snapshot.join("pytorch_model.bin"), "").unwrap();
        assert_eq!(resolve(&|_| panic!("nothing to fetch")), Some(snapshot.clone()));
        assert!(refused().contains("PyTorch pickle files"));
    }

    #[test]
    fn a_name_is_found_among_snapshots() {
        let cache = tempfile::tempdir().unwrap();
        let add = |name: &str, revision: &str| {
            let path = cache.path().join(format!("{name}/snapshots/{revision}"));
            fs::create_dir_all(&path).unwrap();
            path
        };
        let (old, new) =
            (add("models--openai-community--gpt2", "0aa"), add("models--openai-community--gpt2", "1bb"));
        let find = |name: &str| snapshot_in(cache.path(), name);
        assert_eq!(find("gpt2"), Some(new.clone()));
        let refs = cache.path().join("models--openai-community--gpt2/refs");
        fs::create_dir(&refs).unwrap();
        fs::write(refs.join("main"), "0aa\n").unwrap();
        assert_eq!((find("gpt2"), find("openai-community/gpt2")), (Some(old.clone()), Some(old)));
        fs::write(refs.join("main"), "\n").unwrap();
        assert_eq!(find("gpt2"), Some(new.clone()));
        let qwen = add("models--Qwen--Qwen3-0.6B", "2cc");
        assert_eq!(find("Qwen/Qwen3-0.6B"), Some(qwen));
        // A name that could lead out of the cache, or is a path, is not the name of a model.
        fs::write(refs.join("main"), "../../..\n").unwrap();
        assert_eq!(find("gpt2"), Some(new));
        for name in ["Qwen3-0.6B", "../gpt2", "runs/a/b", "./gpt2", ""] {
            assert_eq!(find(name), None, "{name}");
        }
    }
}
