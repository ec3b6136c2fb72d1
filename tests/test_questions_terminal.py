"""`kvq quiz`: what it asks, takes and says, in terminals and pipes of every kind."""

import builtins
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from questions import ROOT, answers, everything, sample

from kvq_lib.course.questions import bank, terminal, text
from kvq_lib.course.questions.marking import mark
from kvq_lib.errors import InvalidArgument

EVERY = everything()


@pytest.fixture
def tell(monkeypatch):
    """A function that answers a question in the terminal: the points, what was said."""

    def reply(question, lines, seed=7):
        left = iter(lines)
        said = []

        def read(prompt=""):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(builtins, "print", lambda *words: said.append(words))
        try:
            return terminal.ask(question, random.Random(seed)), "\n".join(
                " ".join(map(str, words)) for words in said
            )
        finally:
            monkeypatch.undo()

    return reply


def in_terminal(question, answer, seed=7):
    """The lines that somebody types to give an answer."""
    if question.kind == "numeric":
        return [answer or ""] * 3
    if question.kind == "open":
        lines = range(len(question.rubric))
        return ["", *("y" if i in (answer or ()) else "n" for i in lines)]
    order = list(range(len(question.choices)))
    random.Random(seed).shuffle(order)
    return [", ".join(terminal.LETTERS[order.index(i)] for i in answer or ())] * 3


@pytest.mark.parametrize("question", EVERY, ids=lambda q: q.id)
def test_the_terminal_marks_every_answer_as_python_does(question, tell):
    for answer in answers(question):
        if question.kind == "single" and len(answer or ()) > 1:
            continue  # several letters are asked again, and then are none
        earned, said = tell(question, in_terminal(question, answer))
        expected = mark(question, answer)
        assert earned == pytest.approx(expected), answer
        if question.kind != "open":
            word = {0.0: "✗ Wrong.", 1.0: "✓ Right."}.get(expected, "◐ Partly right")
            assert word in said
        section = text.plain(question.section.title)
        assert f"Section {question.section.number}, {section}" in said


def test_several_letters_for_one_choice_are_asked_again(tell):
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    right = in_terminal(question, question.rights)[0]
    earned, said = tell(question, ["abc", "z", right])
    assert earned == 1 and said.count("Type a letter.") == 2


def test_a_third_line_that_means_nothing_is_no_answer(tell):
    (question,) = (q for q in sample() if q.id == "memory-bytes-of-int8")
    earned, said = tell(question, ["260 ms", "0,26", "many", "260"])
    assert earned == 0 and said.count("Try again.") == 2
    assert "the unit here is MiB. Try again." in said and "with a point" in said
    assert "and 1.5e3. That counts as no answer." in said
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    earned, said = tell(question, ["z", "ab", "y", "a"])
    assert earned == 0 and said.count("The letters are a, b, c.") == 2
    assert "The letters are a, b, c. That counts as no answer." in said


def test_the_reader_s_own_choices_and_the_page_are_named(tell):
    (question,) = (q for q in sample() if q.id == "memory-what-grows")
    said = tell(question, in_terminal(question, (0, 2)))[1]
    assert said.count("your choice: ") == 2 and "✓ your choice: Each token" in said
    assert "✗ your choice: That changes the weights alone." in said
    assert "in book/02_memory_bottleneck" in said
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    said = tell(question, ["a"])[1]
    assert "Source: Ainslie and others, 2023: GQA: " in said


def test_a_known_mistake_is_explained(tell):
    (question,) = (q for q in sample() if q.id == "memory-bytes-of-int8")
    assert "forgets the scales" in tell(question, ["256"])[1]
    assert "forgets the scales" not in tell(question, ["260"])[1]


def run(monkeypatch, capsys, lines, **options):
    """What `kvq quiz` prints for a reader who types these lines and leaves."""
    monkeypatch.setattr(bank, "FOLDER", bank.ROOT / "tests" / "bank")
    left = iter(lines)

    def read(prompt=""):
        print(prompt, end="")
        word = next(left, EOFError)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr(builtins, "input", read)
    ending = terminal.run(**options)
    return capsys.readouterr().out + ending


@pytest.mark.parametrize("stop", [EOFError, KeyboardInterrupt])
def test_an_interview_ends_politely_with_its_score(monkeypatch, capsys, stop):
    said = run(
        monkeypatch, capsys, [*["260"] * 3, stop], topics=["quantization"], seed=1
    )
    assert "Stopped." in said and re.search(r"\b\d of \d points", said)
    nothing = run(monkeypatch, capsys, [stop], seed=1)
    assert "No question was answered." in nothing


