//! Hugging Face model directories: reading, export, and refusal of invalid ones.

use crate::common::{bytes, save_all, tensor};
use safetensors::{Dtype, tensor::TensorView};
use std::fs;
use std::path::Path;
use trireme_base::DType;
use trireme_checkpoint::{
    Checkpoint, CheckpointError, ExtraFile, HuggingFaceDirectory, ModelExport, ModelSource, SHARD_BYTES_MAX,
    StoredTensors, export,
};
use trireme_plan::{Extent, Placement, TensorPlacement};

/// Writes a file with the reference implementation. Each tensor is a name, a dtype, a shape and bytes.
fn write_file(path: &Path, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.to_string(), TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn read(tensors: &StoredTensors, name: &str, extent: &Extent) -> Vec<u8> {
    let size = tensors.get(name).unwrap().dtype().unwrap().size();
    let mut out = vec![0; extent.num_elements() * size];
    tensors.read_into(name, extent, &mut out).unwrap();
    out
}

#[test]
fn every_float_dtype_is_read_as_f32() {
    let folder = tempfile::tempdir().unwrap();
    let values = [1.0, -2.5, 0.25, 3.0, 8.0, -0.5];
    let bf16: Vec<u8> = values.iter().flat_map(|v: &f32| v.to_le_bytes()[2..].to_vec()).collect();
    // 1, -2.5, 0.25, 3, 8, -0.5 as IEEE halves.
    let f16: Vec<u8> = [0x3c00_u16, 0xc100, 0x3400, 0x4200, 0x4800, 0xb800]
        .iter()
        .flat_map(|bits| bits.to_le_bytes())
        .collect();
    let (f32, shape) = (floats(&values), &[2, 3][..]);
    write_file(
        &folder.path().join("model.safetensors"),
        &[
            ("f32", Dtype::F32, shape, &f32),
            ("bf16", Dtype::BF16, shape, &bf16),
            ("f16", Dtype::F16, shape, &f16),
        ],
    );
    let directory = HuggingFaceDirectory::open(folder.path()).unwrap();
    let middle = Extent { start: vec![0, 1], shape: vec![2, 1] };
    for name in ["f32", "bf16", "f16"] {
        assert_eq!(read(directory.tensors(), name, &Extent::full(shape)), f32, "{name}");
        assert_eq!(read(directory.tensors(), name, &middle), floats(&[-2.5, 8.0]), "{name}");
    }
}

#[test]
fn names_can_be_mapped_and_buffers_left_out() {
    let folder = tempfile::tempdir().unwrap();
    write_file(
        &folder.path().join("model.safetensors"),
        &[
            ("wte.weight", Dtype::F32, &[2], &[0; 8]),
            ("h.0.attn.bias", Dtype::BOOL, &[4], &[1; 4]),
            ("lm_head.weight", Dtype::F32, &[2], &[0; 8]),
        ],
    );
    let directory = HuggingFaceDirectory::open(folder.path()).unwrap();
    let expected = [tensor("transformer.wte.weight", &[2], DType::F32, Placement::Replicate)];
    let rename = |name: &str| match name {
        "lm_head.weight" => None,
        name if name.ends_with("attn.bias") => None,
        name => Some(format!("transformer.{name}")),
    };
    directory.tensors().renamed(rename).unwrap().check_against(&expected).unwrap();
    let Err(CheckpointError::Mismatches { mismatches, .. }) = directory.tensors().check_against(&expected)
    else {
        panic!("without the mapping nothing fits");
    };
    assert_eq!(mismatches.len(), 4);
    let all_alike = directory.tensors().renamed(|_| Some("w".into()));
    assert!(matches!(all_alike, Err(CheckpointError::SameName { .. })));
    let unreadable =
        directory.tensors().read_into("h.0.attn.bias", &Extent::full(&[4]), &mut [0; 4]).unwrap_err();
    assert!(matches!(unreadable, CheckpointError::UnreadableDType { .. }));
}

fn write_sharded(folder: &Path, index: &str) {
    write_file(&folder.join("model-00001-of-00002.safetensors"), &[("a", Dtype::U8, &[1], &[1])]);
    write_file(&folder.join("model-00002-of-00002.safetensors"), &[("b", Dtype::U8, &[1], &[2])]);
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

#[test]
fn shards_are_found_by_their_index_and_bad_ones_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let index =
        |a: &str, b: &str| format!(r#"{{"metadata": {{}}, "weight_map": {{"a": "{a}", "b": "{b}"}}}}"#);
    write_sharded(folder.path(), &index(first, second));
    let directory = HuggingFaceDirectory::open(folder.path()).unwrap();
    assert_eq!(read(directory.tensors(), "b", &Extent::full(&[1])), [2]);

    for (index, word) in [
        (index(second, first), "lacks 'a'"),
        (index(first, first), "lacks 'b'"),
        (index("../model.safetensors", second), "outside"),
        ("{}".to_owned(), "invalid"),
        ("[".repeat(1000), "invalid"),
    ] {
        write_sharded(folder.path(), &index);
        let checked = |directory: HuggingFaceDirectory| directory.tensors().check_against(&[]);
        let refused = HuggingFaceDirectory::open(folder.path()).and_then(checked).unwrap_err().to_string();
        assert!(refused.contains(word), "{refused}");
    }
    // A tensor that is not expected may be absent.
    write_sharded(folder.path(), &index(first, first));
    let directory = HuggingFaceDirectory::open(folder.path()).unwrap();
    let needed = directory.tensors().renamed(|name| (name == "a").then(|| name.to_owned())).unwrap();
    needed.check_against(&[tensor("a", &[1], DType::U8, Placement::Replicate)]).unwrap();
    write_sharded(folder.path(), &index(first, second));
    write_file(&folder.path().join(second), &[("a", Dtype::U8, &[1], &[1]), ("b", Dtype::U8, &[1], &[2])]);
    assert!(HuggingFaceDirectory::open(folder.path()).unwrap_err().to_string().contains("also contains"));
    fs::remove_file(folder.path().join(second)).unwrap();
    assert!(matches!(HuggingFaceDirectory::open(folder.path()), Err(CheckpointError::Read { .. })));
}

#[test]
fn copies_have_the_same_fingerprint_and_other_tensors_have_another() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = |name: &str, tensors: &[(&str, Dtype, &[usize], &[u8])]| {
        let folder = folder.path().join(name);
        fs::create_dir(&folder).unwrap();
        write_file(&folder.join("model.safetensors"), tensors);
        ModelSource::open(&folder).unwrap().weights().fingerprint().unwrap()
    };
    let with = |position: usize| {
        let mut values = vec![0; 40_000];
        values[position] = 1;
        values
    };
    let (start, end) = (with(0), with(39_999));
    let original = fingerprint("a", &[("w", Dtype::F32, &[100, 100], &start)]);
    assert_eq!(fingerprint("b", &[("w", Dtype::F32, &[100, 100], &start)]), original);
    assert_ne!(fingerprint("c", &[("w", Dtype::F32, &[100, 100], &end)]), original);
    assert_ne!(fingerprint("d", &[("v", Dtype::F32, &[100, 100], &start)]), original);
    assert_ne!(fingerprint("e", &[("w", Dtype::I32, &[100, 100], &start)]), original);
    assert_ne!(fingerprint("f", &[("w", Dtype::F32, &[10, 1000], &start)]), original);
    fingerprint("empty", &[("w", Dtype::F32, &[0, 3], &[])]);
}

#[test]
fn folders_without_a_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| ModelSource::open(path).unwrap_err().to_string();
    assert!(message(folder.path()).contains("no model"));
    assert!(message(&folder.path().join("none")).contains("does not exist"));
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert!(message(folder.path()).contains("save_pretrained"));
}

