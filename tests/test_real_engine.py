"""The benchmark of vLLM without vLLM: everything in it but the engine."""

import contextlib
import itertools
import os
import re
import sys
import time
from pathlib import Path

import fake_engine
import pytest
import torch
from fake_engine import COMPLAIN, DIE, MEET, METRICS, PLAIN, REFUSE, SHORT, SLOW
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_lib.bench import engine_client, engine_server, provenance, real_engine
from kvq_lib.bench.engine_client import Load, Outcome, Server, Watch
from kvq_lib.bench.engine_server import EngineError
from kvq_lib.bench.real_engine import Plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def web():
    with fake_engine.running() as web:
        yield web


@pytest.fixture
def server(web):
    return Server(web.server_port, "m")


# -- metrics ---------------------------------------------------------------------------


def test_metrics_are_parsed_with_their_labels():
    samples = engine_client.parse_metrics(METRICS)
    assert len(samples) == 7
    assert engine_client.total(samples, "vllm:num_requests_running") == 7
    assert engine_client.total(samples, "vllm:kv_cache_usage_perc") == 0.125
    assert engine_client.total(samples, "python_info") == 1
    (info,) = [s for s in samples if s.name == "vllm:cache_config_info"]
    assert info.labels["odd"] == 'a,"}\\n'
    with pytest.raises(KeyError, match="vllm:absent"):
        engine_client.total(samples, "vllm:absent")


def test_a_page_that_is_no_metrics_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        engine_client.parse_metrics("<html>")


def test_capacity_and_preemptions_are_what_the_engine_says(server):
    assert real_engine.capacity(server) == {
        "tokens": 1440,
        "blocks": 45,
        "block_size": 32,
    }
    assert real_engine.preemptions(server) == 5


def test_a_page_that_is_not_there_is_an_error(server):
    with pytest.raises(engine_client.http.client.HTTPException, match="404"):
        server.get("/nowhere")


# -- requests --------------------------------------------------------------------------


def soon(seconds: float = 20) -> float:
    return time.monotonic() + seconds


def test_a_stream_gives_tokens_and_their_times(server):
    outcome = engine_client.complete(server, [PLAIN, 7], 5, soon())
    assert outcome.failure is None
    assert outcome.tokens == [100, 101, 102, 103, 104]
    assert outcome.first > 0 and len(outcome.gaps) == 4
    assert all(gap >= 0 for gap in outcome.gaps)


@pytest.mark.parametrize(
    ("prompt", "failure", "tokens"),
    [
        (REFUSE, "status 400.*too long", 0),
        (DIE, "IncompleteRead|broke off|reset", 2),
        (COMPLAIN, "out of luck", 2),
        (SHORT, "3 of 5 tokens came", 3),
    ],
)
def test_a_failure_is_an_outcome(server, prompt, failure, tokens):
    outcome = engine_client.complete(server, [prompt], 5, soon())
    assert re.search(failure, outcome.failure)
    assert len(outcome.tokens) == len(outcome.arrived) == tokens


def test_a_slow_server_hits_the_bound_of_time(server):
    began = time.monotonic()
    outcome = engine_client.complete(server, [SLOW], 1000, soon(0.7))
    assert outcome.failure == "time ran out"
    assert 0 < len(outcome.tokens) < 6 and time.monotonic() - began < 5


def test_nobody_there_is_an_outcome():
    outcome = engine_client.complete(
        Server(engine_server.free_port(), "m"), [PLAIN], 5, soon()
    )
    assert "ConnectionRefusedError" in outcome.failure


def test_log_probabilities_leave_the_first_token_out(server):
    found = engine_client.log_probabilities(server, [3, 1, 2], 5)
    assert found == [-0.1, -0.2]


# -- loads -----------------------------------------------------------------------------


def test_a_load_asks_each_prompt_once_and_so_many_at_a_time(server, web):
    prompts = [[MEET if i == 0 else PLAIN, i] for i in range(9)]
    outcomes = engine_client.drive(server, prompts, Load(3, 8, 20))
    found = engine_client.summary(outcomes)
    assert found["complete"] == found["requests"] == 9 and found["failures"] == {}
    assert found["output_tokens"] == 72 and 2 <= web.most <= 3
    assert found["tokens_per_s"] == pytest.approx(72 / found["seconds"], rel=0.01)
    assert found["first_token"]["0"] <= found["first_token"]["1"]
    assert len(found["token_gap"]) == len(engine_client.QUANTILES)


def test_a_load_ends_in_time_and_counts_what_failed(server):
    prompts = [[SLOW], [REFUSE], [SLOW], [SLOW]]
    began = time.monotonic()
    outcomes = engine_client.drive(server, prompts, Load(2, 1000, 0.7))
    assert time.monotonic() - began < 5
    found = engine_client.summary(outcomes)
    assert found["complete"] == 0 and sum(found["failures"].values()) == 4
    assert found["failures"]["time ran out"] == 2
    assert found["failures"]["not sent: time ran out"] == 1


