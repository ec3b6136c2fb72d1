"""Numbers in the bank are computed: a small part of Python, evaluated by hand.

    evaluate('kv_bytes(KVShape(32, 8, 128), "int8", 4096) / 2**20')

Names, calls, numbers, texts, arithmetic and comparisons, and the fields of a `KVShape`;
nothing else, so an expression can neither load, write nor loop.
"""

import ast
import functools
import math
import operator
from collections.abc import Callable

from ...errors import InvalidArgument, KVQError

#: The names of the library that an expression may use.
LIBRARY = ("KVShape", "MEMORY_GB", "kv_bytes", "max_batch", "scheme")
FUNCTIONS: dict[str, Callable] = {
    "abs": abs,
    "ceil": math.ceil,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
}
LONGEST = 400  # characters
LARGEST_POWER = 128
LARGEST = 1e300
LARGEST_ARGUMENT = 1e100  # of a function

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@functools.cache
def names() -> dict:
    """What the names of an expression stand for."""
    import kvq_lib as kvq

    return {name: getattr(kvq, name) for name in LIBRARY} | FUNCTIONS


@functools.cache
def evaluate(expression: str) -> float:
    """The finite number that an expression gives; whole ones stay integers.

    Raises:
        InvalidArgument: it is not Python, uses what is not allowed, fails, or gives no
            finite number.
    """
    if len(expression) > LONGEST:
        raise InvalidArgument(f"an expression has at most {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        found = _value(tree.body)
    except SyntaxError as error:
        raise InvalidArgument(f"{expression!r} is no expression: {error.msg}") from None
    except KVQError as error:
        raise InvalidArgument(f"{expression!r}: {error}") from None
    except (RecursionError, MemoryError):
        raise InvalidArgument(f"{expression!r} is nested too deep") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{expression!r} fails: {error!r}") from None
    number = isinstance(found, int | float) and not isinstance(found, bool)
    # A comparison alone is no answer to a question that asks for a number.
    if not number:
        raise InvalidArgument(f"{expression!r} gives {found!r}, no finite number")
    if not abs(found) < LARGEST:  # written out it may have thousands of digits
        raise InvalidArgument(
            f"{expression!r} gives no finite number, or too large a one"
        )
    return found


def _value(node: ast.expr):
    """The value of a node; refuses every kind that is not listed."""
    match node:
        case ast.Constant(value=int() | float() | str() as value) if not isinstance(
            value, bool
        ):
            return value
        case ast.Name(id=name) if name in names():
            return names()[name]
        case ast.Name(id=name):
            raise InvalidArgument(f"unknown name {name!r}; known: {', '.join(names())}")
        case ast.UnaryOp(op=op) if type(op) in _UNARY:
            return _UNARY[type(op)](_number(node.operand))
        case ast.BinOp(op=op) if type(op) in _BINARY:
            left, right = _number(node.left), _number(node.right)
            if isinstance(op, ast.Pow) and abs(right) > LARGEST_POWER:
                raise InvalidArgument(f"a power of at most {LARGEST_POWER}, please")
            return _BINARY[type(op)](left, right)
        case ast.Compare():
            values = [_number(side) for side in (node.left, *node.comparators)]
            unknown = {type(op) for op in node.ops} - set(_COMPARE)
            if unknown:
                raise InvalidArgument("a comparison is one of == != < <= > >=")
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
        case ast.Call(func=ast.Name(id=name)) if name in names():
            return _call(name, node)
        case ast.Attribute():
            return _field(node)
        case ast.Subscript(value=ast.Name(id="MEMORY_GB")):
            return names()["MEMORY_GB"][_value(node.slice)]
    raise InvalidArgument(
        f"{ast.unparse(node)!r} is not allowed; names, calls, numbers, texts, "
        "arithmetic and comparisons are"
    )


def _number(node: ast.expr):
    """The value of an operand: text has no arithmetic here."""
    found = _value(node)
    if not isinstance(found, int | float):
        raise InvalidArgument(f"{ast.unparse(node)!r} is no number")
    if isinstance(found, int) and found.bit_length() > 1024:
        raise InvalidArgument(f"{ast.unparse(node)!r} is too large")
    return found


def _call(name: str, node: ast.Call):
    if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
        keyword.arg is None for keyword in node.keywords
    ):
        raise InvalidArgument("arguments are written out, without * and **")
    if not callable(names()[name]):
        raise InvalidArgument(f"{name} is no function")
    keywords = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    values = [_value(argument) for argument in node.args]
    for value in (*values, *keywords.values()):
        if isinstance(value, int | float) and not abs(value) < LARGEST_ARGUMENT:
            raise InvalidArgument(f"{name} of too large a number")
    places = [*values[1:], *keywords.values()]
    if name == "round" and any(abs(value) > 20 for value in places):
        raise InvalidArgument("round to at most 20 places")
    return names()[name](*values, **keywords)


def _field(node: ast.Attribute):
    """A field of a KVShape, the one kind of object whose attributes are numbers."""
    owner = _value(node.value)
    if not isinstance(owner, names()["KVShape"]):
        raise InvalidArgument(f"{ast.unparse(node)!r}: only a KVShape has fields here")
    found = getattr(owner, node.attr, None)
    if not isinstance(found, int):
        raise InvalidArgument(f"a KVShape has no number {node.attr!r}")
    return found
