"""``--hf CONFIG``: model and inputs from a configuration of Hugging Face transformers, on the meta device.

Nothing is downloaded. The configuration is a file, a folder, a model type of transformers, or in the local cache.
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

#: Tokens of a sequence without ``--sequence``, if the model takes so many.
_SEQUENCE = 1024

#: Automatic classes whose models compute a loss from labels, in the order in which they are tried. Encoders have a
#: causal class as well.
_AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")


def add_hf_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``--hf`` and ``--sequence``."""
    parser.add_argument(
        "--hf",
        metavar="CONFIG",
        help="instead of a factory: config.json or its folder, a model type of transformers (llama), or a name in the "
        "local cache; needs transformers, downloads nothing",
    )
    parser.add_argument(
        "--sequence", type=int, metavar="N", help=f"tokens of a sequence, with --hf (default {_SEQUENCE})"
    )


def hf_factory(options: argparse.Namespace) -> HfFactory | None:
    """What makes the model of ``--hf``; None without.

    Raises:
        UsageError: both a factory and ``--hf``, or neither; a size below 1; options of ``--hf`` without it.
    """
    if options.hf is None:
        if options.factory is None:
            raise UsageError("name a model: PKG.MODULE:FACTORY, or --hf CONFIG")
        if options.sequence is not None or isinstance(
            options.batch, int
        ):  # a sweep reads its batch sizes from a text
            raise UsageError("--batch and --sequence go with --hf; a factory makes its own inputs")
        return None
    if options.factory is not None:
        raise UsageError(f"{options.factory} and --hf {options.hf}: name one model")
    if any(isinstance(size, int) and size < 1 for size in (options.batch, options.sequence)):
        raise UsageError("--batch and --sequence: give whole numbers, at least 1")
    return HfFactory(options.hf, options.sequence)


@dataclass(frozen=True, slots=True)
class HfFactory:
    """Makes a model with inputs for a batch size; it pickles.

    Attributes:
        config: a path or a name.
        sequence: tokens of a sequence; None for the default.
    """

    config: str
    sequence: int | None

    def __call__(self, batch: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Model, positional and keyword inputs: tokens, which are their own labels.

        Raises:
            UsageError: transformers is missing, the configuration cannot be read, or its model takes no tokens or
                cannot be made.
        """
        import torch

        try:
            import transformers
        except ImportError as error:
            raise UsageError(
                f"--hf {self.config}: transformers is not installed; pip install transformers, or name a factory"
            ) from error
        config = self._read(transformers)
        with torch.device("meta"):
            model = self._made(transformers, config)
            tokens = torch.zeros(batch, self._length(config), dtype=torch.long)
        return model, (), {"input_ids": tokens, "labels": tokens}

    def _read(self, transformers: Any) -> Any:
        path = Path(self.config)
        if not path.exists() and self.config in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.for_model(self.config)
        try:
            return transformers.AutoConfig.from_pretrained(self.config, local_files_only=True)
        except Exception as error:  # transformers raises errors of many kinds, of several lines
            if path.exists():
                first = str(error).strip().splitlines() or [type(error).__name__]
                raise UsageError(f"--hf {self.config} cannot be read: {first[0]}") from error
            raise UsageError(
                f"--hf {self.config}: there is no such file or folder, transformers has no such model type, and the "
                "local cache has no such name; nothing is downloaded: give the path of a config.json"
            ) from error

    def _made(self, transformers: Any, config: Any) -> Any:
        try:
            return self._model(transformers, config)
        except UsageError:
            raise
        except Exception as error:  # what does not fit together in a configuration shows in many ways
            first = (str(error).strip().splitlines() or [""])[0]
            raise UsageError(
                f"--hf {self.config}: transformers cannot make the model of this configuration: "
                f"{type(error).__name__}: {first}; correct the configuration"
            ) from error

    def _model(self, transformers: Any, config: Any) -> Any:
        import torch

        if hasattr(config, "use_cache"):
            config.use_cache = False
        for architecture in config.architectures or ():
            kind: Any = getattr(transformers, architecture, None)
            if _computes_loss(kind):
                return kind(config)
        for name in _AUTO_CLASSES:
            auto = getattr(transformers, name)
            if type(config) in auto._model_mapping:
                return auto.from_config(config, dtype=torch.float32)  # as a class does when it is called
        raise UsageError(
            f"--hf {self.config}: no language model of transformers has a {type(config).__name__}; write a factory "
            "that returns the model and its inputs"
        )

    def _length(self, config: Any) -> int:
        most = getattr(config, "max_position_embeddings", None)
        if self.sequence is None:
            return min(_SEQUENCE, most) if isinstance(most, int) and most > 0 else _SEQUENCE
        if isinstance(most, int) and 0 < most < self.sequence:
            raise UsageError(
                f"--sequence {self.sequence}: the model of --hf {self.config} takes {most} positions at most"
            )
        return self.sequence


def _computes_loss(kind: Any) -> bool:
    """Whether a class of transformers takes tokens and labels."""
    return kind is not None and {"input_ids", "labels"} <= set(inspect.signature(kind.forward).parameters)
