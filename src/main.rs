//! The binary.

fn main() {
    let _points = draftmill::common::failpoint::set_up();
    draftmill::cli::main().leave()
}
