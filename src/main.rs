//! The binary.

fn main() {
    let _points = draftmill::failpoint::set_up();
    draftmill::cli::main().leave()
}
