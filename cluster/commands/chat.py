"""`headway chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from cluster.commands import common

if TYPE_CHECKING:
    from headway.client import Client, Message

HELP = "/exit ends, /clear forgets the conversation; Ctrl-C stops a running answer"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to the model",
        description=f"A conversation with the model, through its chat template. {HELP}.",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--model", default="", help="name of the model (default: the served one)")
    common.add_sampling_options(parser)
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the user ends it, 2 for bad input, 1 when the server cannot be reached."""
    return common.reporting_errors(_chat, args)


def _chat(args: argparse.Namespace) -> int:
    from headway.client import Client, HeadwayRpcError, Message

    with Client(common.connection_of(args)) as client:
        model = client.get_model(timeout_s=args.timeout)
        if not model.has_chat_template:
            raise common.UsageError(f"{model.name} has no chat template; use: headway generate")
        print(f"{model.name}. {HELP}.")
        system = [Message("system", args.system)] if args.system is not None else []
        history = list(system)
        while True:
            line = _read_line()
            if line is None or line == "/exit":
                return common.EXIT_OK
            if line == "/clear":
                history = list(system)
            elif line:
                turn = Message("user", line)
                try:
                    reply = _answer(client, args, [*history, turn])
                except HeadwayRpcError as error:
                    # The conversation goes on without the turn that failed.
                    problem = common.server_trouble(args.address, error)
                    print(f"headway: {problem}", file=sys.stderr)
                    continue
                history += [turn, Message("assistant", reply)]


def _read_line() -> str | None:
    """The user's next line; None at the end of the input. Ctrl-C drops the line only."""
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None


def _answer(client: Client, args: argparse.Namespace, messages: list[Message]) -> str:
    """Print the answer while it comes. Ctrl-C cancels it; what was shown stays in the history."""
    from headway.client import Delta

    shown: list[str] = []
    events = client.generate(
        messages, common.sampling_of(args), model=args.model, timeout_s=args.timeout
    )
    try:
        for event in events:
            if isinstance(event, Delta):
                shown.append(event.text)
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:
        events.close()
        print()
    return "".join(shown)
