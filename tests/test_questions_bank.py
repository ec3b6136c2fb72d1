"""The question bank: broken rules are found, numbers computed, all in balance."""

import copy
import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest
import yaml
from questions import ROOT, SAMPLE, everything, sample
from test_notebooks import crowded_lines

import kvq_lib as kvq
from kvq_lib.course.questions import balance, bank, rules
from kvq_lib.errors import InvalidArgument

AROUND = bank.surroundings()
GOOD = {
    entry["id"]: entry
    for path in sorted(SAMPLE.glob("*.yml"))
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
}


def read(*entries, name="02_memory.yml", content=None):
    """The questions of a file that holds these entries, and its problems."""
    if content is None:
        copied = json.loads(json.dumps(entries))  # in which nothing stands twice
        content = yaml.safe_dump(copied, allow_unicode=True)
    return rules.read_file(name, content.encode(), AROUND)


def changed(question_id, **changes):
    """A good question with something in it replaced; None takes it out."""
    entry = copy.deepcopy(GOOD[question_id])
    for key, value in changes.items():
        if value is None:
            del entry[key]
        else:
            entry[key] = value
    return entry


def choices(**changes):
    """Choices of which the last has something replaced."""
    listed = copy.deepcopy(GOOD["memory-kv-heads"]["choices"])
    for key, value in changes.items():
        if value is None:
            listed[-1].pop(key, None)
        else:
            listed[-1][key] = value
    return listed


# -- reading ---------------------------------------------------------------------------


def test_the_sample_is_good_and_has_every_kind():
    assert {q.kind for q in sample()} == set(bank.KINDS)
    assert {q.level for q in sample()} == set(bank.LEVELS)
    assert len({q.id for q in sample()}) == len(sample()) == len(GOOD)


def test_numbers_are_the_library_s():
    (question,) = (q for q in sample() if q.id == "memory-bytes-of-int8")
    shape = kvq.KVShape(32, 8, 128)
    assert question.answer == kvq.kv_bytes(shape, "int8", 4096) / 2**20 == 260
    assert question.shown == "260 MiB" and "4 MiB: 260 MiB, or" in question.why
    assert [m.shown for m in question.mistakes] == ["256 MiB", "1,040 MiB"]
    (question,) = (q for q in sample() if q.id == "memory-time-of-a-step")
    assert [c.text for c in question.choices] == ["0.27 ms", "2.1 ms", "0.034 ms"]


def test_sections_and_works_are_those_of_the_book():
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    page = "book/02_memory_bottleneck"
    assert question.section == bank.Section(page, "2.2", "Count the tensors")
    assert (
        len(AROUND.sections) >= 12
        and "6b.3" in AROUND.sections["book/06b_how_the_kernel_reads_a_page"]
    )
    assert {"ainslie2023gqa", "liu2024kivi"} <= set(AROUND.works)
    assert AROUND.works["liu2024kivi"].startswith("Liu and others, 2024: KIVI: ")


def test_all_problems_are_told_at_once(tmp_path):
    bad = [
        changed("memory-kv-heads", level="medium"),
        changed("memory-what-grows", tags=["nonsense"]),
        GOOD["memory-pages-exact"],
    ]
    (tmp_path / "02_memory.yml").write_text(yaml.safe_dump(bad))
    other = [changed("quantization-divisor", section="book/03#9")]
    (tmp_path / "03_quantization.yml").write_text(yaml.safe_dump(other))
    (tmp_path / "04_nowhere.yml").write_text("[]")
    with pytest.raises(bank.BankError) as error:
        bank.load(tmp_path)
    assert len(error.value.problems) == 4
    for place in (
        "02_memory.yml:11: memory-kv-heads: level",
        "memory-what-grows: unknown tags nonsense",
        "quantization-divisor: no section",
        "04_nowhere.yml: ",
    ):
        assert place in str(error.value)


def test_a_folder_without_questions_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="no questions"):
        bank.load(tmp_path)


