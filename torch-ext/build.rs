//! Compiles torch_ext.cpp, streams.cpp and fake.cpp against the libtorch that torch-sys links, and row_kernels.cpp, which needs none.

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
        println!("cargo:warning=torch-sys did not say where libtorch lies: set LIBTORCH to a libtorch 2.11.0");
        return;
    };
    // torch-sys says where the libraries are and not where the headers are; it takes these from the same variables.
    let root = read("LIBTORCH_INCLUDE").map_or_else(|| lib.join(".."), PathBuf::from);
    let abi = read("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".into());
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").debug(false).extra_warnings(true);
    // The last one is linked by tests alone: nobody else calls it.
    build.files(["src/torch_ext.cpp", "src/streams.cpp", "src/fake.cpp"]);
    for include in ["include", "include/torch/csrc/api/include"] {
        // As a system folder, so that only our own lines are warned about.
        build.flag("-isystem").flag(root.join(include));
    }
    // What is instantiated from libtorch's headers is warned about here all the same, when optimised.
    build.flag_if_supported("-Wno-maybe-uninitialized");
    build.flag(format!("-D_GLIBCXX_USE_CXX11_ABI={abi}")).compile("draftmill_torch_ext");
    let mut row_kernels = cc::Build::new();
    row_kernels.cpp(true).std("c++17").debug(false).extra_warnings(true).file("src/row_kernels.cpp");
    // Optimised in every profile: a training step is made of this. Its pragmas are for loops and start no thread.
    row_kernels.opt_level(3).flag("-fopenmp-simd").flag("-fno-math-errno").flag("-fno-trapping-math");
    row_kernels.compile("draftmill_rows");
    // For the tests of this package: link arguments do not travel to those that depend on it.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
}
