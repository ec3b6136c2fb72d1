"""Cells and probes: what runs when, what comes out, and that torch works."""

from pathlib import Path

import pytest
from hostile import key

from kvq_lib.course.homework import levels, pipe, sandbox
from kvq_lib.course.homework.pipe import ERRORS, Pipe, Stopped
from kvq_lib.course.homework.sandbox import Limits, Sandbox, SandboxError
from kvq_lib.course.homework.score import probes, score
from kvq_lib.course.homework.session import (
    Cell,
    Outcome,
    Probe,
    Transcript,
    run_cells,
)

ROOT = Path(__file__).resolve().parents[1]
SHORT = Limits(seconds=1, total_seconds=60)


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return levels.choose("bwrap", ROOT)


def asked(box: Sandbox, code: str, *cells: str, limits: Limits = SHORT) -> Outcome:
    """What a probe gives after some cells."""
    made = [Cell(cell, number=n) for n, cell in enumerate(cells, 1)]
    return run_cells(made, [Probe("q1", code)], box, limits).outcomes[0]


def test_a_probe_leaves_nothing_behind(box):
    cells = [Cell("x = [1]", "answer", ("q1",))]
    asked = [Probe("q1", "y = 5\nx = [2]\nx"), Probe("q1", "[x, 'y' in globals()]")]
    assert [o.value for o in run_cells(cells, asked, box, SHORT).outcomes] == [
        [2],
        [[1], False],
    ]


A1, A2 = (Cell("x += 1", "answer", (q,)) for q in ("q1", "q2"))
C1, C2 = (Cell("x = None", "check", (q,)) for q in ("q1", "q2"))
BOTH = Cell("x += 1", "answer", ("q1", "q2"))
MORE = Cell("x += 1")


@pytest.mark.parametrize(
    "cells, q1, q2",
    [
        ([A1, C1, A2, C2], 1, 2),
        ([A1, MORE, C1, A2, MORE, C2, MORE], 2, 4),  # what a check sees, probes see
        ([A1, C1, MORE, A2, C2, MORE], 1, 3),
        ([A1, MORE, A2, MORE], 2, 4),  # no checks
        ([A1, MORE, A2, MORE, C1, C2], 2, 4),  # all checks at the end
        ([A1, C1, MORE, C1, MORE, A2], 2, 4),  # a copy of a check
        ([A1, C1, A1, MORE, C1, A2], 3, 4),
        ([A1, A2, MORE, A1, C2, MORE, C1], 5, 3),
        ([A2, C2, MORE, A1, C1, MORE], 3, 1),
        ([C1, C2, BOTH, MORE, C2, MORE, C1], 3, 2),
        ([BOTH, MORE, A1, MORE], 4, 2),
        ([A1, C1, MORE, C2, MORE], 1, 3),  # q2 is not answered
    ],
)
def test_probes_run_where_the_check_stands(box, cells, q1, q2):
    """After what lies above it, and before anything of another question."""
    probes = [Probe("q2", "[x]"), Probe("q1", "[x]")]
    run = run_cells([Cell("x = 0"), *cells], probes, box, SHORT)
    assert [o.value for o in run.outcomes] == [[q2], [q1]]


def test_answers_are_counted(box):
    run = run_cells([BOTH, A1, C1], [Probe("q3", "[1]")], box, SHORT)
    assert run.answers == {"q1": 2, "q2": 1} and run.unanswered == ["q3"]


def test_seeds_make_probes_repeat(box):
    cells = [Cell("import random, numpy as np\nrandom.random(); np.random.rand()")]
    code = "[random.random(), float(np.random.rand())]"
    asked = [Probe("q1", code, 1), Probe("q1", code, 2), Probe("q1", code, 1)]
    one, two, again = (o.value for o in run_cells(cells, asked, box, SHORT).outcomes)
    assert one == again != two


def test_a_question_costs_its_time_twice_at_most(box):
    cells = [Cell("def f(): \n    while True: pass", "answer", ("q1",))]
    run = run_cells(cells, [Probe("q1", "[f()]")] * 6, box, Limits(seconds=0.3))
    assert [o.failure for o in run.outcomes] == ["time"] * 6
    assert run.starts == 2


