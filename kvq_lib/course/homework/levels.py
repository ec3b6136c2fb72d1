"""Which sandbox works here: the strongest that starts and keeps what it promises."""

import subprocess
from pathlib import Path

from .library import find_root, installed
from .pipe import Pipe, Stopped
from .sandbox import APPARMOR, LEVELS, LIBRARY, Limits, Sandbox, SandboxError

_FIX = """\
Install bubblewrap (`apt-get install bubblewrap`, 0.7 or newer), or grade as root."""

# What homework does must work inside.  The answer: where the library comes from, and
# how many network interfaces and folders of the checkout are seen.
_TRIAL = """\
import importlib.util, os, tempfile, threading
thread = threading.Thread(target=list)
thread.start()
thread.join()
with tempfile.TemporaryFile() as file:
    file.write(b"x")
with open("/proc/net/dev") as table:
    interfaces = len(table.readlines()) - 2
seen = [path for path in {hidden!r} if os.path.exists(path)]
[importlib.util.find_spec("kvq_lib").origin, interfaces, len(seen)]
"""


def choose(
    level: str = "auto",
    root: "str | Path | None" = None,
    hidden: "tuple[Path, ...]" = (),
    allow_weak: bool = False,
) -> Sandbox:
    """The sandbox of a level, tried out.

    Args:
        level: one of LEVELS, or "auto" for the strongest that works.
        root: the checkout whose kvq_lib is installed inside, and which is hidden.
        hidden: more folders that must not be seen: submissions, keys.
        allow_weak: level "limits" may be taken.

    Raises:
        SandboxError: none works, or only one that is not allowed; with the reasons.
        LibraryError: there is no checkout, or no wheel can be built from it.
    """
    root = find_root(root)
    folders = tuple(dict.fromkeys(path.resolve() for path in (root, *hidden)))
    library = installed(root)
    reasons = []
    for name in LEVELS if level == "auto" else (level,):
        if name == "limits" and not allow_weak:
            reasons.append(
                "limits: files of this machine and detached children stay open; take "
                "it with --allow-weak if you trust the submissions"
            )
            continue
        for changes in _variants(name):
            found = Sandbox(name, library, folders, **changes)
            reason = _trial(found)
            if not reason:
                return found
        reasons.append(reason)
    raise SandboxError(
        "\n".join(["no sandbox works here:", *reasons, _advice(reasons)])
    )


def _variants(level: str) -> list[dict]:
    """What is tried, the strongest first: old kernels count a user's processes across
    all sandboxes, and another user may be unable to read this Python."""
    variants = [{}, {"count_processes": False}]
    if level == "limits":
        variants.append({"count_processes": False, "own_uid": False})
    return variants


def _trial(sandbox: Sandbox) -> str:
    """Why a sandbox does not do, or "" if it does."""
    name = sandbox.level
    code = _TRIAL.format(hidden=[str(p / "kvq_lib") for p in sandbox.hidden])
    try:
        with Pipe(sandbox, Limits(seconds=30), stderr=subprocess.PIPE) as pipe:
            watched = pipe.watched()
            value, error = pipe.probe(code, 0)
    except SandboxError as failed:
        return str(failed)
    except Stopped as stopped:
        return f"{name}: the trial was stopped ({stopped.kind})"
    if error:
        return f"{name}: the trial failed ({error})"
    origin, interfaces, seen = value
    if name == "limits":
        return ""
    if not origin.startswith(LIBRARY):
        return f"{name}: it does not use the installed library"
    if watched < 2:
        return f"{name}: this kernel does not say which processes are inside"
    if interfaces != 1 or seen:
        return f"{name}: it shows the network or files of this machine"
    return ""


def _advice(reasons: list[str]) -> str:
    """How to make one work; Ubuntu's block speaks through bubblewrap's own words."""
    blocked = any("uid map" in r or "RTM_NEWADDR" in r for r in reasons)
    try:
        with open("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") as file:
            blocked |= file.read().strip() == "1"
    except OSError:  # no such block in this kernel
        return APPARMOR if blocked else _FIX
    return APPARMOR if blocked else _FIX
