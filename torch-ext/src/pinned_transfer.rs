//! Asynchronous transfers between host and GPU, through two pinned buffers in turn, on a separate stream.
//!
//! A copy from unpinned memory goes through buffers of the driver: slower, and the host waits for all earlier work in
//! the stream. Pinning the tensors themselves would pin gigabytes, in sizes that rarely repeat.

use crate::Error;
use crate::streams::{Event, Stream, copy, pinned};
use tch::{Device, Kind, Tensor};

/// Size of a buffer: some milliseconds of copying, so the cost of a call is negligible.
const BUFFER_BYTES: usize = 32 << 20;

/// Transfer path between the host and one GPU. Transfers one tensor at a time.
pub struct PinnedTransfer {
    /// Device of the transferred tensors; differs from `device` in tests only.
    tensor_device: Device,
    /// GPU of the stream.
    device: Device,
    stream: Stream,
    buffers: [Buffer; 2],
    /// True after a failed copy, which leaves the buffers undefined.
    failed: bool,
}

struct Buffer {
    bytes: Tensor,
    /// Event after the last copy that used the buffer.
    used: Option<Event>,
}

/// Tensor whose copy to a GPU is pending.
#[derive(Debug)]
pub struct PendingCopy {
    tensor: Tensor,
    device: Device,
    copied: Event,
}

impl PinnedTransfer {
    /// Creates a transfer path; `None` if `device` is not a GPU.
    ///
    /// # Errors
    /// Returns an error if the GPU does not exist or memory cannot be pinned.
    pub fn new(device: Device) -> Result<Option<PinnedTransfer>, Error> {
        let Some(stream) = Stream::from_pool(device)? else { return Ok(None) };
        Ok(Some(PinnedTransfer::with_buffers([pinned(BUFFER_BYTES)?, pinned(BUFFER_BYTES)?], device, device, stream)))
    }

    /// Uses `buffers` of equal length. In tests the transferred tensors are in host memory.
    fn with_buffers(buffers: [Tensor; 2], tensor_device: Device, device: Device, stream: Stream) -> PinnedTransfer {
        PinnedTransfer {
            tensor_device,
            device,
            stream,
            buffers: buffers.map(|bytes| Buffer { bytes, used: None }),
            failed: false,
        }
    }

    /// Copies a tensor to the host and waits for it. The copy starts after the current work of this thread's stream,
    /// and does not delay later work in that stream.
    ///
    /// # Errors
    /// Returns an error if libtorch fails or an earlier copy failed.
    pub fn to_host(&mut self, tensor: &Tensor) -> Result<Tensor, Error> {
        self.unless_failed(|transfer| {
            let from = bytes_of(tensor)?;
            let copied = Tensor::f_empty(tensor.size(), (tensor.f_kind()?, Device::Cpu))?;
            let to = bytes_of(&copied)?;
            if let Some(current) = Stream::current(transfer.device)? {
                transfer.stream.wait_event(&Event::record(current)?)?;
            }
            let mut before: Option<Chunk> = None;
            for chunk in transfer.chunks(&from) {
                let buffer = transfer.wait_for_buffer(&chunk)?;
                // The GPU fills one buffer while the host empties the other.
                transfer.stream.run(|| copy(&buffer, &chunk.of(&from)?))??;
                transfer.mark_in_use(&chunk)?;
                if let Some(before) = before.replace(chunk) {
                    before.of(&to)?.f_copy_(&transfer.wait_for_buffer(&before)?)?;
                }
            }
            if let Some(last) = before {
                last.of(&to)?.f_copy_(&transfer.wait_for_buffer(&last)?)?;
            }
            Ok(copied)
        })
    }

