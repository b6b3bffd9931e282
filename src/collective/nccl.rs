//! Reduce and broadcast between the GPUs of this process by NCCL, whose library is loaded on demand.

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

/// Rank that receives sums and sends copies.
const ROOT: c_int = 0;
/// Number of values in the self-test: about 4 MiB, and not a multiple of a power of two.
const TEST_VALUES: usize = (1 << 20) + 3;
/// Largest value of the self-test: f32 holds the sum of 256 of them exactly.
const MAX_TEST_VALUE: i32 = 1 << 16;
/// Limit for one call, which takes seconds at most. Without a limit it would hang if GPUs cannot reach each other.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two checks for completion.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

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
    /// Remedy to print with the error.
    pub fn remedy(&self) -> String {
        match self {
            NcclError::Missing(_) => "fetch libtorch again, with CUDA, which includes NCCL, or install libnccl2".into(),
            NcclError::Failed { .. } | NcclError::Model(_) => {
                "set NCCL_DEBUG=INFO in the environment to see NCCL's own log".into()
            }
            NcclError::SelfTest | NcclError::Timeout(_) => {
                format!(
                    "set NCCL_P2P_DISABLE=1 in the environment, which copies through the host; or {}",
                    peer_copy::REMEDY
                )
            }
            NcclError::Unsuitable(_) => "give each drafter a separate GPU (drafter.devices)".into(),
        }
    }
}

/// NCCL communicator over several GPUs. Rank 0 receives sums and sends copies.
///
/// A failed call aborts the communicator on all GPUs, and every later call fails.
pub struct Communicator {
    table: Table,
    devices: Vec<Device>,
    /// One per device; empty after a failed call.
    comms: Vec<Comm>,
}

