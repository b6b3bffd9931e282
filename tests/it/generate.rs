//! `draftmill generate`: a tiny target, prompts of every kind, answers that `prepare` reads, kills and refusals.

use super::eval::Scene;
use std::process::{Command, Output};

fn command(scene: &Scene, more: &[&str]) -> Command {
    let mut run = Command::new(env!("CARGO_BIN_EXE_draftmill"));
    run.current_dir(&scene.0).args([
        "generate",
        "--target",
        "target",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "out.jsonl",
    ]);
    run.env("OMP_NUM_THREADS", "1").args(more);
    run
}

fn refused(scene: &Scene, more: &[&str], code: i32) -> String {
    let Output { status, stderr, .. } = command(scene, more).output().unwrap();
    let errors = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{errors}");
    errors
}

#[cfg(not(feature = "torch"))]
#[test]
fn a_build_without_libtorch_says_so() {
    let errors = refused(&Scene::new(), &[], 2);
    assert!(errors.contains("built without libtorch"), "{errors}");
}

#[cfg(feature = "torch")]
mod torch {
    use super::*;
    use draftmill::inference::{loaded_target::LoadedTarget, plain};
    use serde_json::{Value, json};
    use std::{fs, path::Path, time::Duration};
    use tch::{Device, Kind};

    fn answered(scene: &Scene, more: &[&str]) -> Value {
        let output = command(scene, &[more, &["--json"]].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn lines(path: &Path) -> Vec<Value> {
        fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn ids(line: &Value) -> Vec<u32> {
        line["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    /// Prompt and answer of a line, split by its mask.
    fn parts(line: &Value) -> (Vec<u32>, Vec<u32>) {
        let mask: Vec<u64> = line["loss_mask"].as_array().unwrap().iter().map(|bit| bit.as_u64().unwrap()).collect();
        let prompt = mask.iter().take_while(|&&bit| bit == 0).count();
        assert!(mask[prompt..].iter().all(|&bit| bit == 1) && mask.len() == ids(line).len(), "{line}");
        let mut question = ids(line);
        let answer = question.split_off(prompt);
        (question, answer)
    }

    /// File of conversations with one or more questions, each with an answer that must be replaced.
    fn many(scene: &Scene, count: u32) {
        let turn = |from: &str, text: String| json!({"from": from, "value": text});
        let row = |n: u32| {
            let asks = (0..1 + n % 3).flat_map(|k| {
                let words: Vec<_> =
                    (0..1 + (n * 7 + k) % 9).map(|i| format!("t{}", 10 + (n * 13 + k * 5 + i) % 300)).collect();
                [turn("human", words.join(" ")), turn("gpt", "t1 t1 t1".into())]
            });
            json!({"conversations": asks.collect::<Vec<_>>()}).to_string()
        };
        scene.write("prompts.jsonl", &format!("[{}]", (0..count).map(row).collect::<Vec<_>>().join(",\n")));
    }

    #[test]
    fn every_answer_is_the_targets_own_in_every_turn() {
        let scene = Scene::new();
        scene.write(
            "prompts.jsonl",
            concat!(
                "{\"turns\": [\"t5 t6 t7\", \"t30 t31\"], \"category\": \"writing\"}\n",
                "{\"prompt\": \"t40\"}\n",
                "{\"conversations\": [{\"from\": \"system\", \"value\": \"t3\"}, {\"from\": \"human\", \"value\": \"t50\"}, ",
                "{\"from\": \"gpt\", \"value\": \"t1\"}, {\"from\": \"human\", \"value\": \"t51\"}]}\n",
            ),
        );
        let report = answered(&scene, &["--max-new-tokens", "9", "--rows", "3", "--workers", "1"]);
        let lines = lines(&scene.path("out.jsonl"));
        let places: Vec<_> = lines.iter().map(|line| [&line["line"], &line["turn"], &line["last"]]).collect();
        let (yes, no) = (json!(true), json!(false));
        let [one, two, three] = [1, 2, 3].map(|n| json!(n));
        let expected =
            [[&one, &one, &no], [&one, &two, &yes], [&two, &one, &yes], [&three, &one, &no], [&three, &two, &yes]];
        assert_eq!(places, expected);
        assert_eq!(
            [&lines[0]["category"], &lines[1]["category"], &lines[2]["category"]],
            [&json!("writing"), &json!("writing"), &Value::Null]
        );

        let bench = LoadedTarget::load(&scene.path("target"), Kind::Float, Device::Cpu).unwrap();
        let settings = bench.settings(1, 9, 0.0, 0).unwrap();
        for line in &lines {
            let (prompt, answer) = parts(line);
            assert_eq!(answer, plain(&bench.target, &prompt, &settings, 0).unwrap().tokens, "{line}");
            assert_eq!(line["cut"], json!(!settings.stop.contains(answer.last().unwrap())), "{line}");
        }
        // The template puts t9 before an answer and nothing between turns; its own answers are dropped, the target's stay.
        let (first, said) = parts(&lines[0]);
        assert_eq!(first, [5, 6, 7, 9]);
        assert_eq!(parts(&lines[1]).0, [&[5, 6, 7], &said[..], &[30, 31, 9]].concat());
        let (first, said) = parts(&lines[3]);
        assert_eq!(first, [3, 50, 9]);
        assert_eq!(parts(&lines[4]).0, [&[3, 50], &said[..], &[51, 9]].concat());

        let tokens: usize = lines.iter().map(|line| parts(line).1.len()).sum();
        let numbers = ["rows", "conversations", "answers", "tokens"].map(|key| report[key].as_u64().unwrap());
        assert_eq!(numbers, [3, 3, 5, tokens as u64], "{report}");
        assert!(report["rows_per_forward"].as_f64().unwrap() > 1.0, "{report}");
    }

    /// A cut answer must not teach the end of a turn, so no template is applied to it again.
    #[test]
    fn prepare_takes_the_answers_token_by_token() {
        let scene = Scene::new();
        many(&scene, 20);
        let report = answered(&scene, &["--max-new-tokens", "7"]);
        let mut prepare = Command::new(env!("CARGO_BIN_EXE_draftmill"));
        prepare.current_dir(&scene.0).args(["prepare", "--json"]);
        for set in [
            "data.inputs=out.jsonl",
            "data.store=store",
            "target.dir=target",
            "data.min_supervised=1",
            "data.validation_fraction=0",
        ] {
            prepare.args(["--set", set]);
        }
        let output = prepare.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let prepared: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&prepared["rows"], &prepared["rejected"]), (&report["answers"], &json!({})));
        let store = draftmill::data::Store::open(&scene.path("store")).unwrap();
        let lines = lines(&scene.path("out.jsonl"));
        let kept = lines.iter().filter(|line| parts(line).1.len() > 1);
        let mut count = 0;
        for (index, line) in kept.enumerate() {
            let (ids, mask) = store.sample(draftmill::data::Split::Train, index);
            assert_eq!((json!(ids), json!(mask)), (line["input_ids"].clone(), line["loss_mask"].clone()));
            count += 1;
        }
        assert_eq!(count, store.len(draftmill::data::Split::Train));
        assert!(count > 20 && lines.iter().any(|line| line["cut"] == true), "{count} samples");
    }

    #[test]
    fn what_is_asked_is_a_matter_of_the_options() {
        let scene = Scene::new();
        many(&scene, 12);
        let all = answered(&scene, &["--max-new-tokens", "5"]);
        assert_eq!((&all["conversations"], &all["answers"]), (&json!(12), &json!(24)));
        let whole = lines(&scene.path("out.jsonl"));
        let limited =
            answered(&scene, &["--max-new-tokens", "5", "--force", "--limit", "4", "--turns", "2", "--rows", "1"]);
        assert_eq!((&limited["conversations"], &limited["answers"]), (&json!(4), &json!(6)));
        let firsts = whole.iter().filter(|line| line["place"].as_u64() < Some(4) && line["turn"].as_u64() < Some(3));
        let short = lines(&scene.path("out.jsonl"));
        assert_eq!(short.iter().map(ids).collect::<Vec<_>>(), firsts.map(ids).collect::<Vec<_>>());
        // Samples depend on seeds and streams, not on the rest of the batch.
        let sampled = |rows: &str, seed: &str| {
            answered(
                &scene,
                &["--max-new-tokens", "5", "--force", "--temperature", "1", "--rows", rows, "--seed", seed],
            );
            fs::read(scene.path("out.jsonl")).unwrap()
        };
        let one = sampled("1", "1");
        assert_eq!(one, sampled("7", "1"));
        assert_ne!(one, sampled("7", "2"));
    }

    #[test]
    fn rows_that_are_no_prompts_are_counted_by_reason() {
        let scene = Scene::new();
        let long = "t1 ".repeat(40);
        let rows = [
            json!({"conversations": [{"from": "gpt", "value": "t1"}, {"from": "human", "value": "t2"}]}).to_string(),
            json!({"conversations": []}).to_string(),
            json!({"messages": [{"role": "user", "content": long}]}).to_string(),
            json!({"messages": [{"role": "wizard", "content": "t1"}]}).to_string(),
            "{".into(),
            json!({"turns": ["t5", long, "t6"]}).to_string(),
            json!({"messages": [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t5"}, {"role": "user", "content": " "}]}).to_string(),
        ];
        scene.write("prompts.jsonl", &rows.join("\n"));
        let report = answered(&scene, &["--max-new-tokens", "4", "--max-prompt-tokens", "20", "--limit", "9"]);
        let left = json!({"assistant_first": 1, "no_question": 1, "too_long": 1, "unknown_role": 1, "invalid_json": 1});
        assert_eq!((&report["rows"], &report["conversations"], &report["answers"]), (&json!(7), &json!(2), &json!(2)));
        assert_eq!(report["left_out"].as_object().unwrap().len(), 5);
        for (reason, count) in left.as_object().unwrap() {
            assert_eq!(&report["left_out"][reason], count, "{reason}: {report}");
        }
        assert_eq!(report["questions_left_out"], json!({"no_question": 1, "too_long": 2}));
        scene.write("prompts.jsonl", &rows[..3].join("\n"));
        let errors = refused(&scene, &["--max-prompt-tokens", "20", "--force"], 4);
        assert!(
            errors.contains("no usable prompt in 3 rows") && errors.contains("the assistant speaks first"),
            "{errors}"
        );
        assert!(!scene.path("out.jsonl.part").exists(), "nothing is left");
    }

    /// Starts the command, waits until some answers are on disk, and ends it with a signal.
    fn ended_early(scene: &Scene, options: &[&str], signal: i32) -> (Option<i32>, String) {
        let mut run = command(scene, options);
        let child = run.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).spawn().unwrap();
        let part = scene.path("out.jsonl.part");
        let begun = fs::metadata(&part).map_or(0, |part| part.len());
        while fs::metadata(&part).map_or(0, |part| part.len()) <= begun {
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: a signal to a child that is not yet waited for.
        unsafe { libc::kill(child.id() as i32, signal) };
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }

    #[test]
    fn killed_and_interrupted_work_goes_on_and_ends_with_the_same_bytes() {
        let scene = Scene::new();
        many(&scene, 40);
        let options = ["--max-new-tokens", "30", "--rows", "2"];
        let whole = answered(&scene, &options);
        let bytes = fs::read(scene.path("out.jsonl")).unwrap();
        fs::remove_file(scene.path("out.jsonl")).unwrap();

        let (code, _) = ended_early(&scene, &options, libc::SIGKILL);
        assert_eq!(code, None);
        // State after a kill inside a write.
        let part = fs::read_to_string(scene.path("out.jsonl.part")).unwrap();
        scene.write("out.jsonl.part", &format!("{part}{}", &part[..part.len() / 2].trim_end()));
        let (code, errors) = ended_early(&scene, &options, libc::SIGINT);
        assert_eq!(code, Some(130), "{errors}");
        assert!(errors.contains("interrupted") && errors.contains("out.jsonl.part"), "{errors}");
        assert!(!scene.path("out.jsonl").exists());
        let before = lines(&scene.path("out.jsonl.part")).iter().filter(|line| line["last"] == true).count();
        assert!((2..40).contains(&before), "{before} conversations");

        let errors = refused(&scene, &["--max-new-tokens", "31"], 4);
        assert!(errors.contains("another max-new-tokens (30 before, 31 now)"), "{errors}");
        // Automodel#2307: other prompts of the same name and size.
        let prompts = fs::read_to_string(scene.path("prompts.jsonl")).unwrap();
        scene.write("prompts.jsonl", &prompts.replacen("t1", "t2", 1));
        let errors = refused(&scene, &options, 4);
        assert!(errors.contains("another prompts") && errors.contains("sha256"), "{errors}");
        scene.write("prompts.jsonl", &prompts);
        let report = answered(&scene, &options);
        assert_eq!(report["conversations_before"], json!(before));
        for key in
            ["rows", "conversations", "answers", "tokens", "prompt_tokens", "cut", "left_out", "questions_left_out"]
        {
            assert_eq!(report[key], whole[key], "{key}");
        }
        assert_eq!(fs::read(scene.path("out.jsonl")).unwrap(), bytes);
        let errors = refused(&scene, &options, 4);
        assert!(errors.contains("out.jsonl exists"), "{errors}");
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let scene = Scene::new();
        assert!(refused(&scene, &["--device", "tpu"], 2).contains("`tpu`"));
        assert!(refused(&scene, &["--rows", "0"], 2).contains("--rows"));
        fs::remove_file(scene.path("prompts.jsonl")).unwrap();
        assert!(refused(&scene, &[], 4).contains("prompts.jsonl cannot be read"));
        let scene = Scene::new();
        fs::remove_file(scene.path("target/chat_template.jinja")).unwrap();
        assert!(refused(&scene, &[], 5).contains("chat template"));
        assert!(!scene.path("out.jsonl.part").exists());
    }
}
