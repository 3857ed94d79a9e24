"""From token streams to events: the outputs of a call are read, detokenised and sent."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from cluster.core.outcome import FinishReason
from cluster.gateway import mapping
from cluster.gateway.calls import Call
from cluster.metrics.router import StreamMeter
from cluster.router.stream import GenerationRequest, TokenBatch, TokenStream
from cluster.text.detokenize import IncrementalDetokenizer
from cluster.text.pipeline import OutputText, StopRules
from cluster.text.stop import StopStrings
from headway.v1 import inference_pb2

Send: TypeAlias = Callable[[inference_pb2.GenerateEvent], Awaitable[None]]
TURN_TOKENS = 64
"""Tokens that are detokenised before others have their turn; those of a long log may be 100,000."""
TURN_SCORES = 4096
"""Log-probabilities of a message that the event loop makes; larger ones are made in a thread."""


class Output:
    """One choice of a call, from its stream to its Finished. Close it in a `finally`."""

    def __init__(
        self, call: Call, request: GenerationRequest, stream: TokenStream, meter: StreamMeter
    ) -> None:
        """request: with what was delivered before as its emitted ids."""
        self.stream = stream
        self._call = call
        self._request = request
        self._meter = meter
        self._opened_s = time.monotonic()
        self._tokens = 0
        call.timings.append(stream.timing)

    async def catch_up(self, detokenizer: IncrementalDetokenizer) -> OutputText:
        """Where the text of what was delivered before ends; the reader has it."""
        output = OutputText(detokenizer, _rules(self._request))
        delivered = self._request.emitted_ids
        for first in range(0, len(delivered), TURN_TOKENS):
            output.feed(delivered[first : first + TURN_TOKENS])
            await asyncio.sleep(0)
        return output

    async def send_all(self, output: OutputText, send: Send) -> None:
        """The one path of an output, new or resumed: every event goes to `send`, in order.
        output: from catch_up()."""
        request, stream = self._request, self.stream
        reason, matched = await self._pump(output, send)
        timing = stream.timing
        if timing.total_s is None:
            # The source does not see the end when a stop string decides it here.
            timing = dataclasses.replace(timing, total_s=time.monotonic() - self._opened_s)
        stream.end()
        usage = inference_pb2.Usage(
            # The choices share one prompt; it is counted once.
            prompt_tokens=len(request.prompt_ids) if request.choice == 0 else 0,
            completion_tokens=len(request.emitted_ids) + self._tokens,
        )
        self._meter.finished(reason, timing.queue_s)
        await send(mapping.finished_event(reason, matched, usage, timing, request.choice))

    async def _pump(self, output: OutputText, send: Send) -> tuple[FinishReason, str | int | None]:
        """Send Deltas until the output ends: why it did, and what it matched.

        Whatever has queued up since the last write goes out as one message.
        """
        choice = self._request.choice
        while True:
            batch = await self.stream.next()
            piece = output.feed(batch.token_ids)
            text, matched = piece.text, piece.matched
            reason = batch.finish if matched is None else FinishReason.STOP
            if reason is not None and matched is None:
                rest = output.finish()
                text, matched = text + rest.text, rest.matched
                if matched is not None:
                    reason = FinishReason.STOP
            if piece.accepted or text:
                self._tokens += piece.accepted
                self._call.output_tokens += piece.accepted
                if piece.accepted:
                    self._meter.tokens(piece.accepted, time.monotonic())
                await send(await _delta(batch, piece.accepted, text, choice))
            if reason is not None:
                return reason, matched

    def close(self) -> None:
        """The call is over, however it ended."""
        self._meter.over(time.monotonic())
        self.stream.leave()


async def send_outputs(
    outputs: Sequence[Output], detokenizer: Callable[[], IncrementalDetokenizer], send: Send
) -> None:
    """Every output to its end, side by side, their events in the order in which they come about.
    The first that fails ends all of them, with its error."""
    # One after the other: a call gets one share of the loop, however many outputs it has.
    texts = [await output.catch_up(detokenizer()) for output in outputs]
    if len(outputs) == 1:
        await outputs[0].send_all(texts[0], send)
        return
    turn = asyncio.Lock()

    async def in_turn(event: inference_pb2.GenerateEvent) -> None:
        # gRPC takes one message of a call at a time. The lock lets in whoever came first, and who
        # waits for it reads no further: what comes meanwhile stays in its log.
        async with turn:
            await send(event)

    tasks = [
        asyncio.create_task(output.send_all(text, in_turn))
        for output, text in zip(outputs, texts, strict=True)
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _delta(
    batch: TokenBatch, accepted: int, text: str, choice: int
) -> inference_pb2.GenerateEvent:
    scores = sum(1 + len(score.top) for score in batch.prompt_logprobs)
    if scores <= TURN_SCORES:
        return mapping.delta_event(batch, accepted, text, choice)
    return await asyncio.to_thread(mapping.delta_event, batch, accepted, text, choice)


def _rules(request: GenerationRequest) -> StopRules:
    sampling = request.sampling
    return StopRules(
        StopStrings(request.stop), frozenset(sampling.stop_token_ids), sampling.min_tokens
    )
