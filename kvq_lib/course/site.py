"""Build the site, skip what has not changed, and say why a build failed.

    python -m kvq_lib.course.site build [--force] [--edition full|course]
    python -m kvq_lib.course.site serve [--port 8000]
    python -m kvq_lib.course.site links
    python -m kvq_lib.course.site set-repo https://github.com/OWNER/NAME

Jupyter Book executes the chapters through a cache that looks at their cells alone: it
would show old outputs after the library they import has changed.  So the cache is
dropped whenever the *execution key* changes, a hash of the library, the lock, the
recorded measurements, the questions, the installed versions and the machine.  Only a
build that executes a chapter can see it fail, and only a build that reads a page can
see its warnings.  So every build reads all pages again, and a failed one never counts
as done.
"""

import argparse
import functools
import hashlib
import http.server
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from ..bench import provenance
from ..errors import InvalidArgument
from . import bootstrap
from .blame import ANSI, cell_with, failure_report, with_cell
from .repository import prefix, set_repository
from .scan import (
    dead_links,
    external_files,
    missing_files,
    outside_links,
    wordless_pictures,
)

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path("_build/environment.json")  # of the cached executions
OUTSIDE = Path("_build/outside_links.txt")  # an address a line, and its pages

# Parts of _toc.yml that an edition leaves out.
EDITIONS = {"full": (), "course": ("Solutions",)}

# Files of the library that decide what a chapter shows, and paths that do not.
LIBRARY = (".py", ".js", ".css", ".html")
APART = tuple(
    f"kvq_lib/course/{path}"
    for path in (
        *("homework/", "publish/", "browser.py", "colab_check.py", "light.py"),
        *("fatal.py", "pdf", "scan"),
    )
)


