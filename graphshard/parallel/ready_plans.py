"""Ready plans: placements of the usual blocks of transformers, found by the usual names of their layers.

A plan is a list of roles: what a layer does, how its weight is cut, and the names that it has in known models. Columns
are cut where a block expands and rows where it contracts, so a block needs one sum over the ranks for its attention and
one for its MLP (Megatron-LM, Shoeybi et al. 2019, section 3). Embedding and output layer are cut along the vocabulary.
In a plan along the sequence the values between blocks, with their norms, are cut along the sequence too (Korthikanti et
al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from ..errors import ShardingError
from ..setting_checks import check_ready_plan
from .names import matches
from .styles import Stated

#: Added to the name of a plan for the plan along the sequence.
_ALONG_SEQUENCE = "-sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """Layers that do the same in every block, or once in a model.

    Attributes:
        what: its name in messages.
        names: patterns of the last parts of a layer's path. They name a module, or parameters such as
            ``self_attn.in_proj_weight``, without the ending.
        cut: "columns" (of what the layer gives), "rows" (of what it takes), "vocabulary", "block" or "norm".
        in_blocks: the layer is in a numbered block, such as ``layers.0``; others are outside of all blocks.
        is_needed: a model without it does not fit the plan.
    """

    what: str
    names: tuple[str, ...]
    cut: str
    in_blocks: bool = True
    is_needed: bool = True


def _attention(projections: Sequence[str], outputs: Sequence[str]) -> tuple[_Role, ...]:
    return (
        _Role(what="projections of attention to heads", names=tuple(projections), cut="columns"),
        _Role(what="output of attention", names=tuple(outputs), cut="rows"),
    )


def _mlp(expanding: Sequence[str], contracting: Sequence[str]) -> tuple[_Role, ...]:
    return (
        _Role(what="expanding layers of the MLP", names=tuple(expanding), cut="columns"),
        _Role(what="contracting layers of the MLP", names=tuple(contracting), cut="rows"),
    )


def _vocabulary(embeddings: Sequence[str], heads: Sequence[str]) -> tuple[_Role, ...]:
    found = [
        _Role(what="output layer", names=tuple(heads), cut="vocabulary", in_blocks=False, is_needed=False)
    ]
    if embeddings:
        what = "token embedding"
        found.append(
            _Role(what=what, names=tuple(embeddings), cut="vocabulary", in_blocks=False, is_needed=False)
        )
    return tuple(found)


#: Names of attention and MLP as modules of a block.
_PARTS = _Role(
    what="attention and MLP",
    names=("attention", "attn", "self_attn", "self_attention", "feed_forward", "mlp", "ffn"),
    cut="block",
)
_NORM = _Role(
    what="last norm",
    names=("norm", "ln_f", "final_norm", "final_layer_norm"),
    cut="norm",
    in_blocks=False,
    is_needed=False,
)

#: The roles of each plan. A layer has the first role that fits its name.
_PLANS: Mapping[str, tuple[_Role, ...]] = {
    "llama": (
        *_attention(
            ("attention.w[qkv]", "self_attn.[qkv]_proj", "attn.[qkv]_proj", "attention.query", "attention.key",
             "attention.value"),
            ("attention.wo", "self_attn.o_proj", "attn.output_proj", "attention.output"),
        ),
        *_mlp(
            ("feed_forward.w[13]", "mlp.gate_proj", "mlp.up_proj", "mlp.w[13]", "feed_forward.gate", "feed_forward.up"),
            ("feed_forward.w2", "mlp.down_proj", "mlp.w2", "feed_forward.down"),
        ),
        *_vocabulary(("tok_embeddings", "embed_tokens", "tokens"), ("output", "lm_head")),
    ),
    "gpt": (
        *_attention(
            ("attn.c_attn", "attention.query_key_value", "attn.qkv", "attn.[qkv]_proj", "self_attn.[qkv]_proj",
             "query_key_value"),
            ("attn.c_proj", "attention.output", "attention.dense", "attn.proj", "attn.out_proj", "self_attn.out_proj",
             "projection"),
        ),
        *_mlp(
            ("mlp.c_fc", "mlp.0", "mlp.fc1", "mlp.dense_h_to_4h", "fc1", "expand"),
            ("mlp.c_proj", "mlp.2", "mlp.fc2", "mlp.dense_4h_to_h", "fc2", "contract"),
        ),
        *_vocabulary(
            ("wte", "token_embedding", "tok_embeddings", "embed_tokens", "embed_in", "tokens"),
            ("lm_head", "head", "output", "embed_out"),
        ),
    ),
    "vit": (
        *_attention(
            ("attn.qkv", "attn.[qkv]", "attention.attention.query", "attention.attention.key",
             "attention.attention.value", "attention.w[qkv]", "self_attention.in_proj", "self_attn.in_proj"),
            ("attn.proj", "attention.output.dense", "attention.wo", "self_attention.out_proj", "self_attn.out_proj"),
        ),
        *_mlp(
            ("mlp.fc1", "intermediate.dense", "mlp.0", "linear1", "expand"),
            ("mlp.fc2", "output.dense", "mlp.3", "mlp.2", "linear2", "contract"),
        ),
        *_vocabulary((), ("head", "heads.head", "classifier")),
    ),
}  # fmt: skip

#: Plans with a variant along the sequence: those of models whose values between blocks have the sequence as dim 1.
_HAVE_SEQUENCE = ("llama", "gpt")

#: The names of all ready plans.
READY_PLANS = (*_PLANS, *(f"{name}{_ALONG_SEQUENCE}" for name in _HAVE_SEQUENCE))


@dataclass(slots=True, kw_only=True)
class _Search:
    """What a search of one model has found: paths by role, and placements."""

    paths: dict[str, list[str]] = field(default_factory=dict)
    stated: Stated = field(default_factory=Stated)


def ready_plan(name: str, module: nn.Module) -> Stated:
    """The placements of a ready plan for the layers of a model.

    Args:
        name: one of :data:`READY_PLANS`.
        module: the model.

    Raises:
        ShardingError: there is no such plan, or the model has no layer for a part of it; says which names it looks for.
    """
    check_ready_plan(name)
    stated, missing = _found(name, module)
    if missing:
        looked = "; ".join(f"no {role.what} ({', '.join(role.names)})" for role in missing)
        some = ", ".join([path for path, _, ending in _layers(module) if ending.endswith("weight")][:8])
        raise ShardingError(
            f"the ready plan {name!r} does not fit {type(module).__name__}: in numbered blocks (layers.0, ...) there "
            f"is {looked}; there are {some}, ...; give placements by name"
        )
    return stated


def fitting_plans(module: nn.Module) -> tuple[dict[str, Stated], dict[str, str]]:
    """The ready plans that fit a model, by name, and for each of the others what the model lacks."""
    fitting, others = {}, {}
    for name in READY_PLANS:
        stated, missing = _found(name, module)
        if missing:
            others[name] = "no " + ", no ".join(role.what for role in missing)
        else:
            fitting[name] = stated
    return fitting, others


def _found(name: str, module: nn.Module) -> tuple[Stated, list[_Role]]:
    """The placements of a plan for the layers that a model has, and the roles that it needs and has no layer for."""
    base, is_along_sequence = name.removesuffix(_ALONG_SEQUENCE), name.endswith(_ALONG_SEQUENCE)
    roles = (*_PLANS[base], *((_PARTS, _NORM) if is_along_sequence else ()))
    found = _Search()
    for path, owner, ending in _layers(module):
        role = next((role for role in _PLANS[base] if _has_role(path, role)), None)
        if role is not None:
            found.paths.setdefault(role.what, []).append(path)
            found.stated.parameters[f"{path}{ending}"] = _placement(role, owner, ending)
    if is_along_sequence:
        _hold_along_sequence(module, _PLANS[base], found)
    return found.stated, [role for role in roles if role.is_needed and role.what not in found.paths]


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Path of each parameter without its ending, its module, and the ending: ``.weight`` or ``_weight``, say."""
    for path, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            kind = name.rpartition("_")[2] if "_" in name else name
            if param is not None and kind in ("weight", "bias"):
                whole = f"{path}.{name}" if path else name
                yield whole[: -len(kind) - 1], owner, whole[-len(kind) - 1 :]


