import pytest
import transformers

VERBOSITY = transformers.logging.get_verbosity()


@pytest.fixture(autouse=True)
def own_verbosity():
    """Commands turn transformers' talk down, which is theirs to do in a process of their own."""
    transformers.logging.set_verbosity(VERBOSITY)
    yield
    transformers.logging.set_verbosity(VERBOSITY)
