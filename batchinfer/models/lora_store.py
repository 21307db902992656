"""The adapters that rows of an engine name: opened when they are first named, loaded when they first run."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from batchinfer.models.fused.adapted import AdapterGroup
from batchinfer.models.lora_file import LoraFile, Stamp, stamp_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchinfer.models.fused.adapted import AdapterSlots, Delta

    Deltas = dict[str, Delta]


class LoraStore:
    """Keeps loaded weights within ``max_bytes``; the least recently used go first.

    What a step uses stays until it is done: one whose adapters are larger together holds more for as long as it runs.
    """

    def __init__(self, slots: AdapterSlots, max_bytes: int) -> None:
        self._slots = slots
        self._max_bytes = max_bytes
        # as long as a row or the weights' cache holds one: nothing grows with the number of adapters that rows ever named
        self._opened: WeakValueDictionary[tuple[str, Stamp], LoraFile] = WeakValueDictionary()
        self._loaded: OrderedDict[LoraFile, Deltas] = OrderedDict()
        self.num_loads = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the weights that are loaded."""
        return sum(file.num_bytes for file in self._loaded)

    @property
    def num_loaded(self) -> int:
        """Adapters whose weights are loaded."""
        return len(self._loaded)

    def open(self, path: str) -> LoraFile:
        """An adapter by its folder; the files' content as it is now.

        Raises:
            RowFailure: ``adapter_not_found`` or ``invalid_adapter``.
        """
        folder = Path(path)
        key = (path, stamp_of(folder))
        file = self._opened.get(key)
        if file is None:
            file = self._opened[key] = LoraFile(folder, self._slots)
        return file

    def groups(self, rows: Mapping[LoraFile, Sequence[int]]) -> list[AdapterGroup]:
        """The rows of a step that use adapters, whose weights are loaded if they were not."""
        for file in rows:
            if file in self._loaded:
                self._loaded.move_to_end(file)
        self._make_room(sum(file.num_bytes for file in rows if file not in self._loaded), keep=rows)
        return [AdapterGroup.of(self._deltas(file), places, self._slots.device) for file, places in rows.items()]

    def _deltas(self, file: LoraFile) -> Deltas:
        deltas = self._loaded.get(file)
        if deltas is None:
            deltas = self._loaded[file] = file.load()
            self.num_loads += 1
        return deltas

    def _make_room(self, num_bytes: int, keep: Mapping[LoraFile, Sequence[int]]) -> None:
        held = self.num_bytes
        for file in [file for file in self._loaded if file not in keep]:
            if held + num_bytes <= self._max_bytes:
                return
            del self._loaded[file]
            held -= file.num_bytes
