"""Plain data against the expected plain data, in the grader's own process.

Numbers agree when |got - expected| <= atol + rtol * |expected|.  An int and a float may
agree; a bool agrees with nothing but itself; NaN agrees with NaN, an infinity with
itself.  Lists must have the same length, dictionaries the same keys.
"""

import math


def same(got, expected, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether `got` is what was expected.

    Args:
        got, expected: None, bool, int, float, str, lists and dictionaries of them.
    """
    pairs = [(got, expected)]
    while pairs:  # no recursion: `got` may be nested as deeply as it likes
        a, b = pairs.pop()
        if isinstance(b, list):
            if not isinstance(a, list) or len(a) != len(b):
                return False
            pairs.extend(zip(a, b, strict=True))
        elif isinstance(b, dict):
            if not isinstance(a, dict) or a.keys() != b.keys():
                return False
            pairs.extend((a[key], b[key]) for key in b)
        elif _number(b):
            if not _number(a) or not _near(a, b, rtol, atol):
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


def _number(value) -> bool:
    return type(value) in (int, float)


def _near(got, expected, rtol: float, atol: float) -> bool:
    if got == expected:
        return True
    try:
        a, b = float(got), float(expected)
    except OverflowError:  # an int larger than any float
        return False
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if not (rtol or atol) or math.isinf(a) or math.isinf(b):
        return False  # not equal, also beyond the digits of a float
    return abs(a - b) <= atol + rtol * abs(b)
