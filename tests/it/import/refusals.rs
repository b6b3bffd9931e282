//! Refused files and folders: the error names the cause and the remedy, and no partial output remains.

use super::gguf_file::{self, Meta, Stored};
use super::tiny::{HIDDEN, Tiny};
use super::*;
use proptest::prelude::*;

/// Imports bytes and checks that a failure leaves no file.
fn import_bytes(bytes: &[u8]) -> Result<ImportReport, String> {
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("bad.gguf");
    std::fs::write(&gguf, bytes).unwrap();
    let result = import(&gguf, &folder.path().join("out"), WeightType::F32, false);
    if result.is_err() {
        assert_eq!(names(folder.path()), ["bad.gguf"], "partial output remains");
    }
    result.map_err(|e| sentence(&e))
}

fn refusal(tiny: &Tiny) -> String {
    let (folder, _, result) = tiny.import(WeightType::F32);
    assert_eq!(names(folder.path()), ["tiny.gguf"], "partial output remains");
    sentence(&result.unwrap_err())
}

/// Text of an error: one line that names a path.
fn sentence(error: &ImportError) -> String {
    let text = error.to_string();
    assert!(text.len() > 40 && !text.contains('\n') && text.contains(std::path::MAIN_SEPARATOR), "{text}");
    text
}

fn tiny_bytes() -> Vec<u8> {
    let tiny = Tiny::new("llama", "smollm");
    gguf_file::bytes(&tiny.meta, &tiny.tensors)
}