fn weights() -> Vec<TensorPlacement> {
    vec![
        tensor("transformer.h.0.weight", &[5, 4], DType::F32, Placement::Shard { dim: 1 }),
        tensor("transformer.h.1.weight", &[5, 4], DType::F32, Placement::Shard { dim: 0 }),
        tensor("transformer.ln.weight", &[4], DType::F32, Placement::Replicate),
        tensor("optimizer.exp_avg.transformer.ln.weight", &[4], DType::F32, Placement::Replicate),
    ]
}

/// Opens the checkpoint of a run and exports it.
fn export_run(run: &Path, out: &Path, shard_bytes_max: u64, force: bool) -> Result<(), CheckpointError> {
    let source = ModelSource::open(run)?;
    let files = source.model_files()?;
    let files: Vec<_> = files.iter().map(|(name, contents)| ExtraFile { name, contents }).collect();
    export(
        &ModelExport {
            tensors: &source.weights(),
            files: &files,
            dtype: None,
            notes: &[],
            shard_bytes_max,
            force,
        },
        out,
    )
}

#[test]
fn an_exported_checkpoint_is_a_model_directory_of_one_file_or_more() {
    let (run, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_all(&run.path().join("checkpoints"), 4, &weights(), 2);
    for (name, shard_bytes_max, num_files) in [("one", SHARD_BYTES_MAX, 2), ("two", 100, 4), ("each", 1, 5)] {
        let out = other.path().join(name);
        export_run(run.path(), &out, shard_bytes_max, false).unwrap();
        assert_eq!(fs::read_dir(&out).unwrap().count(), num_files, "{name}");
        let source = ModelSource::open(&out).unwrap();
        assert_eq!(source.read_file("config.json").unwrap().unwrap(), crate::common::FILES[1].contents);
        let exported = source.weights();
        exported.check_against(&weights()[..3]).unwrap();
        for tensor in &weights()[..3] {
            let whole = Extent::full(&tensor.shape);
            assert_eq!(read(&exported, &tensor.name, &whole), bytes(tensor, &whole));
        }
    }
    // Nothing but the three directories is left.
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 3);
}

