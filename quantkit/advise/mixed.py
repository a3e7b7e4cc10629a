"""Room for weights on a GPU, and the mixed formats that fit into it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.advise import memory, shape
from quantkit.errors import HardwareError
from quantkit.hardware import gpus, support
from quantkit.mixed.budget import Budget, Choice, one_percent_more
from quantkit.mixed.run import MixedOptions, choose
from quantkit.mixed.table import Table
from quantkit.model.source import ModelSource, context_of
from quantkit.recipe import load


@dataclass(frozen=True)
class Advice:
    """Mixed formats for a GPU's memory."""

    choice: Choice

    @property
    def words(self) -> list[str]:
        """Sentences for display."""
        choice = self.choice
        if choice.recipe is None:
            return choice.notes
        first = (
            f"Mixed formats in {choice.budget.description}: {choice.bits:.2f} bits per quantised "
            f"weight, predicted KL {choice.allocation.cost:.3g} (`quantkit quantize --fit ... "
            "--mixed` makes it)."
        )
        more = one_percent_more(choice)
        return [first, *([more] if more else []), *choice.notes]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        choice = self.choice
        return {
            "size_bytes": choice.budget.size_bytes,
            "bits_per_weight": choice.bits,
            "predicted_kl": choice.allocation.cost,
            "units": choice.of_unit(),
            "words": self.words,
        }


def advice(
    model: str, table: Path, gpu: str, count: int, context: int | None, users: int
) -> Advice:
    """What a model's sensitivity table recommends for a GPU."""
    known = Table.read(table)
    asked = budget(model, gpu, count, context, users, known.engine)
    wanted = MixedOptions(asked, engine=known.engine)
    return Advice(choose(ModelSource.open(model), wanted, known))


def budget(
    model: str, gpu: str, count: int, context: int | None, users: int, engine: str = "vllm"
) -> Budget:
    """Room for weights on GPUs, beside the keys and values of this many users."""
    device, of_model = gpus.find(gpu), shape.of(model)
    tokens = min(8192, context_of(of_model.config)) if context is None else context
    recipe = load("gguf-q8_0") if engine == "llama.cpp" else None
    fit = memory.fits(of_model, recipe, device, count, tokens, users)
    room = fit.usable_bytes - fit.overhead_bytes - users * fit.user_bytes - fit.shared_bytes
    where = f"{count} x {device.name}" if count > 1 else device.name
    plural = "1 user" if users == 1 else f"{users} users"
    if room <= 0:
        raise HardwareError(
            f"{where} has no room for weights: {plural} of {tokens} tokens take "
            f"{users * fit.user_bytes / memory.GIB:.1f} GiB and the engine "
            f"{fit.overhead_bytes / memory.GIB:.1f} GiB of {fit.usable_bytes / memory.GIB:.1f} GiB"
        )
    slug = device.name.lower().replace(" ", "-")
    words = f"{room * count / memory.GIB:.2f} GiB on {where} (context {tokens}, {plural})"
    return Budget(
        size_bytes=room * count,
        words=words,
        name=f"mixed-{slug}",
        only_common=support.runs(device, "w5a16").how == "no",
    )