def test_nothing_that_came_has_no_rate():
    found = engine_client.summary([Outcome(failure="none")])
    assert found["tokens_per_s"] is None and found["first_token"] is None
    assert "nothing came" in real_engine.shown(found | {"concurrency": 1})


def test_quantiles_are_values_that_occur():
    found = engine_client.quantiles([5, 1, 3, 2, 4])
    assert (found["0"], found["0.5"], found["0.9"], found["1"]) == (1, 3, 5, 5)
    assert engine_client.quantiles([]) is None


def test_the_watch_samples_until_the_block_ends(server):
    with Watch(server, every=0.02) as watch:
        assert engine_client.wait_until(
            lambda: len(watch.timeline["seconds"]) >= 3, 10, 0.01
        )
    line = watch.timeline
    assert len({len(values) for values in line.values()}) == 1
    assert set(line["running"]) == {7} and set(line["preemptions"]) == {5}
    assert line["seconds"] == sorted(line["seconds"])


def test_the_watch_ends_where_nobody_answers():
    with Watch(Server(engine_server.free_port(), "m"), every=0.01) as watch:
        watch._thread.join(10)
        assert not watch._thread.is_alive()
    assert watch.timeline["running"] == []


def test_a_driven_load_tells_all(server):
    found = real_engine.driven(server, [[PLAIN]] * 3, Load(2, 4, 20))
    assert found["complete"] == 3 and found["preemptions"] == 0
    assert found["timeline"]["used"][0] == 0.125
    assert "3/3" in real_engine.shown(found)


def test_greedy_outputs_must_all_come(server):
    plan = Plan(greedy_output=4, seconds=20)
    assert real_engine.greedy(server, [[PLAIN]], plan) == [[100, 101, 102, 103]]
    with pytest.raises(EngineError, match="400"):
        real_engine.greedy(server, [[PLAIN], [REFUSE]], plan)
    assert real_engine.read(server, [[1, 2, 4]], plan) == [-0.3]


# -- the process -----------------------------------------------------------------------


def test_the_command_binds_the_loopback_address_and_bounds_the_cache():
    arguments = engine_server.command(
        "py",
        "folder",
        Server(81, "m"),
        "fp8",
        cache_bytes=2**20,
        block=32,
        tokens=256,
        requests=20,
    )
    pairs = dict(itertools.pairwise(arguments))
    assert arguments[0] == "timeout" and arguments[2] == str(engine_server.LIFETIME)
    assert arguments[3:6] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert pairs["--host"] == "127.0.0.1" and pairs["--port"] == "81"
    assert pairs["--model"] == "folder" and pairs["--served-model-name"] == "m"
    assert pairs["--kv-cache-dtype"] == "fp8"
    assert pairs["--kv-cache-memory-bytes"] == "1048576"
    assert pairs["--block-size"] == "32" and pairs["--max-model-len"] == "256"
    assert pairs["--max-num-seqs"] == "20"
    assert "--no-enable-prefix-caching" in arguments


def test_the_environment_stays_offline_and_on_this_machine(tmp_path):
    outer = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    found = engine_server.environment(tmp_path, outer)
    assert found["HF_HUB_OFFLINE"] == found["VLLM_NO_USAGE_STATS"] == "1"
    assert found["VLLM_HOST_IP"] == "127.0.0.1" and found["PATH"] == "/bin"
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & set(found)


# A server with a child; both must be gone in the end.
STANDIN = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize("problem", [None, ConnectionResetError("cut"), KeyError("k")])
def test_a_server_and_its_children_are_stopped_whatever_happens(tmp_path, problem):
    server = Server(engine_server.free_port(), "m")
    arguments = [sys.executable, "-c", STANDIN, str(server.port)]
    log = tmp_path / "log"
    expected = {
        type(None): contextlib.nullcontext(),
        ConnectionResetError: pytest.raises(EngineError, match=r"cut[\s\S]*child"),
        KeyError: pytest.raises(KeyError),
    }[type(problem)]
    with expected, engine_server.running(arguments, server, log, os.environ, 30):
        child = int(log.read_text().split()[1])
        assert server.healthy() and not gone(child)
        if problem:
            raise problem
    assert engine_client.wait_until(lambda: gone(child), 10, 0.05)
    assert not server.healthy()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('no such model'); raise SystemExit(3)", "status 3"),
        ("print('no such model', flush=True); import time; time.sleep(60)", "not up"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(tmp_path, code, said):
    server, log = Server(engine_server.free_port(), "m"), tmp_path / "log"
    arguments = [sys.executable, "-c", code]
    with (
        pytest.raises(EngineError, match=rf"{said}[\s\S]*no such model"),
        engine_server.running(arguments, server, log, os.environ, 2),
    ):
        pytest.fail("it was never healthy")


def test_a_missing_engine_is_named(tmp_path):
    with pytest.raises(SystemExit, match="make engine"):
        real_engine.main(["--python", str(tmp_path / "python")])


def test_an_environment_without_the_engine_is_named():
    with pytest.raises(EngineError, match="no vllm-cpu"):
        real_engine.engine_versions(Path(sys.executable))


# -- outputs ---------------------------------------------------------------------------


def test_leading_tokens():
    assert real_engine.leading([1, 2, 3], [1, 2, 3]) == 3
    assert real_engine.leading([1, 2, 3], [1, 9, 3]) == 1
    assert real_engine.leading([1, 2], [0, 2]) == 0


def test_outputs_are_judged_by_the_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    best = model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False)
    best = best[0, 2:].tolist()
    good = real_engine.judged(model, [[1, 2]], [best])
    worse = [(token + 1) % 32 for token in best]
    bad = real_engine.judged(model, [[1, 2]], [worse])
    assert good["likeliest"] == 1 and bad["likeliest"] < 1
    assert bad["log_probability"] < good["log_probability"] < 0


