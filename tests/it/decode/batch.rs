//! Batched decoding: a prompt's answer does not depend on the other prompts of the batch.

use super::scene::World;
use draftmill::inference::{Answer, Batch, Settings, plain};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Ragged prompts, from one token to more than the smallest size class of the KV cache.
fn prompts(world: &World, seed: u64, count: usize) -> Vec<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut prompt = |len: usize| (0..len).map(|_| rng.random_range(0..world.vocab() as u32)).collect();
    [1, 60, 3, 17, 64, 65, 2, 90, 1, 33].into_iter().cycle().take(count).map(&mut prompt).collect()
}

/// Answers all prompts with this number of slots. Returns the answers in the prompts' order, and the rows of each step.
fn answered(
    world: &World,
    prompts: &[(Vec<u32>, usize)],
    settings: &Settings,
    places: usize,
) -> (Vec<Answer>, Vec<usize>) {
    let mut batch = Batch::new(&world.target, settings, places);
    let (mut answers, mut rows, mut next) = (Vec::new(), Vec::new(), 0);
    loop {
        while let Some((prompt, most)) = prompts.get(next).filter(|_| batch.free() > 0) {
            batch.push(prompt, *most, next as u64).unwrap();
            next += 1;
        }
        if batch.is_empty() {
            break;
        }
        let (ended, count) = batch.step().unwrap();
        answers.extend(ended);
        rows.push(count);
    }
    answers.sort_by_key(|answer| answer.stream);
    (answers, rows)
}

fn check(world: &World, prompts: &[Vec<u32>], settings: &Settings, places: usize, what: &str) {
    let all: Vec<_> = prompts.iter().map(|prompt| (prompt.clone(), usize::MAX)).collect();
    let (answers, rows) = answered(world, &all, settings, places);
    assert_eq!(answers.len(), prompts.len());
    for (stream, (prompt, answer)) in prompts.iter().zip(&answers).enumerate() {
        let alone = plain(&world.target, prompt, settings, stream as u64).unwrap().tokens;
        assert_eq!(answer.tokens, alone, "{what}, {places} places, prompt {stream} of {} tokens", prompt.len());
        let stopped = alone.last().is_some_and(|last| settings.stop.contains(last));
        assert_eq!((answer.stream, answer.cut), (stream as u64, !stopped));
    }
    // A row in a forward is a token of an answer: finished rows are not computed.
    assert_eq!(rows.iter().sum::<usize>(), answers.iter().map(|answer| answer.tokens.len()).sum::<usize>());
    assert!(rows.iter().all(|&count| (1..=places).contains(&count)), "{rows:?}");
}

fn settings(max_new_tokens: usize, temperature: f64, stop: Vec<u32>) -> Settings {
    Settings { max_new_tokens, temperature, stop, seed: 7, min_survival: 0.0 }
}

#[test]
fn greedy_answers_are_those_of_each_prompt_alone() {
    for seed in 0..4 {
        let world = World::random(seed, 40);
        let prompts = prompts(&world, seed, 13);
        // Some ids that occur in the text now and then.
        let stop = vec![3, 11, 19];
        for (places, most, stop) in [(4, 20, &stop), (1, 8, &stop), (30, 20, &stop), (5, 1, &stop), (6, 12, &vec![])] {
            check(&world, &prompts, &settings(most, 0.0, stop.clone()), places, &format!("seed {seed}, most {most}"));
        }
    }
    for name in ["target_llama", "target_qwen3"] {
        let world = World::golden(name);
        check(&world, &prompts(&world, 5, 9), &settings(70, 0.0, vec![]), 4, name);
    }
}

#[test]
fn sampled_answers_are_those_of_the_same_stream_alone() {
    for seed in 0..3 {
        let world = World::random(seed, 40);
        let prompts = prompts(&world, seed, 9);
        for places in [3, 20] {
            check(&world, &prompts, &settings(16, 0.9, vec![5, 6]), places, &format!("seed {seed}"));
        }
    }
}

#[test]
fn an_answer_ends_at_a_stop_token_or_at_a_limit() {
    let world = World::random(2, 40);
    let prompt = vec![1, 2, 3];
    let long = plain(&world.target, &prompt, &settings(10, 0.0, vec![]), 0).unwrap().tokens;
    // The first token may already end it.
    let first = settings(10, 0.0, vec![long[0]]);
    let (answers, rows) = answered(&world, &[(prompt.clone(), 10)], &first, 2);
    assert_eq!((&answers[0].tokens[..], answers[0].cut, &rows[..]), (&long[..1], false, &[1][..]));
    let rooms = [(prompt.clone(), 4), (prompt.clone(), 99), (prompt, 1)];
    let (answers, rows) = answered(&world, &rooms, &settings(10, 0.0, vec![]), 3);
    let lengths: Vec<_> = answers.iter().map(|answer| (answer.tokens.len(), answer.cut)).collect();
    assert_eq!(lengths, [(4, true), (10, true), (1, true)]);
    assert_eq!(rows, [3, 2, 2, 2, 1, 1, 1, 1, 1, 1]);
    assert!(answers.iter().all(|answer| long.starts_with(&answer.tokens)));
}

#[test]
fn what_cannot_be_answered_is_refused() {
    let world = World::random(1, 40);
    let settings = settings(5, 0.0, vec![]);
    let mut batch = Batch::new(&world.target, &settings, 2);
    assert!(batch.push(&[], 5, 0).is_err() && batch.push(&[1], 0, 0).is_err());
    assert_eq!((batch.is_empty(), batch.free(), batch.step().unwrap()), (true, 2, (vec![], 0)));
    batch.push(&[1, 40], 5, 0).unwrap();
    assert!(batch.step().unwrap_err().to_string().contains("token id 40"));
}
