"""The command line: what it prints, and what it says about what it cannot do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvq_lib as kvq
from kvq_lib.cli import main

CONFIGS = Path(__file__).parent / "configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")
ASKED = [LLAMA, "--gpu", "24GiB", "--context", "4096"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `kvq` with some arguments: exit status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "88")

    def call(*arguments):
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def changed(**options):
    """The arguments of a good call, with some options added or replaced."""
    values = {"--gpu": "24GiB", "--context": "4096", "--weights": "15GiB", **options}
    return ["plan", LLAMA, *(x for pair in values.items() for x in pair)]


def test_the_tables_say_where_the_memory_goes(run):
    status, out, err = run("plan", *ASKED, "--scheme", "native", "--scheme", "int4")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "llama: 32 layers with 8 kv heads of 128 channels"
    weights = next(line for line in lines if line.startswith("weights"))
    # 8,030,261,248 parameters of 2 bytes are 14.96 GiB.
    assert weights.split()[1:4] == ["14.96", "GiB", "8,030,261,248"]
    # 21.6 - 14.96 = 6.64 GiB: 13 sequences of 512 MiB. Under int4: 136 MiB and a hot
    # page of 2 MiB each, once 32 hot pages more for a chunk of 512 tokens: 48.
    table = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert table["native"] == (
        ["16.000", "131,072", "512.00", "0.0", "0.00", "13", "6.50", "0.14"]
    )
    assert table["int4"] == (
        ["4.250", "34,816", "136.00", "2,048.0", "64.00", "48", "6.53", "0.11"]
    )
    columns = [line for line in lines if line.startswith(("scheme", "native", "int4"))]
    assert len(columns) == 3 and len({len(line) for line in columns}) == 1


def test_all_schemes_are_compared_unless_some_are_named(run):
    _, out, _ = run("plan", *ASKED)
    assert all(f"\n{name} " in out for name in kvq.SCHEMES)
    assert "mixed: keys at its budget" in out


def test_a_scheme_that_is_named_twice_has_one_row(run):
    asked = [*ASKED[:-1], "1", "--scheme", "int8", "--scheme", "int8"]
    _, out, _ = run("plan", *asked)
    assert out.count("\nint8 ") == 1 and "\nsequences of 1 token in pages" in out


def test_windows_have_a_column_of_their_own(run):
    gemma = [str(CONFIGS / "gemma-2-9b.json"), *ASKED[1:3], "--weights", "0"]
    _, out, _ = run("plan", *gemma, "--context", "8192", "--scheme", "native")
    assert "at context" in out and "344,064     172,032" in out
    assert "the latest 4096 tokens" in out
    assert "at context" not in run("plan", *ASKED, "--scheme", "native")[1]


def test_schemes_that_do_not_go_are_left_out_with_a_reason(run):
    deepseek = [str(CONFIGS / "deepseek-v2-lite.json"), *ASKED[1:], "--weights", "0"]
    status, out, _ = run("plan", *deepseek)
    assert status == 0 and "int4-kivi was left out: int4-kivi stores keys and" in out
    status, out, err = run("plan", *deepseek, "--scheme", "int4-kivi")
    assert (status, out) == (2, "") and "int4-kivi" in err


def test_the_window_of_a_scheme_can_be_set(run):
    options = [*ASKED, "--json", "--scheme", "int4"]
    plain = json.loads(run("plan", *options)[1])["schemes"][0]
    wide = json.loads(run("plan", *options, "--recent", 64, "--sinks", 16)[1])
    # Five more hot pages of 64 KiB a layer and 8 heads; the sink has no cold form.
    hot, cold = 2 * 16 * 128 * 2, 2 * 16 * 68
    extra = wide["schemes"][0]["sequence_bytes"] - plain["sequence_bytes"]
    assert extra == 32 * 8 * (5 * hot - cold)


def test_json_holds_exact_bytes_under_stable_names(run):
    status, out, err = run(*changed(), "--json", "--scheme", "int8")
    assert (status, err) == (0, "")
    content = json.loads(out)
    assert content == {
        "model": "llama",
        "layers": ["32 layers with 8 kv heads of 128 channels"],
        "context": 4096,
        "page_size": 16,
        "chunk": 512,
        "tensor_parallel": 1,
        "memory_bytes": 24 * 2**30,
        "utilization": 0.9,
        "usable_bytes": 24 * 2**30 * 9 // 10,
        "parameters": None,
        "weight_bits": None,
        "weight_bytes": 15 * 2**30,
        "reserve_bytes": 0,
        "schemes": [
            {
                "scheme": "int8",
                "bits_per_element": 8.125,
                "bytes_per_token": 66560.0,
                "bytes_per_token_at_context": 66560.0,
                "sequence_bytes": 4096 * 66560,
                "step_bytes": 2**21,
                "chunk_bytes": 2**26,
                "max_batch": 25,
                "cache_bytes": 25 * (4096 * 66560 + 2**21) + 2**26,
                "left_bytes": 24 * 2**30 * 9 // 10
                - 15 * 2**30
                - 25 * (4096 * 66560 + 2**21)
                - 2**26,
            }
        ],
        "skipped": {},
        "notes": ["No reserve is kept for activations beyond the unusable part."],
    }


def test_gb_and_gib_differ(run):
    def memory(gpu):
        out = run(*changed(**{"--gpu": gpu}), "--json")[1]
        return json.loads(out)["memory_bytes"]

    assert memory("24GB") == memory("l4") == 24 * 10**9
    assert memory("24 GiB") == 24 * 2**30
    assert memory(str(24 * 2**30)) == 24 * 2**30


def test_nothing_fits_is_an_answer(run):
    status, out, err = run(*changed(**{"--gpu": "8GiB"}), "--scheme", "int4")
    assert (status, err) == (0, "") and "nothing is left for a cache" in out
    assert " 0       0.00" in out


def test_help_teaches(run):
    status, out, _ = run("--help")
    assert status == 0 and "plan" in out
    status, out, _ = run("plan", "--help")
    assert status == 0
    wanted = ["max batch = floor(", "examples:", "int4-kivi", "H200", "GiB", "exit st"]
    assert all(word in out for word in wanted)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "required"),
        (["plan"], "required"),
        (["plan", LLAMA, "--gpu", "L4"], "--context"),
        (["nothing"], "invalid choice"),
        (changed(**{"--page": "4"}), "unrecognized"),
        (changed(**{"--context": "0"}), "context is a whole number, at least 1"),
        (changed(**{"--context": "-5"}), "context is a whole number"),
        (changed(**{"--context": "4k"}), "'4k' is no whole number"),
        (changed(**{"--context": "9" * 5000}), "whole number"),
        (changed(**{"--context": str(10**30)}), "context is a whole number"),
        (changed(**{"--page-size": "0"}), "page_size"),
        (changed(**{"--tensor-parallel": "0"}), "tensor_parallel"),
        (changed(**{"--utilization": "nan"}), "utilization"),
        (changed(**{"--utilization": "2"}), "utilization"),
        (changed(**{"--utilization": "most"}), "'most' is no number"),
        (changed(**{"--weights": "15G"}), "24GiB (1,024s), 24GB (1,000s)"),
        (changed(**{"--weights": "inf"}), "weights is an amount"),
        (changed(**{"--weight-dtype": "4"}), "not both"),
        (changed(**{"--weight-dtype": "int3"}), "'int3' is no number"),
        (changed(**{"--reserve": "-1"}), "reserve"),
        (changed(**{"--gpu": "H300"}), "no memory is known for the GPU 'H300'"),
        (changed(**{"--gpu": "24"}), "24 bytes: give a unit"),
        (changed(**{"--gpu": "0"}), "0 bytes"),
        (changed(**{"--scheme": "int5"}), "unknown scheme 'int5'"),
        (changed(**{"--recent": "16"}), "--scheme"),
        (changed(**{"--scheme": "native", "--sinks": "16"}), "native seals no page"),
        (changed(**{"--dtype": "int8"}), "invalid choice"),
        (["plan", str(CONFIGS / "t5-base.json"), *ASKED[1:]], "encoder-decoder"),
        (["plan", str(CONFIGS / "gpt-oss-20b.json"), *ASKED[1:]], "quantized"),
        (["plan", str(CONFIGS), *ASKED[1:]], "no config.json in the folder"),
        (["plan", "/no/such.json", *ASKED[1:]], "no such file"),
        (["plan", "./nowhere", *ASKED[1:]], "no such file"),
        (["plan", "a\0b", *ASKED[1:]], ""),
        (["plan", "x" * 5000, *ASKED[1:]], ""),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line(
    run, arguments, reason, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("kvq") and reason in err
    assert len(err) < 1100


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot read"),
        (b"{", "cannot read"),
        (b"\xff\xfe\x00", "cannot read"),
        (b"[" * 100_000, "cannot read"),
        (b"[1]", "holds no config"),
        (b"null", "holds no config"),
        (b"{}", "has a model_type"),
        (b'{"model_type": 5}', "has a model_type"),
        (b'{"model_type": "llama", "hidden_size": NaN}', "NaN is no number"),
        (b'{"model_type": "llama", "hidden_size": "big"}', "llama config"),
        (b'{"model_type": "llama", "num_hidden_layers": -3}', "num_hidden_layers"),
        (b'{"model_type": "llama", "num_key_value_heads": -3}', "kv heads"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "1000000000"),
        (b'{"model_type": "my_model", "auto_map": {"AutoConfig": "x.Y"}}', "my_model"),
    ],
)
def test_a_config_that_is_broken_is_said_in_one_line(run, tmp_path, content, reason):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for model in (path, tmp_path):
        status, out, err = run("plan", model, *ASKED[1:])
        assert (status, out) == (2, "")
        assert err.count("\n") == 1 and reason in err


def test_a_model_that_is_not_here_and_no_network(run):
    script = "import sys; from kvq_lib.cli import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-c", script, "plan", "nobody/nothing", *ASKED[1:]],
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "HF_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.count("\n") == 1 and "'nobody/nothing'" in found.stderr


def test_importing_the_command_line_imports_no_transformers():
    script = "import sys, kvq_lib.cli; sys.exit('transformers' in sys.modules)"
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)
