"""The Inference service: validate, tokenise, open a stream, pass on what comes, close it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc.aio

from cluster.core.errors import InvalidRequest, Unavailable
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import Refusal
from cluster.gateway import mapping
from cluster.gateway.calls import Call, observed
from cluster.gateway.config import Limits
from cluster.gateway.delivery import delivery_of, outputs_of, positions_of
from cluster.gateway.encoding import EncodePool
from cluster.gateway.interceptors import caller_of
from cluster.gateway.outputs import Output, Send, send_outputs
from cluster.gateway.status import answer
from cluster.metrics.router import RouterMeter
from cluster.router.stream import GenerationRequest, TokenSource
from cluster.text.tokenizer import Tokenizer
from cluster.text.toolong import TooManyTokens
from headway.v1 import inference_pb2, inference_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


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
        choices: dict[int, inference_pb2.Choice] = {}
        texts: defaultdict[int, list[str]] = defaultdict(list)

        async def collect(event: inference_pb2.GenerateEvent) -> None:
            if event.HasField("delta"):
                delta = event.delta
                choice = choices.setdefault(delta.choice, inference_pb2.Choice())
                choice.token_ids.extend(delta.token_ids)
                texts[delta.choice].append(delta.text)
                choice.logprobs.extend(delta.logprobs)
                response.prompt_logprobs.extend(delta.prompt_logprobs)
            elif event.HasField("accepted"):
                response.accepted.CopyFrom(event.accepted)
            else:
                finished = event.finished
                choice = choices.setdefault(finished.choice, inference_pb2.Choice())
                choice.finished.CopyFrom(finished)

        call = Call("Complete")
        await observed(call, self._meter, self._generate(call, request, caller, collect))
        for number in sorted(choices):
            choices[number].text = "".join(texts[number])
            response.choices.append(choices[number])
        return response

    async def _generate(
        self, call: Call, request: inference_pb2.GenerateRequest, caller: str, send: Send
    ) -> None:
        model, requests = await self._prepare(call, request, caller)
        streams = await self._source.open_all(requests)
        # The choices share one prompt, which counts once.
        prompts = [len(requests[0].prompt_ids), *[0] * (len(requests) - 1)]
        outputs = [
            Output(call, one, stream, self._meter.stream(call.arrived_s, prompt_tokens))
            for one, stream, prompt_tokens in zip(requests, streams, prompts, strict=True)
        ]
        await self._send(call, model, requests[0], outputs, send)

    async def _resume(self, call: Call, request: inference_pb2.ResumeRequest, send: Send) -> None:
        model = self._model("")
        positions = positions_of(request)
        resumed = await self._source.resume_all(request.resume_token, positions)
        outputs = [
            Output(call, one.request, one.stream, self._meter.resumed(call.arrived_s))
            for one in resumed
        ]
        await self._send(call, model, resumed[0].request, outputs, send)

    async def _send(
        self,
        call: Call,
        model: ModelInfo,
        request: GenerationRequest,
        outputs: Sequence[Output],
        send: Send,
    ) -> None:
        """request: of any of the outputs."""
        call.prompt_tokens = len(request.prompt_ids)
        try:
            await send(mapping.accepted_event(request, model, outputs[0].stream.resume_token))
            await send_outputs(outputs, self._tokenizer.detokenizer, send)
        finally:
            for output in outputs:
                output.close()

    async def _prepare(
        self, call: Call, request: inference_pb2.GenerateRequest, caller: str
    ) -> tuple[ModelInfo, list[GenerationRequest]]:
        """Every check that the front door can make, cheap ones first; tokenising is the expensive
        one. One request per output that is wanted. caller: see caller_of()."""
        model = self._model(request.model)
        prompt = mapping.prompt_of(request, model)
        sampling = mapping.sampling_of(request.sampling, model, self._text)
        delivery = delivery_of(request, model, sampling.n)
        limit = mapping.sequence_limit(model)
        try:
            prompt_ids = await self._encoder.encode(prompt, limit - 1)
        except TooManyTokens as error:
            raise mapping.too_long(type(prompt), error.count, limit) from error
        accepted = GenerationRequest(
            call.request_id,
            tuple(prompt_ids),
            mapping.fit(sampling, prompt, prompt_ids, model),
            tenant=f"{caller}/{delivery.tenant}" if caller else delivery.tenant,
            priority=delivery.priority,
            session=delivery.session,
            ttft_objective_s=delivery.ttft_objective_s,
            stop=sampling.stop,
            resume_window_s=delivery.resume_window_s,
        )
        return model, outputs_of(accepted, delivery.outputs)

    async def _tokenize(
        self, request: inference_pb2.TokenizeRequest
    ) -> inference_pb2.TokenizeResponse:
        model = self._model(request.model)
        prompt, most = mapping.prompt_of(request, model), mapping.told_ids_limit(model)
        try:
            token_ids = await self._encoder.encode(prompt, most)
        except TooManyTokens as error:
            raise InvalidRequest.single(
                mapping.INPUT_FIELDS[type(prompt)],
                f"has {error.count} tokens, and {most} are told at most; send it in parts",
            ) from error
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
