//! Length buckets: optimal bounds, the bucket of a sample, and the cost of padding.

use crate::messages::types::BucketId;
use thiserror::Error;

/// Limit on the number of buckets, set by [`BucketId`].
pub const MAX_BUCKETS: usize = BucketId::MAX as usize + 1;

/// Error in bucket bounds.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BoundsError {
    #[error("there are no bucket bounds; give at least one, no smaller than the longest sample ({longest} tokens)")]
    None { longest: u32 },
    #[error("there are {count} bucket bounds; give at most {MAX_BUCKETS}")]
    TooMany { count: usize },
    #[error("bucket bound {number} is 0; every bound must be at least 1 token", number = index + 1)]
    Zero { index: usize },
    #[error(
        "bucket bound {number} is {bound}, after {previous}; list the bounds in ascending order, each once",
        number = index + 1
    )]
    NotAscending { index: usize, previous: u32, bound: u32 },
    #[error(
        "the last bucket bound is {last}, but the longest sample has {longest} tokens; raise the last bound to at least \
         {longest}, or prepare the data with a smaller max_len"
    )]
    TooShort { last: u32, longest: u32 },
}

/// Returns the bounds of at most `buckets` buckets (0 counts as 1) that minimise the padded tokens when every sample is
/// padded to the bound of its bucket. Each bound is the longest sample of its bucket, ascending. Empty without samples.
///
/// The result is exact. With the distinct lengths `l_1 < … < l_d` and `c_i` samples no longer than `l_i`, the minimal
/// total `T_b(i)` for those `c_i` samples in `b` buckets is `min over m < i of T_{b-1}(m) + (c_i - c_m) * l_i`. The
/// best `m` never decreases with `i`, because the last bucket's cost satisfies the quadrangle inequality. Each layer is
/// therefore solved by divide and conquer: O(n log n) to sort, then O(buckets * d log d).
pub fn optimal_bounds(lengths: &[u32], buckets: usize) -> Vec<u32> {
    let histogram = Histogram::new(lengths);
    let distinct = histogram.lengths.len() - 1;
    if distinct == 0 {
        return Vec::new();
    }
    // One more bucket always saves something while a bucket holds two lengths, so "at most" is reached exactly.
    let buckets = buckets.clamp(1, MAX_BUCKETS.min(distinct));
    let mut total: Vec<u64> = (0..=distinct).map(|i| histogram.cost(0, i)).collect();
    let mut cuts = Vec::with_capacity(buckets);
    for bucket in 2..=buckets {
        let mut layer = Layer {
            histogram: &histogram,
            previous: &total,
            fewest: bucket - 1,
            total: vec![u64::MAX; distinct + 1],
            cut: vec![0; distinct + 1],
        };
        layer.solve(bucket, distinct, bucket - 1, distinct - 1);
        let Layer { total: solved, cut, .. } = layer;
        total = solved;
        cuts.push(cut);
    }

    let mut last = distinct;
    let mut bounds = vec![histogram.lengths[last]];
    for cut in cuts.iter().rev() {
        last = cut[last] as usize;
        bounds.push(histogram.lengths[last]);
    }
    bounds.reverse();
    bounds
}

/// Returns the bucket of a sample: the first whose bound is at least `length`. Returns `None` if the sample is longer
/// than every bound. `bounds` must be ascending.
pub fn bucket_of(bounds: &[u32], length: u32) -> Option<BucketId> {
    let bucket = bounds.partition_point(|&bound| bound < length);
    if bucket < bounds.len() { BucketId::try_from(bucket).ok() } else { None }
}