    /// Copies a host tensor to the GPU, concurrently with its other work. Returns when the last chunk is queued.
    ///
    /// # Errors
    /// Returns an error if libtorch fails or an earlier copy failed.
    pub fn to_gpu(&mut self, tensor: &Tensor) -> Result<PendingCopy, Error> {
        // Allocated on the transfer stream, which writes it first. If memory is short, nothing has started.
        let sent = self.stream.run(|| Tensor::f_empty(tensor.size(), (tensor.f_kind()?, self.tensor_device)))??;
        self.unless_failed(|transfer| {
            let (from, to) = (bytes_of(tensor)?, bytes_of(&sent)?);
            for chunk in transfer.chunks(&from) {
                let mut buffer = transfer.wait_for_buffer(&chunk)?;
                buffer.f_copy_(&chunk.of(&from)?)?;
                transfer.stream.run(|| copy(&chunk.of(&to)?, &buffer))??;
                transfer.mark_in_use(&chunk)?;
            }
            Ok(PendingCopy { tensor: sent, device: transfer.device, copied: Event::record(transfer.stream)? })
        })
    }

    fn chunks(&self, bytes: &Tensor) -> impl Iterator<Item = Chunk> + use<> {
        let (all, each) = (bytes.numel(), self.buffers[0].bytes.numel().max(1));
        (0..all.div_ceil(each)).map(move |number| {
            let from = number * each;
            Chunk { buffer: number % 2, from: from as i64, length: each.min(all - from) as i64 }
        })
    }

    /// Part of the buffer for a chunk, after the last copy that used the buffer.
    fn wait_for_buffer(&mut self, chunk: &Chunk) -> Result<Tensor, Error> {
        let buffer = &mut self.buffers[chunk.buffer];
        if let Some(used) = buffer.used.take() {
            used.wait()?;
        }
        Ok(buffer.bytes.f_narrow(0, 0, chunk.length)?)
    }

    /// Marks the buffer of a chunk as used by the copy that was queued last.
    fn mark_in_use(&mut self, chunk: &Chunk) -> Result<(), Error> {
        self.buffers[chunk.buffer].used = Some(Event::record(self.stream)?);
        Ok(())
    }

    fn unless_failed<T>(&mut self, work: impl FnOnce(&mut PinnedTransfer) -> Result<T, Error>) -> Result<T, Error> {
        if self.failed {
            return Err(Error::Unsuitable("an earlier copy between host and GPU failed".into()));
        }
        // Set first, because `work` may panic.
        self.failed = true;
        let done = work(self);
        self.failed = done.is_err();
        done
    }
}

impl PendingCopy {
    /// Returns the tensor for work on this thread's stream, which waits for the copy; the host does not.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn into_tensor(self) -> Result<Tensor, Error> {
        if let Some(stream) = Stream::current(self.device)? {
            stream.wait_event(&self.copied)?;
            stream.record_use(&self.tensor)?;
        }
        Ok(self.tensor)
    }
}

/// Part of a transfer, at most as long as a buffer.
struct Chunk {
    /// Index of its buffer.
    buffer: usize,
    from: i64,
    length: i64,
}

impl Chunk {
    fn of(&self, bytes: &Tensor) -> Result<Tensor, Error> {
        Ok(bytes.f_narrow(0, self.from, self.length)?)
    }
}

