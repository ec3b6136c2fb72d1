"""Submissions that turn on the grader: its protocol, its values, the machine around."""

from hostile import GIVEN, MEANS, SECRET, SQUARE, Kind, kind, spoiled, survived

# Every pipe that the process holds; one of them leads to the grader.
_PIPES = """\
import stat
def pipes():
    for fd in range(3, 256):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode): yield fd
        except OSError: pass
def tell(data):
    for fd in pipes():
        try: os.write(fd, data)
        except OSError: pass
"""
# The names of a running frame of the runner, from inside a call.
_FRAMES = """\
def frames():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
"""
_VALUE = b'{"n":%d,"value":[9,2.25]}\n'
_OTHER = b'{"n":1,"ok":true}\n'
_MANY = f"b''.join({_VALUE!r} % n for n in range(9))"


def _tries(*lines: str) -> str:
    """Statements that must all fail, or the cell raises."""
    parts = [
        f"try:\n    {line}\nexcept (OSError, ImportError): pass\nelse: 1 / 0"
        for line in lines
    ]
    return "\n".join(parts)


def _looks(body: str) -> Kind:
    """A cell that searches and collects what it finds in `found`: there is nothing."""
    return survived(f"found = []\n{body}\nassert not found, found")


ATTACKS = {
    # -- the protocol
    "forged replies": spoiled(f"{_PIPES}tell({_MANY})", note="disturbed the grader"),
    "forged replies inside": kind(
        "partial",
        0,
        3,
        first=f"# @answer q1\n{_PIPES}def square(x):\n    tell({_MANY})\n"
        "    time.sleep(60)",
    ),
    "a reply with the right number": kind(
        # It knows the number, but not the value: a reply is only as good as that.
        "partial",
        0,
        3,
        first=f"# @answer q1\n{_PIPES}{_FRAMES}def square(x):\n"
        "    n = next(f.f_locals['request']['n'] for f in frames()\n"
        "             if 'request' in f.f_locals)\n"
        '    tell(b\'{"n":%d,"value":true}\\n\' % n)\n    time.sleep(60)',
    ),
    "a reply with a wrong number": spoiled(
        f"{_PIPES}tell({_OTHER!r})\ntime.sleep(60)", note="disturbed the grader"
    ),
    "more than one reply": spoiled(
        f"{_PIPES}{_FRAMES}n = next(f.f_locals['request']['n'] for f in frames()\n"
        "         if 'request' in f.f_locals)\n"
        'tell(b\'{"n":%d,"ok":true}\\n{}\\n\' % n)',
        note="disturbed the grader",
    ),
    "noise on every pipe": spoiled(f"{_PIPES}tell(b'{SECRET}' * 9 + b'\\n')"),
    "endless reply": spoiled(f"{_PIPES}while True: tell(b'x' * 4096)"),
    "deep reply": spoiled(f"{_PIPES}tell(b'[' * 40000 + b'\\n')"),
    "reply without an end": spoiled(f"{_PIPES}tell(b'x')\ntime.sleep(60)"),
    "closed pipes": spoiled("os.closerange(3, 256)"),
    "stolen requests": spoiled(
        f"{_PIPES}import threading\ndef steal():\n"
        "    for fd in [*pipes()]:\n        try: os.read(fd, 9999)\n"
        "        except OSError: pass\n"
        "[threading.Thread(target=steal, daemon=True).start() for n in range(9)]"
        "\ntime.sleep(0.2)\nos._exit(1)"
    ),
    "two of it": kind(
        "partial", 0, 3, first=f"{SQUARE}\nos.fork()", after=("time.sleep(0.3)",)
    ),
    # -- patches
    "json patched": survived(
        "json.dumps = json.loads = lambda *a, **k: '[9, 2.25]'\n"
        "json.JSONEncoder.encode = json.dumps\n"
        "json.encoder.encode_basestring_ascii = json.decoder.scanstring = None"
    ),
    "builtins patched": survived(
        "import builtins\n"
        "builtins.print = builtins.repr = builtins.open = builtins.sum = lambda *a: 9"
    ),
    "builtins gone": kind(
        "partial",
        2,
        0,
        after=("import builtins\nfor n in ('exec', 'compile'): delattr(builtins, n)",),
    ),
    "os patched": survived("os.write = os.read = os._exit = os.chdir = lambda *a: 0"),
    "frames patched": kind(
        "ok",
        0,
        3,
        first=f"# @answer q1\n{_FRAMES}def square(x):\n    for f in frames():\n"
        "        for name in [*f.f_globals]:\n"
        "            if name == 'plain': f.f_globals[name] = lambda v: [9, 2.25, 0]\n"
        "    return 0",
        second=f"{MEANS}\nfor f in frames():\n    if 'plain' in f.f_globals:\n"
        "        f.f_globals['plain'] = lambda v: v",
    ),
    "trace": survived(
        "import threading\ndef trace(*a): raise SystemExit\n"
        "threading.settrace(trace); threading.setprofile(trace)\nsys.settrace(trace)"
    ),
    "IPython hooks": survived(
        "ip = get_ipython()\nip.events.register('post_run_cell', lambda: os._exit(1))\n"
        "get_ipython = lambda: os._exit(1)\n"
        "sys.displayhook = sys.excepthook = get_ipython"
    ),
    "main gone": survived("sys.modules.clear()"),
    "exit hooks": survived(
        "import atexit, signal\natexit.register(time.sleep, 999)\n"
        "class D:\n    def __del__(self): time.sleep(999)\nd = D()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    ),
    "alarm": kind(
        "ok",
        2,
        3,
        before=(
            "import signal\nsignal.signal(14, lambda *a: os._exit(1))\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.05)",
            "time.sleep(0.2)",
        ),
    ),
    "warnings as errors": survived("import warnings\nwarnings.simplefilter('error')"),
    "thread left behind": survived(
        "import threading\ndef spin():\n    while True: time.sleep(0.001)\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        "threading.Thread(target=time.sleep, args=(999,)).start()"
    ),
    "seeds": survived(
        "import random\nrandom.seed = random.random = lambda *a: 0.5\n"
        "sys.setswitchinterval(1)"
    ),
    # -- other files and processes
    "search of the disk": _looks(
        "for folder, below, names in os.walk('/'):\n"
        "    if folder in ('/proc', '/sys', '/usr'): below.clear()\n"
        "    if 'site-packages' in folder: below.clear()\n"
        "    found += [n for n in names if n == 'hw90.json' or n.endswith('.ipynb')]"
    ),
    "search of processes": _looks(
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('cmdline', 'environ'):\n"
        "        try: text = open(f'/proc/{pid}/{name}', 'rb').read()\n"
        "        except OSError: continue\n"
        "        found += [w for w in (b'hw90', b'ipynb', b'SSH_') if w in text]\n"
        "    try: links = os.listdir(f'/proc/{pid}/fd')\n"
        "    except OSError: continue\n"
        "    for link in links:\n"
        "        try: path = os.readlink(f'/proc/{pid}/fd/{link}')\n"
        "        except OSError: continue\n"
        "        if path.startswith(('/tmp/', '/work', '/home', '/root')):\n"
        "            found.append(path)"
    ),
    "repository by import": _looks(
        "import importlib.util\nfound += [p for p in sys.meta_path\n"
        "          if 'editable' in repr(p).lower()]\n"
        "spec = importlib.util.find_spec('kvq_lib')\n"
        "if not spec.origin.startswith('/kvq/'): found.append(spec.origin)"
    ),
    "network": survived(
        "import socket\n"
        + _tries(
            "socket.create_connection(('1.1.1.1', 53), 1)",
            "socket.getaddrinfo('example.org', 80)",
            "socket.socket()",
            "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
            "socket.socket(40, socket.SOCK_STREAM)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        )
    ),
    "writes elsewhere": survived(
        _tries(
            *(
                f"open({path!r}, 'w')"
                for path in (
                    "/x",
                    "/usr/x",
                    "/etc/x",
                    "/dev/x",
                    "/kvq/lib/kvq_lib/x.py",
                    "/kvq/runner.py",
                    "/proc/sys/kernel/core_pattern",
                )
            ),
            "open(os.path.join(sys.prefix, 'x'), 'w')",
            "os.mkdir('/x')",
        )
    ),
    "folder gone": survived(
        "import shutil\nos.chdir('/')\nshutil.rmtree('/tmp', ignore_errors=True)"
    ),
    "new namespaces": survived(
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for flag in (0x10000000, 0x20000, 0x40000000):\n"
        "    assert libc.unshare(flag) == -1\n"
        "assert libc.mount(b'none', b'/tmp/work', b'tmpfs', 0, None) == -1\n"
        "assert libc.ptrace(16, 1, 0, 0) == -1\nassert libc.chroot(b'/') == -1\n"
        "assert os.getuid() and libc.setuid(0) == -1"
    ),
    "kill everybody": survived(
        "for pid in (1, -1):\n    try: os.kill(pid, 0 if pid == 1 else 9)\n"
        "    except OSError: pass"
    ),
    "detached child": survived(
        "if not os.fork():\n    os.setsid()\n    if not os.fork():\n"
        f"        os.execv(sys.executable, [sys.executable, '-c',\n"
        f"                 'import time; time.sleep(600)', '{SECRET}'])\n"
        "    os._exit(0)"
    ),
    "noise everywhere": Kind(
        "partial",
        0,
        3,
        (
            GIVEN,
            f"# {SECRET}\nprint('{SECRET}', file=sys.stderr)\n{SECRET} = 1",
            SQUARE.replace("return", f"raise RuntimeError('{SECRET}'); return")
            + f"\nraise ValueError('=HYPERLINK(\"{SECRET}\")')",
            MEANS,
        ),
        "ValueError",
    ),
}
