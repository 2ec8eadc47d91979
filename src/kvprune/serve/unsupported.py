"""Parameters of OpenAI and other servers that would change an answer, and that this one lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvprune.serve.request import RequestError

# by name: the values that ask for nothing. None, [], {} and "" always do
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM, llama.cpp
    "allowed_token_ids": (),
    "bad_words": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "documents": (),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def refuse_unsupported(fields: Mapping[str, Any] | None) -> None:
    """Refuse what would change the answer; what nobody knows is ignored."""
    for name, value in (fields or {}).items():
        if name not in WITHOUT_EFFECT or value in (None, [], {}, "", *WITHOUT_EFFECT[name]):
            continue
        raise RequestError(
            f"{name} is not supported by this server; leave it out",
            code="unsupported_parameter",
            param=name,
        )
