"""Settings for all tests."""

import os

import pytest
from hypothesis import settings

# Two workers of pytest-xdist on two cores: each gets its share of threads, otherwise
# they wait for each other.  Must be set before torch is imported.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see `course.site`
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402

# Without a GPU the kernels run in Triton's interpreter, which must be chosen before
# any test imports triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A busy machine is slow, not wrong.
settings.register_profile("book", deadline=None, print_blob=True)
settings.load_profile("book")


@pytest.fixture(scope="session")
def address():
    """The address of the built site."""
    from sitepages import HTML, served

    assert (HTML / "index.html").exists(), "the site is not built: run `make book`"
    with served() as address:
        yield address


@pytest.fixture
def open_page(browser, address):
    """A function that opens a page of the site; whatever goes wrong fails the test."""
    from sitepages import Visitor

    visitor = Visitor(browser, address)
    yield visitor.open
    visitor.close()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium, one for all tests of a process."""
    from kvq_lib.course.browser import chromium

    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def full_precision():
    """Norms of models in float64 for float64; for all tests of a module."""
    from helpers import norm_in_full_precision

    with pytest.MonkeyPatch.context() as patch:
        norm_in_full_precision(patch)
        yield


@pytest.fixture
def tiny(tmp_path):
    """A book of one chapter whose output comes from its library."""
    from tinybook import write_book

    return write_book(tmp_path)
