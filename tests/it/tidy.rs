//! House rules that no compiler checks: module docs, file lengths, and documents that must follow the code.

use draftmill::common::exit;
use draftmill_actors::runtime::metrics;
use std::{
    fs,
    path::{Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources() -> Vec<PathBuf> {
    let mut files = ["src/build.rs", "torch-ext/build.rs"].map(|f| root().join(f)).to_vec();
    let folders = ["src", "tests", "benches", "actors/src", "actors/tests", "torch-ext/src"];
    let mut folders = folders.map(|f| root().join(f)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|e| e == "rs") => files.push(path),
                false => {}
            }
        }
    }
    files
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

#[test]
fn every_file_says_its_job_and_is_short() {
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("//! "), "{} has no module doc on its first line", path.display());
        let lines = text.lines().count();
        assert!(lines <= 500, "{} has {lines} lines, more than 500", path.display());
    }
}

/// A module that a merge drops from the list is no longer compiled, and no compiler reports it.
#[test]
fn every_file_of_tests_is_a_module_of_theirs() {
    for folder in ["tests/it", "actors/tests/it"] {
        let list = read(&format!("{folder}/main.rs"));
        for path in sources().iter().filter(|path| path.parent() == Some(&root().join(folder))) {
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(
                name == "main" || list.contains(&format!("\nmod {name};")),
                "{folder}/main.rs does not name {name}"
            );
        }
    }
}

/// Split so that this file does not find itself.
#[test]
fn actors_use_no_wall_clock_no_thread_rng_and_no_unbounded_channel() {
    let banned = [["std::time::", "Instant"], ["thread_", "rng"], ["unbounded_", "channel"], ["std::sync::", "Mutex"]];
    for path in sources().iter().filter(|p| p.starts_with(root().join("actors/src"))) {
        let text = fs::read_to_string(path).unwrap();
        for word in banned.map(|parts| parts.concat()) {
            assert!(!text.contains(&word), "{} uses {word}", path.display());
        }
    }
}

#[test]
fn the_architecture_names_every_part_and_every_invariant() {
    let text = read("ARCHITECTURE.md");
    for (folder, inside) in [("src", "src/"), ("actors/src", "actors/src/"), ("torch-ext/src", "torch-ext/src/")] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let name = if path.is_dir() { format!("{name}/") } else { name };
            let plain = name.trim_end_matches(".rs").trim_end_matches('/').to_owned();
            let named = [format!("`{plain}.rs`"), format!("`{plain}/`"), format!("`{name}`")];
            let named = named.iter().any(|name| text.contains(name));
            assert!(named || name == "lib.rs", "{inside}{name} is not in the code map of ARCHITECTURE.md");
        }
    }
    let spec = metrics::TABLE.iter().find(|s| s.name == metrics::INVARIANT_VIOLATIONS).unwrap();
    for id in spec.labels[0].1 {
        assert!(text.contains(&format!("\n| {id} | ")), "invariant {id} is not in ARCHITECTURE.md");
    }
    for path in sources() {
        let code = fs::read_to_string(&path).unwrap();
        for (at, _) in code.match_indices("invariant!(") {
            let Some(id) = code[at..].split('"').nth(1).filter(|id| id.len() == 2) else { continue };
            assert!(spec.labels[0].1.contains(&id), "{} checks {id}, which the metrics table lacks", path.display());
        }
    }
}

/// UPDATE_EXPECT=1 rewrites the generated parts of the documents.
#[test]
fn documents_have_the_tables_that_the_code_generates() {
    let generated = [
        ("docs/monitoring.md", "metrics", metrics::markdown()),
        ("docs/operations.md", "exit codes", exit::markdown()),
    ];
    for (file, name, table) in generated {
        let mut text = read(file);
        let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
        let from = text.find(&begin).unwrap_or_else(|| panic!("{file} has no place for {name}")) + begin.len();
        let to = from + text[from..].find(&end).unwrap();
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            text.replace_range(from..to, &table);
            fs::write(root().join(file), &text).unwrap();
        }
        let table_is_there = text.contains(&table);
        assert!(
            table_is_there,
            "the {name} of {file} are stale: UPDATE_EXPECT=1 cargo test --no-default-features --test it documents_have"
        );
    }
}

/// Every metric that the code uses is a constant of the table.
#[test]
fn metrics_are_named_in_one_place() {
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        if path.ends_with("actors/src/metrics.rs") || path.starts_with(root().join("tests")) {
            continue;
        }
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (line, code) in text.lines().enumerate().filter(|(_, code)| !code.trim_start().starts_with("//")) {
            for call in ["counter!(\"", "gauge!(\"", "histogram!(\""] {
                assert!(!code.contains(call), "{}:{}: {code}", path.display(), line + 1);
            }
        }
    }
}

/// `cargo test --workspace --no-default-features` builds this package too, on machines without libtorch.
#[test]
fn without_its_feature_torch_ext_needs_nothing() {
    let manifest: toml::Table = read("torch-ext/Cargo.toml").parse().unwrap();
    for kind in ["dependencies", "build-dependencies"] {
        for (name, dependency) in manifest[kind].as_table().unwrap() {
            assert_eq!(dependency.get("optional"), Some(&true.into()), "{kind} of torch-ext: {name}");
        }
    }
}

#[test]
fn the_scrape_configuration_names_the_default_port() {
    let admin = draftmill::config::Admin::default();
    let address = admin.listen.0.unwrap().to_string();
    assert!(read("dashboards/prometheus.yml").contains(&address), "{address}");
}

/// Settings are written to logs, run.toml, checkpoints and state.db, so a secret must be in a file that a setting names.
#[test]
fn no_setting_is_a_secret() {
    for field in draftmill::config::FIELDS {
        let last = field.key.rsplit('_').next().unwrap_or_default();
        let secret = ["password", "passphrase", "secret", "credential", "bearer"].contains(&last)
            || (last == "token" && field.section != "simulate")
            || field.key == "api_key";
        assert!(!secret, "{}.{} would be told to everybody; name a file instead", field.section, field.key);
    }
}
