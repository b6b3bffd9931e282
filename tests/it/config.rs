//! Shipped configurations, and the texts that are generated from the types.

use draftmill::config::{self, Config, FIELDS, Wire};
use std::path::{Path, PathBuf};

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("configs")
}

#[test]
fn example_is_true() {
    let path = configs().join("example.toml");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, config::example()).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let stale =
        text.lines().zip(config::example().lines()).find(|(old, new)| old != new).map(|(old, _)| old.to_owned());
    assert!(
        text == config::example(),
        "stale at {stale:?}: run UPDATE_EXPECT=1 cargo test --no-default-features --test it example_is_true"
    );
    assert_eq!(config::load(Some(&path), &[]).unwrap().written.wire, Wire::default());
}

#[test]
fn every_key_has_a_comment_and_a_line() {
    let text = config::example();
    for field in FIELDS {
        assert!(field.doc.trim().len() > 10, "{}.{} needs a comment", field.section, field.key);
        assert!(text.contains(&format!("\n{} = ", field.key)), "{}.{} is not written", field.section, field.key);
    }
    assert!(text.lines().all(|line| line.len() <= 125));
}

#[test]
fn every_shipped_configuration_resolves() {
    let mut seen = Vec::new();
    for entry in std::fs::read_dir(configs()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        if let Err(problems) = config::load(Some(&path), &[]) {
            panic!("{problems}");
        }
        seen.push(path.file_name().unwrap().to_string_lossy().into_owned());
    }
    seen.sort();
    assert_eq!(
        seen,
        [
            "demo-long.toml",
            "demo.toml",
            "example.toml",
            "qwen3-8b-8gpu.toml",
            "qwen3-8b-dflash2.toml",
            "qwen3-8b-dspark.toml",
            "sim-8gpu.toml",
            "smoke.toml"
        ]
    );
}

#[test]
fn eight_gpus_are_five_targets_and_three_drafters() {
    for (name, head) in [("8gpu", "dflash"), ("dspark", "dspark"), ("dflash2", "dflash2")] {
        let path = configs().join(format!("qwen3-8b-{name}.toml"));
        eight_devices(&config::load(Some(&path), &[]).unwrap().config, head);
    }
}

fn eight_devices(config: &Config, head: &str) {
    assert_eq!(config.drafter.head.name(), head);
    assert_eq!((config.target.devices.len(), config.drafter.devices.len()), (5, 3));
    let mut devices: Vec<_> = config.target.devices.iter().chain(&config.drafter.devices).collect();
    devices.sort();
    devices.dedup();
    assert_eq!(devices.len(), 8);
}

#[test]
fn what_a_run_writes_down_reads_back_the_same() {
    let demo = config::load(Some(&configs().join("demo.toml")), &["run.seed=9".into()]).unwrap();
    let again = config::load_text(&config::annotated(&demo.written.wire), "run.toml", &[]).unwrap();
    assert_eq!(again.config, demo.config);
    assert_eq!(again.written.wire, demo.written.wire);
}

#[test]
fn differences_name_restart_keys_first() {
    let old = Wire::default();
    let mut new = old.clone();
    new.log.level = "debug".into();
    new.pool.min_ready = 2;
    new.run.seed = 1;
    let keys: Vec<_> = config::differences(&old, &new).iter().map(|field| field.key).collect();
    assert_eq!(keys, ["seed", "min_ready", "level"]);
    assert!(config::differences(&old, &old).is_empty());
}
