"""The GPU benchmark without a GPU: everything in it but the time."""

import inspect
import json
import math
import subprocess
import sys

import kernel_cases
import pytest
import torch

from kvq_lib.bench import gpu, gpu_work, instructions, provenance
from kvq_lib.bench.gpu_work import Case, Machine, Plan
from kvq_lib.kernels import budget

TINY = Plan(
    lengths=(33,),
    batches=(2,),
    page_sizes=(16,),
    schemes=("native", "int4", "int4-kivi"),
    heads=4,
    kv_heads=2,
    dim=64,
    chunk=20,
    sealed=32,
    copied=4096,
)


def once(work) -> list[float]:
    """Times nothing, but does the work."""
    work()
    return [0.9e-3, 1e-3, 1e-3, 1.1e-3]


def machine(**changes) -> Machine:
    given = {"seconds": once, "cache": 4096, "memory": 10**9}
    return Machine(torch.device(kernel_cases.DEVICE), **given | changes)


@pytest.fixture(scope="module")
def found():
    return gpu.measure(TINY, machine())


# -- what is asked for -----------------------------------------------------------------


def test_the_plan_covers_every_combination_once():
    cases = list(Plan().cases())
    assert len(cases) == len(set(cases)) == 3 * 3 * 2 * 8
    assert cases[0] == Case(32768, 32, 64, "native")
    assert {case.scheme for case in gpu.SMALL.cases()} == set(Plan().schemes)


def test_bytes_are_those_of_the_budget():
    plan, case = Plan(), Case(4096, 8, 16, "int4-kivi")
    shape = (32, 8, 128)
    assert case.moved(plan) == sum(
        budget.decode([4096] * 8, *shape, "int4-kivi", page_size=16)
    )
    split = budget.decode([4096] * 8, *shape, "int4-kivi", 16, splits=4)
    merged = budget.merge(8, 32, 128, 4)
    assert case.moved(plan, splits=4) == sum(split) + sum(merged)


def test_times_are_of_one_of_equal_things():
    timed = machine().time(lambda: None, times=10)
    assert timed["microseconds"] == pytest.approx(100)
    assert 0 < timed["spread"] < 0.3


# -- the whole of it, tiny -------------------------------------------------------------


def test_everything_is_checked_and_timed(found):
    assert found["wrong"] == found["skipped"] == []
    assert [row["scheme"] for row in found["decode"]] == list(TINY.schemes)
    for row in found["decode"]:
        assert 0 < row["error"] <= gpu_work.TOLERANCE
        case = Case(33, 2, 16, row["scheme"])
        assert row["copies"] == math.ceil(8 * 4096 / case.moved(TINY))
        assert row["microseconds"] == pytest.approx(1000 / row["copies"])
    kernels = {(row["kernel"], row["scheme"]) for row in found["other"]}
    assert {("append", "native"), ("extend", "int4-kivi")} <= kernels
    assert {("seal keys", "int4"), ("seal values", "int4")} <= kernels


def test_pytorch_is_measured_by_every_backend_that_it_has_here(found):
    rows = found["sdpa"]
    assert len(rows) == 2 * len(gpu_work.BACKENDS)
    forms = {row["form"] for row in rows if row["backend"] == "math"}
    assert forms == {"grouped", "folded"}
    assert all(("unavailable" in row) != ("microseconds" in row) for row in rows)
    assert any("microseconds" in row for row in rows)


def test_a_record_survives_json_and_knows_whether_it_is_current(found, tmp_path):
    kept = gpu.record(found, "NVIDIA H200", commit="abc")
    provenance.save(tmp_path / "h200.json", kept)
    provenance.save(tmp_path / "quality.json", kept | {"kind": "quality"})
    (back,) = gpu.records(tmp_path)
    assert back == json.loads(json.dumps(kept)) | {"current": True}
    assert back["data"]["gpu"] == "NVIDIA H200" and back["data"]["commit"] == "abc"
    assert {"driver", "cuda", "kernels", "copy", "goals"} <= back["data"].keys()
    assert {"torch", "triton"} <= back["versions"].keys() and len(back["library"]) == 64
    provenance.save(tmp_path / "h200.json", kept | {"library": "of long ago"})
    assert not gpu.records(tmp_path)[0]["current"]


