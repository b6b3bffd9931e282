//! Tensors between the host and a GPU beside what else that GPU does: in turns through two pinned buffers, on a stream of their own.
//!
//! A copy from memory that is not pinned goes through buffers of the driver, slower, and the host waits for all that was in the stream
//! before it. Pinning what is copied would be wrong the other way: it is gigabytes, of sizes that hardly come twice.

use crate::Error;
use crate::streams::{Event, Stream, copy, pinned};
use tch::{Device, Kind, Tensor};

/// Bytes of a buffer: some milliseconds of copying, beside which a call costs nothing.
const BUFFER: usize = 32 << 20;

/// The way from the host to one GPU and back. One tensor at a time.
pub struct Ferry {
    /// Where tensors on the far side lie.
    device: Device,
    /// The GPU's.
    far: Device,
    stream: Stream,
    buffers: [Buffer; 2],
    /// A copy failed half way: what is in the buffers is not known any more.
    lost: bool,
}

struct Buffer {
    bytes: Tensor,
    /// The copy that used it last is done when this is passed.
    used: Option<Event>,
}

/// A tensor that is on its way to a GPU.
#[derive(Debug)]
pub struct Arrival {
    tensor: Tensor,
    far: Device,
    all_there: Event,
}

impl Ferry {
    /// `None` where the device is no GPU: then there is no way to go.
    pub fn new(device: Device) -> Result<Option<Ferry>, Error> {
        let Some(stream) = Stream::another(device)? else { return Ok(None) };
        Ok(Some(Ferry::over([pinned(BUFFER)?, pinned(BUFFER)?], device, device, stream)))
    }

    /// With these bytes for buffers, of one length. In tests what is taken for the GPU's memory is not where its stream is.
    fn over(buffers: [Tensor; 2], device: Device, far: Device, stream: Stream) -> Ferry {
        Ferry { device, far, stream, buffers: buffers.map(|bytes| Buffer { bytes, used: None }), lost: false }
    }

    /// A copy on the host, all of it. The copying begins when what this thread's stream holds is done, and holds nothing up that comes
    /// into that stream later.
    pub fn to_host(&mut self, tensor: &Tensor) -> Result<Tensor, Error> {
        self.unless_lost(|ferry| {
            let from = bytes_of(tensor)?;
            let copied = Tensor::f_empty(tensor.size(), (tensor.f_kind()?, Device::Cpu))?;
            let to = bytes_of(&copied)?;
            if let Some(made) = Stream::current(ferry.far)? {
                ferry.stream.waits_for(&Event::in_stream(made)?)?;
            }
            let mut before: Option<Piece> = None;
            for piece in ferry.pieces(&from) {
                let buffer = ferry.emptied(&piece)?;
                // One buffer fills while the host empties the other.
                ferry.stream.run(|| copy(&buffer, &piece.of(&from)?))??;
                ferry.fill(&piece)?;
                if let Some(before) = before.replace(piece) {
                    before.of(&to)?.f_copy_(&ferry.emptied(&before)?)?;
                }
            }
            if let Some(last) = before {
                last.of(&to)?.f_copy_(&ferry.emptied(&last)?)?;
            }
            Ok(copied)
        })
    }

    /// Sends a tensor of the host to the GPU, beside what is done there. Gives it when the last piece is under way.
    pub fn to_gpu(&mut self, tensor: &Tensor) -> Result<Arrival, Error> {
        // The stream that writes it first is the one whose memory it is. Where there is no room nothing has begun.
        let sent = self.stream.run(|| Tensor::f_empty(tensor.size(), (tensor.f_kind()?, self.device)))??;
        self.unless_lost(|ferry| {
            let (from, to) = (bytes_of(tensor)?, bytes_of(&sent)?);
            for piece in ferry.pieces(&from) {
                let mut buffer = ferry.emptied(&piece)?;
                buffer.f_copy_(&piece.of(&from)?)?;
                ferry.stream.run(|| copy(&piece.of(&to)?, &buffer))??;
                ferry.fill(&piece)?;
            }
            Ok(Arrival { tensor: sent, far: ferry.far, all_there: Event::in_stream(ferry.stream)? })
        })
    }

