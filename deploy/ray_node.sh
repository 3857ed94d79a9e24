#!/usr/bin/env bash
# Starts Ray on this node, all ports pinned. `ray up` calls it on every node.
# usage: ray_node.sh head | worker
#
# RAY_HEAD_IP         of the head; `ray up` sets it on workers
# HEADWAY_NODE_ADDRESS  the address other nodes reach this one under (default: what Ray finds)
# HEADWAY_RAY_ARGS    more arguments of `ray start`, such as --num-gpus 8
# RAY_AUTH_MODE, RAY_USE_TLS and their like: for Ray itself, see docs/operations.md
set -euo pipefail

ROLE=$1
RAY=$HOME/headway/venv/bin/ray
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
export RAY_USAGE_STATS_ENABLED=0
# A silent node is given up after three seconds and not after a minute; its engines are missed at
# once anyway, this is for Serve, which starts others.
export RAY_health_check_initial_delay_ms=${RAY_health_check_initial_delay_ms:-2000}
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-500}
export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-1000}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-3}
# A raylet ends itself if its agent, a Python program, is not up by then: the first start on a slow
# disk takes longer than Ray's half a minute.
export RAY_agent_register_timeout_ms=${RAY_agent_register_timeout_ms:-180000}
# Joins every worker, and those that come back; see docs/operations.md.
export RAY_UP_enable_autoscaler_v2=0

# Open these between the nodes and to nobody else: who reaches them can run code here.
PORTS=(
    --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382
    --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 6384 --metrics-export-port 6385
    --min-worker-port 10002 --max-worker-port 10999
)
# Tokens never go through Ray's object store: it may be small.
STORE=(--object-store-memory "${HEADWAY_OBJECT_STORE_BYTES:-134217728}")
ADDRESS=()
[ -z "${HEADWAY_NODE_ADDRESS:-}" ] || ADDRESS=(--node-ip-address "$HEADWAY_NODE_ADDRESS")
read -r -a MORE <<<"${HEADWAY_RAY_ARGS:-}"

# Of this node only; whoever shares the machine with other Rays leaves the next line out.
"$RAY" stop --force >/dev/null 2>&1 || true
ulimit -n 65536 2>/dev/null || true

case $ROLE in
head)
    # The dashboard is for this machine; `ray dashboard CLUSTER.yaml` forwards it.
    exec "$RAY" start --head --port 6379 --include-dashboard true --dashboard-host 127.0.0.1 \
        --dashboard-port 8265 --ray-client-server-port 10001 \
        --autoscaling-config "$HOME/ray_bootstrap_config.yaml" \
        "${PORTS[@]}" "${STORE[@]}" "${ADDRESS[@]}" "${MORE[@]}"
    ;;
worker)
    exec "$RAY" start --address "$RAY_HEAD_IP:6379" \
        "${PORTS[@]}" "${STORE[@]}" "${ADDRESS[@]}" "${MORE[@]}"
    ;;
*)
    printf 'usage: ray_node.sh head | worker\n' >&2
    exit 2
    ;;
esac
