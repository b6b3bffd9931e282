//! Control of a running pipeline, on paused time: reload storms, pauses, settings that waiting requests see at once,
//! checkpoints on demand. Nothing is lost, nothing hangs, every invariant holds.

use crate::{
    pipeline::assert_all_trained,
    world::{Breakage, ControlScript, Outcomes, World, Wrong},
};
use draftmill_actors::{
    messages::types::Outcome,
    pipeline::{ControlHandle, Settings},
    pool::{self, DrawPolicy},
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

const SECOND: Duration = Duration::from_secs(1);

fn control<F: Future<Output = ()> + Send + 'static>(
    how: impl Fn(ControlHandle, Settings) -> F + Send + Sync + 'static,
) -> Option<ControlScript> {
    Some(Arc::new(move |handle, settings| Box::pin(how(handle, settings))))
}

/// Returns random settings that a reload accepts.
pub fn any_settings(base: &Settings, rng: &mut ChaCha8Rng, targets: usize) -> Settings {
    let mut changed = base.clone();
    changed.pool = loop {
        let min_ready = rng.random_range(0..10);
        let pool = pool::Settings {
            max_bytes: rng.random_range(32_000..400_000),
            max_batches: rng.random_range(1..20),
            min_ready,
            draw_policy: if rng.random() { DrawPolicy::Uniform } else { DrawPolicy::Proportional },
            ..base.pool
        };
        // A job of 1000 tokens has 32 000 bytes.
        if pool.deadlock(32_000).is_none() {
            break pool;
        }
    };
    let some = |rng: &mut ChaCha8Rng, of: usize| -> Vec<usize> {
        let stays = rng.random_range(0..of);
        (0..of).filter(|&i| i != stays && rng.random()).collect()
    };
    changed.dispatcher.queue_jobs = rng.random_range(1..12);
    changed.dispatcher.pad_ahead = rng.random_range(1..6);
    changed.dispatcher.max_attempts = rng.random_range(3..6);
    changed.dispatcher.straggler_factor = [0.0, 1.0, 4.0][rng.random_range(0..3)];
    changed.dispatcher.offer_stragglers = rng.random();
    changed.dispatcher.paused = rng.random_range(0..8) == 0;
    changed.dispatcher.paused_targets = some(rng, targets);
    changed.trainer.paused = some(rng, base.trainer.drafters);
    changed.trainer.accumulation = rng.random_range(1..5);
    changed.prefetch = rng.random_range(0..4);
    changed
}

/// Changes settings every second, requests a checkpoint now and then, and finally restores the first settings.
fn storm(seed: u64, seconds: u64, targets: usize) -> Option<ControlScript> {
    control(move |handle, base| async move {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..seconds {
            sleep(Duration::from_millis(rng.random_range(1..2000))).await;
            handle.change(&any_settings(&base, &mut rng, targets));
            if rng.random_range(0..5) == 0 {
                let (answer, answered) = oneshot::channel();
                let _ = handle.checkpoint(answer);
                tokio::spawn(answered);
            }
        }
        handle.change(&base);
        std::future::pending().await
    })
}