def test_a_question_that_changed_is_read_again(tmp_path):
    path = tmp_path / "02_memory.yml"
    path.write_text(yaml.safe_dump([GOOD["memory-kv-heads"]]))
    assert bank.load(tmp_path)[0].level == "easy"
    path.write_text(yaml.safe_dump([changed("memory-kv-heads", level="hard")]))
    assert bank.load(tmp_path)[0].level == "hard"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- id: memory-a\n  id: memory-b\n", "stands twice"),
        ("- {id: memory-a\n", "line 2"),
        ("a: b\n", "a list of questions"),
        ("", "a list of questions"),
        ("- 3\n", "no mapping"),
        ("- !!python/object/apply:os.getcwd []\n", "could not determine"),
        ("- {id: 2026-99-99}\n", "a date or a number that is none"),
        (f"- {{id: {'9' * 5000}}}\n", "a date or a number that is none"),
        ("- " + "[" * 3000 + "]" * 3000 + "\n", "too deep"),
        ("- &a [x]\n- *a\n", "an alias is not allowed"),
        (f"- {{kind: 0x{'f' * 5000}}}\n", "kind is one of"),
        ("#" * 1_000_001, "at most 1,000,000 bytes"),
    ],
)
def test_files_that_hold_no_questions_are_named(content, said):
    found, problems = read(content=content)
    assert not found and len(problems) == 1
    assert problems[0].startswith("02_memory.yml:") and said in problems[0]


def test_bytes_that_are_no_text_are_named():
    found, problems = rules.read_file("02_memory.yml", b"- id: \xff\n", AROUND)
    assert not found and "UTF-8" in problems[0]


# -- rules -----------------------------------------------------------------------------

