//! Sums and copies between several GPUs of this process by NCCL, whose library is opened when it is asked for.

use super::nccl_ffi::{Comm, FLOAT, NcclError, SUCCESS, SUM, Stream, Table};
use super::peer_copy;
use crate::model::ModelError;
use draftmill_actors::runtime::random::stream_seed;
use draftmill_torch_ext::Event;
use rand::RngExt;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use std::{
    ffi::c_int,
    ptr::null_mut,
    sync::mpsc::{RecvTimeoutError, sync_channel},
    thread,
    time::Duration,
};
use tch::{Device, Kind, Tensor};

/// NCCL's number of the first GPU, where sums go and from where copies come.
const FIRST: c_int = 0;
/// Values that a trial sends: 4 MiB, and no round number of them.
const TRIAL: usize = (1 << 20) + 3;
/// Largest number that a trial sends: f32 holds the sum of 256 of them exactly.
const LARGEST: i32 = 1 << 16;
/// A call takes milliseconds, of the largest drafters seconds. Where GPUs do not reach each other, or one is lost, it would wait for ever.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often one looks whether it is done.
const LOOK: Duration = Duration::from_micros(100);

impl From<tch::TchError> for NcclError {
    fn from(error: tch::TchError) -> NcclError {
        ModelError::from(error).into()
    }
}

impl From<draftmill_torch_ext::Error> for NcclError {
    fn from(error: draftmill_torch_ext::Error) -> NcclError {
        ModelError::from(error).into()
    }
}

impl NcclError {
    /// What helps.
    pub fn remedy(&self) -> String {
        match self {
            NcclError::Missing(_) => "fetch libtorch again, with CUDA, which brings it, or install libnccl2".into(),
            NcclError::Failed { .. } | NcclError::Model(_) => {
                "its own log (NCCL_DEBUG=INFO in the environment) tells why".into()
            }
            NcclError::Wrong | NcclError::Hangs(_) => {
                format!(
                    "set NCCL_P2P_DISABLE=1 in the environment, which goes by way of the host; or {}",
                    peer_copy::REMEDY
                )
            }
            NcclError::Unsuitable(_) => "give each drafter a GPU of its own (drafter.devices)".into(),
        }
    }
}

/// Several GPUs that compute one sum and share one copy; the first of them is where the sum goes and the copy comes from.
///
/// One call that fails is its end: what it began on some GPU is ended there, and every further call fails, too.
pub struct Communicator {
    table: Table,
    devices: Vec<Device>,
    /// One for each device; none once a call failed.
    comms: Vec<Comm>,
}

