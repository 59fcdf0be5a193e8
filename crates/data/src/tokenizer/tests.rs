use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;

const TEXT: &str = "The quick brown fox jumps over the lazy dog. Größe, naïve café: 100 €! 𝄞\n";

fn trained() -> Tokenizer {
    let texts = (0..20).map(|_| TEXT.to_owned());
    Tokenizer::train_bpe(texts, 310).unwrap()
}

/// Returns a tokenizer like Llama 2's: it puts a space before every text, and encodes unknown characters as
/// bytes.
fn sentence_piece() -> Value {
    let mut vocabulary = serde_json::Map::new();
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = ["</s>", "▁", "o", "n", "e", "t", "w", "▁o", "▁on", "▁one", "▁t", "▁tw", "▁two"];
    for (id, token) in bytes.chain(words.map(str::to_owned)).enumerate() {
        vocabulary.insert(token, json!(id));
    }
    let merges = [["▁", "o"], ["▁o", "n"], ["▁on", "e"], ["▁", "t"], ["▁t", "w"], ["▁tw", "o"]];
    json!({
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": "</s>", "special": true, "normalized": false,
                          "single_word": false, "lstrip": false, "rstrip": false}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "byte_fallback": true, "vocab": vocabulary, "merges": merges}
    })
}

fn from_value(json: &Value) -> Tokenizer {
    Tokenizer::from_json(json.to_string().into_bytes()).unwrap()
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids).unwrap();
    ids
}

fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut decoder = tokenizer.stream_decoder();
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    pieces.push(decoder.finish().unwrap());
    pieces
}

#[test]
fn bytes_are_their_own_ids() {
    let tokenizer = Tokenizer::bytes();
    assert_eq!(tokenizer.vocabulary_size(), 257);
    assert_eq!(tokenizer.end_of_document(), Some(256));
    assert_eq!(encode(&tokenizer, "aé"), [97, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&[97, 256, 0xc3, 0xa9, 9999, 0xc3]).unwrap(), "aé\u{FFFD}");
}

#[test]
fn a_trained_tokenizer_gives_the_text_back_in_fewer_tokens() {
    let tokenizer = trained();
    assert_eq!(tokenizer.vocabulary_size(), 310);
    assert_eq!(tokenizer.end_of_document(), Some(0));
    let ids = encode(&tokenizer, TEXT);
    assert!(ids.len() < TEXT.len() * 2 / 3, "{} tokens", ids.len());
    assert_eq!(tokenizer.decode(&ids).unwrap(), TEXT);
    assert_eq!(encode(&tokenizer, "a<|endoftext|>").last(), Some(&0));
}

#[test]
fn training_depends_on_the_text_alone() {
    let halves = || TEXT.split_inclusive(' ').map(str::to_owned).cycle().take(300);
    let reversed = halves().collect::<Vec<_>>().into_iter().rev();
    let one = Tokenizer::train_bpe(halves(), 300).unwrap();
    let other = Tokenizer::train_bpe(reversed, 300).unwrap();
    let json = |tokenizer: Tokenizer| match tokenizer.kind {
        Kind::HuggingFace(inner) => String::from_utf8(inner.json).unwrap(),
        Kind::Bytes => panic!("a trained tokenizer is no bytes tokenizer"),
    };
    assert_eq!(json(one), json(other));
}

#[test]
fn impossible_bpe_vocabularies_are_refused() {
    for vocabulary_size in [0, 256, VOCABULARY_SIZE_MAX + 1] {
        let error = Tokenizer::train_bpe(std::iter::empty(), vocabulary_size).unwrap_err();
        assert!(matches!(error, DataError::BpeVocabulary { .. }), "{error}");
    }
}

#[test]
fn saving_and_loading_changes_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = trained();
    let path = tokenizer.save(folder.path()).unwrap();
    let loaded = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(encode(&loaded, TEXT), encode(&tokenizer, TEXT));
    let before = fs::read(&path).unwrap();
    loaded.save(folder.path()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left behind");
}