    fn pieces(&self, bytes: &Tensor) -> impl Iterator<Item = Piece> + use<> {
        let (all, each) = (bytes.numel(), self.buffers[0].bytes.numel().max(1));
        (0..all.div_ceil(each)).map(move |number| {
            let from = number * each;
            Piece { buffer: number % 2, from: from as i64, length: each.min(all - from) as i64 }
        })
    }

    /// The part of a buffer that a piece takes, once the copy that used it last is done.
    fn emptied(&mut self, piece: &Piece) -> Result<Tensor, Error> {
        let buffer = &mut self.buffers[piece.buffer];
        if let Some(used) = buffer.used.take() {
            used.wait()?;
        }
        Ok(buffer.bytes.f_narrow(0, 0, piece.length)?)
    }

    /// The copy that is in the stream now uses the buffer of this piece.
    fn fill(&mut self, piece: &Piece) -> Result<(), Error> {
        self.buffers[piece.buffer].used = Some(Event::in_stream(self.stream)?);
        Ok(())
    }

    fn unless_lost<T>(&mut self, work: impl FnOnce(&mut Ferry) -> Result<T, Error>) -> Result<T, Error> {
        if self.lost {
            return Err(Error::Unsuitable("an earlier copy between host and GPU failed half way".into()));
        }
        // Not only after an error: work may panic.
        self.lost = true;
        let done = work(self);
        self.lost = done.is_err();
        done
    }
}

impl Arrival {
    /// The tensor, for work of this thread's stream, which waits for it. The host does not.
    pub fn taken(self) -> Result<Tensor, Error> {
        if let Some(stream) = Stream::current(self.far)? {
            stream.waits_for(&self.all_there)?;
            stream.uses(&self.tensor)?;
        }
        Ok(self.tensor)
    }
}

/// A part of what is copied, no longer than a buffer.
struct Piece {
    /// Which one it goes through.
    buffer: usize,
    from: i64,
    length: i64,
}

impl Piece {
    fn of(&self, bytes: &Tensor) -> Result<Tensor, Error> {
        Ok(bytes.f_narrow(0, self.from, self.length)?)
    }
}

