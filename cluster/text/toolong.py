"""What the text side says of a prompt that is longer than anybody can use."""

from __future__ import annotations


class TooManyTokens(Exception):
    """A text has more tokens than are wanted. count: how many, or how many at the least."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count
