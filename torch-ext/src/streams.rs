//! A GPU's queues of work and marks in them, and numbers that come to the host while the work goes on.

use crate::{Error, done, ffi, number, owned};
use std::ptr;
use tch::{Device, Kind, Tensor};

/// One of a GPU's queues of work: what is in it is done in order, and beside what is in others. Whatever nobody sent elsewhere is in
/// the GPU's first one, from whichever thread it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(ffi::Stream);

/// A mark in a stream, which is passed when all that was in the stream before it is done.
#[derive(Debug)]
pub struct Event(*mut ffi::Event);

// SAFETY: libtorch's event is a handle of the driver, which any thread may use; this one has no alias.
unsafe impl Send for Event {}

/// A number on its way to the host. Whoever waits for it waits for what was in the stream before, and for nothing after it.
#[derive(Debug)]
pub struct Reading {
    /// One f64.
    value: Tensor,
    /// Once this is passed; of a number that stays where it is there is none.
    arrived: Option<Event>,
}

impl Stream {
    /// Where this thread's work for a GPU goes. Of any other device there is none.
    pub fn current(device: Device) -> Result<Option<Stream>, Error> {
        // SAFETY: takes a number and fills a struct; a number that names no GPU is an error.
        Stream::of(device, |gpu, stream| unsafe { ffi::draftmill_stream_current(gpu, stream) })
    }

    /// Another one of a GPU; of any other device there is none. libtorch has 32 of each GPU and gives them out in turns, for good.
    pub fn another(device: Device) -> Result<Option<Stream>, Error> {
        // SAFETY: as above.
        Stream::of(device, |gpu, stream| unsafe { ffi::draftmill_stream_new(gpu, stream) })
    }

    /// Does `work` with this stream for this thread's current one.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> Result<T, Error> {
        let _entered = Entered { before: enter(self.0)? };
        Ok(work())
    }

    /// What comes into this stream from now on waits until the event is passed.
    pub fn waits_for(self, event: &Event) -> Result<(), Error> {
        // SAFETY: a stream that libtorch gave, and a live event.
        done(unsafe { ffi::draftmill_stream_wait(&self.0, event.0) })
    }

    /// Keeps the memory of a tensor that another stream made until what is in this one now is done, however early it is dropped.
    pub fn uses(self, tensor: &Tensor) -> Result<(), Error> {
        // SAFETY: as above, and a live tensor.
        done(unsafe { ffi::draftmill_stream_uses(&self.0, tensor.as_ptr()) })
    }

    fn of(device: Device, ask: impl FnOnce(i32, *mut ffi::Stream) -> i32) -> Result<Option<Stream>, Error> {
        let Device::Cuda(index) = device else { return Ok(None) };
        let mut stream = ffi::Stream::default();
        done(ask(number(index), &mut stream))?;
        Ok(Some(Stream(stream)))
    }
}

fn enter(stream: ffi::Stream) -> Result<ffi::Stream, Error> {
    let mut before = ffi::Stream::default();
    // SAFETY: a stream that libtorch gave.
    done(unsafe { ffi::draftmill_stream_enter(&stream, &mut before) })?;
    Ok(before)
}

/// Goes back at its end, also when work panics.
struct Entered {
    before: ffi::Stream,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // It was entered before, so that it exists.
        let _ = enter(self.before);
    }
}

impl Event {
    /// Behind all that is in the stream now.
    pub fn in_stream(stream: Stream) -> Result<Event, Error> {
        let mut event = ptr::null_mut();
        // SAFETY: a stream that libtorch gave; what comes back is ours alone.
        done(unsafe { ffi::draftmill_event_record(&stream.0, &mut event) })?;
        Ok(Event(event))
    }

    pub fn is_passed(&self) -> Result<bool, Error> {
        let mut passed = false;
        // SAFETY: a live event.
        done(unsafe { ffi::draftmill_event_passed(self.0, &mut passed) })?;
        Ok(passed)
    }

