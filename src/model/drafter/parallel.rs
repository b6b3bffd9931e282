//! Work that the threads of a CPU share by taking parts of it, instead of meeting at the end of every operation.

use crate::model::ModelError;

/// What `work` gives of each part. Several parts run side by side, each on one thread from its first operation to its last; a
/// single one runs here, its operations on all threads.
///
/// Threads that share each operation wait for the slowest of them every time, thousands of times a step, and for a thread that
/// another process keeps from its core they wait long. Threads that share parts meet once.
///
/// # Safety
/// tch's tensors may be read by many threads and written by one: `work` must not write to what it captures.
pub unsafe fn side_by_side<P, T: Send>(
    parts: &[P],
    work: impl Fn(&P) -> Result<T, ModelError>,
) -> Result<Vec<T>, ModelError> {
    if let [part] = parts {
        return Ok(vec![work(part)?]);
    }
    let all = Read((parts, work));
    let done = draftmill_torch_ext::each(parts.len(), |place| {
        let Read((parts, work)) = &all;
        work(&parts[place])
    });
    done?.into_iter().collect()
}

/// Read by many threads at once.
struct Read<T>(T);

// SAFETY: `side_by_side` promises that nobody writes.
unsafe impl<T> Sync for Read<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_in_order_and_the_first_error_is_told() {
        let double = |part: &u32| Ok(part * 2);
        // SAFETY: captures nothing.
        assert_eq!(unsafe { side_by_side(&[1, 2, 3], double) }.unwrap(), [2, 4, 6]);
        // SAFETY: the same.
        assert_eq!(unsafe { side_by_side(&[7], double) }.unwrap(), [14]);
        let odd = |part: &u32| match part % 2 {
            0 => Ok(*part),
            _ => Err(ModelError::Input(format!("{part} is odd"))),
        };
        // SAFETY: the same.
        let error = unsafe { side_by_side(&[2, 4, 5, 7], odd) }.unwrap_err();
        assert_eq!(error.to_string(), "5 is odd");
    }
}
