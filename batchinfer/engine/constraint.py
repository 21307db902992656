"""What structured output asks of the engine: which tokens may come next, asked and told token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class TokenConstraint(Protocol):
    """One row's constraint. The engine asks :meth:`mask` before each token and tells :meth:`accept` after it.

    A step that fails is computed again: :meth:`mask` may then be asked twice for one token.
    """

    def mask(self) -> torch.Tensor | None:
        """The tokens that may come now; None if all may.

        Bits of int32 words ``[ceil(vocab_size / 32)]`` on the CPU; token 0 is the lowest bit of the first word.
        """

    def accept(self, token_id: int) -> None:
        """A token was generated.

        Raises:
            Exception: whatever is raised ends the row, and only it, with an error that quotes it.
        """
