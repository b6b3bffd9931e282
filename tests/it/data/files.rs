//! Files as users have them (Automodel#2376, pydantic-ai#7159): each is read whole, refused by name, or loses counted rows.

use super::world::{World, chat, gzip, jsonl};
use draftmill::data::PrepareError;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};

/// Outcome of a file.
enum Outcome {
    /// Number of rows, each of which gives a sample.
    Read(u64),
    /// Samples, and rows by reason.
    Loses(u64, &'static [(&'static str, u64)]),
    /// Words of the sentence: the format and its remedy.
    Refused(&'static [&'static str]),
}
use Outcome::{Loses, Read, Refused};

#[rustfmt::skip]
const FILES: [(&str, Outcome); 107] = [
    ("ok", Read(3)),
    ("list_of_lists_array", Loses(0, &[("not_an_object", 3)])),
    ("list_of_lists_jsonl", Loses(0, &[("no_conversation", 6)])),
    ("array_of_turns", Loses(0, &[("no_conversation", 2)])),
    ("parquet", Refused(&["Parquet", "convert it to JSONL"])),
    ("arrow", Refused(&["Arrow", "convert it to JSONL"])),
    ("zst", Refused(&["zstd", "zstd -d"])),
    ("zip", Refused(&["zip archive", "unpack"])),
    ("tgz", Refused(&["tar archive", "unpack"])),
    ("bz2", Refused(&["bzip2", "bzip2 -d"])),
    ("xz", Refused(&["xz", "xz -d"])),
    ("gz", Read(3)),
    ("gz_garbage", Refused(&["after its gzip data", "byte 123", "fetch"])),
    ("gz_garbage_nl", Read(3)),
    ("gz_gz", Refused(&["gzip data inside gzip data", "gzip -d"])),
    ("gz_trunc", Refused(&["cut", "gzip", "byte 993", "data.allow_truncated"])),
    ("gz_header_only", Refused(&["cut", "gzip", "byte 10", "data.allow_truncated"])),
    ("gz_crc", Refused(&["checksum", "fetch the file again"])),
    ("gz_empty", Refused(&["has no rows"])),
    ("utf16", Refused(&["UTF-16", "iconv"])),
    ("utf16le", Refused(&["UTF-16", "iconv"])),
    ("latin1", Loses(0, &[("invalid_utf8", 3)])),
    ("bom", Read(3)),
    ("bom_mid", Read(3)),
    ("bom_array", Read(3)),
    ("crlf", Read(3)),
    ("cr_only", Loses(0, &[("invalid_json", 1)])),
    ("wrapper_data", Loses(0, &[("no_conversation", 1)])),
    ("wrapper_pretty", Refused(&["several lines", "jq -c '.data[]'"])),
    ("pretty_objects", Refused(&["several lines", "jq -c ."])),
    ("array_pretty", Read(3)),
    ("array_trailing_comma", Read(3)),
    ("array_one", Read(1)),
    ("array_empty", Refused(&["has no rows"])),
    ("arrays_two", Read(3)),
    ("arrays_glued", Read(3)),
    ("array_then_jsonl", Read(3)),
    ("jsonl_then_array", Loses(1, &[("not_an_object", 1)])),
    ("array_nested_one", Loses(0, &[("not_an_object", 1)])),
    ("array_missing_comma", Read(3)),
    ("array_no_end", Refused(&["cut", "`]`", "line 1", "data.allow_truncated"])),
    ("jsonl_trailing_commas", Loses(0, &[("trailing_comma", 3)])),
    ("jsonl_glued", Loses(0, &[("invalid_json", 1)])),
    ("jsonl_spaces", Loses(0, &[("invalid_json", 1)])),
    ("comments", Loses(3, &[("invalid_json", 2)])),
    ("blank_lines", Read(3)),
    ("nul_raw", Loses(2, &[("invalid_json", 1)])),
    ("dup_keys", Read(1)),
    ("dup_keys_turn", Read(1)),
    ("nan", Loses(0, &[("nan_or_infinity", 3)])),
    ("inf", Loses(0, &[("nan_or_infinity", 3)])),
    ("bignum", Loses(0, &[("invalid_json", 3)])),
    ("surrogate_pair", Read(1)),
    ("surrogate_lone", Loses(0, &[("invalid_json", 1)])),
    ("surrogate_lone_low", Loses(0, &[("invalid_json", 1)])),
    ("ctrl_in_string", Loses(0, &[("invalid_json", 1)])),
    ("null_messages", Read(3)),
    ("null_conversations", Read(3)),
    ("empty_messages", Read(3)),
    ("null_input_ids", Read(3)),
    ("empty_input_ids", Read(3)),
    ("unified_turns", Read(3)),
    ("unified_turns2", Read(3)),
    ("role_value", Read(3)),
    ("from_content", Read(3)),
    ("role_text", Loses(0, &[("null_content", 3)])),
    ("conversation_sing", Loses(0, &[("no_conversation", 3)])),
    ("dialog", Loses(0, &[("no_conversation", 3)])),
    ("conv_string", Read(3)),
    ("conv_pyrepr", Loses(0, &[("no_conversation", 3)])),
    ("dict_of_lists", Loses(0, &[("no_conversation", 3)])),
    ("pandas_columns", Loses(0, &[("no_conversation", 1)])),
    ("top_system", Read(3)),
    ("top_system_prompt", Read(3)),
    ("top_system_null", Read(3)),
    ("prompt_completion", Loses(0, &[("no_conversation", 3)])),
    ("prompt_completion_chat", Loses(0, &[("no_conversation", 3)])),
    ("alpaca", Loses(0, &[("no_conversation", 3)])),
    ("prefs", Loses(0, &[("no_conversation", 3)])),
    ("ultrachat", Read(3)),
    ("ultrachat_data", Loses(0, &[("no_conversation", 3)])),
    ("function_call", Loses(0, &[("unknown_role", 3)])),
    ("roles_odd", Loses(0, &[("unknown_role", 3)])),
    ("gpt_first", Read(3)),
    ("null_value", Loses(0, &[("null_content", 3)])),
    ("empty_assistant_only", Loses(0, &[("no_anchor", 3)])),
    ("empty_user", Read(3)),
    ("content_parts", Read(3)),
    ("content_parts_null_image", Read(3)),
    ("content_parts_resp", Read(3)),
    ("content_image", Loses(0, &[("unsupported_content", 3)])),
    ("content_empty_list", Read(3)),
    ("content_num", Loses(0, &[("unsupported_content", 3)])),
    ("content_dict", Loses(0, &[("unsupported_content", 3)])),
    ("weight0", Read(3)),
    ("train_false", Read(3)),
    ("num_extra_changed", Read(3)),
    ("mask_bool", Read(3)),
    ("mask_float", Read(3)),
    ("labels", Loses(0, &[("mask_length", 3)])),
    ("ids_nested", Loses(0, &[("bad_tokens", 3)])),
    ("ids_float", Loses(0, &[("bad_tokens", 3)])),
    ("empty", Refused(&["has no rows"])),
    ("ws", Refused(&["has no rows"])),
    ("html", Refused(&["HTML", "fetch the file again"])),
    ("lfs", Refused(&["Git LFS", "git lfs pull"])),
    ("csv", Refused(&["CSV", "JSON object"])),
];

