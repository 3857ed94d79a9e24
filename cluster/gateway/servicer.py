"""The Inference service: validate, tokenise, open a stream, pass on what comes, close it."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import grpc.aio

from cluster.core.errors import Overloaded, Unavailable
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import FinishReason, Refusal
from cluster.gateway import mapping
from cluster.gateway.config import Limits
from cluster.gateway.encoding import EncodePool
from cluster.gateway.interceptors import caller_of
from cluster.gateway.status import answer
from cluster.metrics.router import RouterMeter, StreamMeter
from cluster.router.stream import GenerationRequest, TokenSource, TokenStream
from cluster.text.pipeline import OutputText, StopRules
from cluster.text.stop import StopStrings
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2, inference_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Send: TypeAlias = Callable[[inference_pb2.GenerateEvent], Awaitable[None]]


class _Prepared(NamedTuple):
    """A request that passed every check the front door can make."""

    model: ModelInfo
    request: GenerationRequest


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves requests from a TokenSource. Generate and Complete are one path with two readers."""

    def __init__(
        self,
        source: TokenSource,
        tokenizer: Tokenizer,
        encoder: EncodePool,
        limits: Limits,
        meter: RouterMeter,
    ) -> None:
        """Raises ModelError when the model's default sampling is out of range."""
        mapping.check_defaults(tokenizer.defaults, tokenizer.folder)
        self._source = source
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._limits = limits
        self._meter = meter
        self._text = mapping.ModelText(
            tokenizer.eos_token_ids, tokenizer.defaults, tokenizer.has_chat_template
        )

    # The handlers are coroutines that write, not generators that yield: a cancelled generator
    # would run its `finally` whenever it is collected, a cancelled coroutine runs it at once.

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        work = self._generate(request, caller_of(context), context.write)
        await answer(context, self._counting_refusals(work))

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        await answer(context, self._counting_refusals(self._resume(request, context.write)))

    async def Forget(
        self, request: inference_pb2.ForgetRequest, context: Context
    ) -> inference_pb2.ForgetResponse:
        self._source.forget(request.resume_token)
        return inference_pb2.ForgetResponse()

    async def Complete(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        return await answer(context, self._complete(request, caller_of(context)))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        return await answer(context, self._tokenize(request))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return await answer(context, self._get_model(request))

    async def _complete(
        self, request: inference_pb2.GenerateRequest, caller: str
    ) -> inference_pb2.CompleteResponse:
        response = inference_pb2.CompleteResponse()
        texts: list[str] = []

        async def collect(event: inference_pb2.GenerateEvent) -> None:
            if event.HasField("delta"):
                response.token_ids.extend(event.delta.token_ids)
                texts.append(event.delta.text)
                response.logprobs.extend(event.delta.logprobs)
                response.prompt_logprobs.extend(event.delta.prompt_logprobs)
            elif event.HasField("accepted"):
                response.accepted.CopyFrom(event.accepted)
            else:
                response.finished.CopyFrom(event.finished)

        await self._counting_refusals(self._generate(request, caller, collect))
        response.text = "".join(texts)
        return response

    async def _generate(
        self, request: inference_pb2.GenerateRequest, caller: str, send: Send
    ) -> None:
        arrived_s = time.monotonic()
        prepared = await self._prepare(request, caller)
        stream = await self._source.open(prepared.request)
        meter = self._meter.stream(arrived_s, len(prepared.request.prompt_ids))
        await self._read(prepared, stream, send, meter)

    async def _resume(self, request: inference_pb2.ResumeRequest, send: Send) -> None:
        arrived_s, model = time.monotonic(), self._model("")
        resumed = await self._source.resume(request.resume_token, request.next_index)
        meter = self._meter.resumed(arrived_s)
        await self._read(_Prepared(model, resumed.request), resumed.stream, send, meter)

    async def _counting_refusals(self, work: Awaitable[None]) -> None:
        try:
            await work
        except (Overloaded, Unavailable) as error:
            self._meter.refused(error.reason)
            raise

    async def _read(
        self, prepared: _Prepared, stream: TokenStream, send: Send, meter: StreamMeter
    ) -> None:
        """The one path of an output, new or resumed: every event goes to `send`, in order."""
        opened = time.monotonic()
        request = prepared.request
        try:
            await send(mapping.accepted_event(request, prepared.model, stream.resume_token))
            output = OutputText(self._tokenizer.detokenizer(), _rules(request))
            # What was delivered before: the reader has its text.
            output.feed(request.emitted_ids)
            reason, matched, sent = await _pump(stream, output, send, meter)
            timing = stream.timing
            if timing.total_s is None:
                # The source does not see the end when a stop string decides it here.
                timing = dataclasses.replace(timing, total_s=time.monotonic() - opened)
            stream.end()
            usage = inference_pb2.Usage(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(request.emitted_ids) + sent,
            )
            meter.finished(reason, timing.queue_s)
            await send(mapping.finished_event(reason, matched, usage, timing))
        finally:
            meter.over(time.monotonic())
            stream.leave()

    async def _prepare(self, request: inference_pb2.GenerateRequest, caller: str) -> _Prepared:
        """Cheap checks first; tokenising is the expensive one. caller: see caller_of()."""
        model = self._model(request.model)
        prompt = mapping.prompt_of(request)
        sampling = mapping.sampling_of(request.sampling, model, self._text)
        delivery = mapping.delivery_of(request, model)
        prompt_ids = await self._encoder.encode(prompt)
        params = mapping.fit(sampling, prompt, prompt_ids, model)
        mapping.check_emitted(delivery.emitted_ids, params)
        accepted = GenerationRequest(
            uuid.uuid4().hex,
            tuple(prompt_ids),
            params,
            tenant=f"{caller}/{delivery.tenant}" if caller else delivery.tenant,
            priority=delivery.priority,
            session=delivery.session,
            ttft_objective_s=delivery.ttft_objective_s,
            stop=sampling.stop,
            resume_window_s=delivery.resume_window_s,
            emitted_ids=delivery.emitted_ids,
        )
        return _Prepared(model, accepted)

    async def _tokenize(
        self, request: inference_pb2.TokenizeRequest
    ) -> inference_pb2.TokenizeResponse:
        self._model(request.model)
        token_ids = await self._encoder.encode(mapping.prompt_of(request))
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def _get_model(
        self, request: inference_pb2.GetModelRequest
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(
            model=mapping.model_message(self._model(request.model), self._text),
            default_sampling=mapping.default_sampling_message(self._text.defaults),
            max_message_bytes=self._limits.max_message_bytes,
        )

    def _model(self, name: str) -> ModelInfo:
        """The served model. Raises Unavailable before there is one, UnknownModel for another."""
        model = self._source.model
        if model is None:
            raise Unavailable("no engine has connected yet", Refusal.NO_ENGINE)
        mapping.check_model(name, model)
        return model


def _rules(request: GenerationRequest) -> StopRules:
    sampling = request.sampling
    return StopRules(
        StopStrings(request.stop), frozenset(sampling.stop_token_ids), sampling.min_tokens
    )


async def _pump(
    stream: TokenStream, output: OutputText, send: Send, meter: StreamMeter
) -> tuple[FinishReason, str | int | None, int]:
    """Send Deltas until the output ends: why it did, what it matched, how many ids were sent.

    Whatever has queued up since the last write goes out as one message.
    """
    sent = 0
    while True:
        batch = await stream.next()
        piece = output.feed(batch.token_ids)
        text, matched = piece.text, piece.matched
        reason = batch.finish if matched is None else FinishReason.STOP
        if reason is not None and matched is None:
            rest = output.finish()
            text, matched = text + rest.text, rest.matched
            if matched is not None:
                reason = FinishReason.STOP
        if piece.accepted or text:
            sent += piece.accepted
            if piece.accepted:
                meter.tokens(piece.accepted, time.monotonic())
            await send(mapping.delta_event(batch, piece.accepted, text))
        if reason is not None:
            return reason, matched, sent