#[test]
fn an_index_counts_the_bytes_and_names_every_file() {
    let (run, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_all(&run.path().join("checkpoints"), 4, &weights(), 1);
    let out = other.path().join("out");
    export_run(run.path(), &out, 100, false).unwrap();
    let index = fs::read(out.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], (20 + 20 + 4) * 4);
    assert_eq!(index["weight_map"]["transformer.h.0.weight"], "model-00001-of-00002.safetensors");
    assert_eq!(index["weight_map"]["transformer.h.1.weight"], "model-00002-of-00002.safetensors");
    assert_eq!(index["weight_map"]["transformer.ln.weight"], "model-00002-of-00002.safetensors");
}

#[test]
fn a_folder_is_replaced_only_by_force_and_only_if_it_is_an_export() {
    let (run, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_all(&run.path().join("checkpoints"), 4, &weights(), 1);
    let out = other.path().join("out");
    fs::create_dir(&out).unwrap();
    export_run(run.path(), &out, SHARD_BYTES_MAX, false).expect("an empty folder may be used");
    fs::write(out.join("merges.txt"), "of an earlier export").unwrap();
    let refused = export_run(run.path(), &out, SHARD_BYTES_MAX, false);
    assert!(matches!(refused, Err(CheckpointError::TargetExists { .. })));
    assert!(out.join("merges.txt").exists());
    export_run(run.path(), &other.path().join("out/"), SHARD_BYTES_MAX, true).unwrap();
    assert!(!out.join("merges.txt").exists() && out.join("model.safetensors").exists());

    // An export need not have a config.
    fs::remove_file(out.join("config.json")).unwrap();
    export_run(run.path(), &out, SHARD_BYTES_MAX, true).unwrap();
    assert!(out.join("config.json").exists());

    // Any other file in the folder of a model is a user's own.
    for foreign in ["thesis.tex", "model-1-of-x.safetensors", "onnx"] {
        let path = out.join(foreign);
        if foreign == "onnx" {
            fs::create_dir(&path).unwrap()
        } else {
            fs::write(&path, "").unwrap()
        }
        let refused = export_run(run.path(), &out, SHARD_BYTES_MAX, true);
        assert!(
            matches!(&refused, Err(CheckpointError::TargetIsNotExport { foreign, .. }) if *foreign == path),
            "{refused:?}"
        );
        assert!(path.exists());
        if foreign == "onnx" { fs::remove_dir(&path).unwrap() } else { fs::remove_file(&path).unwrap() }
    }
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 1);
}