/// Content of the cases by name.
fn cases() -> BTreeMap<String, Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cases/files.json");
    let cases: BTreeMap<String, Value> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let bytes = |case: Value| match (case["text"].as_str(), case["base64"].as_str()) {
        (Some(text), None) => text.as_bytes().to_vec(),
        (None, Some(text)) => decoded(text),
        _ => panic!("{case}"),
    };
    cases.into_iter().map(|(name, case)| (name, bytes(case))).collect()
}

fn decoded(base64: &str) -> Vec<u8> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = base64.bytes().filter(|&letter| letter != b'=');
    let digits: Vec<u32> =
        digits.map(|letter| LETTERS.iter().position(|&known| known == letter).unwrap() as u32).collect();
    let group = |four: &[u32]| {
        let bits = four.iter().enumerate().fold(0, |bits, (i, digit)| bits | digit << (18 - 6 * i));
        bits.to_be_bytes()[1..four.len()].to_vec()
    };
    digits.chunks(4).flat_map(group).collect()
}

fn tolerant() -> World {
    let mut world = World::new();
    world.options.data.max_reject_fraction = 1.0;
    world
}

#[test]
fn automodel_2376_each_file_is_read_refused_by_name_or_counted() {
    let world = tolerant();
    let cases = cases();
    assert_eq!(cases.len(), FILES.len());
    for (name, outcome) in &FILES {
        world.write("in", &cases[*name]);
        let result = world.prepare(&["in"]);
        let text = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        match (outcome, result.as_ref().map_or_else(PrepareError::report, Some)) {
            (Read(rows), Some(report)) => {
                assert_eq!((report.rows, report.samples()), (*rows, *rows), "{name}: {report}{text}");
            }
            (Loses(samples, lost), Some(report)) => {
                let counts = report.rejected.iter().chain(&report.left_out);
                let counts: Vec<_> = counts.map(|(reason, count)| (reason.word(), *count)).collect();
                assert_eq!((report.samples(), &counts[..]), (*samples, *lost), "{name}: {text}");
            }
            (Refused(words), None) => {
                assert!(words.iter().all(|word| text.contains(word)), "{name}: {text} lacks one of {words:?}");
                assert!(text.contains("in of data.inputs"), "{name}: {text}");
            }
            _ => panic!("{name}: {result:?}"),
        }
    }
}

