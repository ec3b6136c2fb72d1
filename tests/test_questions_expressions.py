"""The bank's small language of numbers, and the three forms of its texts."""

import ast
import inspect
import time

import pytest

import kvq_lib as kvq
from kvq_lib.course.questions import expressions, text
from kvq_lib.errors import InvalidArgument


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2**10 / 3 - -1", 2**10 / 3 + 1),
        ("7 // 2 + 7 % 4", 6),
        ("ceil(1000 / 16)", 63),
        ("log2(8) + sqrt(16) + floor(2.5)", 9),
        ("max(1, 2, 3) * min(4, 5) * abs(-1)", 12),
        ("(3 > 2) + (2 <= 2 < 3) * 2", 3),
        ("KVShape(2, 3, 64).elements_per_token", 2 * 2 * 3 * 64),
        ("KVShape(num_layers=2, num_kv_heads=3, head_dim=64).head_dim", 64),
        ('kv_bytes(KVShape(2, 3, 64), "int4", 160, batch=3)',
         kvq.kv_bytes(kvq.KVShape(2, 3, 64), "int4", 160, 3)),
        ('kv_bytes(KVShape(2, 3, 64), scheme("int4", recent=32), 160)',
         kvq.kv_bytes(kvq.KVShape(2, 3, 64), kvq.scheme("int4", recent=32), 160)),
        ("max_batch(24e9, 16e9, 0, 1e9)", 8),
        ('MEMORY_GB["L4"]', kvq.MEMORY_GB["L4"]),
    ],
)  # fmt: skip
def test_expressions_are_computed(expression, value):
    assert expressions.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "open('/etc/passwd')",
        "(1).__class__",
        "KVShape(1, 1, 1).__class__",
        "KVShape(1, 1, 1).of",
        "KVShape(1, 1, 1).nothing",
        "kv_bytes.__globals__",
        "scheme('int8').name",
        "[1, 2]",
        "lambda: 1",
        "1 if 2 else 3",
        "1 and 2",
        "not 1",
        "~1",
        "1 << 3",
        "'a' * 3",
        "'text'",
        "KVShape",
        "KVShape(1, 1, 1)",
        "True",
        "None",
        "3 > 2",
        "1 in 2",
        "kv_bytes(*KVShape)",
        "kv_bytes(**1)",
        "MEMORY_GB('L4')",
        "MEMORY_GB['none']",
        "math.pi",
        "load_model('smollm2-135m')",
        "(x := 1)",
        "1; 2",
        "",
        "1 / 0",
        "log2(0)",
        "2.0**10**10",
        "9**99**9",
        "9**99 * 9**99 * 9**99 * 9**99",
        "1e200 * 1e200",
        "1e200 * 1e200 - 1e200 * 1e200",
        "kv_bytes(KVShape(0, 1, 1), 'int8', 1)",
        "+".join("1" * 300),
        "round(5, -100000000)",
        "round(5, ndigits=-100000000)",
        "(" * 300,
        "-" * 398 + "1a",
        "(2**128)**128",
        "(2**100)**128",
        "9" * 399,
        "(0 - 8)**0.5",
        "exp(1000)",
        "kv_bytes(KVShape(1, 1, 1), 'int8', 9**128)",
        "kv_bytes(KVShape(1, 1, 1), scheme('int8', recent=9**128), 5)",
        "kv_bytes(KVShape(1, 1, 1), 'int8', 1.5)",
        "scheme(5)",
        "max(1)",
        "floor('a')",
    ],
)
def test_what_is_no_expression_is_refused(expression):
    with pytest.raises(InvalidArgument):
        expressions.evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9**99999999",
        "kv_bytes(KVShape(1, 1, 1), scheme('int8', recent=10**90), 10**99)",
    ],
)
def test_no_expression_takes_long(expression):
    started = time.monotonic()
    try:
        expressions.evaluate(expression)
    except InvalidArgument as refused:
        assert len(str(refused)) < 500
    assert time.monotonic() - started < 2


def test_expressions_know_public_names_of_the_library_alone():
    assert set(expressions.LIBRARY) <= set(dir(kvq))
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(expressions)))
        if isinstance(node, ast.Attribute)
    }
    assert not used & {"eval", "exec", "compile", "import_module"}


# -- texts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markdown", "html", "plain"),
    [
        ("A *b* `c`", "A <em>b</em> <code>c</code>", "A b c"),
        (r"$a_1 < b$", r'<span class="math">\(a_1 &lt; b\)</span>', "a_1 < b"),
        ("`$x$`", "<code>$x$</code>", "$x$"),
        (r"\$5", "$5", "$5"),
        ("a & b", "a &amp; b", "a & b"),
        (
            r"$\lceil L/P \rceil \cdot \frac{1}{2}$",
            r'<span class="math">\(\lceil L/P \rceil \cdot \frac{1}{2}\)</span>',
            "⌈ L/P ⌉ · (1)/(2)",
        ),
        (r"$k_* * v_*$", r'<span class="math">\(k_* * v_*\)</span>', "k_* * v_*"),
    ],
)
def test_texts_have_three_forms(markdown, html, plain):
    assert text.line(markdown) == html
    assert text.html(markdown) == f"<p>{html}</p>"
    assert text.plain(markdown) == plain
