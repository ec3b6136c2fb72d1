"""A chapter that ends its kernel fails like one whose cell raises an error.

A kernel that is killed, by `os._exit` or for want of memory, would stop Jupyter Book
without a word on the chapter, and so would one that does not start.
"""

import traceback

from jupyter_cache.executors.utils import ExecutionResult, single_nb_execution
from myst_nb.core.execute import cache, direct

DIED = """{source}

{error}: {words}
The cell ended its kernel, perhaps because it took more memory than there is."""


def execute(notebook, cwd, **settings) -> ExecutionResult:
    """Execute a notebook; whatever ends that is in the result, with the last cell."""
    begun = []

    def note(cell, cell_index):
        begun.append(cell["source"].strip())

    try:
        return single_nb_execution(notebook, cwd, on_cell_execute=note, **settings)
    except Exception as error:  # a kernel that died, or none that could be started
        log = traceback.format_exc()
        if begun:
            name = type(error).__name__
            log = DIED.format(source=begun[-1], error=name, words=error)
        return ExecutionResult(notebook, cwd, 0.0, error, log)


def name_last_cell() -> None:
    """Let MyST-NB execute that way."""
    cache.single_nb_execution = direct.single_nb_execution = execute
