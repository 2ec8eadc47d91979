"""kvprune serve --replicas as a process of its own, and what is left of it afterwards: nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from http_server import until
from prometheus_client.parser import text_string_to_metric_families

from kvprune.serve.sockets import bind

KEY = "a-key"
INJECT = Path(__file__).parent / "inject"
START_SECONDS, REPLACE_SECONDS, STOP_SECONDS = 240, 120, 60


class Deployment:
    """Its address, its processes, and a client that has the key."""

    def __init__(self, url, process, stops):
        self.url, self.process, self.stops = url, process, stops
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=200)
        self.client = httpx.Client(base_url=url, headers=headers, timeout=120, limits=limits)

    def replicas(self):
        """Process id by name, of those that are well."""
        found = self.client.get("/health").json()["replicas"]
        return {one["replica"]: one["pid"] for one in found if one["alive"]}

    def until_two(self, without=()):
        """Wait until two replicas are well, none of them one of these; their process ids."""
        found = {}

        def two():
            found.clear()
            found.update(self.replicas())
            return len(found) == 2 and not set(found) & set(without)

        until(two, REPLACE_SECONDS)
        return dict(found)

    def stop_engine(self, pid):
        """At its next step."""
        (self.stops / str(pid)).touch()

    def rows(self):
        return self.client.get("/v1/requests").json()["data"]

    def sample(self, name, **labels):
        """The sum over all replicas."""
        text = self.client.get("/metrics").text
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"kvprune:{name}" and labels.items() <= sample.labels.items()
        )

    def ask(self, prompt, tokens=8, **body):
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **body,
        }
        return self.client.post("/v1/completions", json=body)


@contextmanager
def deployed(tmp_path, *options):
    """Started as a user would; every process that it ever had is gone at the end."""
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    bound.close()
    stderr = tmp_path / "stderr"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
    paths = [str(INJECT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "KVPRUNE_API_KEY": KEY, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths),
        "KVPRUNE_TEST_STOPS": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "kvprune", "serve", "tiny", "--port", str(port), *options]
    with stderr.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
    family, stop = set(), threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, family, stop), name="watch")
    watch.start()
    try:
        until(
            lambda: "API  http" in stderr.read_text() or process.poll() is not None, START_SECONDS
        )
        assert process.poll() is None, stderr.read_text()
        yield Deployment(f"http://127.0.0.1:{port}", process, tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0, stderr.read_text()
        stop.set()
        until(lambda: not _alive(family), 30)
    finally:
        if process.poll() is None:  # a step has failed; Ray removes its own files if it is asked to
            process.terminate()
            psutil.wait_procs([psutil.Process(process.pid)], timeout=30)
        stop.set()
        watch.join()
        left = _alive(family)
        for pid, _ in left:
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
    assert not left
    assert not (tmp_path / ".ray").exists()  # nothing of Ray's in the user's home


def _watch(root, family, stop):
    """Collect the descendants of a process, also those that outlive their parents."""
    while not stop.wait(0.2):
        found = {one.info["pid"]: one.info for one in _processes()}
        known = {root} | {
            pid for pid, born in family if found.get(pid, {}).get("create_time") == born
        }
        more = known
        while more:
            more = {pid for pid, one in found.items() if one["ppid"] in known} - known
            known |= more
        family |= {(pid, found[pid]["create_time"]) for pid in known if pid in found}


def _alive(family):
    living = [one.info for one in _processes() if one.info["status"] != psutil.STATUS_ZOMBIE]
    return {(one["pid"], one["create_time"]) for one in living} & family


def _processes():
    return psutil.process_iter(["pid", "ppid", "create_time", "status"])


class Stream(threading.Thread):
    """Reads a stream to its end, however it ends."""

    def __init__(self, deployment, prompt, tokens):
        super().__init__(name="stream")
        self.deployment = deployment
        self.body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        self.events, self.broken, self.begun = [], False, threading.Event()
        self.start()

    def run(self):
        client = self.deployment.client
        with client.stream("POST", "/v1/completions", json=self.body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    self.events.append(data if data == "[DONE]" else json.loads(data))
                    self.begun.set()

    @property
    def replica(self):
        return self.events[0]["id"].split("-")[1]