/// Checks that bounds are ascending, at least 1, no more than [`MAX_BUCKETS`], and cover the longest sample.
///
/// # Errors
///
/// Names the first bound that violates this.
pub fn check_bounds(bounds: &[u32], longest: u32) -> Result<(), BoundsError> {
    let Some(&last) = bounds.last() else { return Err(BoundsError::None { longest }) };
    if bounds.len() > MAX_BUCKETS {
        return Err(BoundsError::TooMany { count: bounds.len() });
    }
    if bounds[0] == 0 {
        return Err(BoundsError::Zero { index: 0 });
    }
    if let Some(at) = bounds.windows(2).position(|pair| pair[0] >= pair[1]) {
        return Err(BoundsError::NotAscending { index: at + 1, previous: bounds[at], bound: bounds[at + 1] });
    }
    if last < longest {
        return Err(BoundsError::TooShort { last, longest });
    }
    Ok(())
}

/// Returns the fraction of token slots, in 0..1, that is padding if every sample is padded to the bound of its bucket.
/// Returns `None` without tokens, or if a sample is longer than every bound. A plan wastes no more than this, because
/// each job is padded to its own longest row.
pub fn padding_share(bounds: &[u32], lengths: &[u32]) -> Option<f64> {
    let mut real = 0u64;
    let mut padded = 0u64;
    for &length in lengths {
        real += u64::from(length);
        padded += u64::from(bounds[usize::from(bucket_of(bounds, length)?)]);
    }
    share_of_padding(real, padded)
}

/// Returns the fraction of `padded` token slots that are not `real` tokens, in 0..1; `None` without slots.
pub fn share_of_padding(real: u64, padded: u64) -> Option<f64> {
    (padded > 0).then(|| (padded - real) as f64 / padded as f64)
}

/// Distinct lengths in ascending order, each with the number of samples that are no longer. Entry 0 stands for "none".
struct Histogram {
    lengths: Vec<u32>,
    samples: Vec<u64>,
}

impl Histogram {
    fn new(lengths: &[u32]) -> Self {
        let mut sorted = lengths.to_vec();
        sorted.sort_unstable();
        let mut histogram = Histogram { lengths: vec![0], samples: vec![0] };
        let mut counted = 0;
        for run in sorted.chunk_by(|a, b| a == b) {
            counted += run.len() as u64;
            histogram.lengths.push(run[0]);
            histogram.samples.push(counted);
        }
        histogram
    }

    /// Returns the padded tokens of one bucket with the distinct lengths after `from`, up to and including `to`.
    fn cost(&self, from: usize, to: usize) -> u64 {
        (self.samples[to] - self.samples[from]) * u64::from(self.lengths[to])
    }
}

/// Layer of the recurrence: from the minimal totals with one bucket fewer to those with this many.
struct Layer<'a> {
    histogram: &'a Histogram,
    previous: &'a [u64],
    /// Minimum of distinct lengths in the earlier buckets: one each.
    fewest: usize,
    total: Vec<u64>,
    /// Last distinct length of the previous bucket, for each entry.
    cut: Vec<u32>,
}

