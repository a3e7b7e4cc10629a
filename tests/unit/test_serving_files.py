"""Files of deployments: whole, parsable, and in the words of engines and their metrics."""

import json
import re
from pathlib import Path

import pytest
import yaml

from quantkit.advise import shape
from quantkit.engine.vllm_program import VERSION
from quantkit.errors import EngineError, HardwareError, UnknownName
from quantkit.hardware import gpus
from quantkit.recipe import load
from quantkit.serving import adapters, draft, emit, target
from quantkit.serving.compose import compose
from quantkit.serving.fleet import Fleet, Targets
from quantkit.serving.kubernetes import kubernetes, label
from quantkit.serving.monitoring import TTFT_BUCKETS, alerts, grafana
from quantkit.serving.plan import Demand, make

# As vLLM 0.26.0 and 0.32.0 define them, and a running 0.32.0 told them at /metrics.
GAUGES = {"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"}
COUNTERS = {
    "prompt_tokens", "generation_tokens", "prefix_cache_hits", "prefix_cache_queries",
    "num_preemptions", "request_success", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
}  # fmt: skip
VLLM = {f"vllm:{name}" for name in GAUGES}
VLLM |= {f"vllm:{name}_total" for name in COUNTERS}
VLLM |= {f"vllm:{name}_bucket" for name in HISTOGRAMS}
LLAMA_CPP = {
    f"llamacpp:{name}"
    for name in (
        "requests_processing", "requests_deferred", "prompt_tokens_total",
        "tokens_predicted_total", "n_busy_slots_per_decode",
    )
}  # fmt: skip


def plan(name="fp8-dynamic", gpu="L40S", folder=None, **asked):
    folder = folder or f"/data/out/{name}"
    wanted = target.planned(shape.of("8B"), load(name), folder)
    return make(wanted, Demand(gpus.find(gpu), **asked))


def metrics_in(expression):
    return set(re.findall(r"(?:vllm|llamacpp):[a-z0-9_]+", expression))


def ngrams():
    return draft.Draft("ngram", 4)