/// Bytes of a tensor: a view if it is contiguous, else a copy.
fn bytes_of(tensor: &Tensor) -> Result<Tensor, Error> {
    Ok(tensor.f_contiguous()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi;
    use std::ffi::CStr;

    const CPU: Device = Device::Cpu;

    /// Transfer path to the third fake GPU; its memory is host memory.
    fn transfer(buffer: i64) -> PinnedTransfer {
        // SAFETY: registers a table that lives as long as the process.
        unsafe { ffi::draftmill_fake_gpus() };
        let gpu = Device::Cuda(3);
        let stream = Stream::from_pool(gpu).unwrap().unwrap();
        let buffers = [(); 2].map(|()| Tensor::full([buffer], 99, (Kind::Uint8, CPU)));
        PinnedTransfer::with_buffers(buffers, CPU, gpu, stream)
    }

    /// Requests to the fake GPUs since the last call.
    fn log() -> Vec<String> {
        // SAFETY: a thread-local C string, copied before the next call.
        let text = unsafe { CStr::from_ptr(ffi::draftmill_fake_log()) }.to_str().unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn bytes(count: i64) -> Tensor {
        (Tensor::arange(count, (Kind::Int64, CPU)) * 7 + 1).to_kind(Kind::Uint8)
    }

    #[test]
    fn tensors_are_copied_in_both_directions() {
        for buffer in [1, 8, 24, 1 << 10] {
            let mut transfer = transfer(buffer);
            for kind in [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Int64] {
                for size in [&[][..], &[0, 4], &[1], &[2, 3], &[31, 5], &[5, 3, 4]] {
                    let count: i64 = size.iter().product();
                    let tensor = (Tensor::arange(count, (Kind::Double, CPU)) - 7.25).reshape(size).to_kind(kind);
                    let transposed = tensor.reshape([-1, size.last().copied().unwrap_or(1).max(1)]).transpose(0, 1);
                    for tensor in [tensor, transposed] {
                        let there = transfer.to_gpu(&tensor).unwrap().into_tensor().unwrap();
                        let back = transfer.to_host(&tensor).unwrap();
                        for copy in [there, back] {
                            assert!(copy.equal(&tensor), "{kind:?} {size:?} by {buffer} bytes");
                            assert!(copy.numel() == 0 || copy.data_ptr() != tensor.data_ptr());
                        }
                    }
                }
            }
        }
    }

    /// Ten bytes through buffers of four: the third chunk reuses the first buffer.
    #[test]
    fn to_gpu_reuses_a_buffer_only_after_its_copy() {
        let mut transfer = transfer(4);
        let [current, own] = ["stream 3.0", "stream 3.1"];
        let [enter, leave] = [own, current].map(|stream| format!("enter {stream}"));
        let event = |number| format!("event {number} in {own}");
        let pending = transfer.to_gpu(&bytes(10)).unwrap();
        let chunk = |number| [enter.clone(), leave.clone(), event(number)];
        let mut want = vec![enter.clone(), leave.clone()];
        want.extend(chunk(1).into_iter().chain(chunk(2)));
        want.push("host waits for event 1".into());
        want.extend(chunk(3));
        want.push(event(4));
        assert_eq!(log(), want);
        assert!(pending.into_tensor().unwrap().equal(&bytes(10)));
        assert_eq!(log(), [format!("{current} waits for event 4"), format!("{current} uses")]);
        // The next transfer waits for the last use of the buffer.
        transfer.to_gpu(&bytes(3)).unwrap();
        assert_eq!(log()[2], "host waits for event 3");
    }

    #[test]
    fn to_host_reads_a_buffer_only_after_its_copy() {
        let mut transfer = transfer(4);
        let [current, own] = ["stream 3.0", "stream 3.1"];
        let [enter, leave] = [own, current].map(|stream| format!("enter {stream}"));
        assert!(transfer.to_host(&bytes(10)).unwrap().equal(&bytes(10)));
        let chunk = |number| [enter.clone(), leave.clone(), format!("event {number} in {own}")];
        let mut want = vec![format!("event 1 in {current}"), format!("{own} waits for event 1")];
        want.extend(chunk(2).into_iter().chain(chunk(3)));
        want.push("host waits for event 2".into());
        want.extend(chunk(4));
        want.extend(["host waits for event 3".into(), "host waits for event 4".into()]);
        assert_eq!(log(), want);
    }

    #[test]
    fn no_copy_starts_after_a_failed_one() {
        let mut transfer = transfer(4);
        // The second buffer has the wrong dtype and is rejected.
        transfer.buffers[1].bytes = Tensor::zeros([4], (Kind::Float, CPU));
        assert!(transfer.to_host(&bytes(3)).is_ok() && transfer.to_gpu(&bytes(4)).is_ok());
        assert!(transfer.to_host(&bytes(5)).is_err());
        for after in [transfer.to_host(&bytes(3)).map(drop), transfer.to_gpu(&bytes(3)).map(drop)] {
            let Err(Error::Unsuitable(text)) = after else { panic!("{after:?}") };
            assert!(text.contains("an earlier copy"), "{text}");
        }
    }

    #[test]
    fn only_a_gpu_has_a_transfer_path() {
        assert!(PinnedTransfer::new(CPU).unwrap().is_none());
        assert!(PinnedTransfer::new(Device::Cuda(4096)).is_err());
    }
}
