"""What a question of the bank must be like; every broken rule is told.

`read_file` makes questions of one file, `together` looks at all of them. A broken rule
is one line of text that begins with the file, the line and the question's id.
"""

import decimal
import difflib
import re
import reprlib
from collections.abc import Iterator

from ...errors import InvalidArgument
from . import bank, loading, text, wording
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
_SHAPE = re.compile(r",?(?:\.\d)?[defg%]?")  # how a value may be shown
_UNIT = re.compile(r"|%|[A-Za-zµ]+(?: [A-Za-z]+)*(?:/[A-Za-z]+)?")


def _brief(value) -> str:
    """A value as a message shows it."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of too many digits"


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
        entries = loading.entries(content)
    except loading.Unreadable as error:
        return [], [f"{name}: {error}"]
    questions, problems = [], []
    for place, entry in enumerate(entries, start=1):
        who = f"question {place}"
        if isinstance(entry.value, dict) and isinstance(entry.value.get("id"), str):
            who = entry.value["id"][:60]
        reader = _Reader(found[1], around, entry)
        question = reader.question(f"{name}:{entry.line}")
        problems += [f"{name}:{line}: {who}: {said}" for line, said in reader.problems]
        if question and not reader.problems:
            questions.append(question)
    return questions, problems


class _Reader:
    """Makes a question of what YAML gave, and notes what is wrong with it."""

    def __init__(self, topic: str, around: bank.Surroundings, entry: loading.Entry):
        self.topic, self.around, self.entry = topic, around, entry
        self.line = entry.line
        self.problems: list[tuple[int, str]] = []

    def at(self, part: str) -> None:
        """What is read next; complaints name its line."""
        self.line = self.entry.lines.get(part, self.entry.line)

    def complain(self, problem: str) -> None:
        self.problems.append((self.line, problem))

    # -- parts

    def keys(self, what: str, entry, allowed: set[str], optional: set[str]) -> bool:
        """Whether an entry is a mapping; complains of keys that lack or are unknown."""
        if not isinstance(entry, dict):
            self.complain(f"{what} is no mapping")
            return False
        for key in sorted(set(entry) - allowed):
            self.complain(f"{what} has an unknown key {_brief(key)}")
        for key in sorted(allowed - optional - set(entry)):
            self.complain(f"{what} lacks {key!r}")
        return True

    def words(self, what: str, value, blanks: tuple[str, ...] = (), inline=False):
        """A text; `blanks` are what may stand in braces outside of formulas."""
        if not isinstance(value, str) or not value.strip():
            self.complain(f"{what} is no text: {_brief(value)}")
            return ""
        held = list(wording.faults(value, inline))
        for name in held:
            self.complain(f"{what} holds {name}; faces cannot show it")
        if len(value) > wording.LONGEST:
            return ""
        bare = text.CODE_OR_MATH.sub("", value)
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
            self.complain(f"{what} is no number: {_brief(value)}")
        elif not low <= value <= high:
            self.complain(f"{what} is between {low} and {high}, got {_brief(value)}")
        else:
            return value
        return low

    def computed(self, what: str, expression) -> float | None:
        if not isinstance(expression, str):
            if isinstance(expression, bool) or not isinstance(expression, int | float):
                self.complain(f"{what} is no expression: {_brief(expression)}")
                return None
            expression = _brief(expression)
        try:
            return evaluate(expression)
        except InvalidArgument as error:
            self.complain(f"{what}: {error}")
            return None

    # -- a question

    def question(self, place: str) -> Question | None:
        """The question that the entry makes, which stands at a place of the bank."""
        entry = self.entry.value
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if isinstance(entry, dict) and kind not in bank.KINDS:
            self.at("kind")
            self.complain(f"kind is one of {', '.join(bank.KINDS)}; got {_brief(kind)}")
            return None
        if not self.keys("it", entry, COMMON | OWN.get(kind, set()), {"sources"}):
            return None
        common = {"kind": kind, "topic": self.topic, "place": place}
        for key, read in (
            ("id", self.identity),
            ("level", self.level),
            ("tags", self.tags),
            ("section", self.section),
            ("question", lambda value: self.words("question", value)),
            ("sources", self.sources),
        ):
            self.at(key)
            common[key] = read(entry.get(key, [] if key == "sources" else None))
        works = self.around.works
        common["cited"] = tuple(works[k] for k in common["sources"] if k in works)
        own = {"single": self.choices, "multiple": self.choices}
        own |= {"numeric": self.numeric, "open": self.open}
        return Question(**common, **own[kind](entry))

    def level(self, value) -> str:
        if value not in bank.LEVELS:
            self.complain(f"level is one of {', '.join(bank.LEVELS)}")
        return str(value)

    def identity(self, value) -> str:
        good = isinstance(value, str) and _ID.fullmatch(value)
        if not good or not value.startswith(f"{self.topic}-"):
            self.complain(f"id is lower case words with hyphens, {self.topic}-…")
        return str(value)

    def tags(self, value) -> tuple[str, ...]:
        tags = self.some("tags", value, 1, 4)
        if unknown := [tag for tag in tags if tag not in TAGS]:
            shown = ", ".join(t if isinstance(t, str) else _brief(t) for t in unknown)
            self.complain(f"unknown tags {shown}; known: {', '.join(TAGS)}")
        if len(set(map(_brief, tags))) < len(tags):
            self.complain("a tag stands twice")
        return tuple(tag for tag in tags if isinstance(tag, str))

    def section(self, value) -> bank.Section | None:
        page, _, number = (value if isinstance(value, str) else "").partition("#")
        title = self.around.sections.get(page, {}).get(number)
        if title is None:
            self.complain(
                f"no section {_brief(value)}; write book/02_memory_bottleneck#2.2"
            )
            return None
        return bank.Section(page, number, title)

    def sources(self, value) -> tuple[str, ...]:
        keys = self.some("sources", value, 0, 4)
        for key in keys:
            if not isinstance(key, str) or key not in self.around.works:
                self.complain(f"book/references.bib has no {_brief(key)}")
        return tuple(key for key in keys if isinstance(key, str))

    # -- kinds

    def choices(self, entry) -> dict:
        choices, values = [], []
        self.at("choices")
        listed = self.some("choices", entry.get("choices"), 3, 5)
        for i, given in enumerate(listed, start=1):
            what = f"choice {i}"
            self.at(f"choices {i}")
            keys = {"text", "right", "why", "value"}
            if not self.keys(what, given, keys, {"right", "value"}):
                continue
            right = given.get("right", False)
            if not isinstance(right, bool):
                self.complain(f"{what}: right is true or false")
            words, value = self.choice_text(what, given)
            if value is not None and any(near(value, v, 1e-9) for v in values):
                self.complain(f"{what} has the value of another choice")
            values += [value] if value is not None else []
            why = self.words(f"{what}: why", given.get("why"), inline=True)
            choices.append(Choice(words, right is True, why))
        self.at("choices")
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
        words = self.words(f"{what}: text", given.get("text"), (_VALUE.pattern,), True)
        if wording.speaks_of_others(words):
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
        for shape in _VALUE.findall(words):
            if not _SHAPE.fullmatch(shape):
                self.complain(f"{what} shows its value in an odd shape, {shape[:20]!r}")
                return words, value
        try:
            return _VALUE.sub(lambda f: format(value, f[1] or ""), words), value
        except ValueError as error:
            self.complain(f"{what}: {error}")
            return words, value

    def numeric(self, entry) -> dict:
        self.at("tolerance")
        tolerance = self.number("tolerance", entry.get("tolerance"), 0, MOST_TOLERANCE)
        self.at("decimals")
        decimals = self.number("decimals", entry.get("decimals"), 0, 6, int)
        self.at("unit")
        unit = entry.get("unit")
        if not isinstance(unit, str) or len(unit) > 30 or not _UNIT.fullmatch(unit):
            self.complain(
                'unit is a text such as MiB or tokens/s, "" for a pure number'
            )
            unit = ""

        def show(value: float) -> str:
            return f"{_rounded(value, decimals):,.{decimals}f} {unit}".strip()

        self.at("why")
        why = self.words("why", entry.get("why"), (r"\{answer\}",))
        self.at("expression")
        answer = self.computed("expression", entry.get("expression"))
        found = {"unit": unit, "tolerance": tolerance}
        if answer is None:
            return found
        if not near(_rounded(answer, decimals), answer, tolerance):
            self.complain(f"what is shown, {show(answer)}, would be marked as wrong")
        mistakes = list(self.mistakes(entry, answer, tolerance, show))
        shown = show(answer)
        found |= {"answer": answer, "shown": shown, "mistakes": tuple(mistakes)}
        return found | {"why": why.replace("{answer}", shown)}

    def mistakes(self, entry, answer, tolerance, show) -> Iterator[Mistake]:
        seen: list[float] = []
        self.at("mistakes")
        listed = self.some("mistakes", entry.get("mistakes"), 1, 6)
        for i, given in enumerate(listed, start=1):
            what = f"mistake {i}"
            self.at(f"mistakes {i}")
            if not self.keys(what, given, {"expression", "why"}, set()):
                continue
            value = self.computed(what, given.get("expression"))
            why = self.words(f"{what}: why", given.get("why"), inline=True)
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
        self.at("rubric")
        listed = self.some("rubric", entry.get("rubric"), 3, 5)
        for i, given in enumerate(listed, start=1):
            what = f"line {i} of the rubric"
            self.at(f"rubric {i}")
            if self.keys(what, given, {"points", "text"}, set()):
                points = self.number(f"{what}: points", given.get("points"), 1, 5, int)
                words = self.words(what, given.get("text"), inline=True)
                if any(_same(words, line.text) for line in rubric):
                    self.complain(f"{what} is another line once more")
                rubric.append(Line(points, words))
        self.at("answer")
        model = self.words("answer", entry.get("answer"))
        sentences = len(re.findall(r"[.!?](?=\s|$)", model))
        if sentences > 10:
            self.complain(f"the model answer has {sentences} sentences, at most 10")
        return {"rubric": tuple(rubric), "model": model}


def _same(one: str, other: str) -> bool:
    return re.findall(r"\w+", one.lower()) == re.findall(r"\w+", other.lower())


def _rounded(value: float, decimals: int) -> float:
    """Halves are rounded up, as people do; Python alone rounds to the even one."""
    exact = decimal.Decimal(repr(value))
    to = decimal.Decimal(1).scaleb(-decimals)
    with decimal.localcontext(prec=400):
        return float(exact.quantize(to, decimal.ROUND_HALF_UP))


# -- all files -------------------------------------------------------------------------


def together(questions: list[Question]) -> list[str]:
    """What is wrong between questions: ids, and texts that are nearly equal."""
    problems, seen, listed = [], {}, []
    matcher = difflib.SequenceMatcher(autojunk=False)
    for question in questions:
        who = f"{question.place}: {question.id}"
        if other := seen.get(question.id):
            problems.append(f"{who}: {other.place} has the same id")
        seen.setdefault(question.id, question)
        words = re.findall(r"\w+", question.question.lower())
        matcher.set_seq2(words)
        for other, others in listed:
            matcher.set_seq1(others)
            quick = matcher.real_quick_ratio() > ALIKE and matcher.quick_ratio() > ALIKE
            if quick and other.id != question.id and matcher.ratio() > ALIKE:
                same = f"nearly the same question as {other.id}, {other.place}"
                problems.append(f"{who}: {same}")
        listed.append((question, words))
    return problems