#[test]
fn the_bytes_tokenizer_is_saved_as_a_marker_file() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |expected: &str| {
        let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused("no tokenizer");
    Tokenizer::bytes().save(folder.path()).unwrap();
    assert_eq!(Tokenizer::load(folder.path()).unwrap().vocabulary_size(), 257);
    let mark: Value =
        serde_json::from_slice(&fs::read(folder.path().join(BYTES_TOKENIZER_FILE)).unwrap()).unwrap();
    assert_eq!(mark["vocabulary_size"], Tokenizer::bytes().vocabulary_size());
    assert_eq!(mark["end_of_document"], BYTES_END_OF_DOCUMENT);
    trained().save(folder.path()).unwrap();
    refused("two tokenizers");
}

#[test]
fn broken_tokenizer_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(TOKENIZER_FILE);
    let mut huge_id = sentence_piece();
    huge_id["model"]["vocab"]["▁two"] = json!(4_000_000_000_u32);
    for content in ["", "{}", "not json", "{\"model\": {\"type\": \"BPE\"}}", &huge_id.to_string()] {
        fs::write(&path, content).unwrap();
        let error = Tokenizer::load(folder.path()).unwrap_err();
        assert!(matches!(error, DataError::LoadTokenizer { .. }), "{error}");
    }
}

/// Returns a trie's `units` and the texts after them in base64, as in a `precompiled_charsmap`.
fn charsmap(units: &[u32], texts: &[u8]) -> String {
    let size = (units.len() as u32 * 4).to_le_bytes();
    let units: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
    base64::encode([&size[..], &units, texts].concat())
}

/// Returns a trie that maps the letter "o" to the text at `offset`.
fn trie_of_o(offset: u32) -> Vec<u32> {
    const ROOT_OFFSET: u32 = 256;
    let letter = u32::from(b'o');
    let node = (ROOT_OFFSET ^ letter) as usize;
    let mut units = vec![0; 1024];
    units[0] = ROOT_OFFSET << 10;
    // The unit has a leaf, at index 512.
    units[node] = ((node as u32 ^ 512) << 10) | 1 << 8 | letter;
    units[512] = 1 << 31 | offset;
    units
}

#[test]
fn a_precompiled_charsmap_normalizes() {
    let mut json = sentence_piece();
    let map = charsmap(&trie_of_o(2), b"x\0tw\0");
    json["normalizer"]["normalizers"]
        .as_array_mut()
        .unwrap()
        .push(json!({"type": "Precompiled", "precompiled_charsmap": map}));
    assert_eq!(encode(&from_value(&json), "o"), encode(&from_value(&sentence_piece()), "tw"));
}

#[test]
fn tokenizers_that_the_library_cannot_take_are_refused() {
    let mut charsmaps = vec![
        ("empty", String::new()),
        ("not base64", "!!".to_owned()),
        ("claims 4 GiB", base64::encode([0xff; 4])),
        ("no trie", charsmap(&[], b"x\0")),
        ("a short trie", charsmap(&[1 << 18], b"x\0")),
        ("offsets outside of the trie", charsmap(&[u32::MAX; 1024], b"x\0")),
        ("a text outside of the map", charsmap(&trie_of_o(3), b"x\0")),
        ("a text within a character", charsmap(&trie_of_o(1), "é\0".as_bytes())),
        ("not UTF-8", charsmap(&trie_of_o(0), b"\xff\0")),
        ("a very long text", charsmap(&trie_of_o(0), &[b'x'; 1 << 20])),
    ];
    let mut outside = trie_of_o(0);
    outside[(256 ^ u32::from(b'o')) as usize] |= 1 << 30;
    charsmaps.push(("a child outside of the trie", charsmap(&outside, b"x\0")));
    let precompiled = charsmaps.into_iter().flat_map(|(name, map)| {
        let normalizer = json!({"type": "Precompiled", "precompiled_charsmap": map});
        let nested = json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}, normalizer]});
        [(name, "normalizer", normalizer), (name, "normalizer", nested)]
    });
    let replace = |pattern, content| json!({"type": "Replace", "pattern": pattern, "content": content});
    let split =
        |pattern| json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false});
    let doubling = replace(json!({"String": "o"}), "oo".to_owned());
    let others = [
        ("empty pattern", "normalizer", replace(json!({"String": ""}), "x".to_owned())),
        ("empty pattern", "normalizer", replace(json!({"Regex": ""}), "x".to_owned())),
        ("empty pattern", "decoder", replace(json!({"String": ""}), "x".to_owned())),
        ("empty pattern", "pre_tokenizer", split(json!({"String": ""}))),
        ("empty pattern", "pre_tokenizer", split(json!({"Regex": ""}))),
        ("long replacement", "normalizer", replace(json!({"String": "o"}), "x".repeat(1 << 16))),
        ("long replacement", "decoder", replace(json!({"Regex": "o"}), "x".repeat(1 << 16))),
        ("long prefix", "normalizer", json!({"type": "Prepend", "prepend": "x".repeat(1 << 20)})),
        ("doubling", "normalizer", json!({"type": "Sequence", "normalizers": vec![doubling; 40]})),
        ("pieces of no length", "pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
    ];
    let no_map = json!({"type": "Precompiled", "precompiled_charsmap": null});
    for (name, key, value) in precompiled.chain(others).chain([("no map", "normalizer", no_map)]) {
        let mut json = sentence_piece();
        json[key] = value;
        let refused = Tokenizer::from_json(json.to_string().into_bytes());
        assert!(refused.is_err(), "{name} as {key} is accepted");
    }
}

