"""The Inference service: validate, tokenise, open a stream, pass on what comes, close it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import grpc.aio

from cluster.core.errors import Unavailable
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import FinishReason, Refusal
from cluster.gateway import mapping
from cluster.gateway.calls import Call, observed
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
        call = Call("Generate")
        work = self._generate(call, request, caller_of(context), context.write)
        await answer(context, observed(call, self._meter, work))

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        call = Call("Resume")
        work = self._resume(call, request, context.write)
        await answer(context, observed(call, self._meter, work))

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

        call = Call("Complete")
        await observed(call, self._meter, self._generate(call, request, caller, collect))
        response.text = "".join(texts)
        return response

    async def _generate(
        self, call: Call, request: inference_pb2.GenerateRequest, caller: str, send: Send
    ) -> None:
        prepared = await self._prepare(call, request, caller)
        stream = await self._source.open(prepared.request)
        meter = self._meter.stream(call.arrived_s, len(prepared.request.prompt_ids))
        await self._read(call, prepared, stream, send, meter)

    async def _resume(self, call: Call, request: inference_pb2.ResumeRequest, send: Send) -> None:
        model = self._model("")
        resumed = await self._source.resume(request.resume_token, request.next_index)
        meter = self._meter.resumed(call.arrived_s)
        await self._read(call, _Prepared(model, resumed.request), resumed.stream, send, meter)

    async def _read(
        self,
        call: Call,
        prepared: _Prepared,
        stream: TokenStream,
        send: Send,
        meter: StreamMeter,
    ) -> None:
        """The one path of an output, new or resumed: every event goes to `send`, in order."""
        opened = time.monotonic()
        request = prepared.request
        call.prompt_tokens, call.timing = len(request.prompt_ids), stream.timing
        try:
            await send(mapping.accepted_event(request, prepared.model, stream.resume_token))
            output = OutputText(self._tokenizer.detokenizer(), _rules(request))
            # What was delivered before: the reader has its text.
            output.feed(request.emitted_ids)
            reason, matched = await _pump(call, stream, output, send, meter)
            timing = stream.timing
            if timing.total_s is None:
                # The source does not see the end when a stop string decides it here.
                timing = dataclasses.replace(timing, total_s=time.monotonic() - opened)
            stream.end()
            usage = inference_pb2.Usage(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(request.emitted_ids) + call.output_tokens,
            )
            meter.finished(reason, timing.queue_s)
            await send(mapping.finished_event(reason, matched, usage, timing))
        finally:
            meter.over(time.monotonic())
            stream.leave()

    async def _prepare(
        self, call: Call, request: inference_pb2.GenerateRequest, caller: str
    ) -> _Prepared:
        """Cheap checks first; tokenising is the expensive one. caller: see caller_of()."""
        model = self._model(request.model)
        prompt = mapping.prompt_of(request)
        sampling = mapping.sampling_of(request.sampling, model, self._text)
        delivery = mapping.delivery_of(request, model)
        prompt_ids = await self._encoder.encode(prompt)
        params = mapping.fit(sampling, prompt, prompt_ids, model)
        mapping.check_emitted(delivery.emitted_ids, params)
        accepted = GenerationRequest(
            call.request_id,
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
    call: Call, stream: TokenStream, output: OutputText, send: Send, meter: StreamMeter
) -> tuple[FinishReason, str | int | None]:
    """Send Deltas until the output ends: why it did, and what it matched.

    Whatever has queued up since the last write goes out as one message.
    """
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
            call.output_tokens += piece.accepted
            if piece.accepted:
                meter.tokens(piece.accepted, time.monotonic())
            await send(mapping.delta_event(batch, piece.accepted, text))
        if reason is not None:
            return reason, matched
