"""The memory of an optimizer's step."""

from __future__ import annotations

from autopar.cost_model.memory import optimizer_temporaries
from autopar.ir.state_buckets import NEIGHBOURS_ON_GPU, state_buckets, update_buckets
from autopar.memory.gradient_memory import LocalParameter
from autopar.memory.live_memory import Change
from autopar.memory.local_parameters import LocalParameters
from autopar.memory.schedule_walk import ActionMemory
from autopar.memory.step_settings import StepSettings


def optimizer_step(
    parameters: list[LocalParameter],
    local: LocalParameters,
    settings: StepSettings,
    together: bool,
) -> ActionMemory:
    """The most bytes that the optimizer's step takes besides what lasts: its temporaries, and the
    buckets of state that come from the host. State that stays on the device is updated first.

    Args:
        parameters: those with a gradient.
        local: the parameters of the program.
        together: whether a step updates parameters together: on a GPU all, on a CPU those of a
            bucket.
    """
    sizes = {p.name: p.stored_bytes for p in parameters}
    names = local.in_order_of_model(sizes)
    buckets = [[name for name in names if not local.is_offloaded(name)]]
    buckets += state_buckets(filter(local.is_offloaded, names), sizes.__getitem__)
    state = [sum(local.memory(name).optimizer for name in b) for b in buckets]
    state[0] = 0
    is_on_gpu = settings.device_type == "cuda"
    neighbours = NEIGHBOURS_ON_GPU if is_on_gpu else 0
    most = 0
    for i, bucket in enumerate(buckets):
        on_device = sum(state[max(i - neighbours, 0) : i + neighbours + 1])
        stored = [sizes[name] for name in bucket]
        updated = [stored] if is_on_gpu else update_buckets(stored, lambda nbytes: nbytes)
        temporary = max(
            (optimizer_temporaries(each, settings.optimizer, together) for each in updated),
            default=0,
        )
        most = max(most, on_device + temporary)
    memory = ActionMemory.temporary("optimizer", most)
    if len(buckets) == 1 and most == sum(sizes.values()):  # a tensor for each parameter
        made = [Change((name, "temporary"), nbytes) for name, nbytes in sizes.items()]
        return memory.recorded([*made, *(Change(c.tensor, -c.nbytes) for c in made)])
    return memory
