"""An installed copy of kvq_lib for the sandbox, built once for each state of the code.

The sandbox must not see the checkout: there lie the keys.  So a wheel is built from a
copy of the sources, without network, and unpacked under the user's cache folder, in a
folder named by the hash of all that went into it.
"""

import compileall
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

from ...errors import KVQError

# What pip would call, without the three seconds in which pip looks around.
_BUILD = (
    "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
)
_MONTH = 30 * 86400  # seconds
_SKIPPED = {"__pycache__", "build", "dist"}


class LibraryError(KVQError):
    """The wheel of kvq_lib could not be built; the message says why."""


def cache_folder() -> Path:
    """Where things that can be made again are kept: KVQ_CACHE, or the user's own."""
    if chosen := os.environ.get("KVQ_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvq"


def find_root(start: "str | Path | None" = None) -> Path:
    """The checkout: `start`, or the current folder or one above it, or where this
    package lies.

    Raises:
        LibraryError: there is none.
    """
    here = Path(__file__).resolve().parents[3]
    tried = [Path(start)] if start else [Path.cwd(), *Path.cwd().parents, here]
    for folder in tried:
        if (folder / "pyproject.toml").is_file() and (folder / "kvq_lib").is_dir():
            return folder.resolve()
    raise LibraryError(f"no checkout of kvq_lib at {tried[0]}: give --root DIR")


def _sources(root: Path) -> list[Path]:
    """Files that make the wheel, relative to the checkout, sorted."""
    found = [Path(name) for name in ("pyproject.toml", "README.md", "LICENSE")]
    for path in (root / "kvq_lib").rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            found.append(path.relative_to(root))
    return sorted(p for p in found if not _SKIPPED & set(p.parts))


def library_hash(root: Path) -> str:
    """SHA-256 of the sources, the Python and the tool that builds."""
    total = hashlib.sha256(f"{sys.version} {metadata.version('setuptools')}".encode())
    for path in _sources(root):
        if (root / path).exists():
            data = (root / path).read_bytes()
            total.update(f"\0{path.as_posix()}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def installed(root: Path) -> Path:
    """A folder that holds kvq_lib as its wheel installs it; built if it is missing.

    Several processes may ask at once: each builds in a folder of its own, and the
    first to finish is kept.

    Raises:
        LibraryError: the build failed.
    """
    home = cache_folder() / "library"
    target = home / library_hash(root)[:32]
    if target.is_dir():
        os.utime(target)  # it is in use
        return target
    home.mkdir(parents=True, exist_ok=True)
    _tidy(home)
    with tempfile.TemporaryDirectory(dir=home, prefix="building-") as work:
        made = _build(root, Path(work))
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # not that another process was faster
                raise
    return target


def _tidy(home: Path) -> None:
    """Remove what nobody has asked for in a month: every change makes one more."""
    for folder in home.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - folder.stat().st_mtime > _MONTH:
                shutil.rmtree(folder, ignore_errors=True)


def _build(root: Path, work: Path) -> Path:
    source, wheels, made = work / "source", work / "wheels", work / "made"
    for path in _sources(root):
        if (root / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, source / path)
    wheels.mkdir()
    run = subprocess.run(
        [sys.executable, "-I", "-c", _BUILD, str(wheels)],
        cwd=source,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    found = list(wheels.glob("*.whl")) if run.returncode == 0 else []
    if len(found) != 1:
        end = " ".join((run.stderr or run.stdout).split())[-500:]
        raise LibraryError(f"the wheel of kvq_lib could not be built: {end}")
    with zipfile.ZipFile(found[0]) as wheel:
        wheel.extractall(made)
    # The sandbox reads only: what is not compiled now is compiled at every start.
    compileall.compile_dir(made, quiet=2)
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return made