/// Of a tensor that lies in order a view, of any other a copy.
fn bytes_of(tensor: &Tensor) -> Result<Tensor, Error> {
    Ok(tensor.f_contiguous()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi;
    use std::ffi::CStr;

    const CPU: Device = Device::Cpu;

    /// The way to the third GPU of those that do nothing; what would be its memory is the host's.
    fn ferry(buffer: i64) -> Ferry {
        // SAFETY: registers a table that lives as long as the process.
        unsafe { ffi::draftmill_fake_gpus() };
        let gpu = Device::Cuda(3);
        let stream = Stream::another(gpu).unwrap().unwrap();
        let buffers = [(); 2].map(|()| Tensor::full([buffer], 99, (Kind::Uint8, CPU)));
        Ferry::over(buffers, CPU, gpu, stream)
    }

    /// What the GPUs were asked for since the last time.
    fn told() -> Vec<String> {
        // SAFETY: a text of this thread that ends with a zero, copied before the next call.
        let text = unsafe { CStr::from_ptr(ffi::draftmill_fake_told()) }.to_str().unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn bytes(count: i64) -> Tensor {
        (Tensor::arange(count, (Kind::Int64, CPU)) * 7 + 1).to_kind(Kind::Uint8)
    }

    #[test]
    fn whatever_is_sent_arrives_both_ways() {
        for buffer in [1, 8, 24, 1 << 10] {
            let mut ferry = ferry(buffer);
            for kind in [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Int64] {
                for size in [&[][..], &[0, 4], &[1], &[2, 3], &[31, 5], &[5, 3, 4]] {
                    let count: i64 = size.iter().product();
                    let tensor = (Tensor::arange(count, (Kind::Double, CPU)) - 7.25).reshape(size).to_kind(kind);
                    let transposed = tensor.reshape([-1, size.last().copied().unwrap_or(1).max(1)]).transpose(0, 1);
                    for tensor in [tensor, transposed] {
                        let there = ferry.to_gpu(&tensor).unwrap().taken().unwrap();
                        let back = ferry.to_host(&tensor).unwrap();
                        for copy in [there, back] {
                            assert!(copy.equal(&tensor), "{kind:?} {size:?} by {buffer} bytes");
                            assert!(copy.numel() == 0 || copy.data_ptr() != tensor.data_ptr());
                        }
                    }
                }
            }
        }
    }

    /// Ten bytes through buffers of four: the third piece goes where the first one was.
    #[test]
    fn a_buffer_is_filled_again_when_the_gpu_has_read_it_and_work_waits_for_the_last_piece() {
        let mut ferry = ferry(4);
        let [work, beside] = ["stream 3.0", "stream 3.1"];
        let [enter, leave] = [beside, work].map(|stream| format!("enter {stream}"));
        let event = |number| format!("event {number} in {beside}");
        let arrival = ferry.to_gpu(&bytes(10)).unwrap();
        let piece = |number| [enter.clone(), leave.clone(), event(number)];
        let mut want = vec![enter.clone(), leave.clone()];
        want.extend(piece(1).into_iter().chain(piece(2)));
        want.push("host waits for event 1".into());
        want.extend(piece(3));
        want.push(event(4));
        assert_eq!(told(), want);
        assert!(arrival.taken().unwrap().equal(&bytes(10)));
        assert_eq!(told(), [format!("{work} waits for event 4"), format!("{work} uses")]);
        // The next one waits for the last that used the buffer.
        ferry.to_gpu(&bytes(3)).unwrap();
        assert_eq!(told()[2], "host waits for event 3");
    }

    #[test]
    fn the_host_reads_a_buffer_when_the_gpu_has_filled_it_and_the_copying_waits_for_what_makes_the_tensor() {
        let mut ferry = ferry(4);
        let [work, beside] = ["stream 3.0", "stream 3.1"];
        let [enter, leave] = [beside, work].map(|stream| format!("enter {stream}"));
        assert!(ferry.to_host(&bytes(10)).unwrap().equal(&bytes(10)));
        let piece = |number| [enter.clone(), leave.clone(), format!("event {number} in {beside}")];
        let mut want = vec![format!("event 1 in {work}"), format!("{beside} waits for event 1")];
        want.extend(piece(2).into_iter().chain(piece(3)));
        want.push("host waits for event 2".into());
        want.extend(piece(4));
        want.extend(["host waits for event 3".into(), "host waits for event 4".into()]);
        assert_eq!(told(), want);
    }

    #[test]
    fn after_a_copy_that_failed_half_way_nothing_is_sent_any_more() {
        let mut ferry = ferry(4);
        // Of another kind than bytes, the second buffer is refused.
        ferry.buffers[1].bytes = Tensor::zeros([4], (Kind::Float, CPU));
        assert!(ferry.to_host(&bytes(3)).is_ok() && ferry.to_gpu(&bytes(4)).is_ok());
        assert!(ferry.to_host(&bytes(5)).is_err());
        for after in [ferry.to_host(&bytes(3)).map(drop), ferry.to_gpu(&bytes(3)).map(drop)] {
            let Err(Error::Unsuitable(text)) = after else { panic!("{after:?}") };
            assert!(text.contains("failed half way"), "{text}");
        }
    }

    #[test]
    fn only_a_gpu_has_a_far_side() {
        assert!(Ferry::new(CPU).unwrap().is_none());
        assert!(Ferry::new(Device::Cuda(4096)).is_err());
    }
}