SINGLE, SEVERAL = "memory-kv-heads", "memory-what-grows"
NUMBER, OPEN = "memory-bytes-of-int8", "memory-why-cache"
WRONG = [
    (SINGLE, {"kind": "choice"}, "kind is one of"),
    (SINGLE, {"level": "medium"}, "level is one of"),
    (SINGLE, {"id": "size-of-it"}, "id is lower case"),
    (SINGLE, {"id": "memory-KV"}, "id is lower case"),
    (SINGLE, {"tags": []}, "a list of 1 to 4"),
    (SINGLE, {"tags": ["size"] * 2}, "a tag stands twice"),
    (SINGLE, {"tags": ["sizes"]}, "unknown tags sizes; known: art"),
    (SINGLE, {"section": "book/02_memory_bottleneck"}, "no section"),
    (SINGLE, {"section": "book/02_memory_bottleneck#2.99"}, "no section"),
    (SINGLE, {"section": "book/appendix_api#1.1"}, "no section"),
    (SINGLE, {"question": "  "}, "no text"),
    (SINGLE, {"question": "How?\n```\ncode\n```"}, "a code fence"),
    (SINGLE, {"question": "How <b>large</b>?"}, "HTML"),
    (SINGLE, {"question": "See {eq}`kv-bytes`."}, "a role"),
    (SINGLE, {"question": "See [there](02)."}, "a link"),
    (SINGLE, {"question": "For $5 a month?"}, "without a partner"),
    (SINGLE, {"question": "How many {answer}?"}, "nothing fills"),
    (SINGLE, {"sources": ["nobody2020"]}, "has no 'nobody2020'"),
    (SINGLE, {"explanation": "no"}, "unknown key 'explanation'"),
    (SINGLE, {"choices": choices()[:2]}, "a list of 3 to 5"),
    (SINGLE, {"choices": choices(right=True)}, "exactly one choice is right, not 2"),
    (SINGLE, {"choices": choices()[1:] * 2}, "exactly one choice is right, not 0"),
    (SINGLE, {"choices": choices(right="yes")}, "right is true or false"),
    (SINGLE, {"choices": choices(why=None)}, "choice 3 lacks 'why'"),
    (SINGLE, {"choices": choices(text="All of the above.")}, "speaks of the other"),
    (SINGLE, {"choices": choices(text="None of these.")}, "speaks of the other"),
    (SINGLE, {"choices": choices(text="They take {value} MiB.")}, "does not have"),
    (SINGLE, {"choices": choices(text="They take 12 MiB.")}, "give it a value"),
    (SINGLE, {"choices": choices(value="2 + 2")}, "does not show"),
    (SINGLE, {"choices": choices(text="{value:d}", value="1.5")}, "format code"),
    (SINGLE, {"choices": choices(text="{value}", value="open(1)")}, "not allowed"),
    (
        SINGLE,
        {"choices": choices(text=choices()[1]["text"].upper())},
        "the same text",
    ),
    *[
        (SINGLE, {"choices": choices(text=words)}, "speaks of the other")
        for words in (
            "Both a and b",
            "a and c.",
            "(a), (b) and (c)",
            "Neither a nor b",
            "None of the other answers",
            "Either of the above",
            "The same as the first choice.",
            "What answer b says.",
            "Both of them.",
        )
    ],
    (
        SINGLE,
        {
            "choices": [
                {
                    "text": f"It is {{value{s}}}.",
                    "value": v,
                    "why": w,
                    "right": w == "A.",
                }
                for s, v, w in (
                    (":.1f", "2 + 2", "A."),
                    (":.3f", "4", "B."),
                    ("", "5", "C."),
                )
            ]
        },
        "choice 2 has the value of another choice",
    ),
    (SINGLE, {"choices": choices(text="{value:9999999999d}", value="4")}, "odd shape"),
    (SINGLE, {"choices": choices(text="{value:>99}", value="4")}, "odd shape"),
    (SINGLE, {"choices": choices(text="One.\n\nTwo.")}, "several paragraphs"),
    (SINGLE, {"choices": choices(why="One.\n\nTwo.")}, "several paragraphs"),
    (SINGLE, {"question": "TODO: which?"}, "a note to its author"),
    (SINGLE, {"question": "See https://example.org for it."}, "a bare address"),
    (SINGLE, {"question": "| a | b |\n|---|---|\n| 1 | 2 |"}, "a table"),
    (SINGLE, {"question": "# Which?"}, "a heading"),
    (SINGLE, {"question": "Which?\n====="}, "a heading"),
    (SINGLE, {"question": "Which?\n- One\n- Two"}, "a list"),
    (SINGLE, {"question": "Which?\n\n1. One"}, "a list"),
    (SINGLE, {"question": "> Which?"}, "a quotation"),
    (SINGLE, {"question": r"Is $\frak{x}$ it?"}, r"the unknown command \frak"),
    (SINGLE, {"question": "Why? " * 500}, "more than 2000 characters"),
    (SINGLE, {"question": "Which\x07?"}, "a control character"),
    (NUMBER, {"unit": "*MiB*"}, "unit is a text"),
    (NUMBER, {"unit": "$x$"}, "unit is a text"),
    (NUMBER, {"unit": "<b>MiB</b>"}, "unit is a text"),
    (NUMBER, {"expression": [1]}, "is no expression"),
    (NUMBER, {"expression": "round(5, -100000000)"}, "at most 20 places"),
    (
        OPEN,
        {"rubric": [{"points": 1, "text": t} for t in ("Says a.", "B", "says  a")]},
        "line 3 of the rubric is another line",
    ),
    (SEVERAL, {"choices": [c | {"right": True} for c in choices()]}, "but not all"),
    (SEVERAL, {"choices": [c | {"right": False} for c in choices()]}, "but not all"),
    (NUMBER, {"expression": "12 +"}, "no expression"),
    (NUMBER, {"expression": "bytes_of(1)"}, "bytes_of"),
    (NUMBER, {"expression": "kv_bytes(1, 'int8', 4)"}, "KVShape"),
    (NUMBER, {"unit": 3}, "unit is a text"),
    (NUMBER, {"tolerance": 0.5}, "tolerance is between"),
    (NUMBER, {"tolerance": True}, "tolerance is no number"),
    (NUMBER, {"decimals": 1.5}, "decimals is no number"),
    (NUMBER, {"expression": "260.4", "tolerance": 0.001}, "would be marked as wrong"),
    (NUMBER, {"why": "That makes {answr}."}, "nothing fills"),
    (NUMBER, {"mistakes": []}, "a list of 1 to 6"),
    (
        NUMBER,
        {"mistakes": [{"expression": "261", "why": "Near."}]},
        "would be marked as right",
    ),
    (
        NUMBER,
        {"mistakes": [{"expression": e, "why": "Far."} for e in ("100", "100.5")]},
        "is one of the others",
    ),
    (OPEN, {"rubric": GOOD[OPEN]["rubric"][:2]}, "a list of 3 to 5"),
    (OPEN, {"rubric": [{"points": 0.5, "text": "a"}] * 3}, "points is no number"),
    (OPEN, {"rubric": [{"points": 0, "text": "a"}] * 3}, "points is between"),
    (OPEN, {"answer": "So. " * 11}, "at most 10"),
    (OPEN, {"answer": None}, "lacks 'answer'"),
]


