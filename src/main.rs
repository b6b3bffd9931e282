//! The binary.

fn main() -> std::process::ExitCode {
    draftmill::cli::main()
}
