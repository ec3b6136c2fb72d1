"""Homework sources: what is read from one, and what is said about a broken one."""

import dataclasses
import re
from pathlib import Path

import pytest

from kvq_lib.course.homework import blocks, source

SAMPLE = Path(__file__).parent / "homework_sample" / "hw99_sample.md"
TEXT = SAMPLE.read_text(encoding="utf-8")


@pytest.fixture
def read(tmp_path):
    """Read a text as the source of homework 99."""

    def call(text, name=SAMPLE.name):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return source.read(tmp_path / name)

    return call


@pytest.fixture
def problems(read):
    """What is wrong with a text: (line, message) each."""

    def call(text, name=SAMPLE.name):
        with pytest.raises(source.SourceError) as caught:
            read(text, name)
        return [(p.line, p.message) for p in caught.value.problems]

    return call


def test_a_homework_is_what_its_source_says():
    homework = source.read(SAMPLE)
    assert (homework.id, homework.name) == ("hw99", "hw99_sample")
    assert homework.title == "Homework 99: pages and bytes"
    assert homework.chapter == "book/02_memory_bottleneck"
    assert (homework.minutes, homework.torch, homework.points) == (10, False, 6)
    assert [(q.id, q.title) for q in homework.questions] == [
        ("q1", "bytes of a cache"),
        ("q2", "pages of a sequence"),
    ]


def test_probes_and_mutants_are_what_their_metadata_say():
    first, second = source.read(SAMPLE).questions
    assert [(p.name, p.points) for p in first.probes] == [
        ("a real model", 2),
        ("a small model", 1),
    ]
    counts, empty = second.probes
    assert (counts.rtol, counts.atol, counts.seed) == (1e-6, 0, 0), "the defaults"
    assert empty.rtol == 1e-9, "YAML takes 1e-9 for text"
    assert empty.code == "[waste(n) for n in (1, 32, 33)]"
    names = [m.name for m in second.mutants]
    assert names == ["rounds down", "always one page more"]
    assert second.mutants[0].code.startswith("# @answer q2\nPAGE = 16\n")
    assert (second.mutants[0].also, second.mutants[0].replaces) == ((), 1)


def test_cells_know_their_line():
    lines = TEXT.splitlines()
    cells = source.read(SAMPLE).cells
    assert len(cells) > 15
    for cell in cells:
        assert lines[cell.line - 1] == cell.source.split("\n")[0]


def test_students_see_neither_probes_nor_mutants():
    homework = source.read(SAMPLE)
    roles = {"text", "given", "answer", "check"}
    assert {cell.role for cell in homework.exercise} == roles
    assert {cell.role for cell in homework.solution} == {*roles, "explain"}
    assert not any("rounds down" in str(cell) for cell in homework.solution)


ANSWER_1 = "kvq: {role: answer, question: q1}"
CHECK_1 = "kvq: {role: check, question: q1}"
HIDDEN_1 = '{role: hidden, question: q1, name: "a real model", points: 2}'
MUTANT_1 = '{role: mutant, question: q1, name: "values forgotten"}'
PROBE_1 = "[cache_bytes(32, 8, 128, n) for n in (1, 4096)]"
BLOCK_1 = "    ### BEGIN SOLUTION\n    numbers"

