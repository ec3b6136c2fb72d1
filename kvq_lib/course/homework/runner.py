"""The program inside the sandbox: runs cells and probes, one request at a time.

    python -I -S -X utf8 runner.py SETTINGS

It stands alone: the standard library and nothing else, so that a copy of this one file
can be mounted.  SETTINGS is a JSON object:

    requests, replies   numbers of the two pipes
    uid                 the user to become, or null
    limits              {"RLIMIT_...": number}
    filter              a seccomp program in base64, or ""
    path                folders that go before everything on `sys.path`
    site                folders that go after the standard library
    folder              where the cells run

Requests and replies are one JSON object a line; session.py documents them.  Nothing
here is trusted by the grader: what runs in this process can change every line of it,
and gains nothing but wrong answers of its own.
"""

import ast
import base64
import io
import json
import linecache
import os
import random
import resource
import signal
import sys
import threading
import types
import warnings
from _json import encode_basestring_ascii as _quoted

MAX_REPLY = 1_000_000  # bytes
MAX_ITEMS = 500_000  # more could not be sent anyway
MAX_DEPTH = 100


class NotPlainData(Exception):
    """The value is not what JSON can say, or is too much of it."""


# -- plain data ----------------------------------------------------------------------
#
# Only exact types and the base classes' own methods are used: a class that the cells
# define cannot answer for itself.


def plain(value):
    """`value` as None, bool, int, float, str, list and dict alone.

    Raises:
        NotPlainData: it is something else, nested too deeply, or too much.
    """
    return _plain(value, 0, [MAX_ITEMS])


def _plain(value, depth: int, left: list[int]):
    """The same, where `left` holds how many items there may still be."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    left[0] -= 1
    if depth > MAX_DEPTH or left[0] < 0:
        raise NotPlainData
    for base, items in ((list, list.__iter__), (tuple, tuple.__iter__)):
        if issubclass(kind, base):
            left[0] -= base.__len__(value)
            return [_plain(v, depth + 1, left) for v in items(value)]
    if issubclass(kind, dict):
        left[0] -= dict.__len__(value)
        return {_key(k): _plain(v, depth + 1, left) for k, v in dict.items(value)}
    array = _array(value, kind)
    if array is not None:
        return _plain(array, depth, left)
    for base in (int, float, str):
        if issubclass(kind, base):
            return str.__str__(value) if base is str else base.__pos__(value)
    raise NotPlainData


def _key(key) -> str:
    if type(key) is not str:
        raise NotPlainData
    return key


def _array(value, kind):
    """Lists and numbers of a tensor, an array or one of their scalars; else None."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        value = value.detach().cpu()
        if value.numel() > MAX_ITEMS:
            raise NotPlainData
        if value.is_floating_point() and value.dtype.itemsize == 1:
            value = value.float()  # 8-bit floats have no list of their own
        return torch.Tensor.tolist(value)
    if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
        if value.size > MAX_ITEMS or value.dtype.hasobject:
            raise NotPlainData
        found = value.tolist()
        # A type that Python lacks, such as longdouble, stays what it was.
        if type(found) is kind:
            raise NotPlainData
        return found
    return None


