"""What a client must remember of a stream to go on with it after its call was lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.errors import HeadwayRpcError, RetryableError
from headway.types import Accepted, Delta, Event, Finished
from headway.v1 import inference_pb2

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
UNKNOWN_TOKEN = "UNKNOWN_RESUME_TOKEN"
OVERLOADED = "OVERLOADED"


class Progress:
    """Of one request with a resume window. A loss is forgiven if the stream goes on within the
    window; after that the error stands."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._clock = clock
        self.token = ""
        """Of the stream, once it is accepted; "" when it is not kept any more."""
        self._seed: int | None = None
        self._ids: dict[int, list[int]] = {e.choice: list(e.token_ids) for e in request.emitted}
        """The ids so far of each choice that is not finished; of all once the stream is accepted,
        for nobody has looked at n before."""
        self._tokens = 0
        self._done = False
        self._lost_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    @property
    def finished(self) -> bool:
        return self._done

    def take(self, event: Event) -> Event | None:
        """Note an event of a call; the event for the caller, None if it has it already."""
        if isinstance(event, Accepted):
            first = self._seed is None
            if first and not self._ids:
                n = self._request.sampling.n if self._request.sampling.HasField("n") else 1
                self._ids = {choice: [] for choice in range(n)}
            self.token, self._seed = event.resume_token, event.seed
            return event if first else None
        # An Accepted alone is no progress: the next loss may come before any token.
        self._lost_s = None
        self._pause_s = FIRST_PAUSE_S
        if isinstance(event, Delta):
            self._ids[event.choice] += event.token_ids
            self._tokens += len(event.token_ids)
        elif isinstance(event, Finished):
            del self._ids[event.choice]
            self._done = not self._ids
        return event

    def pause_s(self, error: HeadwayRpcError) -> float:
        """Seconds to wait before the next call. Raises `error` if there is to be none."""
        if error.reason == UNKNOWN_TOKEN and self._seed is not None:
            # Nobody has the log, but here are all of its parts.
            self.token = ""
        elif not isinstance(error, RetryableError) or self.finished:
            raise error
        elif error.reason == OVERLOADED and self._seed is None:
            # A refusal, not a loss: whoever sent the request decides whether to come again.
            raise error
        now = self._clock()
        if self._lost_s is None:
            self._lost_s = now
        if now - self._lost_s > self._request.resume_window_s:
            raise self._given_up(error) from error
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        asked_for = error.retry_after_s if isinstance(error, RetryableError) else None
        return max(pause, asked_for or 0.0) if error.reason == OVERLOADED else pause

    def _given_up(self, error: HeadwayRpcError) -> HeadwayRpcError:
        """`error`, the last of many, and that a stream had begun: the last alone may only say that
        nobody answers."""
        if self._seed is None or not isinstance(error, RetryableError):
            return error
        message = (
            f"the stream was lost after {self._tokens} tokens and did not go on within "
            f"{self._request.resume_window_s:g} s: {error}"
        )
        return RetryableError(error.code, message, error.reason, error.retry_after_s)

    def next_request(self) -> inference_pb2.ResumeRequest | inference_pb2.GenerateRequest:
        """Of the next call, the first included: resume by token; without one the request itself,
        with what it has given so far."""
        if self.token:
            return inference_pb2.ResumeRequest(
                resume_token=self.token,
                positions=[
                    inference_pb2.Position(choice=choice, next_index=len(ids))
                    for choice, ids in self._ids.items()
                ],
            )
        again = inference_pb2.GenerateRequest()
        again.CopyFrom(self._request)
        if self._seed is not None:
            again.sampling.seed = self._seed
            del again.emitted[:]
            again.emitted.extend(
                inference_pb2.Emitted(choice=choice, token_ids=ids)
                for choice, ids in self._ids.items()
            )
        return again
