//! Passive waiting of OpenMP's threads. Threads of libgomp spin at barriers by default, which costs a multiple of the
//! computation if other processes use the cores.
//!
//! libgomp reads its environment in its constructor, before `main`. The dynamic loader calls the functions in
//! `.preinit_array` of a program before the constructors of its libraries. There the program replaces itself by itself
//! with the variable set: the process id and open files stay, and the constructors of libtorch run once.

use std::ffi::{CStr, c_char, c_int};

/// Variable that is set, for libgomp and for the OpenMP of LLVM and Intel.
const PASSIVE: &CStr = c"OMP_WAIT_POLICY=PASSIVE";
/// Variables with which a user chooses. The first one ends the loop, too.
const CHOICES: [&[u8]; 2] = [b"OMP_WAIT_POLICY=", b"GOMP_SPINCOUNT="];
/// Commands that compute with libtorch.
const COMPUTE: [&[u8]; 6] = [b"check", b"doctor", b"eval", b"export", b"generate", b"train"];

type List = *const *const c_char;

#[used]
#[unsafe(link_section = ".preinit_array")]
static BEFORE_LIBRARIES: extern "C" fn(c_int, List, List) = wait_passively;

/// Starts the program again with passive waiting. Returns if there is nothing to change, or if that fails.
extern "C" fn wait_passively(_: c_int, arguments: List, environment: List) {
    // Nothing of std that needs its own start, and no panic: neither std nor libc's `environ` is initialised yet.
    // SAFETY: the loader passes the two lists of the process, which end with a null pointer and stay until `execve`.
    let (given, set) = unsafe { (entries(arguments), entries(environment)) };
    let computes = given.iter().skip(1).any(|word| COMPUTE.contains(&word.to_bytes()));
    let chosen = set.iter().any(|entry| CHOICES.iter().any(|name| entry.to_bytes().starts_with(name)));
    if !computes || chosen {
        return;
    }
    // The path instead of the link, because the kernel names a process after the path.
    let mut path = [0_u8; libc::PATH_MAX as usize];
    // SAFETY: the kernel writes at most the given number of bytes, which leaves a zero at the end.
    let length = unsafe { libc::readlink(c"/proc/self/exe".as_ptr(), path.as_mut_ptr().cast(), path.len() - 1) };
    if length <= 0 {
        return;
    }
    let mut environment: Vec<_> = set.iter().map(|entry| entry.as_ptr()).collect();
    environment.extend([PASSIVE.as_ptr(), std::ptr::null()]);
    // SAFETY: a path that ends with a zero, and two lists that end with a null pointer.
    unsafe { libc::execve(path.as_ptr().cast(), arguments, environment.as_ptr()) };
}

/// Entries of a list that ends with a null pointer.
///
/// # Safety
/// `list` must be such a list of strings that stay.
unsafe fn entries<'a>(list: List) -> Vec<&'a CStr> {
    let mut found = Vec::new();
    // SAFETY: the caller's list ends with a null pointer, and no entry after it is read.
    unsafe {
        let mut at = list;
        while !at.is_null() && !(*at).is_null() {
            found.push(CStr::from_ptr(*at));
            at = at.add(1);
        }
    }
    found
}