@pytest.mark.parametrize(("question_id", "changes", "said"), WRONG)
def test_a_broken_rule_is_told_with_file_and_id(question_id, changes, said):
    found, problems = read(changed(question_id, **changes))
    assert not found, "the question was taken"
    named = changes.get("id", question_id)
    where = re.compile(rf"02_memory\.yml:\d+: {re.escape(named)}: ")
    assert all(where.match(p) for p in problems), problems
    assert any(said in p for p in problems), problems


@pytest.mark.parametrize("question_id", GOOD)
def test_each_good_question_is_taken_and_every_key_is_needed(question_id):
    topic = question_id.split("-")[0]
    number = list(bank.TOPICS).index(topic) + 1
    name = f"{number:02}_{topic}.yml"
    assert read(GOOD[question_id], name=name)[1] == []
    for key in set(GOOD[question_id]) - {"sources"}:
        assert read(changed(question_id, **{key: None}), name=name)[1], key


LINED = """\
- id: memory-a
  kind: multiple
  level: easy
  tags: [size]
  section: book/02_memory_bottleneck#2.2
  question: What is it?
  choices:
    - {text: One., right: true, why: So.}
    - text: Two.
      why: See [there](x).
    - {text: Three., why: No.}
- id: memory-b
  kind: numeric
  level: never
  tags: [size]
  section: book/02_memory_bottleneck#2.2
  question: How many?
  expression: 1 +
  unit: $x$
  tolerance: 2
  decimals: 0
  why: It is {answer}.
  mistakes:
    - {expression: 5, why: Too many.}
    - {expression: log(0), why: Too few.}
"""


def test_every_problem_names_its_line():
    problems = read(content=LINED)[1]
    lines = {int(p.split(":")[1]): p for p in problems}
    assert len(lines) == len(problems) == 5, problems
    for line, said in (
        (9, "memory-a: choice 2: why holds a link"),
        (14, "memory-b: level is one of"),
        (18, "memory-b: expression: '1 +'"),
        (19, "memory-b: unit is"),
        (20, "memory-b: tolerance is between"),
    ):
        assert said in lines[line]


def test_ids_are_unique_and_both_places_are_named():
    one = next(q for q in sample() if q.id == SINGLE)
    other = dataclasses.replace(one, place="03_quantization.yml:7")
    (problem,) = rules.together([one, other])
    assert problem.startswith(f"03_quantization.yml:7: {SINGLE}: {one.place} has")
    assert one.place == "02_memory.yml:2"


@pytest.mark.parametrize("name", ["13_memory.yaml", "02_memory.json", "more"])
def test_files_that_nobody_would_read_are_told(tmp_path, name):
    (tmp_path / "02_memory.yml").write_text(yaml.safe_dump([GOOD[SINGLE]]))
    (tmp_path / "README.md").write_text("How to.")
    (tmp_path / ".hidden").write_text("")
    assert len(bank.load(tmp_path)) == 1
    (tmp_path / name).write_text("[]")
    with pytest.raises(bank.BankError, match=f"{name}: a file is called NN_topic.yml"):
        bank.load(tmp_path)


def test_halves_are_rounded_up():
    for expression, shown in (
        ("0.125", "0.13"),
        ("2.675", "2.68"),
        ("-0.125", "-0.13"),
    ):
        entry = changed(
            NUMBER, expression=expression, decimals=2, tolerance=0.1, unit="",
            mistakes=[{"expression": "5", "why": "No."}],
        )  # fmt: skip
        ((question,), problems) = read(entry)
        assert not problems and question.shown == shown


@pytest.mark.parametrize(
    ("words", "alike"),
    [
        ("A model has 32 query heads and 8 KV heads. Which of them decide how large "
         "its cache is?", False),
        ("A model has 32 query heads and 16 KV heads. Which of them decide the size of "
         "its cache?", True),
        ("What decides the size of a cache?", False),
    ],
)  # fmt: skip
def test_questions_that_are_nearly_equal_are_found(words, alike):
    found, problems = read(changed(SINGLE, id="memory-other", question=words))
    assert not problems
    listed = [*(q for q in sample() if q.id == SINGLE), *found]
    assert bool(rules.together(listed)) is alike


