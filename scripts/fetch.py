#!/usr/bin/env python3
"""Fetches pinned wheels by name and version, checks their SHA-256, and unpacks what Draftmill needs into its cache.

    fetch.py libtorch [--cuda]   prints the folder to use as LIBTORCH
    fetch.py smollm2             prints the GGUF file of the demo's target
    fetch.py sharegpt            prints the JSON file of the demo's conversations
    fetch.py mtbench             prints the JSONL file of the prompts that the demo measures with
    fetch.py templates           prints the folder of public chat templates, PACKAGE-NAME.jinja

The cache is DRAFTMILL_CACHE, or `draftmill` in the user's cache directory. A folder in it is either whole or absent: pip
checks the hashes of the lock files next to this script, everything is unpacked into a temporary folder on the same file
system, and one rename makes it exist. Nothing is fetched twice, and with a filled cache neither network nor write
access is needed. A LIBTORCH that is set is taken as it is, if it holds the version that Draftmill is built for.
"""
import argparse
import contextlib
import errno
import fcntl
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
VERSION = "2.11.0"
TORCH = f"libtorch-{VERSION}"
DEMO = "demo-1"
PROMPTS = "prompts-1"
TEMPLATES = "templates-1"
# Manifest of every folder: one "size path" a line. Cache cleaners delete single files.
MANIFEST = ".files"
# Disk space for the wheels, for pip's copies during the download, and for the unpacked files.
ROOM = {f"{TORCH}-cpu": 2 << 30, f"{TORCH}-cuda": 6 << 30, DEMO: 1 << 30, PROMPTS: 16 << 20, TEMPLATES: 64 << 20}
# The wheels are named by their tags, not by the Python that runs this script, so that the hashes fit everywhere.
GLIBC = ["_2_28", "_2_27", "_2_25", "_2_18", "_2_17", "_2_12", "_2_5", "2014", "2010", "1"]
TAGS = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=none"]
TAGS += [f"--platform=manylinux{v}_x86_64" for v in GLIBC]
# Settings of the user's pip that would make it refuse, or fetch something else. Index, proxy and certificates stay.
PIP_UNSET = ["PIP_CONSTRAINT", "PIP_NO_BINARY", "PIP_ONLY_BINARY", "PIP_PLATFORM", "PIP_REQUIREMENT", "PIP_QUIET"]
# Parts of the torch wheel that only Python, or only CUDA, uses.
PYTHON_ONLY = ("libtorch_python", "libshm", "libtorch_global_deps")
CUDA_ONLY = ("libtorch_cuda", "libc10_cuda", "libtorch_nvshmem", "libcaffe2_nvrtc")


class Failed(Exception):
    """A sentence for the user."""


