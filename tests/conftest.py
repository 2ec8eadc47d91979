import gc
import os

# one core for each worker of `pytest -n`: those that take all cores each wait for one another;
# before torch is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import transformers

from browser import chromium

VERBOSITY = transformers.logging.get_verbosity()


@pytest.fixture(autouse=True)
def undo_commands():
    """Undo what commands change in their process: verbosity of transformers, frozen objects."""
    transformers.logging.set_verbosity(VERBOSITY)
    yield
    transformers.logging.set_verbosity(VERBOSITY)
    gc.unfreeze()


@pytest.fixture(scope="session")
def browser():
    """One for all pages: a process cannot start a second one."""
    with chromium() as browser:
        yield browser
