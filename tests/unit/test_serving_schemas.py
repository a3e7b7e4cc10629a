"""Emitted files by the schemas of the tools that read them.

Kubernetes' own schemas are those of `kubernetes-validate`, Compose's is the one that
`check-jsonschema` carries, KEDA's are the models of `cloudcoil.models.keda` (made from its CRDs),
Prometheus' expressions are parsed by `promql-parser`, dashboards read by Grafana's foundation SDK.
`docker compose config` and `promtool` judge, too, where they are installed.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from quantkit.advise import shape
from quantkit.hardware import gpus
from quantkit.recipe import load
from quantkit.serving import draft, emit, fleet, target
from quantkit.serving.fleet import Fleet, Targets
from quantkit.serving.plan import Demand, make

SCALED = Fleet(1, 4, Targets(1.0, 0.05), is_scaled=True)
PLANS = [
    ("fp8-dynamic", "L40S", {}),
    ("fp8-dynamic", "H200", {"count": 2, "draft": draft.Draft("ngram", 4)}),
    ("gguf-q4_k_m", "RTX4090", {}),
    ("awq-w4a16", "MI300X", {}),
]
ids = [f"{name} on {gpu}" for name, gpu, _ in PLANS]


@pytest.fixture(params=PLANS, ids=ids)
def plan(request):
    name, gpu, more = request.param
    wanted = target.planned(shape.of("8B"), load(name), f"/data/out/{name}")
    return make(wanted, Demand(gpus.find(gpu), **more))


def documents(plan, wanted=SCALED):
    text = emit.files(plan, "k8s", wanted)["kubernetes.yaml"]
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_kubernetes_own_kinds_follow_its_schemas(plan):
    validate = pytest.importorskip("kubernetes_validate")
    found = documents(plan)
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        validate.validate(found[kind], "1.34", strict=True)
    broken = found["Deployment"] | {"spec": found["Deployment"]["spec"] | {"replica": 1}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.34", strict=True)


def test_the_autoscaler_is_a_scaled_object_of_keda(plan):
    keda = pytest.importorskip("cloudcoil.models.keda.v1alpha1")
    found = documents(plan)["ScaledObject"]
    read = keda.ScaledObject.model_validate(found)
    written = read.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    assert _known(found["spec"], written["spec"]) == []
    (trigger,) = found["spec"]["triggers"]
    # The scaler's own settings are text, whatever they hold.
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
    assert (
        found["spec"]["scaleTargetRef"]["name"] == documents(plan)["Deployment"]["metadata"]["name"]
    )


def _known(ours, theirs, place="spec"):
    """Keys of ours that a model did not take over."""
    if isinstance(ours, dict):
        missing = [f"{place}.{key}" for key in ours if key not in (theirs or {})]
        return missing + [
            lost
            for key in ours
            if theirs and key in theirs
            for lost in _known(ours[key], theirs[key], f"{place}.{key}")
        ]
    if isinstance(ours, list):
        pairs = zip(ours, theirs, strict=True)
        return [lost for a, b in pairs for lost in _known(a, b, place)]
    return []


def test_the_route_is_what_the_gateway_api_takes(plan):
    found = documents(plan)
    route, service = found["HTTPRoute"], found["Service"]
    # https://gateway-api.sigs.k8s.io/reference/spec/#httproute, as far as it is used.
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) <= {"parentRefs", "hostnames", "rules"}
    for rule in route["spec"]["rules"]:
        assert set(rule) <= {"name", "matches", "filters", "backendRefs", "timeouts"}
        for match in rule["matches"]:
            assert match["path"]["type"] in ("Exact", "PathPrefix", "RegularExpression")
            assert match["path"]["value"].startswith("/")
        for backend in rule["backendRefs"]:
            assert backend["name"] == service["metadata"]["name"]
            assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
        assert re.fullmatch(r"([0-9]{1,5}(h|m|s|ms)){1,4}", rule["timeouts"]["request"])


def test_a_fleet_scales_between_its_ends_and_updates_without_a_gap(plan):
    found = documents(plan)
    scaled = found["ScaledObject"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 4)
    threshold = int(scaled["triggers"][0]["metadata"]["threshold"])
    assert threshold == max(1, plan.size.sequences // 4)
    text = emit.files(plan, "grafana", SCALED)["alerts.yaml"]
    (group,) = yaml.safe_load(text)["groups"]
    waits = next(rule for rule in group["rules"] if rule["alert"] == "RequestsWait")
    assert waits["expr"].endswith(f"> {threshold}")
    spec = found["Deployment"]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "replicas" not in spec  # KEDA's to say
    fixed = documents(plan, Fleet(3, 3, is_scaled=True))
    assert fixed["Deployment"]["spec"]["replicas"] == 3
    assert "ScaledObject" not in fixed
    assert set(documents(plan, Fleet())) == {"Deployment", "Service"}


@pytest.mark.parametrize("text", ["0", "4-1", "1-", "a", "1-2-3", "2000"])
def test_replicas_that_cannot_be(text):
    with pytest.raises(Exception, match="--replicas takes"):
        fleet.replicas(text)


def test_compose_follows_its_schema(plan):
    package = importlib.util.find_spec("check_jsonschema")
    if package is None:
        pytest.skip("no check-jsonschema here")
    vendored = Path(package.origin).with_name("builtin_schemas") / "vendor" / "compose-spec.json"
    schema = json.loads(vendored.read_text())
    files = emit.files(plan, "compose", Fleet(targets=Targets(0.5)))
    data = yaml.safe_load(files["compose.yaml"])
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"service": {}}, schema)
    assert set(data["services"]) == {"engine", "prometheus", "grafana"}
    for service in data["services"].values():
        for one in service.get("configs", ()):
            assert one["source"] in data["configs"]
    for config in data["configs"].values():
        if "file" in config:
            assert config["file"].removeprefix("./") in files


def test_docker_compose_takes_the_file(plan, tmp_path):
    if shutil.which("docker") is None:
        pytest.skip("no docker here")
    for name, text in emit.files(plan, "compose").items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(["docker", "compose", "config", "-q"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_every_expression_is_promql(plan):
    promql = pytest.importorskip("promql_parser")
    files = emit.files(plan, "grafana", SCALED)
    (group,) = yaml.safe_load(files["alerts.yaml"])["groups"]
    board = json.loads(files["dashboard.json"])
    expressions = [rule["expr"] for rule in group["rules"]]
    expressions += [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    query = documents(plan)["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    for expression in [*expressions, query]:
        assert promql.parse(expression) is not None
    with pytest.raises(ValueError, match=r".+"):
        promql.parse("sum(rate(x[5m])")


def test_promtool_takes_the_rules(plan, tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here")
    path = tmp_path / "alerts.yaml"
    path.write_text(emit.files(plan, "grafana", SCALED)["alerts.yaml"])
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_grafana_reads_the_dashboard(plan):
    sdk = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    data = json.loads(emit.files(plan, "grafana", SCALED)["dashboard.json"])
    read = sdk.Dashboard.from_json(data)
    assert read.title == data["title"]
    assert len(read.panels) == len(data["panels"])
    assert set(data) <= set(sdk.Dashboard.from_json(data).to_json()) | {"panels"}
    titles = [panel["title"] for panel in data["panels"]]
    if plan.engine == "vllm":
        assert any(title.startswith("Prefill") for title in titles)
        assert any(title.startswith("Decode") for title in titles)


def test_alerts_have_the_limits_that_were_asked_for(plan):
    text = emit.files(plan, "grafana", SCALED)["alerts.yaml"]
    (group,) = yaml.safe_load(text)["groups"]
    found = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    if plan.engine == "vllm":
        assert found["FirstTokenIsSlow"].endswith("> 1")
        assert found["TokensAreSlow"].endswith("> 0.05")
        assert "prefix_cache_hits" in found["PrefixCacheHitsFell"]
