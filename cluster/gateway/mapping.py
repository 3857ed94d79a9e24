"""Between wire messages and the core's types: the only file that knows both.

protobuf lets NaN, infinities, negative numbers and any length through, so every field is checked
here or by the core type that it becomes; violations carry the field's path on the wire.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cluster.core.errors import FieldViolation, InvalidRequest, ModelError
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import DrainOrder, FinishReason
from cluster.core.plan import TokenLogprob
from cluster.core.sampling import (
    MAX_ALLOWED_IDS,
    MAX_BIASED_IDS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    choice_seed,
    choices_violation,
)
from cluster.gateway.parts import id_violations, too_many
from cluster.gateway.status import UnknownModel
from cluster.metrics.board import RouterSummary
from cluster.router.stream import EngineStatus, GenerationRequest, StreamTiming, TokenBatch
from cluster.text.chat import MAX_MESSAGES, ChatMessage
from cluster.text.folder import GenerationDefaults
from cluster.text.stop import MAX_STOP_CHARS, MAX_STOP_STRINGS
from headway.v1 import admin_pb2, inference_pb2

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class TextPrompt(NamedTuple):
    """A raw text, to be encoded as it is."""

    text: str


class ChatPrompt(NamedTuple):
    """A conversation, to be rendered and encoded."""

    messages: tuple[ChatMessage, ...]


class IdsPrompt(NamedTuple):
    """Token ids, not yet checked against the vocabulary."""

    ids: tuple[int, ...]


Prompt: TypeAlias = TextPrompt | ChatPrompt | IdsPrompt

INPUT_FIELDS: dict[type[TextPrompt] | type[ChatPrompt] | type[IdsPrompt], str] = {
    TextPrompt: "text",
    ChatPrompt: "chat",
    IdsPrompt: "token_ids",
}
"""Kind of prompt -> its field on the wire."""


class ModelText(NamedTuple):
    """What the text side adds to ModelInfo: end-of-text ids, defaults, and whether it can chat."""

    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    has_chat_template: bool


MAX_PROMPT_SCORES = 1 << 18
"""They come in one message."""
MAX_TOLD_IDS = 1 << 18
"""So do those of Tokenize."""


class SamplingRequest(NamedTuple):
    """Checked sampling fields, before the prompt's length is known.

    params.max_tokens is the caller's limit, or the largest one possible when it gave none
    (then max_tokens_given is false). n: outputs of the request.
    """

    params: SamplingParams
    stop: tuple[str, ...]
    max_tokens_given: bool
    n: int


# --- in --------------------------------------------------------------------------------------


def check_model(name: str, model: ModelInfo) -> None:
    """Raises UnknownModel unless `name` is empty or the served model's."""
    if name and name != model.name:
        raise UnknownModel(f"model {name[:128]!r} is not served here; {model.name!r} is")


def check_defaults(defaults: GenerationDefaults, folder: Path) -> None:
    """Raises ModelError when the own recommendations of the model in `folder` could never be
    served."""
    try:
        SamplingParams(max_tokens=1, **dataclasses.asdict(defaults))
    except InvalidRequest as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error


def prompt_of(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: ModelInfo
) -> Prompt:
    """The input as it came. Raises InvalidRequest when there is none, or one of too many parts."""
    kind = request.WhichOneof("input")
    prompt: Prompt
    if kind == "text":
        prompt = TextPrompt(request.text)
    elif kind == "chat":
        messages = request.chat.messages
        if wrong := too_many("chat.messages", messages, MAX_MESSAGES, "messages"):
            raise InvalidRequest(wrong)
        prompt = ChatPrompt(tuple(ChatMessage(m.role, m.content) for m in messages))
    elif isinstance(request, inference_pb2.GenerateRequest) and kind == "token_ids":
        ids = request.token_ids.ids
        if len(ids) >= (limit := sequence_limit(model)):
            raise too_long(IdsPrompt, len(ids), limit)
        prompt = IdsPrompt(tuple(ids))
    else:
        raise InvalidRequest.single("input", "text, chat or token_ids must be set")
    if not prompt[0]:
        raise InvalidRequest.single(INPUT_FIELDS[type(prompt)], "must not be empty")
    return prompt


