"""What the parts of the engine have in common."""

from __future__ import annotations

from penstock.storage.sqlite.session import Session

__all__ = ["Verbs"]


class Verbs:
    """A part of the engine: verbs that hand their work to the session of the storage they are mixed into."""

    _namespace: str

    @property
    def _opened(self) -> Session:
        """The session of this process. Raises ``StorageError`` if the storage is not open."""
        raise NotImplementedError