/// Checks that every job has exactly one outcome, and that every step but the last has the size of some settings.
fn assert_nothing_is_lost(ended: &Outcomes, epochs: usize) {
    let planned: usize = ended.ledger().plans.iter().map(|plan| plan.jobs.len()).sum();
    assert_eq!(ended.ledger().plans.len(), epochs);
    assert_eq!(ended.outcomes().len(), planned, "jobs were lost");
    let trained = ended.outcomes().values().filter(|o| matches!(o, Outcome::Trained { .. })).count() as u64;
    assert_eq!(ended.records.iter().map(|r| r.micro_batches).sum::<u64>(), trained);
    assert!(ended.records.iter().all(|r| (1..=8).contains(&r.micro_batches)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Slow drafters keep the pool full, slow targets keep it empty; barriers make it drain again and again;
    /// checkpoints take longer than steps; targets fail, hang and return.
    #[test]
    fn a_reload_storm_loses_no_job_and_hangs_nobody(
        seed: u64, seconds in 1_u64..300, slow in prop::sample::select(vec![0.2, 1.0, 5.0]), epoch_barrier: bool, faults: bool,
        checkpoint_takes in 0_u64..20,
    ) {
        let broken = |every, wrong| Breakage { every: Some((every, wrong)), ..Breakage::default() };
        let (failing, lost) = (broken(7, Wrong::Fail), broken(11, Wrong::Lose));
        let world = World {
            epochs: 3,
            epoch_barrier,
            targets: if faults { vec![failing, lost, Breakage::default()] } else { vec![Breakage::default(); 3] },
            drafters: vec![Breakage { slowness: Some(slow), ..Breakage::default() }; 2],
            checkpoint_every: 2,
            checkpoint_takes: Duration::from_secs(checkpoint_takes),
            max_skip_fraction: 1.0,
            max_restarts: 1000,
            control: storm(seed, seconds, 3),
            ..World::default()
        };
        assert_nothing_is_lost(&world.run(), 3);
    }

    /// Steps until a stop in a storm are whole, and another start continues from there.
    #[test]
    fn a_stop_in_a_reload_storm_loses_nothing(seed: u64, stop_at in 0_u64..60, close: bool) {
        let at = Some(Duration::from_secs(stop_at));
        let controlled = World {
            epochs: 2,
            stop_at: if close { None } else { at },
            close_at: if close { at } else { None },
            control: storm(seed, 1000, 3),
            ..World::default()
        };
        let first = controlled.clone().run();
        let steps = first.records.len() as u64;
        let trained: u64 = first.records.iter().map(|r| r.micro_batches).sum();
        prop_assert_eq!(first.outcomes().len() as u64, trained, "half a step was recorded");
        if steps > 0 {
            prop_assert_eq!(first.ledger().checkpoints.last().map(|(s, _)| *s), Some(steps), "a stop writes a checkpoint");
        }
        let world = World { stop_at: None, close_at: None, control: None, ..controlled };
        let second = world.clone().run_with(first.result.unwrap().ledger.unwrap(), steps);
        assert_all_trained(&world, &second, 2);
    }
}

/// Requests a checkpoint and waits for the reply.
async fn checkpoint(handle: &ControlHandle) -> Result<String, String> {
    let (answer, answered) = oneshot::channel();
    handle.checkpoint(answer).expect("there is room for a wish");
    answered.await.expect("a wish is answered")
}

#[test]
fn waiting_draws_see_a_lowered_minimum_at_once() {
    // One target of three batches a second for a pool that wants sixteen: the first step waits for them all.
    let pool = pool::Settings { min_ready: 16, ..World::default().pool };
    let costs = draftmill_actors::simulated::CostModel { seconds_per_token: 1e-3, ..World::default().costs };
    let world = World { pool, costs, targets: vec![Breakage::default()], ..World::default() };
    let plain = world.clone().run().records[0].seconds;
    let lowered = World {
        control: control(|handle, mut settings| async move {
            sleep(5 * SECOND).await;
            settings.pool.min_ready = 1;
            handle.change(&settings);
            std::future::pending().await
        }),
        ..world.clone()
    }
    .run();
    assert_all_trained(&world, &lowered, 1);
    // By then four batches are ready: two drafters train two each.
    let expected = 5.0 + 2.0 * 0.5 + 0.05;
    let first = lowered.records[0].seconds;
    assert!((first - expected).abs() < 1e-6 && plain > 2.0 * first, "{first} instead of {expected}, {plain} without");
}

#[test]
fn waiting_reservations_follow_a_changed_limit_at_once() {
    // Drafters that never get going: targets fill the pool and then wait.
    let pool = pool::Settings { min_ready: 1, max_batches: 2, ..World::default().pool };
    let slow = Breakage { slowness: Some(1000.0), ..Breakage::default() };
    let world = World { pool, drafters: vec![slow], prefetch: 1, ..World::default() };
    let extracted = |change: Option<(usize, u64)>| -> u64 {
        let controlled = control(move |handle, mut settings| async move {
            if let Some((max_batches, max_bytes)) = change {
                sleep(20 * SECOND).await;
                (settings.pool.max_batches, settings.pool.max_bytes) = (max_batches, max_bytes);
                handle.change(&settings);
            }
            std::future::pending().await
        });
        World { control: controlled, ..world.clone() }.run_for(30 * SECOND).iter().sum()
    };
    // Two held by the drafter, and two in the pool.
    assert_eq!(extracted(None), 4);
    assert_eq!(extracted(Some((7, 1 << 20))), 9);
    assert_eq!(extracted(Some((1, 1 << 20))), 4);
}

#[test]
fn a_pause_hands_out_nothing_and_checkpoints_are_written_all_the_same() {
    let (during, after) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let seen = (during.clone(), after.clone());
    let world = World {
        epochs: 4,
        counts: (0..3).map(|_| during.clone()).collect(),
        control: control(move |handle, mut settings| {
            let (count, after) = seen.clone();
            async move {
                sleep(20 * SECOND).await;
                settings.dispatcher.paused = true;
                handle.change(&settings);
                // Running work is finished, and draws wait for their minimum.
                sleep(30 * SECOND).await;
                let paused = count.load(Relaxed);
                let said = checkpoint(&handle).await.expect("a checkpoint of what is trained");
                assert!(said.contains("is written"), "{said}");
                assert!(checkpoint(&handle).await.is_ok_and(|said| said.contains("already")));
                sleep(3600 * SECOND).await;
                assert_eq!(count.load(Relaxed), paused, "a job left during the pause");
                settings.dispatcher.paused = false;
                handle.change(&settings);
                sleep(10 * SECOND).await;
                after.store(count.load(Relaxed) - paused, Relaxed);
                std::future::pending().await
            }
        }),
        ..World::default()
    };
    let ended = world.clone().run();
    assert!(after.load(Relaxed) > 0, "it resumes at once");
    assert!(ended.took > 3600 * SECOND);
    assert_eq!(ended.ledger().checkpoints.len(), 2, "the one that was asked for, and the last one");
    assert_all_trained(&World { control: None, ..world }, &ended, 4);
}

#[test]
fn a_checkpoint_that_was_asked_for_is_told_as_it_went() {
    let world = World {
        bad_checkpoints: vec![4],
        checkpoint_takes: 3 * SECOND,
        control: control(|handle, _| async move {
            let early = checkpoint(&handle).await;
            assert!(early.is_err_and(|why| why.contains("no step is complete yet")));
            sleep(5 * SECOND).await;
            let failed = checkpoint(&handle).await;
            assert!(failed.is_err_and(|why| why.contains("step 4 ") && why.contains("no space left")));
            // Two requests at once are one checkpoint, and one that arrives meanwhile is the next.
            let (first, second) = (checkpoint(&handle), checkpoint(&handle));
            let third = async {
                sleep(2 * SECOND).await;
                checkpoint(&handle).await
            };
            let (first, second, third) = tokio::join!(first, second, third);
            assert!(first.is_ok() && first == second && third.as_ref().is_ok_and(|said| Ok(said) != first.as_ref()));
            let waited = timeout(SECOND, std::future::pending::<()>()).await;
            assert!(waited.is_err());
        }),
        ..World::default()
    };
    let ended = world.clone().run();
    assert_all_trained(&World { control: None, ..world }, &ended, 1);
    assert_eq!(ended.ledger().checkpoints.len(), 3);
}

/// Automodel and others stop all ranks if one is removed; here the others continue, with smaller steps.
#[test]
fn a_paused_drafter_draws_nothing_and_the_steps_are_those_of_the_others() {
    let world = World {
        epochs: 3,
        control: control(|handle, base| async move {
            sleep(10 * SECOND).await;
            let mut settings = base.clone();
            (settings.trainer.paused, settings.dispatcher.paused_targets) = (vec![1], vec![0, 2]);
            handle.change(&settings);
            sleep(20 * SECOND).await;
            handle.change(&base);
            std::future::pending().await
        }),
        ..World::default()
    };
    let ended = world.clone().run();
    assert_nothing_is_lost(&ended, 3);
    let sizes = |from: f64, to: f64| -> Vec<u64> {
        let steps = ended.records.iter().filter(|r| (from..to).contains(&r.seconds));
        steps.map(|r| r.micro_batches).collect()
    };
    assert!(sizes(0.0, 10.0).iter().all(|n| *n == 4));
    assert!(sizes(12.0, 30.0).iter().all(|n| *n == 2) && sizes(12.0, 30.0).len() > 10);
    assert!(sizes(33.0, f64::MAX).iter().rev().skip(1).all(|n| *n == 4));
    // To the end of the plan with one that stays paused: the end does not wait for it.
    let paused = World {
        control: control(|handle, mut settings| async move {
            sleep(3 * SECOND).await;
            settings.trainer.paused = vec![0];
            handle.change(&settings);
            std::future::pending().await
        }),
        ..World::default()
    };
    let ended = paused.run();
    assert_nothing_is_lost(&ended, 1);
    let work = &ended.report().drafters;
    assert!(work[0].micro_batches <= 8 && work[1].micro_batches > 3 * work[0].micro_batches);
}

#[test]
fn what_shapes_a_step_changes_at_its_border_and_all_of_it_together() {
    let world = World {
        control: control(|handle, base| async move {
            for n in 1_u32..12 {
                sleep(Duration::from_millis(900)).await;
                let mut settings = base.clone();
                settings.trainer.accumulation = 1 + n as usize % 3;
                let rate = settings.trainer.accumulation as f64;
                settings.trainer.learning_rate = Arc::new(move |_| rate);
                handle.change(&settings);
            }
            std::future::pending().await
        }),
        ..World::default()
    };
    let ended = world.run();
    assert_nothing_is_lost(&ended, 1);
    let changed: Vec<_> = ended.records.iter().filter(|r| r.learning_rate >= 1.0).collect();
    assert!(changed.len() > 5);
    for record in &changed[..changed.len() - 1] {
        assert_eq!(record.micro_batches as f64, 2.0 * record.learning_rate, "step {}: half of a change", record.step);
    }
}

#[test]
fn a_target_that_rests_before_its_restart_minds_a_shorter_pause() {
    let lost = Breakage { every: Some((3, Wrong::Lose)), until: Some(3), ..Breakage::default() };
    let took = |shorter: bool| {
        let world = World {
            targets: vec![lost.clone()],
            control: control(move |handle, mut settings| async move {
                settings.restart_pause = 1000 * SECOND;
                handle.change(&settings);
                sleep(60 * SECOND).await;
                if shorter {
                    settings.restart_pause = 10 * SECOND;
                    handle.change(&settings);
                }
                std::future::pending().await
            }),
            ..World::default()
        };
        let ended = world.run();
        assert_nothing_is_lost(&ended, 1);
        ended.took
    };
    assert!(took(false) > 1000 * SECOND && took(true) < 120 * SECOND);
}
