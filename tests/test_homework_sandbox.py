"""The sandbox: its levels, what is seen inside, and what homework needs to work."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_attacks import ATTACKS

from kvq_lib.course.homework import levels, library, seccomp
from kvq_lib.course.homework.sandbox import WORK, Limits, Sandbox, SandboxError
from kvq_lib.course.homework.session import Cell, Outcome, Probe, run_cells

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
SHORT = Limits(seconds=1, total_seconds=60)


def chosen(level: str) -> Sandbox:
    if level == "unshare" and os.geteuid() != 0:
        pytest.skip("unshare needs root")
    return levels.choose(level, ROOT, allow_weak=True)


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return chosen("bwrap")


@pytest.fixture(scope="module", params=["bwrap", "unshare", "limits"])
def each(request) -> Sandbox:
    return chosen(request.param)


def asked(box: Sandbox, code: str, *cells: str, limits: Limits = SHORT) -> Outcome:
    """What a probe gives after some cells."""
    made = [Cell(cell, number=n) for n, cell in enumerate(cells, 1)]
    return run_cells(made, [Probe("q1", code)], box, limits).outcomes[0]


# -- levels --------------------------------------------------------------------------


def test_each_level_runs_cells_and_keeps_time(each):
    cells = [
        Cell("x = 3", number=1),
        Cell("while True: pass", "answer", ("q1",), 2),
        Cell("y = x + 1", "answer", ("q2",), 3),
    ]
    asked = [Probe("q1", "[x]"), Probe("q2", "[y]"), Probe("q3", "[nothing]")]
    run = run_cells(cells, asked, each, SHORT)
    assert run.outcomes[:2] == [Outcome([3]), Outcome([4])]
    assert run.outcomes[2] == Outcome(None, "raised", "NameError")
    assert run.cells == {2: Outcome(failure="time")}
    assert run.unanswered == ["q3"]
    assert run.starts == 2


_NO_MEMFD = """\
import os
try: os.memfd_create("x")
except PermissionError: pass
else: 1 / 0"""


def test_each_level_refuses_calls(each):
    """Also where files stay open: network, memory of no process, tracing of others."""
    cells = [
        *ATTACKS["network"].cells[:2],
        _NO_MEMFD,
        "libc = ctypes.CDLL(None)\nassert libc.ptrace(16, 1, 0, 0) == -1",
        "assert libc.unshare(0x10000000) == -1",
        "try: os.kill(-1, 0)\nexcept PermissionError: pass\nelse: 1 / 0",
    ]
    made = [Cell(code, number=n) for n, code in enumerate(cells)]
    assert run_cells(made, [], each, SHORT).cells == {}


@pytest.mark.parametrize(
    "name",
    [
        "search of the disk",
        "search of processes",
        "repository by import",
        "writes elsewhere",
        "kill everybody",
    ],
)
@pytest.mark.parametrize("level", ["bwrap", "unshare"])
def test_strong_levels_show_nothing_else(level, name):
    cells = [Cell(c, number=n) for n, c in enumerate(ATTACKS[name].cells[:2], 1)]
    run = run_cells(cells, [Probe("q1", "[1]")], chosen(level), SHORT)
    assert run.cells == {}
    assert run.outcomes == [Outcome([1])]


def test_auto_takes_the_strongest(box):
    assert levels.choose("auto", ROOT) == box


def test_the_weakest_must_be_allowed():
    with pytest.raises(SandboxError, match="--allow-weak"):
        levels.choose("limits", ROOT)


def test_without_tools_the_reasons_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as error:
        levels.choose("auto", ROOT)
    text = str(error.value)
    assert "bwrap does not start" in text and "unshare does not start" in text
    assert "limits:" in text and "apt-get install bubblewrap" in text
    assert levels.choose("auto", ROOT, allow_weak=True).level == "limits"


def test_ubuntus_block_is_explained(monkeypatch, tmp_path):
    """bubblewrap is there and may not make a namespace: its own words say so."""
    fake = tmp_path / "bwrap"
    fake.write_text(
        "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError) as error:
        levels.choose("bwrap", ROOT)
    text = str(error.value)
    assert "setting up uid map" in text and "/etc/apparmor.d/bwrap" in text


@pytest.mark.parametrize(
    "value, error, watched, reason",
    [
        (["/kvq/lib/kvq_lib/__init__.py", 1, 0], "", 3, ""),
        (["/home/a/kvq_lib/__init__.py", 1, 0], "", 3, "not use the installed library"),
        (["/kvq/lib/kvq_lib/__init__.py", 2, 0], "", 3, "shows the network"),
        (["/kvq/lib/kvq_lib/__init__.py", 1, 1], "", 3, "shows the network or files"),
        (["/kvq/lib/kvq_lib/__init__.py", 1, 0], "", 1, "which processes"),
        (None, "RuntimeError", 3, "failed (RuntimeError)"),
    ],
)
def test_a_level_is_tried_not_believed(
    monkeypatch, tmp_path, value, error, watched, reason
):
    class Fake:
        def __init__(self, *arguments, **options):
            self.watched = lambda: watched
            self.probe = lambda code, seed: (value, error)

        def __enter__(self):
            return self

        def __exit__(self, *what):
            return None

    monkeypatch.setattr(levels, "Pipe", Fake)
    found = levels._trial(Sandbox("bwrap", tmp_path))
    assert reason in found and bool(found) == bool(reason)


# -- what is mounted -----------------------------------------------------------------


def test_the_repository_is_not_there(box):
    """Not its files, also where the environment lies inside it; the library is."""
    inside = [str(ROOT / name) for name in ("tests", ".git", "kvq_lib", "solutions")]
    code = (
        f"import importlib.util, os, sys\n[[os.path.exists(p) for p in {inside!r}], "
        "importlib.util.find_spec('kvq_lib').origin, os.path.exists(sys.executable)]"
    )
    value = asked(box, code).value
    assert value == [[False] * 4, "/kvq/lib/kvq_lib/__init__.py", True]


def test_a_hidden_folder_inside_a_mounted_one_is_empty(box, tmp_path):
    """A checkout below /usr, say, with its environment inside."""
    place = Path(sys.prefix) / "lib"
    hiding = Sandbox(box.level, box.library, (Path("/usr/share"), place))
    code = (
        f"import os\n[os.listdir('/usr/share'), len(os.listdir('/usr/lib')) > 9, "
        f"os.listdir({str(place)!r})]"
    )
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert asked(hiding, code).value == [[], True, [python]]
    assert asked(hiding, "import numpy\n[numpy.ones(2).sum()]").value == [2.0]


def test_disks_are_small(box):
    limits = Limits(seconds=5, disk=2**20)
    code = (
        "def fill(path):\n    try:\n        with open(path, 'wb') as f:\n"
        "            for n in range(100): f.write(bytes(2**16)); f.flush()\n"
        "    except OSError as error: return error.errno\n    return 0\n"
        f"[fill('{WORK}/x'), fill('/tmp/y'), fill('/dev/shm/x'), fill('/dev/null')]"
    )
    assert asked(box, code, limits=limits).value == [28, 28, 28, 0]


_FILES = """\
import os, time
for place in ("/tmp/x", "/dev/shm/x"):
    with open(place, "wb") as f:
        for n in range(40): f.write(bytes(2**20))
