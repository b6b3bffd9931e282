"""Packages of other projects to compare with: installed once, by name and version, into a virtual environment in the cache."""
import subprocess
import sys
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from fetch import cache_dir  # noqa: E402

def environment(name, folder):
    """Returns a Python with the packages of `folder`: requirements.txt, and packages.txt without dependencies."""
    home = cache_dir() / name
    python, whole = home / "bin" / "python", home / ".whole"
    wanted = (folder / "requirements.txt").read_text() + (folder / "packages.txt").read_text()
    if not (whole.exists() and whole.read_text() == wanted):
        print(f"installing the packages of {folder.name} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", folder / "requirements.txt"], check=True)
        subprocess.run([*pip, "--no-deps", "--requirement", folder / "packages.txt"], check=True)
        whole.write_text(wanted)
    return python