#[test]
fn an_export_never_writes_into_a_run() {
    let (run, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let checkpoint = save_all(&run.path().join("checkpoints"), 4, &weights(), 1);
    let link = other.path().join("link");
    std::os::unix::fs::symlink(run.path(), &link).unwrap();
    let within = [
        run.path().to_owned(),
        run.path().join("out"),
        run.path().join("deep/er/out"),
        run.path().join("checkpoints"),
        checkpoint.clone(),
        checkpoint.join("out"),
        link.join("out"),
    ];
    for out in within {
        for force in [false, true] {
            let refused = export_run(run.path(), &out, SHARD_BYTES_MAX, force);
            assert!(
                matches!(refused, Err(CheckpointError::TargetInRun { .. })),
                "{}: {refused:?}",
                out.display()
            );
        }
    }
    assert!(Checkpoint::open(&checkpoint).unwrap().verify().is_empty());
    assert_eq!(fs::read_dir(run.path()).unwrap().count(), 1);
}

#[test]
fn a_failed_export_leaves_nothing() {
    let (run, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = save_all(&run.path().join("checkpoints"), 4, &weights(), 1);
    let source = ModelSource::open(run.path()).unwrap();
    let shard = path.join("shard-00000.safetensors");
    let mut contents = fs::read(&shard).unwrap();
    // The last 16 bytes are optimizer state, which is not exported.
    let last_weight = contents.len() - 17;
    contents[last_weight] ^= 1;
    fs::write(&shard, contents).unwrap();
    let model = ModelExport {
        tensors: &source.weights(),
        files: &[],
        dtype: None,
        notes: &[],
        shard_bytes_max: 100,
        force: false,
    };
    let failed = export(&model, &other.path().join("out"));
    assert!(matches!(failed, Err(CheckpointError::Damaged { .. })), "{failed:?}");
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
}

#[test]
fn a_config_that_states_another_dtype_is_corrected() {
    let (run, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save_all(&run.path().join("checkpoints"), 4, &weights(), 1);
    let source = ModelSource::open(run.path()).unwrap();
    let export_with = |config: &str, name: &str| {
        let out = other.path().join(name);
        let files = [ExtraFile { name: "config.json", contents: config.as_bytes() }];
        let tensors = &source.weights();
        export(
            &ModelExport {
                tensors,
                files: &files,
                dtype: None,
                notes: &[],
                shard_bytes_max: SHARD_BYTES_MAX,
                force: false,
            },
            &out,
        )?;
        Ok::<_, CheckpointError>(fs::read_to_string(out.join("config.json")).unwrap())
    };
    let corrected = export_with(r#"{"torch_dtype": "bfloat16", "n_layer": 2}"#, "a").unwrap();
    let corrected: serde_json::Value = serde_json::from_str(&corrected).unwrap();
    assert_eq!(corrected, serde_json::json!({"torch_dtype": "float32", "n_layer": 2}));
    let kept = r#"{ "dtype":"float32" }"#;
    assert_eq!(export_with(kept, "b").unwrap(), kept);
    assert!(matches!(export_with("{", "c"), Err(CheckpointError::Damaged { .. })));
}

/// Writes a model directory with these tensors and this `config.json`, exports it, and opens the export.
fn export_again(
    folder: &Path,
    tensors: &[(&str, Dtype, &[usize], &[u8])],
    config: &str,
    dtype: Option<DType>,
) -> Result<HuggingFaceDirectory, CheckpointError> {
    let (stored, out) = (folder.join("stored"), folder.join("out"));
    fs::create_dir_all(&stored).unwrap();
    write_file(&stored.join("model.safetensors"), tensors);
    let source = HuggingFaceDirectory::open(&stored).unwrap();
    let files = [ExtraFile { name: "config.json", contents: config.as_bytes() }];
    let shard_bytes_max = SHARD_BYTES_MAX;
    let (tensors, force) = (source.tensors(), true);
    export(&ModelExport { tensors, files: &files, dtype, notes: &[], shard_bytes_max, force }, &out)?;
    HuggingFaceDirectory::open(&out)
}

#[test]
fn an_export_has_the_stored_dtypes_or_the_one_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (bf16, f32) = ([0x80, 0x3f, 0x20, 0xc0], floats(&[1.5, 1e5]));
    let tensors: [(&str, Dtype, &[usize], &[u8]); 3] = [
        ("bias", Dtype::F32, &[2], &f32),
        ("ids", Dtype::I64, &[1], &[7; 8]),
        ("w", Dtype::BF16, &[2], &bf16),
    ];
    let dtypes = |directory: &HuggingFaceDirectory| {
        let dtype = |name| directory.tensors().get(name).unwrap().stored_dtype();
        ["bias", "ids", "w"].map(dtype)
    };
    let config = |directory: &HuggingFaceDirectory| {
        String::from_utf8(directory.read_file("config.json").unwrap().unwrap()).unwrap()
    };
    let stored = export_again(folder.path(), &tensors, "{}", None).unwrap();
    assert_eq!(dtypes(&stored), [Dtype::F32, Dtype::I64, Dtype::BF16]);
    let export =
        |dtype| export_again(folder.path(), &tensors[1..], "{\"dtype\":\"float16\",\"x\":NaN}", dtype);
    let exported = export(None).unwrap();
    assert_eq!(config(&exported), "{\n  \"dtype\": \"bfloat16\",\n  \"x\": NaN\n}");
    let contents = fs::read(folder.path().join("out/model.safetensors")).unwrap();
    assert!(contents.ends_with(&bf16));
    for (dtype, stored, name) in [
        (DType::F32, Dtype::F32, "float32"),
        (DType::F16, Dtype::F16, "float16"),
        (DType::Bf16, Dtype::BF16, "bfloat16"),
    ] {
        let exported = export(Some(dtype)).unwrap();
        assert_eq!(exported.tensors().get("w").unwrap().stored_dtype(), stored);
        assert_eq!(exported.tensors().get("ids").unwrap().stored_dtype(), Dtype::I64);
        assert_eq!(read(exported.tensors(), "w", &Extent::full(&[2])), floats(&[1.0, -2.5]));
        assert!(config(&exported).contains(name));
    }
    let refused = export_again(folder.path(), &tensors, "{}", Some(DType::F16)).unwrap_err().to_string();
    assert!(refused.contains("'bias' has the value 100000, which f16 cannot represent"), "{refused}");
}

#[test]
fn a_quantization_is_not_exported_and_quantized_weights_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}"#;
    let float = export_again(folder.path(), &[("w", Dtype::BF16, &[1], &[0; 2])], config, None).unwrap();
    let written = float.read_file("config.json").unwrap().unwrap();
    assert_eq!(String::from_utf8(written).unwrap(), "{\n  \"model_type\": \"llama\"\n}");
    for (dtype, bytes) in [(Dtype::I32, &[0; 4][..]), (Dtype::F8_E4M3, &[0])] {
        let refused = export_again(folder.path(), &[("w", dtype, &[1], bytes)], config, None).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("quantized") && refused.contains("\"fp8\"; 'w' is stored as"), "{refused}");
    }
}

