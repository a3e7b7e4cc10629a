"""GGUF files on a server's plan: ours are known by their manifest, others by their header."""

import shutil

import gguf
import numpy
import pytest

from quantkit.hardware import gpus
from quantkit.serving import adapters, plan, target


@pytest.fixture
def mixture(tmp_path):
    """The header and sizes of a mixture of experts as llama.cpp's converter names them; sparse."""
    path = tmp_path / "mixture.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    n_layers, width, n_experts = 8, 512, 32
    writer.add_block_count(n_layers)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(1024)
    writer.add_expert_feed_forward_length(256)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_context_length(4096)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(4)
    writer.add_tensor("token_embd.weight", numpy.zeros((2048, width), numpy.float16))
    writer.add_tensor("output.weight", numpy.zeros((2048, width), numpy.float16))
    for layer in range(n_layers):
        writer.add_tensor(f"blk.{layer}.attn_q.weight", numpy.zeros((512, width), numpy.float16))
        experts = numpy.zeros((n_experts, 256, width), numpy.float16)
        writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_ours_is_known_as_its_folder_is(run_cli, demo_made, tmp_path):
    folder = demo_made / "gguf-q8_0"
    (path,) = folder.glob("demo*.gguf")
    found = target.open_target(path)
    assert (found.has_manifest, found.recipe.gguf) == (True, "Q8_0")
    assert found == target.open_target(folder)
    result = run_cli(["serve", path, "--gpu", "L4", "--dry-run", "--json"])
    assert result.code == 0, result.stderr
    assert "is unknown" not in result.stdout
    # Taken away from its manifest it is somebody's file, with a header that says the same.
    alone = shutil.copy(path, tmp_path / "alone.gguf")
    other = target.open_target(tmp_path / alone.name)
    assert not other.has_manifest
    ours, theirs = (
        plan.make(one, plan.Demand(gpus.find("L4"), context=256)).size.fit for one in (found, other)
    )
    assert theirs.weight_bytes == ours.weight_bytes
    assert theirs.user_bytes == ours.user_bytes


def test_a_mixture_that_does_not_fit_leaves_experts_on_the_cpu(mixture):
    found = target.open_target(mixture)
    sizes = 8 * (512 * 512 + 32 * 256 * 512) * 2 + 2 * 2048 * 512 * 2
    assert found.shape.size_bytes == sizes
    whole = plan.make(found, plan.Demand(gpus.find("L4"), context=1024))
    assert whole.value("--n-gpu-layers") == "999"
    # The engine takes half a GiB and some; half of the experts have room beside it.
    fit = whole.size.fit
    half = fit.overhead_bytes + fit.weight_bytes - 4 * 32 * 256 * 512 * 2 + fit.user_bytes
    small = gpus.describe(f"{int(half / 0.9 / (15 / 16) / 2**20) + 2}MiB", "500GB/s")
    partly = plan.make(found, plan.Demand(small, context=1024, users=1))
    left_out = int(partly.value("--n-cpu-moe"))
    assert 3 <= left_out <= 5
    assert partly.value("--n-gpu-layers") == "999"
    assert partly.size.fit.host_bytes >= left_out * 32 * 256 * 512 * 2
    assert any("in host memory" in note for note in partly.notes)


def test_llama_cpp_adds_adapters_by_request(mixture, tmp_path):
    for name in ("one", "two"):
        (tmp_path / "loras").mkdir(exist_ok=True)
        (tmp_path / "loras" / f"{name}.gguf").write_bytes(b"")
    found = adapters.parse([str(tmp_path / "loras")], is_gguf=True)
    assert [one.name for one in found] == ["one", "two"]
    made = plan.make(
        target.open_target(mixture), plan.Demand(gpus.find("L4"), context=1024, adapters=found)
    )
    flags = [flag for flag in made.flags if flag.name.startswith("--lora")]
    assert [flag.name for flag in flags] == ["--lora", "--lora", "--lora-init-without-apply"]
    assert '"lora": [{"id": 1, "scale": 1}]' in flags[1].why