# What is replaced, by what, in which line the problem is (a text of the new source,
# where that line begins), and what is said about it.
BROKEN = [
    ("homework: hw99", "homework: 99", "  homework: 99", 'must be like "hw02"'),
    ("homework: hw99", "homework: hw98", "---", "must be named hw98_topic.md"),
    ("chapter: book", "chapter: /book", "  chapter:", "must be like book/02_words"),
    ("minutes: 10", "minutes: soon", "  minutes:", "must be a whole number"),
    ("minutes: 10", "minutes: true", "  minutes:", "must be a whole number"),
    ("torch: false", "torch: maybe", "  torch:", "must be false: no cell imports it"),
    ("torch: false", "torch: true", "  torch:", "must be false: no cell imports it"),
    ("import math", "import math, torch.nn", "  torch:", "must be true: a cell"),
    ("import math", "from kvq_lib import plan", "  torch:", "must be true"),
    ("torch: false", "torch: false\n  points: 1", "  points:", "unknown key 'points'"),
    ("kvq:\n  homework", "kvx:\n  homework", "---", "lacks the block kvq"),
    ("name: python3", "name: ir", "---", "a kernelspec with name: python3"),
    ("# Homework 99", "Homework 99", "Homework 99", "must begin with `# Title`"),
    ("../book/02_memory", "../book/03", "# Homework", "must link to ../book/02_memory"),
    ("## What", "# What", "# What", "one `# ` title only"),
    ("## What", "## Question 4: What", "## Question 4", "stands where 3 is due"),
    ("## Question 2: pages", "## Question 2 pages", "## Question 2", "reads `## Ques"),
    ("Chapter 3 m", "## Question 3: a\nM", "## Question 3", "opens its own cell"),
    ("</details>", "", "## Question 1", "1 <details> and 0 </details>"),
    ("<summary>Hint", "<summary>More", "## Question 1", "question 1 has no hint"),
    (ANSWER_1, "kvq: {role: anwser, question: q1}", "# @answer q1", "unknown role"),
    (ANSWER_1, "kvq: {question: q1}", "# @answer q1", "kvq says no role"),
    (ANSWER_1, "kvq: answer", "# @answer q1", "must be like {role: answer"),
    (ANSWER_1, "kvq: {role: answer}", "# @answer q1", "question: must be like q1"),
    (ANSWER_1, "kvq: {role: answer, question: q2}", "# @answer q1", "under Question 1"),
    (ANSWER_1, ANSWER_1[:-1] + ", points: 1}", "# @answer q1", "'points' is not for"),
    ("# @answer q1\n", "# answer q1\n", "# answer q1", "must be '# @answer q1'"),
    ("# @answer q1\n", "# @answer q2\n", "# @answer q2", "must be '# @answer q1'"),
    ("# @check q1\n", "\n", "assert isinstance", "must be '# @check q1'"),
    ("import math", "# @answer q1", "# @answer q1", "give it its role"),
    (BLOCK_1, "    numbers", "    ### END", "'### END SOLUTION' without"),
    (BLOCK_1, BLOCK_1.replace("    #", "  #", 1), None, "indented like its"),
    (BLOCK_1, f"    ### BEGIN SOLUTION\n{BLOCK_1}", None, "a block inside the block"),
    (BLOCK_1, BLOCK_1.replace("BEGIN", "Begin"), None, "must read '### BEGIN"),
    ("    ### END SOLUTION\n```", "```", None, "without '### END SOLUTION'"),
    ("    numbers = 2 *", "    2 +* ", "    2 +*", "no plain Python"),
    ("layers: int, heads", "layers, heads", "def cache_bytes", "annotate layers"),
    (") -> int:", "):", "def cache_bytes", "annotate what it returns"),
    ('    """Bytes of', '    x = """Bytes of', "def cache_bytes", "in a docstring"),
    (CHECK_1, "kvq: {role: given}", "# @check q1", "give it its role"),
    (', "count bytes in whole numbers"', "", "assert isinst", "without a message"),
    ('print("q1:', 'print(1); print("q1:', "# @check q1", "its only print"),
    ('print("q1: the', 'print(f"q1: {1}the', "# @check q1", "of a fixed text"),
    (HIDDEN_1, HIDDEN_1.replace("2}", "0}"), PROBE_1, "points: must be a number above"),
    (HIDDEN_1, HIDDEN_1.replace("2}", "true}"), PROBE_1, "points: must be a number"),
    (HIDDEN_1, HIDDEN_1.replace("2}", "2, rtol: -1}"), PROBE_1, "rtol: must be 0 or"),
    (HIDDEN_1, HIDDEN_1.replace("2}", "2, atol: x}"), PROBE_1, "atol: must be 0 or"),
    (HIDDEN_1, HIDDEN_1.replace("2}", "2, seed: x}"), PROBE_1, "seed: must be a whole"),
    (HIDDEN_1, HIDDEN_1.replace('"a real model"', '""'), PROBE_1, "name: must be a"),
    ("a real model", "a small model", PROBE_1, "named 'a small model'"),
    (PROBE_1, "cache_bytes(1, 1, 1, 1) == 4", "cache_bytes(1", "must not compare"),
    (PROBE_1, "not cache_bytes(1, 1, 1, 1)", "not cache", "must not compare"),
    (PROBE_1, "x = 1", "x = 1", "ends with an expression"),
    (PROBE_1, "[1234, 5678]", "[1234", "use what the student wrote"),
    (MUTANT_1, MUTANT_1[:-1] + ", also: [q1]}", None, "also: q1 is no other question"),
    (MUTANT_1, MUTANT_1[:-1] + ", also: q7}", None, "also: q7 is no other question"),
    (MUTANT_1, MUTANT_1[:-1] + ", also: 7}", None, "also: 7 is no other question"),
    (MUTANT_1, MUTANT_1[:-1] + ", replaces: 2}", None, "replaces: q1 has 1 answers"),
    (MUTANT_1, MUTANT_1[:-1] + ", replaces: a}", None, "replaces: must be 1, 2"),
    ("return 4 * heads", "return 2 * layers * heads", None, "what 'values forgotten'"),
    ("return 4 * heads", "return 4 +* heads", None, "no plain Python"),
    ("return 4 *", "### BEGIN SOLUTION\n    return 4 *", None, "with role answer"),
    ("import math", "import math  # " + "x" * 80, "import math", "95 characters"),
    ("import math", "\n" + "import math\n" * 26, "import math", "27 lines: at most 25"),
    ("import math", "%matplotlib inline", "%matplotlib", "no plain Python"),
    ("import math\n```", "import math\n", None, "a fence before this line"),
    ("import math", "", None, "an empty cell"),
    ("A small homework", "- ```{code-cell}\n  ```\n\nA", "- ```", "unindent it"),
    ("## What", "+++ {\"kvq\": {}}\n\n+++ {\"kvq\": {\"role\": \"given\"}}\n\n## What",
     "## What", "unknown role 'given': Markdown has text, explain"),
    ('"explain", "question": "q1"', '"explain", "question": "q2"', "Sixteen", "under"),
    ('"explain", "question": "q1"', '"explain"', "Sixteen", "question: must be"),
    ("role: answer, question: q2", "role: explain, question: q2", None, "code has"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "where", "said"), BROKEN)
