"""The front end of FSDP1: ``FullyShardedDataParallel``, over ``fully_shard``.

Imports: ``errors``, ``_compat``, ``fsdp``. No engine of its own: arguments, methods and state dicts are translated.

Read first: ``wrapper`` (the class), ``options`` (its arguments for ``fully_shard``), ``wrapper_state``.
Before sharding: ``meshes``, ``ignored``, ``auto_wrap``, ``materialize``, ``precision``; then ``wrapped_unit``.
Methods: ``training_state`` (may a method run now; ``no_sync``), ``norms``, ``summon``,
``whole_tensors``, ``comm_hooks``.
State dicts: ``state_dict_settings``, ``state_dicts``, ``optimizer_state``, ``state_methods``.
"""

from .wrapper import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