// SAFETY: NCCL may be called from any thread, one at a time, and each call takes `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Opens a communicator over `devices` and runs the self-test. NCCL's initialisation has no timeout, so it
    /// runs on another thread with one.
    ///
    /// # Errors
    /// Returns an error if NCCL fails, does not finish in time, or fails the self-test.
    pub fn open(table: Table, devices: &[Device]) -> Result<Communicator, NcclError> {
        let devices = devices.to_vec();
        with_timeout(TIMEOUT, move || Communicator::start(table, &devices))
    }

    /// Opens and self-tests on the calling thread, without a timeout.
    pub(crate) fn start(table: Table, devices: &[Device]) -> Result<Communicator, NcclError> {
        Communicator::new(table, devices)?.self_test()
    }

    pub(crate) fn new(table: Table, devices: &[Device]) -> Result<Communicator, NcclError> {
        let numbers: Vec<c_int> = devices.iter().map(|&device| number(device)).collect();
        let mut comms = vec![null_mut(); devices.len()];
        // SAFETY: both arrays have `devices.len()` entries. NCCL rejects an unknown or repeated GPU.
        let code = unsafe { (table.comm_init_all)(comms.as_mut_ptr(), devices.len() as c_int, numbers.as_ptr()) };
        table.check("ncclCommInitAll", code)?;
        Ok(Communicator { table, devices: devices.to_vec(), comms })
    }

    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Version of the NCCL library.
    ///
    /// # Errors
    /// Returns an error if NCCL does not report its version.
    pub fn version(&self) -> Result<String, NcclError> {
        self.table.version()
    }

    /// Returns the sum of one f32 tensor per GPU on rank 0, in new storage: the inputs stay intact if the call fails.
    ///
    /// # Errors
    /// Returns an error if a tensor has another size, dtype or device, or NCCL fails. `NcclError::Timeout` after 60 s.
    pub fn reduce(&mut self, parts: &[Tensor]) -> Result<Tensor, NcclError> {
        self.check_tensors(parts)?;
        let (first, count) = (&parts[0], parts[0].numel());
        let sum = first.f_empty_like()?;
        let (reduce, from) = (self.table.reduce, parts.iter().map(Tensor::data_ptr).collect::<Vec<_>>());
        let to = sum.data_ptr();
        // SAFETY: `count` f32 values on each GPU and in `sum` on rank 0, checked above; other ranks write nothing.
        self.group_call("ncclReduce", |rank, comm| unsafe {
            let to = if rank == 0 { to } else { null_mut() };
            reduce(from[rank], to, count, FLOAT, SUM, ROOT, comm, DEFAULT_STREAM)
        })?;
        self.wait_finished()?;
        Ok(sum)
    }

    /// Returns one copy of an f32 tensor of rank 0 per GPU, rank 0 included.
    ///
    /// # Errors
    /// Returns an error if the tensor is not contiguous f32 on rank 0, or NCCL fails. `NcclError::Timeout` after 60 s.
    pub fn broadcast(&mut self, tensor: &Tensor) -> Result<Vec<Tensor>, NcclError> {
        let (size, count, from) = (tensor.size(), tensor.numel(), tensor.data_ptr());
        let copies = self.devices.iter().map(|&device| Tensor::f_empty(size.as_slice(), (Kind::Float, device)));
        let copies = copies.collect::<Result<Vec<_>, _>>()?;
        self.check_tensors(&copies)?;
        self.check_tensor(0, tensor, count)?;
        let (broadcast, to) = (self.table.broadcast, copies.iter().map(Tensor::data_ptr).collect::<Vec<_>>());
        // SAFETY: `count` f32 values on rank 0 and in each copy, checked above; other ranks read nothing.
        self.group_call("ncclBroadcast", |rank, comm| unsafe {
            let from = if rank == 0 { from } else { to[rank] };
            broadcast(from, to[rank], count, FLOAT, ROOT, comm, DEFAULT_STREAM)
        })?;
        self.wait_finished()?;
        Ok(copies)
    }

    /// Reduces and broadcasts random integers, whose sums are exact in any order, and compares every GPU's copy on the
    /// host.
    fn self_test(mut self) -> Result<Communicator, NcclError> {
        let _no_grad = tch::no_grad_guard();
        let mut rng = ChaCha8Rng::from_seed(stream_seed(0, "nccl", &[]));
        let mut sum = Tensor::f_zeros([TEST_VALUES as i64], (Kind::Float, Device::Cpu))?;
        let mut parts = Vec::new();
        for &device in &self.devices {
            let values: Vec<f32> =
                (0..TEST_VALUES).map(|_| rng.random_range(-MAX_TEST_VALUE..=MAX_TEST_VALUE) as f32).collect();
            let part = Tensor::f_from_slice(&values)?;
            let _ = sum.f_add_(&part)?;
            parts.push(part.f_to_device(device)?);
        }
        let got = self.reduce(&parts)?;
        let copies = self.broadcast(&got)?;
        for copy in copies {
            if !copy.f_to_device(Device::Cpu)?.f_equal(&sum)? {
                return Err(NcclError::SelfTest);
            }
        }
        Ok(self)
    }

    /// Waits until every GPU is done with what was asked of it so device.
    fn wait_finished(&mut self) -> Result<(), NcclError> {
        let finished = record_events(&self.devices).and_then(|events| {
            poll_until(TIMEOUT, || {
                for event in &events {
                    if !event.is_complete()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            })
        });
        if finished.is_err() {
            self.abort();
        }
        finished
    }

    /// Makes one call per GPU in one NCCL group: without a group, the first call would block for the others for ever.
    fn group_call(&mut self, name: &'static str, call: impl Fn(usize, Comm) -> c_int) -> Result<(), NcclError> {
        // SAFETY: no arguments.
        let begun = self.table.check("ncclGroupStart", unsafe { (self.table.group_start)() });
        let done = begun.and_then(|()| {
            let mut codes = self.comms.iter().enumerate().map(|(rank, &comm)| call(rank, comm));
            let code = codes.find(|&code| code != SUCCESS).unwrap_or(SUCCESS);
            // SAFETY: no arguments. A started group must be ended even after a failed call.
            let ended = unsafe { (self.table.group_end)() };
            self.table.check(name, code)?;
            self.table.check("ncclGroupEnd", ended)
        });
        if done.is_err() {
            self.abort();
        }
        done
    }

    fn check_tensors(&self, tensors: &[Tensor]) -> Result<(), NcclError> {
        if self.comms.is_empty() || tensors.len() != self.comms.len() {
            let (given, gpus) = (tensors.len(), self.comms.len());
            return Err(NcclError::Unsuitable(format!("{given} tensors do not fit a communicator of {gpus} GPUs")));
        }
        let count = tensors[0].numel();
        tensors.iter().enumerate().try_for_each(|(rank, tensor)| self.check_tensor(rank, tensor, count))
    }

    /// Checks that `tensor` is `count` contiguous f32 values on the device of `rank`.
    fn check_tensor(&self, rank: usize, tensor: &Tensor, count: usize) -> Result<(), NcclError> {
        let (kind, device, values) = (tensor.f_kind()?, tensor.device(), tensor.numel());
        if kind != Kind::Float || device != self.devices[rank] || values != count || !tensor.is_contiguous() {
            let (device, wanted) = (peer_copy::name(device), peer_copy::name(self.devices[rank]));
            return Err(NcclError::Unsuitable(format!(
                "{values} values of {kind:?} on {device}, expected {count} contiguous values of f32 on {wanted}"
            )));
        }
        Ok(())
    }

    /// Cancels the work on all GPUs and frees the communicator.
    fn abort(&mut self) {
        for comm in self.comms.drain(..) {
            // SAFETY: created by NCCL and used for the last time here. An error has no remedy.
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

/// Records an event on the current stream of each GPU; skips other devices.
fn record_events(devices: &[Device]) -> Result<Vec<Event>, NcclError> {
    let event = |&device: &Device| -> Result<Option<Event>, NcclError> {
        Ok(draftmill_torch_ext::Stream::current(device)?.map(Event::record).transpose()?)
    };
    devices.iter().filter_map(|device| event(device).transpose()).collect()
}

/// Runs `call` on a new thread and returns its result. The thread is detached if it takes longer than `timeout`.
fn with_timeout<T: Send + 'static>(
    timeout: Duration,
    call: impl FnOnce() -> Result<T, NcclError> + Send + 'static,
) -> Result<T, NcclError> {
    let failed = |text: &str| NcclError::Failed { call: "ncclCommInitAll", text: text.to_owned() };
    let (sender, receiver) = sync_channel(1);
    // After a timeout the receiver is gone.
    let spawned = thread::Builder::new().name("nccl".into()).spawn(move || sender.send(call()).ok());
    spawned.map_err(|error| failed(&error.to_string()))?;
    receiver.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => NcclError::Timeout(timeout),
        RecvTimeoutError::Disconnected => failed("the NCCL thread panicked"),
    })?
}

