//! Folder with a tiny model to prepare data for: a ChatML template and a tokenizer with one token for each byte.

use draftmill::{
    config::{Data, HiddenFields, LeadingAssistant, Overlong, UnknownRole},
    data::{PrepareError, PrepareOptions, PrepareReport, Split, Store, prepare},
};
use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};
use std::{
    fs,
    io::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

pub const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}\
    {% if message['content'] == 'refuse me' %}{{ raise_exception('this cannot be rendered') }}{% endif %}\
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}";
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

pub struct World {
    folder: TempDir,
    pub options: PrepareOptions,
}

impl World {
    /// Settings that accept every valid row and no bad one.
    pub fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let data = Data {
            inputs: Vec::new(),
            store: folder.path().join("data.safetensors"),
            max_length: 1000,
            overlong: Overlong::Cut,
            unknown_role: UnknownRole::Reject,
            hidden_fields: HiddenFields::Reject,
            leading_assistant: LeadingAssistant::Drop,
            allow_truncated: false,
            min_supervised: 1,
            validation_fraction: 0.0,
            max_reject_fraction: 0.0,
            max_row_bytes: 1 << 20,
        };
        let options = PrepareOptions { data, model_dir: folder.path().join("model") };
        let world = World { folder, options };
        fs::create_dir(world.path("model")).unwrap();
        world.write("model/chat_template.jinja", TEMPLATE);
        world.write("model/tokenizer_config.json", json!({"eos_token": "<|im_end|>"}).to_string());
        world.write("model/tokenizer.json", byte_tokenizer().to_string());
        world
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap();
    }

    /// Names in the folder, sorted.
    pub fn files(&self) -> Vec<String> {
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(self.folder.path()).unwrap().map(name).collect();
        names.sort();
        names
    }

    pub fn with_inputs(&self, names: &[&str]) -> PrepareOptions {
        let mut options = self.options.clone();
        options.data.inputs = names.iter().map(|name| self.path(name)).collect();
        options
    }

    pub fn prepare(&self, names: &[&str]) -> Result<PrepareReport, PrepareError> {
        prepare(&self.with_inputs(names), &mut |_| ControlFlow::Continue(()))
    }

    pub fn store(&self) -> Store {
        Store::open(&self.options.data.store).unwrap()
    }

    /// Everything in the store.
    pub fn samples(&self) -> Vec<(Split, Vec<i32>, Vec<u8>)> {
        let store = self.store();
        let all = [Split::Train, Split::Validation].into_iter();
        all.flat_map(|split| (0..store.len(split)).map(move |i| (split, i)))
            .map(|(split, i)| (split, store.sample(split, i).0.to_vec(), store.sample(split, i).1.to_vec()))
            .collect()
    }

    /// The rejects file: line, row, reason, detail.
    pub fn rejects(&self) -> Vec<(u64, u64, String, String)> {
        let text = fs::read_to_string(self.path("data.safetensors.rejects.jsonl")).unwrap();
        let read = |line: &str| {
            let reject: Value = serde_json::from_str(line).unwrap();
            assert!(Path::new(reject["file"].as_str().unwrap()).is_absolute());
            let word = |key: &str| reject[key].as_str().unwrap().to_string();
            (reject["line"].as_u64().unwrap(), reject["row"].as_u64().unwrap(), word("reason"), word("detail"))
        };
        text.lines().map(read).collect()
    }

    /// Decodes ids of the byte tokenizer.
    pub fn text(&self, ids: &[i32]) -> String {
        let bytes = ids.iter().flat_map(|&id| match usize::try_from(id).unwrap() {
            byte @ ..256 => vec![byte as u8],
            special => SPECIAL[special - 256].as_bytes().to_vec(),
        });
        String::from_utf8(bytes.collect()).unwrap()
    }
}

/// Byte tokenizer: ids 0..256 are bytes, and the special tokens follow.
fn byte_tokenizer() -> Value {
    // The letters of byte-level BPE: printable bytes stand for themselves, the others for letters from 256 on.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256..;
    let vocab: serde_json::Map<_, _> = (0..256)
        .map(|byte| {
            let letter = if printable(byte) { byte } else { others.next().unwrap() };
            (char::from_u32(letter).unwrap().to_string(), json!(byte))
        })
        .collect();
    let flags = json!({"single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let added = SPECIAL.iter().enumerate().map(|(i, text)| {
        let mut token = flags.clone();
        token["id"] = json!(256 + i);
        token["content"] = json!(text);
        token
    });
    json!({
        "version": "1.0",
        // Settings that other programs may leave in the file must have no effect.
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

/// Valid conversation, different for each number.
pub fn chat(i: usize) -> Value {
    json!({"messages": [
        {"role": "user", "content": format!("question {i}")}, {"role": "assistant", "content": answer(i)},
    ]})
}

pub fn answer(i: usize) -> String {
    format!("the answer to {i} is {}", i * i)
}

/// One row a line.
pub fn jsonl(rows: &[Value]) -> Vec<u8> {
    rows.iter().map(|row| format!("{row}\n")).collect::<String>().into_bytes()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
