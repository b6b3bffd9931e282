//! Compiles torch_ext.cpp and streams.cpp against the libtorch that torch-sys links, and row_kernels.cpp, which needs
//! none.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "torch")]
    compile();
}

#[cfg(feature = "torch")]
fn compile() {
    use std::{env, path::PathBuf};

    let read = |name: &str| {
        println!("cargo:rerun-if-env-changed={name}");
        env::var(name).ok()
    };
    for file in ["guard.h", "torch_ext.cpp", "streams.cpp", "fake.cpp", "row_kernels.cpp"] {
        println!("cargo:rerun-if-changed=src/{file}");
    }
    let Some(lib) = read("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
        println!("cargo:warning=torch-sys reports no libtorch: set LIBTORCH to the folder of libtorch 2.11.0");
        return;
    };
    // torch-sys exports the folder of the libraries but not of the headers, which it finds by the same variables.
    let root = read("LIBTORCH_INCLUDE").map_or_else(|| lib.join(".."), PathBuf::from);
    let abi = read("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".into());
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").debug(false).extra_warnings(true);
    build.files(["src/torch_ext.cpp", "src/streams.cpp"]);
    // Fake GPUs for the tests of this package.
    #[cfg(feature = "fake")]
    build.file("src/fake.cpp");
    for include in ["include", "include/torch/csrc/api/include"] {
        // As a system folder, so that the compiler warns about our own lines only.
        build.flag("-isystem").flag(root.join(include));
    }
    // Optimised templates of libtorch's headers warn even so.
    build.flag_if_supported("-Wno-maybe-uninitialized");
    build.flag(format!("-D_GLIBCXX_USE_CXX11_ABI={abi}")).compile("draftmill_torch_ext");
    let mut row_kernels = cc::Build::new();
    row_kernels.cpp(true).std("c++17").debug(false).extra_warnings(true).file("src/row_kernels.cpp");
    // Optimised in every profile, because training steps on the CPU spend their time here. The pragmas vectorise loops
    // and start no thread.
    row_kernels.opt_level(3).flag("-fopenmp-simd").flag("-fno-math-errno").flag("-fno-trapping-math");
    row_kernels.compile("draftmill_rows");
    // Link arguments for the tests of this package; they do not propagate to dependents.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
}
