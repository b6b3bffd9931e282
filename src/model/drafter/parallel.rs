//! Parallel map over CPU threads: each thread computes whole items, instead of synchronising in every operation.

use crate::model::ModelError;

/// Returns `work` of each item. Several items run in parallel, each on one thread from start to end; a single item runs
/// on the calling thread, with multi-threaded operations.
///
/// Threads that share each operation wait for the slowest of them thousands of times per step, and long if another
/// process preempts one. Threads that run whole items synchronise once.
///
/// # Errors
/// Returns the first error in item order.
///
/// # Safety
/// A tensor of tch may be read by many threads but written by one only: `work` must not write to what it captures.
pub unsafe fn map_on_threads<I, T: Send>(
    items: &[I],
    work: impl Fn(&I) -> Result<T, ModelError>,
) -> Result<Vec<T>, ModelError> {
    if let [item] = items {
        return Ok(vec![work(item)?]);
    }
    let shared = SharedRef((items, work));
    let results = draftmill_torch_ext::parallel_map(items.len(), |index| {
        let SharedRef((items, work)) = &shared;
        work(&items[index])
    });
    results?.into_iter().collect()
}

/// Reference that many threads read.
struct SharedRef<T>(T);

// SAFETY: the caller of `map_on_threads` guarantees that nothing is written.
unsafe impl<T> Sync for SharedRef<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_item_order_and_the_first_error_is_returned() {
        let double = |item: &u32| Ok(item * 2);
        // SAFETY: captures nothing.
        assert_eq!(unsafe { map_on_threads(&[1, 2, 3], double) }.unwrap(), [2, 4, 6]);
        // SAFETY: as above.
        assert_eq!(unsafe { map_on_threads(&[7], double) }.unwrap(), [14]);
        let odd = |item: &u32| match item % 2 {
            0 => Ok(*item),
            _ => Err(ModelError::Input(format!("{item} is odd"))),
        };
        // SAFETY: as above.
        let error = unsafe { map_on_threads(&[2, 4, 5, 7], odd) }.unwrap_err();
        assert_eq!(error.to_string(), "5 is odd");
    }
}