def test_the_log_is_read_without_dates_places_and_processes():
    log = (
        "(APIServer pid=12) INFO 11-30 22:10:25 [cache.py:354] Using fp8 data type "
        "to store kv cache.\n"
        "(Core pid=13) INFO 11-30 22:11:22 [kv.py:2] CPU KV cache size: 5 tokens\n"
        "(Core pid=13) INFO 11-30 22:11:23 [kv.py:2] CPU KV cache size: 5 tokens\n"
        "(Worker pid=14) WARNING 11-30 22:11:15 [x.py:1] other\n"
        "(Worker pid=14) ERROR 11-30 22:11:15 [x.py:1] bad\n"
        "INFO: 127.0.0.1 said ERROR\n"
    )
    assert real_engine.telling_lines(log) == [
        "Using fp8 data type to store kv cache.",
        "CPU KV cache size: 5 tokens",
    ]
    assert real_engine.problems(log) == 1
    problem = EngineError("did not start:\n/home/x\nValueError: no such type\nbye")
    assert real_engine.reason(problem) == "ValueError: no such type"


# -- the lock and the record -----------------------------------------------------------


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements-engine.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and line[0] != "#"]
    return {name.lower(): version for name, version in pairs}


def test_the_engines_lock_leaves_out_what_breaks_it():
    found = locked()
    assert {"vllm-cpu", "torch", "transformers"} <= set(found)
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(found)
    assert all("+" not in version for version in found.values())


def test_the_record_is_of_the_locked_engine_and_complete():
    data = provenance.load(real_engine.KIND)["data"]
    assert data["engine"]["vllm-cpu"] == locked()["vllm-cpu"]
    plan, types = data["plan"], data["types"]
    names = (*real_engine.DRIVEN, *real_engine.ASKED)
    assert [found["kv_cache_dtype"] for found in types] == list(names)
    assert len(data["read_float32"]) == plan["read"]
    for found in types:
        if "refused" in found:
            assert found["kv_cache_dtype"] in real_engine.ASKED and found["refused"]
            continue
        size = found["capacity"]
        assert size["tokens"] == size["blocks"] * size["block_size"]
        assert len(found["read"]) == plan["read"] and max(found["read"]) < 0
        assert len(found["outputs"]) == len(found["texts"]) == plan["greedy"]
        assert {len(output) for output in found["outputs"]} == {plan["greedy_output"]}
        assert found["log_probability"] < 0 <= found["likeliest"] <= 1


def test_the_record_counts_every_request_of_every_load():
    data = provenance.load(real_engine.KIND)["data"]
    plan = data["plan"]
    for found in data["types"]:
        loads = found.get("loads", [])
        wanted = found["kv_cache_dtype"] in real_engine.DRIVEN
        expected = plan["concurrency"] * plan["repeats"] if wanted else []
        assert [load["concurrency"] for load in loads] == expected
        for load in loads:
            assert load["complete"] == load["requests"] == plan["requests"]
            assert load["output_tokens"] == plan["requests"] * plan["output"]
            assert max(load["timeline"]["running"]) <= load["concurrency"]
            assert len({len(line) for line in load["timeline"].values()}) == 1


def test_the_record_shows_what_the_budget_was_chosen_for():
    sixteen, eight, *_ = provenance.load(real_engine.KIND)["data"]["types"]
    assert all(load["preemptions"] > 0 for load in sixteen["loads"])
    assert eight["capacity"]["tokens"] > 1.9 * sixteen["capacity"]["tokens"]
    assert sixteen["agree"] == [len(output) for output in sixteen["outputs"]]


def test_the_record_names_no_place_on_the_machine():
    content = (provenance.RESULTS / f"{real_engine.KIND}.json").read_text()
    assert not re.search(r"/(home|root|tmp|work|usr)/", content)
