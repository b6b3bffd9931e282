//! Speculative decoding: whatever the drafter proposes, the output is that of the target alone.

mod batch;
mod sampling;
mod scene;

use self::scene::{Scripted, World};
use draftmill::hf::draft::LayerType;
use draftmill::inference::{Proposer, Response, Session, Settings, most_likely, plain, speculative};
use draftmill::model::batch::Rows;
use draftmill::model::drafter::Drafter;
use tch::Tensor;

fn settings(max_new_tokens: usize) -> Settings {
    Settings { max_new_tokens, temperature: 0.0, stop: Vec::new(), seed: 7, min_survival: 0.0 }
}

fn one<D: Proposer>(world: &World, drafter: &D, prompt: &[u32], settings: &Settings) -> Response {
    speculative(&world.target, drafter, &[prompt.to_vec()], settings).unwrap().pop().unwrap()
}

/// Greedy continuation by the forward without a cache, which recomputes the whole prefix for each token.
fn without_cache(world: &World, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
    for _ in 0..tokens {
        let lengths = [ids.len() as u32];
        let logits = world.target.trace(&Rows::new(&ids, &lengths, ids.len()).unwrap()).unwrap().logits;
        ids.push(logits.get(0).get(ids.len() as i64 - 1).argmax(0, false).int64_value(&[]) as i32);
    }
    ids[prompt.len()..].iter().map(|&id| id as u32).collect()
}

fn close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.size(), want.size(), "{what}");
    let gap = f64::try_from((got - want).abs().max()).unwrap();
    let scale = f64::try_from(want.abs().max()).unwrap();
    assert!(gap <= 2e-5 * scale.max(1.0), "{what}: differs by {gap}");
}

#[test]
fn the_cached_target_says_what_the_whole_forward_says() {
    for world in [World::golden("target_qwen3"), World::golden("target_llama"), World::random(1, 40)] {
        let ids: Vec<i32> = (0..30).map(|i| (i * 17 + 5) % world.vocab() as i32).collect();
        let trace = world.target.trace(&Rows::new(&ids, &[30], 30).unwrap()).unwrap();
        let taps = [2, 0];
        let want = Tensor::cat(&[trace.hidden[3].get(0), trace.hidden[1].get(0)], 1);
        let mut cache = world.target.cache();
        for (from, to) in [(0, 5), (5, 6), (6, 14), (14, 15), (15, 30)] {
            let place = |x: &Tensor| x.narrow(0, from as i64, (to - from) as i64);
            // A rejected continuation leaves no trace, whatever its length.
            world.target.extend(&mut cache, &[1, 2, 3, 1, 2, 3], &taps).unwrap();
            let seen = world.target.extend(&mut cache, &ids[from..to], &taps).unwrap();
            close("taps", &seen.taps, &place(&want));
            close("logits", &world.target.logits(&seen.normed).unwrap(), &place(&trace.logits.get(0)));
            cache.commit((to - from) as i64);
        }
        assert_eq!(cache.len(), 30);
    }
}

#[test]
fn greedy_output_is_that_of_the_target_alone_token_for_token() {
    for seed in 0..6 {
        let world = World::random(seed, 24);
        for (size, head) in [2, 5].into_iter().flat_map(|size| scene::heads().into_iter().map(move |head| (size, head)))
        {
            let drafter = world.drafter_with(head, size, seed % 2 == 1, 23);
            for prompt in world.prompts() {
                let said = one(&world, &drafter, &prompt, &settings(20));
                let alone = plain(&world.target, &prompt, &settings(20), 0).unwrap();
                assert_eq!(said.tokens, alone.tokens, "seed {seed}, block {size}, {head:?}");
                assert_eq!(said.tokens, without_cache(&world, &prompt, 20), "seed {seed}, block {size}");
                assert!(alone.steps.iter().all(|step| (step.drafted, step.produced) == (0, 1)));
            }
        }
    }
}

#[test]
fn a_drafter_that_always_agrees_brings_a_whole_block_with_every_step() {
    let world = World::golden("target_qwen3");
    let size = 8;
    for prompt in world.prompts() {
        let truth = without_cache(&world, &prompt, 1 + 3 * size);
        let drafter = Scripted::new(&world, &prompt, &truth, size, |_| 99);
        let said = one(&world, &drafter, &prompt, &settings(1 + 3 * size));
        assert_eq!(said.tokens, truth);
        let steps: Vec<_> = said.steps.iter().map(|step| (step.drafted, step.accepted, step.produced)).collect();
        assert_eq!(steps, [(size - 1, size - 1, size); 3]);
    }
}