def test_compose_runs_the_plan_with_paths_and_port_of_the_inside():
    made = plan(count=2, host="0.0.0.0", port=9000)
    data = yaml.safe_load(compose(made))
    engine = data["services"]["engine"]
    assert engine["image"].startswith("vllm/vllm-openai:v0.")
    words = [*engine["entrypoint"], *engine["command"]]
    assert words[:3] == ["vllm", "serve", "/model"]
    assert words[words.index("--port") + 1] == "8000"
    assert engine["ports"] == ["0.0.0.0:9000:8000"]
    assert all(isinstance(word, str) for word in words)
    outside = set(made.arguments) - {"9000"}
    assert outside <= set(words) | {"0.0.0.0"}
    (volume,) = engine["volumes"]
    assert volume["source"] == "/data/out/fp8-dynamic"
    assert volume["read_only"] is True
    (device,) = engine["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert engine["healthcheck"]["test"][0] == "CMD"
    assert "/health" in engine["healthcheck"]["test"][-1]
    scraping = yaml.safe_load(data["configs"]["prometheus"]["content"].replace("$$", "$"))
    (job,) = scraping["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["engine:8000"]}]


def test_the_prometheus_of_compose_loads_the_alerts_beside_it():
    files = emit.files(plan(), "compose", Fleet(targets=Targets(0.5)))
    data = yaml.safe_load(files["compose.yaml"])
    prometheus = data["services"]["prometheus"]
    mounted = {one["target"]: data["configs"][one["source"]] for one in prometheus["configs"]}
    assert all(one["source"] in data["configs"] for one in prometheus["configs"])
    config = yaml.safe_load(mounted["/etc/prometheus/prometheus.yml"]["content"])
    (rules,) = config["rule_files"]
    beside = mounted[rules]["file"].removeprefix("./")
    assert files[beside] == emit.files(plan(), "grafana", Fleet(targets=Targets(0.5)))[beside]
    # What Prometheus refuses in a file of rules.
    (group,) = yaml.safe_load(files[beside])["groups"]
    assert set(group) == {"name", "rules"}
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\w+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert all(isinstance(v, str) for v in (*rule["labels"].values(), rule["expr"]))


@pytest.mark.parametrize(
    ("host", "shown"), [("localhost", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", "0.0.0.0")]
)
def test_compose_takes_addresses_and_no_names(host, shown):
    engine = yaml.safe_load(compose(plan(host=host)))["services"]["engine"]
    assert engine["ports"] == [f"{shown}:8000:8000"]


def test_flags_in_the_users_own_words_count_in_files_too():
    made = plan().with_extra(["--port", "9001", "--served-model-name", "mine"])
    engine = yaml.safe_load(compose(made))["services"]["engine"]
    assert engine["ports"] == ["127.0.0.1:9001:8000"]
    expressions = [rule["expr"] for rule in rules(made).values()]
    assert all('{model_name="mine"}' in expression for expression in expressions)


@pytest.mark.parametrize("image", ["", "a b", ":", "a:b:c", "-x", "a@sha256:12"])
def test_what_names_no_image_is_refused(image):
    with pytest.raises(EngineError, match="NAME:TAG"):
        compose(plan(), Fleet(image=image))


def test_an_image_of_ones_own_serves_devices_that_have_none():
    made = plan("gguf-q4_k_m", "M3 Max")
    engine = yaml.safe_load(compose(made, Fleet(image="me/llama:1")))["services"]["engine"]
    assert engine["image"] == "me/llama:1"


def test_drafts_and_adapters_are_mounted_and_named_by_their_inside(tmp_path):
    own = tmp_path / "mine"
    own.mkdir()
    (own / "adapter_config.json").write_text('{"r": 8}')
    (own / "adapter_model.safetensors").write_bytes(b"")
    guess = draft.Draft("draft_model", 4, target.planned(shape.of("1B"), None, "/data/small"))
    found = adapters.parse([f"mine={own}"], is_gguf=False)
    engine = yaml.safe_load(compose(plan(draft=guess, adapters=found)))["services"]["engine"]
    words = engine["command"]
    assert words[words.index("--lora-modules") + 1] == "mine=/adapters/mine"
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "/draft"
    assert [v["target"] for v in engine["volumes"]] == ["/model", "/draft", "/adapters/mine"]


def test_a_volume_cannot_hold_two_folders_of_one_name(tmp_path):
    texts = []
    for place in ("a", "b"):
        own = tmp_path / place / "adapter"
        own.mkdir(parents=True)
        (own / "adapter_config.json").write_text('{"r": 8}')
        (own / "adapter_model.safetensors").write_bytes(b"")
        texts.append(f"{place}={own}")
    both = adapters.parse(texts, is_gguf=False)
    assert kubernetes(plan(adapters=adapters.parse(texts[:1], is_gguf=False)))
    with pytest.raises(EngineError, match=r"a/adapter and .*b/adapter would be one folder"):
        kubernetes(plan(adapters=both))


def test_a_folder_to_be_is_taken_from_beside_the_file():
    engine = yaml.safe_load(compose(plan(folder="out/fp8-dynamic")))["services"]["engine"]
    assert engine["volumes"][0]["source"] == "./out/fp8-dynamic"
    assert engine["command"][0] == "/model"


def test_only_paths_are_changed_for_the_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    made = plan(folder="out").with_extra(["--layout", "--x=out/a", "about"])
    engine = yaml.safe_load(compose(made))["services"]["engine"]
    assert engine["command"][0] == "/model"
    assert engine["command"][-3:] == ["--layout", "--x=/model/a", "about"]
    assert engine["volumes"][0]["source"] == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("gpu", "image"),
    [("RTX4090", "server-cuda"), ("MI300X", "server-rocm")],
)
def test_gguf_files_run_in_llama_cpp(gpu, image):
    engine = yaml.safe_load(compose(plan("gguf-q4_k_m", gpu)))["services"]["engine"]
    assert engine["image"] == f"ghcr.io/ggml-org/llama.cpp:{image}"
    assert engine["command"][:2] == ["-m", "/model/8B-Q4_K_M.gguf"]
    assert ("devices" in engine) == (gpu == "MI300X")


def test_a_device_without_images_is_refused():
    with pytest.raises(HardwareError, match="no default image of llama"):
        compose(plan("gguf-q4_k_m", "M3 Max"))


def test_the_manifest_has_probes_gpus_shared_memory_and_scraping():
    text = kubernetes(plan(count=2))
    assert "&id" not in text
    deployment, service = yaml.safe_load_all(text)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert all(isinstance(value, str) for value in annotations.values())
    (engine,) = template["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "http"}
    startup = engine["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 180
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    mounted = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert mounted == {"models": "/model", "shm": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert set(volumes) == set(mounted)
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == engine["ports"][0]["name"]


def test_larger_models_may_take_longer_to_start():
    def seconds(name):
        deployment = next(yaml.safe_load_all(kubernetes(plan(name, "H200"))))
        (engine,) = deployment["spec"]["template"]["spec"]["containers"]
        return engine["startupProbe"]["failureThreshold"]

    assert seconds("fp8-dynamic") > seconds("awq-w4a16")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp8-dynamic+kv-fp8", "fp8-dynamic-kv-fp8"), ("8B_Q4", "model-8b-q4"), ("--", "model")],
)
def test_names_become_what_kubernetes_takes(name, expected):
    assert label(name) == expected


def test_the_dashboard_speaks_of_metrics_that_vllm_has():
    data = grafana(plan(draft=ngrams()), Targets(0.5))
    assert json.loads(json.dumps(data)) == data
    assert data["templating"]["list"][0]["type"] == "datasource"
    expressions = [t["expr"] for panel in data["panels"] for t in panel["targets"]]
    assert set().union(*map(metrics_in, expressions)) == VLLM
    assert all('{model_name="fp8-dynamic"}' in expression for expression in expressions)
    assert len({panel["id"] for panel in data["panels"]}) == len(data["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in data["panels"]]
    assert len(set(places)) == len(places)
    plain = grafana(plan())
    assert not any("spec_decode" in json.dumps(panel) for panel in plain["panels"])


def rules(made, ttft=1.0):
    (group,) = yaml.safe_load(alerts(made, Targets(ttft)))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_alerts_are_on_the_cache_the_queue_and_the_first_token():
    found = rules(plan(users=40, context=2048))
    assert set(found) == {
        "KVCacheNearlyFull", "RequestsWait", "FirstTokenIsSlow", "TokensAreSlow",
        "PrefixCacheHitsFell", "RequestsThrownOut", "EngineIsDown",
    }  # fmt: skip
    assert found["KVCacheNearlyFull"]["expr"].endswith("> 0.9")
    assert found["RequestsWait"]["expr"].endswith("> 10")
    for rule in found.values():
        assert metrics_in(rule["expr"]) <= VLLM
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


@pytest.mark.parametrize(("target_s", "limit"), [(1.0, 1.0), (0.3, 0.5), (9999, 2560.0)])
def test_a_target_between_two_buckets_is_the_next_one_and_says_so(target_s, limit):
    rule = rules(plan(), target_s)["FirstTokenIsSlow"]
    assert rule["expr"].endswith(f"> {limit:g}")
    assert limit in TTFT_BUCKETS
    assert ("asked for" in rule["annotations"]["summary"]) == (target_s != limit)


def test_llama_cpp_has_metrics_of_its_own():
    made = plan("gguf-q4_k_m", "RTX4090")
    expressions = [t["expr"] for panel in grafana(made)["panels"] for t in panel["targets"]]
    assert set().union(*map(metrics_in, expressions)) == LLAMA_CPP
    assert set(rules(made)) == {"RequestsWait", "EngineIsDown"}


def test_kinds_are_known_by_name():
    assert list(emit.files(plan(), "grafana")) == ["dashboard.json", "alerts.yaml"]
    with pytest.raises(UnknownName, match="Did you mean compose"):
        emit.files(plan(), "compos")


def test_the_pages_and_the_images_are_of_one_version():
    docs = Path(__file__).parents[2] / "docs"
    page, measured = ((docs / name).read_text() for name in ("serving.md", "measured.md"))
    image = yaml.safe_load(compose(plan()))["services"]["engine"]["image"]
    assert image.endswith(f":v{VERSION}")
    assert f"images of vLLM {VERSION}." in " ".join(measured.split())
    assert "(measured.md#checkpoints-in-vllm)" in page
    # What the page says was tried with it too; recorded results name their own version.
    written = re.sub(r"<!-- figures: .*?<!-- /figures -->", "", page, flags=re.S)
    assert set(re.findall(r"vLLM (\d+\.\d+\.\d+)", written)) == {VERSION}
