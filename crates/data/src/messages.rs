//! Conversion of published conversation formats to messages with roles and contents.

use serde_json::{Value, json};

/// Returns the messages with strings as contents. A content that is a list of parts, such as
/// `[{"type": "text", "text": "…"}]`, is replaced by the concatenated text of its parts.
///
/// # Errors
/// If a part is not text, such as an image, or the `weight` of an assistant message is neither 0 nor 1. The error names
/// the message by its number.
pub fn with_text_contents(messages: &[Value]) -> Result<Vec<Value>, String> {
    let with_text = |(index, message): (usize, &Value)| {
        let mut message = message.clone();
        // Datasets exported from tables have null for keys that a message lacks.
        let weight =
            message.get("weight").filter(|weight| !weight.is_null() && message["role"] == "assistant");
        if let Some(weight) = weight.filter(|weight| ![Some(0.0), Some(1.0)].contains(&weight.as_f64())) {
            return Err(format!("message {} has the weight {weight}; expected 0 or 1", index + 1));
        }
        if let Some(Value::Array(parts)) = message.get("content") {
            let texts = parts.iter().map(part_text).collect::<Result<String, _>>();
            message["content"] = texts
                .map_err(|found| {
                    format!("message {} has a part {found}; only parts of type `text` are read", index + 1)
                })?
                .into();
        }
        Ok(message)
    };
    messages.iter().enumerate().map(with_text).collect()
}

/// Returns the text of a content part, or a description of a part that is not text.
fn part_text(part: &Value) -> Result<&str, String> {
    match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err("of type `text` without a `text`".to_owned()),
        (Some(other), _) => Err(format!("of type {:?}", other.chars().take(40).collect::<String>())),
        (None, _) => Err("without a `type`".to_owned()),
    }
}

/// Converts a ShareGPT record to messages with the roles that chat templates expect.
/// Fails if a message has no `value`, or its `from` is none of the known names for a human, a model or the system.
pub(crate) fn from_share_gpt(conversations: &[Value]) -> Result<Vec<Value>, String> {
    let message = |(index, turn): (usize, &Value)| {
        let refuse = |reason: String| Err(format!("message {} {reason}", index + 1));
        let role = match turn["from"].as_str() {
            Some("human" | "user") => "user",
            Some("gpt" | "chatgpt" | "assistant" | "model") => "assistant",
            Some("system") => "system",
            Some(other) => {
                let shown: String = other.chars().take(40).collect();
                return refuse(format!("is from {shown:?}; `human`, `gpt` and `system` are read"));
            }
            None => return refuse("has no `from`".to_owned()),
        };
        match turn["value"].as_str() {
            Some(text) => {
                let mut message = json!({ "role": role, "content": text });
                if let Some(weight) = turn.get("weight") {
                    message["weight"] = weight.clone();
                }
                Ok(message)
            }
            None => refuse("has no `value`".to_owned()),
        }
    };
    conversations.iter().enumerate().map(message).collect()
}

/// Converts an Alpaca record to messages: the instruction with its input, and the output as the answer.
/// Fails if the record has a `history`, or an `input` or `system` that is not a string.
pub(crate) fn from_alpaca(record: &Value, instruction: &str, output: &str) -> Result<Vec<Value>, String> {
    let optional = |name: &str| match &record[name] {
        Value::Null => Ok(""),
        Value::String(text) => Ok(text.as_str()),
        _ => Err(format!("`{name}` is not a text")),
    };
    let (input, system) = (optional("input")?, optional("system")?);
    if record["history"].as_array().is_some_and(|turns| !turns.is_empty()) {
        return Err("an Alpaca record with a `history` is not read; write its turns as `messages`".to_owned());
    }
    let separator = if input.is_empty() { "" } else { "\n\n" };
    let question = format!("{instruction}{separator}{input}");
    let system = Some(system).filter(|text| !text.is_empty()).map(|text| ("system", text));
    let turns = system.into_iter().chain([("user", question.as_str()), ("assistant", output)]);
    Ok(turns.map(|(role, content)| json!({ "role": role, "content": content })).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_content_are_joined_and_others_refused_by_name() {
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                           {"role": "assistant", "content": "c", "name": "x"}]);
        let expected =
            json!([{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c", "name": "x"}]);
        assert_eq!(json!(with_text_contents(parts.as_array().unwrap()).unwrap()), expected);
        for (part, fact) in [
            (json!({"type": "image_url", "image_url": "x"}), "message 1 has a part of type \"image_url\""),
            (json!({"type": "text"}), "of type `text` without a `text`"),
            (json!("text"), "without a `type`"),
        ] {
            let error = with_text_contents(&[json!({"role": "user", "content": [part]})]).unwrap_err();
            assert!(error.contains(fact), "{error}");
        }
    }

    #[test]
    fn weights_of_messages_are_kept_or_refused() {
        let turn = |weight: Value| json!({"from": "gpt", "value": "a", "weight": weight});
        assert_eq!(from_share_gpt(&[turn(0.into())]).unwrap()[0]["weight"], 0);
        for weight in [json!(0), json!(1.0), json!(null)] {
            with_text_contents(&from_share_gpt(&[turn(weight)]).unwrap()).unwrap();
        }
        let refused = with_text_contents(&from_share_gpt(&[turn(json!(0.5))]).unwrap()).unwrap_err();
        assert_eq!(refused, "message 1 has the weight 0.5; expected 0 or 1");
    }

    #[test]
    fn speakers_of_share_gpt_have_roles() {
        let turn = |from: &str| json!({"from": from, "value": "a"});
        let messages = from_share_gpt(&[turn("system"), turn("human"), turn("gpt")]).unwrap();
        let roles: Vec<_> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        let refused = |turn: Value| from_share_gpt(&[turn]).unwrap_err();
        assert!(refused(turn("function_call")).contains("message 1 is from \"function_call\""));
        assert!(refused(json!({"from": "gpt"})).contains("has no `value`"));
        assert!(refused(json!({"value": "a"})).contains("has no `from`"));
    }

    #[test]
    fn an_instruction_goes_before_its_input() {
        let messages = |record: Value| from_alpaca(&record, "Add.", "2").map(|messages| json!(messages));
        let turns = |question: &str| json!([{"role": "user", "content": question}, {"role": "assistant", "content": "2"}]);
        assert_eq!(messages(json!({"input": "1 and 1"})).unwrap(), turns("Add.\n\n1 and 1"));
        assert_eq!(messages(json!({"input": "", "history": []})).unwrap(), turns("Add."));
        let with_system = messages(json!({"system": "Be short."})).unwrap();
        assert_eq!(with_system[0], json!({"role": "system", "content": "Be short."}));
        assert!(messages(json!({"history": [["a", "b"]]})).unwrap_err().contains("`history`"));
        assert!(messages(json!({"input": 3})).unwrap_err().contains("`input` is not a text"));
    }
}