#[test]
fn a_random_drafter_brings_about_one_token_with_a_step() {
    let world = World::random(3, 320);
    let drafter = world.drafter(8, false, 319);
    let (mut tokens, mut steps) = (0, 0);
    for prompt in world.prompts() {
        let said = one(&world, &drafter, &prompt, &settings(24));
        tokens += said.steps.iter().map(|step| step.produced).sum::<usize>();
        steps += said.steps.len();
    }
    let mean = tokens as f64 / steps as f64;
    assert!((1.0..1.3).contains(&mean), "{mean}");
}

/// SpecForge#455, #473: a drafter was good in training and bad when served, because the inputs differed. Here every
/// served block, after every kind of partial acceptance, is compared with the form without a cache and with the training
/// form. This detects one key too many or too few in either cache.
#[test]
fn specforge_455_473_what_is_served_after_partial_acceptance_is_what_was_trained() {
    for seed in 0..4 {
        let world = World::random(10 + seed, 40);
        let size = 5;
        for prompt in world.prompts() {
            let truth = without_cache(&world, &prompt, 24);
            let accepted = |at: usize| (at * 7 + 3) % 5;
            let drafter = Scripted::checked(&world, &prompt, &truth, world.drafter(size, seed % 2 == 1, 39), accepted);
            let said = one(&world, &drafter, &prompt, &settings(24));
            assert_eq!(said.tokens, truth);
            assert!(said.steps.iter().any(|step| 0 < step.accepted && step.accepted < step.drafted));
            assert_eq!(drafter.compared.get(), said.steps.len());
        }
    }
}

#[test]
fn the_target_keeps_the_keys_of_what_was_accepted_and_no_others() {
    let world = World::random(5, 40);
    let prompt = [3, 9, 4];
    let truth = without_cache(&world, &prompt, 16);
    let drafter = Scripted::new(&world, &prompt, &truth, 6, |at| at % 4);
    let limits = settings(16);
    let mut session = Session::begin(&world.target, Some(&drafter), &prompt, &limits, 0).unwrap();
    let mut produced = 1;
    while session.step().unwrap() {
        produced = session.tokens().len();
        assert_eq!(session.cached(), (prompt.len() + produced) as i64 - 1);
    }
    assert_eq!((produced, session.is_done()), (16, true));
}

#[test]
fn a_stop_token_inside_a_block_ends_the_response_there() {
    let world = World::random(11, 300);
    let prompt = [5, 6, 7];
    let truth = without_cache(&world, &prompt, 17);
    for place in [0, 1, 3, 7, 8] {
        // The first occurrence of this token.
        let end = truth.iter().position(|&id| id == truth[place]).unwrap();
        let stop = Settings { stop: vec![truth[place]], ..settings(17) };
        let drafter = Scripted::new(&world, &prompt, &truth, 8, |_| 99);
        let said = one(&world, &drafter, &prompt, &stop);
        assert_eq!(said.tokens, truth[..=end]);
        assert_eq!(said.tokens, plain(&world.target, &prompt, &stop, 0).unwrap().tokens);
        let produced: usize = said.steps.iter().map(|step| step.produced).sum();
        assert_eq!(produced, end, "every token but the first comes from a step, and none from behind the end");
        assert!(said.steps.iter().all(|step| step.accepted <= step.drafted && step.produced <= 8));
    }
}

#[test]
fn the_limit_is_exact_and_nothing_behind_it_is_verified() {
    let world = World::random(12, 60);
    let prompt = [1, 2];
    let truth = without_cache(&world, &prompt, 20);
    for limit in 1..20 {
        let drafter = Scripted::new(&world, &prompt, &truth, 8, |_| 99);
        let said = one(&world, &drafter, &prompt, &settings(limit));
        assert_eq!(said.tokens, truth[..limit]);
        let drafted: usize = said.steps.iter().map(|step| step.drafted).sum();
        assert_eq!(drafted + said.steps.len() + 1, limit);
    }
}