def test_the_table_has_a_line_for_each_case_and_goal(found):
    lines = gpu.table(found).splitlines()
    assert len(lines) == 1 + len(found["decode"]) + len(gpu.GOALS)
    assert "not measured" in next(line for line in lines if "pages of 64" in line)
    smaller = [row | {"batch": 1} for row in found["decode"]]
    longer = found | {"decode": [*found["decode"], *smaller]}
    assert gpu.table(longer, largest_only=True) == gpu.table(found)


# -- what can go wrong -----------------------------------------------------------------


class Idle:
    """A launch that does nothing."""

    grid = (1, 1, 1)

    def run(self):
        pass


def test_a_kernel_that_writes_nothing_is_wrong_and_not_timed(monkeypatch):
    monkeypatch.setattr(gpu_work.decode, "prepare", lambda *_, **__: [Idle()])
    found = gpu.measure(TINY, machine())
    assert found["decode"] == [] and len(found["wrong"]) == len(TINY.schemes)
    assert not any(goal["met"] for goal in found["goals"])


def test_what_does_not_fit_is_listed_and_the_rest_goes_on():
    found = gpu.measure(TINY, machine(memory=16384))
    assert found["decode"] == [] and found["other"]
    assert len(found["skipped"]) == 1 + len(TINY.schemes)
    assert all("do not fit" in s["why"] for s in found["skipped"])


def test_when_the_time_is_over_nothing_new_begins():
    clock = iter(range(0, 10_000, 100)).__next__
    found = gpu.measure(TINY, machine(), seconds=250, clock=clock)
    reasons = {skip["why"] for skip in found["skipped"]}
    assert reasons == {"no time was left"} and found["other"] == []


# -- what is made of it ----------------------------------------------------------------


def row(scheme, page_size, microseconds, length=4096, batch=8):
    case = Case(length, batch, page_size, scheme)
    timed = {"microseconds": microseconds, "spread": 0.0}
    base = {"length": length, "batch": batch, "page_size": page_size, "scheme": scheme}
    return base | {"error": 1e-4} | gpu_work.with_rate(case.moved(Plan()), timed)


def compared(rows, sdpa=100.0, copy=4000.0):
    fastest = {"length": 4096, "batch": 8, "microseconds": sdpa}
    slower = fastest | {"microseconds": 2 * sdpa}
    refused = {"length": 4096, "batch": 8, "unavailable": "no kernel"}
    found = {"decode": rows, "sdpa": [slower, fastest, refused]}
    gpu.compare(found | {"copy": {"gb_per_s": copy}}, Plan())
    return rows


def test_rows_are_compared_with_copy_pytorch_and_our_16_bits():
    native, int4 = compared([row("native", 16, 110.0), row("int4", 16, 40.0)])
    assert native["beside_sdpa"] == pytest.approx(100 / 110)
    assert int4["speedup"] == pytest.approx(110 / 40)
    assert int4["predicted_speedup"] == pytest.approx(16 / 4.25, rel=0.02)
    assert int4["copy_share"] == pytest.approx(int4["bytes"] / 40e-6 / 4000e9)
    (alone,) = compared([row("int4", 16, 40.0, batch=1)])
    assert alone["speedup"] is None and alone["beside_sdpa"] is None


def test_a_goal_takes_the_worst_row_of_the_largest_setting():
    rows = compared(
        [
            row("native", 64, 100.0),
            row("int8", 64, 50.0),
            row("native", 16, 100.0),
            row("int8", 16, 60.0),
            row("int8", 16, 1e6, batch=1),
            row("int4-kivi", 64, 30.0),
            row("int4-kivi", 16, 45.0),
        ]
    )
    found = {
        (goal["quantity"], goal["scheme"], goal["page_size"]): goal
        for goal in gpu.goals(rows)
    }
    assert found["beside_sdpa", "native", None]["met"]
    assert found["speedup", "int8", None]["reached"] == pytest.approx(100 / 60)
    assert not found["speedup", "int8", None]["met"]
    assert found["speedup", "int4-kivi", 64]["met"]
    assert not found["speedup", "int4-kivi", 16]["met"]
    assert found["speedup", "int4", None]["reached"] is None
    assert not found["speedup", "int4", None]["met"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)
