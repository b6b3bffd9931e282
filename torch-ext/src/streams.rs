//! CUDA streams and events, and asynchronous device-to-host scalar reads.

use crate::{Error, done, ffi, gpu_index, owned};
use std::ptr;
use tch::{Device, Kind, Tensor};

/// CUDA stream: a queue whose work runs in order, and concurrently with other streams. By default, work of every thread
/// goes to the GPU's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(ffi::Stream);

/// Event in a stream, complete when all earlier work of the stream is finished.
#[derive(Debug)]
pub struct Event(*mut ffi::Event);

// SAFETY: libtorch's event is a driver handle that any thread may use; this one has no alias.
unsafe impl Send for Event {}

/// Asynchronous read of a device scalar. Waiting for it waits for earlier work of the stream only.
#[derive(Debug)]
pub struct PendingScalar {
    /// One f64.
    value: Tensor,
    /// Event after the copy; `None` for a scalar that is not copied.
    copied: Option<Event>,
}

impl Stream {
    /// Current stream of this thread on a GPU; `None` for other devices.
    ///
    /// # Errors
    /// [`Error::Unsuitable`] if the GPU does not exist.
    pub fn current(device: Device) -> Result<Option<Stream>, Error> {
        // SAFETY: takes an index and fills a struct; an unknown GPU is an error.
        Stream::of(device, |gpu, stream| unsafe { ffi::draftmill_stream_current(gpu, stream) })
    }

    /// Next stream of the GPU's pool; `None` for other devices. libtorch has 32 streams per GPU and hands them out in
    /// turn, permanently.
    ///
    /// # Errors
    /// [`Error::Unsuitable`] if the GPU does not exist.
    pub fn from_pool(device: Device) -> Result<Option<Stream>, Error> {
        // SAFETY: as above.
        Stream::of(device, |gpu, stream| unsafe { ffi::draftmill_stream_new(gpu, stream) })
    }

    /// Runs `work` with this stream as the thread's current one.
    ///
    /// # Errors
    /// Returns an error if libtorch cannot switch streams.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> Result<T, Error> {
        let _entered = StreamGuard { before: enter(self.0)? };
        Ok(work())
    }

    /// Makes later work of this stream wait for the event.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn wait_event(self, event: &Event) -> Result<(), Error> {
        // SAFETY: a stream from libtorch, and a live event.
        done(unsafe { ffi::draftmill_stream_wait(&self.0, event.0) })
    }

    /// Delays reuse of a tensor of another stream until the current work of this stream is finished, even if it is
    /// dropped earlier.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn record_use(self, tensor: &Tensor) -> Result<(), Error> {
        // SAFETY: as above, and a live tensor.
        done(unsafe { ffi::draftmill_stream_uses(&self.0, tensor.as_ptr()) })
    }

    fn of(device: Device, ask: impl FnOnce(i32, *mut ffi::Stream) -> i32) -> Result<Option<Stream>, Error> {
        let Device::Cuda(index) = device else { return Ok(None) };
        let mut stream = ffi::Stream::default();
        done(ask(gpu_index(index), &mut stream))?;
        Ok(Some(Stream(stream)))
    }
}

fn enter(stream: ffi::Stream) -> Result<ffi::Stream, Error> {
    let mut before = ffi::Stream::default();
    // SAFETY: a stream from libtorch.
    done(unsafe { ffi::draftmill_stream_enter(&stream, &mut before) })?;
    Ok(before)
}

/// Restores the previous stream on drop, also after a panic.
struct StreamGuard {
    before: ffi::Stream,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        // The stream was current before, so it exists.
        let _ = enter(self.before);
    }
}

