import gc

import pytest
import transformers

VERBOSITY = transformers.logging.get_verbosity()


@pytest.fixture(autouse=True)
def undo_commands():
    """Undo what commands change in their process: verbosity of transformers, frozen objects."""
    transformers.logging.set_verbosity(VERBOSITY)
    yield
    transformers.logging.set_verbosity(VERBOSITY)
    gc.unfreeze()
