//! The binary.

fn main() -> std::process::ExitCode {
    #[cfg(feature = "torch")]
    // SAFETY: no thread has been started.
    unsafe {
        draftmill::model::libtorch::ask_for_large_pages()
    };
    let _points = draftmill::failpoint::set_up();
    draftmill::cli::main()
}
