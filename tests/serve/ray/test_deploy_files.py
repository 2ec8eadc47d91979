"""The files in deploy/: Ray's own schema, the fields of KubeRay's, and our arguments."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from kvprune.serve.ray.front import middlewares
from kvprune.serve.ray.options import parse_options

ROOT = Path(__file__).parents[3]
# a RayService of ray.io/v1, as its types in ray-operator/apis/ray/v1 declare it, and of a pod
# what is used here; a type alone is a value
CONTAINER = {
    "name": str, "image": str, "env": [{"name": str, "value": str}],
    "envFrom": [{"secretRef": {"name": str}}],
    "resources": {"limits": {"cpu": str, "memory": str}, "requests": {"cpu": str, "memory": str}},
    "ports": [{"containerPort": int, "name": str}],
}  # fmt: skip
POD = {"spec": {"containers": [CONTAINER], "terminationGracePeriodSeconds": int}}
RAY_SERVICE = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "serveConfigV2": str,
        "rayClusterConfig": {
            "rayVersion": str,
            "enableInTreeAutoscaling": bool,
            "headGroupSpec": {"rayStartParams": {"num-cpus": str}, "template": POD},
            "workerGroupSpecs": [
                {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int,
                 "rayStartParams": {}, "template": POD},
            ],
        },
    },
}  # fmt: skip


def load(name):
    return yaml.safe_load((ROOT / "deploy" / name).read_text())


def wrong(value, fields, path="."):
    """Paths of what has no such field, or another type."""
    if isinstance(fields, type):
        return [] if type(value) is fields else [path]
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [path]
        return [bad for i, one in enumerate(value) for bad in wrong(one, fields[0], f"{path}[{i}]")]
    if not isinstance(value, dict):
        return [path]
    unknown = [f"{path}.{name}" for name in value if name not in fields]
    known = [name for name in value if name in fields]
    return unknown + [
        b for name in known for b in wrong(value[name], fields[name], f"{path}.{name}")
    ]


def test_the_check_itself():
    assert wrong({"a": [{"b": 1}]}, {"a": [{"b": int}]}) == []
    assert wrong({"a": [{"b": "1", "c": 2}]}, {"a": [{"b": int}]}) == ["..a[0].c", "..a[0].b"]
    assert wrong({"a": 3}, {"a": {"b": int}}) == ["..a"]


def test_kuberay():
    service = load("kuberay.yaml")
    assert wrong(service, RAY_SERVICE) == []
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    pinned = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pinned
    (workers,) = cluster["workerGroupSpecs"]
    groups = (cluster["headGroupSpec"], workers)
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    for container in containers:
        variables = {one["name"]: one["value"] for one in container["env"]}
        front = variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
        assert front == f"{middlewares.__module__}:{middlewares.__name__}"
    # a worker has room for one replica, and waits for its last answers
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert containers[1]["resources"]["requests"]["cpu"] == str(application["cpus"])
    patience = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert patience > application["drain"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        application["replicas"], application["max_replicas"],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_rays_schema_and_our_arguments(name):
    config = load(name)
    if name == "kuberay.yaml":
        config = yaml.safe_load(config["spec"]["serveConfigV2"])
    checked = ServeDeploySchema.model_validate(config)
    assert set(config) <= set(ServeDeploySchema.model_fields)  # others would be ignored
    (application,) = checked.applications
    assert application.import_path == "kvprune.serve.ray:build"
    assert set(config["applications"][0]) <= set(type(application).model_fields)
    options = parse_options(application.args)
    assert options.max_replicas > options.replicas == 2
