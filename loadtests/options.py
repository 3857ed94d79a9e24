"""Command-line options of a load, the same for `headway loadtest run` and for Locust."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from loadtests.job import Job
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec
from loadtests.validity import Limits

DEFAULTS = Scenario()
PROTOCOLS = ("headway", "openai")
DEFAULT_SLO = "embedded-cpu"

HELP: dict[str, tuple[type, str]] = {
    "arrivals": (
        str,
        "poisson:RATE, gamma:RATE:CV, constant:RATE, steps:RATExSECONDS,..., "
        "trace:NAME-OR-FILE (azure-conv, azure-code, mooncake), closed:USERS",
    ),
    "requests": (int, "arrivals at most"),
    "prompt_mean": (float, "prompt tokens, on average"),
    "prompt_cv": (float, "their deviation over the mean"),
    "output_mean": (float, "output tokens, on average"),
    "output_cv": (float, "their deviation over the mean"),
    "rate_scale": (float, "replay a trace so many times as fast"),
    "length_scale": (float, "times every length of a trace"),
    "max_input": (int, "cap on prompt tokens"),
    "max_output": (int, "cap on output tokens"),
    "warmup_s": (float, "arrivals of so many first seconds are not counted"),
    "turns": (int, "turns of a chat session; 1 sends single requests"),
    "think_s": (float, "seconds from one turn of a session to the next"),
    "long_every_s": (float, "send a long prompt every so many seconds; 0 never"),
    "long_first_s": (float, "when the first of them comes; 0: after as long as between two"),
    "long_count": (int, "how many of them; 0 as long as others arrive"),
    "long_prompt": (int, "tokens of a long prompt"),
    "long_output": (int, "tokens of the answer to it"),
    "tenants": (int, "tenants that requests come from"),
    "tenant_skew": (float, "tenant k gets a share proportional to k ** -skew"),
    "priorities": (int, "priorities that requests have, evenly, from 0 up"),
    "seed": (int, "of everything that is drawn"),
}


def add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    for name, (kind, text) in HELP.items():
        default = getattr(DEFAULTS, name)
        group.add_argument(
            _flag(name), dest=name, type=kind, default=default, help=f"{text} (default: {default})"
        )
    judged = parser.add_argument_group("server and verdict")
    judged.add_argument("--model", default="", help="model to ask for (openai needs one)")
    judged.add_argument("--ca-file", default=None, help="PEM that the certificate is signed by")
    judged.add_argument("--request-timeout", type=float, default=600.0, help="seconds per request")
    judged.add_argument("--slo", default=DEFAULT_SLO, help="objectives, by name in slo.toml")
    judged.add_argument(
        "--max-send-lag", type=float, default=Limits().send_lag_ms, help="P99 ms of a valid run"
    )
    judged.add_argument(
        "--max-wire-lag", type=float, default=Limits().wire_lag_ms, help="P99 ms of a valid run"
    )
    judged.add_argument(
        # A text: Locust sends every option to its workers, and its messages hold no paths.
        "--out",
        default="loadtest-results",
        help="folder for the results",
    )


def add_protocol_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", choices=PROTOCOLS, default=PROTOCOLS[0], help="the server's protocol"
    )


def job_of(args: Any, address: str, protocol: str) -> Job:
    """protocol: one of PROTOCOLS. Raises ConfigError for values that make no load."""
    scenario = Scenario(**{f.name: getattr(args, f.name) for f in fields(Scenario)})
    target = TargetSpec(protocol, address, args.model, args.ca_file, args.request_timeout)
    return Job(scenario, target)


def limits_of(args: Any) -> Limits:
    return Limits(send_lag_ms=args.max_send_lag, wire_lag_ms=args.max_wire_lag)


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")
