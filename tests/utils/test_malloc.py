"""Freed memory stays with the process: counted in page faults, each in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

from kvprune.utils.malloc import keep_memory

SCRIPT = """
import resource, sys
import torch
from kvprune.utils.malloc import keep_memory

torch.set_num_threads(1)
print(keep_memory() if sys.argv[1] == "kept" else False)
for _ in range(12):  # the heap finds its size
    torch.ones(16 << 20)  # 64 MB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def faults(side: str, **env: str) -> tuple[str, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT, side]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean | env)
    kept, count = done.stdout.split()
    return kept, int(count)


@glibc
def test_a_new_tensor_reuses_freed_pages():
    (off, many), (on, few) = faults("returned"), faults("kept")
    assert (off, on) == ("False", "True")
    assert many > 8 * 1000  # pages of 4 KB, or larger
    assert few < many / 4


@glibc
@pytest.mark.parametrize(
    "env", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}]
)
def test_the_users_own_settings_are_respected(env):
    kept, count = faults("kept", **env)
    assert kept == "False"
    assert count > 8 * 1000


def test_no_effect_without_glibc(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_memory() is False
