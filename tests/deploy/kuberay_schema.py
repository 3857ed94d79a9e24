"""JSON schema of the RayService fields that our manifest uses; anything else is refused.

Written by hand after KubeRay's API types (ray.io/v1, KubeRay 1.5; Apache-2.0,
https://github.com/ray-project/kuberay): a whole CRD is a megabyte of pod templates. Those, under
"template", are checked against Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_SWITCH = {"type": "boolean"}
_TEMPLATE = _object(["spec"], metadata={"type": "object"}, spec={"type": "object"})
# Strings only: a number here is refused by the API server.
_START_PARAMS = {"type": "object", "additionalProperties": _TEXT}
_AUTH = _object(["mode"], mode={"enum": ["disabled", "token"]}, secretName=_TEXT)
_HEAD = _object(
    ["template", "rayStartParams"],
    rayStartParams=_START_PARAMS,
    template=_TEMPLATE,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
)
_WORKERS = _object(
    ["groupName", "template", "rayStartParams", "minReplicas", "maxReplicas"],
    groupName=_TEXT,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    numOfHosts=_COUNT,
    idleTimeoutSeconds=_COUNT,
    rayStartParams=_START_PARAMS,
    template=_TEMPLATE,
)
_CLUSTER = _object(
    ["headGroupSpec"],
    rayVersion=_TEXT,
    enableInTreeAutoscaling=_SWITCH,
    authOptions=_AUTH,
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _WORKERS},
)
RAY_SERVICE = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=_object(
        ["serveConfigV2", "rayClusterConfig"],
        serveConfigV2=_TEXT,
        excludeHeadPodFromServeSvc=_SWITCH,
        rayClusterConfig=_CLUSTER,
    ),
)
