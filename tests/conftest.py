import pytest
import transformers

VERBOSITY = transformers.logging.get_verbosity()


@pytest.fixture(autouse=True)
def restore_verbosity():
    """Undo what commands change: they lower the verbosity of transformers for their process."""
    transformers.logging.set_verbosity(VERBOSITY)
    yield
    transformers.logging.set_verbosity(VERBOSITY)