def test_all_time_is_bounded(box):
    cells = [Cell("while True: pass", "answer", (f"q{n}",), n) for n in range(1, 9)]
    asked = [Probe(f"q{n}", "[1]") for n in range(1, 9)]
    run = run_cells(cells, asked, box, Limits(seconds=1, total_seconds=2.5))
    assert [o.failure for o in run.outcomes][-3:] == ["total"] * 3
    assert run.seconds < 20


def test_waiting_and_computing_are_counted_apart(box, monkeypatch):
    """A busy machine makes honest cells wait: they may, three times as long."""
    limits = Limits(seconds=0.5)
    assert asked(box, "import time\ntime.sleep(1)\n[1]", limits=limits).value == [1]
    sleep = "import time\ntime.sleep(9)\n[1]"
    assert asked(box, sleep, limits=limits).failure == "time"
    monkeypatch.setattr(pipe, "WAIT", 1000)
    cells, loop = [Cell("x = 1")], [Probe("q1", "while True: pass\n1")]
    run = run_cells(cells, loop, box, Limits(seconds=0.3, total_seconds=60))
    assert run.outcomes[0].failure == "time" and run.seconds < 50


def test_code_is_found_by_inspect(box):
    code = "import inspect\ninspect.getsource(f)"
    source = "def f(x):\n    return x + 1  # as written\n"
    assert asked(box, code, source).value == source


def test_futures_hold_as_in_a_notebook(box):
    cells = ["from __future__ import annotations", "def f(x: nothing_such): pass"]
    assert asked(box, "f.__annotations__", *cells).value == {"x": "nothing_such"}


def test_values_become_plain_data(box):
    code = (
        "import collections\nP = collections.namedtuple('P', 'a b')\n"
        "[P(1, None), {'a': (True, -0.0)}, np.float32(0.5), np.arange(3), np.int64(7),"
        " np.ones((2, 1)), np.bool_(True), float('inf'), 2**70, 'ü\\ud800',"
        " np.str_('s')]"
    )
    value = asked(box, code, "import numpy as np").value
    assert value == [
        [1, None],
        {"a": [True, 0.0]},
        0.5,
        [0, 1, 2],
        7,
        [[1.0], [1.0]],
        True,
        float("inf"),
        2**70,
        "ü\ud800",
        "s",
    ]
    kinds = [type(v) for v in value]
    assert kinds[4:7] == [int, list, bool]


@pytest.mark.parametrize(
    "code",
    [
        "{1: 2}",
        "{1, 2}",
        "b'x'",
        "1j",
        "object()",
        "print",
        "np.array([object()])",
        "np.datetime64('2026-01-01')",
        "[[1] * 10] * 10**6",
        "'x' * 10**6",
        "np.zeros(10**6)",
    ],
)
def test_other_values_are_refused(box, code):
    found = asked(box, code, "import numpy as np")
    assert (found.value, found.failure) == (None, "data")


def test_only_names_of_built_in_errors_come_out(box):
    cells = [
        "class SecretError(KeyError): pass\ndef f(): raise SecretError('secret')",
        "class Meta(type):\n    def mro(cls): return type.mro(cls)\n"
        "    __name__ = property(lambda c: 'secret')\n"
        "class E(Exception, metaclass=Meta): pass",
    ]
    assert asked(box, "f()", *cells).error == "KeyError"
    assert asked(box, "raise E\n1", *cells).error == "Exception"
    assert "SecretError" not in ERRORS


@pytest.mark.parametrize(
    "raised, failure",
    [
        ("raise NotImplementedError", "blank"),
        ("raise RecursionError from NotImplementedError('q1')", "blank"),
        ("raise E from E()", "raised"),
        ("a = E()\na.__cause__ = b = E()\nb.__cause__ = a\nraise a", "raised"),
        ("try: raise NotImplementedError\nexcept Exception: raise E", "raised"),
        ("raise Liar", "raised"),
    ],
)
def test_a_blank_answer_is_told_from_an_error(box, raised, failure):
    """By what an error was raised from, whatever its class says of itself."""
    cells = [
        "class E(Exception): pass",
        "class Liar(Exception):\n"
        "    __cause__ = property(lambda self: NotImplementedError('secret'))",
    ]
    found = asked(box, f"{raised}\n1", *cells)
    assert found.failure == failure
    assert found.error == ("NotImplementedError" if failure == "blank" else "Exception")


def test_a_sandbox_that_does_not_start_is_no_fault_of_the_cells(box, monkeypatch):
    monkeypatch.setattr(sandbox, "_RUNNER", Path("/dev/null"))
    with pytest.raises(SandboxError, match="does not start"):
        run_cells([Cell("x = 1")], [Probe("q1", "[x]")], box, SHORT)


