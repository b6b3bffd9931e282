//! Tests of reading: every mistake has its key and line, and none hides another.

use super::*;
use proptest::prelude::*;

fn sets(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| text.to_string()).collect()
}

fn lines(problems: &Problems) -> Vec<String> {
    problems.0.iter().map(ToString::to_string).collect()
}

#[test]
fn nothing_written_is_the_default() {
    let (written, problems) = read("", "x.toml", &[]);
    assert_eq!(problems, Problems::default());
    assert_eq!(written.wire, Wire::default());
}

#[test]
fn every_mistake_is_reported_with_line_and_suggestion() {
    let text = "[pool]\nmax_byte = 1\nmin_ready = \"many\"\n\n[dispatsh]\n[plan]\norder = \"random\"\nepochs = 2\n";
    let (_, problems) = read(text, "x.toml", &sets(&["pool.nothing=1", "seed=1", "run.seed"]));
    let shown = lines(&problems).join("\n");
    for expected in [
        "x.toml:2: pool.max_byte = 1: there is no such key; did you mean pool.max_bytes?",
        "x.toml:3: pool.min_ready = \"many\": invalid type: string \"many\", expected a whole number of at least 0",
        "x.toml:5: dispatsh: there is no such section; did you mean [dispatch]?",
        "x.toml:7: plan.order = \"random\": there is no choice `random`, expected `shuffle` or `spread`",
        "x.toml:8: plan.epochs = 2: there is no such key; did you mean run.epochs?",
        "--set: pool.nothing = 1: there is no such key; the keys of [pool] are max_bytes, max_batches",
        "--set: seed=1: the key has no section",
        "--set: run.seed: there is no \"=\" in it",
    ] {
        assert!(shown.contains(expected), "{expected}\n  is not in\n{shown}");
    }
    assert_eq!(problems.0.len(), 8, "{shown}");
}

#[test]
fn an_old_name_is_refused_with_the_new_one() {
    let text = "[pool]\norder = \"replay\"\n[drafter]\nstart = \"fitted\"\ninit = \"a\"\n";
    let (_, problems) = read(text, "x.toml", &sets(&["drafter.exchange=copies"]));
    assert_eq!(
        lines(&problems),
        [
            "--set: drafter.exchange = \"copies\": drafter.exchange is now drafter.collectives; \
             write --set drafter.collectives=copy",
            "x.toml:5: drafter.init = \"a\": drafter.init is now drafter.init_from; \
             write init_from = \"a\" under [drafter]",
            "x.toml:4: drafter.start = \"fitted\": drafter.start is now drafter.init_method; \
             write init_method = \"least-squares\" under [drafter]",
            "x.toml:2: pool.order = \"replay\": pool.order is now pool.draw_policy; \
             write draw_policy = \"replay\" under [pool]",
        ]
    );
    let sets = sets(&["drafter.init_method=fitted", "drafter.collectives=copies"]);
    let (_, problems) = read("", "x.toml", &sets);
    assert_eq!(
        lines(&problems),
        [
            "--set: drafter.collectives = \"copies\": \"copies\" is now \"copy\"; \
             write --set drafter.collectives=copy",
            "--set: drafter.init_method = \"fitted\": \"fitted\" is now \"least-squares\"; \
             write --set drafter.init_method=least-squares",
        ]
    );
}

#[test]
fn every_new_name_exists() {
    for (section, key, word) in RENAMED_KEYS
        .map(|(section, _, new)| (section, new, None))
        .into_iter()
        .chain(RENAMED_VALUES.map(|(section, key, _, new)| (section, key, Some(new))))
    {
        assert!(FIELDS.iter().any(|field| field.section == section && field.key == key), "{section}.{key}");
        let set = word.map(|word| format!("{section}.{key}={word}"));
        assert_eq!(read("", "", set.as_slice()).1, Problems::default());
    }
}

#[test]
fn a_top_level_key_is_sent_to_its_section() {
    let (_, problems) = read("seed = 3\npool = 4\n", "x.toml", &[]);
    assert_eq!(
        lines(&problems),
        [
            "x.toml:2: pool = 4: \"pool\" is a section, not a key; write [pool]",
            "x.toml:1: seed = 3: a key must be in a section; put it under [run]",
        ]
    );
}

#[test]
fn all_syntax_errors_come_at_once() {
    let (_, problems) = read("[run]\nseed = \n[pool]\nmin_ready = = 3\n", "x.toml", &[]);
    let found: Vec<_> = problems.0.iter().filter_map(|problem| problem.line).collect();
    assert!(found.contains(&2) && found.contains(&4), "{problems}");
}