/// Forms of rows that are not read say how to write them: the detail names the form and the remedy.
#[test]
fn rows_in_other_forms_are_rejected_with_their_remedy() {
    let world = tolerant();
    let cases = cases();
    for (name, words) in [
        ("list_of_lists_array", "a list of turns; write it as the value of `messages`"),
        ("array_of_turns", "it is a turn"),
        ("cr_only", "3 values in one line"),
        ("jsonl_glued", "3 values in one line"),
        ("wrapper_data", "jq -c '.data[]'"),
        ("jsonl_then_array", "a list of rows"),
        ("jsonl_trailing_commas", "a comma follows the row"),
        ("comments", "a comment"),
        ("nan", "`NaN` at byte"),
        ("inf", "`-Infinity` at byte"),
        ("bignum", "number out of range"),
        ("latin1", "convert the file to UTF-8"),
        ("surrogate_lone", "surrogate pair"),
        ("surrogate_lone_low", "surrogate pair"),
        ("conversation_sing", "rename it to `messages`"),
        ("dialog", "`dialog` holds turns"),
        ("conv_pyrepr", "json.dumps"),
        ("dict_of_lists", "columns"),
        ("pandas_columns", "orient=\"records\""),
        ("prompt_completion", "under `messages`"),
        ("alpaca", "under `messages`"),
        ("labels", "-100"),
        ("role_text", "\"text\""),
    ] {
        world.write("in", &cases[name]);
        let result = world.prepare(&["in"]);
        let details: Vec<_> = world.rejects().into_iter().map(|reject| reject.3).collect();
        assert!(details.iter().any(|detail| detail.contains(words)), "{name}: {details:?}");
        if let Err(error) = result {
            assert!(error.to_string().contains(", line 1: "), "the sentence has no example: {error}");
        }
    }
}

#[test]
fn an_archive_is_never_read_as_rows() {
    let world = tolerant();
    let rows = jsonl(&[chat(0), chat(1)]);
    // Members are stored without compression, so their rows are lines of the archive.
    let mut tar = vec![0_u8; 512];
    tar[..7].copy_from_slice(b"a.jsonl");
    let sum: u64 = tar.iter().map(|&byte| u64::from(byte)).sum::<u64>() + 8 * 32;
    tar[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.extend(&rows);
    let zip = [&b"PK\x03\x04\x0a\0\0\0\0\0"[..], b"\n", &rows].concat();
    for (bytes, word) in [(tar.clone(), "tar archive"), (zip.clone(), "zip archive"), (gzip(&tar), "tar archive")] {
        world.write("in", bytes);
        let text = world.prepare(&["in"]).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn paths_that_need_a_shell_or_a_client_are_named() {
    let world = World::new();
    for (path, word) in [("~/a.jsonl", "`~`"), ("hf:owner/name", "Hugging Face"), ("data/*.jsonl", "list each file")] {
        let mut options = world.options.clone();
        options.data.inputs = vec![path.into()];
        let text = draftmill::data::prepare(&options, &mut |_| std::ops::ControlFlow::Continue(())).unwrap_err();
        assert!(text.to_string().contains(word), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// A file that is cut anywhere is an error with its length, unless the cut is between two rows of a JSONL file.
    /// With the setting, each row before the cut is read.
    #[test]
    fn pydantic_ai_7159_a_cut_file_is_an_error_unless_allowed(
        rows in 1usize..6,
        form in 0usize..3,
        cut in any::<prop::sample::Index>(),
    ) {
        let mut world = tolerant();
        let list: Vec<_> = (0..rows).map(chat).collect();
        let whole = match form {
            0 => json!(list).to_string().into_bytes(),
            1 => gzip(&jsonl(&list)),
            _ => jsonl(&list),
        };
        let end = 1 + cut.index(whole.len() - 1);
        // Two bytes of gzip are its mark; one byte is other text.
        prop_assume!(form != 1 || end > 1);
        world.write("in", &whole[..end]);
        let before = whole[..end].iter().filter(|&&byte| byte == b'\n').count();
        let between = form == 2 && (whole[end - 1] == b'\n' || whole[end] == b'\n');
        match world.prepare(&["in"]) {
            Ok(report) => prop_assert!(between && report.rejected.is_empty(), "{report}"),
            Err(error) => {
                let text = error.to_string();
                prop_assert!(!between, "{text}");
                prop_assert!(text.contains("is cut") && text.contains(&format!("byte {end}")), "{text}");
                prop_assert!(text.contains("data.allow_truncated"), "{text}");
            }
        }
        world.options.data.allow_truncated = true;
        match world.prepare(&["in"]) {
            Ok(report) => {
                prop_assert_eq!(report.truncated_files, u64::from(!between));
                prop_assert!(form != 2 || report.samples() as usize >= before);
            }
            Err(error) => {
                let report = error.report().map(|report| (report.samples(), report.truncated_files));
                prop_assert!(report.is_none_or(|report| report == (0, 1)), "{}", error);
            }
        }
    }
}

#[test]
fn an_allowed_cut_gives_the_whole_rows() {
    let mut world = tolerant();
    world.options.data.allow_truncated = true;
    for (file, samples, rejected) in [
        (format!("[{},{}", chat(0), chat(1)), 2, 0),
        (format!("[{},{}", chat(0), &chat(1).to_string()[..30]), 1, 1),
        (format!("{}\n{}", chat(0), &chat(1).to_string()[..30]), 1, 1),
    ] {
        world.write("in", &file);
        let report = world.prepare(&["in"]).unwrap();
        assert_eq!(
            (report.samples(), report.rejected_rows(), report.truncated_files),
            (samples, rejected, 1),
            "{file}"
        );
        assert!(report.to_string().contains("data.allow_truncated"));
    }
}