def test_a_record_is_named_after_the_gpu(name, file):
    assert gpu.slug(name) == file


# -- the command -----------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "kvq_lib.bench.gpu"],
        cwd=gpu.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "No CUDA device" in done.stderr


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """A GPU that is not there; returns a function that runs the command."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(gpu, "here", machine)
    monkeypatch.setattr(gpu, "Plan", lambda: TINY)
    monkeypatch.setattr(provenance, "machine", lambda: {"gpu": "NVIDIA H200"})

    def command(*arguments):
        gpu.main(["--results", str(tmp_path), *arguments])
        return sorted(path.name for path in tmp_path.iterdir())

    return command


def test_the_command_measures_prints_and_records(pretend, capsys):
    assert pretend("--skip-tests", "--commit", "abc") == ["h200.json"]
    said = capsys.readouterr().out
    assert "speed over our own 16 bits" in said and said.strip().endswith("h200.json")


def test_tests_that_fail_stop_it(pretend, monkeypatch):
    monkeypatch.setattr(gpu, "tests_command", lambda: [sys.executable, "-c", "1 / 0"])
    with pytest.raises(SystemExit, match="tests failed"):
        pretend()


def test_wrong_numbers_are_not_recorded(pretend, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_work, "TOLERANCE", 0.0)
    with pytest.raises(SystemExit, match="wrong numbers"):
        pretend("--skip-tests")
    assert list(tmp_path.iterdir()) == []


def test_the_tests_of_all_kernels_are_run():
    command = " ".join(gpu.tests_command())
    for name in ("decode", "extend", "write", "backend"):
        assert f"test_kernels_{name}.py" in command


def test_what_the_tests_need_is_named(monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pytest and hypothesis"):
        gpu.tests_command()


def test_a_graph_is_timed_by_events():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.randn(2**22, device="cuda")
    times = gpu_work.graph_seconds(lambda: x.clone())
    assert len(times) == 15 and all(0 < t < 1 for t in times)


# -- instructions in machine code ------------------------------------------------------

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;     /* 0x00000a00ff017624 */
        /*0010*/                   LDG.E.128 R4, [R2] ;       /* 0x0000000402047981 */
        /*0020*/              @!P0 HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0030*/               @P1 BRA 0x20 ;
        /*0040*/                   FADD R5, R5, R6 ;
        /*0050*/              @P0  BRA 0x10 ;
        /*0060*/               @P2 BRA 0x80 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
"""


def test_the_longest_loop_is_found():
    names = ["LDG.E.128", "HMMA.16816.F32", "BRA", "FADD", "BRA"]
    assert instructions.longest_loop(SASS) == names
    with pytest.raises(ValueError, match="no loop"):
        instructions.longest_loop(SASS.split("@P1")[0])


def test_instructions_of_a_token():
    loop = instructions.Loop(1000, 64, tokens=128, warps=4, kv_heads=8)
    assert loop.per_token == 250
    seconds = budget.issue_seconds(loop.per_token, "H200")
    assert seconds == pytest.approx(250 / (132 * 4 * 1.98e9))


def test_loops_of_real_kernels():
    loops = instructions.decode_loops([75, 90], ["native", "int4"], jobs=1)
    assert all(loop.matrix == 0 for (target, _), loop in loops.items() if target == 75)
    assert all(loop.matrix > 0 for (target, _), loop in loops.items() if target == 90)
    assert all(10 < loop.per_token < 1e5 for loop in loops.values())


def test_every_gpu_of_the_budget_is_described():
    assert budget.BANDWIDTH.keys() == budget.PROCESSORS.keys()
    assert budget.BANDWIDTH.keys() == budget.CAPABILITY.keys()


def test_the_kernel_has_the_names_that_chapter_6b_explains():
    source = inspect.getsource(gpu_work.decode.decode_kernel.fn)
    loop = source[source.index("for start in range") :]
    for name in (
        "cold_scores",
        "softmax_step",
        "cold_values",
        "units",
        "reach",
        "shift",
    ):
        assert name in loop, f"{name}: mend section 6b.3, which explains the loop"
