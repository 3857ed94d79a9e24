"""What the client commands share: address, sampling options, prompts, and how errors end.

Imports nothing heavy, so that `headway generate` starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.client import Connection, Delivery, HeadwayRpcError, Sampling

EXIT_OK = 0
EXIT_SERVER = 1
"""The server failed, or nobody answered."""
EXIT_USAGE = 2
"""The input has to change. Also argparse's own code."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C, as shells report it."""

WATCH_TIMEOUT_S = 10.0
DEFAULT_ADDRESS = "127.0.0.1:50051"

_NEVER_CONNECTED = (
    "failed to connect to all addresses",
    "errors resolving",
    "DNS resolution failed",
)
"""How gRPC begins what it says when no connection came about; it has no code of its own for it."""


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--address",
        default=os.environ.get("HEADWAY_ADDRESS", DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help="router to talk to (default: $HEADWAY_ADDRESS, else %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key (default: $HEADWAY_API_KEY, else none)",
    )
    group.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="PEM that the server's certificate is signed by",
    )
    group.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="limit for each call (default: none)"
    )


def add_interval_option(
    parser: argparse.ArgumentParser, default_s: float, help_text: str = "time between refreshes"
) -> None:
    """For commands that ask again and again; see asking_again()."""
    parser.add_argument(
        "--interval",
        type=float,
        default=default_s,
        metavar="SECONDS",
        help=f"{help_text} (default: %(default)s)",
    )


def asking_again(args: argparse.Namespace) -> tuple[float, float]:
    """(interval, limit of each call) in seconds: without a limit, whoever watches a router that
    hangs would hang too. Raises UsageError."""
    interval_s: float = args.interval
    if not 0.05 <= interval_s <= 3600.0:
        raise UsageError(f"--interval must be 0.05 to 3600 s, got {interval_s:g}")
    return interval_s, WATCH_TIMEOUT_S if args.timeout is None else args.timeout


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate at most")
    group.add_argument("--min-tokens", type=int, metavar="N", help="tokens to generate at least")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely only")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from this much probability")
    group.add_argument("--min-p", type=float, metavar="P", help="least share of the most likely")
    group.add_argument("--seed", type=int, metavar="N", help="repeat an output exactly")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    group.add_argument(
        "--stop-token-ids",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="end at this token; repeatable",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="go on after the model's end-of-text token",
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="divides logits of tokens seen"
    )
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="off the logits of output tokens"
    )
    group.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="the same per occurrence"
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        default=[],
        metavar="ID=X",
        help="add X to the token's logit; repeatable",
    )
    group.add_argument(
        "--allowed-token-ids",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="draw nothing else; repeatable",
    )
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="with each id the N likeliest (see --json)"
    )
    group.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for the prompt")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=X, got {text!r}") from None


def add_delivery_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("delivery")
    group.add_argument("--tenant", default="", metavar="NAME", help="whose request it is")
    group.add_argument(
        "--priority", type=int, default=0, metavar="N", help="the larger goes first (0)"
    )
    group.add_argument("--session", default="", metavar="NAME", help="keep together with others")
    group.add_argument(
        "--ttft-objective",
        type=float,
        metavar="SECONDS",
        help="refuse at once what cannot begin within this time",
    )
    group.add_argument(
        "--resume-window",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="go on with a stream whose connection or router was lost (default: %(default)s)",
    )


def delivery_of(args: argparse.Namespace) -> Delivery:
    from headway.client import Delivery

    return Delivery(
        args.tenant, args.priority, args.session, args.ttft_objective, args.resume_window
    )


class UsageError(Exception):
    """The command line has to change; the message says how."""


def connection_of(args: argparse.Namespace) -> Connection:
    """Raises OSError when the key file cannot be read."""
    from headway.client import Connection

    key: str | None = os.environ.get("HEADWAY_API_KEY")
    if args.api_key_file is not None:
        key = args.api_key_file.read_text("utf-8").strip()
    return Connection(args.address, api_key=key, ca_file=args.ca_file)


def sampling_of(args: argparse.Namespace) -> Sampling:
    from headway.client import Sampling

    # A conversation has no --n: it goes on from one answer.
    values: dict[str, Any] = {i.name: getattr(args, i.name, None) for i in fields(Sampling)}
    values["stop"] = tuple(args.stop)
    values["stop_token_ids"] = tuple(args.stop_token_ids)
    values["allowed_token_ids"] = tuple(args.allowed_token_ids)
    values["logit_bias"] = dict(args.logit_bias)
    return Sampling(**values)


def reporting_errors(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; whatever ends it becomes one line on stderr and an exit code."""
    # grpc's core writes its own lines to stderr (a GOAWAY of a server that stops, for example);
    # the status says the same. It reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from headway.client import ClientError, HeadwayRpcError

    try:
        return command(args)
    except (ClientError, UsageError) as error:
        return _fail(str(error), EXIT_USAGE)
    except HeadwayRpcError as error:
        return _fail(server_trouble(args.address, error), EXIT_SERVER)
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more when it
        # flushes stdout at exit; there is nowhere to flush it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        return _fail(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def server_trouble(address: str, error: HeadwayRpcError) -> str:
    """What went wrong at `address`, in one line for the person at the terminal."""
    message = " ".join(str(error).split())
    if not message.startswith(_NEVER_CONNECTED):
        return f"{address}: {message}"
    # gRPC tells the whole way down; the last step is the cause.
    cause = message.rpartition(": ")[2].rstrip("]")
    return f"nobody answers at {address}; is `headway serve` running there? ({cause})"


def _fail(message: str, code: int) -> int:
    print(f"headway: {' '.join(message.split())}", file=sys.stderr)
    return code
