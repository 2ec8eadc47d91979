"""Triton's interpreter and its compiler exclude each other in one process.

`interpreted` is collected only where TRITON_INTERPRET=1 is set, `compiled` only where it is not;
test_interpreted.py runs the first in child processes.
"""

from importlib.util import find_spec

from kvprune.ops.dispatch import interpreted

collect_ignore = ["compiled" if interpreted() else "interpreted"]
if not find_spec("triton"):
    # there is no Triton for this system; test_interpreted.py is skipped, and says so
    collect_ignore = ["compiled", "interpreted"]
elif interpreted():
    # Triton's interpreter rounds a fused product and sum twice before 3.9, a GPU once
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma
