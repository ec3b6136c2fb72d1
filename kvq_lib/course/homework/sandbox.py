"""Where submissions run: levels, what is mounted, limits.

    bwrap    bubblewrap: own processes, network, files; needs no rights
    unshare  the same by util-linux's unshare and chroot; needs root
    limits   resource limits and a process group: files and detached children stay
             open, so that it is taken only when it is allowed by name

A level is usable if a runner starts in it, sees the library and no other files, and can
do what homework does.  That is tried, not read off versions.
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

from ...errors import KVQError
from . import seccomp

LEVELS = ("bwrap", "unshare", "limits")
MIB = 2**20

#: What of the system is shown, where it exists.  Of /etc only what libraries read.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
SYSTEM += ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
SYSTEM += ("/etc/alternatives", "/etc/fonts", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
LIBRARY, RUNNER, WORK = "/kvq/lib", "/kvq/runner.py", "/tmp/work"
MEMORY_DISKS = ("/tmp", "/dev/shm")  # all that can be written to lies in memory

APPARMOR = """\
Ubuntu 23.10 and later forbid user namespaces to programs without an AppArmor profile,
bubblewrap included.  To allow it to bubblewrap alone, write /etc/apparmor.d/bwrap:

    abi <abi/4.0>,
    include <tunables/global>
    profile bwrap /usr/bin/bwrap flags=(unconfined) {
      userns,
    }

and run `sudo systemctl reload apparmor`.  Or grade as root."""


class SandboxError(KVQError):
    """The sandbox does not start; the message says which and why."""


@dataclass(frozen=True)
class Limits:
    """What one submission may take.

    Attributes:
        seconds: that one cell or one probe may compute, all its processes together;
            it may wait three times as long.
        total_seconds: until everything must be over, repetitions included.
        memory: bytes of all its processes and files together.
        processes: that exist at once, threads included.
        file: bytes of one file.
        disk: bytes of all files; as much again in /dev/shm.
        files: how many files.
        sockets: how many Unix sockets; each has a buffer in the kernel.
    """

    seconds: float = 20.0
    total_seconds: float = 300.0
    memory: int = 2048 * MIB
    processes: int = 64
    file: int = 64 * MIB
    disk: int = 128 * MIB
    files: int = 20_000
    sockets: int = 256


@dataclass
class Started:
    """A runner that has been started, and the grader's ends of its two pipes."""

    process: subprocess.Popen
    requests: int
    replies: int
    clean: contextlib.ExitStack

    def end(self) -> None:
        """Kill all that runs in it and give back what it held."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.clean.close()


@dataclass(frozen=True)
class Sandbox:
    """One level, for one state of the library.

    Attributes:
        level: one of LEVELS.
        library: the folder with the installed kvq_lib.
        hidden: folders that must not be seen, even inside what is mounted.
        count_processes: the kernel counts the processes of one sandbox alone.
        own_uid: as root, each sandbox becomes a user of its own.
    """

    level: str
    library: Path
    hidden: tuple[Path, ...] = ()
    count_processes: bool = True
    own_uid: bool = True

    def start(self, limits: Limits, stderr: int = subprocess.DEVNULL) -> Started:
        """Start a runner.

        Raises:
            SandboxError: the program of the level cannot be started.
        """
        given = []  # the runner's ends: closed here, once it has them
        with contextlib.ExitStack() as clean:
            try:
                theirs_in, ours_in = os.pipe()
                given.append(theirs_in)
                clean.callback(os.close, ours_in)
                ours_out, theirs_out = os.pipe()
                given.append(theirs_out)
                clean.callback(os.close, ours_out)
                os.set_blocking(ours_in, False)
                uid = clean.enter_context(_free_uid()) if self._changes_uid() else None
                folder = Path()  # bubblewrap needs none on this side
                if self.level != "bwrap":
                    folder = clean.enter_context(_folder(uid))
                work = str(folder) if self.level == "limits" else WORK
                settings = self._settings(limits, uid, work, theirs_in, theirs_out)
                command = self._command(limits, settings, folder, given)
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=given,
                    env=_environment(work),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"{self.level} does not start: {error}") from None
            finally:
                for fd in given:
                    os.close(fd)
            return Started(process, ours_in, ours_out, clean.pop_all())

    def _changes_uid(self) -> bool:
        return self.own_uid and os.geteuid() == 0

    def _settings(self, limits: Limits, uid, work: str, requests: int, replies: int):
        """What runner.py reads from its command line."""
        kernel = {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": int(limits.total_seconds) + 5,
            # A bit less than the watcher allows: one process alone then meets an
            # error that it can tell, and is not killed.  Address space is no measure:
            # torch and its threads reserve ten times what they use.
            "RLIMIT_DATA": limits.memory // 8 * 7,
            "RLIMIT_FSIZE": limits.file,
            "RLIMIT_NOFILE": 256,
        }
        if self.count_processes:
            kernel["RLIMIT_NPROC"] = limits.processes
        alone = self.level != "limits"
        return {
            "requests": requests,
            "replies": replies,
            "uid": uid,
            "limits": kernel,
            "filter": b64encode(seccomp.program()).decode(),
            "path": [LIBRARY if alone else str(self.library)],
            "site": [p for p in site.getsitepackages() if os.path.isdir(p)],
            "folder": work,
        }

    def _command(
        self, limits: Limits, settings: dict, folder: Path, given: list[int]
    ) -> list[str]:
        runner = str(_RUNNER) if self.level == "limits" else RUNNER
        python = [sys.executable, "-I", "-S", "-X", "utf8", runner]
        python.append(json.dumps(settings))
        if self.level == "bwrap":
            given.append(_readable("\0".join(_bwrap(self, limits)).encode()))
            return [_tool("bwrap"), "--args", str(given[-1]), "--", *python]
        if self.level == "unshare":
            return _unshare(self, limits, folder, python)
        return python


_RUNNER = Path(__file__).with_name("runner.py")
_UIDS = range(60_600, 61_100)  # users that systems leave alone


def _tool(name: str) -> str:
    """Where a program is, on the grader's own path."""
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"there is no {name}")
    return found