def _has_role(path: str, role: _Role) -> bool:
    parts = path.split(".")
    if any(part.isdecimal() for part in parts[: -1 if role.in_blocks else None]) != role.in_blocks:
        return False
    return any(matches(name, ".".join(parts[-1 - name.count(".") :])) for name in role.names)


def _placement(role: _Role, owner: nn.Module, ending: str) -> Placement:
    is_turned = type(owner).__name__ == "Conv1D" and hasattr(owner, "nf")  # transformers': (inputs, outputs)
    if ending.endswith("bias"):
        return Replicate() if role.cut == "rows" else Shard(0)
    return Shard(int((role.cut == "rows") != is_turned))


def _hold_along_sequence(module: nn.Module, roles: Sequence[_Role], found: _Search) -> None:
    """Cuts the values between blocks along dim 1, and gathers them for the layers whose weights are cut."""
    stated = found.stated
    for path, owner in module.named_modules():
        is_head, is_embedding = (_is_found(path, what, found) for what in ("output layer", "token embedding"))
        if is_embedding or _has_role(path, _NORM) or _is_norm_of_block(path, owner):
            stated.outputs[path] = Shard(1)
        elif is_head:
            stated.inputs[path] = Replicate()
        elif _has_role(path, _PARTS) and _holds_a_layer(path, stated):
            stated.inputs[path], stated.outputs[path] = Replicate(), Shard(1)
            found.paths.setdefault(_PARTS.what, []).append(path)


def _is_norm_of_block(path: str, owner: nn.Module) -> bool:
    """Whether a module is a norm between the parts of a numbered block."""
    parts = path.split(".")
    return len(parts) > 1 and parts[-2].isdecimal() and type(owner).__name__.endswith("Norm")


def _is_found(path: str, what: str, found: _Search) -> bool:
    return path in found.paths.get(what, ())


def _holds_a_layer(path: str, stated: Stated) -> bool:
    return any(name.startswith(f"{path}.") for name in stated.parameters)
