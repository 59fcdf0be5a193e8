//! Texts in several forms: conversations, several sources, and a pipe.

use crate::common::{Fixture, assert_contains};
use crate::layouts::LOSS_TOLERANCE;
use std::io::Write;
use std::process::Stdio;

fn conversations(count: usize) -> String {
    let numbers = ["one", "two", "three", "four", "five", "six", "seven"];
    let line = |index: usize| {
        let (a, b) = (numbers[index % 7], numbers[index / 7 % 7]);
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"after {a}, {b}\"}}, \
             {{\"role\": \"assistant\", \"content\": \"{b} {a}\"}}]}}\n"
        )
    };
    (0..count).map(line).collect()
}

/// Creates a fixture with conversations in `chat.jsonl`, and a config for them.
fn with_chat() -> Fixture {
    let fixture = Fixture::new();
    fixture.write("chat.jsonl", conversations(150));
    let config = fixture.read("tiny.toml");
    let data = "inputs = [\"chat.jsonl\"]\nchat_template = \"chatml\"\nvalidation_fraction = 0.2";
    let config = config.replace("inputs = [\"text.txt\"]", data).replace("seq_len = 16", "seq_len = 128");
    fixture.write("chat.toml", config);
    fixture
}

#[test]
fn answers_are_learned_alike_on_every_layout() {
    let fixture = with_chat();
    let run = |name: &str, layout: &str| {
        fixture.run(&format!("train chat.toml {layout} --set run.name={name}")).succeeded();
        fixture.losses(name)
    };
    let single = "--set training.local_batch_size=1 --set training.global_batch_size=8";
    let (alone, singles) = (run("alone", "--workers 1"), run("singles", &format!("--workers 1 {single}")));
    assert_eq!(alone.len(), 4);
    for (name, layout, expected) in [
        ("data", "--workers 2", &alone),
        ("sharded", "--workers 2 --set parallelism.zero_stage=3", &alone),
        ("four", &format!("--workers 4 {single}"), &singles),
    ] {
        assert_eq!(run(name, layout), *expected, "{layout}");
    }
    // Layouts that split sums.
    for degree in ["tensor", "pipeline", "context"] {
        let found = run(degree, &format!("--workers 2 --set parallelism.{degree}_parallel_degree=2"));
        for ((_, expected), (_, found)) in alone.iter().zip(&found) {
            let [expected, found] = [expected, found].map(|bits| f64::from_bits(*bits));
            assert!((found / expected - 1.0).abs() < LOSS_TOLERANCE, "{degree}: {found} for {expected}");
        }
    }
    // A corpus of plain text has no loss mask.
    let all =
        "train chat.toml --set data.inputs=[\"text.txt\"] --set run.name=all --set data.packing=documents";
    fixture.run(all).succeeded();
    assert!(!fixture.path("runs/all/data/train.mask.tokens").exists());
    assert!(fixture.path("runs/alone/data/train.mask.tokens").exists());
    assert_contains(&fixture.run("generate runs/alone --num-tokens 3 --prompt a").succeeded(), &["a"]);
    let chat = "generate runs/alone --chat --num-tokens 2 --temperature 0 --json";
    fixture.write("messages.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n");
    let asked = fixture.run(&format!("{chat} --prompt a")).succeeded();
    assert_contains(&asked, &["<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\n"]);
    assert_eq!(fixture.run(&format!("{chat} --prompt-file messages.jsonl")).succeeded(), asked);
    let system = fixture.run(&format!("{chat} --prompt a --system Short.")).succeeded();
    assert_contains(&system, &["<|im_start|>system\\nShort.<|im_end|>"]);
    assert_contains(
        &fixture.run("generate runs/alone --chat").refused(),
        &["--chat needs something to answer"],
    );
    // Questions as conversations, and as texts.
    let asked = "\"messages\": [{\"role\": \"user\", \"content\": \"after one, two\"}]";
    fixture
        .write("asked.jsonl", format!("{{{asked}, \"choices\": [\"two one\", \"six\"], \"answer\": 0}}\n"));
    let prompt = "<|im_start|>user\\nafter one, two<|im_end|>\\n<|im_start|>assistant\\n";
    let plain = "\"delimiter\": \"\", \"choices\": [\"two one\", \"six\"], \"answer\": 0";
    fixture.write("plain.jsonl", format!("{{\"context\": \"{prompt}\", {plain}}}\n"));
    let [of_messages, of_text] = ["asked", "plain"]
        .map(|file| fixture.run(&format!("eval runs/alone {file}.jsonl --json")).succeeded());
    assert_eq!(of_messages, of_text);
    let refused = fixture.run("eval runs/alone asked.jsonl text.txt").refused();
    assert_contains(&refused, &["asked.jsonl has questions, which are evaluated alone"]);
    // The chat template is stored with the model.
    assert!(fixture.names("runs/alone/checkpoints/step-4").contains(&"chat_template.jinja".to_owned()));
}

