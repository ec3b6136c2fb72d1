"""What a question of the bank must be like; every broken rule is told.

`read_file` makes questions of one file, `together` looks at all of them. A broken rule
is one line of text that begins with the file and the question's id.
"""

import difflib
import re
from collections.abc import Iterator

import yaml

from ...errors import InvalidArgument
from . import bank, text
from .bank import Choice, Line, Mistake, Question
from .expressions import evaluate
from .marking import near

#: The tags, so that one thing has one name. `ten` marks the lesson's ten questions.
TAGS = tuple(
    """art attention bandwidth bits bytes calibration code concurrency debugging design
    engines evaluation feedback formats fp8 fragmentation gpu gqa granularity hot-pages
    int2 int4 int8 kernel keys kivi latency long-context memory mixed outliers packing
    paging perplexity planning prefix prefill quality quantization reading rollout
    roofline rotation rounding scales scheduling size softmax speed statistics
    swap symmetry ten throughput units values weights window zero-point""".split()
)
ALIKE = 0.9  # of the words of two questions, from where on they are nearly equal
MOST_TOLERANCE = 0.2
COMMON = {"id", "kind", "level", "tags", "section", "question", "sources"}
OWN = {
    "single": {"choices"},
    "multiple": {"choices"},
    "numeric": {"expression", "unit", "tolerance", "decimals", "why", "mistakes"},
    "open": {"rubric", "answer"},
}
_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
_VALUE = re.compile(r"\{value(?::([^{}]*))?\}")
_AMOUNT = re.compile(r"\d\s*(?:[KMGT]iB)\b")
_ALL_OF = re.compile(
    r"\bof the above\b|^(?:all|none|both|neither|any) of (?:these|them)\b\W*$", re.I
)
#: What no text may hold, and what it may hold only inside code and formulas.
_NOWHERE = {
    "a code fence": re.compile(r"^\s*(?:```|~~~)", re.M),
    "a role of the site": re.compile(r"\{[a-z:-]+\}`"),
}
_FORBIDDEN = {
    "HTML": re.compile(r"</?[A-Za-z][^>]*>|<!--"),
    "a link or an image": re.compile(r"\]\("),
    "a heading": re.compile(r"^#+ ", re.M),
}


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice; YAML alone would take the last."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str) or keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is no text, or stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


# -- a file ----------------------------------------------------------------------------


def read_file(
    name: str, content: bytes, around: bank.Surroundings
) -> tuple[list[Question], list[str]]:
    """The good questions of a file, and what is wrong with the others.

    Args:
        name: of the file; its topic is what stands between number and ending.
        content: its bytes.
        around: what the questions refer to.
    """
    found = re.fullmatch(r"\d\d_([a-z]+)\.yml", name)
    if not found or found[1] not in bank.TOPICS:
        known = ", ".join(bank.TOPICS)
        return [], [f"{name}: a file is called NN_topic.yml, with a topic of {known}"]
    try:
        entries = yaml.load(content.decode("utf-8"), _Strict)  # a kind of SafeLoader
    except UnicodeDecodeError as error:
        return [], [f"{name}: not in UTF-8: {error}"]
    except yaml.YAMLError as error:
        return [], [f"{name}: {' '.join(str(error).split())}"]
    if not isinstance(entries, list) or not entries:
        return [], [f"{name}: a file is a list of questions"]
    questions, problems = [], []
    for place, entry in enumerate(entries, start=1):
        who = f"question {place}"
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            who = entry["id"]
        reader = _Reader(found[1], around)
        question = reader.question(entry)
        problems += [f"{name}: {who}: {problem}" for problem in reader.problems]
        if question and not reader.problems:
            questions.append(question)
    return questions, problems