def sampling_of(
    message: inference_pb2.SamplingParams, model: ModelInfo, text: ModelText
) -> SamplingRequest:
    """Check every sampling field and fill in the model's defaults and a seed.

    Raises InvalidRequest with all violations at once, unless a field has too many parts to be
    looked at.
    """
    counted = [
        *too_many("sampling.stop", message.stop, MAX_STOP_STRINGS, "strings"),
        *too_many("sampling.stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids"),
        *too_many("sampling.allowed_token_ids", message.allowed_token_ids, MAX_ALLOWED_IDS, "ids"),
        *too_many("sampling.logit_bias", message.logit_bias, MAX_BIASED_IDS, "ids"),
    ]
    if counted:
        raise InvalidRequest(counted)
    defaults = text.defaults
    violations = [
        *_stop_violations(message.stop),
        *id_violations("sampling.stop_token_ids", message.stop_token_ids, model),
        *id_violations("sampling.allowed_token_ids", message.allowed_token_ids, model),
        *_bias_violations(message.logit_bias, model),
    ]
    n = message.n if message.HasField("n") else 1
    if (wrong := choices_violation(n)) is not None:
        violations.append(wrong)
    stop_ids = set(message.stop_token_ids)
    if not message.ignore_eos:
        stop_ids.update(text.eos_token_ids)
    seed = message.seed if message.HasField("seed") else int.from_bytes(os.urandom(8), "big")
    given = message.HasField("max_tokens")
    try:
        params = SamplingParams(
            max_tokens=message.max_tokens if given else sequence_limit(model),
            temperature=(
                message.temperature if message.HasField("temperature") else defaults.temperature
            ),
            top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
            top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
            min_p=message.min_p if message.HasField("min_p") else defaults.min_p,
            seed=seed,
            min_tokens=message.min_tokens,
            stop_token_ids=tuple(sorted(stop_ids)),
            repetition_penalty=(
                message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
            ),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            allowed_token_ids=tuple(message.allowed_token_ids),
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=(
                message.prompt_logprobs if message.HasField("prompt_logprobs") else None
            ),
        )
    except InvalidRequest as error:
        raise InvalidRequest([*_first_causes(error.violations), *violations]) from error
    if violations:
        raise InvalidRequest(violations)
    return SamplingRequest(params, tuple(dict.fromkeys(message.stop)), given, n)


def fit(
    sampling: SamplingRequest, prompt: Prompt, prompt_ids: Sequence[int], model: ModelInfo
) -> SamplingParams:
    """Check the prompt's ids and length and settle max_tokens. Raises InvalidRequest."""
    field, length, limit = INPUT_FIELDS[type(prompt)], len(prompt_ids), sequence_limit(model)
    if not prompt_ids:
        raise InvalidRequest.single(field, "has no tokens")
    _check_ids(field, prompt_ids, model)
    if length >= limit:
        raise too_long(type(prompt), length, limit)
    params, left = sampling.params, limit - length
    scored = length * (1 + params.prompt_logprobs) if params.prompt_logprobs is not None else 0
    if scored > MAX_PROMPT_SCORES:
        raise InvalidRequest.single(
            "sampling.prompt_logprobs",
            f"{length} prompt tokens with {params.prompt_logprobs} alternatives each are {scored} "
            f"log-probabilities, at most {MAX_PROMPT_SCORES}",
        )
    if not sampling.max_tokens_given:
        return dataclasses.replace(params, max_tokens=left)
    if params.max_tokens > left:
        raise InvalidRequest.single(
            "sampling.max_tokens",
            f"{params.max_tokens} plus {length} prompt tokens is over the limit of {limit} tokens; "
            f"at most {left}",
        )
    return params


def too_long(kind: type[Prompt], length: int, limit: int) -> InvalidRequest:
    return InvalidRequest.single(
        INPUT_FIELDS[kind],
        f"has {length} tokens; prompt and output together may have {limit} at most",
    )


def sequence_limit(model: ModelInfo) -> int:
    """Prompt plus output tokens of one request at most: the model's limit, or the KV cache's
    when that is smaller, since such a request could never finish."""
    return min(model.max_model_len, model.pool_tokens)


def _first_causes(violations: list[FieldViolation]) -> list[FieldViolation]:
    """Without the one that only follows: max_tokens is min_tokens' upper limit."""
    if not any(v.field == "sampling.max_tokens" for v in violations):
        return violations
    return [v for v in violations if v.field != "sampling.min_tokens"]


def _stop_violations(stop: Sequence[str]) -> list[FieldViolation]:
    return [
        FieldViolation(
            f"sampling.stop[{at}]", f"must have 1 to {MAX_STOP_CHARS} characters, has {len(string)}"
        )
        for at, string in enumerate(stop)
        if not 1 <= len(string) <= MAX_STOP_CHARS
    ]