#[test]
fn conversations_need_a_template() {
    let fixture = with_chat();
    let refused = fixture.refused_without_changes("train chat.toml --set data.chat_template=");
    assert_contains(&refused, &["chat.jsonl, line 1 is a conversation", "chatml", "[data] chat_template"]);
    fixture.write("broken.jinja", "{% if %}");
    assert_contains(
        &fixture.refused_without_changes("prepare chat.jsonl --chat-template broken.jinja --out c"),
        &["broken.jinja"],
    );
    fixture.write("wordless.jsonl", "{\"messages\": [{\"role\": \"user\", \"text\": \"a\"}]}\n");
    let refused = fixture.refused_without_changes("prepare wordless.jsonl --chat-template chatml --out c");
    assert_contains(&refused, &["wordless.jsonl, line 1", "message 1 has no `content`"]);
    let short = fixture.run("train chat.toml --set training.seq_len=32 --set run.name=short");
    assert_eq!(short.code, Some(0), "{short:?}");
    assert_contains(&short.stderr, &["documents are longer than [training] seq_len = 32 and are cut"]);
    fixture.write("strict.jinja", "{{ raise_exception('only one turn') }}");
    let refused = fixture.refused_without_changes("prepare chat.jsonl --chat-template strict.jinja --out c");
    assert_contains(&refused, &["chat.jsonl, line 1", "only one turn"]);
    fixture.write("deep.jinja", format!("{{{{ {}1 }}}}", "-".repeat(900_000)));
    let refused = fixture.refused_without_changes("prepare chat.jsonl --chat-template deep.jinja --out c");
    assert_contains(&refused, &["the chat template of deep.jinja", "nest too deeply"]);
}

#[test]
fn few_answers_are_enough_to_validate() {
    let fixture = Fixture::new();
    let record = "{\"prompt\": \"one \", \"completion\": \"two\"}\n";
    fixture.write("a.jsonl", record.repeat(200));
    fixture.write("held-out.jsonl", record);
    fixture
        .run(
            "train tiny.toml --set data.inputs=[\"a.jsonl\"] --set data.validation_inputs=[\"held-out.jsonl\"] \
             --set data.folder=few",
        )
        .succeeded();
    assert!(fixture.records("tiny").last().unwrap()["validation_loss"].is_number());
}

#[test]
fn a_special_token_ends_an_answer_and_is_a_stop() {
    let fixture = with_chat();
    let answer = "{\"messages\": [{\"role\": \"user\", \"content\": \"one\"}, {\"role\": \"assistant\", \"content\": \"two\"}]}\n";
    fixture.write("chat.jsonl", answer.repeat(60));
    // There is no `tokenizer_config.json`, which would declare the token as the end of a document.
    fixture.write("tokenizer.json", include_bytes!("../../../data/tests/tokenizers/qwen2/tokenizer.json"));
    let config = fixture.read("chat.toml").replace("[data]\n", "[data]\ntokenizer = \"tokenizer.json\"\n");
    fixture.write("chat.toml", config);
    fixture.run("train chat.toml --workers 1 --set training.steps=60 --set optimizer.lr=0.03").succeeded();
    let ask = "generate runs/chat --chat --prompt one --temperature 0 --num-tokens 20 --json";
    let found = |arguments: &str| -> serde_json::Value {
        serde_json::from_str(&fixture.run(&format!("{ask} {arguments}")).succeeded()).unwrap()
    };
    let ended = found("");
    assert_eq!((&ended["text"], &ended["ended"]), (&"two".into(), &"end".into()));
    let stopped = found("--ignore-end --stop <|im_end|>");
    assert_eq!((&stopped["text"], &stopped["ended"]), (&"two".into(), &"stop".into()));
    assert_eq!(found("--ignore-end")["ended"], "num_tokens");
}

#[test]
fn sources_are_mixed_by_their_weights() {
    let fixture = with_chat();
    let printed = fixture
        .run("prepare text.txt chat.jsonl --weights 1,3 --chat-template chatml --out mixed")
        .succeeded();
    assert_contains(
        &printed,
        &["loss on answers only", "weight 1 for ", "tokens of text.txt", "weight 3 for ", "of chat.jsonl"],
    );
    let train = "train chat.toml --set data.inputs=[] --set data.folder=mixed --set data.chat_template=";
    fixture.run(&format!("{train} --set run.name=prepared")).succeeded();
    let here = "train chat.toml --set data.inputs=[\"text.txt\",\"chat.jsonl\"] --set data.weights=[1,3] --set data.validation_fraction=0.05";
    fixture.run(&format!("{here} --set run.name=here")).succeeded();
    assert_eq!(fixture.losses("here"), fixture.losses("prepared"));
    let refused = fixture.refused_without_changes("train chat.toml --set data.weights=[1,3]");
    assert_contains(&refused, &["2 weights for 1 inputs; expected a number from 1e-6 to 1e6 for each"]);
    assert_contains(
        &fixture.refused_without_changes("prepare text.txt --weights 1,2 --out c"),
        &["2 weights for 1 inputs"],
    );
    let refused = fixture.refused_without_changes("train chat.toml --set data.inputs=[\"-\"]");
    assert_contains(&refused, &["only `trireme prepare` reads the standard input", "set `folder`"]);
    fixture.write("empty.jsonl", "{\"text\": \"\"}\n");
    let refused = fixture.refused_without_changes("prepare text.txt empty.jsonl --weights 1,1 --out c");
    assert_contains(&refused, &["empty.jsonl"]);
    let refused = fixture.refused_without_changes("prepare text.txt --validation - --out c");
    assert_contains(&refused, &["cannot come from the standard input"]);
}

