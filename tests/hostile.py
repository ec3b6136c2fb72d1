"""Submissions of every kind that a grader meets, honest and hostile.

`CODE` holds notebooks that differ in their cells; `hostile_files` those that differ in
the file around them.  Each has a name, which is its student's, and what it must get.

The homework has two questions.  q1 asks for `square(x)`, 2 points; q2 for
`means(xs)`, the running means, 3 points.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

#: Put where a submission may write text: none of it may reach a student or a sheet.
SECRET = "SECRET7f3a"

GIVEN = "import os, sys, time, ctypes, json, math"
SQUARE = "# @answer q1\ndef square(x):\n    return x * x"
MEANS = """\
# @answer q2
def means(xs):
    total, found = 0, []
    for n, x in enumerate(xs, 1):
        total += x
        found.append(total / n)
    return found"""
CHECK = "# @check q1\nassert square(3) == 9\nprint('fine')"


def key() -> dict:
    """The key, as the builder writes one."""

    def probe(name, points, code, expected):
        found = {"name": name, "points": points, "rtol": 1e-9, "atol": 0.0, "seed": 0}
        return {**found, "code": code, "expected": expected}

    found = {
        "homework": "hw90",
        "format": 1,
        "title": "Squares",
        "torch": False,
        "questions": [
            {
                "id": "q1",
                "title": "square",
                "cells": 1,
                "probes": [
                    probe("small", 0.7, "[square(-3), square(1.5)]", [9, 2.25]),
                    probe("large", 1.3, "[square(10**6), square(7)]", [10**12, 49]),
                ],
            },
            {
                "id": "q2",
                "title": "means | running",
                "cells": 1,
                "probes": [
                    probe("three", 1.0, "means([3, 5, 10])", [3, 4, 6]),
                    probe("many", 2.0, "means(list(range(40)))[-2:]", [19.0, 19.5]),
                ],
            },
        ],
    }
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return found | {"hash": digest}


@dataclass(frozen=True)
class Kind:
    """What a submission must get.

    Attributes:
        status: of its row.
        q1, q2: points.
        cells: code cells of its notebook.
        note: words that its notes must hold.
    """

    status: str
    q1: float
    q2: float
    cells: tuple[str, ...] = ()
    note: str = ""


def kind(
    status,
    q1,
    q2,
    *,
    first=SQUARE,
    second=MEANS,
    before=(),
    between=(),
    after=(),
    note="",
):
    """A notebook with the usual cells and others besides.

    Args:
        first, second: answers to q1 and q2; None leaves the cell out.
        before: cells before the answers.
        between: cells between the answer to q1 and its check.
        after: cells between that check and the answer to q2.
    """
    cells = [GIVEN, *before, first, *between, CHECK, *after, second]
    return Kind(status, q1, q2, tuple(c for c in cells if c is not None), note)


#: An answer to q1 that needs a cell of the student's own.
HELPED = SQUARE.replace("x * x", "twice(x, x)")
HELPER = "def twice(a, b):\n    return a * b"


def answer(body: str, top: str = "") -> str:
    """An answer to q1: code at the top, then the body of `square`."""
    lines = "\n    ".join(body.split("\n"))
    return f"# @answer q1\n{top}\ndef square(x):\n    {lines}"


def spoiled(code: str, status="partial", q1=0, note="") -> Kind:
    """An answer cell of q1 that does something as it runs; q2 is right."""
    return kind(status, q1, 3, first=f"{SQUARE}\n{code}", note=note)


def inside(body: str, status="partial", q1=0, note="") -> Kind:
    """A `square` that does something as it is called; q2 is right."""
    return kind(status, q1, 3, first=answer(body), note=note)


def survived(code: str) -> Kind:
    """A cell before the answers that must change nothing, all of which are right."""
    return kind("ok", 2, 3, before=(code,))


CODE = {
    # -- honest
    "right": kind("ok", 2, 3),
    "blank": kind(
        "ok",
        0,
        0,
        first=answer("raise NotImplementedError('q1')"),
        second="# @answer q2\ndef means(xs):\n    raise NotImplementedError('q2')",
    ),
    "half right": inside("return abs(x) * min(x, 10)", "ok", 0),
    "one probe right": inside("return x * x if x != 7 else 0", "ok", 0.7),
    "syntax error": kind("partial", 0, 3, first="# @answer q1\ndef square(x) return x"),
    "error in a given cell": kind("partial", 2, 3, before=("import nothing_such",)),
    "input": spoiled("name = input('who? ')", note="EOFError", q1=2),
    "magics": kind(
        "ok",
        2,
        3,
        first=f"%%time\n{SQUARE}\n%timeit square(3)\n!pip install nothing\nsquare?",
        before=(
            "%matplotlib inline\nfiles = !ls\nx = '''\n%no magic'''",
            "%%bash\nrm *",
        ),
        note="4 magic lines left out",
    ),
    "await": kind("ok", 2, 3, before=("import asyncio\nawait asyncio.sleep(0)",)),
    "display": survived("display(1)\nget_ipython().run_line_magic('time', '')"),
    "two answers in one cell": kind(
        "ok", 2, 3, first=f"{SQUARE}\n{MEANS}", second=None
    ),
    "answer twice, right last": kind(
        "ok",
        2,
        3,
        first=answer("return 1"),
        after=(SQUARE,),
        note="q1: answered by 2 cells",
    ),
    "answer twice, blank last": kind(
        "ok",
        0,
        3,
        after=(answer("raise NotImplementedError"),),
        note="q1: answered by 2 cells, of 1",
    ),
    "answer missing": kind("partial", 2, 0, second=None, note="q2: no cell answers it"),
    "answer without mark": kind(
        "partial", 2, 3, second=MEANS.replace("# @answer q2\n", ""), note="q2: no cell"
    ),
    "unknown question": kind(
        "ok", 2, 3, before=("# @answer q77\nx = 1",), note="no question of this"
    ),
    "exact types": inside("import fractions\nreturn fractions.Fraction(x)", "ok", 0),
    "helper after its answer": kind("ok", 2, 3, first=HELPED, between=(HELPER,)),
    "helper, check deleted": Kind("ok", 2, 3, (GIVEN, HELPED, HELPER, MEANS)),
    "helper after the check": kind("ok", 0, 3, first=HELPED, after=(HELPER,)),
    # -- between an answer and its check
    "loop before the check": kind(
        "partial", 2, 3, between=("while True: pass",), note="ran out of time"
    ),
    "exit before the check": kind(
        "partial", 2, 3, between=("os._exit(0)",), note="ended the process"
    ),
    "answer spoiled before the check": kind(
        "ok", 0, 3, between=("def square(x): os.kill = None",)
    ),
    "other answer before the check": kind(
        "ok", 2, 3, between=("def means(xs): os._exit(0)",)
    ),
    # -- checks and outputs
    "checks deleted": Kind("ok", 2, 3, (GIVEN, SQUARE, MEANS)),
    "checks edited": kind("ok", 2, 3, after=("# @check q1\nos._exit(1)",)),
    "checks doubled": kind("ok", 2, 3, after=(CHECK, CHECK)),
    "check that redefines": kind(
        "ok", 0, 3, first=answer("return 0"), after=(f"# @check q1\n{SQUARE[13:]}",)
    ),
    # -- time
    "endless loop": spoiled("while True: pass", note="ran out of time"),
    "endless loop inside": inside("while True: pass"),
    "endless loop, deaf": spoiled(
        "import signal\nfor n in (1, 2, 14, 15): signal.signal(n, signal.SIG_IGN)\n"
        "while True:\n    try:\n        while True: pass\n"
        "    except BaseException: pass"
    ),
    "sleep": inside("time.sleep(1e6)"),
    "stopped": spoiled("os.kill(os.getpid(), 19)\nos.kill(0, 19)"),
    "endless str": inside(
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"
    ),
    "slow regular expression": inside("import re\nre.match('(a+)+$', 'a' * 40 + 'b')"),
    "slow number": inside("return 7 ** 7 ** 9"),
    # -- endings
    "sys.exit": spoiled("sys.exit()", q1=2, note="SystemExit"),
    "sys.exit inside": inside("sys.exit(0)", "ok"),
    "os._exit": spoiled("os._exit(0)", note="ended the process"),
    "os._exit inside": inside("os._exit(0)"),
    "segmentation fault": spoiled("ctypes.string_at(0)"),
    "abort inside": inside("os.abort()"),
    "kill itself": spoiled("os.kill(os.getpid(), 9)\ntime.sleep(9)"),
    "exit later": kind(
        "partial",
        2,
        0,
        after=(
            "import threading\nthreading.Timer(0.1, os._exit, (0,)).start()",
            "time.sleep(9)",
        ),
        second=MEANS.replace("total, found", "time.sleep(9); total, found"),
    ),
    "interrupt": inside("raise KeyboardInterrupt", "ok"),
    "own error": inside(f"raise type('{SECRET}', (BaseException,), {{}})", "ok"),
    "recursion": inside("return square(x)", "ok"),
    "deep recursion": kind(
        "partial",
        0,
        3,
        first="# @answer q1\nsys.setrecursionlimit(10**9)\nclass A:\n"
        f"    def __getattr__(self, n): return getattr(self, n)\nA().x\n{SQUARE[13:]}",
    ),
    # -- memory, processes, disk
    "memory": spoiled(
        "x = [bytearray(2**24) for n in range(200)]", note="memory", q1=2
    ),
    "memory inside": inside("return len([bytearray(2**24) for n in range(200)])", "ok"),
    "shared memory": spoiled(
        "import mmap\nblock, x = b'1' * 2**22, []\nfor n in range(2000):\n"
        "    x.append(mmap.mmap(-1, 2**22))\n    x[-1].write(block)",
        note="memory",
    ),
    "memory of many": spoiled(
        "import signal\nfor n in range(24):\n    if not os.fork():\n"
        "        x = b'1' * 3 * 10**7\n        time.sleep(60)\n        os._exit(0)\n"
        "time.sleep(60)",
        note="memory",
    ),
    "memory of sockets": spoiled(
        "import signal, socket\npairs = []\nfor n in range(4):\n"
        "    if not os.fork():\n        for n in range(100):\n"
        "            pairs.append(socket.socketpair())\n"
        "            pairs[-1][0].setblocking(False)\n"
        "            try: pairs[-1][0].sendall(bytes(10**7))\n"
        "            except BlockingIOError: pass\n"
        "        time.sleep(60)\n        os._exit(0)\ntime.sleep(60)",
        note="memory",
    ),
    "memory without a process": survived(
        "try:\n    os.memfd_create('x')\nexcept OSError as e: assert e.errno == 1\n"
        "else: 1 / 0\nlibc = ctypes.CDLL(None)\n"
        "assert libc.shmget(0, 10**9, 0o1600) == -1"
    ),
    # Two thousand processes, where nothing stops it: enough to see, not to be felt.
    "fork bomb": spoiled(
        "for n in range(11):\n    try: os.fork()\n    except OSError: pass\n"
        "while True: time.sleep(0.01)"
    ),
    "thread bomb": spoiled(
        "import threading\nwhile True:\n"
        "    threading.Thread(target=time.sleep, args=(99,)).start()",
        note="RuntimeError",
        q1=2,
    ),
    "disk": spoiled(
        "for n in range(99):\n    with open(f'{n}', 'wb') as f: f.write(bytes(10**7))",
        note="OSError",
        q1=2,
    ),
    "disk of shared memory": spoiled(
        "for n in range(99):\n"
        "    with open(f'/dev/shm/{n}', 'wb') as f: f.write(bytes(10**7))",
        note="OSError",
        q1=2,
    ),
    "large file": spoiled(
        "with open('x', 'wb') as f: f.truncate(10**12)", note="OSError", q1=2
    ),
    "many files": spoiled(
        "n = 0\nwhile True: n += 1; open(str(n), 'w').close()", note="too many files"
    ),
    "more limits": survived(
        "import resource\nfor kind in (resource.RLIMIT_DATA, resource.RLIMIT_NPROC):\n"
        "    try: resource.setrlimit(kind, (-1, -1))\n    except ValueError: pass\n"
        "    else: 1 / 0"
    ),
    # -- output
    "100 MB of output": survived("for n in range(100): print('x' * 10**6)"),
    "100 MB of bytes": survived("for n in range(100): os.write(2, b'x' * 10**6)"),
    "closed output": survived("sys.stdout.close(); sys.stderr.close(); os.close(1)"),
    "no output": survived("sys.stdout = sys.stderr = None"),
    # -- values
    "equal to everything": inside(
        "class E:\n    def __eq__(self, o): return True\n"
        "    def __float__(self): return 9.0\n    __hash__ = None\nreturn E()",
        "ok",
    ),
    "equal numbers": inside(
        "class E(float):\n    def __eq__(self, o): return True\n"
        "    def __ne__(self, o): return False\n    def __abs__(self): return 0\n"
        "    __sub__ = __rsub__ = lambda s, o: 0\n    __repr__ = lambda s: '9'\n"
        "return E(1)",
        "ok",
    ),
    "class of another": inside(
        "class E:\n    __class__ = property(lambda s: float)\nreturn E()", "ok"
    ),
    "not a number": inside("return float('nan')", "ok"),
    "long number": inside("return 10 ** 5000", "ok"),
    "long value": inside("return 'x' * 2 * 10**6", "ok"),
    "deep value": inside("y = []\nfor n in range(10**5): y = [y]\nreturn y", "ok"),
    "generator": inside("yield x", "ok"),
    "truth for numbers": inside("return True", "ok"),
}


def notebook(cells, /, **changes) -> dict:
    """A notebook of format 4 with these code cells."""
    made = [
        {
            "cell_type": "code",
            "id": f"c{number}",
            "metadata": {},
            "source": code,
            "outputs": [],
            "execution_count": None,
        }
        for number, code in enumerate(cells)
    ]
    title = {"cell_type": "markdown", "id": "t", "metadata": {}, "source": "# Squares"}
    found = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    return {**found, "cells": [title, *made], **changes}


def renamed(name: str, made: Kind, **changes) -> tuple[str, Kind]:
    """A kind under another name."""
    return name, dataclasses.replace(made, **changes)
