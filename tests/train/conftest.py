import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Models this small gain nothing from a second thread, and lose much if its core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
    yield
    torch.set_num_threads(before)