#[test]
fn a_run_resumes_with_the_corpus_of_its_own_among_similar_ones() {
    let fixture = Fixture::new();
    let records = |prompt: &str, completion: &str| {
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n").repeat(200)
    };
    fixture.write("a.jsonl", records("one two ", "three four"));
    fixture.write("b.jsonl", records("one two three ", "four"));
    let train = |name: &str, more: &str| {
        let train = format!("train tiny.toml --set run.name={name} --set data.folder=shared {more}");
        let outcome = fixture.run(&train);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        outcome.stdout + &outcome.stderr
    };
    let a = "--set data.inputs=[\"a.jsonl\"] --set data.validation_fraction=0";
    let b = "--set data.inputs=[\"b.jsonl\"] --set data.validation_fraction=0";
    let weighted = "--set data.inputs=[\"a.jsonl\",\"b.jsonl\"] --set data.validation_fraction=0";
    let validated = "--set data.inputs=[\"a.jsonl\"] --set data.validation_inputs=[\"b.jsonl\"]";
    let runs = [
        ("a", a.to_owned()),
        ("b", b.to_owned()),
        ("w", format!("{weighted} --set data.weights=[1,3]")),
        ("v", format!("{weighted} --set data.weights=[1,1]")),
        ("validated", validated.to_owned()),
    ];
    for (name, data) in &runs {
        train(name, data);
    }
    let tokens = |folder: &str| std::fs::read(fixture.path(&format!("{folder}/train.tokens"))).unwrap();
    assert!(tokens("shared") == tokens("shared-2"));
    for (name, data) in &runs {
        let printed = train(name, &format!("{data} --set training.steps=6"));
        assert_contains(&printed, &["resuming after step 4 of 6"]);
        assert!(!printed.contains("corpus that it began with"), "{name}: {printed}");
    }
    assert!(fixture.records("validated").last().unwrap()["validation_loss"].is_number());
    // After its inputs have changed, a run does not take the corpus of another run.
    fixture.write("b.jsonl", records("other", "text"));
    assert_contains(&train("b", &format!("{b} --set training.steps=8")), &["corpus that it began with"]);
    // Other file names are another choice of data.
    fixture.write("c.jsonl", records("other", "text"));
    let other = b.replace("b.jsonl", "c.jsonl");
    let refused = fixture
        .run(&format!(
            "train tiny.toml --set run.name=b --set data.folder=shared {other} --set training.steps=9"
        ))
        .refused();
    assert_contains(&refused, &["was written with corpus", "--resume never"]);
    let config = fixture.read("runs/b/config.toml");
    assert!(config.contains("shared-2"), "{config}");
}

#[test]
fn a_text_may_come_from_a_pipe_and_be_validated_on_another() {
    let fixture = Fixture::new();
    fixture.write("held.txt", "one two three ".repeat(40));
    let mut command = fixture.command("prepare - --validation held.txt --out piped");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(fixture.read("text.txt").as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    fixture.run("prepare text.txt --validation held.txt --out file").succeeded();
    for name in ["train.tokens", "validation.tokens"] {
        let read = |folder: &str| std::fs::read(fixture.path(folder).join(name)).unwrap();
        assert!(read("piped") == read("file"), "{name}");
    }
    let own = "train tiny.toml --set data.validation_inputs=[\"held.txt\"]";
    fixture.run(own).succeeded();
    let refused = fixture.refused_without_changes(&format!("{own} --set data.validation_fraction=0.1"));
    assert_contains(&refused, &["`validation_inputs` already says what to validate on"]);
    let refused = fixture.run("prepare text.txt --validation held.txt --validation-fraction 0.1 --out c");
    assert_eq!(refused.code, Some(2));
}

#[test]
fn a_corpus_that_a_run_has_used_is_not_replaced_unasked() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.write("text.txt", "another text altogether\n".repeat(900));
    let refused = fixture.refused_without_changes("prepare text.txt --out corpus");
    assert_contains(&refused, &["corpus was used by the run in ", "runs/tiny", "--force"]);
    fixture.run("prepare text.txt --out corpus --force").succeeded();
    // A run without checkpoints cannot be resumed.
    std::fs::remove_dir_all(fixture.path("runs")).unwrap();
    fixture.write("text.txt", "and another\n".repeat(900));
    fixture.run("prepare text.txt --out corpus").succeeded();
}
