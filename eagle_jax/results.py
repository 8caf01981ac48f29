"""What generation gives back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowResult:
    """One answer.

    Attributes:
      tokens: emitted ids, the end token included.
      finish_reason: "stop" after an end token, "length" otherwise.
      rounds: verifications (plain decoding: target passes after the prefill).
      accepted_per_position: per draft position, rounds whose draft token was emitted.
      cut_per_position: per draft position, rounds whose draft token was accepted but lies behind the answer's end.
    """

    tokens: list[int]
    finish_reason: str
    rounds: int
    accepted_per_position: list[int]
    cut_per_position: list[int]


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """Answers in the order of the prompts, and the wall time of the device programs, compilation excluded."""

    rows: list[RowResult]
    seconds: float

    @property
    def output_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def rounds(self) -> int:
        return sum(row.rounds for row in self.rows)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per round, the target's own included; the prefill's token belongs to no round."""
        in_rounds = sum(max(len(row.tokens) - 1, 0) for row in self.rows)
        return in_rounds / self.rounds if self.rounds else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        columns = zip(*(row.accepted_per_position for row in self.rows), strict=True)
        return [sum(column) / self.rounds if self.rounds else 0.0 for column in columns]

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0
