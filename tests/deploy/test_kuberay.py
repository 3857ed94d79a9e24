"""The KubeRay manifest, without a cluster: schemas, what it mounts, and what its probes ask for."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster import deployed
from cluster.app import SHUTDOWN_MARGIN_S
from cluster.config.load import Configured, load_settings
from tests.deploy.kuberay_schema import RAY_SERVICE

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy/kuberay/rayservice.yaml"
KUBERNETES = ("1.31", "1.34")
FRONT_DOOR = 50051

DOCUMENTS = list(yaml.safe_load_all(MANIFEST.read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (document for document in DOCUMENTS if document["kind"] == kind)
    return found


SERVICE = of_kind("RayService")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]["template"]
WORKERS = {group["groupName"]: group["template"] for group in CLUSTER["workerGroupSpecs"]}
TEMPLATES = {"head": HEAD, **WORKERS}


def only_container(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return container


def configured(tmp_path: Path) -> Configured:
    path = tmp_path / "headway.toml"
    path.write_text(of_kind("ConfigMap")["data"]["headway.toml"])
    return load_settings(path, {}, {})


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d["kind"])
def test_kubernetes_objects_follow_its_schema(document, version):
    if document["kind"] != "RayService":
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_pod_templates_follow_the_schema_of_pods(name, version):
    pod = {"apiVersion": "v1", "kind": "Pod", **TEMPLATES[name]}
    pod["metadata"] = {"name": name, **pod["metadata"]}
    kubernetes_validate.validate(pod, version, strict=True)


def test_the_schema_of_pods_knows_a_wrong_field():
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": HEAD["spec"]}
    pod = yaml.safe_load(yaml.safe_dump(pod))
    only_container(pod)["readinessProbe"]["grcp"] = {"port": FRONT_DOOR}
    with pytest.raises(kubernetes_validate.ValidationError, match="grcp"):
        kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)


def test_the_ray_service_follows_kuberay():
    jsonschema.validate(SERVICE, RAY_SERVICE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "serveConfig"), "x"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "tokens"),
    ],
)
def test_the_schema_refuses_what_kuberay_would(path, value):
    broken = yaml.safe_load(yaml.safe_dump(SERVICE))
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, RAY_SERVICE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_serve_takes_its_configuration_and_finds_the_application():
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == f"{deployed.__name__}:{deployed.build.__name__}"
    assert inspect.isfunction(deployed.build)
    assert application.args == {"config": "/etc/headway/headway.toml", "generation": "1"}
    assert application.route_prefix is None
    assert config.proxy_location == "Disabled"


def test_ray_is_the_version_that_is_tested():
    required = [r for r in importlib.metadata.requires("headway-serving") or [] if r[:4] == "ray["]
    assert any(f">={CLUSTER['rayVersion'].rpartition('.')[0]}" in line for line in required)


def test_the_configuration_is_read_and_names_files_that_are_mounted(tmp_path):
    config = configured(tmp_path)
    assert config["front_door.address"] == f"0.0.0.0:{FRONT_DOOR}"
    assert config["fleet.routers_per_node"] == 1
    for option in ("front_door.api_keys_file", "fleet.hop_secret_file"):
        for template in TEMPLATES.values():
            assert str(config[option]) in mounted_files(template)


def mounted_files(template: dict[str, Any]) -> set[str]:
    """As the comment at the top of the manifest has the secrets created."""
    keys = {"headway-secrets": ("api-keys", "hop-secret"), "headway-config": ("headway.toml",)}
    assert all(key in MANIFEST.read_text() for names in keys.values() for key in names)
    sources = {}
    for volume in template["spec"]["volumes"]:
        source = volume.get("secret", {}).get("secretName") or volume.get("configMap", {}).get(
            "name"
        )
        sources[volume["name"]] = keys.get(source, ())
    return {
        f"{mount['mountPath']}/{key}"
        for mount in only_container(template)["volumeMounts"]
        for key in sources[mount["name"]]
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_are_confined_and_have_shared_memory(name):
    spec, container = TEMPLATES[name]["spec"], only_container(TEMPLATES[name])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    # Kubernetes' variables for a service named headway begin as ours do.
    assert spec["enableServiceLinks"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (
        container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    )
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert mounts.keys() >= {"/etc/headway", "/var/lib/headway"}


def test_workers_are_ready_with_their_front_door_and_the_head_without():
    for template in WORKERS.values():
        container = only_container(template)
        assert container["readinessProbe"]["grpc"] == {"port": FRONT_DOOR}
        assert container["livenessProbe"]["httpGet"]["path"] == "/api/local_raylet_healthz"
        assert {"name": "grpc", "containerPort": FRONT_DOOR} in container["ports"]
    head = only_container(HEAD)
    assert head["readinessProbe"]["httpGet"]["path"] == "/api/gcs_healthz"


def test_the_service_and_the_budget_mean_the_workers():
    for labels in (
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        for template in WORKERS.values():
            assert labels.items() <= template["metadata"]["labels"].items()
        assert not labels.items() <= HEAD["metadata"]["labels"].items()
    (port,) = of_kind("Service")["spec"]["ports"]
    assert port["port"] == FRONT_DOOR


def test_a_pod_has_the_time_that_its_drain_takes(tmp_path):
    config = configured(tmp_path)
    drain = max(config["rollout.engine_drain"], config["rollout.router_drain"])
    for template in WORKERS.values():
        grace = template["spec"]["terminationGracePeriodSeconds"]
        command = only_container(template)["lifecycle"]["preStop"]["exec"]["command"][-1]
        deadline = int(command.partition("--deadline-remaining-seconds")[2].split()[0])
        assert drain + SHUTDOWN_MARGIN_S <= deadline < grace
        assert f"seq {deadline}" in command


def test_gpus_are_asked_for_by_the_gpu_group_alone():
    asking = {
        name
        for name, template in TEMPLATES.items()
        if "nvidia.com/gpu" in only_container(template)["resources"]["limits"]
    }
    assert asking == {"gpu"}
    images = {name: only_container(template)["image"] for name, template in TEMPLATES.items()}
    assert images == {"head": "headway:cpu", "cpu": "headway:cpu", "gpu": "headway:cuda"}