#[test]
fn tensors_are_compared_in_the_dtype_that_they_are_read_in() {
    let folder = tempfile::tempdir().unwrap();
    let long = vec![0; 300_000];
    let other = [&long[1..], &[1]].concat();
    let tensors: [(&str, Dtype, &[usize], &[u8]); 6] = [
        ("a", Dtype::F32, &[2], &floats(&[1.0, -2.5])),
        ("b", Dtype::BF16, &[2], &[0x80, 0x3f, 0x20, 0xc0]),
        ("c", Dtype::F32, &[1, 2], &floats(&[1.0, -2.5])),
        ("d", Dtype::F32, &[2], &floats(&[1.0, -2.0])),
        ("e", Dtype::F32, &[75_000], &long),
        ("f", Dtype::F32, &[75_000], &other),
    ];
    write_file(&folder.path().join("model.safetensors"), &tensors);
    let directory = HuggingFaceDirectory::open(folder.path()).unwrap();
    let are_equal = |a, b| directory.tensors().are_equal(a, b).unwrap();
    assert!(are_equal("a", "b") && are_equal("e", "e"));
    assert!(!are_equal("a", "c") && !are_equal("a", "d") && !are_equal("e", "f"));
    assert!(matches!(directory.tensors().are_equal("a", "z"), Err(CheckpointError::NoSuchTensor { .. })));
}

#[test]
fn a_prefix_of_all_names_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    write_file(&folder.path().join("model.safetensors"), &[("net.model.w", Dtype::F32, &[1], &[0; 4])]);
    let directory = HuggingFaceDirectory::open(folder.path()).unwrap();
    let expected = [tensor("model.w", &[1], DType::F32, Placement::Replicate)];
    let refused = directory.tensors().check_against(&expected).unwrap_err().to_string();
    assert!(refused.contains("begin with 'net.'"), "{refused}");
}
