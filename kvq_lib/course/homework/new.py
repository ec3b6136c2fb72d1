"""A first source for a new homework, which builds and verifies as it is.

It teaches the format by example: one question with everything that a question has.
"""

import re
from pathlib import Path

from ...errors import InvalidArgument
from .build import SOURCES

TEMPLATE = '''\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
kvq:
  homework: {id}
  chapter: {chapter}
  minutes: 60
  torch: false # true once a cell imports torch: grading then takes seconds longer
---

# {title}

Say in one or two sentences what this homework trains.
It goes with [chapter {number}](../{chapter}.ipynb).

The builder writes the points, the minutes and how to check oneself below this text.

```{{code-cell}} ipython3
import math
```

## Question 1: the mean of squares

Begin with the equation or a picture, then say what to do.
For numbers $x_1, \\ldots, x_n$ compute

$$
m = \\frac{{1}}{{n}} \\sum_{{i=1}}^{{n}} x_i^2 .
$$

A stub replaces what lies between BEGIN and END.
So keep the signature and the docstring, with shapes and units, above it.

<details><summary>Hint</summary>

Every question has a hint behind a fold.
`math.fsum` adds without losing digits.

</details>

```{{code-cell}} ipython3
---
kvq: {{role: answer, question: q1}}
---
# @answer q1
def mean_square(numbers: list[float]) -> float:
    """The mean of the squares of `numbers`, which are not empty."""
    ### BEGIN SOLUTION
    return math.fsum(x * x for x in numbers) / len(numbers)
    ### END SOLUTION
```

+++ {{"kvq": {{"role": "explain", "question": "q1"}}}}

Text with the role *explain* is in the solution alone.
Say why the solution is as it is, and which mistakes are near.

```{{code-cell}} ipython3
---
kvq: {{role: check, question: q1}}
---
# @check q1
assert mean_square([3.0]) == 9.0, "the square of 3 is 9: is a root taken?"
assert mean_square([1.0, 2.0]) == 2.5, "divide by how many numbers there are"
print("q1: the check passes.")
```

```{{code-cell}} ipython3
---
kvq: {{role: hidden, question: q1, name: "a few numbers", points: 2}}
---
# A probe: statements, then an expression of plain data that the grader compares with
# what your solution gives. No bool: it would be easy to guess.
inputs = [[0.5, -1.25, 3.0], [-7.125]]
[mean_square(numbers) for numbers in inputs]
```

```{{code-cell}} ipython3
---
kvq: {{role: hidden, question: q1, name: "many numbers", points: 1, rtol: 1e-9}}
---
mean_square([math.sin(i) for i in range(1000)])
```

```{{code-cell}} ipython3
---
kvq: {{role: mutant, question: q1, name: "no square of negative numbers"}}
---
# @answer q1
def mean_square(numbers: list[float]) -> float:
    # A mutant: what a student might hand in. It must lose points, not crash.
    return math.fsum(x * abs(x) for x in numbers) / len(numbers)
```

```{{code-cell}} ipython3
---
kvq: {{role: mutant, question: q1, name: "root of the mean"}}
---
# @answer q1
def mean_square(numbers: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in numbers) / len(numbers))
```
'''


def new(root: Path, homework: str, topic: str, chapter: str) -> Path:
    """Write a template; its path.

    Args:
        root: of the repository.
        homework: "hw11".
        topic: a few words; they become the title and the file's name.
        chapter: of the book: "book/11_interview", with or without an ending.

    Raises:
        InvalidArgument: a name that is taken or malformed, or no such chapter.
    """
    if not re.fullmatch(r"hw\d\d", homework):
        raise InvalidArgument(f'a homework is named like "hw11", got {homework!r}')
    words = re.findall(r"[a-z0-9]+", topic.lower())
    if not words:
        raise InvalidArgument(f"--topic needs a few words, got {topic!r}")
    if taken := sorted((root / SOURCES).glob(f"{homework}_*.md")):
        raise InvalidArgument(f"{homework} is there: {taken[0]}")
    chapter = chapter.removesuffix(".ipynb").removesuffix(".md")
    page = root / chapter
    if not re.fullmatch(r"book/\w+", chapter) or not (
        page.with_name(f"{page.name}.ipynb").exists()
        or page.with_name(f"{page.name}.md").exists()
    ):
        raise InvalidArgument(f"no chapter {chapter!r}: name one like book/02_words")
    number = re.match(r"book/0*(\w+?)_", chapter)
    path = root / SOURCES / f"{homework}_{'_'.join(words)}.md"
    text = TEMPLATE.format(
        id=homework,
        chapter=chapter,
        number=number[1] if number else "of the book",
        title=f"Homework {int(homework[2:])}: {topic.strip()}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
