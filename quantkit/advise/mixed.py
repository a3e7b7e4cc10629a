"""How many bytes of weights a GPU has room for, beside what serving needs."""

from quantkit.advise import memory, shape
from quantkit.errors import HardwareError
from quantkit.hardware import gpus
from quantkit.mixed.budget import Budget
from quantkit.model.source import context_of
from quantkit.recipe import load


def budget(
    model: str, gpu: str, count: int, context: int | None, users: int, engine: str = "vllm"
) -> Budget:
    """The room for weights on some GPUs, with keys and values of so many users beside them."""
    device, of_model = gpus.find(gpu), shape.of(model)
    tokens = min(8192, context_of(of_model.config)) if context is None else context
    recipe = load("gguf-q8_0") if engine == "llama.cpp" else None
    fit = memory.fits(of_model, recipe, device, count, tokens, users)
    room = fit.usable_bytes - fit.overhead_bytes - users * fit.user_bytes - fit.shared_bytes
    where = f"{count} x {device.name}" if count > 1 else device.name
    if room <= 0:
        raise HardwareError(
            f"{where} has no room for weights: {users} users of {tokens} tokens take "
            f"{users * fit.user_bytes / memory.GIB:.1f} GiB and the engine "
            f"{fit.overhead_bytes / memory.GIB:.1f} GiB of {fit.usable_bytes / memory.GIB:.1f} GiB"
        )
    slug = device.name.lower().replace(" ", "-")
    words = f"{room * count / memory.GIB:.2f} GiB on {where} (context {tokens}, {users} users)"
    return Budget(size_bytes=room * count, words=words, name=f"mixed-{slug}")