def hash_files(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 over the files' paths below `root` and their bytes, in a fixed order."""
    digest = hashlib.sha256()
    for path in sorted(set(files)):
        content = path.read_bytes()
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def listed(entry: dict) -> Iterator[str]:
    """The pages below an entry of _toc.yml, in their order."""
    for child in (entry.get(key, ()) for key in ("parts", "chapters", "sections")):
        for below in child:
            if "file" in below:
                yield below["file"]
            yield from listed(below)


def pages(root: Path = ROOT) -> list[str]:
    """The pages that _toc.yml lists, in the order in which readers turn them."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *listed(toc)]


@functools.cache
def environment() -> dict[str, dict]:
    """The machine and the versions on which chapters run."""
    tools = ("matplotlib", "ipykernel", "myst-nb", "Sphinx", "jupyter-book")
    built_with = {name: importlib.metadata.version(name) for name in tools}
    return {
        "machine": provenance.machine(),
        "versions": provenance.versions() | built_with,
    }


def execution_key(root: Path = ROOT) -> str:
    """What the output of a chapter depends on besides the chapter itself."""
    code = (p for end in LIBRARY for p in root.glob(f"kvq_lib/**/*{end}"))
    files = [
        *(p for p in code if not p.relative_to(root).as_posix().startswith(APART)),
        *root.glob("requirements*.txt"),
        *root.glob("book/results/*.json"),
        *root.glob("book/questions/*.yml"),
    ]
    where = hashlib.sha256(json.dumps(environment(), sort_keys=True).encode())
    return f"{where.hexdigest()[:16]}-{hash_files(root, files)}"


def site_key(root: Path = ROOT) -> str:
    """What the whole site depends on."""
    sources = [root / "_config.yml", root / "_toc.yml"]
    for folder in ("exercises", "solutions"):
        sources += (root / folder).glob("*.ipynb")
    for path in (root / "book").rglob("*"):
        inside = path.relative_to(root).parts
        hidden = any(part.startswith((".", "__pycache__")) for part in inside)
        if path.is_file() and not hidden:
            sources.append(path)
    return f"{execution_key(root)}-{hash_files(root, sources)}"


def is_stale(root: Path = ROOT, edition: str = "full") -> bool:
    """Whether the site on disk is missing, failed, of another edition, or older than
    its sources."""
    stamp = root / "_build" / "site.key"
    built = stamp.exists() and (root / "_build" / "html" / "index.html").exists()
    return not built or stamp.read_text() != f"{edition}-{site_key(root)}"


def drop_stale_executions(root: Path = ROOT) -> bool:
    """Drop all cached outputs if the execution key changed; tell whether it did.

    The key is written before anything is executed, so that a build that was
    interrupted keeps the chapters that it had finished.
    """
    cache = root / "_build" / ".jupyter_cache"
    stamp = root / "_build" / "execution.key"
    key = execution_key(root)
    if stamp.exists() and stamp.read_text() == key:
        return False
    dropped = cache.exists()
    if dropped:
        shutil.rmtree(cache)
    stamp.parent.mkdir(exist_ok=True)
    # All that the cache will hold runs here: the status page says so.
    (root / ENVIRONMENT).write_text(json.dumps(environment()), encoding="utf-8")
    stamp.write_text(key)
    return dropped


def _environment(root: Path) -> dict[str, str]:
    """The reader's own settings must not change what the chapters print or draw."""
    build = root / "_build"
    return {
        **os.environ,
        "IPYTHONDIR": str(build / ".ipython"),
        "JUPYTER_RUNTIME_DIR": str(build / ".jupyter_runtime"),
        "MPLCONFIGDIR": str(build / ".matplotlib"),
        # The kernel of this environment, not one that the user installed elsewhere.
        "JUPYTER_PREFER_ENV_PATH": "1",
        # Controls that need a kernel would be dead on a page; see `course.live`.
        "KVQ_STATIC_PAGE": "1",
        # A progress bar belongs on a terminal, not in a page.  The bars that tqdm draws
        # in notebooks have no switch; in Spyder it draws those of a terminal, with one.
        "SPYDER": "",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        # On a busy machine threads that spin while they wait for each other take four
        # times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def table_of_contents(root: Path = ROOT, edition: str = "full") -> Path:
    """The table of contents of an edition; other pages are not built at all."""
    path = root / "_toc.yml"
    if not EDITIONS[edition]:
        return path
    toc = yaml.safe_load(path.read_text(encoding="utf-8"))
    toc["parts"] = [p for p in toc["parts"] if p["caption"] not in EDITIONS[edition]]
    path = root / "_build" / f"toc_{edition}.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(toc, sort_keys=False), encoding="utf-8")
    return path


def run_sphinx(
    root: Path = ROOT, edition: str = "full", builder: str = "html"
) -> tuple[int, list[str]]:
    """Run Jupyter Book, show its output as it comes, return its status and warnings."""
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    command += ["build", str(root), "-n", "-W", "--keep-going", "--all"]
    command += ["--toc", str(table_of_contents(root, edition)), "--builder", builder]
    colour = sys.stdout.isatty()
    warnings = []
    process = subprocess.Popen(
        command,
        cwd=root,
        env=_environment(root),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    for line in process.stdout:
        plain = ANSI.sub("", line)
        print(line if colour else plain, end="", flush=True)
        if re.search(r"\b(WARNING|ERROR|CRITICAL):", plain):
            warnings.append(plain.strip())
    return process.wait(), warnings


def page_problems(root: Path, warnings: Iterable[str] = ()) -> str:
    """What the pages have that no reader should meet, "" if nothing.

    After `warnings` of Sphinx only what they do not say, and what has a cell or line:
    the rest may come from what they are about.
    """
    html, start = root / "_build" / "html", prefix(root)
    kinds = {
        "Pages load files from other hosts (serve them from book/assets/vendor):": (
            external_files(html)
        ),
        "Pages load files that the site does not have:": missing_files(html, start),
        "Links lead to no page, or to no place on it:": dead_links(html, start),
        "Pictures have no alternative text that says what they show:": (
            wordless_pictures(html)
        ),
    }
    parts = []
    for heading, found in kinds.items():
        lines = []
        for page, text in found:
            place = cell_with(root, page, text)
            if not warnings or (place != page and not any(text in w for w in warnings)):
                lines.append(f"    {place}: {' '.join(text.split())[:200]}")
        parts += [heading, *dict.fromkeys(lines)] if lines else []
    return "\n".join(parts)


def build(root: Path = ROOT, force: bool = False, edition: str = "full") -> int:
    """Bring the site up to date; return 0, or 1 after printing what went wrong."""
    html = root / "_build" / "html"
    stamp = root / "_build" / "site.key"
    if not force and not is_stale(root, edition):
        print("Nothing has changed since the last build.")
        print(f"Open {html / 'index.html'}")
        return 0
    if drop_stale_executions(root):
        print("The library, a version or a result changed: all chapters run again.")
    # The key of what is read now: an edit during the build makes the site stale again.
    key = site_key(root)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(html, ignore_errors=True)
    status, warnings = run_sphinx(root, edition)
    if status != 0:
        print(f"\nThe site was not built.\n\n{failure_report(root, warnings)}")
        # With warnings alone all pages were written, the index of words last; where a
        # cell failed, its page lacks what others may lead to.
        failed = any((html / "reports").rglob("*.err.log"))
        if warnings and not failed and (html / "searchindex.js").exists():
            print(page_problems(root, warnings))
        print("Mend this and run `make book` again: chapters that ran are kept.")
        return 1
    if problems := page_problems(root):
        print(f"\nThe site was not built.\n\n{problems}")
        return 1
    lines = [f"{url}  {' '.join(on)}\n" for url, on in outside_links(html).items()]
    (root / OUTSIDE).write_text("".join(lines), encoding="utf-8")
    stamp.write_text(f"{edition}-{key}")
    print(f"Open {html / 'index.html'}")
    return 0


def check_links(root: Path = ROOT) -> int:
    """Ask every outside address for an answer, with Sphinx's own checker."""
    status, _ = run_sphinx(root, builder="linkcheck")
    # Jupyter Book has the reports written among the pages.
    reports = root / "_build" / "linkcheck"
    reports.mkdir(exist_ok=True)
    for name in ("output.txt", "output.json"):
        written = root / "_build" / "html" / name
        if not written.exists():
            print("No link was checked: the reason is above.")
            return 1
        written.replace(reports / name)
    lines = (reports / "output.json").read_text(encoding="utf-8").splitlines()
    links = [json.loads(line) for line in lines]
    broken = [link for link in links if link["status"] == "broken"]
    for link in broken:
        place = f"{root / link['filename']}:{link['lineno']}:"
        print(with_cell(root, f"{place} {link['uri']} ({link['info'][:100]})"))
    print(f"{len(links)} links, {len(broken)} without an answer: {reports}")
    return 1 if broken else status


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


class _Handler(http.server.SimpleHTTPRequestHandler):
    def send_error(self, code, message=None, explain=None):
        """For an address that does not exist, the site's own page, as on GitHub."""
        own = Path(self.directory) / "404.html"
        if code != 404 or not own.exists():
            super().send_error(code, message, explain)
            return
        content = own.read_bytes()
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def make_server(html: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of the folder `html` on this machine only; port 0 picks a free one."""
    handler = functools.partial(_Handler, directory=str(html))
    return _Server(("127.0.0.1", port), handler)


def serve(root: Path = ROOT, port: int = 8000) -> int:
    """Serve the built site until interrupted."""
    html = root / "_build" / "html"
    if not (html / "index.html").exists():
        print("There is no site yet: run `make book` first.")
        return 1
    try:
        server = make_server(html, port)
    except OSError as error:
        print(
            f"Port {port} cannot be used ({error}): try `make serve PORT={port + 1}`."
        )
        return 1
    with server:
        print(f"Serving http://127.0.0.1:{server.server_port}/ (stop with Ctrl-C)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nStopped.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m kvq_lib.course.site")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="bring the site up to date")
    builder.add_argument(
        "--force", action="store_true", help="build even if nothing has changed"
    )
    builder.add_argument(
        "--edition",
        choices=EDITIONS,
        default="full",
        help="course: without the solutions",
    )
    setter = commands.add_parser("set-repo", help="say where the repository is")
    setter.add_argument("url", help='https://github.com/OWNER/NAME, or "" for none')
    commands.add_parser("links", help="ask whether the links to other sites are alive")
    server = commands.add_parser("serve", help="serve the built site on this machine")
    server.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    if options.command == "build":
        return build(force=options.force, edition=options.edition)
    if options.command == "links":
        return check_links()
    if options.command == "set-repo":
        try:
            changed = set_repository(ROOT, options.url)
        except InvalidArgument as error:
            parser.error(str(error))
        for path in changed:
            print(f"written: {path.relative_to(ROOT)}")
        print(f"Notebooks fetch {bootstrap.tag(ROOT)}: commit, push that tag, then")
        print("run `make book` again; all chapters are executed.")
        return 0
    if not 0 <= options.port < 65536:
        parser.error(f"a port is 0 to 65535, got {options.port}")
    return serve(port=options.port)


if __name__ == "__main__":
    sys.exit(main())