impl Event {
    /// Records an event after the current work of the stream.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn record(stream: Stream) -> Result<Event, Error> {
        let mut event = ptr::null_mut();
        // SAFETY: a stream from libtorch; the returned event has no other owner.
        done(unsafe { ffi::draftmill_event_record(&stream.0, &mut event) })?;
        Ok(Event(event))
    }

    /// True if the event is complete.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn is_complete(&self) -> Result<bool, Error> {
        let mut complete = false;
        // SAFETY: a live event.
        done(unsafe { ffi::draftmill_event_query(self.0, &mut complete) })?;
        Ok(complete)
    }

    /// Blocks this thread until the event is complete.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn wait(&self) -> Result<(), Error> {
        // SAFETY: a live event.
        done(unsafe { ffi::draftmill_event_wait(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the only owner, dropped once. A driver error has no remedy here.
        let _ = unsafe { ffi::draftmill_event_drop(self.0) };
    }
}

impl PendingScalar {
    /// Starts the read of one f64 without dimensions.
    pub fn start(scalar: &Tensor) -> PendingScalar {
        // Without pinned memory or a GPU, `value` waits for all work that is in the stream by then.
        PendingScalar::start_async(scalar)
            .unwrap_or_else(|_| PendingScalar { value: scalar.shallow_clone(), copied: None })
    }

    fn start_async(scalar: &Tensor) -> Result<PendingScalar, Error> {
        let stream = Stream::current(scalar.device())?;
        let stream = stream.ok_or_else(|| Error::Unsuitable("asynchronous reads need a GPU".into()))?;
        let value = pinned(size_of::<f64>())?.f_view_dtype(Kind::Double)?.f_view([0i64; 0])?;
        copy(&value, scalar)?;
        Ok(PendingScalar { value, copied: Some(Event::record(stream)?) })
    }

    /// Waits for the value.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn value(self) -> Result<f64, Error> {
        if let Some(copied) = &self.copied {
            copied.wait()?;
        }
        Ok(self.value.f_double_value(&[])?)
    }
}

/// Allocates uninitialised pinned host memory, which a GPU reads and writes directly. The system cannot swap it out.
/// libtorch rounds the size up to a power of two and caches it, so use it for a few long-lived buffers. Needs a GPU.
pub(crate) fn pinned(bytes: usize) -> Result<Tensor, Error> {
    let mut memory = ptr::null_mut();
    // SAFETY: takes a size and returns one tensor; a size that is too large is an error.
    done(unsafe { ffi::draftmill_pinned(i64::try_from(bytes).unwrap_or(i64::MAX), &mut memory) })?;
    Ok(owned(memory))
}

/// Copies `from` to `to` in this thread's stream. The host waits for nothing if its side is pinned, so it must not
/// write there until the copy is complete.
pub(crate) fn copy(to: &Tensor, from: &Tensor) -> Result<(), Error> {
    // SAFETY: two live tensors; C++ compares sizes and dtypes.
    done(unsafe { ffi::draftmill_copy(to.as_ptr(), from.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const GPU: Device = Device::Cuda(5);

    #[test]
    fn previous_stream_is_restored_even_after_a_panic() {
        // SAFETY: registers a table that lives as long as the process.
        unsafe { ffi::draftmill_fake_gpus() };
        let current = || Stream::current(GPU).unwrap().unwrap();
        let (first, one, two) =
            (current(), Stream::from_pool(GPU).unwrap().unwrap(), Stream::from_pool(GPU).unwrap().unwrap());
        assert!(first != one && one != two && first != two);
        let inside = one.run(|| (current(), two.run(current).unwrap(), current())).unwrap();
        assert_eq!((inside, current()), ((one, two, one), first));
        let panicked = catch_unwind(AssertUnwindSafe(|| one.run(|| panic!("boom"))));
        assert!(panicked.is_err());
        assert_eq!(current(), first);
        let event = Event::record(one).unwrap();
        assert_eq!(event.is_complete(), Ok(true));
        event.wait().unwrap();
    }

    #[test]
    fn host_scalar_is_read_at_once() {
        let number = Tensor::from(2.5f64);
        assert_eq!(PendingScalar::start(&number).value(), Ok(2.5));
        assert_eq!((Stream::current(Device::Cpu), Stream::from_pool(Device::Cpu)), (Ok(None), Ok(None)));
    }

    #[test]
    fn copy_needs_equal_size_and_dtype() {
        let [bytes, more] = [3i64, 4].map(|count| Tensor::zeros([count], (Kind::Uint8, Device::Cpu)));
        let floats = Tensor::ones([3], (Kind::Float, Device::Cpu));
        for other in [&more, &floats] {
            assert!(matches!(copy(&bytes, other), Err(Error::Unsuitable(_))));
        }
        copy(&floats, &Tensor::from_slice(&[1f32, 2.0, 3.0])).unwrap();
        assert_eq!(Vec::<f32>::try_from(&floats).unwrap(), [1.0, 2.0, 3.0]);
    }
}
