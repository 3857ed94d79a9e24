"""Between what a caller sees (`headway.types`) and what goes over the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headway.errors import FieldViolation, InvalidRequest
from headway.types import (
    MAX_TIMEOUT_S,
    Accepted,
    Choice,
    Completion,
    Delivery,
    Delta,
    Engine,
    Event,
    Finished,
    Message,
    Model,
    Prompt,
    Router,
    Sampling,
    Status,
    Tail,
    TokenLogprob,
)
from headway.v1 import admin_pb2, inference_pb2


def generate_request(
    prompt: Prompt, sampling: Sampling | None, model: str, delivery: Delivery | None = None
) -> inference_pb2.GenerateRequest:
    """The wire message. Raises InvalidRequest for what no message can hold."""
    fields = sampling or Sampling()
    wishes = delivery or Delivery()
    _check_lists(fields)
    try:
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=inference_pb2.SamplingParams(
                max_tokens=fields.max_tokens,
                min_tokens=fields.min_tokens,
                temperature=fields.temperature,
                top_k=fields.top_k,
                top_p=fields.top_p,
                min_p=fields.min_p,
                seed=fields.seed,
                stop=fields.stop,
                stop_token_ids=fields.stop_token_ids,
                repetition_penalty=fields.repetition_penalty,
                presence_penalty=fields.presence_penalty,
                frequency_penalty=fields.frequency_penalty,
                logit_bias=fields.logit_bias,
                allowed_token_ids=fields.allowed_token_ids,
                logprobs=fields.logprobs,
                prompt_logprobs=fields.prompt_logprobs,
                n=fields.n,
            ),
            tenant=wishes.tenant,
            priority=wishes.priority,
            session=wishes.session,
            ttft_objective_s=wishes.ttft_objective_s,
            resume_window_s=wishes.resume_window_s,
        )
        if fields.ignore_eos is not None:
            request.sampling.ignore_eos = fields.ignore_eos
        _set_input(request, prompt)
    except (ValueError, TypeError) as error:
        raise _unfit(error) from error
    return request


def resume_request(
    resume_token: str, next_index: int | Mapping[int, int]
) -> inference_pb2.ResumeRequest:
    """The wire message. Raises InvalidRequest for what no message can hold."""
    indexes = next_index if isinstance(next_index, Mapping) else {0: next_index}
    try:
        return inference_pb2.ResumeRequest(
            resume_token=resume_token,
            positions=[
                inference_pb2.Position(choice=choice, next_index=index)
                for choice, index in indexes.items()
            ],
        )
    except (ValueError, TypeError) as error:
        raise _unfit(error) from error


def tokenize_request(prompt: str | Sequence[Message], model: str) -> inference_pb2.TokenizeRequest:
    """The wire message. Raises InvalidRequest for what no message can hold."""
    request = inference_pb2.TokenizeRequest(model=model)
    try:
        _set_input(request, prompt)
    except (ValueError, TypeError) as error:
        raise _unfit(error) from error
    return request


def _set_input(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt
) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    if isinstance(prompt, bytes | bytearray | memoryview):
        kind = type(prompt).__name__
        raise _invalid("prompt", f"must be a str, token ids or Messages, got {kind}; decode it")
    messages = [item for item in prompt if isinstance(item, Message)]
    if messages:
        if len(messages) != len(prompt):
            raise TypeError("a prompt is all messages or all token ids")
        _check_turns(messages)
        turns = [inference_pb2.ChatMessage(role=m.role, content=m.content) for m in messages]
        request.chat.messages.extend(turns)
    elif isinstance(request, inference_pb2.GenerateRequest):
        ids = [item for item in prompt if not isinstance(item, Message)]
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=ids))
    else:
        raise TypeError("only a text or messages can be tokenised")


def check_timeout(timeout_s: float | None) -> None:
    """Raises InvalidRequest unless a call can have this deadline."""
    try:
        fits = timeout_s is None or 0.0 <= timeout_s <= MAX_TIMEOUT_S
    except TypeError:
        fits = False
    if not fits:
        problem = f"must be 0 to {MAX_TIMEOUT_S:.0f} s, or None for no deadline, got {timeout_s!r}"
        raise _invalid("timeout_s", problem)


def _check_lists(sampling: Sampling) -> None:
    """A str is a sequence of str and bytes are one of int: protobuf would take them apart."""
    if isinstance(sampling.stop, str | bytes):
        problem = f"must be a tuple of strings, got {sampling.stop!r}; write ({sampling.stop!r},)"
        raise _invalid("sampling.stop", problem)
    for name in ("stop_token_ids", "allowed_token_ids"):
        value = getattr(sampling, name)
        if isinstance(value, str | bytes):
            raise _invalid(f"sampling.{name}", f"must be a tuple of token ids, got {value!r}")


def _check_turns(messages: Sequence[Message]) -> None:
    """protobuf takes None for a field left out, which would be an empty message."""
    for at, message in enumerate(messages):
        for name, value in (("role", message.role), ("content", message.content)):
            if not isinstance(value, str):
                raise _invalid(f"chat.messages[{at}].{name}", f"must be a str, got {value!r:.80}")


def _invalid(field: str, problem: str) -> InvalidRequest:
    violation = FieldViolation(field, problem)
    return InvalidRequest(f"{field} {problem}", "INVALID_REQUEST", (violation,))


def _unfit(error: Exception) -> InvalidRequest:
    violation = FieldViolation("request", str(error))
    return InvalidRequest(f"the request cannot be sent: {error}", "INVALID_REQUEST", (violation,))


def event_of(message: inference_pb2.GenerateEvent) -> Event | None:
    """The typed event; None for a kind that a newer server may send."""
    kind = message.WhichOneof("event")
    if kind == "accepted":
        return accepted_of(message.accepted)
    if kind == "delta":
        delta = message.delta
        return Delta(
            delta.first_index,
            tuple(delta.token_ids),
            delta.text,
            delta.emit_time_unix_us / 1e6,
            _scores_of(delta.logprobs),
            _scores_of(delta.prompt_logprobs),
            delta.choice,
        )
    if kind == "finished":
        return finished_of(message.finished)
    return None


def _scores_of(entries: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(e.token_id, e.logprob, tuple((t.token_id, t.logprob) for t in e.top))
        for e in entries
    )


def accepted_of(message: inference_pb2.Accepted) -> Accepted:
    return Accepted(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        seed=message.seed,
        max_tokens=message.max_tokens,
        resume_token=message.resume_token,
    )


def finished_of(message: inference_pb2.Finished) -> Finished:
    kind, timing = message.WhichOneof("matched_stop"), message.timing
    matched: str | int | None = None
    if kind == "stop_string":
        matched = message.stop_string
    elif kind == "stop_token_id":
        matched = message.stop_token_id
    name = inference_pb2.FinishReason.Name(message.reason)
    return Finished(
        reason=name.removeprefix("FINISH_REASON_").lower(),
        matched_stop=matched,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        queue_s=timing.queue_s if timing.HasField("queue_s") else None,
        first_token_s=timing.first_token_s if timing.HasField("first_token_s") else None,
        total_s=timing.total_s if timing.HasField("total_s") else None,
        preemptions=timing.preemptions,
        replays=timing.replays,
        engine_ids=tuple(timing.engine_ids),
        recomputed_tokens=timing.recomputed_tokens,
        choice=message.choice,
    )


def completion_of(message: inference_pb2.CompleteResponse) -> Completion:
    return Completion(
        accepted=accepted_of(message.accepted),
        choices=tuple(
            Choice(
                tuple(choice.token_ids),
                choice.text,
                finished_of(choice.finished),
                _scores_of(choice.logprobs),
            )
            for choice in message.choices
        ),
        prompt_logprobs=_scores_of(message.prompt_logprobs),
    )


def model_of(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        architecture=message.architecture,
        fingerprint=message.fingerprint,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
    )


def status_of(message: admin_pb2.GetStatusResponse) -> Status:
    return Status(
        version=message.router.version,
        uptime_s=message.router.uptime_s,
        active_streams=message.router.active_streams,
        ready=message.router.ready,
        model=model_of(message.model) if message.HasField("model") else None,
        engines=tuple(_engine_of(engine) for engine in message.engines),
        queued=message.router.queued,
        queued_tokens=message.router.queued_tokens,
        relief_moves=message.router.relief_moves,
        routers=tuple(_router_of(router) for router in (message.router, *message.peers)),
    )


def _router_of(message: admin_pb2.RouterStatus) -> Router:
    return Router(
        router_id=message.router_id,
        version=message.version,
        uptime_s=message.uptime_s,
        active_streams=message.active_streams,
        ready=message.ready,
        queued=message.queued,
        queued_tokens=message.queued_tokens,
        relief_moves=message.relief_moves,
        metrics=message.metrics,
        tails=tuple(_tail_of(tail) for tail in message.tails),
    )


def _tail_of(message: admin_pb2.Tail) -> Tail:
    return Tail(
        name=message.name,
        observations=message.observations,
        p50_s=message.p50_s if message.HasField("p50_s") else None,
        p99_s=message.p99_s if message.HasField("p99_s") else None,
    )


def _engine_of(message: admin_pb2.EngineStatus) -> Engine:
    return Engine(
        engine_id=message.engine_id,
        address=message.address,
        epoch=message.epoch,
        connected=message.connected,
        blocks_total=message.blocks_total,
        blocks_free=message.blocks_free,
        running=message.running,
        waiting=message.waiting,
        step=message.step,
        tokens_per_s=message.tokens_per_s,
        preemptions=message.preemptions,
        frame_age_s=message.frame_age_s,
        draining=message.draining,
        step_s=message.step_s,
        recomputed_tokens=message.recomputed_tokens,
        metrics=message.metrics,
    )