if not os.fork(): os._exit(0)  # one that is dead stays in the list of processes
time.sleep(30)
1"""
# Each pair goes through another and is closed: no process holds it.
_SOCKETS = """\
import array, socket, time
one, two = socket.socketpair()
for n in range(30):
    pair = socket.socketpair()
    fds = array.array("i", [s.fileno() for s in pair])
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    for s in pair: s.close()
time.sleep(30)
1"""


@pytest.mark.parametrize("level", ["bwrap", "unshare"])
@pytest.mark.parametrize(
    "code, enough, less",
    [
        (_FILES, Limits(memory=160 * MIB), Limits(memory=84 * MIB)),
        (_SOCKETS, Limits(sockets=62), Limits(sockets=61)),
    ],
)
def test_what_the_kernel_holds_counts_as_memory(level, code, enough, less):
    """Files and sockets belong to no process: 80 MiB, and 62 of them."""
    box, short = chosen(level), {"seconds": 10}
    quick = code.replace("time.sleep(30)", "time.sleep(0.3)")
    assert asked(box, quick, limits=replace(enough, **short)).value == 1
    assert asked(box, code, limits=replace(less, **short)).failure == "memory"


def test_sockets_are_as_small_as_usual(each):
    code = (
        "import asyncio, socket\none, two = socket.socketpair()\n"
        "try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)\n"
        "except PermissionError: refused = 1\n"
        "one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "[refused, asyncio.run(asyncio.sleep(0, 5))]"
    )
    assert asked(each, code).value == [1, 5]


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_processes_are_counted(box, kernel_counts):
    """By the kernel, and where it cannot count those of a sandbox, by the grader."""
    bounded = Sandbox(box.level, box.library, count_processes=kernel_counts)
    code = (
        "import os, time\nfor n in range(99):\n"
        "    if not os.fork():\n        time.sleep(30)\n        os._exit(0)\n"
        "time.sleep(30)\n[n]"
    )
    found = asked(bounded, code, limits=Limits(processes=20))
    error = "BlockingIOError" if kernel_counts else ""
    kind = "raised" if kernel_counts else "processes"
    assert (found.failure, found.error) == (kind, error)


def test_only_the_runners_own_processes_are_seen(box):
    code = "import os\nsorted(map(int, filter(str.isdigit, os.listdir('/proc'))))"
    assert asked(box, code).value == [1, 2]


def test_nothing_of_the_graders_environment_is_inside(each, monkeypatch):
    monkeypatch.setenv("KVQ_SECRET", "SECRET7f3a")
    code = (
        "import os, pathlib\nfound = []\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/environ'):\n"
        "    try: text = path.read_bytes()\n    except OSError: continue\n"
        "    if path.parent.name in (str(os.getpid()), '1'): found.append(text)\n"
        "[sum(b'SECRET7f3a' in text for text in found), 'KVQ_SECRET' in os.environ,\n"
        " os.environ['HOME'] == os.getcwd(), os.environ['TRITON_INTERPRET']]"
    )
    if each.level == "limits":  # there, other processes are seen
        code = code.replace(", '1'", "")
    assert asked(each, code).value == [0, False, True, "1"]


def test_the_filter_is_loaded(box):
    """Also where numbers of system calls are not known, the rest must work."""
    assert seccomp.program()
    code = "[l.split()[1] for l in open('/proc/self/status') if 'Seccomp:' in l]"
    assert asked(box, code).value == ["2"]


# -- the library ---------------------------------------------------------------------


def test_the_library_is_built_once_for_each_content(monkeypatch, tmp_path):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "checkout"
    (root / "kvq_lib" / "data").mkdir(parents=True)
    (root / "solutions").mkdir()
    (root / "solutions" / "secret.txt").write_text("key")
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (root / "README.md").write_text("read me")
    (root / "kvq_lib" / "__init__.py").write_text("answer = 1\n")
    (root / "kvq_lib" / "data" / "table.csv").write_text("a,b\n")
    before = sorted(root.rglob("*"))
    with ThreadPoolExecutor(3) as pool:  # all at once
        found = set(pool.map(library.installed, [root] * 3))
    assert len(found) == 1
    made = found.pop()
    names = sorted(p.relative_to(made).as_posix() for p in made.rglob("*.*"))
    assert "kvq_lib/__init__.py" in names and "kvq_lib/data/table.csv" in names
    assert any(name.endswith(".pyc") for name in names)
    assert not any("secret" in name or "checkout" in name for name in names)
    assert sorted(root.rglob("*")) == before  # the checkout is left as it was
    assert list((tmp_path / "cache" / "library").iterdir()) == [made]
    (root / "kvq_lib" / "__init__.py").write_text("answer = 2\n")
    os.utime(made, (0, 0))  # nobody has used it for long
    again = library.installed(root)
    assert again != made and not made.exists()
    os.utime(again, (0, 0))
    assert library.installed(root) == again  # used: it stays
    assert again.stat().st_mtime > 10**9


def test_a_library_that_cannot_be_built_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "kvq_lib").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 3\n")
    with pytest.raises(library.LibraryError, match="could not be built"):
        library.installed(tmp_path)
    assert list((tmp_path / "cache" / "library").iterdir()) == []
    with pytest.raises(library.LibraryError, match="--root"):
        library.find_root(tmp_path / "nowhere")
