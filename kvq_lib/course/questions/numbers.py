"""Reading a number and its unit as people type them; `marking.js` reads the same way.

What both must know, units and words, is in `TABLE`, which `script` hands to browsers.
Whatever could mean two things is refused with a reason: a comma as a decimal point, k
and M, a small b.
"""

import json
import math
import re
from pathlib import Path

LONGEST = 60  # characters that are read as a number

_TIME = {
    1e-9: "ns nanosecond nanoseconds",
    1e-6: "µs μs us microsecond microseconds",
    1e-3: "ms msec millisecond milliseconds",
    1.0: "s sec secs second seconds",
    60.0: "min mins minute minutes",
    3600.0: "h hr hrs hour hours",
}
_BYTES = {
    1 / 8: "bit bits",
    1.0: "B byte bytes",
    1e3: "kB KB kilobyte kilobytes",
    1e6: "MB megabyte megabytes",
    1e9: "GB gigabyte gigabytes",
    1e12: "TB terabyte terabytes",
    1e3 / 8: "kbit Kbit kilobit kilobits",
    1e6 / 8: "Mbit megabit megabits",
    1e9 / 8: "Gbit gigabit gigabits",
    2.0**10: "KiB kib kibibyte kibibytes",
    2.0**20: "MiB mib mebibyte mebibytes",
    2.0**30: "GiB gib gibibyte gibibytes",
    2.0**40: "TiB tib tebibyte tebibytes",
}
TABLE = {
    #: Kinds of units and the size of each unit; one of a row is converted to another.
    "units": [
        {name: size for size, names in kind.items() for name in names.split()}
        for kind in (_TIME, _BYTES)
    ],
    #: What may stand behind a pure number and leave it as it is.
    "counts": (
        "x × times fold -fold tokens pages blocks slots sequences requests users "
        "layers heads channels codes levels steps numbers values"
    ).split(),
    "percent": ["%", "percent", "per cent"],
    "reasons": {
        "long": "That is too long for a number.",
        "none": "That is no number; 1,024 is one, and 1.5e3.",
        "comma": "That is no number: write 1.5 with a point. "
        "A comma stands between groups of three digits.",
        "large": "That is no number: it is too large or too small.",
        "zero": "That is no number: nothing is divided by 0.",
        "factor": "That is no number: write it out, for 4k is 4,000 to some and 4,096 "
        "to others.",
        "bits": "That is no number: a small b may be bits or bytes. Write GB or Gbit.",
        "pure": "That is no number: there is no unit here.",
        "unit": "That is no number: the unit here is ",
    },
}

# Spaces are listed, since Python and JavaScript have ideas of their own about them.
_SPACE = r"[ \t\n\r\f\v\u00a0\u2009\u202f]"
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?)SPACE*"
    r"(?P<whole>[1-9][0-9]{0,2}(?P<mark>[,_' \u00a0\u2009\u202f])[0-9]{3}"
    r"(?:(?P=mark)[0-9]{3})*(?![0-9])|[0-9]+)?"
    r"(?P<part>\.[0-9]+|\.)?"
    r"(?:[eE](?P<e>[-+−]?[0-9]+)"
    r"|SPACE*[×x*·]SPACE*10SPACE*\^?SPACE*(?P<ten>[-+−]?[0-9]+))?"
    r"(?P<over>SPACE*/SPACE*[0-9]+(?:\.[0-9]+)?)?".replace("SPACE", _SPACE)
)
_ENDS = re.compile(f"^{_SPACE}+|{_SPACE}+\\Z")
_AROUND = re.compile(f"^(?:[~≈=]|[Aa]bout|[Aa]pprox\\.?)?{_SPACE}*")
_EACH_SECOND = re.compile(r"/(?:s|sec|second)\Z| (?:per|a) second\Z")
_EACH_NUMBER = re.compile(r"(?:/| per | a | an )(?:number|element|value)\Z")


def script() -> str:
    """The same rule for browsers, with its table."""
    rule = (Path(__file__).parent / "marking.js").read_text(encoding="utf-8")
    return f"const KVQ_TABLE = {json.dumps(TABLE, ensure_ascii=False)};\n{rule}"


