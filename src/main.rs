//! The binary.

fn main() -> std::process::ExitCode {
    let _points = draftmill::failpoint::set_up();
    draftmill::cli::main()
}
