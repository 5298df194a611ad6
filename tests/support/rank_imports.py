"""What ranks import, for a process that is copied for each of them."""

from importlib import import_module

from splitppo.machine.heavy_imports import heavy_imports

with heavy_imports():
    for module in ("services.actor.role", "services.critic.role", "torch.distributed.tensor.debug"):
        import_module(module)
