"""What is served, by how many, behind which door; and what routers do."""

from __future__ import annotations

from functools import partial

from cluster.config.option import INTEGER, NUMBER, PATH, TEXT, Limits, Option, above, at_least
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.placements.registry import PLACEMENTS
from cluster.fleet.relief import MAX_MOVES
from cluster.gateway.config import DEFAULT_ADDRESS
from cluster.gateway.config import Limits as Front
from workers.sources import SOURCES

_FLEET = FleetSettings()
_FRONT = Front()

_model = partial(Option, "model")
_fleet = partial(Option, "fleet")
_door = partial(Option, "front_door")
_router = partial(Option, "router")

MODEL = (
    _model(
        "path",
        PATH,
        None,
        "Hugging Face folder (config.json, *.safetensors, tokenizer.json), or the name of a model "
        "that `headway pull` knows",
        choices=tuple(SOURCES),
        unit="PATH",
        unset="the embedded SmolLM2-135M-Instruct, fetched once",
        example="/models/my-llama",
        flag_name="model",
    ),
    _model(
        "dtype",
        TEXT,
        "auto",
        "number format; auto: as the weights were saved, float16 as bfloat16 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    _model(
        "max_model_len",
        INTEGER,
        None,
        "prompt and output tokens of one sequence at most",
        limits=at_least(2),
        unit="N",
        unset="the model's own limit",
        example=4096,
    ),
)

FLEET = (
    _fleet(
        "engines",
        INTEGER,
        1,
        "engines behind the routers, each with its own copy of the model",
        limits=at_least(1),
        unit="N",
    ),
    _fleet(
        "routers",
        INTEGER,
        1,
        "routers; those of one node share the address",
        limits=at_least(1),
        unit="N",
    ),
    _fleet(
        "routers_per_node",
        INTEGER,
        0,
        "routers on one node at most; 1 without a number of routers starts one on every node",
        limits=at_least(0),
        unit="N",
    ),
    _fleet(
        "hop_host",
        TEXT,
        None,
        "interface on which engines take in routers",
        unit="HOST",
        unset="serve: 127.0.0.1; on a cluster: the node's address, as Ray knows it",
        example="10.0.0.7",
    ),
    _fleet(
        "hop_port",
        INTEGER,
        0,
        "port on which engines take in routers; where it is taken, the next free one; 0: any",
        limits=Limits(0, 65535),
    ),
    _fleet(
        "hop_secret_file",
        PATH,
        None,
        "file with the secret that routers and engines share",
        unit="FILE",
        unset="a new secret at every start",
        example="/etc/headway/secrets/hop-secret",
    ),
    _fleet(
        "hop_secret",
        TEXT,
        None,
        "the secret itself; instead of hop_secret_file",
        unset="see hop_secret_file",
        secret=True,
    ),
)

FRONT_DOOR = (
    _door("address", TEXT, DEFAULT_ADDRESS, "front door", unit="HOST:PORT"),
    _door(
        "api_keys_file",
        PATH,
        None,
        "one key per line; callers must have one of them",
        unit="FILE",
        unset="open to all",
        example="/etc/headway/secrets/api-keys",
    ),
    _door(
        "tls_certificate",
        PATH,
        None,
        "PEM with the certificate chain; goes with tls_key",
        unit="FILE",
        unset="no encryption",
        example="/etc/headway/tls/tls.crt",
    ),
    _door(
        "tls_key",
        PATH,
        None,
        "PEM with the private key",
        unit="FILE",
        unset="no encryption",
        example="/etc/headway/tls/tls.key",
    ),
    _door(
        "max_in_flight",
        INTEGER,
        _FRONT.max_in_flight,
        "calls in progress per router; beyond it callers are told when to come back",
        limits=at_least(1),
        unit="N",
    ),
    _door(
        "max_message_bytes",
        INTEGER,
        _FRONT.max_message_bytes,
        "one request message at most",
        limits=at_least(1),
        unit="BYTES",
    ),
    _door(
        "tokenizer_threads",
        INTEGER,
        _FRONT.tokenizer_threads,
        "threads of a router that tokenise prompts",
        limits=at_least(1),
        unit="N",
    ),
)

ROUTER = (
    _router(
        "placement",
        TEXT,
        next(iter(PLACEMENTS)),
        "which engine a request goes to",
        choices=tuple(PLACEMENTS),
    ),
    _router(
        "max_moves",
        INTEGER,
        _FLEET.relief.max_moves,
        "how often a request may move to another engine because blocks run out",
        limits=Limits(0, MAX_MOVES),
        unit="N",
    ),
    _router(
        "max_queued",
        INTEGER,
        _FLEET.gate.max_queued,
        "waiting requests of a tenant per router",
        limits=at_least(0),
        unit="N",
    ),
    _router(
        "max_queued_tokens",
        INTEGER,
        _FLEET.gate.max_queued_tokens,
        "their prompt tokens at most",
        limits=at_least(0),
        unit="N",
    ),
    _router(
        "queue_timeout",
        NUMBER,
        _FLEET.gate.queue_timeout_s,
        "longest wait",
        limits=above(0),
        unit="SECONDS",
    ),
    _router(
        "ttft_objective",
        NUMBER,
        None,
        "refuse at once what cannot begin within this time; requests may name their own",
        limits=Limits(0.001, 86_400.0),
        unit="SECONDS",
        unset="nobody is refused for being slow",
        example=2.0,
    ),
)
