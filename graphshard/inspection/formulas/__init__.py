"""Formulas of a step's cost in batch, sequence and ranks, fitted to samples and checked.

Imports: ``inspection``.

Read first: ``fitting`` (the public function); then ``sampling``, ``mesh``, ``links``, ``polynomials``.
"""

from .fitting import formulas

__all__ = [
    "formulas",
]