#[test]
fn prompts_shorter_than_a_block_and_a_context_of_one_token() {
    let world = World::golden("target_qwen3");
    let drafter = world.golden_drafter();
    for prompt in [&[4][..], &[4, 250], &[318, 0, 7]] {
        let said = one(&world, &drafter, prompt, &settings(12));
        assert_eq!(said.tokens, without_cache(&world, prompt, 12));
    }
    for (prompt, limits) in [(&[][..], settings(3)), (&[1], settings(0))] {
        let refused = plain(&world.target, prompt, &limits, 0).unwrap_err().to_string();
        assert!(refused.contains("at least one token"), "{refused}");
    }
}

#[test]
fn several_prompts_side_by_side_get_the_answers_of_each_alone() {
    let world = World::random(21, 30);
    let drafter = world.drafter(4, false, 29);
    let prompts = world.prompts();
    for temperature in [0.0, 1.0] {
        let limits = Settings { temperature, stop: vec![3, 4, 5], ..settings(18) };
        let together = speculative(&world.target, &drafter, &prompts, &limits).unwrap();
        for (stream, (prompt, together)) in prompts.iter().zip(&together).enumerate() {
            let mut alone = Session::begin(&world.target, Some(&drafter), prompt, &limits, stream as u64).unwrap();
            while alone.step().unwrap() {}
            assert_eq!(alone.into_response(), *together, "prompt {stream} at temperature {temperature}");
        }
        let steps: std::collections::HashSet<_> = together.iter().map(|said| said.steps.len()).collect();
        assert!(temperature == 0.0 || steps.len() > 1, "they should end at different times: {steps:?}");
    }
}

/// speculators#456: a block of B slots holds B - 1 drafts; the first slot is given.
/// One seed gives each prompt a separate random stream: the same prompt three times in a batch has three different
/// answers, and the same three with the same seed.
#[test]
fn prompts_of_one_seed_have_different_streams() {
    let world = World::random(5, 40);
    let drafter = world.drafter(4, false, 39);
    let limits = Settings { temperature: 1.0, seed: 9, ..settings(12) };
    let prompt = vec![3, 1, 4];
    let ask = |seed| {
        let limits = Settings { seed, ..limits.clone() };
        let said =
            speculative(&world.target, &drafter, &[prompt.clone(), prompt.clone(), prompt.clone()], &limits).unwrap();
        said.into_iter().map(|response| response.tokens).collect::<Vec<_>>()
    };
    let said = ask(9);
    assert!(said[0] != said[1] && said[1] != said[2] && said[0] != said[2], "{said:?}");
    assert_eq!(said, ask(9));
    assert_ne!(said, ask(10));
    let alone = |stream| plain(&world.target, &prompt, &limits, stream).unwrap().tokens;
    assert_ne!(alone(0), alone(1));
}

#[test]
fn speculators_456_a_block_proposes_one_token_fewer_than_it_has_slots() {
    let world = World::golden("target_qwen3");
    let drafter: Drafter = world.golden_drafter();
    let seen = world.target.extend(&mut world.target.cache(), &[1, 2, 3], drafter.taps()).unwrap();
    let mut draw = |logits: &Tensor| most_likely(logits);
    let proposal = drafter.propose(&mut drafter.begin().unwrap(), &seen.taps, 5, usize::MAX, &mut draw).unwrap();
    assert_eq!(proposal.logits.size(), [7, 320]);
}

/// z-lab#76: tokens that equal the mask token were stripped from the output, although the target had generated them.
#[test]
fn zlab_76_a_mask_token_that_the_target_says_is_part_of_the_response() {
    let world = World::random(31, 30);
    let prompt = [4, 5, 6, 7];
    let truth = without_cache(&world, &prompt, 12);
    let drafter = world.drafter(4, false, truth[3]);
    assert_eq!(one(&world, &drafter, &prompt, &settings(12)).tokens, truth);
    let scripted = Scripted::checked(&world, &prompt, &truth, drafter, |_| 99);
    assert_eq!(one(&world, &scripted, &prompt, &settings(12)).tokens, truth);
}

#[test]
fn sliding_layers_are_among_the_drafters_of_these_tests() {
    let sliding = World::random(1, 24).drafter(5, true, 23);
    assert!(sliding.config().layer_types.contains(&LayerType::Sliding));
}