# -- balance ---------------------------------------------------------------------------


def test_the_bank_of_the_book_is_good_and_balanced():
    found = list(balance.troubles(bank.load(), balance.chapters()))
    assert not found, "\n".join(found)


def test_words_that_give_choices_away_are_counted_and_bounded():
    def asked(place, right, wrong):
        listed = [bank.Choice(right, True, "a"), *[bank.Choice(wrong, False, "b")] * 3]
        return dataclasses.replace(sample()[0], id=str(place), choices=tuple(listed))

    reason = balance.TELLING["a reason"]
    told = [asked(i, f"It is {i}", f"It is {i}, since so") for i in range(20)]
    assert balance.telling(told, reason) == (0, 1)
    said = "a reason stands in 0% of right and 100% of wrong"
    assert any(said in line for line in balance.troubles(told, []))
    assert "a reason in 0% of right, 100% of wrong" in balance.report(told, [])
    even = [asked(i, f"It is {i}", f"It is not {i}") for i in range(20)]
    assert not any("a reason" in line for line in balance.troubles(even, []))
    for words, held in (("sofa", False), ("So it is", True), ("so, for now", True)):
        assert bool(reason.search(words)) is held


def test_the_best_page_is_the_one_that_the_library_counts():
    """Over a page of lengths, so that the last page is half full on average."""
    (question,) = (q for q in bank.load() if q.id == "paging-best-size")
    shape = kvq.KVShape(1, 1, 128)

    def bits(size):
        lengths = range(3000 - size // 2, 3000 + size // 2)
        held = (kvq.kv_bytes(shape, "int2-kivi", n, 1, size) / n for n in lengths)
        return sum(held) / size

    best = min((2**i for i in range(2, 11)), key=bits)
    assert question.answer == best == 64
    assert bits(56) < bits(64) and bits(56) < bits(48)  # near the 57 of the text


def test_the_sample_is_out_of_balance_and_the_report_says_how():
    report = balance.report(sample(), balance.chapters())
    assert "11 questions; at least 120" in report
    assert "book/01_visual_demonstration has 0 questions" in report
    assert "0 questions have the tag ten" in report
    assert "size 2" in report and "tags not used: art" in report
    row = next(line for line in report.splitlines() if line.startswith("memory"))
    assert row.split()[1:] == ["7", "3", "2", "2", "2", "2", "2", "1"]


def test_choices_that_give_themselves_away_are_found():
    given = {
        pick: {q.id for q in balance.given_away(sample(), pick)} for pick in (max, min)
    }
    longest = {}
    for question in sample():
        if question.kind == "single":
            sizes = sorted((len(c.text), c.right) for c in question.choices)
            longest[question.id] = sizes
    assert given[max] == {i for i, s in longest.items() if s[-1][1]} != set()
    assert given[min] == {i for i, s in longest.items() if s[0][1]} != set()
    (question,) = (q for q in sample() if q.id == SINGLE)
    alike = [
        dataclasses.replace(c, text=f"Choice {c.right:d}.") for c in question.choices
    ]
    tied = dataclasses.replace(question, choices=tuple(alike))
    assert not balance.given_away([tied], max) and not balance.given_away([tied], min)


@pytest.mark.parametrize(
    "path", sorted((ROOT / bank.FOLDER).glob("*.yml")), ids=lambda p: p.name
)
def test_texts_have_one_sentence_a_line(path):
    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from texts(inner)

    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        crowded = [line for words in texts(entry) for line in crowded_lines(words)]
        assert not crowded, f"{entry['id']}: one sentence a line, please: {crowded}"


def test_every_number_is_finite_and_shown():
    numeric = [q for q in everything() if q.kind == "numeric"]
    assert len(numeric) > 20
    for question in numeric:
        assert math.isfinite(question.answer) and question.shown.endswith(question.unit)


# -- the command -----------------------------------------------------------------------


def test_planning_loads_nothing_of_the_questions():
    code = (
        "import sys; from kvq_lib.cli import main\n"
        "main(['plan', 'tests/configs/llama-3.1-8b.json', '--gpu', '24GiB',"
        " '--context', '64', '--scheme', 'int8'])\n"
        "assert not {'kvq_lib.course.questions', 'markdown_it'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
