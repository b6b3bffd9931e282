//! Another golden folder: numbers of the same models in other shapes, for the tests that read their shapes from the files.

use super::files::{json, open, path};
use safetensors::tensor::TensorView;
use std::{fs, path::Path, process::Command};

/// The parts of a tensor's bytes along its first dimension.
fn parts<'a>(bytes: &'a [u8], shape: &[usize]) -> std::slice::ChunksExact<'a, u8> {
    bytes.chunks_exact(bytes.len() / shape[0])
}

/// Copies tensors, each changed by `change` from name, shape and bytes to another shape and other bytes.
fn rewrite(name: &str, to: &Path, change: impl Fn(&str, &[usize], &[u8]) -> (Vec<usize>, Vec<u8>)) {
    let files = open(name);
    let tensors = files.names().map(|name| {
        let raw = files.get(name).unwrap();
        let (shape, bytes) = change(name, raw.shape, raw.bytes);
        (name.to_owned(), raw.dtype, shape, bytes)
    });
    let tensors = tensors.collect::<Vec<_>>();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::remove_file(to.join(name)).unwrap();
    fs::write(to.join(name), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() { copy(&path, &to) } else { fs::copy(&path, &to).map(drop).unwrap() }
    }
}

/// Issue 17, C6: two rows of 19 in reverse order instead of three of 24, and two more blocks, without an anchor. A model is
/// causal, so what it computes for the kept tokens stays.
#[test]
fn labels_and_targets_of_a_folder_with_other_shapes_match() {
    const WIDTH: usize = 19;
    let folder = tempfile::tempdir().unwrap();
    copy(&path(""), folder.path());
    for target in json("targets.json").as_object().unwrap().values().filter_map(|entry| entry["model_dir"].as_str()) {
        rewrite(&format!("{target}_io.safetensors"), folder.path(), |_, shape, bytes| {
            let rows = parts(bytes, shape).take(2).collect::<Vec<_>>();
            let cut = |row: &&[u8]| parts(row, &shape[1..]).take(WIDTH).flatten().copied().collect::<Vec<_>>();
            let shape = [&[2, WIDTH][..], &shape[2..]].concat();
            (shape, rows.iter().rev().flat_map(cut).collect())
        });
    }
    let blocks = open("speculators_case.safetensors").get("anchors").unwrap().shape[0];
    let slots = open("speculators_case.safetensors").get("label_ids").unwrap().shape[1];
    rewrite("speculators_case.safetensors", folder.path(), |name, shape, bytes| {
        let (at, more) = match name {
            "anchors" | "anchor_valid" => (0, 2),
            "label_ids" | "aligned_loss_mask" | "output_hidden" | "logits" => (1, 2 * slots / blocks),
            _ => return (shape.to_vec(), bytes.to_vec()),
        };
        // The dimensions before it are 1, so that what is added follows the last byte.
        let mut longer = shape.to_vec();
        longer[at] += more;
        let bytes = [bytes, &vec![0; bytes.len() / shape[at] * more]].concat();
        (longer, bytes)
    });
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(["golden::labels", "golden::target"]).env("DRAFTMILL_GOLDEN", folder.path());
    let ended = tests.output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && text.contains("labels_are_what_the_plain_forward"), "{text}");
}