#[test]
fn added_tokens_that_normalize_to_nothing_are_refused() {
    let mut json = sentence_piece();
    let space = json!({"id": 300, "content": " ", "special": true, "normalized": true, "single_word": false,
                       "lstrip": true, "rstrip": false});
    json["added_tokens"].as_array_mut().unwrap().push(space);
    from_value(&json);
    json["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let error = Tokenizer::from_json(json.to_string().into_bytes()).unwrap_err().to_string();
    assert!(error.contains("erases the added token \" \""), "{error}");
}

#[test]
fn vocabularies_are_neither_empty_nor_without_bound() {
    let refused = |key: &str, value: Value| {
        let mut json = sentence_piece();
        *json.pointer_mut(key).unwrap() = value;
        Tokenizer::from_json(json.to_string().into_bytes()).unwrap_err().to_string()
    };
    let marked = format!("\u{feff}{}", sentence_piece()).into_bytes();
    assert!(Tokenizer::from_json(marked).unwrap_err().to_string().contains("begins with a byte order mark"));
    for empty in [json!({}), json!([]), Value::Null] {
        let error = refused("/model/vocab", empty);
        assert!(error.contains("model.vocab is empty"), "{error}");
    }
    let error = refused("/model/merges", vec![0; (1 << 20) + 1].into());
    assert_eq!(error, "its model.merges has 1048577 entries, more than 1048576");
    let error = refused("/model/vocab", vec![0; (1 << 20) + 1].into());
    assert!(error.starts_with("its model.vocab has 1048577 entries"), "{error}");
    let error = refused("/added_tokens", vec![0; (1 << 16) + 1].into());
    assert!(error.starts_with("its added_tokens has 65537 entries"), "{error}");
}

#[test]
fn no_tokens_decode_to_an_empty_text() {
    let mut json = sentence_piece();
    json["decoder"] = json!({"type": "BPEDecoder", "suffix": "</w>"});
    for tokenizer in [from_value(&json), trained(), Tokenizer::bytes()] {
        assert_eq!(tokenizer.decode(&[]).unwrap(), "");
    }
}

#[test]
fn a_panic_of_the_library_is_an_error() {
    let error = catch_panic::<()>(|| panic!("this panic is part of the test")).unwrap_err().to_string();
    assert!(error.ends_with("panicked: this panic is part of the test"), "{error}");
}

#[test]
fn padding_truncation_and_dropout_are_left_out() {
    let mut json = sentence_piece();
    json["truncation"] =
        json!({"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"});
    json["padding"] = json!({"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": null,
                             "pad_id": 1, "pad_type_id": 0, "pad_token": "x"});
    json["model"]["dropout"] = json!(0.9);
    let tokenizer = from_value(&json);
    let plain = from_value(&sentence_piece());
    for text in ["one two one two", "two"] {
        assert_eq!(encode(&tokenizer, text), encode(&plain, text));
    }
    assert_eq!(encode(&plain, "one two one two").len(), 4);
}

#[test]
fn the_treatment_of_a_space_at_a_split_is_detected() {
    let sentence_piece = from_value(&sentence_piece());
    assert_eq!(sentence_piece.space_at_split().unwrap(), SpaceAtSplit::Drop);
    assert_eq!(sentence_piece.end_of_document(), Some(256));
    assert_eq!(trained().space_at_split().unwrap(), SpaceAtSplit::Keep);
    assert_eq!(Tokenizer::bytes().space_at_split().unwrap(), SpaceAtSplit::Keep);
}

#[test]
fn a_stream_gives_each_character_when_it_is_complete() {
    let pieces = stream(
        &Tokenizer::bytes(),
        "aé€b".as_bytes().iter().map(|&b| b.into()).collect::<Vec<_>>().as_slice(),
    );
    assert_eq!(pieces, ["a", "", "é", "", "", "€", "b", ""]);
    let unfinished = stream(&Tokenizer::bytes(), &[97, 0xe2, 0x82]);
    assert_eq!(unfinished, ["a", "", "", "\u{FFFD}"]);
}

#[test]
fn streams_join_to_the_text_for_every_tokenizer() {
    for tokenizer in [Tokenizer::bytes(), trained(), from_value(&sentence_piece())] {
        for text in ["one two one", "two €é one 𝄞𝄞 two", TEXT, "", "\u{FFFD}two", "é\u{FFFD}"] {
            let pieces = stream(&tokenizer, &encode(&tokenizer, text));
            assert_eq!(pieces.concat(), text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bytes_and_trained_tokenizers_round_trip(text in "\\PC{0,60}") {
        for tokenizer in [Tokenizer::bytes(), trained_once()] {
            let ids = encode(&tokenizer, &text);
            prop_assert_eq!(&tokenizer.decode(&ids).unwrap(), &text);
            prop_assert_eq!(&stream(&tokenizer, &ids).concat(), &text);
        }
    }

    #[test]
    fn a_stream_of_any_ids_joins_to_their_text(ids in prop::collection::vec(0_u32..300, 0..50)) {
        let tokenizer = Tokenizer::bytes();
        prop_assert_eq!(stream(&tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap());
    }
}

fn trained_once() -> Tokenizer {
    static JSON: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| match trained().kind {
        Kind::HuggingFace(inner) => inner.json,
        Kind::Bytes => panic!("a trained tokenizer is no bytes tokenizer"),
    });
    Tokenizer::from_json(JSON.clone()).unwrap()
}

#[test]
fn other_programs_read_bytes_as_the_same_ids() {
    let (bytes, folder) = (Tokenizer::bytes(), tempfile::tempdir().unwrap());
    let (name, content) = bytes.hugging_face_file().unwrap();
    assert_eq!(name, TOKENIZER_FILE);
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    let read = Tokenizer::from_file(&path).unwrap();
    assert_eq!(encode(&read, TEXT), encode(&bytes, TEXT));
    let all: Vec<u32> = (0..=256).collect();
    assert_eq!(read.decode(&all).unwrap(), bytes.decode(&all).unwrap());
    assert_eq!((read.vocabulary_size(), read.end_of_document()), (257, Some(256)));
    assert_eq!(read.sha256().unwrap(), bytes.sha256().unwrap());
    let config: Value = serde_json::from_str(&bytes.config_json(64)).unwrap();
    assert_eq!((&config["eos_token"], &config["model_max_length"]), (&json!("<|endoftext|>"), &json!(64)));
}

#[test]
fn sha256_ignores_formatting_and_unused_settings() {
    let plain = sentence_piece();
    let hash = |json: &Value| from_value(json).sha256().unwrap();
    let mut other = plain.clone();
    other["padding"] = json!({"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "</s>"});
    let merges = ["▁ o", "▁o n", "▁on e", "▁ t", "▁t w", "▁tw o"];
    other["model"]["merges"] = json!(merges);
    assert_eq!(hash(&plain), hash(&other));
    other["model"]["merges"] = json!(merges[..5]);
    assert_ne!(hash(&plain), hash(&other));
    assert_eq!(trained().sha256().unwrap().len(), 64);
    assert_ne!(trained().sha256().unwrap(), Tokenizer::bytes().sha256().unwrap());
}

#[test]
fn num_bytes_is_the_length_of_the_text() {
    let text = "to be, or not to be: the quick brown fox \u{e9}\u{20ac}";
    let bpe = Tokenizer::train_bpe(std::iter::repeat_n(text.to_owned(), 20), 300).unwrap();
    let words = r#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "bc": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
        "truncation": null, "padding": null}"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, words).unwrap();
    for (tokenizer, text) in
        [(Tokenizer::bytes(), text), (bpe, text), (Tokenizer::from_file(&path).unwrap(), "a bc")]
    {
        let mut tokens = Vec::new();
        tokenizer.encode(text, &mut tokens).unwrap();
        tokens.extend(tokenizer.end_of_document());
        assert_eq!(tokenizer.num_bytes(&tokens).unwrap(), text.len() as u64);
        // The bytes of incomplete characters are counted, too.
        let parts: u64 = tokens.iter().map(|&token| tokenizer.num_bytes(&[token]).unwrap()).sum();
        assert!(parts == text.len() as u64 || text == "a bc");
    }
    // Added tokens have text unless they are special.
    let bytes = r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "  ": 1, "<end>": 2}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "added_tokens": [
            {"id": 1, "content": "  ", "single_word": false, "lstrip": false, "rstrip": false, "normalized": true, "special": false},
            {"id": 2, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null, "post_processor": null, "truncation": null, "padding": null}"#;
    std::fs::write(&path, bytes).unwrap();
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    let mut tokens = Vec::new();
    tokenizer.encode("a  a", &mut tokens).unwrap();
    assert_eq!(tokens, [0, 1, 0]);
    assert_eq!(tokenizer.num_bytes(&[0, 1, 0, 2]).unwrap(), 4);
}

#[test]
fn post_processors_add_few_known_tokens_around_the_text() {
    let with = |single: Value, id: u32| {
        let mut json = sentence_piece();
        json["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": single,
            "pair": [],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [id], "tokens": ["</s>"]}},
        });
        Tokenizer::from_json(json.to_string().into_bytes()).map_err(|error| error.to_string())
    };
    let special = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let tokenizer = with(json!([special, text, special]), 256).unwrap();
    assert_eq!((tokenizer.prefix_tokens(), tokenizer.suffix_tokens()), (&[256][..], vec![256]));
    assert_eq!(encode(&tokenizer, "one"), encode(&from_value(&sentence_piece()), "one"));
    let many = with(Value::Array(vec![special.clone(); 17]), 256).unwrap_err();
    assert!(many.contains("adds 17 tokens, more than 16"), "{many}");
    assert!(with(json!([special, text]), 999).unwrap_err().contains("adds the token 999"));
    assert!(with(json!([text, text]), 256).unwrap_err().contains("repeats or removes the text"));
    // The library panics if the post-processor expects a second text.
    assert!(with(json!([{"Sequence": {"id": "B", "type_id": 0}}]), 256).is_err());
    assert!(with(json!([special]), 256).unwrap_err().contains("repeats or removes the text"));
}

#[test]
fn a_literal_name_adds_no_space_within_a_text() {
    let mut json = sentence_piece();
    json["normalizer"] = Value::Null;
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    for pre_tokenizer in [metaspace.clone(), json!({"type": "Sequence", "pretokenizers": [metaspace]})] {
        json["pre_tokenizer"] = pre_tokenizer;
        let tokenizer = from_value(&json);
        let literal = |text: &str, position: usize| {
            let (mut ids, mut offsets) = (Vec::new(), Vec::new());
            tokenizer.encode_with_literal(text, &[position], &mut ids, &mut offsets).unwrap();
            let offsets: Vec<_> = offsets.into_iter().map(|place| text[place].to_owned()).collect();
            (ids, offsets)
        };
        let name = encode(&Tokenizer::bytes(), "</s>");
        let [o, n, e, one] = [258, 259, 260, 265];
        // The first name is encoded as the special token.
        let (ids, offsets) = literal("</s>one</s>", 8);
        assert_eq!(ids, [&[256, o, n, e][..], &name].concat());
        assert_eq!(offsets, ["</s>", "o", "n", "e", "<", "/", "s", ">"]);
        assert_eq!(literal("one</s>", 4).0, [&[one][..], &name].concat());
    }
}

#[test]
fn an_unknown_eos_token_is_recorded() {
    let tokenizer = from_value(&sentence_piece());
    let config =
        |end: &str| tokenizer.clone().with_config(json!({ "eos_token": end }).to_string().as_bytes());
    let unknown = config("<|none|>");
    assert_eq!((unknown.unknown_end_of_document(), unknown.end_of_document()), (Some("<|none|>"), Some(256)));
    assert_eq!(config("</s>").unknown_end_of_document(), None);
}
