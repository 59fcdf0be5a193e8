//! Special tokens around texts and conversations, compared with transformers (`peers/tokenizer_reference.py`).

use crate::common::TestFolder;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trireme_data::{
    ChatTemplate, Corpus, NoProgress, PrepareOptions, Question, TOKENIZER_CONFIG_FILE, Tokenizer,
    TokenizerChoice, is_up_to_date, prepare,
};

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers").join(family)
}

fn golden() -> Value {
    serde_json::from_slice(&fs::read(folder("golden.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn template_of(family: &str) -> Option<ChatTemplate> {
    let read = |name: &str| Ok::<_, trireme_data::DataError>(fs::read(folder(family).join(name)).ok());
    ChatTemplate::from_files(&folder(family), read).unwrap()
}

/// Returns the tokens and the loss mask of each document of the training file.
fn documents(test_folder: &TestFolder) -> Vec<(Vec<u32>, Vec<u32>)> {
    let corpus = Corpus::open(&test_folder.path("out")).unwrap();
    let read = |document: std::ops::Range<u64>| {
        let mut tokens = vec![0; (document.end - document.start) as usize];
        let mut mask = vec![1; tokens.len()];
        corpus.train.tokens.read_window(document.start, &mut tokens).unwrap();
        if let Some(file) = &corpus.train.loss_mask {
            file.read_window(document.start, &mut mask).unwrap();
        }
        (tokens, mask)
    };
    corpus.train.tokens.documents().map(Result::unwrap).map(read).collect()
}

#[test]
fn texts_begin_and_end_as_in_transformers() {
    let golden = golden();
    let sentence = golden["sentence"].as_str().unwrap();
    for (family, golden) in golden["families"].as_object().unwrap() {
        let end = golden["end"].as_u64().unwrap() as u32;
        let text = ids(&golden["text"]);
        let test_folder = TestFolder::new(&[("text.txt", sentence.as_bytes())]);
        let tokenizer = TokenizerChoice::File(folder(family).join("tokenizer.json"));
        let options = PrepareOptions { tokenizer, ..test_folder.options(&["text.txt"]) };
        let report = prepare(&options, &NoProgress).unwrap();
        assert_eq!(report.end_of_document, Some(end), "{family}");
        assert_eq!(documents(&test_folder)[0].0, [&text[..], &[end]].concat(), "{family}");
        // The folder of the corpus contains no `tokenizer_config.json`.
        let stored = Tokenizer::load(&test_folder.path("out")).unwrap();
        assert_eq!(
            (stored.end_of_document(), stored.prefix_tokens()),
            (Some(end), &ids(&golden["empty"])[..])
        );
        let mut prompt = Vec::new();
        stored.encode_prompt(&sentence.to_owned().into(), &mut prompt).unwrap();
        assert_eq!(prompt, text, "{family}");
    }
}

#[test]
fn conversations_have_only_the_special_tokens_of_their_template() {
    let golden = golden();
    let record = format!("{{\"messages\": {}}}\n", golden["messages"]);
    let completion = "{\"prompt\": \"one \", \"completion\": \"and two\"}\n";
    for (family, golden) in golden["families"].as_object().unwrap() {
        let Some(template) = template_of(family) else { continue };
        let end = golden["end"].as_u64().unwrap() as u32;
        let test_folder = TestFolder::new(&[("chat.jsonl", format!("{record}{completion}").as_bytes())]);
        let tokenizer = Arc::new(Tokenizer::load(&folder(family)).unwrap());
        let options = PrepareOptions {
            tokenizer: TokenizerChoice::OfModel { model: folder(family), tokenizer: Arc::clone(&tokenizer) },
            chat_template: Some(template),
            ..test_folder.options(&["chat.jsonl"])
        };
        prepare(&options, &NoProgress).unwrap();
        let [(chat, mask), (completion, completion_mask)] = &documents(&test_folder)[..] else { panic!() };
        assert_eq!(*chat, ids(&golden["chat"]), "{family}");
        assert!(mask.contains(&1), "{family}");
        // A completion has the same beginning and ending tokens as a text, and of these only the ending tokens are
        // learned.
        assert!(
            completion.starts_with(tokenizer.prefix_tokens()) && completion.last() == Some(&end),
            "{family}"
        );
        let num_beginning = tokenizer.prefix_tokens().len();
        assert!(completion_mask[..num_beginning].iter().all(|&counted| counted == 0), "{family}");
        assert_eq!(completion_mask.last(), Some(&1), "{family}");
    }
}

#[test]
fn a_conversation_without_an_ending_token_gets_the_end_of_document_token() {
    let record =
        br#"{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}"#;
    let test_folder = TestFolder::new(&[("chat.jsonl", record)]);
    let source = "{% for message in messages %}{{ message.content }} {% endfor %}";
    let template = ChatTemplate::new(source, Default::default(), Path::new("a")).unwrap();
    let tokenizer = TokenizerChoice::File(folder("deepseek/tokenizer.json"));
    let options =
        PrepareOptions { tokenizer, chat_template: Some(template), ..test_folder.options(&["chat.jsonl"]) };
    prepare(&options, &NoProgress).unwrap();
    let (tokens, mask) = &documents(&test_folder)[0];
    assert_eq!((tokens.last(), mask.last()), (Some(&1), Some(&1)));
    assert_ne!(tokens[0], 0, "the template has no token at the beginning");
}

#[test]
fn a_changed_eos_token_in_the_config_makes_the_corpus_outdated() {
    let test_folder = TestFolder::new(&[("text.txt", b"one and two")]);
    let tokenizer = test_folder.path("in/tokenizer.json");
    fs::copy(folder("gpt_oss/tokenizer.json"), &tokenizer).unwrap();
    let options =
        PrepareOptions { tokenizer: TokenizerChoice::File(tokenizer), ..test_folder.options(&["text.txt"]) };
    assert_eq!(prepare(&options, &NoProgress).unwrap().end_of_document, Some(1));
    fs::write(test_folder.path("in").join(TOKENIZER_CONFIG_FILE), r#"{"eos_token": "<|return|>"}"#).unwrap();
    assert!(!is_up_to_date(&options).unwrap());
    assert_eq!(prepare(&options, &NoProgress).unwrap().end_of_document, Some(2));
    // An end-of-document token that the tokenizer does not have is ignored.
    fs::write(test_folder.path("in").join(TOKENIZER_CONFIG_FILE), r#"{"eos_token": "<none>"}"#).unwrap();
    assert_eq!(prepare(&options, &NoProgress).unwrap().end_of_document, Some(1));
}

#[test]
fn a_template_in_a_file_has_the_special_tokens_of_the_tokenizer() {
    let test_folder =
        TestFolder::new(&[("own.jinja", b"{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")]);
    let config = fs::read(folder("llama").join(TOKENIZER_CONFIG_FILE)).unwrap();
    let template = ChatTemplate::from_file(&test_folder.path("in/own.jinja"), &config).unwrap();
    let prompt = template.prompt(&[serde_json::json!({"role": "user", "content": "one"})]).unwrap();
    assert_eq!((prompt.text.as_str(), prompt.adds_beginning), ("<s>one</s>", false));
}

#[test]
fn contexts_of_questions_begin_as_texts_do() {
    let tokenizer = Tokenizer::load(&folder("gemma")).unwrap();
    let question = |context: &str| Question {
        context: context.to_owned().into(),
        delimiter: " ".to_owned(),
        choices: vec!["two".to_owned(), "three".to_owned()],
        answer: 0,
    };
    let found = question("one and").tokens(&tokenizer).unwrap();
    assert_eq!(found[0].tokens[0], 2);
    let empty = question("").tokens(&tokenizer).unwrap();
    assert_eq!((empty[0].tokens[0], empty[0].num_context), (2, 1));
}

#[test]
fn special_tokens_that_a_user_types_are_text() {
    let typed = "one <|im_end|> and <|im_start|>two";
    let record = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{typed}\"}}, {{\"role\": \"assistant\", \"content\": \"two\"}}]}}\n"
    );
    let test_folder = TestFolder::new(&[("chat.jsonl", record.as_bytes())]);
    let tokenizer = Tokenizer::load(&folder("qwen2")).unwrap();
    let options = PrepareOptions {
        tokenizer: TokenizerChoice::File(folder("qwen2/tokenizer.json")),
        chat_template: Some(ChatTemplate::chatml()),
        ..test_folder.options(&["chat.jsonl"])
    };
    assert_eq!(prepare(&options, &NoProgress).unwrap().num_literal_names, 2);
    let num_control = |tokens: &[u32]| tokens.iter().filter(|&&token| [1, 2].contains(&token)).count();
    let (tokens, mask) = &documents(&test_folder)[0];
    assert_eq!(num_control(tokens), 4, "the template's: {tokens:?}");
    // The text is unchanged, and the answer is learned with its ending token.
    assert!(tokenizer.decode(tokens).unwrap().contains(typed));
    let learned: Vec<u32> =
        tokens.iter().zip(mask).filter(|(_, mask)| **mask == 1).map(|(token, _)| *token).collect();
    assert_eq!((tokenizer.decode(&learned).unwrap().as_str(), learned.last()), ("two", Some(&2)));
    // A prompt is encoded to the same tokens.
    let template = ChatTemplate::chatml().with_special_tokens_as_text(&tokenizer);
    let prompt = template.prompt(&[serde_json::json!({"role": "user", "content": typed})]).unwrap();
    let mut prompted = Vec::new();
    tokenizer.encode_prompt(&prompt, &mut prompted).unwrap();
    assert!(tokens.starts_with(&prompted), "{prompted:?} {tokens:?}");
    // With the option, the names in messages are encoded as special tokens.
    let control = PrepareOptions { special_tokens_in_messages: true, ..options.clone() };
    assert!(!is_up_to_date(&control).unwrap());
    assert_eq!(prepare(&control, &NoProgress).unwrap().num_literal_names, 0);
    assert_eq!(num_control(&documents(&test_folder)[0].0), 6);
}

#[test]
fn a_conversation_that_a_template_rewrites_is_a_document_for_each_answer() {
    let message = |role: &str, content: &str| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
    let turns = [
        message("user", "one"),
        message("assistant", "two"),
        message("user", "and"),
        message("assistant", "three"),
    ];
    let test_folder =
        TestFolder::new(&[("chat.jsonl", format!("{{\"messages\": [{}]}}\n", turns.join(", ")).as_bytes())]);
    let source = "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}\
        {{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}{% endfor %}\
        {{- '<|start|>assistant' if add_generation_prompt }}";
    let template = ChatTemplate::new(source, Default::default(), Path::new("a")).unwrap();
    let tokenizer = TokenizerChoice::File(folder("gpt_oss/tokenizer.json"));
    let options =
        PrepareOptions { tokenizer, chat_template: Some(template), ..test_folder.options(&["chat.jsonl"]) };
    let report = prepare(&options, &NoProgress).unwrap();
    assert_eq!((report.num_split_conversations, report.train.num_documents), (1, 2));
    let (tokens, mask) = &documents(&test_folder)[1];
    assert_eq!((tokens.iter().filter(|&&token| token == 2).count(), mask.last()), (1, Some(&1)));
}

#[test]
fn special_tokens_are_found_by_name() {
    let tokenizer = Tokenizer::load(&folder("qwen2")).unwrap();
    assert_eq!(tokenizer.special_token_id("<|im_end|>"), Some(2));
    assert_eq!(tokenizer.special_token_id("one"), None);
    assert_eq!(tokenizer.special_tokens_in("a<|im_end|>\n"), [2]);
    assert!(Tokenizer::bytes().special_tokens_in("<|im_end|>").is_empty());
}

#[test]
fn an_unknown_eos_token_is_reported() {
    let test_folder = TestFolder::new(&[("text.txt", b"one and two")]);
    for (family, end, note) in [
        ("gpt2", "<|none|>", "has \"<|none|>\" as its eos_token, which the tokenizer does not have; token "),
        ("deepseek", "<|none|>", "nothing ends documents, so a model cannot learn where to stop"),
        ("deepseek", "", "the tokenizer has no token that ends a document"),
    ] {
        let folder_path = test_folder.path("tokenizer");
        fs::create_dir_all(&folder_path).unwrap();
        fs::copy(folder(family).join("tokenizer.json"), folder_path.join("tokenizer.json")).unwrap();
        let config = if end.is_empty() { "{}".to_owned() } else { format!("{{\"eos_token\": \"{end}\"}}") };
        fs::write(folder_path.join(TOKENIZER_CONFIG_FILE), config).unwrap();
        let tokenizer = TokenizerChoice::File(folder_path.join("tokenizer.json"));
        let report =
            prepare(&PrepareOptions { tokenizer, ..test_folder.options(&["text.txt"]) }, &NoProgress)
                .unwrap();
        assert!(report.notes().iter().any(|found| found.contains(note)), "{family}: {:?}", report.notes());
    }
}

#[test]
fn suffix_tokens_are_not_repeated() {
    for family in ["deepseek", "gemma"] {
        let tokenizer = Tokenizer::load(&folder(family)).unwrap();
        let end = tokenizer.end_of_document().unwrap();
        let name = tokenizer.special_token_name(end).unwrap();
        let record = format!("{{\"prompt\": \"one \", \"completion\": \"and two{name}\"}}\n");
        let test_folder = TestFolder::new(&[("a.jsonl", record.as_bytes())]);
        let tokenizer = TokenizerChoice::File(folder(family).join("tokenizer.json"));
        prepare(&PrepareOptions { tokenizer, ..test_folder.options(&["a.jsonl"]) }, &NoProgress).unwrap();
        let (tokens, mask) = &documents(&test_folder)[0];
        assert_eq!(tokens.iter().filter(|&&token| token == end).count(), 1, "{family}: {tokens:?}");
        assert_eq!((tokens.last(), mask.last()), (Some(&end), Some(&1)), "{family}");
    }
}

#[test]
fn a_name_of_a_special_token_in_a_key_is_refused() {
    let record = br#"{"messages": [{"role": "user", "content": "one", "<|im_end|>": "x"}, {"role": "assistant", "content": "two"}]}"#;
    let test_folder = TestFolder::new(&[("chat.jsonl", record)]);
    let options = PrepareOptions {
        tokenizer: TokenizerChoice::File(folder("qwen2/tokenizer.json")),
        chat_template: Some(ChatTemplate::chatml()),
        ..test_folder.options(&["chat.jsonl"])
    };
    let error = prepare(&options, &NoProgress).unwrap_err().to_string();
    assert!(error.contains("a key within a message contains the name of a special token"), "{error}");
}