def asked_in(unit: str) -> str:
    """How a question for a number goes on: ", in MiB", " of tokens" or nothing."""
    measured = any(unit in row for row in TABLE["units"]) or "/" in unit
    if unit == "%":
        return ", in percent"
    return unit and (f", in {unit}" if measured else f" of {unit}")


def read_number(typed: str, unit: str = "") -> float | None:
    """The number that somebody typed, in `unit`, or None if there is none.

    Commas, spaces, underscores and apostrophes between groups of three digits are
    taken, "1e3", "1.5 × 10^3" and "3/4". Behind the number may stand nothing, the unit
    or another one of its kind, which is converted: GiB where MiB are asked for.
    """
    found = _read(typed, unit)
    return found if isinstance(found, float) else None


def why_not(typed: str, unit: str = "") -> str:
    """Why `read_number` refuses a text, as a sentence; "" if it does not."""
    found = _read(typed, unit)
    return found if isinstance(found, str) else ""


def _read(typed: str, unit: str) -> float | str:
    """A number, or the reason why there is none."""
    reasons = TABLE["reasons"]
    # Browsers count so, too.
    if len(typed.encode("utf-16-le", "surrogatepass")) > 2 * LONGEST:
        return reasons["long"]
    text = _AROUND.sub("", _ENDS.sub("", typed))
    found = _NUMBER.match(text)
    if not (found["whole"] or (found["part"] or ".") != "."):
        return reasons["none"]
    behind = text[found.end() :]
    if re.match(r",[0-9]", behind):
        return reasons["comma"]
    digits = re.sub(r"[^0-9]", "", found["whole"] or "0") + (found["part"] or "")
    power = (found["e"] or found["ten"] or "0").replace("−", "-")
    # Refused, not infinite: no quantity of this book has a thousand digits.
    if abs(int(power)) > 300 or len(digits) > 40:
        return reasons["large"]
    value = float(f"{digits}e{power}") * (-1 if found["sign"] in ("-", "−") else 1)
    if found["over"]:
        below = float(re.sub(f"/|{_SPACE}", "", found["over"]))
        if below == 0:
            return reasons["zero"]
        value /= below
    size = _size(re.sub(f"{_SPACE}+", " ", behind).strip(" "), unit)
    if isinstance(size, str):
        return reasons["none"] if re.search(r"[0-9]", behind) else size
    value *= size
    return value if math.isfinite(value) else reasons["large"]


def _size(behind: str, unit: str) -> float | str:
    """What one of the unit behind a number is in the unit asked for, or a reason."""
    lower = behind.lower()
    if behind in ("", unit):
        return 1.0
    if lower in TABLE["percent"] and unit in ("", "%"):
        return 0.01 if unit == "" else 1.0
    if unit == "bits":
        behind = _EACH_NUMBER.sub("", behind)
    given, asked = behind, unit
    if _EACH_SECOND.search(behind) and _EACH_SECOND.search(unit):
        given, asked = _EACH_SECOND.sub("", behind), _EACH_SECOND.sub("", unit)
    for row in TABLE["units"]:
        # Symbols as they are, words in any case: mb and MB are not the same.
        name = given if given in row or len(given) < 4 else given.lower()
        if name in row and asked in row:
            return row[name] / row[asked]
    if re.fullmatch(r"[kKmMgGtT]?i?b(?:/s)?", behind):
        return TABLE["reasons"]["bits"]
    if re.match(r"[kKMGT](?: |\Z)", behind):
        return TABLE["reasons"]["factor"]
    words = TABLE["counts"] if asked == "" else [asked, asked.split(" ")[-1]]
    if asked == "times":
        words = TABLE["counts"][:5]
    if _one(given) in map(_one, words):
        return 1.0
    return TABLE["reasons"]["unit"] + f"{unit}." if unit else TABLE["reasons"]["pure"]


def _one(word: str) -> str:
    """A word in small letters and without the ending of the plural."""
    return re.sub(r"s\Z", "", word.lower())
