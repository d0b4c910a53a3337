"""The Llama of ``examples/``, as a module that tests import."""

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "llama_model", Path(__file__).parents[2] / "examples" / "llama_model.py"
)
llama_model = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_model"] = llama_model  # dataclasses look their module up
_SPEC.loader.exec_module(llama_model)
