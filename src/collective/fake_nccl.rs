//! Fake NCCL on the CPU for tests, one per thread: computes, records its calls, and fails or corrupts results on
//! request.

use super::nccl_ffi::{Comm, FLOAT, SUCCESS, SUM, Stream, Table};
use std::{
    cell::RefCell,
    ffi::{c_char, c_int, c_void},
    slice,
};

const INTERNAL_ERROR: c_int = 3;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

#[derive(Default)]
struct FakeState {
    calls: Vec<&'static str>,
    /// Index in `calls` of the call that fails.
    fails: Option<usize>,
    /// Collective whose result has one wrong value.
    corrupts: Option<&'static str>,
    /// Communicators that are not destroyed yet.
    comms: Vec<Comm>,
    /// Calls of the open group.
    group: Option<Vec<Call>>,
}

/// One GPU's call of a collective.
#[derive(Clone, Copy)]
struct Call {
    name: &'static str,
    from: *const f32,
    to: *mut f32,
    count: usize,
    comm: Comm,
}

thread_local! {
    static STATE: RefCell<FakeState> = RefCell::default();
}

/// Function table of a fresh fake; resets the state of this thread.
pub fn table() -> Table {
    STATE.take();
    Table {
        get_version,
        get_error_string,
        comm_init_all,
        comm_destroy,
        comm_abort,
        group_start,
        group_end,
        reduce,
        broadcast,
    }
}

/// All calls of this thread so far, in order.
pub fn calls() -> Vec<&'static str> {
    STATE.with_borrow(|state| state.calls.clone())
}

/// Makes the call with this index fail.
pub fn fail_at(index: usize) {
    STATE.with_borrow_mut(|state| state.fails = Some(index));
}

/// Corrupts one value of each later result of `collective`.
pub fn corrupt(collective: &'static str) {
    STATE.with_borrow_mut(|state| state.corrupts = Some(collective));
}

/// Records a call and runs it. A failing call fails after its work, as a group may have started on some GPU.
fn call(name: &'static str, work: impl FnOnce(&mut FakeState) -> c_int) -> c_int {
    STATE.with_borrow_mut(|state| {
        let fails = state.fails == Some(state.calls.len());
        state.calls.push(name);
        let code = work(state);
        if fails { INTERNAL_ERROR } else { code }
    })
}

extern "C" fn get_version(version: *mut c_int) -> c_int {
    call("ncclGetVersion", |_| {
        // SAFETY: the caller passes a valid pointer.
        unsafe { *version = 22_809 };
        SUCCESS
    })
}

extern "C" fn get_error_string(code: c_int) -> *const c_char {
    match code {
        INTERNAL_ERROR => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        _ => c"invalid usage",
    }
    .as_ptr()
}

extern "C" fn comm_init_all(comms: *mut Comm, count: c_int, _devices: *const c_int) -> c_int {
    call("ncclCommInitAll", |state| {
        state.comms = (1..=count as usize).map(|number| number as Comm).collect();
        // SAFETY: the caller passes an array of `count` entries.
        unsafe { slice::from_raw_parts_mut(comms, count as usize) }.copy_from_slice(&state.comms);
        SUCCESS
    })
}

extern "C" fn comm_destroy(comm: Comm) -> c_int {
    call("ncclCommDestroy", |state| forget(state, comm))
}

extern "C" fn comm_abort(comm: Comm) -> c_int {
    call("ncclCommAbort", |state| forget(state, comm))
}

fn forget(state: &mut FakeState, comm: Comm) -> c_int {
    let before = state.comms.len();
    state.comms.retain(|&other| other != comm);
    assert_eq!(state.comms.len() + 1, before, "destroyed twice");
    SUCCESS
}

extern "C" fn group_start() -> c_int {
    call("ncclGroupStart", |state| {
        state.group = Some(Vec::new());
        SUCCESS
    })
}

/// Runs the whole group. Sums start with the last rank, so that rounding differs from that of peer copies.
extern "C" fn group_end() -> c_int {
    call("ncclGroupEnd", |state| {
        let Some(group) = state.group.take() else { return INVALID_USAGE };
        let Some(&first) = group.first() else { return SUCCESS };
        let same = |call: &Call| call.name == first.name && call.count == first.count;
        if !group.iter().map(|call| call.comm).eq(state.comms.iter().copied()) || !group.iter().all(same) {
            return INVALID_USAGE;
        }
        // SAFETY: `count` values, not written meanwhile; a collective's output never overlaps its input.
        let read = |call: &Call| unsafe { slice::from_raw_parts(call.from, call.count) };
        let (mut result, readers) = match first.name {
            "ncclReduce" => {
                let add =
                    |sum: Vec<f32>, part: &[f32]| -> Vec<f32> { sum.iter().zip(part).map(|(a, b)| a + b).collect() };
                let mut parts = group.iter().rev().map(read);
                let last = parts.next().unwrap_or_default().to_vec();
                (parts.fold(last, add), 1)
            }
            _ => (read(&first).to_vec(), group.len()),
        };
        for (rank, call) in group.iter().take(readers).enumerate() {
            if state.corrupts == Some(call.name) && rank + 1 == readers {
                result[call.count - 1] += 1.0;
            }
            // SAFETY: the output buffer holds `count` values.
            unsafe { slice::from_raw_parts_mut(call.to, call.count) }.copy_from_slice(&result);
        }
        SUCCESS
    })
}

/// Adds a call to the open group.
fn collect(call: Call, kind: c_int, root: c_int, stream: Stream, state: &mut FakeState) -> c_int {
    if kind != FLOAT || root != 0 || !stream.is_null() {
        return INVALID_ARGUMENT;
    }
    let Some(group) = &mut state.group else { return INVALID_USAGE };
    group.push(call);
    SUCCESS
}

extern "C" fn reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    operation: c_int,
    root: c_int,
    comm: Comm,
    stream: Stream,
) -> c_int {
    let one = Call { name: "ncclReduce", from: from.cast(), to: to.cast(), count, comm };
    call(one.name, |state| match operation {
        SUM => collect(one, kind, root, stream, state),
        _ => INVALID_ARGUMENT,
    })
}

extern "C" fn broadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    root: c_int,
    comm: Comm,
    stream: Stream,
) -> c_int {
    let one = Call { name: "ncclBroadcast", from: from.cast(), to: to.cast(), count, comm };
    call(one.name, |state| collect(one, kind, root, stream, state))
}