def test_the_same_seed_asks_the_same_and_choices_are_kept_to(monkeypatch, capsys):
    lines = [""] * 60
    one, two, other = (
        run(monkeypatch, capsys, lines, levels=["easy"], seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == two != other
    easy = [q for q in sample() if q.level == "easy"]
    assert one.count(" · easy · ") == len(easy) and " · mid · " not in one
    assert f"0 of {len(easy)} points" in one
    assert run(monkeypatch, capsys, lines, number=2, seed=1).count(" of 2 · ") == 2


def test_several_topics_levels_and_kinds_can_be_asked(monkeypatch, capsys):
    wish = {"topics": ["memory"], "levels": ["easy", "mid"], "kinds": ["numeric"]}
    said = run(monkeypatch, capsys, [""] * 60, number=50, **wish)
    fit = [q for q in sample() if q.topic == "memory" and q.kind == "numeric"]
    assert said.count("A number") == len(fit) == 2 and f"of {len(fit)} points" in said
    both = {"topics": ["memory", "quantization"], "kinds": ["single", "open"]}
    said = run(monkeypatch, capsys, [""] * 90, number=50, **both)
    fit = [q for q in sample() if q.kind in ("single", "open")]
    assert f"of {len(fit)} points" in said


def test_time_ends_an_interview_that_waits_for_a_line(monkeypatch, capsys):
    monkeypatch.setattr(bank, "FOLDER", bank.ROOT / "tests" / "bank")
    left = iter([""] * 3)

    def read(prompt=""):
        try:
            return next(left)
        except StopIteration:
            time.sleep(60)  # nobody types

    monkeypatch.setattr(builtins, "input", read)
    before = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    ending = terminal.run(kinds=["single"], seed=1, minutes=1 / 60)
    assert time.monotonic() - started < 20
    assert "Time is up: 3 of 4 were answered." in ending
    assert "0 of 3 points" in ending
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


COMMAND = [
    *(
        sys.executable,
        "-u",
        "-c",
        "import sys; from kvq_lib.cli import main; sys.exit(main())",
    ),
    *("quiz", "--number", "3", "--seed", "1"),
]


def test_the_command_works_from_a_pipe_and_into_one():
    done = subprocess.run(
        COMMAND, cwd=ROOT, input="a\n\n1\n", capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr
    assert "1 of 3 · " in done.stdout and "Section " in done.stdout
    assert re.search(r"of \d points?", done.stdout.strip().split("Stopped.")[-1])
    reader = subprocess.Popen(
        COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    reader.stdout.close()  # as `head` does when it has seen enough
    assert reader.communicate("a\n" * 30)[1] == "" and reader.returncode == 0


@pytest.mark.parametrize(
    ("closed", "said"), [("<&-", "the standard input is closed"), (">&-", "output is")]
)
def test_a_closed_terminal_is_told_without_a_traceback(closed, said):
    script = f'exec "$@" {closed}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_a_terminal_without_signs_gets_letters():
    done = subprocess.run(
        [*COMMAND, "--kind", "single,multiple", "--topic", "memory"],
        cwd=ROOT, input="a\n\u00e9\n\n".encode(), capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr
    said = done.stdout.decode("ascii")
    assert "1 of 3 - " in said and ("+ " in said and "- " in said)


def test_an_interrupt_ends_the_command_politely():
    running = subprocess.Popen(
        COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = ""
    while "> " not in said:
        said += running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    said, wrong = running.communicate()
    assert running.returncode == 0 and not wrong
    assert "Stopped." in said and "No question was answered." in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topics": ["memory", "weather"]}, "a topic is one of"),
        ({"levels": ["medium"]}, "a level is one of"),
        ({"kinds": ["numbers"]}, "a kind is one of"),
        ({"number": 0}, "at least one question"),
        ({"minutes": -1}, "minutes are from 0"),
        ({"minutes": float("nan")}, "minutes are from 0"),
        ({"topics": ["art"], "levels": ["easy"]}, "no question fits"),
    ],
)
def test_what_nobody_can_ask_is_refused(monkeypatch, options, said):
    monkeypatch.setattr(bank, "FOLDER", bank.ROOT / "tests" / "bank")
    with pytest.raises(InvalidArgument, match=said):
        terminal.run(**options)


def test_the_report_prints_all_problems_of_a_bad_bank(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bank, "FOLDER", tmp_path)
    for lines, said in (
        (["- {kind: a}"], "^1 problem$"),
        (["- 3"] * 2, "^2 problems$"),
    ):
        (tmp_path / "02_memory.yml").write_text("\n".join(lines))
        with pytest.raises(InvalidArgument, match=said):
            terminal.run(report=True)
        out = capsys.readouterr().out
        assert out.count("02_memory.yml:") == len(lines)
