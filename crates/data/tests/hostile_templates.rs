//! Chat templates that would exhaust the memory, the stack or the processor time of the process that runs them.

use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use trireme_data::{CHAT_TEMPLATE_BYTES_MAX, ChatTemplate, isolate_chat_templates, serve_chat_template};

const MEMORY_BYTES: u64 = 256 << 20;

/// Runs in the child process that renders a template. `template` sets the arguments with which this test program is started as a child.
/// They select this function.
#[test]
#[ignore = "only the other tests start it"]
fn serve() {
    // Filling the full limit would be slow. A limit that is already lower does not change.
    let bytes = Some(MEMORY_BYTES);
    setrlimit(Resource::As, Rlimit { current: bytes, maximum: bytes }).unwrap();
    serve_chat_template().unwrap();
}

fn template(source: &str) -> Result<ChatTemplate, String> {
    isolate_chat_templates(&["--exact", "serve", "--ignored", "--nocapture"]);
    ChatTemplate::new(source, BTreeMap::new(), Path::new("some/model")).map_err(|error| {
        let reason = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        format!("{error}: {reason}")
    })
}

fn messages() -> Vec<Value> {
    vec![json!({ "role": "user", "content": "1+1?" }), json!({ "role": "assistant", "content": "2" })]
}

/// Returns the error of compiling the template or of rendering a conversation with it.
fn error_of(source: &str) -> String {
    let rendered = template(source).and_then(|template| template.samples(&messages(), 0));
    rendered.expect_err("it is refused")
}

/// Returns assignments that nest lists. Each list contains the previous one twice, so the last one has 2^40 elements.
fn nested_lists() -> String {
    let step = "{% set ns.a = [ns.a, ns.a] %}";
    format!("{{% set ns = namespace(a=[1]) %}}{}", step.repeat(40))
}

#[test]
fn memory_is_limited() {
    let doubling = |operation: &str| {
        format!(
            "{{% set ns = namespace(a='ab') %}}{{% for i in range(60) %}}{{% set ns.a = {operation} %}}{{% endfor %}}"
        )
    };
    let check = |attack: &str| {
        let error = error_of(attack);
        let limits = ["1.00GiB of memory", "s of processor time"];
        assert!(limits.iter().any(|limit| error.contains(limit)), "{attack}: {error}");
        assert!(error.contains("chat template of some/model"), "{attack}: {error}");
    };
    let attacks = [
        "{{ [1] | batch(10**12) | list }}".to_owned(),
        "{{ [1] | batch(10**18) | list }}".to_owned(),
        "{{ 'a\nb' | indent(10**10) }}".to_owned(),
        doubling("ns.a ~ ns.a"),
        doubling("ns.a.replace('a', ns.a)"),
        nested_lists() + "{{ ns.a | tojson }}",
    ];
    std::thread::scope(|scope| {
        for attack in &attacks {
            scope.spawn(move || check(attack));
        }
    });
}

#[test]
fn the_stack_is_limited() {
    let attacks = [
        format!("{{{{ {}1 }}}}", "-".repeat(900_000)),
        format!("{{{{ messages{} }}}}", ".a".repeat(400_000)),
        format!("{{{{ 'a'{} }}}}", "|upper".repeat(140_000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(200_000)),
    ];
    for attack in attacks {
        let error = error_of(&attack);
        assert!(error.contains("chat template of some/model"), "{error}");
        assert!(error.contains("nest too deeply for a stack of 16"), "{error}");
    }
}

#[test]
fn processor_time_is_limited_and_the_next_conversation_is_rendered() {
    // Only a conversation with the content `compare` takes long.
    let source = nested_lists()
        + "{% set first = ns.a %}"
        + &nested_lists()
        + "{% if messages[0].content == 'compare' %}{{ first == ns.a }}{% endif %}{{ messages[1].content }}";
    let template = template(&source).unwrap();
    let mut slow = messages();
    slow[0]["content"] = "compare".into();
    let error = template.prompt(&slow).unwrap_err();
    assert_eq!(error, "the chat template of some/model: it takes more than 3 s of processor time");
    assert_eq!(template.prompt(&messages()).unwrap().text, "2");
}

#[test]
fn the_length_of_a_template_is_limited() {
    let error = error_of(&" ".repeat(CHAT_TEMPLATE_BYTES_MAX + 1));
    assert!(error.contains("it has 1048577 bytes, more than 1048576"), "{error}");
}

#[test]
fn templates_render_the_same_in_a_child_process() {
    let source = "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\
        {% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}";
    let template = template(source).unwrap();
    let answered = &template.samples(&messages(), 0).unwrap().documents[0];
    let answer = 4..5;
    assert_eq!((answered.text.as_str(), answered.answers.clone()), ("1+1?2", vec![answer]));
    let refused = error_of("{{ raise_exception('roles must alternate') }}");
    assert_eq!(refused, "roles must alternate");
    assert!(error_of("{% if %}").starts_with("the chat template of some/model: syntax error"));
}