class _Reader:
    """Makes a question of what YAML gave, and notes what is wrong with it."""

    def __init__(self, topic: str, around: bank.Surroundings):
        self.topic, self.around = topic, around
        self.problems: list[str] = []

    def complain(self, problem: str) -> None:
        self.problems.append(problem)

    # -- parts

    def keys(self, what: str, entry, allowed: set[str], optional: set[str]) -> bool:
        """Whether an entry is a mapping; complains of keys that lack or are unknown."""
        if not isinstance(entry, dict):
            self.complain(f"{what} is no mapping")
            return False
        for key in sorted(set(entry) - allowed):
            self.complain(f"{what} has an unknown key {key!r}")
        for key in sorted(allowed - optional - set(entry)):
            self.complain(f"{what} lacks {key!r}")
        return True

    def words(self, what: str, value, blanks: tuple[str, ...] = ()) -> str:
        """A text; `blanks` are what may stand in braces outside of formulas."""
        if not isinstance(value, str) or not value.strip():
            self.complain(f"{what} is no text: {value!r}")
            return ""
        bare = text.CODE_OR_MATH.sub("", value)
        held = [name for name, sign in _NOWHERE.items() if sign.search(value)]
        held += [name for name, sign in _FORBIDDEN.items() if sign.search(bare)]
        for name in held:
            self.complain(f"{what} holds {name}; faces cannot show it")
        if re.search(r"(?<!\\)\$", bare):
            self.complain(f"{what} has a dollar sign without a partner")
        for blank in blanks:
            bare = re.sub(blank, "", bare)
        if odd := re.search(r"\{[^}]*\}?", bare):
            self.complain(f"{what} has braces that nothing fills: {odd[0]}")
        return value.strip()

    def some(self, what: str, value, least: int, most: int) -> list:
        """A list of a length within bounds, otherwise an empty one."""
        if isinstance(value, list) and least <= len(value) <= most:
            return value
        self.complain(f"{what} is a list of {least} to {most}")
        return []

    def number(self, what: str, value, low: float, high: float, kind=(int, float)):
        if isinstance(value, bool) or not isinstance(value, kind):
            self.complain(f"{what} is no number: {value!r}")
        elif not low <= value <= high:
            self.complain(f"{what} is between {low} and {high}, got {value}")
        else:
            return value
        return low

    def computed(self, what: str, expression) -> float | None:
        try:
            return evaluate(str(expression))
        except InvalidArgument as error:
            self.complain(f"{what}: {error}")
            return None

    # -- a question

    def question(self, entry) -> Question | None:
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if isinstance(entry, dict) and kind not in bank.KINDS:
            self.complain(f"kind is one of {', '.join(bank.KINDS)}; got {kind!r}")
            return None
        if not self.keys("it", entry, COMMON | OWN.get(kind, set()), {"sources"}):
            return None
        common = {
            "id": self.identity(entry.get("id")),
            "kind": kind,
            "level": entry.get("level"),
            "topic": self.topic,
            "tags": self.tags(entry.get("tags")),
            "section": self.section(entry.get("section")),
            "question": self.words("question", entry.get("question")),
            "sources": self.sources(entry.get("sources", [])),
        }
        works = self.around.works
        common["cited"] = tuple(works[k] for k in common["sources"] if k in works)
        if common["level"] not in bank.LEVELS:
            self.complain(f"level is one of {', '.join(bank.LEVELS)}")
        own = {"single": self.choices, "multiple": self.choices}
        own |= {"numeric": self.numeric, "open": self.open}
        return Question(**common, **own[kind](entry))

    def identity(self, value) -> str:
        good = isinstance(value, str) and _ID.fullmatch(value)
        if not good or not value.startswith(f"{self.topic}-"):
            self.complain(f"id is lower case words with hyphens, {self.topic}-…")
        return str(value)

    def tags(self, value) -> tuple[str, ...]:
        tags = self.some("tags", value, 1, 4)
        if unknown := [tag for tag in tags if tag not in TAGS]:
            shown = ", ".join(map(str, unknown))
            self.complain(f"unknown tags {shown}; known: {', '.join(TAGS)}")
        if len({str(tag) for tag in tags}) < len(tags):
            self.complain("a tag stands twice")
        return tuple(map(str, tags))

    def section(self, value) -> bank.Section | None:
        page, _, number = str(value).partition("#")
        title = self.around.sections.get(page, {}).get(number)
        if title is None:
            self.complain(f"no section {value!r}; write book/02_memory_bottleneck#2.2")
            return None
        return bank.Section(page, number, title)

    def sources(self, value) -> tuple[str, ...]:
        keys = self.some("sources", value, 0, 4)
        for key in keys:
            if key not in self.around.works:
                self.complain(f"book/references.bib has no {key!r}")
        return tuple(map(str, keys))

    # -- kinds

    def choices(self, entry) -> dict:
        choices, values = [], []
        listed = self.some("choices", entry.get("choices"), 3, 5)
        for i, given in enumerate(listed, start=1):
            what = f"choice {i}"
            keys = {"text", "right", "why", "value"}
            if not self.keys(what, given, keys, {"right", "value"}):
                continue
            right = given.get("right", False)
            if not isinstance(right, bool):
                self.complain(f"{what}: right is true or false")
            words, value = self.choice_text(what, given)
            values.append(value)
            why = self.words(f"{what}: why", given.get("why"))
            choices.append(Choice(words, right is True, why))
        rights = sum(choice.right for choice in choices)
        if entry["kind"] == "single" and choices and rights != 1:
            self.complain(f"exactly one choice is right, not {rights}")
        if entry["kind"] == "multiple" and choices and not 0 < rights < len(choices):
            self.complain("some choices are right, but not all")
        for known in ("text", "why"):
            said = [" ".join(getattr(c, known).lower().split()) for c in choices]
            if len(set(said)) < len(said):
                self.complain(f"two choices have the same {known}")
        return {"choices": tuple(choices)}

    def choice_text(self, what: str, given: dict) -> tuple[str, float | None]:
        """The text of a choice with its number filled in, and the number."""
        words = self.words(f"{what}: text", given.get("text"), (_VALUE.pattern,))
        if _ALL_OF.search(words):
            self.complain(f"{what} speaks of the other choices")
        if "value" not in given:
            if _VALUE.search(words):
                self.complain(f"{what} shows a value that it does not have")
            if _AMOUNT.search(words):
                self.complain(f"{what} states bytes: give it a value, computed")
            return words, None
        value = self.computed(f"{what}: value", given["value"])
        if not _VALUE.search(words):
            self.complain(f"{what} has a value that its text does not show: {{value}}")
        if value is None:
            return words, None
        try:
            return _VALUE.sub(lambda f: format(value, f[1] or ""), words), value
        except ValueError as error:
            self.complain(f"{what}: {error}")
            return words, value

    def numeric(self, entry) -> dict:
        answer = self.computed("expression", entry.get("expression"))
        tolerance = self.number("tolerance", entry.get("tolerance"), 0, MOST_TOLERANCE)
        decimals = self.number("decimals", entry.get("decimals"), 0, 6, int)
        unit = entry.get("unit")
        if not isinstance(unit, str):
            self.complain('unit is a text, "" for a pure number')
            unit = ""

        def show(value: float) -> str:
            return f"{value:,.{decimals}f} {unit}".strip()

        why = self.words("why", entry.get("why"), (r"\{answer\}",))
        found = {"unit": unit, "tolerance": tolerance}
        if answer is None:
            return found
        if not near(round(answer, decimals), answer, tolerance):
            self.complain(f"what is shown, {show(answer)}, would be marked as wrong")
        mistakes = list(self.mistakes(entry, answer, tolerance, show))
        shown = show(answer)
        found |= {"answer": answer, "shown": shown, "mistakes": tuple(mistakes)}
        return found | {"why": why.replace("{answer}", shown)}

    def mistakes(self, entry, answer, tolerance, show) -> Iterator[Mistake]:
        seen: list[float] = []
        listed = self.some("mistakes", entry.get("mistakes"), 1, 6)
        for i, given in enumerate(listed, start=1):
            what = f"mistake {i}"
            if not self.keys(what, given, {"expression", "why"}, set()):
                continue
            value = self.computed(what, given.get("expression"))
            why = self.words(f"{what}: why", given.get("why"))
            if value is None:
                continue
            if near(value, answer, tolerance):
                self.complain(f"{what}, {show(value)}, would be marked as right")
            if any(near(value, other, tolerance) for other in seen):
                self.complain(f"{what}, {show(value)}, is one of the others")
            seen.append(value)
            yield Mistake(value, show(value), why)

    def open(self, entry) -> dict:
        rubric = []
        listed = self.some("rubric", entry.get("rubric"), 3, 5)
        for i, given in enumerate(listed, start=1):
            what = f"line {i} of the rubric"
            if self.keys(what, given, {"points", "text"}, set()):
                points = self.number(f"{what}: points", given.get("points"), 1, 5, int)
                rubric.append(Line(points, self.words(what, given.get("text"))))
        model = self.words("answer", entry.get("answer"))
        sentences = len(re.findall(r"[.!?](?=\s|$)", model))
        if sentences > 10:
            self.complain(f"the model answer has {sentences} sentences, at most 10")
        return {"rubric": tuple(rubric), "model": model}


# -- all files -------------------------------------------------------------------------


def together(questions: list[Question]) -> list[str]:
    """What is wrong between questions: ids, and texts that are nearly equal."""
    problems, seen = [], {}
    for question in questions:
        if question.id in seen:
            problems.append(f"{question.id}: two questions have this id")
        seen[question.id] = re.findall(r"\w+", question.question.lower())
    listed = list(seen.items())
    for i, (one, words) in enumerate(listed):
        matcher = difflib.SequenceMatcher(autojunk=False)
        matcher.set_seq2(words)
        for other, others in listed[:i]:
            matcher.set_seq1(others)
            quick = matcher.real_quick_ratio() > ALIKE and matcher.quick_ratio() > ALIKE
            if quick and matcher.ratio() > ALIKE:
                problems.append(f"{one}: nearly the same question as {other}")
    return problems