    /// Blocks this thread until it is.
    pub fn wait(&self) -> Result<(), Error> {
        // SAFETY: a live event.
        done(unsafe { ffi::draftmill_event_wait(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours alone, and dropped once. What the driver says of it is no news to anybody.
        let _ = unsafe { ffi::draftmill_event_drop(self.0) };
    }
}

impl Reading {
    /// Of one f64 without dimensions.
    pub fn begin(number: &Tensor) -> Reading {
        // Where nothing can be pinned, or there is no GPU, whoever asks for the value waits for all that is in the stream by then.
        Reading::beside(number).unwrap_or_else(|_| Reading { value: number.shallow_clone(), arrived: None })
    }

    fn beside(number: &Tensor) -> Result<Reading, Error> {
        let stream = Stream::current(number.device())?;
        let stream = stream.ok_or_else(|| Error::Unsuitable("what is no GPU has nothing to wait for".into()))?;
        let value = pinned(size_of::<f64>())?.f_view_dtype(Kind::Double)?.f_view([0i64; 0])?;
        copy(&value, number)?;
        Ok(Reading { value, arrived: Some(Event::in_stream(stream)?) })
    }

    /// Blocks this thread until it is there.
    pub fn value(self) -> Result<f64, Error> {
        if let Some(arrived) = &self.arrived {
            arrived.wait()?;
        }
        Ok(self.value.f_double_value(&[])?)
    }
}

/// Memory of the host that a GPU reads and writes by itself: so many bytes, whatever they were. The machine cannot put it aside, and
/// libtorch rounds it up to a power of two and keeps it: for a few buffers that are used again and again. Needs a GPU.
pub(crate) fn pinned(bytes: usize) -> Result<Tensor, Error> {
    let mut memory = ptr::null_mut();
    // SAFETY: takes a number and gives one tensor; one that is too large is an error.
    done(unsafe { ffi::draftmill_pinned(i64::try_from(bytes).unwrap_or(i64::MAX), &mut memory) })?;
    Ok(owned(memory))
}

/// Copies what is in `from` in this thread's stream. The host waits neither for it nor for what is in the stream before, where its side
/// is pinned; what it writes there meanwhile may be what is copied.
pub(crate) fn copy(to: &Tensor, from: &Tensor) -> Result<(), Error> {
    // SAFETY: two live tensors; sizes and kinds are compared inside.
    done(unsafe { ffi::draftmill_copy(to.as_ptr(), from.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const GPU: Device = Device::Cuda(5);

    #[test]
    fn work_is_in_its_stream_and_what_comes_after_it_where_it_was_also_after_a_panic() {
        // SAFETY: registers a table that lives as long as the process.
        unsafe { ffi::draftmill_fake_gpus() };
        let current = || Stream::current(GPU).unwrap().unwrap();
        let (first, one, two) =
            (current(), Stream::another(GPU).unwrap().unwrap(), Stream::another(GPU).unwrap().unwrap());
        assert!(first != one && one != two && first != two);
        let inside = one.run(|| (current(), two.run(current).unwrap(), current())).unwrap();
        assert_eq!((inside, current()), ((one, two, one), first));
        let panicked = catch_unwind(AssertUnwindSafe(|| one.run(|| panic!("boom"))));
        assert!(panicked.is_err());
        assert_eq!(current(), first);
        let event = Event::in_stream(one).unwrap();
        assert_eq!(event.is_passed(), Ok(true));
        event.wait().unwrap();
    }

    #[test]
    fn a_number_of_the_host_is_there_at_once() {
        let number = Tensor::from(2.5f64);
        assert_eq!(Reading::begin(&number).value(), Ok(2.5));
        assert_eq!((Stream::current(Device::Cpu), Stream::another(Device::Cpu)), (Ok(None), Ok(None)));
    }

    #[test]
    fn a_copy_is_between_two_of_a_kind_and_size() {
        let [bytes, more] = [3i64, 4].map(|count| Tensor::zeros([count], (Kind::Uint8, Device::Cpu)));
        let floats = Tensor::ones([3], (Kind::Float, Device::Cpu));
        for other in [&more, &floats] {
            assert!(matches!(copy(&bytes, other), Err(Error::Unsuitable(_))));
        }
        copy(&floats, &Tensor::from_slice(&[1f32, 2.0, 3.0])).unwrap();
        assert_eq!(Vec::<f32>::try_from(&floats).unwrap(), [1.0, 2.0, 3.0]);
    }
}
