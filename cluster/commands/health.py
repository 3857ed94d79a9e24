"""`headway health`: is the front door open? For probes of containers; needs no API key."""

from __future__ import annotations

import argparse

from cluster.commands import common

DEFAULT_TIMEOUT_S = 5.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "health",
        help="exit 0 when a router takes calls",
        description="Ask a router's gRPC health service, as a container's probe does. Exit code 0 "
        "when it serves, 1 when it does not, or nobody answers.",
    )
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when it serves, 1 when it does not, 2 for bad options."""
    return common.reporting_errors(_health, args)


def _health(args: argparse.Namespace) -> int:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    connection = common.connection_of(args)
    timeout_s = DEFAULT_TIMEOUT_S if args.timeout is None else args.timeout
    with connection.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            print(f"{args.address}: {error.code().name}")
            return common.EXIT_SERVER
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{args.address}: {status}")
    return common.EXIT_OK if status == "SERVING" else common.EXIT_SERVER
