"""What a client may ask for at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Limits:
    """The most that one request may take; beyond it the answer is an error that says so."""

    body_bytes: Annotated[int, "of a request's body"] = 8 * 2**20
    body_seconds: Annotated[float, "to send the body"] = 30.0
    depth: Annotated[int, "of nested JSON"] = 32
    prompts: Annotated[int, "in one request"] = 256
    choices: Annotated[int, "n, the answers to one prompt"] = 64
    rows: Annotated[int, "prompts × n of one request"] = 512
    messages: Annotated[int, "of one chat"] = 4096
    logprobs: Annotated[int, "alternatives for each token"] = 20
    stops: Annotated[int, "stop strings"] = 16
    stop_length: Annotated[int, "characters of a stop string"] = 1024
    biases: Annotated[int, "entries of logit_bias"] = 1024
    seconds: Annotated[float, "from a request's arrival to the end of its answer"] = 1800.0
    unsent: Annotated[int, "events that wait for a client that reads slowly"] = 4096
    send_seconds: Annotated[float, "that a client may refuse to take anything"] = 60.0
    ping_seconds: Annotated[float, "between signs of life on a silent stream"] = 5.0
    viewers: Annotated[int, "streams of the live view"] = 16
    view_seconds: Annotated[float, "of a live view of several replicas"] = 10.0