#[test]
fn sets_are_toml_or_bare_words_and_win_over_the_file() {
    let lists = ["data.inputs=[\"a\", \"b\"]", "target.devices=cuda:1"];
    let sets = sets(&[&["run.seed=7", "plan.order=shuffle", "pool.max_bytes=3 GiB"][..], &lists].concat());
    let (written, problems) = read("[run]\nseed = 1\n", "x.toml", &sets);
    assert_eq!(problems, Problems::default());
    assert_eq!(written.wire.run.seed, 7);
    assert_eq!(written.wire.plan.order, draftmill_actors::planner::plan::JobOrder::Shuffle);
    assert_eq!(written.wire.pool.max_bytes.0, 3 << 30);
    assert_eq!(written.wire.data.inputs.len(), 2);
    assert_eq!(written.wire.target.devices, [crate::config::Device::Cuda(1)]);
    assert_eq!(written.problem("run.seed", "m", "").to_string(), "--set: run.seed = 7: m");
}

#[test]
fn a_set_cannot_smuggle_in_a_second_key() {
    let (written, problems) = read("", "", &sets(&["log.level=1\nx = 2"]));
    assert_eq!(problems, Problems::default());
    assert_eq!(written.wire.log.level, "1\nx = 2");
}

#[test]
fn a_file_that_is_too_long_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.toml");
    std::fs::write(&path, "# a comment\n".repeat(100_000)).unwrap();
    let (_, problems) = read_file(Some(&path), &[]);
    assert!(problems.to_string().contains("longer than 1 MiB"), "{problems}");
}

#[test]
fn edits_are_levenshtein() {
    for (a, b, distance) in [("", "abc", 3), ("kitten", "sitting", 3), ("same", "same", 0), ("ab", "ba", 2)] {
        assert_eq!(edits(a, b), distance, "{a} {b}");
    }
}

/// A literal and whether a key of any type may keep it.
fn literals() -> impl Strategy<Value = String> {
    const POOL: &[&str] = &[
        "1",
        "0",
        "7",
        "-3",
        "0xbeef_face_dead_cafe",
        "99999999999999999999",
        "-9223372036854775808",
        "1e400",
        "-1e400",
        "1e-400",
        "nan",
        "inf",
        "0.5",
        "1.0",
        "true",
        "\"auto\"",
        "\"all\"",
        "\"2 GiB\"",
        "\"30s\"",
        "[1, 2]",
        "[1e999]",
        "[]",
        "{ a = 18446744073709551616 }",
        "\"cpu\"",
        "[\"cpu\"]",
        "\"text\"",
        "1979-05-27",
    ];
    prop_oneof![
        4 => prop::sample::select(POOL).prop_map(String::from),
        1 => any::<i128>().prop_map(|number| number.to_string()),
        1 => "[1-9][0-9]{0,40}\\.[0-9]{1,40}e-?[0-9]{1,4}",
    ]
}

proptest! {
    /// toml#964, vector#3499: a number beyond range emptied the whole configuration, and `check` said "no problem found".
    #[test]
    fn toml_964_each_written_key_is_in_force_or_a_problem(
        keys in prop::collection::btree_map(0..FIELDS.len(), literals(), 1..6),
    ) {
        let mut sections: BTreeMap<&str, String> = BTreeMap::new();
        let keys: Vec<_> = keys.into_iter().map(|(field, literal)| (&FIELDS[field], literal)).collect();
        for (field, literal) in &keys {
            let section = sections.entry(field.section).or_default();
            section.push_str(&format!("{} = {literal}\n", field.key));
        }
        let text: String = sections.iter().map(|(name, keys)| format!("[{name}]\n{keys}")).collect();
        let (written, problems) = read(&text, "x.toml", &[]);
        let resolved = Table::try_from(&written.wire).unwrap();
        for (field, literal) in &keys {
            let path = format!("{}.{}", field.section, field.key);
            let problem = problems.0.iter().find(|problem| problem.key == path);
            prop_assert!(problem.is_none_or(|problem| problem.line.is_some()), "{path}: {problems}");
            let (same, probe) = (&resolved[field.section][field.key], format!("[{}]\n{} = {literal}\n", field.section, field.key));
            let alone = read(&probe, "x.toml", &[]);
            let expected = Table::try_from(&alone.0.wire).unwrap()[field.section][field.key].clone();
            prop_assert!(problem.is_some() || (alone.1.0.is_empty() && same.to_string() == expected.to_string()), "{path} = {literal}: {problems}");
        }
    }
}

#[test]
fn vector_3499_a_number_beyond_range_is_a_problem_with_its_line() {
    for (text, key) in [
        ("[run]\nseed = 0xbeef_face_dead_cafe\n[plan]\njob_tokens = 7", "run.seed"),
        ("[run]\nseed = 99999999999999999999\n[plan]\njob_tokens = 7", "run.seed"),
        ("[optimizer]\nlearning_rate = 1e400\n[plan]\njob_tokens = 7", "optimizer.learning_rate"),
    ] {
        let (written, problems) = read(text, "x.toml", &[]);
        let found: Vec<_> = problems.0.iter().map(|problem| (problem.key.as_str(), problem.line)).collect();
        assert_eq!(found, [(key, Some(2))], "{text}: {problems}");
        assert_eq!(written.wire.plan.job_tokens, 7, "the other keys are in force");
    }
}
