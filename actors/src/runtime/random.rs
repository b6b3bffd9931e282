//! Seeds and random draws that never change between releases: plans on disk depend on them.

use rand::Rng;

/// Returns the seed of an independent random stream. `seed` is the run's, `name` names the purpose of the stream, and
/// `words` identify its instance (an epoch, a job, a step).
///
/// Streams with different arguments are independent for every use in this project. The arguments are absorbed one by
/// one (the bytes of the name, the words, their number) into a 64-bit state by the output function of SplitMix64
/// (Steele, Lea, Flood 2014). The same function then produces the 32 bytes. Plans on disk depend on this function: it
/// must never change.
pub fn stream_seed(seed: u64, name: &str, words: &[u64]) -> [u8; 32] {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let absorbed = name.bytes().map(u64::from).chain(words.iter().copied()).chain([words.len() as u64]);
    let mut state = absorbed.fold(mix(seed), |state, word| mix(state.wrapping_add(GOLDEN) ^ word));
    let mut bytes = [0; 32];
    for chunk in bytes.chunks_exact_mut(8) {
        state = state.wrapping_add(GOLDEN);
        chunk.copy_from_slice(&mix(state).to_le_bytes());
    }
    bytes
}

/// Shuffles uniformly (Fisher-Yates). The shuffle of `rand` may change its values between releases.
pub fn shuffle<T>(items: &mut [T], rng: &mut impl Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(last as u64 + 1, rng) as usize);
    }
}

/// Returns a uniform number in `0..limit`; `limit` is at least 1 (Lemire 2019: multiply, and reject the few uneven
/// values).
pub(crate) fn below(limit: u64, rng: &mut impl Rng) -> u64 {
    let uneven = limit.wrapping_neg() % limit;
    loop {
        let product = u128::from(rng.next_u64()) * u128::from(limit);
        if product as u64 >= uneven {
            return (product >> 64) as u64;
        }
    }
}
