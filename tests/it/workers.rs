//! The binary with failing targets and drafters: it ends non-zero with the first fault, or continues without the failed one.

use crate::train::{Run, SLOW, text};

fn with(settings: &[&'static str]) -> Run {
    Run::new(&[SLOW, settings].concat())
}

#[test]
fn targets_that_only_fail_end_the_process_with_the_first_cause() {
    let run = with(&[
        "simulate.job_failures=0.999999",
        "dispatch.max_attempts=1000",
        "dispatch.max_restarts=2",
        "dispatch.restart_pause=1ms",
        "target.devices=[\"cpu\", \"cpu\"]",
    ]);
    let ended = run.train(&[]);
    let said = text(&ended);
    assert_eq!(ended.status.code(), Some(6), "{said}");
    for part in ["target ", "5 jobs failed in a row", "2 restarts failed"] {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
}

#[test]
fn too_many_skips_end_the_process_and_name_the_setting() {
    let run = with(&["simulate.job_failures=0.999999", "dispatch.max_attempts=1", "dispatch.max_skip_fraction=0.1"]);
    let ended = run.train(&[]);
    assert_eq!(ended.status.code(), Some(6), "{}", text(&ended));
    assert!(text(&ended).contains("dispatch.max_skip_fraction = 0.1"), "{}", text(&ended));
}

#[test]
fn failures_now_and_then_cost_nothing_but_time() {
    let run = with(&["simulate.job_failures=0.03", "simulate.micro_batch_failures=0.03", "dispatch.max_attempts=50"]);
    let ended = run.train(&[]);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended));
    let (trained, open) = run.ledger();
    let summary = run.summary();
    assert_eq!((summary["jobs_trained"].as_u64(), summary["jobs_skipped"].as_u64(), open), (Some(trained), Some(0), 0));
    assert!(text(&ended).contains("micro-batch failed") && text(&ended).contains("job failed"), "{}", text(&ended));
}
