"""The text of a single token, for log-probabilities and reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: itself where it is printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = _byte_letters()


class TokenTexts:
    """Texts of tokens as they stand within a text, found once each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        # some tokenizers drop the space before the first word: decode each token after another one
        self._before: list[int] = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
        self._lead = self._decode(self._before)
        self.text = lru_cache(maxsize=2**16)(self._text)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens)

    def _text(self, token: int) -> str:
        both = self._decode([*self._before, token])
        return both[len(self._lead) :] if both.startswith(self._lead) else self._decode([token])

    def bytes(self, token: int) -> bytes:
        """The token's bytes, also where they are no whole character."""
        text: str = self.text(token)
        if BROKEN not in text:
            return text.encode("utf-8", "replace")
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(found[1], 16)])
        if all(letter in LETTERS for letter in piece):
            return bytes(LETTERS[letter] for letter in piece)
        return text.encode("utf-8")

    def label(self, token: int) -> str:
        r"""As OpenAI names it in lists: its text, or bytes:\xe2\x80 where it is no whole character.

        Tokens that are halves of characters would all be one � otherwise.
        """
        text: str = self.text(token)
        if BROKEN not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))
