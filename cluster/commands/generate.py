"""`headway generate "..."`: one answer, streamed to the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from cluster.commands import common

if TYPE_CHECKING:
    from headway.client import Client, Event, Prompt


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate an answer to a prompt",
        description="Generate an answer and stream it to the terminal. With a model that has a "
        "chat template the prompt is the user's message of a conversation.",
    )
    parser.add_argument("prompt", help="what to answer or continue; '-' reads standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without chat template"
    )
    form.add_argument(
        "--chat", action="store_true", help="insist on the chat template: fail if there is none"
    )
    parser.add_argument("--json", action="store_true", help="print each event as a line of JSON")
    parser.add_argument("--model", default="", help="name of the model (default: the served one)")
    parser.add_argument(
        "--n", type=int, metavar="N", help="answers to generate, printed one after the other (1)"
    )
    common.add_sampling_options(parser)
    common.add_delivery_options(parser)
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the answer is complete, 2 for bad input, 1 when the server failed."""
    return common.reporting_errors(_generate, args)


def _generate(args: argparse.Namespace) -> int:
    from headway.client import Client

    with Client(common.connection_of(args)) as client:
        prompt = _prompt(args, client)
        printer = _Printer(args.n or 1)
        events = client.generate(
            prompt,
            common.sampling_of(args),
            model=args.model,
            delivery=common.delivery_of(args),
            timeout_s=args.timeout,
        )
        # Closed before the client is: whoever leaves early gives the request up.
        with contextlib.closing(events):
            for event in events:
                if args.json:
                    print(json.dumps(event_object(event), ensure_ascii=False), flush=True)
                else:
                    printer.take(event)
    return common.EXIT_OK


class _Printer:
    """Several answers come at the same time and are printed one after the other: the first as it
    comes, each next one as soon as those before it are complete."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._held: defaultdict[int, list[str]] = defaultdict(list)
        self._complete: set[int] = set()
        self._current = 0
        self._last = ""

    def take(self, event: Event) -> None:
        from headway.client import Accepted, Delta

        if isinstance(event, Accepted):
            self._title()
        elif isinstance(event, Delta):
            if event.choice == self._current:
                self._write(event.text)
            else:
                self._held[event.choice].append(event.text)
        else:
            self._complete.add(event.choice)
            while self._current in self._complete:
                self._end()

    def _title(self) -> None:
        if self._answers > 1:
            print(f"--- {self._current + 1} of {self._answers} ---", flush=True)

    def _end(self) -> None:
        if not self._last.endswith("\n"):
            print(flush=True)
        self._last = ""
        self._current += 1
        if self._current < self._answers:
            self._title()
            self._write("".join(self._held.pop(self._current, ())))

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text


def event_object(event: Event) -> dict[str, Any]:
    """The event as printed: its fields and its kind, "accepted", "delta" or "finished"."""
    return {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}


def _prompt(args: argparse.Namespace, client: Client) -> Prompt:
    from headway.client import Message

    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    chat = not args.raw and (
        args.chat or client.get_model(timeout_s=args.timeout).has_chat_template
    )
    if not chat:
        if args.system is not None:
            raise common.UsageError("--system needs a chat template")
        return text
    system = [Message("system", args.system)] if args.system is not None else []
    return [*system, Message("user", text)]