def test_a_request_that_nobody_reads_ends_in_time(box):
    """More than a pipe holds, to a runner that sleeps."""
    with Pipe(box, Limits(seconds=0.3)) as talk:
        with pytest.raises(Stopped):
            talk.cell("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")
        with pytest.raises(Stopped) as stopped:
            talk.cell("#" * 10**6)
        assert stopped.value.kind == "time"


# -- torch ---------------------------------------------------------------------------

_KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)
"""


def test_a_kernel_that_was_left_as_it_was_is_blank(box):
    """Triton's interpreter raises an error of its own, from that of the stub."""
    body = _KERNEL.index("    at = ")
    stub = _KERNEL[:body] + '    raise NotImplementedError("q1")\n'
    launch = "double[(1,)](torch.arange(5.0), torch.empty(5), 5, BLOCK=8)\n1"
    found = asked(box, launch, stub, limits=Limits())
    assert (found.failure, found.error) == ("blank", "NotImplementedError")
    wrong = _KERNEL[:body] + "    at = nothing\n"
    assert asked(box, launch, wrong, limits=Limits()).failure == "raised"


def test_torch_is_as_in_a_fresh_process(box):
    """Changed types, seeds and modes of one question do not reach the next."""
    cells = [
        "import torch\ntorch.set_default_dtype(torch.float64)\n"
        "torch.set_default_device('meta')\ntorch.set_grad_enabled(False)\n"
        "torch.manual_seed(5)\ntorch.rand(3)",
        _KERNEL,
    ]
    probe = (
        "import kvq_lib as kvq\nout = torch.empty(5)\n"
        "double[(1,)](torch.arange(5.0), out, 5, BLOCK=8)\n"
        "x = torch.ones(2, requires_grad=True)\n(x * x).sum().backward()\n"
        "[out, str(torch.ones(1).dtype), torch.rand(2), x.grad,\n"
        " torch.ones(2, dtype=torch.bfloat16), torch.tensor(3), torch.Size([2, 3]),\n"
        " torch.ones(1).to(torch.float8_e4m3fn), torch.get_num_threads(),\n"
        " kvq.MEMORY_GB['T4']]"
    )
    import torch

    wanted = torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist()
    made = [Cell(code, number=n) for n, code in enumerate(cells)]
    asked = [Probe("q1", probe), Probe("q1", "torch.ones(2**30)\n1")]
    limits = Limits(memory=768 * 2**20)
    found, lacking = run_cells(made, asked, box, limits).outcomes
    assert found.value == [
        [0.0, 2.0, 4.0, 6.0, 8.0],
        "torch.float32",
        wanted,
        [2.0, 2.0],
        [1.0, 1.0],
        3,
        [2, 3],
        [1.0],
        1,
        16,
    ]
    # Its own error for a lack of memory is told as one.
    assert (lacking.failure, lacking.fatal) == ("memory", False)


@pytest.mark.parametrize("torch, most", [(True, 6), (False, 2)])
def test_a_submission_is_graded_quickly(box, torch, most):
    """Five questions; counted in seconds of computing, since machines are busy."""
    first = "import torch" if torch else "import math"
    body = "torch.full((2,), x).sum()" if torch else "math.sqrt(x)"
    cells, asked = [Cell(first)], []
    for n in range(1, 6):
        cells.append(Cell(f"def f{n}(x):\n    return {body}", "answer", (f"q{n}",)))
        asked += [Probe(f"q{n}", f"[f{n}({x}.0)]") for x in range(3)]
    run = run_cells(cells, asked, box, Limits())
    assert all(not outcome.failure for outcome in run.outcomes)
    assert run.starts == 1
    assert 0 < run.computed < most


def test_keys_and_scores():
    """Points are exact: 0.7 and 1.3 are 2."""
    made = key()
    assert [p.question for p in probes(made)] == ["q1", "q1", "q2", "q2"]
    outcomes = [Outcome([9, 2.25]), Outcome([10**12, 49]), Outcome([3, 4, 7])]
    outcomes.append(Outcome(None, "time"))
    one, two = score(made, Transcript(outcomes))
    assert (str(one.points), str(one.most), one.failures) == ("2.0", "2.0", ())
    assert (two.points, two.failures, two.stopped) == (0, ("wrong", "time"), True)
