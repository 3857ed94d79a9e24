"""What a request wants besides tokens: whose it is, when, how many outputs, and from where on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from cluster.core.errors import FieldViolation, InvalidRequest
from cluster.core.modelinfo import ModelInfo
from cluster.core.request import wish_violations
from cluster.core.sampling import MAX_CHOICES, SamplingParams, choice_seed
from cluster.gateway.mapping import sequence_limit
from cluster.gateway.parts import id_violations, too_many
from cluster.router.stream import GenerationRequest
from headway.v1 import inference_pb2

MAX_NAME_BYTES = 64
MAX_RESUME_WINDOW_S = 600.0


class Delivery(NamedTuple):
    """How a request wants to be treated, whatever it asks for. Fields as in GenerationRequest.
    outputs: the choices that are wanted, and the ids that were delivered of each before."""

    tenant: str
    priority: int
    session: str
    ttft_objective_s: float | None
    resume_window_s: float
    outputs: Mapping[int, tuple[int, ...]]


def delivery_of(request: inference_pb2.GenerateRequest, model: ModelInfo, n: int) -> Delivery:
    """Check what the caller wants besides tokens; n: how many outputs. Raises InvalidRequest with
    all violations."""
    violations = _emitted_violations(request, model, n)
    for field in ("tenant", "session"):
        size = len(getattr(request, field).encode())
        if size > MAX_NAME_BYTES:
            violations.append(
                FieldViolation(field, f"may have {MAX_NAME_BYTES} bytes at most, has {size}")
            )
    objective = request.ttft_objective_s if request.HasField("ttft_objective_s") else None
    violations += wish_violations(request.priority, objective)
    if not 0.0 <= request.resume_window_s <= MAX_RESUME_WINDOW_S:
        violations.append(
            FieldViolation(
                "resume_window_s",
                f"must be between 0 and {MAX_RESUME_WINDOW_S:g}, got {request.resume_window_s!r}",
            )
        )
    if violations:
        raise InvalidRequest(violations)
    emitted = {entry.choice: tuple(entry.token_ids) for entry in request.emitted}
    return Delivery(
        request.tenant,
        request.priority,
        request.session,
        objective,
        request.resume_window_s,
        dict(sorted(emitted.items())) if emitted else dict.fromkeys(range(n), ()),
    )


def _emitted_violations(
    request: inference_pb2.GenerateRequest, model: ModelInfo, n: int
) -> list[FieldViolation]:
    if wrong := too_many("emitted", request.emitted, n, "entries, one for each choice"):
        return wrong
    violations: list[FieldViolation] = []
    seen: set[int] = set()
    for at, entry in enumerate(request.emitted):
        field, ids = f"emitted[{at}]", f"emitted[{at}].token_ids"
        counted = too_many(ids, entry.token_ids, sequence_limit(model), "ids")
        violations += counted or id_violations(ids, entry.token_ids, model)
        if entry.choice >= n:
            problem = f"must be below n, which is {n}, got {entry.choice}"
            violations.append(FieldViolation(f"{field}.choice", problem))
        elif entry.choice in seen:
            problem = f"choice {entry.choice} is there already"
            violations.append(FieldViolation(f"{field}.choice", problem))
        seen.add(entry.choice)
    if request.emitted and not request.sampling.HasField("seed"):
        violations.append(
            FieldViolation("sampling.seed", "must be given with emitted: the one in Accepted")
        )
    return violations


def outputs_of(
    base: GenerationRequest, outputs: Mapping[int, tuple[int, ...]]
) -> list[GenerationRequest]:
    """One request per wanted choice. base: the call's; its seed becomes each choice's own. Raises
    InvalidRequest unless something is left to be generated of each."""
    requests = []
    for choice, emitted_ids in outputs.items():
        params = base.sampling
        _check_emitted(choice, emitted_ids, params)
        if choice:
            # The prompt is the same for all: choice 0 tells of it.
            seed = choice_seed(params.seed, choice)
            params = dataclasses.replace(params, seed=seed, prompt_logprobs=None)
        requests.append(
            dataclasses.replace(base, sampling=params, emitted_ids=emitted_ids, choice=choice)
        )
    return requests


def _check_emitted(choice: int, emitted_ids: tuple[int, ...], params: SamplingParams) -> None:
    if len(emitted_ids) >= params.max_tokens:
        raise InvalidRequest.single(
            "emitted",
            f"{len(emitted_ids)} ids of choice {choice} are there already, max_tokens is "
            f"{params.max_tokens}",
        )
    if (
        emitted_ids
        and len(emitted_ids) >= params.min_tokens
        and (emitted_ids[-1] in params.stop_token_ids)
    ):
        raise InvalidRequest.single(
            "emitted",
            f"those of choice {choice} end with the stop token {emitted_ids[-1]}: the output is "
            "complete",
        )


def positions_of(request: inference_pb2.ResumeRequest) -> dict[int, int]:
    """Choice -> index to go on from. Raises InvalidRequest for a choice that comes twice."""
    if wrong := too_many("positions", request.positions, MAX_CHOICES, "entries"):
        raise InvalidRequest(wrong)
    positions: dict[int, int] = {}
    for at, entry in enumerate(request.positions):
        if entry.choice in positions:
            raise InvalidRequest.single(
                f"positions[{at}].choice", f"choice {entry.choice} is there already"
            )
        positions[entry.choice] = entry.next_index
    return positions