def test_what_is_wrong_is_said_with_its_line(problems, old, new, where, said):
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    found = problems(text)
    fitting = [line for line, message in found if said in message]
    assert fitting, f"{said!r} is not among {found}"
    if where is not None:
        starts = [n for n, t in enumerate(text.splitlines(), 1) if t.startswith(where)]
        assert fitting[0] == starts[0], found


def without(role, question, text=TEXT):
    """The sample without the cells of a role of a question."""
    cell = r"```\{code-cell\} ipython3\n---\nkvq: \{role: %s, question: %s.*?\n```\n"
    return re.sub(cell % (role, question), "", text, flags=re.S)


@pytest.mark.parametrize("role", ["answer", "check", "hidden", "mutant"])
def test_a_question_has_all_that_a_question_needs(problems, role):
    found = problems(without(role, "q1"))
    line = TEXT.split("\n").index("## Question 1: bytes of a cache") + 1
    assert any(where == line and f"with role {role}" in said for where, said in found)


def test_a_check_comes_after_its_answer(problems):
    check = TEXT[TEXT.index("# @check q1") :].split("```")[0]
    fence = f"```{{code-cell}} ipython3\n---\n{CHECK_1}\n---\n"
    moved = without("check", "q1").replace(
        "<details>", f"{fence}{check}```\n\n<details>"
    )
    assert any("a check must come after" in said for _, said in problems(moved))


