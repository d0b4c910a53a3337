"""A model of torchtitan, sharded and compiled by graphshard: ``with_graphshard(model_registry("debugmodel"))``.

torchtitan gives its trainer a ``ModelSpec``. Its ``parallelize_fn`` applies tensor parallelism, activation
checkpointing, per-block compilation and FSDP2. The spec returned here calls the same function with torch's
``fully_shard`` replaced, without per-block compilation, and compiles the whole model afterwards.

In a config function of torchtitan (``--module``, ``--config``)::

    def llama3_debugmodel_graphshard() -> Trainer.Config:
        config = llama3_debugmodel()
        config.model_spec = with_graphshard(config.model_spec)
        return config
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

import graphshard


def with_graphshard(spec: Any, options: dict[str, Any] | None = None) -> Any:
    """The same model of torchtitan, whose ``parallelize_fn`` shards with graphshard.

    Args:
        spec: a ``torchtitan.protocols.model_spec.ModelSpec``.
        options: of the backend, if the job compiles (``--compile.enable``).
    """

    def parallelize(model: nn.Module, *, compile_config: Any, **settings: Any) -> nn.Module:
        with graphshard.patch_torch():
            sharded = spec.parallelize_fn(
                model, compile_config=replace(compile_config, enable=False), **settings
            )
        if compile_config.enable and "model" in compile_config.components:
            sharded.compile(backend="graphshard", options=options)
        return sharded

    return replace(spec, parallelize_fn=parallelize)