def cache_dir():
    own = os.environ.get("DRAFTMILL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(own or os.path.join(base, "draftmill")).absolute()


def say(text):
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(cache):
    """One fetch at a time: two clones that start together download once."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another fetch fills {cache}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_whole(folder):
    try:
        for line in (folder / MANIFEST).read_text().splitlines():
            size, path = line.split(" ", 1)
            if (folder / path).stat().st_size != int(size):
                return False
        return True
    except OSError:
        return False


def wheels(lock, into):
    """Downloads the wheels of a lock file. pip verifies every hash and takes no dependencies."""
    names = [line.split()[0] for line in lock.read_text().splitlines() if line.strip() and not line.startswith("#")]
    say(f"fetching {', '.join(names)}")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
    pip += ["--disable-pip-version-check", *TAGS, "--dest", str(into), "--requirement", str(lock)]
    # pip downloads into TMPDIR first; here it is on the right disk, and goes with the rest if we are killed.
    env = {key: value for key, value in os.environ.items() if key not in PIP_UNSET}
    env.update(TMPDIR=str(into), PIP_REQUIRE_VIRTUALENV="0")
    run = subprocess.run(pip, env=env, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, errors="replace")
    if run.returncode == 0:
        return sorted(into.glob("*.whl"))
    if re.search(r"No module named '?pip", run.stderr):
        raise Failed(f"{sys.executable} has no pip, which fetches the packages; install python3-pip and try again")
    if "DO NOT MATCH THE HASHES" in run.stderr:
        raise Failed(
            f"a package did not have the SHA-256 that {lock.name} names and was thrown away; try again, and if it "
            "stays so, your package index serves other files"
        )
    if "No space left on device" in run.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
    reasons = [line for line in run.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = (reasons or run.stderr.splitlines() or ["it gave no reason"])[-1]
    raise Failed(
        f"the packages of {lock.name} are neither in the cache nor to be had from the package index "
        f"(pip says: {reason.replace('ERROR: ', '').strip()}); connect this machine once, or copy a filled cache "
        "folder here and name it in DRAFTMILL_CACHE"
    )


def place(cache, name, lock, keep, ends):
    """Makes `cache/name` from the wheels of `lock`; `keep` maps a member's path to its path in the folder, or to None.

    For each of `ends` there must be a file whose path ends so."""
    done = cache / name
    if is_whole(done):
        return done
    with locked(cache):
        if is_whole(done):  # made while we waited
            return done
        for left in cache.glob(f".{name}.*"):  # of a run that was killed; the lock excludes another writer
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(cache).free
        if free < ROOM[name]:
            raise Failed(
                f"{cache} has {free >> 20} MiB free and {name} needs {ROOM[name] >> 20} MiB while it unpacks; free "
                "some, or set DRAFTMILL_CACHE to a folder on a larger disk"
            )
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=cache) as tmp:
            download, whole = pathlib.Path(tmp, "wheels"), pathlib.Path(tmp, "whole")
            download.mkdir()
            whole.mkdir()
            for wheel in wheels(HERE / lock, download):
                unpack(wheel, whole, keep)
                wheel.unlink()
            files = [path for path in sorted(whole.rglob("*")) if path.is_file()]
            for end in ends:
                if not any(str(path).endswith(end) for path in files):
                    raise Failed(f"the packages of {lock} hold no {end.lstrip('_')} file, so nothing was kept")
            lines = [f"{path.stat().st_size} {path.relative_to(whole)}\n" for path in files]
            (whole / MANIFEST).write_text("".join(lines))
            os.sync()
            if done.exists():
                say(f"{done} has lost files; replacing it")
                os.rename(done, pathlib.Path(tmp, "damaged"))
            os.rename(whole, done)
    return done


def unpack(wheel, into, keep):
    with zipfile.ZipFile(wheel) as z:  # reading checks each member's CRC
        for member in z.namelist():
            to = keep(member)
            if to and not member.endswith("/"):
                out = into / to
                out.parent.mkdir(parents=True, exist_ok=True)
                with z.open(member) as src, open(out, "wb") as dst:
                    shutil.copyfileobj(src, dst, 1 << 20)


def torch_member(cuda):
    skip = PYTHON_ONLY if cuda else PYTHON_ONLY + CUDA_ONLY

    def keep(member):
        base = os.path.basename(member)
        library = ".so" in base and not base.startswith(skip)
        wanted = member.startswith(("nvidia/", "torch/lib/")) and library or member.startswith("torch/include/")
        return member if wanted else None

    return keep


def libtorch(cache, cuda):
    if os.environ.get("LIBTORCH"):
        return own_libtorch(pathlib.Path(os.environ["LIBTORCH"]).absolute(), cuda)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Failed(
            f"Draftmill fetches libtorch for Linux on x86_64 only, and this is {sys.platform} on {platform.machine()}; "
            f"set LIBTORCH to a libtorch {VERSION} of your own"
        )
    # One path for both sets, so that a binary built against the small one finds CUDA once the full one is there.
    link = cache / TORCH
    if is_whole(link) and (not cuda or os.readlink(link).endswith("-cuda")):
        return link / "torch"
    kind = "cuda" if cuda else "cpu"
    made = place(cache, f"{TORCH}-{kind}", f"libtorch-{kind}.lock", torch_member(cuda), ["/lib/libtorch_cpu.so"])
    with locked(cache):
        fresh = cache / f".{TORCH}.link"
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        fresh.symlink_to(made.name)
        os.replace(fresh, link)
    return link / "torch"


def own_libtorch(own, cuda):
    for name in ["libtorch_cpu.so", *(["libtorch_cuda.so"] if cuda else [])]:
        if not (own / "lib" / name).exists():
            raise Failed(f"LIBTORCH is {own}, but has no lib/{name}; unset it to let Draftmill fetch its own")
    # The zip of libtorch has its version in the first file, the Python package in the second.
    for name, pattern in [("build-version", r"^([^\s+]+)"), ("version.py", r"__version__ = '([^'+]+)")]:
        with contextlib.suppress(FileNotFoundError):
            found = re.search(pattern, (own / name).read_text())
            if found and found.group(1) != VERSION and not os.environ.get("LIBTORCH_BYPASS_VERSION_CHECK"):
                raise Failed(
                    f"LIBTORCH is {own}, which is libtorch {found.group(1)}, and Draftmill is built for {VERSION}; "
                    "unset it to let Draftmill fetch its own"
                )
    return own


def demo_file(cache, suffix):
    ends = (".gguf", "_cleaned_split.json")
    folder = place(cache, DEMO, "demo.lock", lambda m: os.path.basename(m) if m.endswith(ends) else None, ends)
    return next(folder.glob("*" + suffix))


def prompts_file(cache):
    end = "mt_bench/question.jsonl"
    folder = place(cache, PROMPTS, "prompts.lock", lambda m: os.path.basename(m) if m.endswith(end) else None, ["question.jsonl"])
    return folder / "question.jsonl"


def templates_folder(cache):
    def keep(member):
        package, base = member.split("/", 1)[0], os.path.basename(member)
        return f"{package}-{base}" if base.endswith(".jinja") else None

    return place(cache, TEMPLATES, "templates.lock", keep, [".jinja"])


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("what", choices=["libtorch", "smollm2", "sharegpt", "mtbench", "templates"])
    args.add_argument("--cuda", action="store_true", help="the full set with CUDA 13.0 libraries (2.4 GB of downloads)")
    args = args.parse_args()
    if args.what == "libtorch":
        print(libtorch(cache_dir(), args.cuda))
    elif args.what == "mtbench":
        print(prompts_file(cache_dir()))
    elif args.what == "templates":
        print(templates_folder(cache_dir()))
    else:
        print(demo_file(cache_dir(), {"smollm2": ".gguf", "sharegpt": ".json"}[args.what]))


if __name__ == "__main__":
    if sys.version_info < (3, 9):
        say(f"draftmill: this is Python {platform.python_version()}, and 3.9 or newer is needed")
        sys.exit(1)
    # An orderly end also removes pip and the temporary folder; after a kill the next run removes them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except KeyboardInterrupt:
        say("draftmill: interrupted; nothing was left half-fetched")
        sys.exit(130)
    except Failed as sentence:
        say(f"draftmill: {sentence}")
        sys.exit(1)
    except zipfile.BadZipFile as e:
        say(f"draftmill: a fetched package cannot be unpacked ({e}), so nothing was kept; try again")
        sys.exit(1)
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        say(
            f"draftmill: cannot use the cache {cache_dir()}: {e.strerror or e}{where}; set DRAFTMILL_CACHE to a folder "
            "that can be written, on a disk with room"
        )
        sys.exit(1)