def _readable(data: bytes) -> int:
    """A file descriptor from which `data` can be read."""
    fd = os.memfd_create("kvq")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@contextlib.contextmanager
def _free_uid():
    """A user that no other sandbox of this machine uses: limits of the kernel that
    count by user then hold for each sandbox alone."""
    folder = Path("/run/kvq-uids")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for uid in _UIDS:
        with (folder / str(uid)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield uid
            return
    raise SandboxError(f"{len(_UIDS)} sandboxes are running already")


@contextlib.contextmanager
def _folder(uid: int | None):
    """A private folder on the grader's side; the place of work at level limits."""
    folder = Path(tempfile.mkdtemp(prefix="kvq-sandbox-"))
    try:
        if uid is not None:
            os.chown(folder, uid, uid)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: str) -> dict[str, str]:
    """All that the runner inherits: nothing of the grader's own."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": folder,
        "USER": "student",
        "LOGNAME": "student",
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


# -- what is mounted -----------------------------------------------------------------


def mounts(sandbox: Sandbox) -> list[tuple[str, str, str]]:
    """(kind, source, place) of all that is shown, outer folders first.

    Kinds: "ro" a file or folder to read; "link" a symbolic link; "hide" an empty
    folder over something that a mounted folder would show.
    """
    found = {}
    for path in SYSTEM:
        if os.path.islink(path):
            found[path] = ("link", os.readlink(path))
        elif os.path.exists(path):
            found[path] = ("ro", path)
    here = [sys.prefix, sys.base_prefix, *site.getsitepackages()]
    here.append(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    for path in filter(os.path.isdir, [*here, *map(os.path.realpath, here)]):
        found.setdefault(os.path.abspath(path), ("ro", os.path.realpath(path)))
    shown = [Path(place) for place, (kind, _) in found.items() if kind == "ro"]
    for path in sandbox.hidden:
        if any(path.is_relative_to(folder) for folder in shown):
            found.setdefault(str(path), ("hide", ""))
    found[LIBRARY] = ("ro", str(sandbox.library))
    found[RUNNER] = ("ro", str(_RUNNER))
    places = sorted(found, key=lambda place: (place.count("/"), place))
    return [(*found[place], place) for place in places]


def _bwrap(sandbox: Sandbox, limits: Limits) -> list[str]:
    """bubblewrap's options.  Root stays in its own user namespace, so that it can
    become another user: a namespace that bubblewrap makes has one user alone."""
    if sandbox._changes_uid():
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        spaces += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        spaces += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        spaces = ["--unshare-all", "--uid", "1000", "--gid", "1000"]
        spaces += ["--cap-drop", "ALL"]
    command = [*spaces, "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    empty = ["/dev", "/"]
    for kind, source, place in mounts(sandbox):
        for parent in reversed(Path(place).parents):  # else only root could pass
            command += ["--perms", "0755", "--dir", str(parent)]
        if kind == "ro":
            command += ["--ro-bind", source, place]
        elif kind == "link":
            command += ["--symlink", source, place]
        else:
            command += ["--tmpfs", place]
            empty.append(place)
    command += ["--proc", "/proc", "--dev", "/dev"]
    for place in MEMORY_DISKS:
        command += ["--perms", "1777", "--size", str(limits.disk), "--tmpfs", place]
    command += ["--perms", "0777", "--dir", WORK]
    for place in empty:  # nothing but those two takes files: they alone have a size
        command += ["--remount-ro", place]
    return [*command, "--chdir", WORK]


def _unshare(
    sandbox: Sandbox, limits: Limits, folder: Path, python: list[str]
) -> list[str]:
    """A shell that mounts the same in namespaces of its own, then becomes Python."""
    root = shlex.quote(str(folder))
    small = "mount -t tmpfs -o mode=755,size=1m,nr_inodes=1000,nosuid none"
    size = f"size={limits.disk},nr_inodes={limits.files},mode=1777,nosuid,nodev"
    lines = ["set -e", f"{small} {root}"]
    for kind, source, place in mounts(sandbox):
        there = shlex.quote(f"{folder}{place}")
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(f'{folder}{place}'))}")
        if kind == "link":
            lines.append(f"ln -s {shlex.quote(source)} {there}")
        elif kind == "hide":
            lines.append(f"{small} {there}")
        else:
            new = "mkdir -p" if os.path.isdir(source) else "touch"
            lines.append(f"[ -e {there} ] || {new} {there}")
            lines.append(f"mount --bind {shlex.quote(source)} {there}")
            lines.append(f"mount -o remount,bind,ro,nosuid {there}")
    lines += [f"mkdir {root}/proc {root}/dev {root}/tmp {root}/dev/shm"]
    lines += [f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc"]
    for name in DEVICES:
        lines.append(f"touch {root}/dev/{name}")
        lines.append(f"mount --bind /dev/{name} {root}/dev/{name}")
    lines += [f"mount -t tmpfs -o {size} none {root}{p}" for p in MEMORY_DISKS]
    lines += [f"mkdir -m 777 {root}{WORK}", f"mount -o remount,ro,nosuid {root}"]
    lines += ['exec chroot "$@"']
    spaces = ["--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child"]
    script = ["/bin/sh", "-c", "\n".join(lines), "sh", str(folder), *python]
    dies_too = [_tool("setpriv"), "--pdeathsig", "KILL"]
    return [*dies_too, _tool("unshare"), *spaces, *script]