/// Polls `done` until it returns true or about `timeout` has passed.
fn poll_until(timeout: Duration, mut done: impl FnMut() -> Result<bool, NcclError>) -> Result<(), NcclError> {
    let mut waited = Duration::ZERO;
    while !done()? {
        if waited >= timeout {
            return Err(NcclError::Timeout(timeout));
        }
        thread::sleep(POLL_INTERVAL);
        waited += POLL_INTERVAL;
    }
    Ok(())
}

/// Default stream of the call's GPU, on which gradients and weights are computed and read. Stream order therefore makes
/// a collective wait for its inputs, makes readers wait for its result, and delays reuse of memory that is freed
/// meanwhile.
const DEFAULT_STREAM: Stream = null_mut();

/// CUDA index of a device, which equals libtorch's; -1 for other devices.
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
    fn collective_is_one_group_with_one_call_per_gpu() {
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
    fn wrong_tensors_are_rejected_before_any_nccl_call() {
        let mut two = communicator(2);
        let before = fake_nccl::calls().len();
        let (one, longer) = (Tensor::from_slice(&[1.0f32]), Tensor::from_slice(&[1.0f32, 2.0]));
        let (double, square) = (Tensor::from_slice(&[1.0f64]), Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]));
        let apart = square.reshape([2, 2]).select(1, 0);
        for (parts, text) in [
            (vec![&one], "1 tensors do not fit a communicator of 2 GPUs"),
            (vec![&one, &longer], "2 values of Float on cpu, expected 1 contiguous values of f32"),
            (vec![&double, &one], "1 values of Double"),
            (vec![&longer, &apart], "expected 2 contiguous"),
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

    /// A started group is ended, and work that may still run on some GPU is aborted.
    #[test]
    fn one_failure_aborts_all_gpus() {
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
    fn self_test_detects_a_wrong_sum_or_copy() {
        assert!(communicator(3).self_test().is_ok());
        for call in ["ncclReduce", "ncclBroadcast"] {
            let three = communicator(3);
            fake_nccl::corrupt(call);
            let error = three.self_test().err().unwrap();
            assert!(matches!(error, NcclError::SelfTest) && error.remedy().contains("NCCL_P2P_DISABLE=1"), "{error:?}");
        }
    }

    #[test]
    fn polling_stops_after_the_timeout() {
        let mut polls = 0;
        let third = || {
            polls += 1;
            Ok(polls == 3)
        };
        assert!(poll_until(POLL_INTERVAL * 5, third).is_ok());
        assert_eq!(polls, 3);
        let error = poll_until(POLL_INTERVAL * 5, || Ok(false)).unwrap_err();
        assert!(matches!(error, NcclError::Timeout(_)) && error.remedy().contains("NCCL_P2P_DISABLE=1"), "{error:?}");
        assert!(matches!(poll_until(TIMEOUT, || Err(NcclError::SelfTest)), Err(NcclError::SelfTest)));
    }

    #[test]
    fn hanging_start_is_detached_after_the_timeout() {
        assert!(matches!(with_timeout(TIMEOUT, || Ok(3)), Ok(3)));
        assert!(matches!(with_timeout(TIMEOUT, || Err::<(), _>(NcclError::SelfTest)), Err(NcclError::SelfTest)));
        let (let_go, held) = sync_channel::<()>(0);
        let (ended, end) = sync_channel(1);
        let endless = move || {
            let _ = held.recv();
            Ok(ended)
        };
        assert!(matches!(with_timeout(POLL_INTERVAL, endless), Err(NcclError::Timeout(POLL_INTERVAL))));
        drop(let_go);
        // A result after the timeout is dropped on its own thread.
        assert!(end.recv_timeout(TIMEOUT) == Err::<(), _>(RecvTimeoutError::Disconnected));
        let error = with_timeout(TIMEOUT, || -> Result<(), _> { panic!("on purpose") }).unwrap_err();
        assert_eq!(error.to_string(), "ncclCommInitAll failed: the NCCL thread panicked");
    }

    /// A GPU that cannot be queried is lost.
    #[test]
    fn all_gpus_are_aborted_if_completion_cannot_be_queried() {
        let mut two = communicator(2);
        two.devices = vec![Device::Cuda(4096); 2];
        assert!(matches!(two.wait_finished(), Err(NcclError::Model(_))));
        assert_eq!(fake_nccl::calls()[1..], ["ncclCommAbort"; 2]);
    }
}
