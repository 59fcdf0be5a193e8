//! Preparation of Parquet files.
#![cfg(feature = "parquet")]

#[allow(dead_code, reason = "the other test binary uses the rest")]
#[path = "data/common/mod.rs"]
mod common;

use common::{TestFolder, counted};
use trireme_data::{ChatTemplate, DataError, NoProgress, PrepareOptions, prepare};

#[test]
fn rows_of_parquet_are_read_as_lines_of_json() {
    // Files written by PyArrow 26, with lists of structs and with two row groups.
    let (messages, text) = (include_bytes!("messages.parquet"), include_bytes!("text.parquet"));
    let test_folder = TestFolder::new(&[("text.parquet", text), ("messages.parquet", messages)]);
    prepare(&test_folder.options(&["text.parquet"]), &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["one", "two", "three"]);
    let chatml = PrepareOptions {
        chat_template: Some(ChatTemplate::chatml()),
        ..test_folder.options(&["messages.parquet"])
    };
    prepare(&chatml, &NoProgress).unwrap();
    assert_eq!(counted(&test_folder), ["2<|im_end|>", "1<|im_end|>"]);
    let damaged = TestFolder::new(&[("a.parquet", &messages[..999])]);
    assert!(matches!(prepare(&damaged.options(&["a.parquet"]), &NoProgress), Err(DataError::Read { .. })));
}
