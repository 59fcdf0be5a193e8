//! Download of models from the Hugging Face hub.

use crate::error::CheckpointError;
use crate::model_files::{INDEX_FILE, MODEL_FILES};
use hf_hub::api::sync::ApiBuilder;
use std::env;
use std::path::{Path, PathBuf};

/// Whether `HF_HUB_OFFLINE` forbids downloads: if it is 1, on, yes or true, in upper or lower case, as in Hugging Face's own libraries.
pub(crate) fn is_offline() -> bool {
    let is_true = |value: String| ["1", "on", "yes", "true"].contains(&&*value.to_ascii_lowercase());
    env::var("HF_HUB_OFFLINE").is_ok_and(is_true)
}

/// Fetches the weights of a model and the files that describe it into `cache`, with a progress bar for each file. Returns the folder that
/// contains the files. `endpoint` is the URL of the hub; `None` uses `HF_ENDPOINT`, or huggingface.co.
///
/// # Errors
/// If the hub cannot be reached or does not have the model, or the model has no safetensors files.
pub(crate) fn fetch(name: &str, cache: &Path, endpoint: Option<&str>) -> Result<PathBuf, CheckpointError> {
    let failed = |reason: String| CheckpointError::Fetch { name: name.into(), reason };
    let builder = ApiBuilder::from_env().with_cache_dir(cache.to_owned());
    let builder = match endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint.to_owned()),
        None => builder,
    };
    let api = builder.build().map_err(|error| failed(error.to_string()))?;
    let model = api.model(name.to_owned());
    let files = model.info().map_err(|error| failed(error.to_string()))?.siblings;
    let mut files: Vec<String> = files.into_iter().map(|file| file.rfilename).collect();
    files.retain(|file| !file.contains('/') && (is_weights(file) || MODEL_FILES.contains(&&**file)));
    if !files.iter().any(|file| is_weights(file)) {
        return Err(failed("it has no safetensors files".to_owned()));
    }
    // Weights come last, so a folder with all weights is complete.
    files.sort_by_key(|file| is_weights(file));
    let mut folder = PathBuf::new();
    for file in &files {
        let path = model.get(file).map_err(|error| failed(format!("{file}: {error}")))?;
        folder = path.parent().map_or(folder, Path::to_owned);
    }
    Ok(folder)
}

fn is_weights(file: &str) -> bool {
    file.ends_with(".safetensors") || file == INDEX_FILE
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};

    const FILES: [(&str, &str); 4] = [
        ("model.safetensors", "weights"),
        ("config.json", "{}"),
        ("README.md", "not asked for"),
        ("onnx/model.safetensors", "nor this"),
    ];

    /// Answers one HTTP request as the hub does.
    fn answer(mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().transpose()?.unwrap_or_default();
        let mut range = None;
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            range = line.strip_prefix("range: bytes=").map(str::to_owned).or(range);
        }
        let path = request.split(' ').nth(1).unwrap_or_default();
        let file = FILES.iter().find(|(name, _)| path.ends_with(&format!("/resolve/main/{name}")));
        let (status, body, more) = match file {
            _ if path.starts_with("/api/models/org/tiny/revision/main") => {
                let siblings: Vec<String> =
                    FILES.iter().map(|(name, _)| format!("{{\"rfilename\": \"{name}\"}}")).collect();
                let info = format!("{{\"sha\": \"0abc\", \"siblings\": [{}]}}", siblings.join(", "));
                ("200 OK", info, String::new())
            }
            Some((name, contents)) => {
                let all = contents.len();
                let (first, last) =
                    range.as_deref().and_then(|range| range.split_once('-')).unwrap_or(("0", ""));
                let first: usize = first.parse().unwrap_or(0);
                let last = last.parse().unwrap_or(all - 1).min(all - 1);
                let part = contents[first..=last].to_owned();
                let more = format!(
                    "x-repo-commit: 0abc\r\netag: \"{}\"\r\ncontent-range: bytes {first}-{last}/{all}\r\n",
                    name.replace('/', "-")
                );
                ("206 Partial Content", part, more)
            }
            None => ("404 Not Found", String::new(), String::new()),
        };
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\n{more}content-length: {length}\r\nconnection: close\r\n\r\n{body}"
        )
    }

    #[test]
    fn a_model_is_fetched_once_and_then_in_the_cache() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || listener.incoming().for_each(|stream| answer(stream.unwrap()).unwrap()));
        let cache = tempfile::tempdir().unwrap();
        let folder = fetch("org/tiny", cache.path(), Some(&endpoint)).unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors"]);
        assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), "weights");
        assert_eq!(crate::hub_cache::snapshot_in(cache.path(), "org/tiny"), Some(folder.clone()));
        // A download that was interrupted is completed.
        std::fs::remove_file(folder.join("model.safetensors")).unwrap();
        let again = |name: &str| Some(fetch(name, cache.path(), Some(&endpoint)));
        let completed = crate::hub_cache::resolve_in(cache.path(), "org/tiny", again).unwrap();
        assert_eq!(completed, Some(folder.clone()));
        assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), "weights");
        let error = fetch("org/none", cache.path(), Some(&endpoint)).unwrap_err().to_string();
        assert!(error.contains("cannot fetch the model org/none") && error.contains("404"), "{error}");
    }
}
