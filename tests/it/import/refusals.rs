//! What import refuses, in which words, and that nothing is left behind.

use super::tiny::{HIDDEN, Tiny};
use super::*;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use proptest::prelude::*;

/// Imports bytes; checks that a failure leaves no trace beside the file.
fn import_bytes(bytes: &[u8]) -> Result<ImportReport, String> {
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("bad.gguf");
    std::fs::write(&gguf, bytes).unwrap();
    let result = import(&gguf, &folder.path().join("out"), WeightType::F32, false);
    if result.is_err() {
        assert_eq!(names(folder.path()), ["bad.gguf"], "something was left behind");
    }
    result.map_err(|e| sentence(&e))
}

fn refusal(tiny: &Tiny) -> String {
    let (folder, _, result) = tiny.import(WeightType::F32);
    assert_eq!(names(folder.path()), ["tiny.gguf"], "something was left behind");
    sentence(&result.unwrap_err())
}

/// Every error is one line of some length that names a path.
fn sentence(error: &ImportError) -> String {
    let text = error.to_string();
    assert!(text.len() > 40 && !text.contains('\n') && text.contains(std::path::MAIN_SEPARATOR), "{text}");
    text
}

fn tiny_bytes() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    Tiny::new("llama", "smollm").write(&folder.path().join("t"));
    std::fs::read(folder.path().join("t")).unwrap()
}