def _bias_violations(biased: Iterable[int], model: ModelInfo) -> list[FieldViolation]:
    return [
        FieldViolation(f"sampling.logit_bias[{i}]", f"id must be below {model.vocab_size}")
        for i in sorted(biased)
        if i >= model.vocab_size
    ]


def _check_ids(field: str, ids: Sequence[int], model: ModelInfo) -> None:
    # A text can get there too, with a tokenizer that knows more tokens than the model.
    if max(ids) < model.vocab_size:
        return
    at = next(at for at, token_id in enumerate(ids) if token_id >= model.vocab_size)
    where = f"token_ids.ids[{at}]" if field == INPUT_FIELDS[IdsPrompt] else field
    raise InvalidRequest.single(
        where, f"token {at}: id must be below {model.vocab_size}, got {ids[at]}"
    )


def told_ids_limit(model: ModelInfo) -> int:
    """Ids that Tokenize tells at most. More than any request may have, for those who count."""
    return max(MAX_TOLD_IDS, sequence_limit(model))


# --- out -------------------------------------------------------------------------------------


def accepted_event(
    request: GenerationRequest, model: ModelInfo, resume_token: str
) -> inference_pb2.GenerateEvent:
    """request: of any choice of the call. The seed is the call's."""
    return inference_pb2.GenerateEvent(
        accepted=inference_pb2.Accepted(
            request_id=request.request_id,
            model=model.name,
            prompt_tokens=len(request.prompt_ids),
            seed=choice_seed(request.sampling.seed, request.choice),
            max_tokens=request.sampling.max_tokens,
            resume_token=resume_token,
        )
    )


def delta_event(
    batch: TokenBatch, accepted: int, text: str, choice: int = 0
) -> inference_pb2.GenerateEvent:
    """The first `accepted` ids of `batch` and the text that became certain."""
    return inference_pb2.GenerateEvent(
        delta=inference_pb2.Delta(
            first_index=batch.first_index,
            token_ids=batch.token_ids[:accepted],
            text=text,
            emit_time_unix_us=int(batch.emit_time_s * 1e6),
            logprobs=[_score(entry) for entry in batch.logprobs[:accepted] if entry is not None],
            prompt_logprobs=[_score(entry) for entry in batch.prompt_logprobs],
            choice=choice,
        )
    )


def _score(entry: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=[
            inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in entry.top
        ],
    )


def finished_event(
    reason: FinishReason,
    matched: str | int | None,
    usage: inference_pb2.Usage,
    timing: StreamTiming,
    choice: int = 0,
) -> inference_pb2.GenerateEvent:
    """matched: the stop string, the stop token's id, or None."""
    return inference_pb2.GenerateEvent(
        finished=inference_pb2.Finished(
            reason=_FINISH[reason],
            stop_string=matched if isinstance(matched, str) else None,
            stop_token_id=matched if isinstance(matched, int) else None,
            usage=usage,
            timing=inference_pb2.Timing(
                queue_s=timing.queue_s,
                first_token_s=timing.first_token_s,
                total_s=timing.total_s,
                preemptions=timing.preemptions,
                replays=timing.replays,
                engine_ids=timing.engine_ids,
                recomputed_tokens=timing.recomputed_tokens,
            ),
            choice=choice,
        )
    )


def model_message(model: ModelInfo, text: ModelText) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=model.name,
        architecture=model.architecture,
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        max_model_len=sequence_limit(model),
        eos_token_ids=text.eos_token_ids,
        has_chat_template=text.has_chat_template,
    )


def default_sampling_message(defaults: GenerationDefaults) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        min_tokens=0, ignore_eos=False, **dataclasses.asdict(defaults)
    )


def router_message(router: RouterSummary) -> admin_pb2.RouterStatus:
    return admin_pb2.RouterStatus(
        version=router.version,
        uptime_s=router.uptime_s,
        active_streams=router.calls,
        ready=router.ready,
        queued=router.queued,
        queued_tokens=router.queued_tokens,
        relief_moves=router.relief_moves,
        router_id=router.router_id,
        metrics=router.metrics,
        tails=[admin_pb2.Tail(**tail._asdict()) for tail in router.tails],
    )


def engine_message(engine: EngineStatus) -> admin_pb2.EngineStatus:
    return admin_pb2.EngineStatus(**dataclasses.asdict(engine))


def drain_order(request: admin_pb2.DrainEngineRequest) -> DrainOrder:
    """Raises InvalidRequest."""
    if request.move and request.undo:
        raise InvalidRequest.single("move", "does not go together with undo")
    if request.undo:
        return DrainOrder.UNDO
    return DrainOrder.MOVE if request.move else DrainOrder.FINISH
