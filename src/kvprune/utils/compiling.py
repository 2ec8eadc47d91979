"""Whether torch.compile works on this machine."""

from __future__ import annotations


def why_not(device: str) -> str:
    """Why models on this type of device cannot be compiled here; empty if they can."""
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception:  # of torch's own kind, and its search may fail in other ways
            return "there is no C++ compiler; install g++, or set CXX to one"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else f"Triton does not work with {device} here"
