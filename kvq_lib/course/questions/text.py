"""What the bank's authors write, as each face needs it: HTML, Markdown or plain text.

A text is Markdown with formulas between dollar signs. HTML carries a formula as
`<span class="math">\\(…\\)</span>`, which MathJax finds on the site and in Anki.
"""

import functools
import html as escaping
import re

#: A code span, in which a dollar sign is a dollar sign, or a formula.
CODE_OR_MATH = re.compile(r"(`+)(?:(?!\1).)+?\1(?!`)|(?<!\\)\$([^$]+?)(?<!\\)\$", re.S)
_PLACE = "\ue000{}\ue001"
_PLACES = re.compile("\ue000(\\d+)\ue001")

#: Commands of formulas that have a sign; `plain` needs no more.
SIGNS = {
    **{"cdot": "·", "times": "×", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥"},
    **{"approx": "≈", "neq": "≠", "ne": "≠", "pm": "±", "sqrt": "√", "sum": "Σ"},
    **{"infty": "∞", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊", "rfloor": "⌋"},
    **{"Delta": "Δ", "delta": "δ", "alpha": "α", "beta": "β", "lambda": "λ"},
    **{"mu": "μ", "sigma": "σ", "theta": "θ", "epsilon": "ε", "pi": "π", "ell": "ℓ"},
    **{"bmod": "mod", "ldots": "…", "dots": "…", "to": "→", "in": "∈", "top": "ᵀ"},
    **{"log": "log", "exp": "exp", "max": "max", "min": "min", "left": "", "right": ""},
    **{"quad": " ", "propto": "∝", "mid": "|", "ll": "≪", "gg": "≫", "cos": "cos"},
}


@functools.cache
def _markdown():
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False})


def html(markdown: str) -> str:
    """Paragraphs, lists and formulas as HTML."""
    return _with_formulas(markdown, lambda text: _markdown().render(text).strip())


def line(markdown: str) -> str:
    """A text of one paragraph as HTML, without the paragraph around it."""
    return _with_formulas(markdown, lambda text: _markdown().renderInline(text.strip()))


def _with_formulas(markdown: str, render) -> str:
    """Render all but the formulas, whose signs Markdown would take for its own."""
    formulas: list[str] = []

    def keep(found: re.Match) -> str:
        if found[2] is None:
            return found[0]
        formulas.append(f'<span class="math">\\({escaping.escape(found[2])}\\)</span>')
        return _PLACE.format(len(formulas) - 1)

    rendered = render(CODE_OR_MATH.sub(keep, markdown))
    return _PLACES.sub(lambda place: formulas[int(place[1])], rendered)


def plain(markdown: str) -> str:
    """What a terminal shows: without marks, formulas as signs and letters."""

    def show(found: re.Match) -> str:
        return found[0].strip("`") if found[2] is None else formula(found[2])

    pieces, end = [], 0
    for found in CODE_OR_MATH.finditer(markdown):
        pieces += [_unmarked(markdown[end : found.start()]), show(found)]
        end = found.end()
    return "".join([*pieces, _unmarked(markdown[end:])]).strip()


def _unmarked(markdown: str) -> str:
    """Without stars and underlines of emphasis, and without escapes."""
    markdown = re.sub(r"(\*{1,2})(?=\S)(.+?)(?<=\S)\1", r"\2", markdown, flags=re.S)
    return re.sub(r"\\([\\$*_`\[\]])", r"\1", markdown)


def formula(tex: str) -> str:
    """A short formula in one line of text."""
    tex = re.sub(
        r"\\(?:text|mathrm|operatorname|mathbf|mathit)\{([^{}]*)\}", r"\1", tex
    )
    tex = re.sub(r"\\[td]?frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", tex)
    tex = re.sub(r"\\(?:hat|tilde|bar)\{([^{}]*)\}", r"\1", tex)
    tex = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", tex)
    tex = re.sub(r"\\([A-Za-z]+)", lambda found: SIGNS.get(found[1], found[1]), tex)
    tex = re.sub(r"\\[,;: ]", " ", tex.replace(r"\!", "").replace(r"\%", "%"))
    tex = re.sub(r"([_^])\{(\w+)\}", r"\1\2", tex)
    return re.sub(r"\s+", " ", tex.replace("{,}", ",")).strip()