def test_methods_need_annotations_but_for_self(read, problems):
    start, end = TEXT.index("def cache_bytes"), TEXT.index("    ### END SOLUTION\n```")
    method = 'class A:\n    def f(self) -> int:\n        """One."""\n'
    block = "        ### BEGIN SOLUTION\n        return 1\n    "
    text = TEXT[:start] + method + block + TEXT[end:]
    assert read(text).questions
    found = problems(text.replace("(self) -> int", "(self, x) -> int"))
    assert [said for _, said in found] == ["f: annotate x"]


def test_all_problems_are_told_at_once_in_order(problems):
    text = TEXT.replace("minutes: 10", "minutes: x").replace("# @check q1", "# check")
    text = text.replace("points: 1}", "points: -1}")
    found = problems(text)
    assert len(found) == 3 and found == sorted(found)


def test_the_message_names_the_file(read, tmp_path):
    with pytest.raises(source.SourceError) as caught:
        read(TEXT.replace("minutes: 10", "minutes: x"))
    assert str(caught.value).startswith(f"{tmp_path / SAMPLE.name}:9: minutes: must be")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the front matter lacks"),
        ("# A title\n", 1, "the front matter lacks"),
        (TEXT.replace("minutes: 10", "minutes: [10"), 1, "metadata"),
        (TEXT.replace(ANSWER_1, "kvq: {role: [answer"), 33, "metadata"),
        ("---\n- a\n---\n\n# Title\n", 1, "metadata"),
    ],
)
def test_what_cannot_be_parsed_is_said(problems, text, line, said):
    assert any(where == line and said in message for where, message in problems(text))


ODD = ["[1]", "{a: 1}", "", "1.5", "-1", "true", "x", "[[q1]]"]
KEYS = ["role: answer", "question: q1", 'name: "a real model"', "points: 2"]
KEYS += ["rtol: 1e-9", "kvq: {role: check, question: q1}", "minutes: 10"]
KEYS += ["homework: hw99", "chapter: book/02_memory_bottleneck", "name: python3"]
KEYS += ["also: [q2]", "replaces: 1", "seed: 0"]


@pytest.mark.parametrize("key", KEYS)
def test_odd_values_are_problems_like_others(read, key):
    mutant = 'name: "values forgotten", also: [q2], replaces: 1'
    text = TEXT.replace('name: "values forgotten"', mutant)
    text = text.replace("points: 2}", "points: 2, seed: 0}")
    told = 0
    for odd in ODD:
        assert key in text
        try:
            read(text.replace(key, f"{key.split(':')[0]}: {odd}", 1))
        except source.SourceError:
            told += 1
    assert told >= 5


def test_files_that_cannot_be_read_are_said(tmp_path):
    path = tmp_path / "hw99_sample.md"
    with pytest.raises(source.SourceError, match="cannot be read"):
        source.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(source.SourceError, match="cannot be read"):
        source.read(path)


# -- blocks --------------------------------------------------------------------------


def stub(*lines):
    return blocks.stub("\n".join(lines), "q3").split("\n")


BEGIN, END = blocks.BEGIN, blocks.END


def test_the_first_block_of_a_function_raises_and_later_ones_vanish():
    found = stub(
        "def f(x):",
        f"    {BEGIN}",
        "    y = x",
        f"    {END}",
        "    z = 2",
        f"    {BEGIN}",
        "    return y + z",
        f"    {END}",
    )
    assert found == ["def f(x):", '    raise NotImplementedError("q3")', "    z = 2"]


def test_every_function_raises_for_itself():
    found = stub(
        "class A:",
        "    def f(self):",
        f"        {BEGIN}",
        "        return 1",
        f"        {END}",
        "",
        "    def g(self):",
        "        if self:",
        f"            {BEGIN}",
        "            return 2",
        f"            {END}",
        "        return 3",
    )
    raising = 'raise NotImplementedError("q3")'
    assert found == [
        "class A:",
        "    def f(self):",
        f"        {raising}",
        "",
        "    def g(self):",
        "        if self:",
        f"            {raising}",
        "        return 3",
    ]


