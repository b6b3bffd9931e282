//! Writes the folder of libtorch into the binary's rpath, so that no LD_LIBRARY_PATH is needed.

fn main() {
    println!("cargo:rerun-if-changed=src/build.rs");
    // torch-sys exports the library folder that it linked against; absent without the `torch` feature.
    if let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
        // libtorch_cpu names NVIDIA libraries that it finds by its own rpath when it loads.
        println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
    }
}
