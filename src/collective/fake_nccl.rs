//! An NCCL of the CPU for tests, one for each thread: it adds and copies, keeps its calls, and fails or lies when told to.

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
struct World {
    calls: Vec<&'static str>,
    /// The call that fails, by its place in `calls`.
    fails: Option<usize>,
    /// The collective that brings a wrong number.
    lies: Option<&'static str>,
    /// Those that nobody has destroyed yet.
    comms: Vec<Comm>,
    /// The calls of the group that is open.
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
    static WORLD: RefCell<World> = RefCell::default();
}

/// Of a new world: whatever the thread had before is forgotten.
pub fn table() -> Table {
    WORLD.take();
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

/// Every call so far, in order.
pub fn calls() -> Vec<&'static str> {
    WORLD.with_borrow(|world| world.calls.clone())
}

/// Has the call fail that will be at this place.
pub fn fail_at(place: usize) {
    WORLD.with_borrow_mut(|world| world.fails = Some(place));
}

/// Has each such collective bring one wrong number from now on.
pub fn lie_in(collective: &'static str) {
    WORLD.with_borrow_mut(|world| world.lies = Some(collective));
}

/// One that is to fail fails when its work is done: a group may have begun on some GPU.
fn call(name: &'static str, work: impl FnOnce(&mut World) -> c_int) -> c_int {
    WORLD.with_borrow_mut(|world| {
        let fails = world.fails == Some(world.calls.len());
        world.calls.push(name);
        let code = work(world);
        if fails { INTERNAL_ERROR } else { code }
    })
}

extern "C" fn get_version(version: *mut c_int) -> c_int {
    call("ncclGetVersion", |_| {
        // SAFETY: what the caller has room for.
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
    call("ncclCommInitAll", |world| {
        world.comms = (1..=count as usize).map(|number| number as Comm).collect();
        // SAFETY: a list of `count`.
        unsafe { slice::from_raw_parts_mut(comms, count as usize) }.copy_from_slice(&world.comms);
        SUCCESS
    })
}

extern "C" fn comm_destroy(comm: Comm) -> c_int {
    call("ncclCommDestroy", |world| forget(world, comm))
}

extern "C" fn comm_abort(comm: Comm) -> c_int {
    call("ncclCommAbort", |world| forget(world, comm))
}

fn forget(world: &mut World, comm: Comm) -> c_int {
    let before = world.comms.len();
    world.comms.retain(|&other| other != comm);
    assert_eq!(world.comms.len() + 1, before, "destroyed twice");
    SUCCESS
}

extern "C" fn group_start() -> c_int {
    call("ncclGroupStart", |world| {
        world.group = Some(Vec::new());
        SUCCESS
    })
}

/// Nothing happens before. The sum is begun from behind, so that it is another one than that of copies as far as it may be.
extern "C" fn group_end() -> c_int {
    call("ncclGroupEnd", |world| {
        let Some(group) = world.group.take() else { return INVALID_USAGE };
        let Some(&first) = group.first() else { return SUCCESS };
        let same = |call: &Call| call.name == first.name && call.count == first.count;
        if !group.iter().map(|call| call.comm).eq(world.comms.iter().copied()) || !group.iter().all(same) {
            return INVALID_USAGE;
        }
        // SAFETY: so many values, which nobody writes; a collective's results lie apart from them.
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
        for (place, call) in group.iter().take(readers).enumerate() {
            if world.lies == Some(call.name) && place + 1 == readers {
                result[call.count - 1] += 1.0;
            }
            // SAFETY: room for so many.
            unsafe { slice::from_raw_parts_mut(call.to, call.count) }.copy_from_slice(&result);
        }
        SUCCESS
    })
}

/// Takes a call into the open group.
fn collect(call: Call, kind: c_int, root: c_int, stream: Stream, world: &mut World) -> c_int {
    if kind != FLOAT || root != 0 || !stream.is_null() {
        return INVALID_ARGUMENT;
    }
    let Some(group) = &mut world.group else { return INVALID_USAGE };
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
    call(one.name, |world| match operation {
        SUM => collect(one, kind, root, stream, world),
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
    call(one.name, |world| collect(one, kind, root, stream, world))
}