def text(value) -> str:
    """Plain data as JSON, with NaN and Infinity as Python writes them."""
    if value is None:
        return "null"
    kind = type(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return int.__repr__(value)
    if kind is float:
        if value != value:
            return "NaN"
        if value in (float("inf"), float("-inf")):
            return "Infinity" if value > 0 else "-Infinity"
        return float.__repr__(value)
    if kind is str:
        return _quoted(value)
    if kind is list:
        return "[" + ",".join([text(v) for v in value]) + "]"
    return "{" + ",".join([f"{_quoted(k)}:{text(v)}" for k, v in value.items()]) + "}"


def error_name(error: BaseException) -> str:
    """The nearest built-in exception: names that cells invent stay inside."""
    if isinstance(error, NotPlainData):
        return "NotPlainData"
    if any(issubclass(type(e), NotImplementedError) for e in _causes(error)):
        return "NotImplementedError"  # Triton's interpreter wraps that of a stub
    try:
        # Allocators of numpy and torch have errors of their own.
        if "allocate memory" in str(error) or "not enough memory" in str(error):
            return "MemoryError"
    except BaseException:
        return "Exception"
    for base in type.mro(type(error)):
        if base.__module__ == "builtins":
            return base.__name__
    return "Exception"


def _causes(error: BaseException):
    """The error and what it was raised from, by the slot that no class can replace."""
    cause = BaseException.__cause__.__get__
    for _ in range(MAX_DEPTH):
        if error is None:
            return
        yield error
        error = cause(error)


# -- running -------------------------------------------------------------------------


class _Shell:
    """What `get_ipython()` returns: it has every attribute, and calls do nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **options):
        return self


class Runner:
    """Runs code in one namespace, which is the module `__main__`."""

    def __init__(self):
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.names = main.__dict__
        self.names["__builtins__"] = __builtins__
        self.names["display"] = lambda *args, **options: None
        shell = _Shell()
        self.names["get_ipython"] = lambda: shell
        self.names["exit"] = self.names["quit"] = sys.exit
        self._flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._number = 0
        self._handlers = {
            number: signal.getsignal(number)
            for number in (
                signal.SIGALRM,
                signal.SIGINT,
                signal.SIGPROF,
                signal.SIGTERM,
                signal.SIGVTALRM,
            )
        }

    def cell(self, code: str) -> None:
        """Run one cell in the shared namespace."""
        self._settle()
        self._exec(code, self._register(code), self.names)

    def probe(self, code: str, seed: int):
        """The value of the last expression of `code`, in a copy of the namespace."""
        self._settle()
        _reseed(seed)
        name = self._register(code)
        names = dict(self.names)
        tree = ast.parse(code, name)
        last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        return plain(eval(compile(last, name, "eval", dont_inherit=True), names))

    def _exec(self, code: str, name: str, names: dict) -> None:
        made = compile(code, name, "exec", self._flags, dont_inherit=True)
        for feature in _FUTURES:  # as in a notebook, they hold for later cells, too
            self._flags |= made.co_flags & feature
        if made.co_flags & _COROUTINE:
            import asyncio

            asyncio.run(eval(made, names))
        else:
            exec(made, names)

    def _register(self, code: str) -> str:
        """A file name under which `inspect.getsource` finds the code."""
        self._number += 1
        name = f"<cell {self._number}>"
        lines = code.splitlines(keepends=True)
        linecache.cache[name] = (len(code), None, lines, name)
        return name

    def _settle(self) -> None:
        """Undo what earlier cells left behind and later ones should not meet."""
        threading.settrace(None)
        threading.setprofile(None)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        if _closed(sys.stdout) or _closed(sys.stderr):
            sys.stdout = sys.stderr = io.StringIO()


def _closed(stream) -> bool:
    try:
        return bool(stream.closed)
    except Exception:
        return True


def _features():
    import __future__

    return [getattr(__future__, n).compiler_flag for n in __future__.all_feature_names]


_FUTURES = _features()
_COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing inspect


def _reseed(seed: int) -> None:
    """Seeds, default types and modes as in a fresh process."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
        numpy.seterr(all="warn")
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.manual_seed(seed)


# -- the loop ------------------------------------------------------------------------


def serve(requests: int, replies: int) -> None:
    """Answer requests until the pipe ends.  What it needs later it holds from now on:
    cells may put something else in its place."""
    read, write, loads, leave = os.read, os.write, json.loads, os._exit
    folder, chdir, exists, make = os.getcwd(), os.chdir, os.path.exists, os.mkdir
    untrace, unprofile = sys.settrace, sys.setprofile
    written, name_of, limit = text, error_name, MAX_REPLY
    runner, failure = Runner(), NotPlainData

    def reply(line: str) -> None:
        data = line.encode("ascii") + b"\n"
        while data:
            data = data[write(replies, data) :]

    def answer(request: dict) -> str:
        head = f'{{"n":{request["n"]:d},'
        try:
            if not exists(folder):  # a cell removed what was its own
                make(folder)
            chdir(folder)
            try:
                if request["op"] == "cell":
                    runner.cell(request["code"])
                    return head + '"ok":true}'
                value = written(runner.probe(request["code"], request["seed"]))
                if len(value) > limit - 100:
                    raise failure
                return f'{head}"value":{value}}}'
            finally:  # or they would see the lines below
                untrace(None)
                unprofile(None)
        except BaseException as error:
            name = _quoted(name_of(error))
        if request["op"] == "cell":
            return f'{head}"ok":false,"error":{name}}}'
        return f'{head}"error":{name}}}'

    reply('{"n":0,"ok":true}')
    rest = b""
    while True:
        while b"\n" not in rest:
            more = read(requests, 65536)
            if not more:
                leave(0)
            rest += more
        line, rest = rest.split(b"\n", 1)
        reply(answer(loads(line)))


def confine(settings: dict) -> None:
    """Become the other user, take on limits, forbid what the filter forbids."""
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    for name, most in settings["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    if settings["filter"]:
        _filter(base64.b64decode(settings["filter"]))


def _filter(program: bytes) -> None:
    """Load a seccomp program: from here on the kernel refuses what it refuses."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    made = Program(len(program) // 8, program)
    no_new_privileges, seccomp, mode_filter = 38, 22, 2
    for arguments in (
        (no_new_privileges, 1, 0, 0, 0),
        (seccomp, mode_filter, ctypes.byref(made), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "seccomp was refused")


def main() -> None:
    """Read the settings, confine the process, serve."""
    settings = json.loads(sys.argv[1])
    sys.argv = ["notebook"]
    os.chdir(settings["folder"])
    confine(settings)
    sys.path[:] = [*settings["path"], *sys.path, *settings["site"], ""]
    serve(settings["requests"], settings["replies"])


if __name__ == "__main__":
    main()