#[test]
fn files_that_are_not_gguf_are_refused() {
    for (bytes, part) in [
        (&b""[..], "it is empty"),
        (b"PK\x03\x04 a zip", "it begins with \"PK\\x03\\x04\""),
        (b"GG", "it begins with \"GG\""),
        (b"GGUF", "its header cannot be read"),
        (b"GGUF\x01\0\0\0", "GGUF version 1"),
        (b"GGUF\x09\0\0\0", "GGUF version 9"),
        (b"GGUF\0\0\0\x03", "GGUF version 3 in big-endian byte order"),
    ] {
        let error = import_bytes(bytes).unwrap_err();
        assert!(error.contains(part), "{error}");
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
    // Padding may follow the last tensor, so the last cut is 64 bytes before the end.
    for len in (0..bytes.len() - 64).step_by(97).chain(0..64) {
        let error = import_bytes(&bytes[..len]).unwrap_err();
        assert!(error.contains("damaged or cut short") || error.contains("not a GGUF file"), "cut at {len}: {error}");
    }
    import_bytes(&bytes).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn damage_never_panics_and_leaves_no_file(at in 0.0..1.0_f64, garbage in prop::collection::vec(any::<u8>(), 1..16)) {
        let mut bytes = tiny_bytes();
        // Most of the file is weights. The header ends near byte 9000.
        let at = 4 + (at * 9000.0) as usize;
        bytes[at..at + garbage.len()].copy_from_slice(&garbage);
        let _ = import_bytes(&bytes);
    }
}

#[test]
fn an_alignment_of_zero_is_damage() {
    let tiny = Tiny::new("llama", "smollm").set("general.alignment", Meta::U32(0));
    assert!(refusal(&tiny).contains("general.alignment is zero"));
}

#[test]
fn unsupported_metadata_is_refused_by_name() {
    let llama = || Tiny::new("llama", "smollm");
    let text = |s: &str| Meta::Text(s.into());
    for (tiny, part) in [
        (llama().set("general.architecture", text("gemma3")), "the architecture gemma3"),
        (llama().set("tokenizer.ggml.model", text("llama")), "the tokenizer model llama"),
        (llama().set("tokenizer.ggml.pre", text("tekken")), "the pre-tokenizer tekken"),
        (llama().set("split.count", Meta::U16(3)), "1 of 3 files"),
        (llama().set("llama.rope.scaling.type", text("yarn")), "the rope scaling yarn"),
        (llama().set("llama.rope.dimension_count", Meta::U32(4)), "llama.rope.dimension_count 4"),
        (llama().set("llama.attention.value_length", Meta::U32(4)), "llama.attention.value_length 4"),
        (llama().set("llama.expert_count", Meta::U32(8)), "llama.expert_count"),
        (llama().set("llama.attention.sliding_window", Meta::U32(512)), "llama.attention.sliding_window"),
        (
            llama().set("llama.attention.head_count", Meta::U32s(vec![4; 2])),
            "llama.attention.head_count should be one count",
        ),
        (llama().set("llama.block_count", Meta::U32(u32::MAX)), "gives 4294967295 layers"),
        (llama().set("llama.attention.head_count_kv", Meta::U32(3)), "4 heads cannot share 3"),
        (llama().set("tokenizer.ggml.eos_token_id", Meta::U32(9999)), "eos_token_id is 9999"),
        (llama().set("tokenizer.ggml.merges", Meta::Texts(vec!["q zz".into()])), "are not a valid tokenizer"),
        (llama().set("tokenizer.ggml.token_type", Meta::I32s(vec![1])), "1 token types"),
    ] {
        let error = refusal(&tiny);
        assert!(error.contains(part), "{part:?} is missing in: {error}");
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
    left_over.tensors.insert("blk.0.ffn_gate_exps.weight".into(), (vec![HIDDEN], vec![0.0; HIDDEN], Stored::F32));
    assert!(refusal(&left_over).contains("the tensor blk.0.ffn_gate_exps.weight"));

    let mut missing = Tiny::new("qwen2", "qwen2");
    missing.tensors.remove("blk.1.attn_k.bias");
    assert!(refusal(&missing).contains("the tensor blk.1.attn_k.bias is missing"));

    let mut shape = Tiny::new("llama", "smollm");
    shape.tensors.insert("blk.1.ffn_norm.weight".into(), (vec![8], vec![0.0; 8], Stored::F32));
    assert!(refusal(&shape).contains("blk.1.ffn_norm.weight has the shape [8], its metadata gives [32]"));

    let mut scaling = Tiny::new("llama", "smollm");
    scaling.tensors.insert("rope_freqs.weight".into(), (vec![4], vec![1.0, 3.0, 5.0, 8.0], Stored::F32));
    assert!(refusal(&scaling).contains("the rope scaling [1.0, 3.0, 5.0, 8.0]"));
}

/// No folder is written that every later command refuses.
#[test]
fn automodel_2376_import_refuses_what_no_command_can_use() {
    let llama = || Tiny::new("llama", "smollm");
    for (tiny, part) in [
        (llama().set("llama.rope.scaling.type", Meta::Text("linear".into())), "the rope scaling linear"),
        (
            llama()
                .set("llama.rope.scaling.type", Meta::Text("linear".into()))
                .set("llama.rope.scaling.factor", Meta::F32(4.0)),
            "the rope scaling linear by 4",
        ),
        (llama().set("llama.rope.scale_linear", Meta::F32(2.0)), "the rope scaling linear by 2"),
        (llama().set("llama.rope.freq_base", Meta::F32(-1.0)), "`rope_theta` = -1"),
        (llama().set("llama.context_length", Meta::U32(u32::MAX)), "`max_position_embeddings` = 4294967295"),
    ] {
        let error = refusal(&tiny);
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
}

#[test]
fn an_unsupported_tensor_type_is_named() {
    for (number, part) in [(20, "tensor blk.0.attn_norm.weight of the type IQ4_NL"), (99, "ggml_type discriminant 99")]
    {
        let mut tiny = Tiny::new("llama", "smollm");
        tiny.tensors.get_mut("blk.0.attn_norm.weight").unwrap().2 = Stored::Raw(number, vec![0; 18]);
        let error = refusal(&tiny);
        assert!(error.contains(part) && error.contains("Q4_K"), "{error}");
    }
}

#[test]
fn weights_outside_the_dtype_or_not_finite_are_named() {
    let mut tiny = Tiny::new("llama", "smollm");
    tiny.tensors.get_mut("blk.1.ffn_down.weight").unwrap().1[5] = 1e6;
    let (folder, _, result) = tiny.import(WeightType::F16);
    assert!(sentence(&result.unwrap_err()).contains("tensor blk.1.ffn_down.weight beyond the range of float16"));
    assert_eq!(names(folder.path()), ["tiny.gguf"], "the partial folder is removed");
    tiny.tensors.get_mut("blk.1.ffn_down.weight").unwrap().1[5] = f32::NAN;
    assert!(refusal(&tiny).contains("tensor blk.1.ffn_down.weight has values that are not finite"));
}

#[test]
fn force_replaces_an_earlier_import_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("t.gguf"), folder.path().join("models/out"));
    Tiny::new("llama", "smollm").write(&gguf);
    std::fs::create_dir_all(&out).unwrap();
    import(&gguf, &out, WeightType::F32, false).expect("an empty folder is accepted, missing parents are created");

    let error = sentence(&import(&gguf, &out, WeightType::Bf16, false).unwrap_err());
    assert!(error.contains("is not empty") && error.contains("--force"), "{error}");
    assert_eq!(json(out.join("config.json"))["dtype"], "float32", "the earlier import is unchanged");
    import(&gguf, &out, WeightType::Bf16, true).unwrap();
    assert_eq!(json(out.join("config.json"))["dtype"], "bfloat16");
    assert_eq!(names(&folder.path().join("models")), ["out"]);

    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    let error = sentence(&import(&gguf, &out, WeightType::F32, true).unwrap_err());
    assert!(error.contains("notes.txt"), "{error}");
    assert!(out.join("notes.txt").exists());

    // A downloaded model with the same names, which no import has written (speculators#690).
    std::fs::remove_file(out.join("notes.txt")).unwrap();
    let mut config = json(out.join("config.json"));
    config.as_object_mut().unwrap().remove("draftmill_import").unwrap();
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    let error = sentence(&import(&gguf, &out, WeightType::F32, true).unwrap_err());
    assert!(error.contains("draftmill_import"), "{error}");
    assert_eq!(json(out.join("config.json"))["dtype"], "bfloat16");

    let error = sentence(&import(&gguf, &gguf, WeightType::F32, true).unwrap_err());
    assert!(error.contains("it is a file"), "{error}");
    let error = sentence(&import(&gguf, Path::new("/"), WeightType::F32, false).unwrap_err());
    assert!(error.contains("no folder name"), "{error}");
}

#[test]
fn output_of_a_killed_import_is_removed_unless_it_is_locked() {
    let folder = tempfile::tempdir().unwrap();
    let (gguf, out) = (folder.path().join("t.gguf"), folder.path().join("out"));
    Tiny::new("llama", "smollm").write(&gguf);
    let partial = folder.path().join(".out.draftmill-partial");
    std::fs::create_dir(&partial).unwrap();
    std::fs::write(partial.join("model.safetensors"), "half a file").unwrap();

    let running = std::fs::File::open(&partial).unwrap();
    running.lock().unwrap();
    let error = sentence(&import(&gguf, &out, WeightType::F32, false).unwrap_err());
    assert!(error.contains("another import"), "{error}");
    assert_eq!(names(&partial), ["model.safetensors"], "the output of the running import is unchanged");

    drop(running);
    import(&gguf, &out, WeightType::F32, false).unwrap();
    assert_eq!(names(folder.path()), ["out", "t.gguf"]);
}
