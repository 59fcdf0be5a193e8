//! Texts in several forms: conversations, several sources, and a pipe.

use crate::common::{Scene, tells};
use crate::ladder::LOSS_TOLERANCE;
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

/// Creates a scene with conversations in `chat.jsonl`, and a config for them.
fn with_chat() -> Scene {
    let scene = Scene::new();
    scene.write("chat.jsonl", conversations(150));
    let config = scene.read("tiny.toml");
    let data = "inputs = [\"chat.jsonl\"]\nchat_template = \"chatml\"\nvalidation_fraction = 0.2";
    let config = config.replace("inputs = [\"text.txt\"]", data).replace("seq_len = 16", "seq_len = 128");
    scene.write("chat.toml", config);
    scene
}

#[test]
fn answers_are_learned_alike_on_every_layout() {
    let scene = with_chat();
    let run = |name: &str, layout: &str| {
        scene.run(&format!("train chat.toml {layout} --set run.name={name}")).succeeded();
        scene.losses(name)
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
    // Training on all of the text is another task.
    let all =
        "train chat.toml --set data.inputs=[\"text.txt\"] --set run.name=all --set data.packing=documents";
    scene.run(all).succeeded();
    assert!(!scene.path("runs/all/data/train.mask.tokens").exists());
    assert!(scene.path("runs/alone/data/train.mask.tokens").exists());
    tells(&scene.run("generate runs/alone --num-tokens 3 --prompt a").succeeded(), &["a"]);
    let chat = "generate runs/alone --chat --num-tokens 2 --temperature 0 --json";
    scene.write("messages.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n");
    let asked = scene.run(&format!("{chat} --prompt a")).succeeded();
    tells(&asked, &["<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\n"]);
    assert_eq!(scene.run(&format!("{chat} --prompt-file messages.jsonl")).succeeded(), asked);
    let system = scene.run(&format!("{chat} --prompt a --system Short.")).succeeded();
    tells(&system, &["<|im_start|>system\\nShort.<|im_end|>"]);
    tells(&scene.run("generate runs/alone --chat").refused(), &["--chat needs something to answer"]);
    // Questions as conversations, and as texts.
    let asked = "\"messages\": [{\"role\": \"user\", \"content\": \"after one, two\"}]";
    scene.write("asked.jsonl", format!("{{{asked}, \"choices\": [\"two one\", \"six\"], \"answer\": 0}}\n"));
    let prompt = "<|im_start|>user\\nafter one, two<|im_end|>\\n<|im_start|>assistant\\n";
    let plain = "\"delimiter\": \"\", \"choices\": [\"two one\", \"six\"], \"answer\": 0";
    scene.write("plain.jsonl", format!("{{\"context\": \"{prompt}\", {plain}}}\n"));
    let [of_messages, of_text] =
        ["asked", "plain"].map(|file| scene.run(&format!("eval runs/alone {file}.jsonl --json")).succeeded());
    assert_eq!(of_messages, of_text);
    let refused = scene.run("eval runs/alone asked.jsonl text.txt").refused();
    tells(&refused, &["asked.jsonl has questions, which are evaluated alone"]);
    // The chat template is stored with the model.
    assert!(scene.names("runs/alone/checkpoints/step-4").contains(&"chat_template.jinja".to_owned()));
}

#[test]
fn conversations_need_a_template() {
    let scene = with_chat();
    let refused = scene.refused_without_trace("train chat.toml --set data.chat_template=");
    tells(&refused, &["chat.jsonl, line 1 is a conversation", "chatml", "[data] chat_template"]);
    scene.write("broken.jinja", "{% if %}");
    tells(
        &scene.refused_without_trace("prepare chat.jsonl --chat-template broken.jinja --out c"),
        &["broken.jinja"],
    );
    scene.write("wordless.jsonl", "{\"messages\": [{\"role\": \"user\", \"text\": \"a\"}]}\n");
    let refused = scene.refused_without_trace("prepare wordless.jsonl --chat-template chatml --out c");
    tells(&refused, &["wordless.jsonl, line 1", "message 1 has no `content`"]);
    let short = scene.run("train chat.toml --set training.seq_len=32 --set run.name=short");
    assert_eq!(short.code, Some(0), "{short:?}");
    tells(&short.stderr, &["documents are longer than [training] seq_len = 32 and are cut"]);
    scene.write("strict.jinja", "{{ raise_exception('only one turn') }}");
    let refused = scene.refused_without_trace("prepare chat.jsonl --chat-template strict.jinja --out c");
    tells(&refused, &["chat.jsonl, line 1", "only one turn"]);
    scene.write("deep.jinja", format!("{{{{ {}1 }}}}", "-".repeat(900_000)));
    let refused = scene.refused_without_trace("prepare chat.jsonl --chat-template deep.jinja --out c");
    tells(&refused, &["the chat template of deep.jinja", "nest too deeply"]);
}

#[test]
fn few_answers_are_enough_to_validate() {
    let scene = Scene::new();
    let record = "{\"prompt\": \"one \", \"completion\": \"two\"}\n";
    scene.write("a.jsonl", record.repeat(200));
    scene.write("held-out.jsonl", record);
    scene
        .run(
            "train tiny.toml --set data.inputs=[\"a.jsonl\"] --set data.validation_inputs=[\"held-out.jsonl\"] \
             --set data.folder=few",
        )
        .succeeded();
    assert!(scene.records("tiny").last().unwrap()["validation_loss"].is_number());
}

#[test]
fn a_special_token_ends_an_answer_and_is_a_stop() {
    let scene = with_chat();
    let answer = "{\"messages\": [{\"role\": \"user\", \"content\": \"one\"}, {\"role\": \"assistant\", \"content\": \"two\"}]}\n";
    scene.write("chat.jsonl", answer.repeat(60));
    // Without the file that would declare the token as the end of a document.
    scene.write("tokenizer.json", include_bytes!("../../../data/tests/tokenizers/qwen2/tokenizer.json"));
    let config = scene.read("chat.toml").replace("[data]\n", "[data]\ntokenizer = \"tokenizer.json\"\n");
    scene.write("chat.toml", config);
    scene.run("train chat.toml --workers 1 --set training.steps=60 --set optimizer.lr=0.03").succeeded();
    let ask = "generate runs/chat --chat --prompt one --temperature 0 --num-tokens 20 --json";
    let found = |arguments: &str| -> serde_json::Value {
        serde_json::from_str(&scene.run(&format!("{ask} {arguments}")).succeeded()).unwrap()
    };
    let ended = found("");
    assert_eq!((&ended["text"], &ended["ended"]), (&"two".into(), &"end".into()));
    let stopped = found("--ignore-end --stop <|im_end|>");
    assert_eq!((&stopped["text"], &stopped["ended"]), (&"two".into(), &"stop".into()));
    assert_eq!(found("--ignore-end")["ended"], "num_tokens");
}

#[test]
fn sources_are_mixed_by_their_weights() {
    let scene = with_chat();
    let printed =
        scene.run("prepare text.txt chat.jsonl --weights 1,3 --chat-template chatml --out mixed").succeeded();
    tells(
        &printed,
        &["loss on answers only", "weight 1 for ", "tokens of text.txt", "weight 3 for ", "of chat.jsonl"],
    );
    let train = "train chat.toml --set data.inputs=[] --set data.folder=mixed --set data.chat_template=";
    scene.run(&format!("{train} --set run.name=prepared")).succeeded();
    let here = "train chat.toml --set data.inputs=[\"text.txt\",\"chat.jsonl\"] --set data.weights=[1,3] --set data.validation_fraction=0.05";
    scene.run(&format!("{here} --set run.name=here")).succeeded();
    assert_eq!(scene.losses("here"), scene.losses("prepared"));
    let refused = scene.refused_without_trace("train chat.toml --set data.weights=[1,3]");
    tells(&refused, &["2 weights for 1 inputs; expected a number from 1e-6 to 1e6 for each"]);
    tells(
        &scene.refused_without_trace("prepare text.txt --weights 1,2 --out c"),
        &["2 weights for 1 inputs"],
    );
    let refused = scene.refused_without_trace("train chat.toml --set data.inputs=[\"-\"]");
    tells(&refused, &["only `trireme prepare` reads the standard input", "set `folder`"]);
    scene.write("empty.jsonl", "{\"text\": \"\"}\n");
    let refused = scene.refused_without_trace("prepare text.txt empty.jsonl --weights 1,1 --out c");
    tells(&refused, &["empty.jsonl"]);
    let refused = scene.refused_without_trace("prepare text.txt --validation - --out c");
    tells(&refused, &["cannot come from the standard input"]);
}

#[test]
fn a_run_resumes_with_the_corpus_of_its_own_among_similar_ones() {
    let scene = Scene::new();
    let records = |prompt: &str, completion: &str| {
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n").repeat(200)
    };
    scene.write("a.jsonl", records("one two ", "three four"));
    scene.write("b.jsonl", records("one two three ", "four"));
    let train = |name: &str, more: &str| {
        let train = format!("train tiny.toml --set run.name={name} --set data.folder=shared {more}");
        let outcome = scene.run(&train);
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
    let tokens = |folder: &str| std::fs::read(scene.path(&format!("{folder}/train.tokens"))).unwrap();
    assert!(tokens("shared") == tokens("shared-2"));
    for (name, data) in &runs {
        let printed = train(name, &format!("{data} --set training.steps=6"));
        tells(&printed, &["resuming after step 4 of 6"]);
        assert!(!printed.contains("corpus that it began with"), "{name}: {printed}");
    }
    assert!(scene.records("validated").last().unwrap()["validation_loss"].is_number());
    // After its inputs have changed, a run does not take the corpus of another run.
    scene.write("b.jsonl", records("other", "text"));
    tells(&train("b", &format!("{b} --set training.steps=8")), &["corpus that it began with"]);
    // Other file names are another choice of data.
    scene.write("c.jsonl", records("other", "text"));
    let other = b.replace("b.jsonl", "c.jsonl");
    let refused = scene
        .run(&format!(
            "train tiny.toml --set run.name=b --set data.folder=shared {other} --set training.steps=9"
        ))
        .refused();
    tells(&refused, &["was written with corpus", "--resume never"]);
    let config = scene.read("runs/b/config.toml");
    assert!(config.contains("shared-2"), "{config}");
}

#[test]
fn a_text_may_come_from_a_pipe_and_be_validated_on_another() {
    let scene = Scene::new();
    scene.write("held.txt", "one two three ".repeat(40));
    let mut command = scene.command("prepare - --validation held.txt --out piped");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(scene.read("text.txt").as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    scene.run("prepare text.txt --validation held.txt --out file").succeeded();
    for name in ["train.tokens", "validation.tokens"] {
        let read = |folder: &str| std::fs::read(scene.path(folder).join(name)).unwrap();
        assert!(read("piped") == read("file"), "{name}");
    }
    let own = "train tiny.toml --set data.validation_inputs=[\"held.txt\"]";
    scene.run(own).succeeded();
    let refused = scene.refused_without_trace(&format!("{own} --set data.validation_fraction=0.1"));
    tells(&refused, &["`validation_inputs` already says what to validate on"]);
    let refused = scene.run("prepare text.txt --validation held.txt --validation-fraction 0.1 --out c");
    assert_eq!(refused.code, Some(2));
}

#[test]
fn a_corpus_that_a_run_has_used_is_not_replaced_unasked() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml").succeeded();
    scene.write("text.txt", "another text altogether\n".repeat(900));
    let refused = scene.refused_without_trace("prepare text.txt --out corpus");
    tells(&refused, &["corpus was used by the run in ", "runs/tiny", "--force"]);
    scene.run("prepare text.txt --out corpus --force").succeeded();
    // A run without checkpoints cannot be resumed.
    std::fs::remove_dir_all(scene.path("runs")).unwrap();
    scene.write("text.txt", "and another\n".repeat(900));
    scene.run("prepare text.txt --out corpus").succeeded();
}