impl Layer<'_> {
    /// Solves the entries `first..=last`, whose best cuts are in `low..=high`.
    fn solve(&mut self, first: usize, last: usize, low: usize, high: usize) {
        if first > last {
            return;
        }
        let middle = first + (last - first) / 2;
        let mut best = low;
        for cut in low.max(self.fewest)..=high.min(middle - 1) {
            let total = self.previous[cut] + self.histogram.cost(cut, middle);
            if total < self.total[middle] {
                self.total[middle] = total;
                best = cut;
            }
        }
        self.cut[middle] = best as u32;
        self.solve(first, middle - 1, low, best);
        self.solve(middle + 1, last, best, high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn padded(bounds: &[u32], lengths: &[u32]) -> u64 {
        lengths.iter().map(|&l| u64::from(bounds[usize::from(bucket_of(bounds, l).unwrap())])).sum()
    }

    /// Returns the minimal total over every choice of bounds among the occurring lengths.
    fn brute_force(lengths: &[u32], buckets: usize) -> u64 {
        let mut distinct = lengths.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let longest = distinct.pop().unwrap();
        (0..1u32 << distinct.len())
            .filter(|chosen| (chosen.count_ones() as usize) < buckets)
            .map(|chosen| {
                let mut bounds: Vec<u32> =
                    (0..distinct.len()).filter(|i| chosen >> i & 1 == 1).map(|i| distinct[i]).collect();
                bounds.push(longest);
                padded(&bounds, lengths)
            })
            .min()
            .unwrap()
    }

    fn few_lengths() -> impl Strategy<Value = Vec<u32>> {
        prop::collection::vec(1u32..5000, 1..10)
            .prop_flat_map(|pool| prop::collection::vec(prop::sample::select(pool), 1..60))
    }

    proptest! {
        #[test]
        fn optimum_equals_brute_force(lengths in few_lengths(), buckets in 1usize..12) {
            let bounds = optimal_bounds(&lengths, buckets);
            prop_assert!(bounds.len() <= buckets);
            prop_assert_eq!(check_bounds(&bounds, *lengths.iter().max().unwrap()), Ok(()));
            prop_assert_eq!(padded(&bounds, &lengths), brute_force(&lengths, buckets));
        }

        #[test]
        fn divide_and_conquer_equals_the_plain_recurrence(
            lengths in prop::collection::vec(1u32..300, 1..400),
            buckets in 1usize..20,
        ) {
            let h = Histogram::new(&lengths);
            let distinct = h.lengths.len() - 1;
            let mut total: Vec<u64> = (0..=distinct).map(|i| h.cost(0, i)).collect();
            for _ in 1..buckets {
                total = (0..=distinct)
                    .map(|i| (0..i).map(|m| total[m] + h.cost(m, i)).chain([total[i]]).min().unwrap())
                    .collect();
            }
            prop_assert_eq!(padded(&optimal_bounds(&lengths, buckets), &lengths), total[distinct]);
        }

        #[test]
        fn bucket_is_the_first_that_fits(lengths in few_lengths(), buckets in 1usize..6, length in 0u32..6000) {
            let bounds = optimal_bounds(&lengths, buckets);
            let expected = bounds.iter().position(|&b| b >= length).map(|b| b as BucketId);
            prop_assert_eq!(bucket_of(&bounds, length), expected);
        }
    }

    #[test]
    fn as_many_buckets_as_lengths_pad_nothing() {
        let lengths = [7, 3, 3, 9, 7];
        assert_eq!(optimal_bounds(&lengths, 50), [3, 7, 9]);
        assert_eq!(padding_share(&[3, 7, 9], &lengths), Some(0.0));
        assert_eq!(optimal_bounds(&lengths, 0), [9], "no bucket counts as one");
        assert_eq!(padding_share(&[9], &lengths), Some(16.0 / 45.0));
        assert_eq!(optimal_bounds(&[], 4), []);
        assert_eq!(padding_share(&[9], &[]), None);
        assert_eq!(padding_share(&[9], &[10]), None);
    }

    #[test]
    fn totals_beyond_32_bits_are_exact() {
        let lengths = [u32::MAX, u32::MAX, u32::MAX - 1, 5];
        assert_eq!(optimal_bounds(&lengths, 2), [5, u32::MAX]);
    }

    #[test]
    fn bad_bounds_are_named() {
        let text = |bounds: &[u32]| check_bounds(bounds, 100).unwrap_err().to_string();
        assert!(text(&[]).contains("at least one, no smaller than the longest sample (100 tokens)"));
        assert!(text(&[0, 100]).contains("bound 1 is 0"));
        assert!(text(&[10, 50, 50, 100]).contains("bound 3 is 50, after 50"));
        assert!(text(&[10, 99]).contains("last bucket bound is 99, but the longest sample has 100"));
        let many: Vec<u32> = (1..=MAX_BUCKETS as u32 + 1).collect();
        assert!(text(&many).contains("65537 bucket bounds; give at most 65536"));
        assert_eq!(check_bounds(&[100], 100), Ok(()));
    }
}