#[test]
fn files_that_are_no_gguf() {
    for (bytes, says) in [
        (&b""[..], "it is empty"),
        (b"PK\x03\x04 a zip", "it begins with \"PK\\x03\\x04\""),
        (b"GG", "it begins with \"GG\""),
        (b"GGUF", "its header cannot be read"),
        (b"GGUF\x09\0\0\0", "GGUF version 9"),
        (b"GGUF\0\0\0\x03", "GGUF version 3 in big-endian byte order"),
    ] {
        let error = import_bytes(bytes).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    let missing = import(Path::new("nowhere/no.gguf"), Path::new("out"), WeightType::F32, false).unwrap_err();
    assert!(sentence(&missing).contains("cannot read nowhere/no.gguf"));
    let folder = tempfile::tempdir().unwrap();
    let error = import(folder.path(), &folder.path().join("out"), WeightType::F32, false).unwrap_err();
    assert!(sentence(&error).contains("not a regular file"));
}

#[test]
fn a_file_cut_anywhere_is_refused_before_anything_is_written() {
    let bytes = tiny_bytes();
    // The last tensor may be followed by padding, so the last cut that matters is well before the end.
    for len in (0..bytes.len() - 64).step_by(97).chain(0..64) {
        let error = import_bytes(&bytes[..len]).unwrap_err();
        assert!(error.contains("damaged or cut short") || error.contains("not a GGUF file"), "cut at {len}: {error}");
    }
    import_bytes(&bytes).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn damage_never_panics_and_never_leaves_anything(at in 0.0..1.0_f64, garbage in prop::collection::vec(any::<u8>(), 1..16)) {
        let mut bytes = tiny_bytes();
        // Most of the file is weights; aim at the header.
        let at = 4 + (at * 9000.0) as usize;
        bytes[at..at + garbage.len()].copy_from_slice(&garbage);
        let _ = import_bytes(&bytes);
    }
}

#[test]
fn an_alignment_of_zero_is_damage() {
    let tiny = Tiny::new("llama", "smollm").set("general.alignment", Gguf::U32(0));
    assert!(refusal(&tiny).contains("stumbled over its header"));
}

#[test]
fn unknown_things_are_refused_by_name() {
    let llama = || Tiny::new("llama", "smollm");
    let text = |s: &str| Gguf::String(s.into());
    for (tiny, says) in [
        (llama().set("general.architecture", text("gemma3")), "the architecture gemma3"),
        (llama().set("tokenizer.ggml.model", text("llama")), "the tokenizer model llama"),
        (llama().set("tokenizer.ggml.pre", text("tekken")), "the pre-tokenizer tekken"),
        (llama().set("split.count", Gguf::U16(3)), "1 of 3 parts"),
        (llama().set("llama.rope.scaling.type", text("yarn")), "the rope scaling yarn"),
        (llama().set("llama.rope.dimension_count", Gguf::U32(4)), "llama.rope.dimension_count 4"),
        (llama().set("llama.attention.value_length", Gguf::U32(4)), "llama.attention.value_length 4"),
        (llama().set("llama.expert_count", Gguf::U32(8)), "llama.expert_count"),
        (llama().set("llama.attention.sliding_window", Gguf::U32(512)), "llama.attention.sliding_window"),
        (
            llama().set("llama.attention.head_count", Gguf::Array(vec![Gguf::U32(4); 2])),
            "llama.attention.head_count should be one count",
        ),
        (llama().set("llama.block_count", Gguf::U32(u32::MAX)), "announces 4294967295 layers"),
        (llama().set("llama.attention.head_count_kv", Gguf::U32(3)), "4 heads cannot share 3"),
        (llama().set("tokenizer.ggml.eos_token_id", Gguf::U32(9999)), "eos_token_id is 9999"),
        (llama().set("tokenizer.ggml.merges", Gguf::Array(vec![text("q zz")])), "make no tokenizer"),
        (llama().set("tokenizer.ggml.token_type", Gguf::Array(vec![Gguf::I32(1)])), "1 token types"),
    ] {
        let error = refusal(&tiny);
        assert!(error.contains(says), "{says:?} is missing in: {error}");
    }
    for key in ["llama.embedding_length", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens"] {
        let mut tiny = llama();
        tiny.meta.remove(key);
        assert!(refusal(&tiny).contains(&format!("the key {key} is missing")));
    }
}

#[test]
fn tensors_must_be_exactly_those_of_the_family() {
    let mut left_over = Tiny::new("llama", "smollm");
    left_over.tensors.insert("blk.0.ffn_gate_exps.weight".into(), (vec![HIDDEN], vec![0.0; HIDDEN], GgmlDType::F32));
    assert!(refusal(&left_over).contains("the tensor blk.0.ffn_gate_exps.weight"));

    let mut missing = Tiny::new("qwen2", "qwen2");
    missing.tensors.remove("blk.1.attn_k.bias");
    assert!(refusal(&missing).contains("the tensor blk.1.attn_k.bias is missing"));

    let mut shape = Tiny::new("llama", "smollm");
    shape.tensors.insert("blk.1.ffn_norm.weight".into(), (vec![8], vec![0.0; 8], GgmlDType::F32));
    assert!(refusal(&shape).contains("blk.1.ffn_norm.weight has the shape [8], its metadata gives [32]"));

    let mut scaling = Tiny::new("llama", "smollm");
    scaling.tensors.insert("rope_freqs.weight".into(), (vec![4], vec![1.0, 3.0, 5.0, 8.0], GgmlDType::F32));
    assert!(refusal(&scaling).contains("the rope scaling [1.0, 3.0, 5.0, 8.0]"));
}

#[test]
fn an_unreadable_quantisation_is_named() {
    let mut bytes = tiny_bytes();
    let name = b"blk.0.attn_norm.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    // After the name: the number of dimensions, one dimension, then the type.
    bytes[at + 12..at + 16].copy_from_slice(&23u32.to_le_bytes());
    let error = import_bytes(&bytes).unwrap_err();
    assert!(error.contains("IQ4_XS (number 23)") && error.contains("Q4_K"), "{error}");
}

#[test]
fn weights_that_are_not_finite_or_do_not_fit_are_named() {
    let mut tiny = Tiny::new("llama", "smollm");
    tiny.tensors.get_mut("blk.1.ffn_down.weight").unwrap().1[5] = 1e6;
    let (folder, _, result) = tiny.import(WeightType::F16);
    assert!(sentence(&result.unwrap_err()).contains("tensor blk.1.ffn_down.weight beyond the range of float16"));
    assert_eq!(names(folder.path()), ["tiny.gguf"], "the half-written folder is gone");
    tiny.tensors.get_mut("blk.1.ffn_down.weight").unwrap().1[5] = f32::NAN;
    assert!(refusal(&tiny).contains("tensor blk.1.ffn_down.weight holds values that are not finite"));
}

#[test]
fn an_output_folder_is_replaced_only_when_told_and_only_if_it_is_an_import() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("t.gguf"), folder.path().join("models/out"));
    Tiny::new("llama", "smollm").write(&gguf);
    std::fs::create_dir_all(&out).unwrap();
    import(&gguf, &out, WeightType::F32, false).expect("an empty folder is free, missing parents are made");

    let error = sentence(&import(&gguf, &out, WeightType::Bf16, false).unwrap_err());
    assert!(error.contains("is not empty") && error.contains("--force"), "{error}");
    assert_eq!(json(out.join("config.json"))["dtype"], "float32", "the earlier import is untouched");
    import(&gguf, &out, WeightType::Bf16, true).unwrap();
    assert_eq!(json(out.join("config.json"))["dtype"], "bfloat16");
    assert_eq!(names(&folder.path().join("models")), ["out"]);

    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    let error = sentence(&import(&gguf, &out, WeightType::F32, true).unwrap_err());
    assert!(error.contains("notes.txt"), "{error}");
    assert!(out.join("notes.txt").exists());

    let error = sentence(&import(&gguf, &gguf, WeightType::F32, true).unwrap_err());
    assert!(error.contains("it is a file"), "{error}");
    let error = sentence(&import(&gguf, Path::new("/"), WeightType::F32, false).unwrap_err());
    assert!(error.contains("no name"), "{error}");
}

#[test]
fn a_killed_import_is_cleared_away_and_a_running_one_is_respected() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("t.gguf"), folder.path().join("out"));
    Tiny::new("llama", "smollm").write(&gguf);
    let partial = folder.path().join(".out.partial");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("model.safetensors"), "half a file").unwrap();

    let running = std::fs::File::open(&partial).unwrap();
    running.lock().unwrap();
    let error = sentence(&import(&gguf, &out, WeightType::F32, false).unwrap_err());
    assert!(error.contains("another import"), "{error}");
    assert_eq!(names(&partial), ["model.safetensors"], "the running import is left alone");

    drop(running);
    import(&gguf, &out, WeightType::F32, false).unwrap();
    assert_eq!(names(folder.path()), ["out", "t.gguf"]);
}
