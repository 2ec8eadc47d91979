"""In every process of a deployment under test: its engine fails once its id is a file's name."""

import os
import sys
import threading
import time

STOPS = os.environ["KVPRUNE_TEST_STOPS"]


def lie_in_wait():
    while not hasattr(sys.modules.get("kvprune.serve.core"), "Core"):
        time.sleep(0.1)
    core = sys.modules["kvprune.serve.core"].Core
    step = core.step

    def failing(self):
        if os.path.exists(os.path.join(STOPS, str(os.getpid()))):
            raise MemoryError("told to stop")
        return step(self)

    core.step = failing


threading.Thread(target=lie_in_wait, daemon=True).start()