def test_the_innermost_function_counts():
    found = stub(
        "def f(x):",
        "    def inner(y):",
        f"        {BEGIN}",
        "        return y",
        f"        {END}",
        f"    {BEGIN}",
        "    return inner(x)",
        f"    {END}",
    )
    assert found == [
        "def f(x):",
        "    def inner(y):",
        '        raise NotImplementedError("q3")',
        '    raise NotImplementedError("q3")',
    ]


@pytest.mark.parametrize(
    ("inside", "left"),
    [
        (["x = 1"], ["x = ..."]),
        (["a, b = 1, 2", "c = d = a"], ["a = ...", "b = ...", "c = ...", "d = ..."]),
        (["x: int = 1"], ["x: int = ..."]),
        (["x = 1", "print(x)"], []),
        (["x[0] = 1"], []),
        (["def f():", "    return 1"], []),
    ],
)
def test_nothing_raises_outside_of_functions(inside, left):
    found = stub("before = 0", BEGIN, *inside, END, "after = 1")
    assert found == ["before = 0", blocks.HERE, *left, "after = 1"]


def test_a_block_after_a_function_is_outside_of_it():
    found = stub("def f():", "    return 1", "", "", BEGIN, "f()", END)
    assert found[-1] == blocks.HERE


def test_a_stub_that_is_no_python_is_a_problem():
    text = f"for i in range(3):\n    {BEGIN}\n    print(i)\n    {END}"
    assert [said for _, said in blocks.problems(text, "q1") if "the stub would" in said]


def test_solutions_lose_the_marks_of_blocks_alone():
    assert blocks.solved(f"a = 1\n{BEGIN}\nb = 2\n{END}\n# c") == "a = 1\nb = 2\n# c"


# -- private probes ------------------------------------------------------------------

PRIVATE = """\
```{code-cell} ipython3
import math
```

```{code-cell} ipython3
---
kvq: {role: hidden, question: q2, name: "secret", points: 3}
---
[pages(n) for n in (77, 177, 277)]
```
"""


@pytest.fixture
def private(tmp_path):
    def call(text):
        path = tmp_path / "hw99.md"
        path.write_text(text, encoding="utf-8")
        return source.with_hidden(source.read(SAMPLE), path)

    return call


def test_private_probes_replace_all_of_their_question(private):
    homework, public = private(PRIVATE), source.read(SAMPLE)
    assert [p.name for p in homework.questions[1].probes] == ["secret"]
    assert homework.questions[0] == public.questions[0]
    assert homework.questions[1].mutants == public.questions[1].mutants
    assert dataclasses.replace(homework, questions=public.questions) == public


def test_private_mutants_are_added(private):
    mutant = TEXT[: TEXT.index('name: "rounds down"')].rindex("```{code-cell}")
    text = PRIVATE + TEXT[mutant : TEXT.index("```", mutant + 3) + 4]
    text = text.replace("rounds down", "private")
    names = [m.name for m in private(text).questions[1].mutants]
    assert names == ["rounds down", "always one page more", "private"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("points: 3", "points: 2", "q2 is worth 3 points in the exercise"),
        ("question: q2", "question: q7", "hw99 has no question q7"),
        ("points: 3", "points: 0", "points: must be a number above 0"),
        ("[pages", "[pages(1 ==", "no plain Python"),
        ("role: hidden", "role: hiden", "unknown role 'hiden'"),
    ],
)
def test_what_is_wrong_with_private_probes_is_said(private, old, new, said):
    with pytest.raises(source.SourceError) as caught:
        private(PRIVATE.replace(old, new))
    assert said in str(caught.value)
    assert all(p.path.name == "hw99.md" for p in caught.value.problems)