// SAFETY: any thread may call NCCL, one at a time, and a call takes `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Over these GPUs, tried out: what random whole numbers add up to, and their copies, are right. NCCL's own start has no bound in
    /// time, so this one gives it up where it does not come to an end.
    pub fn open(table: Table, devices: &[Device]) -> Result<Communicator, NcclError> {
        let devices = devices.to_vec();
        within(PATIENCE, move || Communicator::start(table, &devices))
    }

    /// The same on this thread, however long it takes.
    pub(crate) fn start(table: Table, devices: &[Device]) -> Result<Communicator, NcclError> {
        Communicator::new(table, devices)?.tried()
    }

    pub(crate) fn new(table: Table, devices: &[Device]) -> Result<Communicator, NcclError> {
        let numbers: Vec<c_int> = devices.iter().map(|&device| number(device)).collect();
        let mut comms = vec![null_mut(); devices.len()];
        // SAFETY: both lists have as many entries as is said. A number that names no GPU, or one twice, is an error.
        let code = unsafe { (table.comm_init_all)(comms.as_mut_ptr(), devices.len() as c_int, numbers.as_ptr()) };
        table.done("ncclCommInitAll", code)?;
        Ok(Communicator { table, devices: devices.to_vec(), comms })
    }

    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub fn version(&self) -> Result<String, NcclError> {
        self.table.version()
    }

    /// The sum of one tensor on each GPU, on the first one. In storage of its own: what was to be added is whole, whatever fails.
    pub fn reduce(&mut self, parts: &[Tensor]) -> Result<Tensor, NcclError> {
        self.fits(parts)?;
        let (first, count) = (&parts[0], parts[0].numel());
        let sum = first.f_empty_like()?;
        let (reduce, from) = (self.table.reduce, parts.iter().map(Tensor::data_ptr).collect::<Vec<_>>());
        let to = sum.data_ptr();
        // SAFETY: as many values of f32 on each GPU as is said, and as much room on the first one; others write nothing.
        self.together("ncclReduce", |place, comm| unsafe {
            let to = if place == 0 { to } else { null_mut() };
            reduce(from[place], to, count, FLOAT, SUM, FIRST, comm, DEFAULT_STREAM)
        })?;
        self.ended()?;
        Ok(sum)
    }

    /// A copy of a tensor of the first GPU on each one, the first included.
    pub fn broadcast(&mut self, tensor: &Tensor) -> Result<Vec<Tensor>, NcclError> {
        let (size, count, from) = (tensor.size(), tensor.numel(), tensor.data_ptr());
        let copies = self.devices.iter().map(|&device| Tensor::f_empty(size.as_slice(), (Kind::Float, device)));
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        self.fits(&copies)?;
        self.one_of(0, tensor, count)?;
        let (broadcast, to) = (self.table.broadcast, copies.iter().map(Tensor::data_ptr).collect::<Vec<_>>());
        // SAFETY: as many values of f32 on the first GPU as is said, and as much room on each; others read nothing.
        self.together("ncclBroadcast", |place, comm| unsafe {
            let from = if place == 0 { from } else { to[place] };
            broadcast(from, to[place], count, FLOAT, FIRST, comm, DEFAULT_STREAM)
        })?;
        self.ended()?;
        Ok(copies)
    }

    /// Adds and copies random whole numbers, whose sums are exact in whatever order, and has the host read back what every GPU got.
    fn tried(mut self) -> Result<Communicator, NcclError> {
        let _no_grad = tch::no_grad_guard();
        let mut rng = ChaCha8Rng::from_seed(stream_seed(0, "nccl", &[]));
        let mut sum = Tensor::f_zeros([TRIAL as i64], (Kind::Float, Device::Cpu))?;
        let mut parts = Vec::new();
        for &device in &self.devices {
            let values: Vec<f32> = (0..TRIAL).map(|_| rng.random_range(-LARGEST..=LARGEST) as f32).collect();
            let part = Tensor::f_from_slice(&values)?;
            let _ = sum.f_add_(&part)?;
            parts.push(part.f_to_device(device)?);
        }
        let got = self.reduce(&parts)?;
        let copies = self.broadcast(&got)?;
        for copy in copies {
            if !copy.f_to_device(Device::Cpu)?.f_equal(&sum)? {
                return Err(NcclError::Wrong);
            }
        }
        Ok(self)
    }

    /// Waits until every GPU is done with what was asked of it so far.
    fn ended(&mut self) -> Result<(), NcclError> {
        let ended = marks(&self.devices).and_then(|marks| {
            awaited(PATIENCE, || {
                for mark in &marks {
                    if !mark.is_passed()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            })
        });
        if ended.is_err() {
            self.leave_off();
        }
        ended
    }

    /// Makes one call for each GPU, as one group: from one thread each would wait for the others, which never come.
    fn together(&mut self, name: &'static str, call: impl Fn(usize, Comm) -> c_int) -> Result<(), NcclError> {
        // SAFETY: takes nothing.
        let begun = self.table.done("ncclGroupStart", unsafe { (self.table.group_start)() });
        let done = begun.and_then(|()| {
            let mut codes = self.comms.iter().enumerate().map(|(place, &comm)| call(place, comm));
            let code = codes.find(|&code| code != SUCCESS).unwrap_or(SUCCESS);
            // SAFETY: takes nothing. What was begun has to be ended, whatever became of it.
            let ended = unsafe { (self.table.group_end)() };
            self.table.done(name, code)?;
            self.table.done("ncclGroupEnd", ended)
        });
        if done.is_err() {
            self.leave_off();
        }
        done
    }

    fn fits(&self, tensors: &[Tensor]) -> Result<(), NcclError> {
        if self.comms.is_empty() || tensors.len() != self.comms.len() {
            let (given, gpus) = (tensors.len(), self.comms.len());
            return Err(NcclError::Unsuitable(format!("{given} tensors do not fit a communicator of {gpus} GPUs")));
        }
        let count = tensors[0].numel();
        tensors.iter().enumerate().try_for_each(|(place, tensor)| self.one_of(place, tensor, count))
    }

    /// Whether NCCL may be told of a tensor as one of `count` values of f32 on that GPU.
    fn one_of(&self, place: usize, tensor: &Tensor, count: usize) -> Result<(), NcclError> {
        let (kind, device, values) = (tensor.f_kind()?, tensor.device(), tensor.numel());
        if kind != Kind::Float || device != self.devices[place] || values != count || !tensor.is_contiguous() {
            let (device, wanted) = (peer_copy::name(device), peer_copy::name(self.devices[place]));
            return Err(NcclError::Unsuitable(format!(
                "{values} values of {kind:?} on {device} cannot be exchanged as {count} of f32 in one piece on {wanted}"
            )));
        }
        Ok(())
    }

    /// Ends what runs on any GPU and frees all that belongs to it.
    fn leave_off(&mut self) {
        for comm in self.comms.drain(..) {
            // SAFETY: made by NCCL, and not known to anybody from here on. Nothing can be done about an error.
            let _ = unsafe { (self.table.comm_abort)(comm) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        for comm in self.comms.drain(..) {
            // SAFETY: as above.
            let _ = unsafe { (self.table.comm_destroy)(comm) };
        }
    }
}

/// Behind all that each GPU has to do; none of what is no GPU.
fn marks(devices: &[Device]) -> Result<Vec<Event>, NcclError> {
    let mark = |&device: &Device| -> Result<Option<Event>, NcclError> {
        Ok(draftmill_torch_ext::Stream::current(device)?.map(Event::in_stream).transpose()?)
    };
    devices.iter().filter_map(|device| mark(device).transpose()).collect()
}

/// What `call` gives on a thread of its own, which is left to itself where that takes longer than `patience`.
fn within<T: Send + 'static>(
    patience: Duration,
    call: impl FnOnce() -> Result<T, NcclError> + Send + 'static,
) -> Result<T, NcclError> {
    let failed = |text: &str| NcclError::Failed { call: "its start", text: text.to_owned() };
    let (done, answer) = sync_channel(1);
    // Who gave it up is not there any more to be told.
    let asked = thread::Builder::new().name("nccl".into()).spawn(move || done.send(call()).ok());
    asked.map_err(|error| failed(&error.to_string()))?;
    answer.recv_timeout(patience).map_err(|error| match error {
        RecvTimeoutError::Timeout => NcclError::Hangs(patience),
        RecvTimeoutError::Disconnected => failed("its thread panicked"),
    })?
}

/// Asks again and again, for about so long at most.
fn awaited(patience: Duration, mut done: impl FnMut() -> Result<bool, NcclError>) -> Result<(), NcclError> {
    let mut waited = Duration::ZERO;
    while !done()? {
        if waited >= patience {
            return Err(NcclError::Hangs(patience));
        }
        thread::sleep(LOOK);
        waited += LOOK;
    }
    Ok(())
}

/// libtorch's default stream of whichever GPU a call is for, where gradients and weights are made and used. So a collective begins when
/// what it reads is computed, who uses its result waits for it, and memory that is freed after the call is not used again before
/// it is done.
const DEFAULT_STREAM: Stream = null_mut();

/// CUDA's, which is libtorch's; a number that is nobody's for whatever is no GPU.
fn number(device: Device) -> c_int {
    match device {
        Device::Cuda(index) => c_int::try_from(index).unwrap_or(c_int::MAX),
        _ => -1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::fake_nccl;

    fn communicator(gpus: usize) -> Communicator {
        Communicator::new(fake_nccl::table(), &vec![Device::Cpu; gpus]).unwrap()
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn a_collective_is_one_group_with_one_call_for_each_gpu() {
        let mut three = communicator(3);
        let parts = [1.0f32, 10.0, 100.0].map(|x| Tensor::from_slice(&[x, 2.0 * x]));
        let sum = three.reduce(&parts).unwrap();
        assert_eq!(floats(&sum), [111.0, 222.0]);
        assert_eq!(floats(&parts[0]), [1.0, 2.0]);
        let copies = three.broadcast(&sum).unwrap();
        assert_eq!(copies.iter().map(floats).collect::<Vec<_>>(), vec![[111.0, 222.0]; 3]);
        drop(three);
        let [start, end, destroy] = ["ncclGroupStart", "ncclGroupEnd", "ncclCommDestroy"];
        let mut want = vec!["ncclCommInitAll"];
        for call in ["ncclReduce", "ncclBroadcast"] {
            want.extend([start, call, call, call, end]);
        }
        want.extend([destroy; 3]);
        assert_eq!(fake_nccl::calls(), want);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_nccl_hears_of_it() {
        let mut two = communicator(2);
        let before = fake_nccl::calls().len();
        let (one, longer) = (Tensor::from_slice(&[1.0f32]), Tensor::from_slice(&[1.0f32, 2.0]));
        let (double, square) = (Tensor::from_slice(&[1.0f64]), Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]));
        let apart = square.reshape([2, 2]).select(1, 0);
        for (parts, text) in [
            (vec![&one], "1 tensors do not fit a communicator of 2 GPUs"),
            (vec![&one, &longer], "2 values of Float on cpu cannot be exchanged as 1 of f32"),
            (vec![&double, &one], "1 values of Double"),
            (vec![&longer, &apart], "in one piece"),
        ] {
            let parts: Vec<Tensor> = parts.into_iter().map(Tensor::shallow_clone).collect();
            let error = two.reduce(&parts).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        for tensor in [double, apart] {
            assert!(matches!(two.broadcast(&tensor), Err(NcclError::Unsuitable(_))));
        }
        assert_eq!(fake_nccl::calls().len(), before);
    }

    /// A group that was begun is ended, and what may still run on some GPU is ended, too.
    #[test]
    fn one_failure_is_the_end_of_all_gpus() {
        let parts = [1.0f32, 2.0].map(|x| Tensor::from_slice(&[x]));
        for (at, call) in [(0, "ncclGroupStart"), (1, "ncclReduce"), (2, "ncclReduce"), (3, "ncclGroupEnd")] {
            let mut two = communicator(2);
            fake_nccl::fail_at(1 + at);
            let error = two.reduce(&parts).unwrap_err();
            assert_eq!(error.to_string(), format!("{call} failed: internal error"));
            assert!(error.remedy().contains("NCCL_DEBUG"), "{error:?}");
            let calls = fake_nccl::calls();
            let grouped = |name| calls.iter().filter(|&&call| call == name).count();
            assert_eq!(grouped("ncclGroupEnd"), usize::from(at > 0), "{calls:?}");
            assert_eq!(calls[calls.len() - 2..], ["ncclCommAbort"; 2]);
            assert!(matches!(two.reduce(&parts), Err(NcclError::Unsuitable(_))));
            drop(two);
            assert_eq!(fake_nccl::calls(), calls);
        }
        let table = fake_nccl::table();
        fake_nccl::fail_at(0);
        let failed = Communicator::new(table, &[Device::Cpu; 2]).err().unwrap();
        assert_eq!(failed.to_string(), "ncclCommInitAll failed: internal error");
    }

    #[test]
    fn a_trial_sees_a_sum_or_a_copy_that_is_wrong() {
        assert!(communicator(3).tried().is_ok());
        for call in ["ncclReduce", "ncclBroadcast"] {
            let three = communicator(3);
            fake_nccl::lie_in(call);
            let error = three.tried().err().unwrap();
            assert!(matches!(error, NcclError::Wrong) && error.remedy().contains("NCCL_P2P_DISABLE=1"), "{error:?}");
        }
    }

    #[test]
    fn what_does_not_end_is_given_up() {
        let mut asked = 0;
        let third = || {
            asked += 1;
            Ok(asked == 3)
        };
        assert!(awaited(LOOK * 5, third).is_ok());
        assert_eq!(asked, 3);
        let error = awaited(LOOK * 5, || Ok(false)).unwrap_err();
        assert!(matches!(error, NcclError::Hangs(_)) && error.remedy().contains("NCCL_P2P_DISABLE=1"), "{error:?}");
        assert!(matches!(awaited(PATIENCE, || Err(NcclError::Wrong)), Err(NcclError::Wrong)));
    }

    #[test]
    fn a_start_that_does_not_end_is_left_to_itself() {
        assert!(matches!(within(PATIENCE, || Ok(3)), Ok(3)));
        assert!(matches!(within(PATIENCE, || Err::<(), _>(NcclError::Wrong)), Err(NcclError::Wrong)));
        let (let_go, held) = sync_channel::<()>(0);
        let (ended, end) = sync_channel(1);
        let endless = move || {
            let _ = held.recv();
            Ok(ended)
        };
        assert!(matches!(within(LOOK, endless), Err(NcclError::Hangs(LOOK))));
        drop(let_go);
        // What came too late is dropped where it was made.
        assert!(end.recv_timeout(PATIENCE) == Err::<(), _>(RecvTimeoutError::Disconnected));
        let error = within(PATIENCE, || -> Result<(), _> { panic!("on purpose") }).unwrap_err();
        assert_eq!(error.to_string(), "its start failed: its thread panicked");
    }

    /// A GPU that cannot be asked any more is one that is lost.
    #[test]
    fn where_the_end_cannot_be_waited_for_all_gpus_are_told_to_leave_off() {
        let mut two = communicator(2);
        two.devices = vec![Device::Cuda(4096); 2];
        assert!(matches!(two.ended(), Err(NcclError::Model(_))));
        assert_eq!(fake_nccl::calls()[1..], ["ncclCommAbort"; 2]);
    }
}
