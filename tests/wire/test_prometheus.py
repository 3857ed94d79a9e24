"""A real Prometheus with our configuration, rules and dashboard, in front of a router and engines.

Skipped where there is none (`apt-get install prometheus`), but not in continuous integration.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.core.policies import PolicyChoice
from cluster.metrics import engine, router
from cluster.text.tokenizer import Tokenizer
from tests.hop.support import Engine
from tests.wire.stack import ROUTER_ID, Stack, request, stack

FOLDER = Path(__file__).resolve().parents[2] / "deploy/observability"
RULES_TEST = Path(__file__).with_name("alerts_test.yml")
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
NAME = re.compile(r"\b(?:headway[_:][a-z0-9_:]+|process_[a-z_]+)")
KNOWN = {family.name for family in (*engine.FAMILIES, *router.FAMILIES)}
REQUIRED = "HEADWAY_REQUIRE_PROMETHEUS"
RATE = "10s"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{name} is not installed, and {REQUIRED} is set")
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def expressions() -> list[str]:
    return [
        target["expr"]
        for panel in DASHBOARD["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


def names_in(expression: str) -> set[str]:
    """Metrics, histograms by their family's name."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(expression)}


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))
    promtool("check", "rules", str(FOLDER / "alerts.yml"))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(RULES_TEST))


def test_every_alert_has_a_case_that_fires_and_says_what_to_do() -> None:
    rules, cases = (FOLDER / "alerts.yml").read_text(), RULES_TEST.read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(set(alerts)) == len(alerts) > 10
    for alert in alerts:
        assert re.search(rf"alertname: {alert}\n\s+exp_alerts:\n\s+- exp_labels", cases), alert
    assert rules.count("summary:") == rules.count("action:") == rules.count("severity:")
    assert rules.count("summary:") == len(alerts)


def test_dashboard_and_rules_name_metrics_that_exist() -> None:
    rules = (FOLDER / "alerts.yml").read_text()
    recorded = set(re.findall(r"- record: (\S+)", rules))
    used = names_in(" ".join(expressions()))
    used |= names_in("\n".join(re.findall(r"(?m)^(?!\s*#).*$", rules)))
    # None that is not there, and whatever is measured can be seen.
    assert used == KNOWN | recorded


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@contextmanager
def busy_stack(tokenizer: Tokenizer) -> Iterator[Stack]:
    """In a thread of its own; streams come one after the other, some too many for the blocks."""
    found: list[Stack] = []
    up, done = threading.Event(), threading.Event()

    async def caller(running: Stack, number: int) -> None:
        while not done.is_set():
            async for _ in running.inference.Generate(request(number, max_tokens=50)):
                pass

    async def serve() -> None:
        policies = PolicyChoice(reservation="on-demand", prefix_cache="on")
        engines = [Engine(f"e{n}", num_blocks=24, step_s=0.01, policies=policies) for n in (0, 1)]
        async with stack(tokenizer, *engines) as running:
            found.append(running)
            up.set()
            await asyncio.gather(*(caller(running, n) for n in range(8)))

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="stack")
    thread.start()
    try:
        assert up.wait(20)
        yield found[0]
    finally:
        done.set()
        thread.join(30)


@contextmanager
def prometheus(folder: Path, router_address: str) -> Iterator[Callable[..., Any]]:
    """Ours but for the router's address and the pace. Yields a caller of its HTTP API."""
    config = (FOLDER / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9464", router_address)
    for name in ("scrape_interval", "evaluation_interval"):
        config = config.replace(f"{name}: 5s", f"{name}: 1s")
    config = config.replace("refresh_interval: 10s", "refresh_interval: 1s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(FOLDER / "alerts.yml", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]

    def ask(path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield ask
        finally:
            process.terminate()
            process.wait(20)
    assert "level=error" not in (folder / "log").read_text()


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.2)


def test_a_real_prometheus_finds_scrapes_and_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tool("prometheus")
    with (
        busy_stack(tokenizer) as running,
        prometheus(tmp_path, running.board.address) as ask,
    ):

        def all_up() -> bool:
            targets = ask("targets")["activeTargets"]
            return [t["health"] for t in targets] == ["up"] * 3

        until(all_up)
        until(
            lambda: (
                len(ask("query", query=f"rate(process_cpu_seconds_total[{RATE}])")["result"]) == 3
            )
        )
        ids = {t["labels"]["id"]: t["labels"]["role"] for t in ask("targets")["activeTargets"]}
        assert ids == {ROUTER_ID: "router", "e0": "engine", "e1": "engine"}

        # Every rule was evaluated, and what is recorded is there.
        until(lambda: {r["health"] for g in ask("rules")["groups"] for r in g["rules"]} == {"ok"})
        rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        for rule in rules:
            ask("query", query=rule["query"])
            if rule["type"] == "recording":
                until(lambda name=rule["name"]: bool(ask("query", query=name)["result"]))
        firing = {
            a["labels"]["alertname"] for a in ask("alerts")["alerts"] if a["state"] == "firing"
        }
        assert not firing, "a fleet that is well"

        # Every expression of the dashboard has data.
        for expression in expressions():
            found = ask("query", query=expression.replace("$__rate_interval", RATE))["result"]
            assert found, expression

        # As many series per process as the docs say.
        per_target = {
            sample["metric"]["id"]: int(sample["value"][1])
            for sample in ask("query", query="scrape_samples_scraped")["result"]
        }
        per_engine = sum(family.series for family in engine.FAMILIES)
        assert per_target == {
            ROUTER_ID: sum(family.series for family in router.FAMILIES),
            "e0": per_engine,
            "e1": per_engine,
        }
        preempted = ask("query", query='sum(headway_engine_preemptions_total{cause="blocks"})')
        assert float(preempted["result"][0]["value"][1]) > 0
