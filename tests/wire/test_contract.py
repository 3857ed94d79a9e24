"""The contract itself: committed stubs, import names, field comments, reflection, health, admin."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.text.tokenizer import Tokenizer
from headway.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from tests.wire.wire_support import Script, gateway, in_loop

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
SOURCES = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("headway/v1/*.proto"))


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stub_generator", PROTO / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_stubs_describe_the_proto_files(tmp_path: Path) -> None:
    """With any compiler: the descriptors inside the stubs are those of the sources."""
    out = tmp_path / "all.pb"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    subprocess.run([*protoc, f"--descriptor_set_out={out}", *SOURCES], check=True, cwd=PROTO)
    fresh = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    committed = {}
    for module in (admin_pb2, inference_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        committed[file.name] = file
    assert {file.name for file in fresh.file} == committed.keys()
    for file in fresh.file:
        assert without_json_names(file) == without_json_names(committed[file.name])


def without_json_names(
    file: descriptor_pb2.FileDescriptorProto,
) -> descriptor_pb2.FileDescriptorProto:
    """Only the compiler's own output carries them."""
    for message in file.message_type:
        # A map is a nested message.
        for one in (message, *message.nested_type):
            for field in one.field:
                field.ClearField("json_name")
    return file


def test_regeneration_changes_no_byte() -> None:
    """With the pinned compiler, where it is at hand or can be fetched."""
    generate = generator()
    try:
        generate.compiler_path()
    except subprocess.CalledProcessError:
        pytest.skip(f"grpcio-tools {generate.GRPC_TOOLS_VERSION} cannot be fetched here")
    assert generate.stale_stubs() == ""


def test_the_name_proto_stays_with_proto_plus() -> None:
    """ray[serve] brings proto-plus, which owns `import proto`: our folder must not shadow it."""
    assert not (PROTO / "__init__.py").exists()
    code = "import proto; assert hasattr(proto, 'Message'), proto"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_client_imports_nothing_else_of_ours() -> None:
    code = (
        "import sys, headway.client\n"
        "heavy = {'cluster', 'workers', 'torch', 'ray', 'numpy', 'transformers', 'tokenizers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    environment = {"PYTHONPATH": str(PROTO), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=PROTO)


@pytest.mark.parametrize("source", SOURCES)
def test_every_field_is_commented(source: str) -> None:
    previous = ""
    for line in (PROTO / source).read_text("utf-8").splitlines():
        text = line.strip()
        declares = re.match(r"(rpc |(optional |repeated )?[\w.]+ \w+ = \d+;|[A-Z_]+ = \d+;)", text)
        if declares:
            assert previous.startswith("//"), f"{source}: no comment above {text!r}"
        previous = text


@in_loop
async def test_reflection_lists_the_services(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        stub = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([ask]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"headway.v1.Inference", "headway.v1.Admin", "grpc.health.v1.Health"} <= names


@in_loop
async def test_health_follows_the_source(tokenizer: Tokenizer) -> None:
    """R38's half at the door: NOT_SERVING within a second, and back."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    async with gateway(tokenizer, Script([70])) as wire:
        stub = health_pb2_grpc.HealthStub(wire.channel)
        for service in ("", "headway.v1.Inference"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await stub.Check(request)).status == serving
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == serving
        for ready, expected in [(False, not_serving), (True, serving)]:
            changed = time.monotonic()
            wire.source.is_ready = ready
            assert (await watch.read()).status == expected
            assert time.monotonic() - changed < 1.0
            # As the script has it, engines are connected while it is ready.
            for name in ("engine-a", "engine-b"):
                request = health_pb2.HealthCheckRequest(service=f"engine/{name}")
                assert (await stub.Check(request)).status == expected
        unknown = stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert await unknown.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()


@in_loop
async def test_a_ready_that_fails_is_not_ready(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        watch = health_pb2_grpc.HealthStub(wire.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()

        def broken() -> bool:
            raise RuntimeError("no table")

        wire.source.ready = broken
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


@in_loop
async def test_admin_status(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70], step_s=0.01)) as wire:
        running = wire.inference.Generate(inference_pb2.GenerateRequest(text="x"))
        await running.read()
        admin = admin_pb2_grpc.AdminStub(wire.channel)
        status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        assert [engine.engine_id for engine in status.engines] == ["engine-a", "engine-b"]
        first = status.engines[0]
        assert (first.epoch, first.blocks_free, first.running, first.step) == (3, 60, 1, 17)
        assert status.router.active_streams == 1
        assert status.router.ready
        assert status.router.uptime_s > 0
        assert status.model.name == "tiny"
        wire.source.model = None
        wire.source.is_ready = False
        status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        assert not status.HasField("model")
        assert not status.router.ready
        running.cancel()
