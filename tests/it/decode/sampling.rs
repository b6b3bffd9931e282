//! Sampling at a temperature follows the target's distribution, whatever the drafter proposes: chi-square tests with fixed
//! seeds against exact probabilities.

use super::scene::World;
use draftmill::hf::head::HeadConfig;
use draftmill::inference::{Sampler, Settings, speculative};
use draftmill::model::batch::Rows;
use tch::{Kind, Tensor};

fn settings(temperature: f64, seed: u64) -> Settings {
    Settings { max_new_tokens: 4, temperature, stop: Vec::new(), seed, min_survival: 0.0 }
}

/// Returns the statistic and its degrees of freedom; cells with an expectation below five are merged.
fn chi_square(found: &[u32], shares: &[f64]) -> (f64, f64) {
    let total = f64::from(found.iter().sum::<u32>());
    let (mut sum, mut cells, mut rest) = (0.0, 0.0, (0.0, 0.0));
    for (&found, &share) in found.iter().zip(shares) {
        let expected = share * total;
        if expected < 5.0 {
            rest = (rest.0 + f64::from(found), rest.1 + expected);
        } else {
            sum += (f64::from(found) - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if rest.1 > 0.0 {
        sum += (rest.0 - rest.1).powi(2) / rest.1.max(1.0);
        cells += 1.0;
    }
    (sum, cells - 1.0)
}

/// Limit of four standard deviations above the mean. One draw in tens of thousands would fail, and the seed is fixed.
fn fits(what: &str, found: &[u32], shares: &[f64]) {
    let (sum, freedom) = chi_square(found, shares);
    assert!(sum < freedom + 4.0 * (2.0 * freedom).sqrt(), "{what}: chi-square {sum} with {freedom} degrees of freedom");
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / temperature).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

#[test]
fn a_token_that_was_drafted_and_verified_has_the_targets_distribution() {
    let draft = [2.0f32, 0.0, -1.0, 1.0, 0.5];
    let target = [0.0f32, 1.5, 0.0, 1.2, -2.0, 9.0, 0.0, 0.0, 0.0, 0.0];
    let (q, p) = (Tensor::from_slice(&draft).reshape([1, 5]), Tensor::from_slice(&target).reshape([2, 5]));
    for temperature in [1.0, 0.6] {
        let mut chance = Sampler::new(&settings(temperature, 5), 0);
        let mut found = [0u32; 5];
        for _ in 0..20_000 {
            let drafted = chance.choose(&q).unwrap();
            let (stands, next) = chance.verify(&drafted, &q, &p).unwrap();
            found[if stands == 1 { drafted[0] } else { next } as usize] += 1;
        }
        fits(&format!("temperature {temperature}"), &found, &softmax(&target[..5], temperature));
    }
}

/// Joint distribution of the two tokens of a step that drafts two, with each head: the logits that a token is verified
/// with are those that it was drawn from.
#[test]
fn whole_responses_have_the_targets_distribution() {
    for head in super::scene::heads() {
        let drafted = responses_have_the_targets_distribution(head, 0.0);
        if matches!(head, HeadConfig::Dspark(config) if config.confidence.is_some()) {
            let cut = responses_have_the_targets_distribution(head, 0.4);
            assert!(cut > drafted / 10 && cut < drafted * 9 / 10, "{head:?}: {cut} of {drafted} tokens are verified");
        }
    }
}

/// Returns the number of verified tokens.
fn responses_have_the_targets_distribution(head: HeadConfig, min_survival: f64) -> usize {
    let world = World::random(41, 5);
    let drafter = world.drafter_with(head, 3 - usize::from(head.predicts_from_anchor()), false, 4);
    let prompt = vec![1, 3, 0];
    let temperature = 1.3;
    let texts: Vec<[u32; 4]> = (0..625).map(|n| [n / 125, n / 25 % 5, n / 5 % 5, n % 5]).collect();
    let rows: Vec<i32> = texts.iter().flat_map(|text| prompt.iter().chain(text)).map(|&id| id as i32).collect();
    let logits = world.target.trace(&Rows::new(&rows, &[7; 625], 7).unwrap()).unwrap().logits;
    let shares = (logits.to_kind(Kind::Double) / temperature).softmax(-1, Kind::Double);
    let mut expected = vec![0.0; 25];
    for (row, text) in texts.iter().enumerate() {
        let of = |at: usize| shares.double_value(&[row as i64, at as i64 + 2, text[at].into()]);
        expected[row / 5 % 25] += (0..4).map(of).product::<f64>();
    }
    assert!((expected.iter().sum::<f64>() - 1.0).abs() < 1e-4);
    let (mut found, mut accepted, mut drafted) = (vec![0u32; 25], 0, 0);
    let settings = Settings { min_survival, ..settings(temperature, 9) };
    for said in speculative(&world.target, &drafter, &vec![prompt; 800], &settings).unwrap() {
        let cell = said.tokens[1..3].iter().fold(0, |cell, &id| cell * 5 + id as usize);
        found[cell] += 1;
        accepted += said.steps.iter().map(|step| step.accepted).sum::<usize>();
        drafted += said.steps.iter().map(|step| step.drafted).sum::<usize>();
    }
    assert!(accepted > drafted / 10 && accepted < drafted * 9 / 10, "both ways are taken: {accepted} of {drafted}");
    fits(&format!("responses of {head:?} cut at {min_survival}"), &found, &expected);
    drafted
}
