"""Show a page again whenever it is saved: `make watch`.

    python -m kvq_lib.course.publish.watch [--port 8000]

Sphinx reads only what was saved, and jupyter-cache executes a notebook only if its
cells changed.  The preview has a folder of its own, `_build/watch`; executed outputs
are shared with `make book`, and so they must not outlive the library that made them.
"""

import argparse
import logging
import multiprocessing
import os
import socket
import sys
import time
import warnings
from pathlib import Path

import livereload
from jupyter_book.sphinx import build_sphinx
from livereload.handlers import LiveReloadHandler
from sphinx.util import console
from tornado.ioloop import IOLoop

from .. import appendices, site  # extensions are imported once, not by every build
from ..questions import pages
from ..site import ROOT

WATCHED = ("_config.yml", "_toc.yml", "book", "exercises", "solutions")
EXTENSIONS = (appendices, pages)
# A page that was loading while a build held up the server is connected by then.
TELL = 1.0  # seconds from a build to telling browsers


def read_and_write(root: Path, html: Path) -> None:
    """Read what has changed since the last time, and write its pages.

    Unlike `make book` it tolerates warnings: half a sentence must be seen, too.
    """
    warnings.simplefilter("ignore", FutureWarning)
    if not sys.stdout.isatty():
        console.nocolor()
    failed = build_sphinx(
        root,
        html,
        path_config=root / "_config.yml",
        noconfig=True,
        confoverrides={
            "external_toc_path": str(root / "_toc.yml"),
            "latex_individualpages": False,
            "nb_execution_cache_path": str(root / "_build" / ".jupyter_cache"),
        },
        quiet=True,
    )
    sys.exit(bool(failed))


def build(root: Path, html: Path) -> bool:
    """Bring the preview up to date; tell whether it worked.

    Each build is a process, because Sphinx leaves traces in lists that all builds of a
    process share, and takes them for a new configuration.  It is a fork, because
    importing everything takes longer than writing a page.
    """
    process = multiprocessing.get_context("fork").Process(
        target=read_and_write, args=(root, html)
    )
    process.start()
    process.join()
    return process.exitcode == 0


def disown_executions(root: Path, key: str) -> bool:
    """Have `make book` drop the outputs that it keeps, if the library is no longer the
    one of `key`; tell whether that is so."""
    if site.execution_key(root) == key:
        return False
    (root / "_build" / "execution.key").unlink(missing_ok=True)
    return True


def passing(path: str) -> bool:
    """Whether a file is one that editors put beside the one they save."""
    return path.endswith(("~", ".swp", ".tmp")) or ".ipynb_checkpoints" in path


def watch(root: Path, port: int) -> None:
    """Build, serve on this machine only, and build again after each save.

    Raises:
        OSError: the port cannot be used.
    """
    with socket.create_server(("127.0.0.1", port)):
        pass  # a port that is taken is told before pages are read
    os.environ.update(site._environment(root))
    html = root / "_build" / "watch" / "html"
    if site.drop_stale_executions(root):
        print("The library, a version or a result changed: all chapters run again.")
    key = site.execution_key(root)

    def rebuild() -> None:
        if disown_executions(root, key):
            print("The library changed: start `make watch` again to run all chapters.")
        began = time.monotonic()
        said = "Shown" if build(root, html) else "Not built, the reason is above"
        print(f"{said} ({time.monotonic() - began:.1f} s)", flush=True)

    def show() -> None:
        rebuild()
        IOLoop.current().call_later(TELL, LiveReloadHandler.reload_waiters)

    logging.getLogger("livereload").disabled = True  # it tells everything twice
    server = livereload.Server()
    server.watcher.ignore = passing
    for name in WATCHED:
        server.watch(str(root / name), show, delay="forever")  # `show` tells browsers
    print("Reading all pages; chapters that have not run yet take their time.")
    rebuild()
    print(f"http://127.0.0.1:{port}/book/index.html (stop with Ctrl-C)", flush=True)
    server.serve(port, host="127.0.0.1", root=str(html))


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m kvq_lib.course.publish.watch")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    try:
        watch(ROOT, options.port)
    except OSError as error:
        print(
            f"Port {options.port} cannot be used ({error}): "
            f"try `make watch PORT={options.port + 1}`."
        )
        return 1
    except KeyboardInterrupt:
        pass  # while pages were read
    print("\nStopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
